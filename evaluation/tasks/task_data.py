"""A task's rows with checked labels: where its files are, which classes they have, what is held out."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import Problems, UserError, nearest
from common.files import file_digest
from common.words import counted
from evaluation.tasks.readers import NO_LABELS, Row, Table, read_files, to_bio
from evaluation.tasks.task import HELD_OUT, Task

HELD_OUT_SHARE = 0.1
MAX_HELD_OUT = 2000  # rows; more hardly improve the choice
NO_LABEL_VALUES = frozenset({"", "-1"})


@dataclass(frozen=True)
class TaskData:
    """Rows in which `label` is a class number (classify, pair), a float (regress), or a list of tags (tokens)."""

    task: Task
    labels: tuple[str, ...]  # classes, or tags in BIO; () where there are none
    train: list[Row]
    dev: dict[str, list[Row]]
    digest: str  # of the task and of every file that was read
    notes: tuple[str, ...] = ()  # what was left out

    def dev_digest(self, split: str) -> str:
        """Equal for two runs that were scored on the same rows."""
        content = [[value for key, value in sorted(row.items()) if key != "line"] for row in self.dev[split]]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def load_all(tasks: Sequence[Task], data: Path | None) -> list[TaskData]:
    """Read every task; all mistakes are reported at once."""
    problems = Problems()
    loaded = [problems.attempt(partial(load_data, task, data)) for task in tasks]
    problems.raise_if_any()
    return [item for item in loaded if item is not None]


def load_data(task: Task, data: Path | None) -> TaskData:
    paths = _locate(task, data)
    tables = {name: read_files(task, found) for name, found in paths.items()}
    notes: list[str] = []
    labels = _labels(task, tables.get("train"))
    rows = {name: _checked_rows(task, table, labels, notes) for name, table in tables.items()}
    train = rows.pop("train", [])
    if [HELD_OUT] in task.dev.values():
        train, part = hold_out(task, train)
        rows = dict.fromkeys(task.dev, part)
        size = counted(len(part), "row")
        notes.append(f"{task.name}: {size} of the only file, drawn at random, held out of training and scored on")
    check_metrics_defined(task, rows, labels)
    digests = [file_digest(path) if path.is_file() else _rows_digest(tables[name].rows)
               for name, found in paths.items() for path in found]  # fmt: skip
    digest = hashlib.sha256(repr([task.model_dump(), digests]).encode()).hexdigest()[:16]
    return TaskData(task, labels, train, rows, digest, tuple(notes))


def _rows_digest(rows: list[Row]) -> str:
    """A digest of the rows that were read, for folders and datasets, whose files may be many or elsewhere."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(sorted(row.items())).encode())
    return digest.hexdigest()


def _locate(task: Task, data: Path | None) -> dict[str, tuple[Path, ...]]:
    """The files of each split, from the first folder that has them all."""
    wanted = ({"train": task.train} if task.train else {}) | {
        split: names for split, names in task.dev.items() if names != [HELD_OUT]
    }
    if task.format == "dataset":
        assert task.dataset is not None
        local = None if data is None else data / task.dataset
        root = local if local is not None and local.is_dir() else Path(task.dataset)
        return {split: (root / names[0],) for split, names in wanted.items()}
    if data is None and not all(Path(folder).is_absolute() for folder in task.folders):
        raise UserError(f"task {task.name}: needs --data, the folder that holds {task.folders[0]}.")
    missing: list[str] = []
    for folder in task.folders:
        root = (data or Path()) / folder
        found = {split: _matches(root, names) for split, names in wanted.items()}
        if all(found.values()):
            return found
        if any(found.values()):
            missing += [f"{root / wanted[split][0]}" for split, paths in found.items() if not paths]
    expected = f"{' or '.join(task.folders[:2])} with {', '.join(names[0] for names in wanted.values())}"
    if missing:
        raise UserError(f"task {task.name}: {', '.join(missing)} is missing. Copy it there. Source: {task.source}")
    source = f" The data is published at {task.source}." if task.source else ""
    raise UserError(
        f"task {task.name}: found no data below --data {data} (expected {expected}).{source} Give another --data, or "
        "name only the tasks that are there in --tasks."
    )


def _matches(root: Path, names: Sequence[str]) -> tuple[Path, ...]:
    for name in names:
        found = tuple(sorted(root.glob(name))) if "*" in name else ((root / name,) if (root / name).exists() else ())
        if found:
            return found
    return ()


def _labels(task: Task, train: Table | None) -> tuple[str, ...]:
    if task.labels is not None:
        return tuple(task.labels)
    if train is None or task.kind in ("regress", "span"):
        return ()
    if task.kind == "tokens":
        types = sorted({tag[2:] for row in train.rows for tag in to_bio(row["label"]) if tag != "O"})
        return ("O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI"))
    found = {row["label"] for row in train.rows} - set(task.skip_labels)
    if found <= NO_LABEL_VALUES:
        raise UserError(f"{train.where}: has no labels (found {sorted(found)}). {NO_LABELS}.")
    if "" in found:
        blank = [row["line"] for row in train.rows if row["label"] == ""]
        raise UserError(
            f"{train.where}, line {blank[0]}: has no label ({len(blank):,} of {len(train.rows):,} rows). Label these "
            "rows, or remove them."
        )
    if len(found) < 2:
        raise UserError(f"{train.where}: has one class only ({sorted(found)[0]!r}); there is nothing to learn.")
    if len(found) > min(1000, max(10, len(train.rows) // 2)):
        raise UserError(
            f"{train.where}: the label column has {len(found):,} different values (such as {sorted(found)[0]!r}). "
            'Expected classes; name the column of the label. Scores need a task file of kind "regress".'
        )
    return tuple(sorted(found, key=_number_or_text))


def _number_or_text(label: str) -> tuple[int, float, str]:
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label


def _checked_rows(task: Task, table: Table, labels: tuple[str, ...], notes: list[str]) -> list[Row]:
    rows = table.rows
    if table.num_malformed:
        notes.append(f"{table.where}: skipped {counted(table.num_malformed, 'row')} with a wrong number of columns")
    if task.skip_labels:
        rows = [row for row in rows if row["label"] not in task.skip_labels]
        if len(rows) < len(table.rows):
            skipped = counted(len(table.rows) - len(rows), "row")
            notes.append(f"{table.where}: skipped {skipped} without an agreed label")
    if task.kind in ("classify", "pair"):
        return _with_class_numbers(table, rows, labels)
    if task.kind == "regress":
        return [row | {"label": _score(table, row)} for row in rows]
    if task.kind == "tokens":
        return [_tagged(table, row, labels) for row in rows]
    if task.kind == "span" and all(not row["answers"] for row in rows):
        raise UserError(f"{table.where}: no question has an answer. {NO_LABELS}.")
    return rows


def _with_class_numbers(table: Table, rows: list[Row], labels: tuple[str, ...]) -> list[Row]:
    numbers = {label: number for number, label in enumerate(labels)}
    unknown = Counter(row["label"] for row in rows if row["label"] not in numbers)
    if unknown and set(unknown) <= NO_LABEL_VALUES and sum(unknown.values()) == len(rows):
        raise UserError(f"{table.where}: all {len(rows):,} labels are {next(iter(unknown))!r}. {NO_LABELS}.")
    if unknown:
        label, count = unknown.most_common(1)[0]
        line = next(row["line"] for row in rows if row["label"] == label)
        others = f" and {counted(len(unknown) - 1, 'other label')}" if len(unknown) > 1 else ""
        raise UserError(
            f"{table.where}, line {line}: unknown label {label!r}{nearest(label, labels)} "
            f"({counted(count, 'row')}{others}; "
            f'expected {", ".join(labels[:12])}). Correct the file, or "labels" of the task.'
        )
    return [row | {"label": numbers[row["label"]]} for row in rows]


def _score(table: Table, row: Row) -> float:
    try:
        value = float(row["label"])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{table.where}, line {row['line']}: {row['label']!r} is not a number. {NO_LABELS}.")
    return value


def _tagged(table: Table, row: Row, labels: tuple[str, ...]) -> Row:
    tags = to_bio(row["label"])
    if len(tags) != len(row["tokens"]):
        raise UserError(
            f"{table.where}, line {row['line']}: {len(row['tokens'])} tokens have {len(tags)} tags. Correct the file."
        )
    unknown = next((tag for tag in tags if tag not in labels), None)
    if unknown is not None:
        raise UserError(
            f"{table.where}, line {row['line']}: unknown label {unknown!r}{nearest(unknown, labels)} (expected "
            f'{", ".join(labels)}). Correct the file, or list all tags in "labels" of the task.'
        )
    return row | {"label": tags}


def hold_out(task: Task, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Split off a tenth of the rows (at most MAX_HELD_OUT), class by class; the same rows for any run.

    With few rows, a row of each class, as long as that is at most a fifth of them.
    """
    stratum = "label" if task.kind in ("classify", "pair") else None
    if len(rows) < 10:
        found = counted(len(rows), "row")
        raise UserError(f"task {task.name}: found {found}, expected at least 10, to hold some out of training.")
    order = fixed_order(rows, stratum)
    firsts = _first_of_each_class(rows, order) if stratum else []
    size = max(1, round(HELD_OUT_SHARE * len(rows)), min(len(firsts), len(rows) // 5))
    chosen = set(list(dict.fromkeys([*firsts, *order]))[: min(MAX_HELD_OUT, size)])
    return [row for i, row in enumerate(rows) if i not in chosen], [rows[i] for i in sorted(chosen)]


def _first_of_each_class(rows: Sequence[Row], order: Sequence[int]) -> list[int]:
    """The first row in this order of every class that has more than one."""
    counts, firsts = Counter(row["label"] for row in rows), dict[Any, int]()
    for index in order:
        if counts[rows[index]["label"]] > 1:
            firsts.setdefault(rows[index]["label"], index)
    return list(firsts.values())


def fixed_order(rows: Sequence[Row], stratum: str | None) -> list[int]:
    """The numbers of the rows in a random order, the same in any run.

    With a `stratum`, a field of the rows, every prefix has its values in about their shares.
    """
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    if stratum is None:
        return order
    classes = [rows[index].get(stratum) for index in order]
    counts, seen, places = Counter(classes), Counter[Any](), []
    for index, label in zip(order, classes, strict=True):
        places.append(((seen[label] + 0.5) / counts[label], index))
        seen[label] += 1
    return [index for _, index in sorted(places)]


def selection_split(data: TaskData) -> TaskData:
    """The task with rows held out of train in place of its evaluation files, which are not read for a choice."""
    train, part = hold_out(data.task, data.train)
    return replace(data, train=train, dev={"selection": part})


def check_metrics_defined(task: Task, dev: dict[str, list[Row]], labels: tuple[str, ...]) -> None:
    for split, rows in dev.items():
        if task.kind == "tokens" and all(tag == "O" for row in rows for tag in row["label"]):
            raise UserError(
                f"task {task.name}: no row of {split} has an entity ({counted(len(rows), 'row')}), so "
                f"{task.main_metric} is undefined. "
                'Score on a file with entities, or correct "columns": label must be the column of the tags.'
            )
        if task.kind not in ("classify", "pair", "regress"):
            continue
        values = {row["label"] for row in rows}
        if len(values) < 2:
            shown = labels[rows[0]["label"]] if labels else rows[0]["label"]
            raise UserError(
                f"task {task.name}: every row of {split} has the label {shown!r} ({counted(len(rows), 'row')}), so "
                f"{task.main_metric} is undefined. Score on a file with at least two classes; if it is sorted by label "
                "and was cut, shuffle it before cutting; with --max_dev_rows, allow more rows."
            )
