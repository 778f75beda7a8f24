"""The learning rate as a pure function of the optimizer step."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up to `peak`, then decay; `offset` is added at every step. Steps are counted from `origin`.

    `decay_rate` and `decay_step` are for LE and EE, `decay_power` is for polynomial. `decay_proportion` is the share of
    the steps in which WSD decays, `final_share` the share of the peak at which linear, polynomial, cosine and WSD end.
    """

    shape: str
    peak: float
    total_steps: int
    warmup_proportion: float
    decay_rate: float = 0.99
    decay_step: int = 1000
    decay_power: float = 1.0
    decay_proportion: float = 0.1
    final_share: float = 0.0
    offset: float = 0.0
    origin: int = 0

    def rate(self, step: float) -> float:
        """The learning rate of the optimizer step after `step` completed ones."""
        warmup, decay = SCHEDULES[self.shape]
        elapsed = max(0, step - self.origin)
        if elapsed < self.warmup_steps:
            return self.peak * warmup(elapsed / self.warmup_steps) + self.offset
        return self.peak * decay(self, elapsed) + self.offset

    @property
    def warmup_steps(self) -> float:
        return self.warmup_proportion * self.total_steps

    def fall(self, elapsed: float, start: float) -> float:
        """A share that falls linearly from 1 at `start` to 0 at the last step, and stays there."""
        return min(1.0, max(0.0, (self.total_steps - elapsed) / max(1.0, self.total_steps - start)))

    def above_floor(self, share: float) -> float:
        """A share that falls from 1 to 0, rescaled to fall from 1 to `final_share`."""
        return self.final_share + (1.0 - self.final_share) * share


def _exponential(schedule: Schedule, elapsed: float) -> float:
    return schedule.decay_rate ** ((elapsed - schedule.warmup_steps) / schedule.decay_step)


def _quadratic_to_zero(schedule: Schedule, elapsed: float) -> float:
    return max(0.0, 1.0 - elapsed / schedule.total_steps) ** 2


def _linear(schedule: Schedule, elapsed: float) -> float:
    return schedule.above_floor(schedule.fall(elapsed, schedule.warmup_steps))


def _polynomial(schedule: Schedule, elapsed: float) -> float:
    return schedule.above_floor(schedule.fall(elapsed, schedule.warmup_steps) ** schedule.decay_power)


def _cosine(schedule: Schedule, elapsed: float) -> float:
    done = 1.0 - schedule.fall(elapsed, schedule.warmup_steps)
    return schedule.above_floor(0.5 * (1.0 + math.cos(math.pi * done)))


def _constant(schedule: Schedule, elapsed: float) -> float:
    return 1.0


def _stable_then_linear(schedule: Schedule, elapsed: float) -> float:
    start = max(schedule.warmup_steps, (1.0 - schedule.decay_proportion) * schedule.total_steps)
    return schedule.above_floor(schedule.fall(elapsed, start))


def _linear_warmup(share: float) -> float:
    return share


# name → (warm-up as a function of its completed share, decay after it), both as shares of the peak
SCHEDULES: dict[str, tuple[Callable[[float], float], Callable[[Schedule, float], float]]] = {
    "LE": (_linear_warmup, _exponential),
    "EE": (lambda share: share**2, _exponential),
    "EP": (lambda share: share**1.5, _quadratic_to_zero),
    "linear": (_linear_warmup, _linear),
    "polynomial": (_linear_warmup, _polynomial),
    "cosine": (_linear_warmup, _cosine),
    "constant": (_linear_warmup, _constant),
    "wsd": (_linear_warmup, _stable_then_linear),
}
