"""Readers: files as they are published → rows of named fields."""

import csv
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, nearest
from common.words import counted
from evaluation.tasks.task import HELD_OUT, Task

Row = dict[str, Any]
MAX_MALFORMED_SHARE = 0.01  # more rows with a wrong number of columns mean that the file has another format
DOCUMENT_START = "-DOCSTART-"  # in CoNLL files
TAG = re.compile(r"O|[BIESLU]-.+")
NO_LABELS = (
    "Score on a file with labels; the test files of GLUE and CLUE are published without them, their development files "
    "have them"
)


class Table(NamedTuple):
    """Rows of one split and what the reader had to leave out."""

    where: str  # the file, or the folder of several
    rows: list[Row]
    num_malformed: int


def read_files(task: Task, paths: tuple[Path, ...]) -> Table:
    """Rows with the fields of the task's kind, in the order of the files."""
    rows: list[Row] = []
    num_malformed = 0
    for path in paths:
        read, malformed = READERS[task.format](path, task)
        if not read:
            raise UserError(f"{path}: has no rows. Expected at least one; check that the file was copied completely.")
        rows += read
        num_malformed += malformed
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} files)"
    return Table(where, rows, num_malformed)


def read_tsv(path: Path, task: Task) -> tuple[list[Row], int]:
    """Tab-separated values without any quoting, as GLUE's are: a lone quotation mark is text."""
    # Not splitlines(): that also splits at form feeds and at U+2028, which occur inside sentences.
    lines = _read_text(path).split("\n")
    return _tabular(path, task, ((n, line.rstrip("\r").split("\t")) for n, line in enumerate(lines, 1) if line.strip()))


def read_csv(path: Path, task: Task) -> tuple[list[Row], int]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 128 KiB is less than a long article

    def records() -> Iterator[tuple[int, list[str]]]:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            try:
                for record in reader:
                    if record:
                        yield reader.line_num, record
            except csv.Error as error:
                raise UserError(
                    f"{path}, line {reader.line_num}: is not valid CSV ({error}). Export it again."
                ) from None
            except UnicodeDecodeError as error:
                raise _not_utf8(path, error) from None

    return _tabular(path, task, records())


def _tabular(path: Path, task: Task, records: Iterable[tuple[int, list[str]]]) -> tuple[list[Row], int]:
    iterator = iter(records)
    first = next(iterator, None)
    if first is None:
        return [], 0
    width = len(first[1])
    places = {field: _place(path, task, field, first[1]) for field in task.columns}
    rows, malformed, first_malformed = [], 0, 0
    for number, record in iterator if task.header else (first, *iterator):
        if len(record) != width:
            malformed, first_malformed = malformed + 1, first_malformed or number
            continue
        rows.append({field: record[place] for field, place in places.items()} | {"line": number})
    if malformed > max(3, MAX_MALFORMED_SHARE * (len(rows) + malformed)):
        raise UserError(
            f"{path}: {malformed} of {malformed + len(rows)} rows do not have the {width} columns of the first row "
            f"(the first is line {first_malformed}). The file is damaged or not in the format {task.format!r}."
        )
    return rows, malformed


def _place(path: Path, task: Task, field: str, first: list[str]) -> int:
    """The number of the column of a field; `first` is the first row of the file."""
    column, width = task.columns[field], len(first)
    if not task.header and re.fullmatch(r"-?\d+", str(column)):
        column = int(column)
    if isinstance(column, int) and -width <= column < width:
        return column
    if task.header and column in first:
        return first.index(str(column))
    if task.header and isinstance(column, str):
        hint = nearest(column, first)
        remedy = "Name the column as the file does." if hint else _advise(task, field, "column")
        listed = ", ".join(map(repr, first[:12]))
        raise UserError(f"{path}: has no column {column!r}{hint} (found {listed}). {remedy}")
    raise UserError(
        f"{path}: has {counted(width, 'column')}, but {field!r} is column {column} (counted from 0). "
        f'Correct "columns" of task {task.name}. {NO_LABELS if field == "label" else ""}'.rstrip()
    )


def read_jsonl(path: Path, task: Task) -> tuple[list[Row], int]:
    """One JSON object per line; a file that is one JSON array of objects is read too."""
    text = _read_text(path)
    records: Iterable[tuple[int, Any]]
    if text.lstrip().startswith("["):
        records = enumerate(_parse_json(path, text, None), 1)
    else:
        lines = enumerate(text.split("\n"), 1)
        records = ((number, _parse_json(path, line, number)) for number, line in lines if line.strip())
    rows = []
    for number, record in records:
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, found a {type(record).__name__}.")
        rows.append(_pick(f"{path}, line {number}", task, record) | {"line": number})
    return rows, 0


def _pick(where: str, task: Task, record: Row) -> Row:
    row = {}
    for field, column in task.columns.items():
        if column in record:
            value = record[str(column)]
            row[field] = value if isinstance(value, list) else _as_text(value)
        elif field not in ("group", "choices"):
            listed = ", ".join(map(repr, record))
            raise UserError(f"{where}: has no key {column!r} (found {listed}). {_advise(task, field, 'key')}")
    return row


def _advise(task: Task, field: str, what: str) -> str:
    """What to do about a column or key that is missing: of published files, some have no labels."""
    is_table = [HELD_OUT] in task.dev.values()
    return f"{NO_LABELS}." if field == "label" and not is_table else f"Name the {what} as the file does."


def _as_text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def read_folders(path: Path, task: Task) -> tuple[list[Row], int]:
    """A folder per label with one text per file, as in aclImdb."""
    labels = task.labels or sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    rows = []
    for label in labels:
        files = sorted((path / label).glob("*.txt"))
        if not files:
            raise UserError(f"{path / label}: has no .txt files. Expected a folder of texts for each label.")
        rows += [{"text": _read_text(file), "label": label, "line": file.name} for file in files]
    return rows, 0


def read_squad(path: Path, task: Task) -> tuple[list[Row], int]:
    """SQuAD 1.1 and 2.0: one row per question."""
    content = _parse_json(path, _read_text(path), None)
    rows, misplaced = [], 0
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for question in paragraph["qas"]:
                    answers = [(answer["text"], int(answer["answer_start"])) for answer in question["answers"]]
                    misplaced += any(not context.startswith(text, start) for text, start in answers)
                    rows.append(
                        {
                            "id": str(question["id"]),
                            "question": question["question"].lstrip(),
                            "context": context,
                            "answers": [] if question.get("is_impossible") else answers,
                            "line": question["id"],
                        }
                    )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: does not have SQuAD's layout ({type(error).__name__}: {error}). Expected data → paragraphs → "
            f"context, qas → id, question, answers → text, answer_start. {NO_LABELS}."
        ) from None
    if misplaced > max(3, MAX_MALFORMED_SHARE * len(rows)):
        raise UserError(
            f"{path}: {misplaced} of {len(rows)} questions have an answer that is not in the text at answer_start. "
            "The offsets are counted in characters, not in bytes; copy the file again."
        )
    return rows, 0


def read_conll(path: Path, task: Task) -> tuple[list[Row], int]:
    """One token per line, with its tag, and an empty line between sentences; tags of any scheme become BIO."""
    columns = [int(task.columns["tokens"]), int(task.columns["label"])]
    rows: list[Row] = []
    sentence: list[tuple[str, str]] = []
    for number, line in enumerate([*_read_text(path).split("\n"), ""], 1):
        parts = line.split()
        if parts and parts[0] != DOCUMENT_START:
            try:
                token, tag = (parts[column] for column in columns)
            except IndexError:
                raise UserError(
                    f"{path}, line {number}: has {counted(len(parts), 'column')}, but the task reads columns "
                    f'{columns[0]} and {columns[1]} (counted from 0). Correct "columns" of the task, or the file.'
                ) from None
            if not TAG.fullmatch(tag):
                raise UserError(
                    f"{path}, line {number}: {tag!r} is not a tag of entities (expected O, or a prefix such as B- or "
                    'I- and a type). Correct "columns" of the task, or convert the tags.'
                )
            sentence.append((token, tag))
        elif sentence and not parts:
            tokens, tags = zip(*sentence, strict=True)
            rows.append({"tokens": [*tokens], "label": to_bio(tags), "line": number - len(sentence)})
            sentence = []
    return rows, 0


def to_bio(tags: Sequence[str]) -> list[str]:
    """IOB1, BIO, IOBES and BILOU → BIO: every entity starts with B-, and I- continues it."""
    converted, before = [], "O"
    for tag in tags:
        starts = tag[0] in "BSU" or before == "O" or before[2:] != tag[2:] or before[0] in "SULE"
        converted.append(tag if tag == "O" else f"{'B' if starts else 'I'}-{tag[2:]}")
        before = tag
    return converted


def read_dataset(path: Path, task: Task) -> tuple[list[Row], int]:
    """One split of a Hugging Face dataset. `path` is a folder of save_to_disk, or a name on the hub, with the split."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f'task {task.name}: format "dataset" needs the package datasets. Install it: pip install datasets'
        ) from None
    name, split = str(path.parent), path.name
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a network, it reports every attempt
    try:
        is_local = Path(name).is_dir()
        loaded: Any = (
            datasets.load_from_disk(name) if is_local else datasets.load_dataset(name, task.configuration, split=split)
        )
    except Exception as error:  # the library raises many kinds, also of network libraries
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"dataset {name}, split {split!r}: cannot be loaded ({type(error).__name__}: {reason}). "
            "Check the name, the split and the network, or save it below --data with save_to_disk."
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"{name}: has no split {split!r} (found {', '.join(loaded)}). Correct task {task.name}.")
        loaded = loaded[split]
    decode = {column: _label_decoder(feature) for column, feature in loaded.features.items()}
    rows = []
    for number, record in enumerate(loaded):
        named = {column: decode[column](value) for column, value in record.items()}
        rows.append(_pick(f"dataset {name}, split {split!r}, row {number}", task, named) | {"line": number})
    return rows, 0


def _label_decoder(feature: Any) -> Callable[[Any], Any]:
    """Class numbers → names; -1, which stands for "no label", stays."""
    inner = getattr(feature, "feature", None)
    if hasattr(feature, "int2str"):
        return lambda value: feature.int2str(value) if value >= 0 else "-1"
    if inner is not None and hasattr(inner, "int2str"):
        return lambda values: [inner.int2str(value) for value in values]
    return lambda value: value


READERS: dict[str, Callable[[Path, Task], tuple[list[Row], int]]] = {
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "conll": read_conll,
    "squad": read_squad,
    "folders": read_folders,
    "dataset": read_dataset,
}


def _read_text(path: Path) -> str:
    try:
        # newline="\n": a carriage return inside a row does not end it.
        with path.open(encoding="utf-8-sig", newline="\n") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None


def _not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    return UserError(
        f"{path}: is not UTF-8 text (byte {error.start}). Convert it: iconv -f latin1 -t utf-8 {path.name}"
    )


def _parse_json(path: Path, text: str, line: int | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = path if line is None else f"{path}, line {line}"
        raise UserError(f"{where}: is not valid JSON ({error}). Expected one object per line.") from None
