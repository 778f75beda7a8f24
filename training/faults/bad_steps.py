"""Bad steps: steps that no rank applied, because a loss or a gradient was infinite or NaN."""

import json
from pathlib import Path

from common.console import console
from common.errors import UserError
from common.files import append_whole
from data.shards.dataset import PretrainingDataset
from data.stream.loader import StepBatches
from training.checkpoints.paths import SKIPS
from training.checkpoints.state import Progress, Skips


class TooManyBadSteps(UserError):
    """--max_bad_steps in a row. The weights are those from before `first_sample`, the first row of the bad steps."""

    def __init__(self, message: str, first_sample: int) -> None:
        super().__init__(message)
        self.first_sample = first_sample


class BadSteps:
    """Counts bad steps in a row and writes their rows to `file`, each rank its own."""

    def __init__(self, limit: int, file: Path, saved_models: Path) -> None:
        self.limit, self.file, self.skips_file = limit, file, saved_models / SKIPS
        self.num_in_row = 0
        self.first_sample = 0  # of those in a row

    def note_good(self) -> None:
        self.num_in_row = 0

    def note_bad(self, batches: StepBatches, dataset: PretrainingDataset, progress: Progress) -> None:
        """Warn of a bad step, before its rows are counted in `progress`. Raises TooManyBadSteps at the limit."""
        self.num_in_row += 1
        if self.num_in_row == 1:
            self.first_sample = progress.samples
        self._write(batches, dataset, progress.step)
        what = (
            f"after step {progress.step} the loss or its gradient was infinite or NaN for samples {progress.samples} "
            f"to {batches.next_sample - 1}; no rank applied this step ({self.num_in_row} in a row). Its rows are "
            f"listed in {self.file}"
        )
        if self.num_in_row < self.limit:
            console.warn(what)
            return
        saved = "The weights from before these steps are saved"
        if progress.step == progress.state.start_step:
            saved = "No step had been applied before, so there is nothing to save"
        skips = progress.skips.merged(Skips(((self.first_sample, batches.next_sample),)))
        raise TooManyBadSteps(
            f"{what}. This is the limit --max_bad_steps. Check those rows, lower the learning rate, or train in "
            f"another precision. {saved}. To skip their rows, write {json.dumps(skips.entries())} to {self.skips_file}",
            self.first_sample,
        )

    def _write(self, batches: StepBatches, dataset: PretrainingDataset, step: int) -> None:
        row = {
            "after_step": step,
            "next_sample": batches.next_sample,
            "rows": [dataset.describe_row(number) for number in batches.rows],
        }
        try:
            append_whole(self.file, json.dumps(row) + "\n")
        except OSError as error:
            console.warn(f"{self.file}: cannot be written ({error.strerror})")
