"""What a run writes: report.json with everything, Markdown for people (results.py), gold labels."""

import json
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from common.files import write_atomically
from common.hardware import cpu_name
from common.words import counted
from evaluation.cells import CellStore
from evaluation.results import MIN_ROWS, MIN_STEPS, REPORT, Json, card_section, find_result, markdown
from evaluation.runner import PROTOCOLS, Plan, TaskResult
from evaluation.scoring.scores import gold_of, majority_scores, metrics_of
from evaluation.scoring.significance import NUM_RESAMPLES, summarize
from evaluation.tasks.task_data import TaskData

FORMAT = 1
AVERAGED_FIRST = ({"accuracy", "f1"}, {"pearson", "spearman"})  # metrics of one task, by GLUE's convention


def make_report(plan: Plan, results: Sequence[TaskResult], store: CellStore, command: str) -> Json:
    tasks = [_task_entry(data, split, results, store) for data in plan.tasks for split in data.dev]
    return {
        "format": FORMAT,
        "command": command,
        "protocol": {
            "name": plan.protocol,
            "meaning": PROTOCOLS[plan.protocol],
            "setting": asdict(plan.setting),
            "seeds": list(plan.seeds),
            "untrained_seeds": list(plan.untrained_seeds),
            "masking": plan.masking,
            "num_resamples": NUM_RESAMPLES,
        },
        "machine": {
            "processor": cpu_name(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "accelerate", "tokenizers", "scikit-learn")},
        },
        "models": [
            {"name": model.name, "path": str(model.path), "model_type": model.config.model_type,
             "num_parameters": model.num_parameters, "digest": model.digest}
            for model in plan.models
        ],
        "tasks": tasks,
        "warnings": warnings_of(plan, results),
        "averages": {model.name: _average(tasks, model.name) for model in plan.models},
    }  # fmt: skip


def _task_entry(data: TaskData, split: str, results: Sequence[TaskResult], store: CellStore) -> Json:
    task = data.task
    own = [result for result in results if result.data is data]
    return {
        "name": task.split_name(split),
        "task": task.name,
        "split": split,
        "title": task.shown_name if len(task.dev) == 1 else f"{task.shown_name} {split}",
        "kind": task.kind,
        "metrics": task.metrics,
        "num_train": len(data.train),
        "num_rows": len(data.dev[split]),
        "dev_digest": data.dev_digest(split),
        "majority": majority_scores(data)[split],
        "notes": list(data.notes),
        "results": [_result_entry(result, split, store) for result in own],
    }


def _result_entry(result: TaskResult, split: str, store: CellStore) -> Json:
    entry: Json = {"model": result.model.name, "untrained": result.untrained}
    unavailable = next((r["unavailable"] for r in result.results if "unavailable" in r), None)
    if unavailable is not None:
        return entry | {"unavailable": unavailable}
    metrics = metrics_of(result.data.task, len(result.data.labels))
    gold = gold_of(result.data, split)
    entry |= {
        "seeds": [cell.seed for cell in result.cells],
        "setting": None if result.setting is None else asdict(result.setting),
        "values": {},
        "summary": {},
        "num_collapsed": sum(r["collapsed"] is not None for r in result.results),
        "collapsed": {str(c.seed): r["collapsed"] for c, r in zip(result.cells, result.results, strict=True)
                      if r["collapsed"]},
        "seconds": [round(r["seconds"], 2) for r in result.results],
        "cpu_seconds": [round(r["cpu_seconds"], 2) for r in result.results],
        "steps": [r["steps"] for r in result.results],
        "num_shortened": result.results[0]["num_shortened"],
        "cells": [str(store.path_of(cell).relative_to(store.root.parent)) for cell in result.cells],
    }  # fmt: skip
    for name, metric in metrics.items():
        parts = [metric.parts(gold, r["predictions"][split]) for r in result.results]
        entry["values"][name] = [float(metric.of_sums(part.sum(0))) for part in parts]
        entry["summary"][name] = summarize(metric, parts)._asdict()
    if result.selection:
        entry["selection"] = result.selection
    if result.setting is None:
        entry["scorer"] = result.results[0]["scorer"]
        entry["groups"] = _groups(result, split)
    return entry


def _groups(result: TaskResult, split: str) -> dict[str, float]:
    """Mean of the main metric for each group of rows, over seeds."""
    rows = result.data.dev[split]
    names = np.array([str(row.get("group", "")) for row in rows])
    values = np.mean([r["predictions"][split][result.data.task.main_metric] for r in result.results], axis=0)
    if (names == "").all():
        return {}
    return {str(name): float(values[names == name].mean()) for name in np.unique(names)}


def _average(tasks: Sequence[Json], model: str) -> float | None:
    """Mean over tasks of the first metric, or of both that GLUE averages first; None where a task is missing."""
    values: dict[str, list[float]] = {}
    for task in tasks:
        entry = find_result(task, model)
        if entry is None or "unavailable" in entry:
            return None
        names = task["metrics"] if set(task["metrics"]) in AVERAGED_FIRST else task["metrics"][:1]
        values.setdefault(task["task"], []).append(statistics.fmean(entry["summary"][name]["mean"] for name in names))
    return statistics.fmean(statistics.fmean(part) for part in values.values())


def warnings_of(plan: Plan, results: Sequence[TaskResult]) -> list[str]:
    """What a reader of the scores must know."""
    found = [note for data in plan.tasks for note in data.notes]
    found += [
        f"{data.task.shown_name}: scored on {counted(len(rows), 'row')} of {split}; a score on fewer than {MIN_ROWS} "
        "rows says next to nothing"
        for data in plan.tasks
        for split, rows in data.dev.items()
        if len(rows) < MIN_ROWS
    ]
    for result in results:
        task = result.data.task
        name = f"{task.shown_name}, {result.model.name}{' (untrained)' if result.untrained else ''}"
        for cell, one in zip(result.cells, result.results, strict=True):
            if "unavailable" in one:
                found.append(f"{name}: not scored, because {one['unavailable']}")
            elif one["collapsed"]:
                found.append(
                    f"{name}: seed {cell.seed} collapsed: {one['collapsed']}; it counts in the mean; {_remedy(one)}"
                )
        if result.untrained:
            continue
        steps = result.results[0].get("steps", 0)
        if not task.is_zero_shot and steps < MIN_STEPS:
            found.append(
                f"{name}: trained for {counted(steps, 'step')}; a score after fewer than {MIN_STEPS} steps says "
                "next to nothing; more rows, more --epochs or a smaller --batch_size give more"
            )
        limit = result.model.max_positions if task.is_zero_shot else min(task.max_length, result.model.max_positions)
        unit = "sentence" if task.kind == "minimal_pairs" else "row"
        found += [
            f"{name}: {counted(count, unit)} of {split} shortened to {limit} tokens"
            for split, count in result.results[0].get("num_shortened", {}).items()
            if count
        ]
    return list(dict.fromkeys(found))


def _remedy(result: Json) -> str:
    """What may help a collapsed seed: one that diverged, or one that has learned nothing but the shares of classes."""
    losses = [loss for _, loss in result["losses"]]
    if not losses or not math.isfinite(losses[-1]):
        return "a lower --learning_rate or more --warmup may help"
    return (
        f"its training loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {counted(result['steps'], 'step')}; more "
        "--epochs or another --learning_rate may help"
    )


def write_reports(report: Json, tasks: Sequence[TaskData], output: Path) -> None:
    """Write the reports, and the gold labels of every split, so that two runs can be compared without the data."""
    (output / "gold").mkdir(parents=True, exist_ok=True)
    for data in tasks:
        gold = {split: gold_of(data, split) for split in data.dev}
        content = {"task": data.task.model_dump(), "num_labels": len(data.labels), "gold": gold}
        write_atomically(output / "gold" / f"{data.task.name}.json", json.dumps(content))
    write_atomically(output / REPORT, json.dumps(report, indent=1) + "\n")
    write_atomically(output / "report.md", markdown(report))
    for model in report["models"]:
        write_atomically(output / f"model_card_{model['name']}.md", card_section(report, model["name"]))
