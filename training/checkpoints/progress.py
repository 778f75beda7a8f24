"""How far a run has come: the state that checkpoints save, and every change that training makes to it."""

import math
from dataclasses import replace

from training.checkpoints.folder import Best
from training.checkpoints.paths import tag_of_step
from training.checkpoints.state import Ranges, Skips, TrainingState


class Progress:
    """Owns the run's TrainingState. It is the same on all ranks, so every method must be called on all of them."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state

    @property
    def step(self) -> int:
        """Optimizer steps applied."""
        return self.state.step

    @property
    def samples(self) -> int:
        """The data cursor: the sample that the next step begins with."""
        return self.state.samples

    @property
    def skips(self) -> Skips:
        return Skips(self.state.skips, self.state.rollbacks)

    def advance(self, step: int, next_sample: int) -> None:
        """Count the rows of a step as consumed. `step` stays the same where the engine skipped it."""
        self.state = replace(self.state, step=step, samples=next_sample)

    def move_cursor(self, sample: int) -> None:
        """Continue reading at `sample`: past skipped samples, or back at the first of several bad steps."""
        self.state = replace(self.state, samples=sample)

    def add_tokens(self, num_tokens: int) -> None:
        self.state = replace(self.state, tokens=self.state.tokens + num_tokens)

    def set_seconds(self, seconds: float) -> None:
        """Set the time used so far, by rank 0's clock."""
        self.state = replace(self.state, seconds=seconds)

    def note_validation(
        self, mlm_loss: float, *, is_kept: bool, is_saved_anyway: bool, is_watched: bool = False
    ) -> Best | None:
        """Record a validation loss.

        `is_kept`: --keep_best asks for a checkpoint of the lowest loss. Returns the mark for it when this is the lowest
        so far, or None. `is_saved_anyway`: this step's checkpoint is due for another reason too. `is_watched`:
        --stop_after_no_gain goes by it.
        """
        lowest = self.state.best_validation_loss
        is_gain = math.isfinite(mlm_loss) and (lowest is None or mlm_loss < lowest)
        if is_watched:
            self._count_check(is_gain)
        if not is_gain:
            return None
        self.state = replace(self.state, best_validation_loss=mlm_loss)
        return self._mark(Best(tag_of_step(self.step), mlm_loss, not is_saved_anyway)) if is_kept else None

    def note_probe(self, name: str, value: float, *, is_kept: bool, is_saved_anyway: bool) -> Best | None:
        """Record the value of the probe `name`, by which --keep_best_by or --stop_after_no_gain goes."""
        highest = self.state.best_probe if self.state.probe_name == name else None
        is_gain = math.isfinite(value) and (highest is None or value > highest)
        self._count_check(is_gain)
        if not is_gain:
            return None
        self.state = replace(self.state, probe_name=name, best_probe=value)
        best = Best(tag_of_step(self.step), None, not is_saved_anyway, probe=name, value=value)
        return self._mark(best) if is_kept else None

    def _count_check(self, is_gain: bool) -> None:
        checks = 0 if is_gain else self.state.checks_without_gain + 1
        self.state = replace(self.state, checks_without_gain=checks)

    def _mark(self, best: Best) -> Best:
        self.state = replace(self.state, best_tag=best.tag, best_is_only=best.is_only_best, best_by=best.probe)
        return best

    def set_probe_units(self, units: dict[str, int]) -> None:
        """Record how many units of each probe are scored, for the whole run."""
        self.state = replace(self.state, probe_units=units)

    def roll_back(self, saved: TrainingState, skipped: Ranges) -> None:
        """Return to `saved`, an earlier state of this run, and skip the samples `skipped` from now on."""
        skips = self.skips.merged(Skips(skipped, skipped))
        self.state = replace(
            saved,
            world_size=self.state.world_size,
            seconds=self.state.seconds,  # the time is used all the same
            recipe=self.state.recipe,
            data_summary=self.state.data_summary,
            probe_units=self.state.probe_units,
            skips=skips.ranges,
            rollbacks=skips.rollbacks,
        )
