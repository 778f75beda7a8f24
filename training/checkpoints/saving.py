"""When a checkpoint is due, and what becomes of a run whose disk is full."""

import time
from dataclasses import replace

from common.console import console
from common.errors import UserError
from training.build import Run
from training.checkpoints.paths import step_of
from training.checkpoints.retention import Best, Retention
from training.checkpoints.writer import SaveFailed
from training.metrics.timing import SectionTimer
from training.runtime import collectives

# A finished run is worth waiting for space; a run that was asked to stop has seconds.
FINAL_PATIENCE_SECONDS = 600.0
RETRY_SECONDS = 10.0


class Saver:
    """Saves by steps, by minutes, at epoch ends and at the end, as the flags say."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.saved_at = time.monotonic()
        self.saved_step = run.state.step  # of the last save, which may not be committed yet; at first, of the origin
        flags = run.settings.flags
        self.retention = Retention(flags.keep_last, flags.keep_every)
        self.is_commit_timed = run.budget.total is None  # without a time budget there is no need to

    def is_overdue(self) -> bool:
        """By this rank's clock, --save_every_minutes. Rank 0's counts."""
        minutes = self.run.settings.flags.save_every_minutes
        if minutes is None or not self.run.rank_info.is_main:
            return False
        return time.monotonic() - self.saved_at >= 60 * minutes

    def is_due(self, epoch: int, is_finished: bool) -> bool:
        """After a step of `epoch`, by the counts that are the same on every rank."""
        run, flags = self.run, self.run.settings.flags
        if is_finished or (flags.save_every_steps is not None and run.state.step % flags.save_every_steps == 0):
            return True
        ended_epoch = run.horizon.epoch_of(run.state.samples) > epoch
        return ended_epoch and (flags.ckpt_to_save is None or epoch in flags.ckpt_to_save)

    def steps_to_next(self) -> int:
        """Steps from here to the next checkpoint by steps or epochs, when nothing is skipped."""
        run, flags, step = self.run, self.run.settings.flags, self.run.state.step
        candidates = [run.horizon.last_step() - step]
        if flags.save_every_steps is not None:
            candidates.append(flags.save_every_steps - step % flags.save_every_steps)
        if flags.ckpt_to_save is None or run.horizon.epoch_of(run.state.samples) in flags.ckpt_to_save:
            candidates.append(run.horizon.steps_to_epoch_end(run.state.samples))
        return min(candidates)

    def seconds_to_next(self, seconds_per_step: float) -> float:
        """Time from here to the next checkpoint at this pace, --save_every_minutes included."""
        by_steps = self.steps_to_next() * seconds_per_step
        minutes = self.run.settings.flags.save_every_minutes
        if minutes is None:
            return by_steps
        return min(by_steps, max(0.0, 60 * minutes - (time.monotonic() - self.saved_at)))

    def save(self, best: Best | None) -> None:
        """A checkpoint on the way. One that cannot be written is told, and training goes on."""
        try:
            self._save(best)
        except SaveFailed as failure:
            console.warn(f"{failure}. Training goes on, and the next save tries again")

    def wait(self) -> None:
        """For the checkpoint that is being committed; one that could not be is written again, if there is space now."""
        try:
            self.run.checkpoints.finish()
        except SaveFailed as failure:
            console.warn(str(failure))
            self.save_last(None, None, patience=0.0)

    def save_last(
        self, best: Best | None, phases: SectionTimer | None, patience: float = FINAL_PATIENCE_SECONDS
    ) -> None:
        """The checkpoint that a run ends with: wait `patience` seconds for space, then give up with the reason."""
        deadline = time.monotonic() + patience
        while True:
            if phases is not None:
                phases.begin("saving for the last time")
            try:
                self._save(best)
                self.run.checkpoints.finish()
                return
            except SaveFailed as failure:
                left, lost = collectives.all_ranks_from_main(
                    lambda: (deadline - time.monotonic(), self._steps_to_repeat())
                )
                if left <= 0 or self.run.stop.all_ranks_agreed():
                    raise UserError(f"{failure}. The same command goes on from there ({lost} steps again)") from None
                console.warn(f"{failure}. Trying again for {left:.0f} s")
                time.sleep(RETRY_SECONDS)

    def _steps_to_repeat(self) -> int:
        """Steps since the newest checkpoint that is there and good. Rank 0 knows: it commits in the background."""
        good, state = self.run.checkpoints.newest_known_valid(), self.run.state
        return state.step - (state.start_step if good is None else step_of(good))

    def _save(self, best: Best | None) -> None:
        run, began = self.run, time.perf_counter()
        self.saved_at = time.monotonic()
        try:
            run.checkpoints.finish()
        except SaveFailed as failure:
            console.warn(str(failure))
        # Rank 0's clock is the one that is saved; in run.state it would part the ranks.
        state = replace(run.state, seconds=run.budget.used(), longest_pause=run.budget.longest_pause)
        run.checkpoints.save(run.engine, state, run.settings.sources, self.retention, best)
        if not self.is_commit_timed:
            # The last checkpoint is waited for until it is committed; one on the way must show how long that takes.
            run.checkpoints.finish()
            self.is_commit_timed = True
        self.saved_step = run.state.step
        run.budget.note_pause(time.perf_counter() - began)
