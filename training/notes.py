"""Notes shown at the start of a run: what the user may not expect."""

import shutil
from pathlib import Path

from common.words import counted
from nvidia.attention.registry import choose_backend
from nvidia.config import BertConfig
from nvidia.self_attention import training_context
from training.plan.horizon import Horizon
from training.plan.learning_rate import Schedule
from training.runtime.precision import DTYPES

# Weights, master weights and two moments, as DeepSpeed writes them, in bytes per parameter.
CHECKPOINT_BYTES = 16

# The highest peak of the learning rate at which each optimizer has trained a BERT of any size, with some margin; the
# published ones are 4e-4 (AdamW) and 0.011 (Lamb), and small models with Muon take 0.008.
MAX_RATES = {"adam": 0.01, "adamw": 0.01, "lamb": 0.05, "muon": 0.1}
MAX_OTHER_RATE = 0.1
MIN_RATE = 1e-7
MIN_ROWS = 8  # per step; BERT used 256
MAX_WARMUP = 0.5  # of the schedule
MAX_WEIGHT_DECAY = 0.5


def find_warnings(horizon: Horizon, schedule: Schedule, *, optimizer: str, rows: int, weight_decay: float) -> list[str]:
    """Values far outside what has ever worked. `rows` are those of the last steps."""
    warnings = []
    peak, max_rate = schedule.peak, MAX_RATES.get(optimizer.lower(), MAX_OTHER_RATE)
    if peak > max_rate:
        warnings.append(
            f"the learning rate of {peak:g} is far above those at which {optimizer} has trained a BERT (up to about "
            f"{max_rate:g}), and the loss will probably diverge; pass for example --learning_rate 1e-4"
        )
    if peak < MIN_RATE:
        warnings.append(
            f"the learning rate of {peak:g} is so low that the model will hardly learn; pass for example "
            f"--learning_rate 1e-4"
        )
    is_timed = horizon.total_steps != schedule.total_steps  # then warm-up and decay are shares of the time
    if schedule.warmup_steps > horizon.last_step() - schedule.origin and not is_timed:
        warnings.append(
            f"the run ends before the end of its warm-up ({counted(round(schedule.warmup_steps), 'step')}), so the "
            f"learning rate never reaches its peak; lower warmup_proportion or total_training_steps"
        )
    elif schedule.warmup_proportion > MAX_WARMUP:
        warnings.append(
            f"the warm-up takes {schedule.warmup_proportion:.0%} of the schedule, usually 1% to 10%; lower "
            f"warmup_proportion"
        )
    if rows < MIN_ROWS:
        warnings.append(
            f"a step has only {counted(rows, 'row')}, so its gradient is mostly noise (BERT used 256 rows); pass for "
            f"example --train_batch_size 256"
        )
    if weight_decay > MAX_WEIGHT_DECAY:
        warnings.append(
            f"a weight decay of {weight_decay:g} is far above those that have worked (0.01 to 0.1) and pulls the "
            f"weights to zero; lower weight_decay"
        )
    return warnings


def find_notes(
    horizon: Horizon, schedule: Schedule, *, num_parameters: int, output_dir: Path, has_validation: bool
) -> list[str]:
    """Notes on the end of the schedule, validation data and free disk space."""
    notes = []
    last, end = horizon.last_step(), schedule.origin + schedule.total_steps
    is_timed = horizon.total_steps != schedule.total_steps  # then warm-up and decay are shares of the time
    if last < end and horizon.max_steps is None and not is_timed:  # --max_steps is the user's intention
        share = schedule.rate(last) / schedule.peak
        notes.append(
            f"the run ends at step {last:,}, before the end of the schedule at {end:,} (total_training_steps): the "
            f"learning rate will then be {share:.0%} of the peak"
        )
    if not has_validation:
        notes.append(
            "there is no validation data, so the loss on unseen text is not measured and there is no best checkpoint; "
            "prepare the data again with a validation share (data.prepare --validation_share 0.05), in the folder that "
            "the model JSON's validation.path names"
        )
    folder = next(parent for parent in (output_dir, *output_dir.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(folder).free, num_parameters * CHECKPOINT_BYTES
    if free < 2 * needed:
        notes.append(
            f"{folder} has {free / 2**30:.1f} GiB free, and a checkpoint takes about {needed / 2**30:.1f} GiB; free "
            f"some space, or pass --keep_last"
        )
    return notes


def find_model_notes(config: BertConfig, row_length: int) -> list[str]:
    """Parts of the model that have no effect on this data."""
    notes = []
    if config.attention_window // 2 >= row_length - 1 > 0:
        notes.append(
            f"attention_window is {config.attention_window}, so in rows of {row_length} tokens every token sees all "
            "others; the window has an effect only on longer rows"
        )
    if config.has_sentence_head and not config.type_vocab_size:
        notes.append(
            f"the model learns sentence pairs (sentence_head {config.sentence_head!r}) but has no embeddings of "
            "segments (type_vocab_size 0): only [SEP] separates the sentences of a pair"
        )
    return notes


def find_attention_notes(
    config: BertConfig, precision: str, device: str, capability: tuple[int, int] | None
) -> list[str]:
    """A note if attention dropout prevents a faster backend; the fastest GPU kernels have no dropout."""
    if device == "cpu" or config.attention_backend != "auto":
        return []
    given = training_context(config, device, DTYPES[precision], capability)
    taken, faster = choose_backend("auto", given), choose_backend("auto", given._replace(dropout_prob=0.0))
    if taken == faster:
        return []
    return [
        f"attention is computed by {taken!r}, including padding, because the faster {faster!r} has no dropout and "
        f"attention_probs_dropout_prob is {config.attention_probs_dropout_prob}; set it to 0 in the model JSON"
        + (
            ""
            if config.is_sparse or config.attention_window
            else ", or try attention_backend 'jagged', which has not been run on a GPU"
        )
    ]
