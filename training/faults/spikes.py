"""Loss spikes: steps whose loss is far above that of the steps before."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from training.metrics.window import StepLoss

HISTORY_STEPS = 200  # over which the median is taken
MIN_HISTORY_STEPS = 30
MIN_DEVIATIONS = 8.0
MIN_JUMP = 0.5  # nats: a smaller jump is noise, however little the loss varies


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
        for step in steps:
            if not math.isfinite(step.loss):
                continue
            level = self._level()
            if level is not None and step.loss > level[1]:
                found.append(Spike(step, level[0]))
            else:
                self.recent.append(step.loss)
        return found

    def _level(self) -> tuple[float, float] | None:
        """(median, threshold) from the median absolute deviation, which a single outlier does not move."""
        if len(self.recent) < MIN_HISTORY_STEPS:
            return None
        median = statistics.median(self.recent)
        spread = 1.4826 * statistics.median(abs(loss - median) for loss in self.recent)
        return median, median + max(MIN_JUMP, MIN_DEVIATIONS * spread)
