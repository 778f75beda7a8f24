"""The data of a run, opened and checked before anything is built."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.console import console
from common.errors import Problems, UserError
from common.words import counted
from data.shards.cache import ShardCache
from data.shards.dataset import PretrainingDataset, check_disjoint, check_masked, check_tokenizer, open_dataset
from data.shards.folder import find_shards, open_shard
from data.shards.schema import Split
from nvidia.config import BertConfig
from training.runtime.ranks import RankInfo
from training.settings.resolve import DataRequest

SAMPLED_ROWS = 256  # for the mean length
CHECKED_ROWS = 64  # for segments
# What label 1 means, by the objective of the data and by the model's sentence head.
PAIRS = {"nsp": "B is random", "sop": "A and B are swapped"}


class Datasets(NamedTuple):
    training: tuple[PretrainingDataset, ...]  # one per length
    validation: PretrainingDataset | None
    validation_length: int = 0  # tokens per row, which may differ from training
    cache: ShardCache | None = None  # of shards that are fetched from a store

    @property
    def digest(self) -> str:
        """Identifies the training data of all lengths."""
        digests = [data.digest for data in self.training]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def tokens_per_row(self) -> list[float]:
        """The mean of each length's training data. Reads rows, so ranks do it in all_ranks_read()."""
        return [mean_tokens(data) for data in self.training]

    @property
    def summary(self) -> str:
        return " and ".join(describe_rows(data) for data in self.training)


def describe_rows(data: PretrainingDataset, length: int | None = None) -> str:
    """`1,200 rows of 128 in 3 files`."""
    of_length = "" if length is None else f" of {length}"
    return f"{counted(data.num_rows, 'row')}{of_length} in {counted(len(data.files), 'file')}"


def mean_tokens(data: PretrainingDataset) -> float:
    """Tokens per row without padding, estimated from the first rows."""
    rows = data.read(0, 0, min(SAMPLED_ROWS, data.shards[0].layout.num_rows))
    return float(rows.input_mask.sum()) / len(rows)


def open_data(request: DataRequest, rank_info: RankInfo, cache: ShardCache | None = None) -> Datasets:
    """Open all data on this rank; with `verify`, each rank reads its share of the files completely.

    All problems are reported at once.
    """
    options: dict[str, Any] = {
        "vocab_size": request.vocab_size,
        "verify": request.verify,
        "share": (rank_info.rank, rank_info.world_size),
        "cache": cache,
    }
    problems = Problems()

    def open_split(
        folders: Sequence[Path], split: Split, length: int, predictions: int, weights: Sequence[float] | None = None
    ) -> Any:
        return problems.attempt(
            lambda: open_dataset(
                folders,
                split=split,
                max_seq_length=length,
                max_predictions_per_seq=predictions,
                weights=weights,
                **options,
            )
        )

    opened = [
        open_split(each.folders, "training", each.length, request.max_predictions, each.weights)
        for each in request.lengths
    ]
    training = tuple(data for data in opened if data is not None)
    validation, length = None, 0
    if request.validation_folder is not None:
        shape = problems.attempt(lambda: find_validation_shape(request, cache))
        if shape is not None:
            length, predictions = shape
            validation = open_split([request.validation_folder], "validation", length, predictions)
    found = [*training, *([] if validation is None else [validation])]
    for data in found:
        problems.attempt(partial(check_fit, data, request.model_config))
    problems.attempt(lambda: check_tokenizer(found, request.tokenizer_digest))
    if not request.draws_masks:
        for data in training:
            problems.attempt(partial(check_masked, data, "pass --dynamic_masking"))
    if validation is not None:
        problems.attempt(lambda: check_masked(validation, "set the model JSON's validation.path to another folder"))
        problems.attempt(lambda: check_disjoint(training, validation))
    problems.raise_if_any()
    if cache is not None and (warning := cache.describe_refetching()) is not None:
        console.warn(warning)
    return Datasets(training, validation, length, cache)


def find_validation_shape(request: DataRequest, cache: ShardCache | None = None) -> tuple[int, int]:
    """Tokens and predictions per row in the first validation shard; they may differ from training."""
    assert request.validation_folder is not None
    path = find_shards(request.validation_folder, "validation")[0]
    shard = open_shard(path, cache)
    length, predictions = shard.layout.max_seq_length, shard.layout.max_predictions_per_seq
    shard.close()
    max_length = request.model_config.max_position_embeddings
    if length > max_length:
        raise UserError(
            f"{path}: validation rows are {length} tokens wide, but the model JSON's max_position_embeddings is "
            f"{max_length}; raise it, or set validation.path to a folder with shorter rows"
        )
    return length, max(predictions, 1)


def check_fit(data: PretrainingDataset, config: BertConfig) -> None:
    """Refuse labels that mean something else to the sentence head, and segments without an embedding."""
    problems = Problems()
    _check_objective(data, config.sentence_head, problems)
    if config.type_vocab_size == 1:
        _check_segments(data, problems)
    problems.raise_if_any()


def _check_objective(data: PretrainingDataset, head: str, problems: Problems) -> None:
    """One message per folder. Shards of other tools do not record their objective."""
    reported = set()
    for shard in data.shards:
        objective = (shard.layout.attributes or {}).get("objective")
        if head in PAIRS and objective in tuple(PAIRS) and objective != head and shard.folder not in reported:
            reported.add(shard.folder)
            problems.add(
                f"{shard.path}: was prepared with --objective {objective}, where label 1 means {PAIRS[objective]!r}, "
                f"but the model JSON's sentence_head is {head!r}, which would learn it as {PAIRS[head]!r}; set "
                f"bert_model_config.sentence_head to {objective!r}, or prepare the data with --objective {head}"
            )


def _check_segments(data: PretrainingDataset, problems: Problems) -> None:
    """Checks the first rows of each folder: either all rows are pairs or none is."""
    checked = set()
    for index, shard in enumerate(data.shards):
        if shard.folder not in checked:
            checked.add(shard.folder)
            if data.read(index, 0, min(CHECKED_ROWS, shard.layout.num_rows)).segment_ids.any():
                problems.add(
                    f"{shard.path}: has rows with two segments, but the model JSON's type_vocab_size is 1; set "
                    f"bert_model_config.type_vocab_size to 2, or prepare data with one segment (--objective mlm)"
                )
