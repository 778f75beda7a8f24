"""Results in the reports of evaluation.run, and the section for a model's card, found by the digest of its files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evaluation.finetuning.identity import folder_digest

REPORT = "report.json"  # in the output folder of evaluation.run
Json = dict[str, Any]


def find_result(task: Json, model: str, untrained: bool = False) -> Json | None:
    """What a report has of a model on a task."""
    return next((r for r in task["results"] if r["model"] == model and r["untrained"] == untrained), None)


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
                from evaluation.report import card_section  # takes seconds, with transformers

                return card_section(report, name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return None
