"""The reports of evaluation.run as people read them: tables, model cards. Imports no large library."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.weights import folder_digest
from common.words import counted, markdown_table

REPORT = "report.json"  # in the output folder of evaluation.run
MIN_ROWS = MIN_STEPS = 30  # scores on fewer rows, or after fewer steps of training, say next to nothing
Json = dict[str, Any]


def find_result(task: Json, model: str, untrained: bool = False) -> Json | None:
    """What a report has of a model on a task."""
    return next((r for r in task["results"] if r["model"] == model and r["untrained"] == untrained), None)


def percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def shown_score(task: Json, metric: str, model: str, untrained: bool = False) -> str:
    """mean ± deviation [interval], how many seeds collapsed, and what makes the score worthless."""
    entry = find_result(task, model, untrained)
    if entry is None:
        return "–"
    if "unavailable" in entry:
        return "not available"
    summary = entry["summary"][metric]
    deviation = "" if summary["std"] is None else f" ± {100 * summary['std']:.1f}"
    remarks = [f"{entry['num_collapsed']} of {len(entry['seeds'])} collapsed"] if entry["num_collapsed"] else []
    remarks += ["few rows"] if task["num_rows"] < MIN_ROWS else []
    remarks += ["few steps"] if entry["setting"] is not None and min(entry["steps"]) < MIN_STEPS else []
    interval = f"[{percent(summary['low'])}, {percent(summary['high'])}]"
    return ", ".join([f"{percent(summary['mean'])}{deviation} {interval}", *remarks])


def describe_protocol(report: Json) -> str:
    """Sentences about how the scores were obtained, and what the figures in the tables are."""
    protocol, setting = report["protocol"], report["protocol"]["setting"]
    epochs = "1 epoch" if setting["epochs"] == 1 else f"{setting['epochs']:g} epochs"
    entries = [entry for task in report["tasks"] for entry in task["results"] if "seeds" in entry]
    trained, untrained = (max((len(e["seeds"]) for e in entries if e["untrained"] is fresh), default=0)
                          for fresh in (False, True))  # fmt: skip
    are_trained = {entry["setting"] is not None for entry in entries}
    scores, drawn = "Scores of one seed" if True in are_trained else "Scores", "rows"
    if trained > 1:
        scores, drawn = f"Mean ± standard deviation over {trained} seeds", "seeds and rows"
        scores += " (one score where nothing is trained)" if False in are_trained else ""
    seeds = "" if untrained == trained else f", with {counted(untrained, 'seed')}"
    other = f" *Untrained* is the same architecture with fresh weights, fine-tuned alike{seeds}." if untrained else ""
    return (
        f"Protocol `{protocol['name']}`: {protocol['meaning']}. Learning rate {setting['learning_rate']:g}, batch "
        f"{setting['batch_size']}, {epochs}, warm-up {setting['warmup']:.0%}, weight decay "
        f"{setting['weight_decay']:g}, {setting['precision']}.\n"
        f"{scores} and, in brackets, a 95 % bootstrap interval over {drawn}, all × 100.{other} *Majority* "
        "needs no model."
    )


def markdown(report: Json) -> str:
    names = [model["name"] for model in report["models"]]
    lines = [
        "# Evaluation",
        "",
        describe_protocol(report),
        "The average is over tasks, of the first metric of each; of accuracy and f1, and of pearson and spearman, it "
        "is the mean, as in GLUE.",
        "",
        *_scores_table(report, names),
        "",
        *_chosen_settings(report),
        *_times(report),
    ]
    if report["warnings"]:
        lines += ["## Warnings", "", *(f"- {text}" for text in report["warnings"]), ""]
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines += [
        "## How",
        "",
        f"    {report['command']}",
        "",
        f"{machine}; {report['protocol']['num_resamples']} resamples.",
        "",
    ]
    return "\n".join(lines)


def _score_rows(report: Json, names: Sequence[str]) -> Iterator[list[str]]:
    """Task, metric, n, majority, and of each model the score and that of the same architecture untrained."""
    for task in report["tasks"]:
        for metric in task["metrics"]:
            scores = [shown_score(task, metric, name, untrained) for name in names for untrained in (False, True)]
            yield [task["title"], metric, f"{task['num_rows']:,}", percent(task["majority"][metric]), *scores]


def _scores_table(report: Json, names: Sequence[str]) -> list[str]:
    averages = [cell for name in names for cell in (percent(report["averages"][name]), "")]
    header = ["task", "metric", "n", "majority", *(cell for name in names for cell in (name, "untrained"))]
    return markdown_table(header, [*_score_rows(report, names), ["**average**", "", "", "", *averages]])


def _chosen_settings(report: Json) -> list[str]:
    rows = [
        (
            *(task["title"], entry["model"], f"{entry['setting']['learning_rate']:g}"),
            *(entry["setting"]["batch_size"], len(entry["selection"])),
        )
        for task in report["tasks"]
        for entry in task["results"]
        if not entry["untrained"] and entry.get("selection")
    ]
    if not rows:
        return []
    table = markdown_table(["task", "model", "learning rate", "batch", "settings tried"], rows)
    return ["## Chosen on rows held out of train", "", *table, ""]


def _times(report: Json) -> list[str]:
    rows, seen = [], set()
    for task in report["tasks"]:
        for entry in task["results"]:
            if entry["untrained"] or "unavailable" in entry or (task["task"], entry["model"]) in seen:
                continue
            seen.add((task["task"], entry["model"]))
            seconds, cpu = (statistics.fmean(entry[key]) for key in ("seconds", "cpu_seconds"))
            how = entry.get("scorer") or entry["steps"][0]
            rows.append((task["title"], f"{task['num_train']:,}", entry["model"], how, f"{seconds:.1f}", f"{cpu:.1f}"))
    header = ["task", "train rows", "model", "steps", "seconds", "CPU seconds"]
    return ["## Time per cell", "", *markdown_table(header, rows), ""]


def card_section(report: Json, model: str) -> str:
    """A section for the model's card, in Markdown."""
    rows = [[*row[:3], *row[4:], row[3]] for row in _score_rows(report, [model])]
    table = markdown_table(["task", "metric", "n", "score", "untrained", "majority"], rows)
    return "\n".join(["## Evaluation", "", describe_protocol(report), "", *table, ""])


def find_card_section(reports: Iterable[Path], model: Path) -> str | None:
    """The section for the card of the Hugging Face folder `model` from the first report.json that has its results.

    A report of other weights, or one that cannot be read, is skipped.
    """
    existing = [path for path in reports if path.is_file()]
    digest = folder_digest(model) if existing else None
    for path in existing:
        try:
            report = json.loads(path.read_bytes())
            name = next((entry["name"] for entry in report["models"] if entry["digest"] == digest), None)
            if name is not None:
                return card_section(report, name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return None
