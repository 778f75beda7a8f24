"""Samples that a run leaves out: the data cursor moves past them."""

from collections.abc import Sequence

from training.checkpoints.progress import Progress
from training.plan.horizon import Horizon


def pass_skipped_samples(progress: Progress, horizon: Horizon) -> None:
    """Move the cursor to where the next step can begin, or to the end of the run."""
    while not horizon.is_finished(progress.step, progress.samples):
        cursor = next_unskipped(progress.samples, progress.skips.ranges, horizon.plan.at(progress.samples).rows)
        if cursor == progress.samples:
            return
        progress.move_cursor(cursor)  # steps may have another size there


def next_unskipped(sample: int, skips: Sequence[tuple[int, int]], rows: int) -> int:
    """Where the next step of `rows` samples can begin without a skipped one: at `sample`, or later.

    A range can begin inside a step when the batch has grown since; the rows before it are then skipped too.
    """
    for first, end in sorted(skips):
        if sample < end and first < sample + rows:
            sample = end
    return sample
