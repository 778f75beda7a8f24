"""Steps that must not count: losses and gradients that are not finite, and losses that jump."""

import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.console import console
from common.errors import UserError
from data.stream.loader import StepBatches
from training.build import Run
from training.checkpoints.paths import SKIPS
from training.faults.skips import Skips

SPIKE_HISTORY = 200  # steps that the median is taken over
MIN_HISTORY = 30
SPIKE_DEVIATIONS = 8.0
SPIKE_MARGIN = 0.5  # nats: smaller jumps are noise, however quiet the run


class BadSteps:
    """Counts steps that no rank applied because a loss or a gradient was infinite or not a number.

    The engine skips such a step on all ranks. In fp16 that is how the loss scale is found, so there it counts only once
    the scale cannot fall any more. What was in the batch is written out, by each rank for its own rows.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.limit = run.settings.flags.max_bad_steps
        self.in_row = 0
        self.first_sample = 0  # of those in a row
        self.skipped = run.engine.skipped_steps
        self.file = run.settings.runs / f"bad_batches_rank_{run.rank_info.rank}.jsonl"

    def check(self, batches: StepBatches) -> None:
        """After a step: tell whether it was bad. Raises UserError after `limit` in a row."""
        engine = self.run.engine
        if engine.skipped_steps == self.skipped:
            self.in_row = 0
            return
        self.skipped = engine.skipped_steps
        if self._may_rescale():
            return
        self.in_row += 1
        self._write(batches)
        first = batches.next_sample - self.run.stream.rows_per_step
        if self.in_row == 1:
            self.first_sample = first
        what = (
            f"after step {self.run.state.step} the loss or its gradient was infinite or not a number for samples "
            f"{first} to {batches.next_sample - 1}; no rank applied it ({self.in_row} in a row). Their rows are in "
            f"{self.file}"
        )
        if self.in_row >= self.limit:
            known = Skips(self.run.state.skips, self.run.state.rollbacks)
            skips = [*known.lines(), [self.first_sample, batches.next_sample]]
            raise UserError(
                f"{what}. That is --max_bad_steps; look at those rows, lower the learning rate, or train in another "
                f"precision. The weights from before them are saved; to leave those rows out, write "
                f"{json.dumps(skips)} to {self.run.checkpoints.folder / SKIPS}"
            )
        console.warn(what)

    def _may_rescale(self) -> bool:
        """Whether the loss scale is dynamic and can still fall, so that a skipped step is nothing to worry about."""
        if self.run.settings.precision != "fp16":
            return False
        optimizer = self.run.engine.optimizer
        config = getattr(optimizer, "loss_scale_config", None)  # at stage 0; ZeRO has a scaler
        if config is not None:
            is_dynamic, least = config.dynamic_loss_scale, config.min_loss_scale
        else:
            is_dynamic, least = optimizer.loss_scaler.dynamic, getattr(optimizer.loss_scaler, "min_scale", 1.0)
        return bool(is_dynamic) and float(optimizer.loss_scale) > float(least)

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
            if not math.isfinite(step.loss):
                continue
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


def describe_spike(spike: StepLoss, median: float) -> str:
    return (
        f"loss spike at step {spike.step}: {spike.loss:.3f} against a median of {median:.3f} (samples "
        f"{spike.first_sample} to {spike.next_sample - 1})"
    )


def guard_engine(engine: Any) -> None:
    """Have every kind of engine skip a step whose gradient is not finite, as those in half precision do by themselves.

    ZeRO in fp32 can check, but does not unless it is told; in fp16 it raises once the loss scale can fall no further,
    before the step is counted. Plain fp32 is guarded by engine/gradients.py. To be called after every load, which
    brings a scaler of its own.
    """
    if hasattr(engine.optimizer, "check_grad_overflow"):
        engine.optimizer.check_grad_overflow = True
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False
