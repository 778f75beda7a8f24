"""When a run saves, and what happens when its disk is full."""

import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from common.console import console
from common.errors import UserError
from common.words import counted
from training.checkpoints.folder import Retention
from training.checkpoints.paths import step_of
from training.checkpoints.state import Best, Progress
from training.checkpoints.writer import CheckpointWriter, SaveFailed, Sources
from training.plan.horizon import Horizon
from training.plan.time_budget import Budget
from training.runtime import collectives
from training.runtime.stopping import StopRequests

# A finished run waits this long for free space. A run that was asked to stop has only seconds.
FINAL_PATIENCE_SECONDS = 600.0
RETRY_SECONDS = 10.0


@dataclass(frozen=True)
class SavePolicy:
    """When to save, and what to keep."""

    retention: Retention
    every_steps: int | None = None
    every_minutes: float = math.inf
    epochs: Container[int] | None = None  # at whose end to save; None: all


@dataclass
class Saver:
    """Saves a run's checkpoints: by steps, by minutes, at the ends of epochs and at the end."""

    checkpoints: CheckpointWriter
    engine: Any
    progress: Progress
    horizon: Horizon
    budget: Budget
    stop: StopRequests
    policy: SavePolicy
    sources: Sources
    note: Callable[[str], None]  # is called with what begins, for the watchdog

    def __post_init__(self) -> None:
        self.saved_at = time.monotonic()
        # Step and samples of the last save, which may still be uncommitted; at first, of the resume point.
        self.saved_position = (self.progress.step, self.progress.samples)
        self.is_commit_timed = self.budget.total is None  # only a time budget needs to know how long a commit takes

    @property
    def has_unsaved_steps(self) -> bool:
        """Also if rows after the last save gave no step; but a run without a step has nothing to save."""
        state = self.progress.state
        return state.step > state.start_step and (state.step, state.samples) != self.saved_position

    def note_rollback(self) -> None:
        """The run has returned to a checkpoint, so no step is unsaved."""
        self.saved_position = (self.progress.step, self.progress.samples)

    def is_overdue(self) -> bool:
        """Whether --save_every_minutes have passed, by this rank's clock. Only rank 0's answer counts."""
        return time.monotonic() - self.saved_at >= 60 * self.policy.every_minutes

    def is_due(self, epoch: int) -> bool:
        """Whether a save is due after a step that began in `epoch`. The same on all ranks."""
        every, step = self.policy.every_steps, self.progress.step
        if every is not None and step % every == 0:
            return True
        has_epoch_ended = self.horizon.epoch_of(self.progress.samples) > epoch
        return has_epoch_ended and (self.policy.epochs is None or epoch in self.policy.epochs)

    def seconds_to_next(self, seconds_per_step: float) -> float:
        """Seconds until the next checkpoint at this speed, if no step is skipped."""
        step, samples, policy = self.progress.step, self.progress.samples, self.policy
        steps = [self.horizon.last_step() - step]
        if policy.every_steps is not None:
            steps.append(policy.every_steps - step % policy.every_steps)
        if policy.epochs is None or self.horizon.epoch_of(samples) in policy.epochs:
            steps.append(self.horizon.steps_to_epoch_end(samples))
        by_clock = self.saved_at + 60 * policy.every_minutes - time.monotonic()
        return min(min(steps) * seconds_per_step, max(0.0, by_clock))

    def all_ranks_save(self, best: Best | None) -> None:
        """Save a checkpoint during training. If it cannot be written, warn and continue."""
        try:
            self._all_ranks_save(best)
        except SaveFailed as failure:
            console.warn(f"{failure}. Training continues, and the next save tries again")

    def all_ranks_save_unsaved(self) -> None:
        """Save the steps since the last checkpoint before the run ends early, without waiting for space.

        A checkpoint that is still being committed is waited for, and written again if that fails.
        """
        if self.has_unsaved_steps or not self.checkpoints.all_ranks_finish_or_warn():
            self.all_ranks_save_last(None, patience=0.0)

    def all_ranks_save_last(self, best: Best | None = None, patience: float = FINAL_PATIENCE_SECONDS) -> None:
        """Save the last checkpoint of a run: wait `patience` seconds for space, then fail with the reason."""
        deadline = time.monotonic() + patience
        while True:
            self.note("last save")
            try:
                self._all_ranks_save(best)
                self.checkpoints.all_ranks_finish()
                return
            except SaveFailed as failure:
                # Only rank 0 knows the newest valid one, because it commits in the background.
                left, valid = collectives.all_ranks_from_main(
                    lambda: (deadline - time.monotonic(), self.checkpoints.newest_known_valid())
                )
                if left <= 0 or self.stop.all_ranks_agreed():
                    start = "starts again" if valid is None else f"resumes from {valid}"
                    first = self.progress.state.start_step if valid is None else step_of(valid)
                    lost = counted(self.progress.step - first, "step")
                    raise UserError(f"{failure}. The same command {start} and repeats {lost}") from None
                console.warn(f"{failure}. Trying again for {left:.0f} s")
                time.sleep(RETRY_SECONDS)

    def _all_ranks_save(self, best: Best | None) -> None:
        began, self.saved_at = time.perf_counter(), time.monotonic()
        self.checkpoints.all_ranks_finish_or_warn()
        # By rank 0's clock, which differs from that of other ranks and must not enter their state.
        used, pause = self.budget.used(), self.budget.longest_pause
        state = replace(self.progress.state, seconds=used, longest_pause=pause)
        self.checkpoints.all_ranks_save(self.engine, state, self.sources, self.policy.retention, best)
        if not self.is_commit_timed:
            # The run waits for the commit of its last checkpoint, so the time of one commit must be known before.
            self.checkpoints.all_ranks_finish()
            self.is_commit_timed = True
        self.saved_position = (state.step, state.samples)
        self.budget.note_pause(time.perf_counter() - began)
