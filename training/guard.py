"""Steps that must not count: gradients that are not finite, and losses that jump."""

import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.console import console
from common.errors import UserError
from data.loader import StepBatches
from training.run import Run

SPIKE_HISTORY = 200  # steps that the median is taken over
MIN_HISTORY = 30
SPIKE_DEVIATIONS = 8.0
SPIKE_MARGIN = 0.5  # nats: smaller jumps are noise, however quiet the run


class BadSteps:
    """Counts steps that no rank applied because a gradient was infinite or not a number.

    The engine skips such a step on all ranks. In fp16 that is how the loss scale is found, so there it counts only once
    the scale cannot fall any more. What was in the batch is written out, by each rank for its own rows.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.limit = run.settings.flags.max_bad_steps
        self.in_row = 0
        self.skipped = run.engine.skipped_steps
        self.file = run.settings.runs / f"bad_batches_rank_{run.place.rank}.jsonl"

    def check(self, batches: StepBatches) -> bool:
        """After a step, whether it was bad. Raises UserError after `limit` in a row."""
        engine = self.run.engine
        if engine.skipped_steps == self.skipped:
            self.in_row = 0
            return False
        self.skipped = engine.skipped_steps
        if self._may_rescale():
            return False
        self.in_row += 1
        self._write(batches)
        first = batches.next_sample - self.run.stream.rows_per_step
        what = (
            f"after step {self.run.state.step} the gradient was infinite or not a number for samples {first} to "
            f"{batches.next_sample - 1}; no rank applied it ({self.in_row} in a row). Their rows are in {self.file}"
        )
        if self.in_row >= self.limit:
            raise UserError(
                f"{what}. That is --max_bad_steps; look at those rows, lower the learning rate, or train in another "
                f"precision. The last checkpoint is good"
            )
        console.warn(what)
        return True

    def _may_rescale(self) -> bool:
        optimizer = self.run.engine.optimizer
        if self.run.settings.precision != "fp16":
            return False
        scaler = getattr(optimizer, "loss_scaler", optimizer)
        return float(optimizer.cur_scale) > float(getattr(scaler, "min_scale", getattr(scaler, "min_loss_scale", 1.0)))

    def _write(self, batches: StepBatches) -> None:
        row = {
            "after_step": self.run.state.step,
            "next_sample": batches.next_sample,
            "rows": [self.run.stream.dataset.describe_row(number) for number in batches.rows],
        }
        try:
            with self.file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            console.warn(f"{self.file}: cannot be written ({error.strerror})")


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step over all ranks, and the samples it was of."""

    step: int
    first_sample: int
    next_sample: int
    loss: float


class Spikes:
    """Finds steps whose loss stands far above those before."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=SPIKE_HISTORY)

    def find(self, steps: Sequence[StepLoss]) -> list[tuple[StepLoss, float]]:
        """Those of `steps` that are spikes, each with the median it is measured by; the others become history."""
        found = []
        for step in steps:
            level = self._level()
            if level is not None and step.loss > level[1]:
                found.append((step, level[0]))
            else:
                self.recent.append(step.loss)
        return found

    def _level(self) -> tuple[float, float] | None:
        """(median, what is above it is a spike), by the median distance from the median: one outlier moves neither."""
        if len(self.recent) < MIN_HISTORY:
            return None
        median = statistics.median(self.recent)
        spread = 1.4826 * statistics.median(abs(loss - median) for loss in self.recent)
        return median, median + max(SPIKE_MARGIN, SPIKE_DEVIATIONS * spread)


def next_unskipped(sample: int, skips: Sequence[tuple[int, int]]) -> int:
    """`sample`, or the end of the range that it begins, and of any that begins there."""
    ends: dict[int, int] = dict(skips)
    while sample in ends:
        sample = ends[sample]
    return sample


def describe_spike(spike: StepLoss, median: float) -> str:
    return (
        f"loss spike at step {spike.step}: {spike.loss:.3f} against a median of {median:.3f} (samples "
        f"{spike.first_sample} to {spike.next_sample - 1})"
    )


def guard_engine(engine: Any) -> None:
    """Have every kind of engine skip a step whose gradient is not finite, as those in half precision do by themselves.

    ZeRO in fp32 can check, but does not unless it is told. Plain fp32 is guarded by training/gradients.py.
    """
    if hasattr(engine.optimizer, "check_grad_overflow"):
        engine.optimizer.check_grad_overflow = True
