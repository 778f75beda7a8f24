"""Loss spikes, steps whose loss is far above that of the steps before, and --on_spike: a warning or a rollback."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.console import console
from common.errors import UserError
from training.checkpoints.loading import all_ranks_load_engine
from training.checkpoints.paths import SKIPS
from training.checkpoints.state import Progress, read_state, write_skips
from training.checkpoints.writer import CheckpointWriter
from training.metrics.sinks import Sinks
from training.metrics.window import StepLoss
from training.runtime import collectives

HISTORY_STEPS = 200  # over which the median is taken
MIN_HISTORY_STEPS = 30
MIN_DEVIATIONS = 8.0
MIN_JUMP = 0.5  # nats: a smaller jump is noise, however little the loss varies
MAX_ROLLBACKS = 3  # to the same checkpoint: after that the batches are not the cause of the spikes


class Spike(NamedTuple):
    at: StepLoss
    median: float  # of the steps before

    def __str__(self) -> str:
        return (
            f"loss spike at step {self.at.step}: {self.at.loss:.3f}, where the median is {self.median:.3f} (samples "
            f"{self.at.first_sample} to {self.at.next_sample - 1})"
        )


class SpikeDetector:
    """Compares each step's loss with the steps before. Spikes do not become part of that history."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=HISTORY_STEPS)

    def find(self, steps: Sequence[StepLoss]) -> list[Spike]:
        found = []
        for step in (step for step in steps if math.isfinite(step.loss)):
            median, threshold = self._level()
            if step.loss > threshold:
                found.append(Spike(step, median))
            else:
                self.recent.append(step.loss)
        return found

    def _level(self) -> tuple[float, float]:
        """(median, threshold) from the median absolute deviation, which a single outlier does not move."""
        if len(self.recent) < MIN_HISTORY_STEPS:
            return math.nan, math.inf
        median = statistics.median(self.recent)
        spread = 1.4826 * statistics.median(abs(loss - median) for loss in self.recent)
        return median, median + max(MIN_JUMP, MIN_DEVIATIONS * spread)


@dataclass(frozen=True)
class SpikeResponse:
    """Finds spikes in the steps reported, and answers them as --on_spike says."""

    does_roll_back: bool
    checkpoints: CheckpointWriter
    engine: Any
    progress: Progress
    sinks: Sinks
    detector: SpikeDetector = field(default_factory=SpikeDetector)

    def all_ranks_respond(self, steps: Sequence[StepLoss]) -> bool:
        """Warn of spikes among `steps`. True: the run was rolled back to an earlier step."""
        spikes = self.detector.find(steps)
        for spike in spikes:
            console.warn(str(spike))
        if not spikes or not self.does_roll_back:
            return False
        if not self.all_ranks_roll_back(spikes[0].at):
            console.warn("there is no earlier checkpoint to roll back to. Training continues")
            return False
        step, samples = self.progress.step, self.progress.samples
        # Over all restarts: each rollback to this checkpoint skipped samples that follow it.
        rollbacks = sum(first >= samples for first, _ in self.progress.skips.rollbacks)
        if rollbacks > MAX_ROLLBACKS:
            raise UserError(
                f"{spikes[0]}: the loss still jumps after {rollbacks - 1} rollbacks to step {step}, so the batches are "
                f"not the cause. Lower the learning rate or lengthen the warm-up, and start again. The checkpoint of "
                f"that step is valid. To train on the skipped batches again, remove {self.checkpoints.folder / SKIPS}"
            )
        console.warn(
            f"rolled back to step {step}; samples {spikes[0].at.first_sample} to {spikes[0].at.next_sample - 1} are "
            f"skipped"
        )
        return True

    def all_ranks_roll_back(self, at: StepLoss) -> bool:
        """Load the newest checkpoint from before `at`, and skip its samples from now on. False: there is none."""
        self.checkpoints.all_ranks_finish_or_warn()
        tag = collectives.all_ranks_from_main(lambda: self.checkpoints.newest_valid(before_step=at.step))
        if tag is None:
            return False
        checkpoint = self.checkpoints.folder / tag
        saved = read_state(checkpoint)
        all_ranks_load_engine(self.engine, checkpoint, saved, self.progress.state.world_size)
        self.progress.roll_back(saved, ((at.first_sample, at.next_sample),))
        if collectives.is_main():
            write_skips(self.checkpoints.folder, self.progress.skips)
        self.sinks.roll_back(self.progress.step, self.progress.samples)
        return True
