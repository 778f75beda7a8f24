"""The learning rate as a pure function of the optimizer step."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up to `peak`, then decay; `offset` is added at every step. Counting begins at `origin`."""

    shape: str
    peak: float
    total_steps: int
    warmup_proportion: float
    decay_rate: float
    decay_step: int
    offset: float = 0.0
    origin: int = 0

    def rate(self, step: int) -> float:
        """The rate of the optimizer step that follows `step` completed ones."""
        warmup, decay = SCHEDULES[self.shape]
        elapsed = max(0, step - self.origin)
        warmup_steps = self.warmup_proportion * self.total_steps
        if elapsed < warmup_steps:
            return self.peak * warmup(elapsed / warmup_steps) + self.offset
        return self.peak * decay(self, elapsed, warmup_steps) + self.offset


def _exponential(schedule: Schedule, elapsed: float, warmup_steps: float) -> float:
    return schedule.decay_rate ** ((elapsed - warmup_steps) / schedule.decay_step)


def _quadratic_to_zero(schedule: Schedule, elapsed: float, warmup_steps: float) -> float:
    return max(0.0, 1.0 - elapsed / schedule.total_steps) ** 2


def _linear_to_zero(schedule: Schedule, elapsed: float, warmup_steps: float) -> float:
    return max(0.0, (schedule.total_steps - elapsed) / max(1.0, schedule.total_steps - warmup_steps))


# name → (warm-up as a function of the share of it done, decay after it)
SCHEDULES: dict[str, tuple[Callable[[float], float], Callable[[Schedule, float, float], float]]] = {
    "LE": (lambda share: share, _exponential),
    "EE": (lambda share: share**2, _exponential),
    "EP": (lambda share: share**1.5, _quadratic_to_zero),
    "linear": (lambda share: share, _linear_to_zero),
}
