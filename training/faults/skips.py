"""Samples that a run leaves out: those of a rollback, and those that somebody wrote into `skips.json` by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.console import console
from common.errors import UserError, shortened
from common.files import write_atomically
from training.checkpoints.paths import SKIPS

ROLLBACK = "rollback"  # the third part of a line that the run itself wrote
Ranges = tuple[tuple[int, int], ...]  # first sample, and the one after the last


class Skips(NamedTuple):
    """`rollbacks` are those of `ranges` that came of going back: only they count against the limit of that."""

    ranges: Ranges
    rollbacks: Ranges = ()

    def merged(self, other: "Skips") -> "Skips":
        return Skips(*(tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in zip(self, other, strict=True)))

    def lines(self) -> list[list[Any]]:
        """As they stand in `skips.json`."""
        return [[*pair, ROLLBACK] if pair in self.rollbacks else list(pair) for pair in self.ranges]


def note_skips(folder: Path, skips: Skips) -> None:
    """Where the next start finds them before the next checkpoint, which holds them too."""
    try:
        write_atomically(folder / SKIPS, json.dumps(skips.lines()) + "\n")
    except OSError as error:
        console.warn(f"{folder}: the samples left out cannot be noted ({error.strerror}); the next checkpoint does")


def read_skips(folder: Path) -> Skips:
    try:
        return as_skips(json.loads((folder / SKIPS).read_text()))
    except FileNotFoundError:
        return Skips(())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder / SKIPS}: cannot be read ({error}); mend it, or remove it to leave out only what the checkpoint "
            f"itself says"
        ) from None


def as_skips(content: Any) -> Skips:
    """Ranges of samples from a JSON list of pairs, perhaps marked; ValueError for anything else."""
    entries = content if isinstance(content, list) else [content]
    marked = [isinstance(entry, list) and entry[2:] == [ROLLBACK] for entry in entries]
    pairs = [entry[:2] if is_marked else entry for entry, is_marked in zip(entries, marked, strict=True)]
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not is_pair or not 0 <= pair[0] < pair[1] < 2**63:
            raise ValueError(f"skips: found {shortened(pair)}, expected [first, end] with 0 <= first < end")
    ranges = tuple((first, end) for first, end in pairs)
    return Skips(ranges, tuple(pair for pair, is_marked in zip(ranges, marked, strict=True) if is_marked))


def count_rollbacks(rollbacks: Ranges, sample: int) -> int:
    """How often a run has gone back to where it is now, in all its starts: each time left out samples that follow."""
    return sum(first >= sample for first, _ in rollbacks)


def next_unskipped(sample: int, skips: Sequence[tuple[int, int]], rows: int) -> int:
    """Where the next step of `rows` samples can begin without one that is left out: at `sample`, or later.

    A range can begin inside a step when the batch has grown since it was noted; the rows before it go with it.
    """
    for first, end in sorted(skips):
        if sample < end and first < sample + rows:
            sample = end
    return sample
