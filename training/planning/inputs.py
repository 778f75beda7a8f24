"""What a plan starts from: the two JSON files and the data's lengths. The only module here that reads users' files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError, shortened
from common.json_files import load_json
from common.words import counted
from data.shards.dataset import open_dataset
from nvidia.config import BertConfig
from training.planning.workload import RowLengths
from training.settings.deepspeed_file import BATCH_KEYS, check_content
from training.settings.model_file import load_model_file, section_for_length

MASKED_SHARE = 0.15
SAMPLED_SHARDS = 16
SAMPLED_ROWS = 256  # of each
MAX_PREDICTIONS = 10**6  # any shard's are accepted


@dataclass(frozen=True)
class ModelInput:
    config: BertConfig
    name: str
    total_steps: int
    num_epochs: int
    folders: tuple[Path, ...]  # relative to the data's prefix


@dataclass(frozen=True)
class EngineInput:
    """The DeepSpeed JSON with its batch resolved for the cluster, as far as it can be."""

    content: dict[str, Any]
    precision: str
    total_rows: int
    micro: int | None  # as configured; None where the file leaves it open or where it does not divide the batch


@dataclass(frozen=True)
class DataInput:
    lengths: RowLengths
    origin: str  # for people: where the lengths come from
    num_rows: int | None = None
    bytes_per_row: float | None = None  # on disk


def read_model(path: Path, width: int) -> ModelInput:
    file = load_model_file(path)
    section = section_for_length(file.mixed_seq_training, width, "mixed_seq_training", path)
    folders = section_for_length(file.data.mixed_seq_datasets, width, "data.mixed_seq_datasets", path)
    config = file.bert_config().with_padded_vocab()
    if width > config.max_position_embeddings:
        raise UserError(
            f"{path}: max_position_embeddings is {config.max_position_embeddings}, but --max_seq_length is {width}; "
            f"raise one or lower the other"
        )
    return ModelInput(
        config, file.name, section.total_training_steps, section.num_epochs, tuple(map(Path, folders.values()))
    )


def read_engine(path: Path, world_size: int) -> EngineInput:
    """Check the file as a run would; the batch is checked apart, because it may fit another number of ranks only."""
    content = load_json(path, "a DeepSpeed JSON (--deepspeed_config)")
    problems = Problems()
    others = {key: value for key, value in content.items() if key not in BATCH_KEYS}
    checked = problems.attempt(lambda: check_content({**others, BATCH_KEYS[1]: 1}, path, 1, str(path)))
    batch = problems.attempt(lambda: _resolve_batch(path, content, world_size))
    problems.raise_if_any()
    assert checked is not None
    assert batch is not None
    return EngineInput(content, checked.wanted_precision, *batch)


def _resolve_batch(path: Path, content: dict[str, Any], world_size: int) -> tuple[int, int | None]:
    """Rows per step, and rows per micro-step where the file's numbers fit together for this many ranks."""
    for key in BATCH_KEYS:
        value = content.get(key)
        if value is not None and (type(value) is not int or not 1 <= value < 2**31):
            raise UserError(f"{path}: {key} must be a whole number of at least 1, but found {shortened(value)}")
    total, micro, accumulation = (content.get(key) for key in BATCH_KEYS)
    if total is None and micro is None:
        raise UserError(f"{path}: has neither train_batch_size nor train_micro_batch_size_per_gpu; give one of them")
    if total is None:
        assert micro is not None
        return micro * (accumulation or 1) * world_size, micro
    if total % world_size:
        low = total // world_size * world_size
        near = " or ".join(str(rows) for rows in (low, low + world_size) if rows)
        raise UserError(
            f"{path}: train_batch_size {total} cannot be divided among {world_size:,} ranks; expected a multiple, such "
            f"as {near}, or another --gpus"
        )
    per_rank = total // world_size
    if micro is None:
        micro = per_rank // (accumulation or 1)
    fits = micro > 0 and per_rank % micro == 0 and accumulation in (None, per_rank // micro)
    return total, micro if fits else None


def describe_lengths(width: int, mean_tokens: float | None, masked: int | None) -> DataInput:
    """Row lengths without data: every row has `mean_tokens`, or is full."""
    mean = float(width if mean_tokens is None else mean_tokens)
    if not 2 <= mean <= width:
        raise UserError(f"--mean_tokens {mean:g}: expected 2 to --max_seq_length ({width})")
    predicted = MASKED_SHARE * mean if masked is None else min(float(masked), mean)
    origin = "full rows (pass --mean_tokens or --data_path_prefix)" if mean_tokens is None else "--mean_tokens"
    return DataInput(RowLengths(width, mean, mean * mean, predicted), origin)


def measure_lengths(prefix: Path, folders: Sequence[Path], width: int) -> DataInput:
    """Row lengths of some rows of the shards; bytes per row from the sizes of all files."""
    dataset = open_dataset(
        [prefix / folder for folder in folders],
        split="training",
        max_seq_length=width,
        max_predictions_per_seq=MAX_PREDICTIONS,
    )
    lengths: list[float] = []
    masked = 0
    step = max(1, len(dataset.shards) // SAMPLED_SHARDS)
    for shard in range(0, len(dataset.shards), step):
        rows = dataset.read(shard, 0, min(SAMPLED_ROWS, dataset.shards[shard].layout.num_rows))
        lengths += [float(length) for length in rows.input_mask.sum(axis=1)]
        masked += int((rows.masked_lm_positions > 0).sum())
    dataset.close()
    size = sum(file.stat().st_size for file in dataset.files)
    mean_masked = masked / len(lengths) or MASKED_SHARE * sum(lengths) / len(lengths)  # none: drawn while training
    return DataInput(
        RowLengths.of(width, lengths, mean_masked),
        f"{counted(len(lengths), 'row')} of {prefix}",
        dataset.num_rows,
        size / dataset.num_rows,
    )
