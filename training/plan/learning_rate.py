"""The learning rate as a pure function of the optimizer step, and which settings of a recipe its schedule uses."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What effective_recipe() always reports, beside the schedule.
OTHER_KEYS = ("batch_schedule", "length_schedule", "masking_rate", "masking_unit", "gradient_clipping")


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
        warmup, decay, _ = SCHEDULES[self.shape]
        elapsed = max(0, step - self.origin)
        if elapsed < self.warmup_steps:
            return self.peak * warmup(elapsed / self.warmup_steps) + self.offset
        return self.peak * decay(self, elapsed) + self.offset

    @property
    def warmup_steps(self) -> float:
        return self.warmup_proportion * self.total_steps

    def fall(self, elapsed: float, start: float, bend: Callable[[float], float] = lambda left: left) -> float:
        """A share of the peak that falls from 1 at `start` to `final_share` at the last step, and stays there.

        `bend` is the shape of the fall, as a function of what is left of it, from 1 to 0.
        """
        left = min(1.0, max(0.0, (self.total_steps - elapsed) / max(1.0, self.total_steps - start)))
        return self.final_share + (1.0 - self.final_share) * bend(left)


def _exponential(schedule: Schedule, elapsed: float) -> float:
    return schedule.decay_rate ** ((elapsed - schedule.warmup_steps) / schedule.decay_step)


def _quadratic_to_zero(schedule: Schedule, elapsed: float) -> float:
    return max(0.0, 1.0 - elapsed / schedule.total_steps) ** 2


def _linear(schedule: Schedule, elapsed: float) -> float:
    return schedule.fall(elapsed, schedule.warmup_steps)


def _polynomial(schedule: Schedule, elapsed: float) -> float:
    return schedule.fall(elapsed, schedule.warmup_steps, lambda left: left**schedule.decay_power)


def _cosine(schedule: Schedule, elapsed: float) -> float:
    return schedule.fall(elapsed, schedule.warmup_steps, lambda left: 0.5 * (1.0 + math.cos(math.pi * (1.0 - left))))


def _stable_then_linear(schedule: Schedule, elapsed: float) -> float:
    return schedule.fall(elapsed, max(schedule.warmup_steps, (1.0 - schedule.decay_proportion) * schedule.total_steps))


def _linear_warmup(share: float) -> float:
    return share


# name → (warm-up as a function of its completed share, decay after it, both as shares of the peak; and the keys of the
# model JSON's training section that have an effect on the decay)
SCHEDULES: dict[str, tuple[Callable[[float], float], Callable[[Schedule, float], float], tuple[str, ...]]] = {
    "LE": (_linear_warmup, _exponential, ("decay_rate", "decay_step")),
    "EE": (lambda share: share**2, _exponential, ("decay_rate", "decay_step")),
    "EP": (lambda share: share**1.5, _quadratic_to_zero, ()),
    "linear": (_linear_warmup, _linear, ("final_share",)),
    "polynomial": (_linear_warmup, _polynomial, ("decay_power", "final_share")),
    "cosine": (_linear_warmup, _cosine, ("final_share",)),
    "constant": (_linear_warmup, lambda _schedule, _elapsed: 1.0, ()),
    "wsd": (_linear_warmup, _stable_then_linear, ("decay_proportion", "final_share")),
}


def effective_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `recipe`, as a checkpoint saves it, without those that have no effect or were not given."""
    # With a time budget the schedule is stretched to the clock.
    end = "total_training_steps" if recipe.get("time_budget") is None else "time_budget"
    *_, schedule_keys = SCHEDULES.get(str(recipe.get("lr_schedule")), ((),))
    keys = ("learning_rate", "lr_schedule", "warmup_proportion", *schedule_keys, "weight_decay", end, *OTHER_KEYS)
    optimizer = recipe.get("optimizer")
    found = {
        **{key: recipe.get(key) for key in keys},
        "batch_size": recipe.get("batch"),
        "optimizer": optimizer.get("type", "AdamW") if isinstance(optimizer, dict) else "AdamW",
    }
    return {key: value for key, value in found.items() if value is not None}
