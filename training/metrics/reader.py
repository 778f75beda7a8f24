"""A run's figures, read back from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from common.errors import UserError

A_RUNS_METRICS = "expected <output_dir>/runs/<job_name>/metrics.jsonl; give that one"
VALIDATION_KEYS = ("step", "mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity")


def last_validation(metrics: Path | None) -> dict[str, Any] | None:
    """The newest validation line of a run's metrics.jsonl."""
    if metrics is None:
        return None
    found = next((row for row in reversed(read_metrics(metrics)) if row.get("kind") == "validation"), None)
    missing = [key for key in VALIDATION_KEYS if not isinstance(found.get(key), int | float)] if found else []
    if missing:
        raise UserError(f"{metrics}: its last validation has no number {', '.join(missing)}; {A_RUNS_METRICS}")
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. The last may be torn, where a run was killed while writing it."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; {A_RUNS_METRICS}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("kind"), str):
            rows.append(row)
        elif number < len(lines) or not rows:
            raise UserError(f"{path}: line {number} holds no figures of a run; {A_RUNS_METRICS}")
    return rows
