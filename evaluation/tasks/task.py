"""Task files: what a task reads, what it predicts, how it is scored."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import Problems, UserError, nearest
from common.json_files import load_json
from common.validation import validate

Kind = Literal["classify", "pair", "regress", "tokens", "span", "minimal_pairs", "cloze"]
Format = Literal["tsv", "csv", "jsonl", "conll", "squad", "folders", "dataset"]

TASK_FOLDER = Path(__file__).parent
TABLES = (".csv", ".tsv", ".jsonl")
HELD_OUT = "<held out of train>"  # as a file name: the split is cut from the training file
GROUPS = {
    "glue": ("cola", "sst2", "mrpc", "stsb", "rte", "wnli", "qnli", "qqp", "mnli"),
    "small": ("cola", "sst2", "mrpc", "rte"),
    "clue": ("tnews", "afqmc", "ocnli"),
    "squad": ("squad1", "squad2"),
}
ZERO_SHOT: tuple[Kind, ...] = ("minimal_pairs", "cloze")
# Of each kind: the fields that it reads, of which those after "|" may be left out, and its metrics.
KINDS: dict[Kind, tuple[str, str]] = {
    "classify": ("text label", "accuracy matthews f1 macro_f1"),
    "pair": ("text text_pair label", "accuracy matthews f1 macro_f1"),
    "regress": ("text label | text_pair", "pearson spearman"),
    "tokens": ("tokens label", "entity_f1"),
    "span": ("", "exact_match span_f1"),  # the SQuAD reader fills all fields
    "minimal_pairs": ("good bad | group", "accuracy accuracy_of_mean"),
    "cloze": ("text answer | choices group", "accuracy reciprocal_rank"),
}


class Task(BaseModel):
    """One task. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, str_strip_whitespace=False)

    name: str
    kind: Kind
    format: Format
    metrics: list[str] = Field(min_length=1)  # the first is the one that reports and protocols use
    title: str = ""
    source: str = ""  # where the data can be obtained
    folders: list[str] = ["."]  # below --data; the first that has the files is used
    train: list[str] = []  # alternative names of the file; a glob for several files
    dev: dict[str, list[str]]  # name of the split → alternative names; one split is usually named "dev"
    header: bool = True  # of tsv and csv
    columns: dict[str, str | int] = {}  # field → column name, or its number from 0 where there is no header
    labels: list[str] | None = None  # in the order of their ids; None takes those of the training file, sorted
    skip_labels: list[str] = []  # rows without an agreed label
    positive: str | None = None  # the class that f1 is of
    dataset: str | None = None  # of format "dataset": a folder below --data, or a name on the hub
    configuration: str | None = None
    max_length: int = Field(default=128, ge=8)
    doc_stride: int = Field(default=128, ge=1)  # of span: tokens that two windows of a long text share
    starts_from: str | None = None  # protocol "transfer": the task whose model is fine-tuned further

    @model_validator(mode="after")
    def _check(self) -> "Task":
        if not self.dev:
            raise ValueError('"dev" names no file')
        if not self.train and self.kind not in ZERO_SHOT:
            raise ValueError(f'"train" names no file, but a task of kind "{self.kind}" is fine-tuned')
        fields, metrics = KINDS[self.kind]
        for metric in self.metrics:
            if metric not in metrics.split():
                expected = ", ".join(metrics.split())
                raise ValueError(f'metric "{metric}" does not fit kind "{self.kind}" (expected one of {expected})')
        needed, _, optional = (part.split() for part in fields.partition("|"))
        known = [*needed, *optional]
        for field in self.columns:
            if field not in known:
                raise ValueError(f'"columns" has unknown field "{field}"{nearest(field, known)}')
        implied = {"text", "label"} if self.format == "folders" else set()
        missing = [field for field in needed if field not in self.columns and field not in implied]
        if missing:
            raise ValueError(f'"columns" lacks {", ".join(missing)}, which kind "{self.kind}" needs')
        if (self.kind == "span") != (self.format == "squad"):
            raise ValueError('kind "span" reads format "squad", and no other kind does')
        if "f1" in self.metrics and (self.positive is None or self.labels is None or self.positive not in self.labels):
            raise ValueError('metric "f1" needs "labels" and the "positive" one of them')
        if self.format == "dataset" and self.dataset is None:
            raise ValueError('format "dataset" needs "dataset": a folder below --data or a name on the hub')
        return self

    @property
    def is_zero_shot(self) -> bool:
        return self.kind in ZERO_SHOT

    @property
    def main_metric(self) -> str:
        return self.metrics[0]

    @property
    def shown_name(self) -> str:
        return self.title or self.name

    def split_name(self, split: str) -> str:
        """How results of one evaluation split are called: the task's name, with the split where there are several."""
        return self.name if len(self.dev) == 1 else f"{self.name}/{split}"


def shipped_tasks() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in TASK_FOLDER.glob("*.json")))


def load_task(path: Path) -> Task:
    """Read a task file; a mistake in it becomes one UserError that names the file."""
    content = load_json(path, "a task file (see docs/evaluation.md)")
    return make_task({"name": path.stem, **content}, str(path))


def make_task(content: Mapping[str, Any], where: str) -> Task:
    """A checked task. File names may be given without a list, and one evaluation split without a name."""
    content = dict(content)
    if isinstance(content.get("train"), str):
        content["train"] = [content["train"]]
    if isinstance(dev := content.get("dev"), str | list):
        content["dev"] = {"dev": dev}
    if isinstance(content.get("dev"), dict):
        content["dev"] = {name: [v] if isinstance(v, str) else v for name, v in content["dev"].items()}
    problems = Problems()
    task = validate(Task, content, where, problems, page="docs/evaluation.md")
    problems.raise_if_any()
    assert task is not None
    return task


def choose_tasks(words: Sequence[str], columns: Mapping[str, str | None]) -> list[Task]:
    """The tasks that --tasks names: groups, shipped names, task files and labelled tables.

    `columns`: what --text, --text_pair and --label say; they describe every labelled table among `words`.
    """
    chosen: dict[str, Task] = {}
    for word in words:
        for task in _tasks_of(word, columns):
            if task.name in chosen and chosen[task.name] != task:
                raise UserError(f"--tasks {word}: two tasks have the name {task.name!r}. Rename one of the files.")
            chosen[task.name] = task
    return list(chosen.values())


def _tasks_of(word: str, columns: Mapping[str, str | None]) -> list[Task]:
    if word in GROUPS:
        return [load_task(TASK_FOLDER / f"{name}.json") for name in GROUPS[word]]
    if word in shipped_tasks():
        return [load_task(TASK_FOLDER / f"{word}.json")]
    path = Path(word)
    if (suffix := path.suffix.lower()) in (".json", *TABLES):
        if not path.is_file():
            raise UserError(f"--tasks {word}: no such file; expected an existing one. Correct the path.")
        return [load_task(path) if suffix == ".json" else task_of_table(path, columns)]
    known = [*GROUPS, *shipped_tasks()]
    if suffix:
        raise UserError(
            f"--tasks {word}: not a kind of file that is read here. Expected a task file (.json), a labelled table "
            f"({', '.join(TABLES)}), or the name of a task that --help lists."
        )
    raise UserError(f"--tasks {word}: unknown task{nearest(word, known)} Known: {', '.join(known)}.")


def task_of_table(path: Path, columns: Mapping[str, str | None]) -> Task:
    """A task for one labelled table, of which a tenth is held out as the evaluation split."""
    if columns.get("text") is None or columns.get("label") is None:
        raise UserError(
            f"--tasks {path}: a labelled table needs --text and --label, the names of its columns. "
            f"For example --tasks {path} --text text --label label."
        )
    fields = {field: column for field, column in columns.items() if column is not None}
    return make_task(
        {
            "name": path.stem,
            "kind": "pair" if "text_pair" in fields else "classify",
            "format": path.suffix.lower().removeprefix("."),
            "metrics": ["accuracy", "macro_f1"],
            "folders": [str(path.parent.resolve())],
            "train": [path.name],
            "dev": {"held_out": [HELD_OUT]},
            "columns": fields,
        },
        str(path),
    )
