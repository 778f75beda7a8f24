"""When a run ends, by steps, rows and time, and the learning rate on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.console import console
from common.errors import UserError
from common.words import format_seconds
from training.checkpoints.paths import TIME_SPENT
from training.checkpoints.state import Progress, TrainingState, note_time_spent, read_time_spent
from training.inputs.datasets import Datasets
from training.plan.horizon import Horizon, find_early_end
from training.plan.learning_rate import Schedule
from training.plan.step_plan import Phase, plan_steps
from training.plan.time_budget import Budget
from training.runtime import collectives
from training.settings.resolve import Settings

NO_END = 2**62


@dataclass(frozen=True)
class Clock:
    """The plan of a run against its progress. Without a time budget steps and rows alone decide."""

    horizon: Horizon
    schedule: Schedule
    budget: Budget
    progress: Progress
    max_checks_without_gain: int | None = None  # --stop_after_no_gain

    @property
    def has_budget(self) -> bool:
        return self.budget.total is not None

    def is_finished(self) -> bool:
        """Whether the run has reached its end. With a time budget: as all ranks last agreed."""
        return self.budget.is_ended or self.is_out_of_rows() or self.has_stalled()

    def has_stalled(self) -> bool:
        """Whether --stop_after_no_gain ends the run here."""
        limit = self.max_checks_without_gain
        return limit is not None and self.progress.state.checks_without_gain >= limit

    def is_out_of_rows(self) -> bool:
        """Whether steps or epochs end the run here, whatever its time budget."""
        return self.horizon.is_finished(self.progress.step, self.progress.samples)

    def pass_skipped_samples(self) -> None:
        """Move the cursor to where the next step can begin, or to the end of the run."""
        while not self.is_out_of_rows():
            num_rows = self.horizon.plan.at(self.progress.samples).rows
            cursor = self.progress.skips.next_sample(self.progress.samples, num_rows)
            if cursor == self.progress.samples:
                return
            self.progress.move_cursor(cursor)  # steps may have another size there

    def all_ranks_agree_on_time(self, seconds_per_step: float) -> None:
        """Take over rank 0's time and its decision whether the budget has room for one more step."""
        if not self.has_budget:
            return

        def read_clock() -> tuple[float, bool]:
            used = self.budget.used()
            return used, self.budget.is_over(used, seconds_per_step)

        seconds, is_over = collectives.all_ranks_from_main(read_clock)
        self.progress.set_seconds(seconds)
        if is_over:
            self.budget.end()

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.rate(self._schedule_position())

    def is_warm(self) -> bool:
        """Whether the schedule's warm-up is over."""
        return self._schedule_position() >= self.schedule.origin + self.schedule.warmup_steps

    def _schedule_position(self) -> float:
        """The position in the schedule, in its steps: those taken, or the used share of the time budget."""
        if not self.has_budget:
            return self.progress.step
        share = self.budget.progress(self.progress.state.seconds)
        return self.schedule.origin + share * self.schedule.total_steps

    def epoch(self) -> int:
        return self.horizon.epoch_of(self.progress.samples)

    def passes(self) -> float:
        """Passes over the data so far."""
        return self.horizon.plan.passes(self.progress.samples)

    def last_step(self) -> int | None:
        """None: the time budget ends the run."""
        return None if self.has_budget else self.horizon.last_step()

    def seconds_to_last_step(self, seconds_per_micro_step: float) -> float:
        """Seconds until steps and epochs end the run, by the micro-steps to come: later steps may have more of them."""
        steps = max(0, self.horizon.last_step() - self.progress.step)
        return self.horizon.plan.micro_steps_in(self.progress.samples, steps) * seconds_per_micro_step

    def seconds_left(self, seconds_per_micro_step: float) -> float:
        """Seconds until the run ends at this speed, or its time budget does."""
        left, total = self.seconds_to_last_step(seconds_per_micro_step), self.budget.total
        return left if total is None else min(left, max(0.0, total - self.budget.used()))

    def find_early_end(self, seconds_per_micro_step: float) -> str | None:
        """Why the run ends before its time budget does, or None."""
        seconds = self.seconds_to_last_step(seconds_per_micro_step)
        return find_early_end(self.horizon, self.schedule, self.budget, seconds)

    def write_time_spent(self, folder: Path) -> None:
        """Save the time used so far, so that it counts even if this process is killed. For rank 0."""
        if self.has_budget:
            note_time_spent(folder, self.budget.used())


def _build_budget(settings: Settings, state: TrainingState, began: float | None = None) -> Budget:
    return Budget(
        settings.time_budget,
        used_before=state.seconds,
        began=began,
        longest_pause=state.longest_pause,
        num_last_pauses=2 if settings.flags.checkpoints.export_dir is None else 3,
    )


def build_clock(
    settings: Settings,
    world_size: int,
    datasets: Datasets,
    tokens_per_row: Sequence[float],
    progress: Progress,
    began: float | None,
) -> Clock:
    """`tokens_per_row`: the mean of each dataset. `began`: when the process started, by time.monotonic(); None: now."""
    state = progress.state
    schedule = settings.schedule(state.start_step if settings.flags.training.rewarmup else 0)
    phases = [
        (each.tokens, Phase(index, each.length, each.micro, data.num_rows, tokens))
        for index, (each, data, tokens) in enumerate(
            zip(settings.lengths, datasets.training, tokens_per_row, strict=True)
        )
    ]
    accumulation = settings.deepspeed.batch.accumulation
    horizon = Horizon(
        plan=plan_steps(
            phases, settings.flags.training.batch_schedule, accumulation=accumulation, world_size=world_size
        ),
        num_epochs=settings.training.num_epochs,
        # With a time budget the clock ends the run, and the schedule's steps are shares of its time.
        total_steps=settings.training.total_training_steps if settings.time_budget is None else NO_END,
        schedule_origin=schedule.origin,
        start_step=state.start_step,
        max_steps=settings.flags.training.max_steps,
        max_steps_per_epoch=settings.flags.training.max_steps_per_epoch,
    )
    budget = _build_budget(settings, state, began)
    if budget.is_over(state.seconds, 0.0):
        budget.end()
    return Clock(horizon, schedule, budget, progress, settings.flags.probes.stop_after_no_gain)


def is_run_finished(settings: Settings, world_size: int, datasets: Datasets, state: TrainingState) -> bool:
    """Whether a run that was saved with `state` has reached its end."""
    spent = replace(state, seconds=max(state.seconds, read_time_spent(settings.saved_models)))
    means = datasets.tokens_per_row()
    return build_clock(settings, world_size, datasets, means, Progress(spent), None).is_finished()


def all_ranks_count_lost_time(state: TrainingState, settings: Settings) -> TrainingState:
    """`state` with the time that a killed process of this run used after its last checkpoint.

    If that would leave no time at all, the process was killed at the very end. The steps that it lost are then trained
    again, so that the schedule reaches its end.
    """
    budget = settings.flags.training.time_budget
    if budget is None:
        return state

    def is_over(state: TrainingState) -> bool:
        return _build_budget(settings, state).is_over(state.seconds, 0.0)

    spent = collectives.all_ranks_from_main(lambda: read_time_spent(settings.saved_models))
    counted = replace(state, seconds=max(state.seconds, spent))
    if not is_over(counted) or is_over(state):
        return counted
    if state.step == state.start_step:
        raise UserError(
            f"--time_budget {budget}: earlier starts of this run have used it up ({format_seconds(spent)}) without "
            f"saving a checkpoint. Raise it and save more often (--save_every_minutes), or remove "
            f"{settings.saved_models / TIME_SPENT} to start again"
        )
    console.say(
        f"note: --time_budget {budget} was used up by a process that was killed before it saved its last steps. The "
        f"steps after step {state.step} ({format_seconds(spent - state.seconds)}) are trained again"
    )
    return state
