"""Results in the reports of evaluation.run, as people read them. Imports no large library."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.words import counted, markdown_table
from evaluation.finetuning.identity import folder_digest

REPORT = "report.json"  # in the output folder of evaluation.run
Json = dict[str, Any]


def find_result(task: Json, model: str, untrained: bool = False) -> Json | None:
    """What a report has of a model on a task."""
    return next((r for r in task["results"] if r["model"] == model and r["untrained"] == untrained), None)


def percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def shown_score(entry: Json | None, metric: str) -> str:
    """mean ± deviation [interval], and how many seeds collapsed."""
    if entry is None:
        return "–"
    if "unavailable" in entry:
        return "not available"
    summary = entry["summary"][metric]
    deviation = "" if summary["std"] is None else f" ± {100 * summary['std']:.1f}"
    collapsed = f", {entry['num_collapsed']} of {len(entry['seeds'])} collapsed" if entry["num_collapsed"] else ""
    return f"{percent(summary['mean'])}{deviation} [{percent(summary['low'])}, {percent(summary['high'])}]{collapsed}"


def describe_setting(protocol: Json) -> str:
    """A sentence about what fine-tuning was done with."""
    setting = protocol["setting"]
    epochs = "1 epoch" if setting["epochs"] == 1 else f"{setting['epochs']:g} epochs"
    return (
        f"Learning rate {setting['learning_rate']:g}, batch {setting['batch_size']}, {epochs}, "
        f"warm-up {setting['warmup']:.0%}, weight decay {setting['weight_decay']:g}, {setting['precision']}."
    )


def card_section(report: Json, model: str) -> str:
    """A section for the model's card, in Markdown."""
    protocol, rows = report["protocol"], []
    for task in report["tasks"]:
        for metric in task["metrics"]:
            scores = [shown_score(find_result(task, model, untrained), metric) for untrained in (False, True)]
            rows.append([task["title"], metric, f"{task['num_rows']:,}", *scores, percent(task["majority"][metric])])
    how = (
        f"Protocol `{protocol['name']}`: {protocol['meaning']}. {describe_setting(protocol)} Mean ± standard "
        f"deviation over {counted(len(protocol['seeds']), 'seed')} [95 % bootstrap interval], × 100."
    )
    table = markdown_table(["task", "metric", "n", "score", "untrained", "majority"], rows)
    return "\n".join(["## Evaluation", "", how, "", *table, ""])


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
