"""Estimates of a run before it starts: its steps, tokens and epochs, and whether its time budget outlasts its data."""

from dataclasses import dataclass

from common.words import format_seconds
from training.plan.horizon import Horizon
from training.plan.learning_rate import Schedule
from training.plan.time_budget import Budget


@dataclass(frozen=True)
class Outlook:
    """Estimates from the mean tokens per row of each dataset."""

    data_tokens: float
    steps_left: int
    tokens_left: float
    epochs_left: float


def look_ahead(horizon: Horizon, step: int, samples: int) -> Outlook:
    """What is left of the run after `step` steps and `samples` rows."""
    plan = horizon.plan
    steps_left = max(0, horizon.last_step() - step)
    end = plan.sample_after(samples, steps_left)
    return Outlook(
        data_tokens=sum(phase.num_rows * phase.tokens_per_row for phase in plan.phases),
        steps_left=steps_left,
        tokens_left=plan.at(end).phase.tokens_at(end) - plan.at(samples).phase.tokens_at(samples),
        epochs_left=plan.passes(end) - plan.passes(samples),
    )


def find_early_end(horizon: Horizon, schedule: Schedule, budget: Budget, seconds_to_last_step: float) -> str | None:
    """A note that num_epochs ends the run before its time budget, or None; with --max_steps that is intended."""
    if budget.total is None or horizon.max_steps is not None or seconds_to_last_step >= budget.left():
        return None
    done = budget.progress(budget.used() + seconds_to_last_step) * schedule.total_steps
    share = schedule.rate(schedule.origin + done) / schedule.peak
    return (
        f"num_epochs ends the run in about {format_seconds(seconds_to_last_step)}, but its time budget allows for "
        f"{format_seconds(budget.left())} of training: the learning rate will then be {share:.0%} of the peak; raise "
        f"num_epochs, or lower --time_budget"
    )
