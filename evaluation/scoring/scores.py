"""Predictions → scores: gold labels, baselines, and whether a run collapsed."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from evaluation.scoring.metrics import Metric, make_metric
from evaluation.tasks.task import Task
from evaluation.tasks.task_data import TaskData


def metrics_of(task: Task, num_labels: int) -> dict[str, Metric]:
    positive = task.labels.index(task.positive) if task.labels and task.positive else 1
    return {name: make_metric(name, num_labels, positive) for name in task.metrics}


def gold_of(data: TaskData, split: str) -> Any:
    """What predictions are compared with; None for zero-shot tasks, whose rows are judged one by one."""
    rows = data.dev[split]
    if data.task.is_zero_shot:
        return None
    if data.task.kind == "span":
        return [[text for text, _ in row["answers"]] for row in rows]
    return [row["label"] for row in rows]


def score(data: TaskData, predictions: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{split: {metric: value}}"""
    metrics = metrics_of(data.task, len(data.labels))
    return {
        split: {name: metric.value(gold_of(data, split), found) for name, metric in metrics.items()}
        for split, found in predictions.items()
    }


def majority_scores(data: TaskData) -> dict[str, dict[str, float]]:
    return score(data, {split: _majority_predictions(data, split) for split in data.dev})


def _majority_predictions(data: TaskData, split: str) -> Any:
    """What needs no model: the most frequent class, the mean, no entity, no answer; chance where choices are given."""
    rows, kind = data.dev[split], data.task.kind
    if kind == "minimal_pairs":
        return {name: [0.5] * len(rows) for name in data.task.metrics}
    if kind == "cloze":
        return {name: [_chance(row, name) for row in rows] for name in data.task.metrics}
    if kind == "span":
        return [""] * len(rows)
    if kind == "tokens":
        return [["O"] * len(row["tokens"]) for row in rows]
    values = [row["label"] for row in data.train]
    guess = float(np.mean(values)) if kind == "regress" else Counter(values).most_common(1)[0][0]
    return [guess] * len(rows)


def _chance(row: dict[str, Any], metric: str) -> float:
    size = len(row.get("choices") or ())
    if size == 0:
        return 0.0
    return 1 / size if metric == "accuracy" else float(np.mean([1 / rank for rank in range(1, size + 1)]))


def collapse_reason(data: TaskData, predictions: dict[str, Any], failure: str | None) -> str | None:
    """Why a fine-tuning counts as collapsed, None where it does not.

    Collapsed are runs that predict one and the same for every row, and runs whose loss was not finite. Their scores
    count like any other's.
    """
    if failure is not None:
        return failure
    if data.task.is_zero_shot:
        return None
    for split, found in predictions.items():
        if len(found) > 1 and _is_constant(found):
            return f"every prediction on {split} is the same ({_shown(data, found[0])})"
    return None


def _is_constant(found: Sequence[Any]) -> bool:
    if isinstance(found[0], float):
        return float(np.ptp(found)) < 1e-6
    if isinstance(found[0], list):
        return all(tag == "O" for tags in found for tag in tags)
    return len(set(found)) == 1


def _shown(data: TaskData, value: Any) -> str:
    if isinstance(value, int) and data.labels:
        return repr(data.labels[value])
    return "no entity" if isinstance(value, list) else repr(value)
