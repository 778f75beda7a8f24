"""--on_spike: a warning, or a rollback to the last checkpoint before the spike, whose batch is then skipped."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.console import console
from common.errors import UserError
from training.checkpoints.loading import all_ranks_load_engine
from training.checkpoints.paths import SKIPS
from training.checkpoints.progress import Progress
from training.checkpoints.state import Ranges, read_state, write_skips
from training.checkpoints.writer import CheckpointWriter, SaveFailed
from training.faults.spikes import Spike, SpikeDetector
from training.metrics.sinks import Sinks
from training.metrics.window import StepLoss
from training.runtime import collectives

MAX_ROLLBACKS = 3  # to the same checkpoint: after that the batches are not the cause of the spikes


@dataclass(frozen=True)
class SpikeResponse:
    """Finds spikes in the steps reported, and answers them as --on_spike says."""

    does_roll_back: bool
    checkpoints: CheckpointWriter
    engine: Any
    progress: Progress
    sinks: Sinks
    detector: SpikeDetector = field(default_factory=SpikeDetector)

    def all_ranks_respond(self, steps: Sequence[StepLoss]) -> bool:
        """Warn of spikes among `steps`. True: the run was rolled back to an earlier step."""
        spikes = self.detector.find(steps)
        for spike in spikes:
            console.warn(str(spike))
        if not spikes or not self.does_roll_back:
            return False
        if not all_ranks_roll_back(spikes[0], self.checkpoints, self.engine, self.progress, self.sinks):
            console.warn("there is no earlier checkpoint to roll back to. Training continues")
            return False
        self._check_limit(spikes[0])
        console.warn(
            f"rolled back to step {self.progress.step}; samples {spikes[0].at.first_sample} to "
            f"{spikes[0].at.next_sample - 1} are skipped"
        )
        return True

    def _check_limit(self, spike: Spike) -> None:
        step, rollbacks = self.progress.step, count_rollbacks(self.progress.skips.rollbacks, self.progress.samples)
        if rollbacks > MAX_ROLLBACKS:
            raise UserError(
                f"{spike}: the loss still jumps after {rollbacks - 1} rollbacks to step {step}, so the batches are not "
                f"the cause. Lower the learning rate or lengthen the warm-up, and start again. The checkpoint of that "
                f"step is valid. To train on the skipped batches again, remove {self.checkpoints.folder / SKIPS}"
            )


def all_ranks_roll_back(
    spike: Spike, checkpoints: CheckpointWriter, engine: Any, progress: Progress, sinks: Sinks
) -> bool:
    """Load the newest checkpoint from before `spike`, and skip its samples from now on. False: there is none."""
    try:
        checkpoints.all_ranks_finish()
    except SaveFailed as failure:
        console.warn(str(failure))
    tag = collectives.all_ranks_from_main(lambda: checkpoints.newest_valid(before_step=spike.at.step))
    if tag is None:
        return False
    saved = read_state(checkpoints.folder / tag)
    all_ranks_load_engine(engine, checkpoints.folder / tag, saved, progress.state.world_size)
    progress.roll_back(saved, ((spike.at.first_sample, spike.at.next_sample),))
    if collectives.is_main():
        write_skips(checkpoints.folder, progress.skips)
    sinks.roll_back(progress)
    return True


def count_rollbacks(rollbacks: Ranges, sample: int) -> int:
    """How often a run has rolled back to `sample`, over all restarts: each time skipped samples that follow it."""
    return sum(first >= sample for first, _ in rollbacks)
