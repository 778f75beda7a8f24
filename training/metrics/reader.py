"""A run's figures, read back from its metrics.jsonl."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError

A_RUNS_METRICS = "expected <output_dir>/runs/<job_name>/metrics.jsonl; give that one"
NOT_FINITE = ("nan", "inf", "-inf", None)  # as they are written, and as JSON has them
VALIDATION_KEYS = ("step", "mlm_loss", "mlm_accuracy", "perplexity")


def last_validation(metrics: Path | None, step: int | None = None) -> dict[str, Any] | None:
    """The newest validation line of a run's metrics.jsonl; with `step`, the newest one up to it.

    A validation whose loss was not finite is skipped.
    """
    if metrics is None:
        return None
    found = None
    for row in read_metrics(metrics):
        if row["kind"] != "validation" or (step is not None and row["step"] > step):
            continue
        values = {key: row.get(key, "") for key in VALIDATION_KEYS}
        texts = {key: value for key, value in values.items() if not isinstance(value, int | float)}
        wrong = [key for key, value in texts.items() if value not in NOT_FINITE]
        if wrong:
            raise UserError(f"{metrics}: its validation has no number for {', '.join(wrong)}; {A_RUNS_METRICS}")
        if not texts and all(map(math.isfinite, values.values())):
            found = row
    return found


class ProbeGain(NamedTuple):
    """Figures of the first and of the newest probe of a run."""

    steps: tuple[int, int]
    figures: dict[str, tuple[float, float]]  # those that both have, by name


def find_probe_gain(metrics: Path | None, step: int) -> ProbeGain | None:
    """Of the probes up to `step`; None: there is no second one."""
    rows = [] if metrics is None else read_metrics(metrics)
    probes = [row for row in rows if row["kind"] == "probe" and row["step"] <= step]
    if len(probes) < 2:
        return None
    first, last = probes[0], probes[-1]
    numbers = [name for name in last if all(isinstance(row.get(name), int | float) for row in (first, last))]
    names = [name for name in numbers if name not in ("step", "samples", "time")]
    return ProbeGain((first["step"], last["step"]), {name: (first[name], last[name]) for name in names})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. The last may be incomplete, where a run was killed while writing it."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {A_RUNS_METRICS}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_line(line)
        if row is not None and isinstance(row.get("kind"), str) and "step" in row:
            rows.append(row)
        elif number < len(lines) or not rows:
            raise UserError(f"{path}: line {number} does not contain the figures of a run; {A_RUNS_METRICS}")
    return rows


def read_valid_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that hold figures; no error for others or for a missing file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for line in lines if (row := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The figures of one line; None where it is not a JSON object, or its step or samples are not numbers."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and all(isinstance(row.get(key, 0), int) for key in ("step", "samples"))
    return row if is_row else None
