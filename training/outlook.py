"""What can be said of a run before it starts: its data, its length, and what will not go as the user may think."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from data.shards import PretrainingDataset
from training.horizon import Horizon
from training.schedule import Schedule

SAMPLED_ROWS = 256
# Weights, master weights and two moments, as DeepSpeed writes them, in bytes a parameter.
CHECKPOINT_BYTES = 16


@dataclass(frozen=True)
class Outlook:
    """Estimates; `tokens_per_row` is measured on the first rows."""

    num_rows: int
    tokens_per_row: float
    steps_left: int
    batch_size: int

    @property
    def data_tokens(self) -> float:
        return self.num_rows * self.tokens_per_row

    @property
    def tokens_left(self) -> float:
        return self.steps_left * self.batch_size * self.tokens_per_row

    @property
    def epochs_left(self) -> float:
        return self.steps_left * self.batch_size / self.num_rows


def mean_tokens(data: PretrainingDataset) -> float:
    """Real tokens a row, of the first rows."""
    rows = data.read(0, 0, min(SAMPLED_ROWS, data.shards[0].num_rows))
    return float(rows.input_mask.sum()) / len(rows)


def look_ahead(data: PretrainingDataset, horizon: Horizon, step: int) -> Outlook:
    return Outlook(
        num_rows=data.num_rows,
        tokens_per_row=mean_tokens(data),
        steps_left=max(0, horizon.last_step() - step),
        batch_size=horizon.batch_size,
    )


def find_notes(
    horizon: Horizon, schedule: Schedule, *, num_parameters: int, output_dir: Path, has_validation: bool
) -> list[str]:
    """Sentences on what the user may not expect."""
    notes = []
    last, end = horizon.last_step(), schedule.origin + schedule.total_steps
    if (
        last < end and horizon.max_steps is None and horizon.total_steps == schedule.total_steps
    ):  # with --max_steps the user has said so
        share = schedule.rate(last) / schedule.peak
        notes.append(
            f"the run ends at step {last:,}, before the schedule does at {end:,} (total_training_steps): its rate will "
            f"then be {share:.0%} of the peak"
        )
    if schedule.warmup_steps > last - schedule.origin:
        notes.append(f"the run ends before its warm-up of {schedule.warmup_steps:,.0f} steps does")
    if not has_validation:
        notes.append("there is no validation data; name its folder in the model JSON as validation.path")
    folder = next(parent for parent in (output_dir, *output_dir.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(folder).free, num_parameters * CHECKPOINT_BYTES
    if free < 2 * needed:
        notes.append(
            f"{folder} has {free / 2**30:.1f} GiB free, and a checkpoint takes about {needed / 2**30:.1f} GiB; make "
            f"room, or pass --keep_last"
        )
    return notes


def count_people(number: float) -> str:
    """1234567 → 1.2 M"""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
