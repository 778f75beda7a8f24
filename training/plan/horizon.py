"""Where a run and its epochs end, as a function of steps and rows, and estimates of what is left of it."""

from dataclasses import dataclass

from common.words import format_seconds
from training.plan.learning_rate import Schedule
from training.plan.step_plan import StepPlan
from training.plan.time_budget import Budget


@dataclass(frozen=True)
class Horizon:
    """A run ends after `num_epochs`, `total_steps` of the schedule or `max_steps` of the run, whichever comes first.

    With several lengths, `num_epochs` counts the epochs of the last length.
    """

    plan: StepPlan
    num_epochs: int
    total_steps: int
    schedule_origin: int
    start_step: int
    max_steps: int | None = None
    max_steps_per_epoch: int | None = None

    @property
    def last_sample(self) -> int:
        """The sample at which the last epoch ends."""
        last = self.plan.phases[-1]
        return last.first_sample + self.num_epochs * last.num_rows

    def epoch_of(self, samples: int) -> int:
        return self.plan.at(samples).phase.epoch_of(samples)

    def is_finished(self, step: int, samples: int) -> bool:
        return (
            samples >= self.last_sample
            or step >= self.schedule_origin + self.total_steps
            or (self.max_steps is not None and step >= self.start_step + self.max_steps)
        )

    def last_step(self) -> int:
        """The step at which the run ends if no step is skipped."""
        whole_epochs = self.plan.steps_for(self.last_sample)
        if self.max_steps_per_epoch is not None:
            whole_epochs = min(whole_epochs, self.num_epochs * self.max_steps_per_epoch)
        ends = [self.schedule_origin + self.total_steps, self.start_step + whole_epochs]
        if self.max_steps is not None:
            ends.append(self.start_step + self.max_steps)
        return min(ends)

    def next_sample(self, samples: int) -> int:
        """The next sample to read: `samples`, or the start of the next epoch after `max_steps_per_epoch` steps."""
        if self.max_steps_per_epoch is None or self._steps_in_epoch(samples) < self.max_steps_per_epoch:
            return samples
        return self.plan.at(samples).phase.epoch_end(samples)

    def steps_to_epoch_end(self, samples: int) -> int:
        """Steps from sample `samples` to the start of the next epoch."""
        segment = self.plan.at(samples)
        steps = -(-(segment.phase.epoch_end(samples) - samples) // segment.rows)
        if self.max_steps_per_epoch is None:
            return steps
        return min(steps, self.max_steps_per_epoch - self._steps_in_epoch(samples))

    def _steps_in_epoch(self, samples: int) -> int:
        segment = self.plan.at(samples)
        return (samples - (segment.phase.epoch_end(samples) - segment.phase.num_rows)) // segment.rows


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
