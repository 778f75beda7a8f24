"""`skips.json` beside the checkpoints: samples that a run skips, after a rollback or because a user listed them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from common.console import console
from common.errors import UserError, shortened
from common.files import write_atomically
from training.checkpoints.paths import SKIPS

ROLLBACK = "rollback"  # third element of an entry that a rollback added
Ranges = tuple[tuple[int, int], ...]  # (first sample, one past the last)


class Skips(NamedTuple):
    """Ranges of samples to skip. `rollbacks` are those that a rollback added; only they count against its limit."""

    ranges: Ranges
    rollbacks: Ranges = ()

    def merged(self, other: "Skips") -> "Skips":
        return Skips(*(tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in zip(self, other, strict=True)))

    def next_sample(self, sample: int, num_rows: int) -> int:
        """Where the next step of `num_rows` samples can begin without a skipped one: at `sample`, or later.

        A range can begin inside a step when the batch has grown since; the rows before it are then skipped too.
        """
        for first, end in sorted(self.ranges):
            if sample < end and first < sample + num_rows:
                sample = end
        return sample

    def entries(self) -> list[list[Any]]:
        """The content of `skips.json`."""
        return [[*pair, ROLLBACK] if pair in self.rollbacks else list(pair) for pair in self.ranges]


def write_skips(folder: Path, skips: Skips) -> None:
    """Save `skips` for a restart that comes before the next checkpoint, which contains them too."""
    try:
        write_atomically(folder / SKIPS, json.dumps(skips.entries()) + "\n")
    except OSError as error:
        console.warn(
            f"{folder / SKIPS}: cannot be written ({error.strerror}). The next checkpoint records the skipped samples."
        )


def read_skips(folder: Path) -> Skips:
    try:
        return as_skips(json.loads((folder / SKIPS).read_text()))
    except FileNotFoundError:
        return Skips(())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder / SKIPS}: cannot be read ({error}). Correct it, or remove it to skip only the samples that the "
            f"checkpoint lists"
        ) from None


def as_skips(content: Any) -> Skips:
    """Ranges of samples from a JSON list of [first, end] or [first, end, "rollback"]; ValueError for anything else."""
    entries = content if isinstance(content, list) else [content]
    marked = [isinstance(entry, list) and entry[2:] == [ROLLBACK] for entry in entries]
    ranges = as_ranges([entry[:2] if is_marked else entry for entry, is_marked in zip(entries, marked, strict=True)])
    return Skips(ranges, tuple(pair for pair, is_marked in zip(ranges, marked, strict=True) if is_marked))


def as_ranges(content: Any) -> Ranges:
    """Ranges of samples from a JSON list of [first, end]; ValueError for anything else."""
    for pair in content if isinstance(content, list) else [content]:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not is_pair or not 0 <= pair[0] < pair[1] < 2**63:
            raise ValueError(f"found {shortened(pair)}, expected [first, end] with 0 <= first < end")
    return tuple((first, end) for first, end in content)
