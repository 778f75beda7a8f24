"""What can be said of a run before it starts: its data, its length, and what will not go as the user may think."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from data.shards.dataset import PretrainingDataset
from nvidia.attention.registry import BackendContext, choose_backend
from nvidia.config import BertConfig
from training.metrics.formatting import format_seconds
from training.plan.horizon import Horizon
from training.plan.learning_rate import Schedule
from training.plan.time_budget import Budget

SAMPLED_ROWS = 256
# Weights, master weights and two moments, as DeepSpeed writes them, in bytes a parameter.
CHECKPOINT_BYTES = 16


@dataclass(frozen=True)
class Outlook:
    """Estimates from the tokens of each data's first rows."""

    data_tokens: float
    steps_left: int
    tokens_left: float
    epochs_left: float


def mean_tokens(data: PretrainingDataset) -> float:
    """Real tokens a row, of the first rows."""
    rows = data.read(0, 0, min(SAMPLED_ROWS, data.shards[0].num_rows))
    return float(rows.input_mask.sum()) / len(rows)


def look_ahead(horizon: Horizon, step: int, samples: int) -> Outlook:
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
    """That num_epochs ends a run before its time budget does, and at which rate; --max_steps is a user's wish."""
    if budget.total is None or horizon.max_steps is not None or seconds_to_last_step >= budget.left():
        return None
    done = budget.progress(budget.used() + seconds_to_last_step) * schedule.total_steps
    share = schedule.rate(schedule.origin + done) / schedule.peak
    return (
        f"num_epochs ends the run in about {format_seconds(seconds_to_last_step)}, but its time budget lasts for "
        f"{format_seconds(budget.left())} of training: its rate will then be {share:.0%} of the peak; raise "
        f"num_epochs, or lower --time_budget"
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
    is_timed = horizon.total_steps != schedule.total_steps  # then warm-up and decay are shares of the time
    if schedule.warmup_steps > last - schedule.origin and not is_timed:
        notes.append(f"the run ends before its warm-up of {schedule.warmup_steps:,.0f} steps does")
    if not has_validation:
        notes.append(
            "there is no validation data, so the run tells nothing of unseen text and has no best checkpoint; prepare "
            "some (data.prepare --validation_share) and name its folder in the model JSON as validation.path"
        )
    folder = next(parent for parent in (output_dir, *output_dir.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(folder).free, num_parameters * CHECKPOINT_BYTES
    if free < 2 * needed:
        notes.append(
            f"{folder} has {free / 2**30:.1f} GiB free, and a checkpoint takes about {needed / 2**30:.1f} GiB; make "
            f"room, or pass --keep_last"
        )
    return notes


TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def find_attention_notes(
    config: BertConfig, precision: str, device: str, capability: tuple[int, int] | None
) -> list[str]:
    """What attention dropout costs on a GPU, whose fastest kernels have none."""
    if device == "cpu" or config.attention_backend != "auto":
        return []
    given = BackendContext(
        device=device,
        dtype=TYPES[precision],
        head_size=config.head_size,
        dropout_prob=config.attention_probs_dropout_prob,
        needs_plain=config.position_embedding_type != "absolute",
        is_sparse=config.is_sparse,
        capability=capability,
    )
    taken, faster = choose_backend("auto", given), choose_backend("auto", given._replace(dropout_prob=0.0))
    if taken == faster:
        return []
    return [
        f"attention is computed by {taken!r}, on padding too, because the faster {faster!r} has no dropout and "
        f"attention_probs_dropout_prob is {config.attention_probs_dropout_prob}; 0 in the model JSON makes it faster"
        + ("" if config.is_sparse else ", or attention_backend 'jagged', which has never run on a GPU")
    ]


def format_count(number: float) -> str:
    """1234567 → 1.2 M"""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
