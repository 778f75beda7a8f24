"""Faults that a test puts into a rank: what happens is real, and where it happens is patched in from outside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def put_in(fault: dict[str, Any], rank: int) -> None:
    """`fault`: its `kind`, the `rank` it is for (left out: all), and what its kind needs."""
    if fault.get("rank", rank) == rank:
        KINDS[fault["kind"]](fault)


KINDS: dict[str, Callable[[dict[str, Any]], None]] = {}


def _forget_optimizer_state(fault: dict[str, Any]) -> None:
    """Resharding that loses what the optimizer knew."""
    from training import zero_files

    whole = zero_files.ZeroCheckpoint.read

    def without_state(folder: Path) -> zero_files.ZeroCheckpoint:
        saved = whole(folder)
        for states in saved.tensors.values():
            for key in states.keys() - {zero_files.WEIGHT}:
                states[key] = states[key] * 0
        return saved

    zero_files.ZeroCheckpoint.read = without_state  # type: ignore[method-assign,assignment]


KINDS["forget_optimizer_state"] = _forget_optimizer_state
