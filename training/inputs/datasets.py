"""The data of a run: opened and checked before anything is built, and the streams of rows that segments read."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.console import console
from common.errors import Problems, UserError
from common.words import counted
from data.masking import MaskingPolicy
from data.shards.cache import ShardCache
from data.shards.dataset import PretrainingDataset, check_disjoint, check_masked, check_tokenizer, open_dataset
from data.shards.folder import find_shards, open_shard
from data.stream.loader import TrainingStream
from nvidia.config import BertConfig
from training.plan.step_plan import Segment
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


def open_data(
    request: DataRequest, rank_info: RankInfo, cache: ShardCache | None = None, is_trial: bool = False
) -> Datasets:
    """Open all data on this rank; with --verify_data, each rank reads its share of the files completely.

    All problems are reported at once. `is_trial`: only to find them, because the settings have problems already.
    """
    flags, config, tokenizer = request.flags, request.model_config, request.tokenizer
    open_split = partial(
        open_dataset,
        # Without a tokenizer the vocabulary size is the JSON's, which may be what is wrong.
        vocab_size=None if is_trial and tokenizer is None else config.num_tokens,
        verify=flags.verify_data and not is_trial,
        share=(rank_info.rank, rank_info.world_size),
        cache=cache,
    )
    problems = Problems()
    opened = [
        problems.attempt(
            partial(
                open_split,
                each.folders,
                split="training",
                max_seq_length=each.length,
                max_predictions_per_seq=flags.max_predictions_per_seq,
                weights=each.weights,
            )
        )
        for each in request.lengths
    ]
    training = tuple(data for data in opened if data is not None)
    validation, length, folder = None, 0, request.validation_folder
    if folder is not None:
        length, predictions = problems.attempt(lambda: find_validation_shape(folder, config, cache)) or (0, 0)
        if length:
            validation = problems.attempt(
                lambda: open_split(
                    [folder], split="validation", max_seq_length=length, max_predictions_per_seq=predictions
                )
            )
    found = [*training, *([] if validation is None else [validation])]
    for data in found:
        problems.attempt(partial(check_fit, data, config))
    problems.attempt(lambda: check_tokenizer(found, None if tokenizer is None else tokenizer.digest))
    if not flags.dynamic_masking:
        for data in training:
            problems.attempt(partial(check_masked, data, "pass --dynamic_masking"))
    if validation is not None:
        problems.attempt(lambda: check_masked(validation, "set the model JSON's validation.path to another folder"))
        problems.attempt(lambda: check_disjoint(training, validation))
    problems.raise_if_any()
    if cache is not None and (warning := cache.describe_refetching()) is not None:
        console.warn(warning)
    return Datasets(training, validation, length, cache)


def find_validation_shape(folder: Path, config: BertConfig, cache: ShardCache | None) -> tuple[int, int]:
    """Tokens and predictions per row in the first validation shard; they may differ from training."""
    path = find_shards(folder, "validation")[0]
    shard = open_shard(path, cache)
    length, predictions = shard.layout.max_seq_length, shard.layout.max_predictions_per_seq
    shard.close()
    if length > config.max_position_embeddings:
        raise UserError(
            f"{path}: validation rows are {length} tokens wide, but the model JSON's max_position_embeddings is "
            f"{config.max_position_embeddings}; raise it, or set validation.path to a folder with shorter rows"
        )
    return length, max(predictions, 1)


def check_fit(data: PretrainingDataset, config: BertConfig) -> None:
    """Refuse labels that mean something else to the sentence head, and segments without an embedding.

    One message per folder. Shards of other tools do not record their objective. Of segments, the first rows of each
    folder are checked: either all rows are pairs or none is.
    """
    problems, head = Problems(), config.sentence_head
    mislabelled, checked = set(), set()
    for index, shard in enumerate(data.shards):
        objective = (shard.layout.attributes or {}).get("objective")
        if head in PAIRS and objective in tuple(PAIRS) and objective != head and shard.folder not in mislabelled:
            mislabelled.add(shard.folder)
            problems.add(
                f"{shard.path}: was prepared with --objective {objective}, where label 1 means {PAIRS[objective]!r}, "
                f"but the model JSON's sentence_head is {head!r}, which would learn it as {PAIRS[head]!r}; set "
                f"bert_model_config.sentence_head to {objective!r}, or prepare the data with --objective {head}"
            )
        if config.type_vocab_size == 1 and shard.folder not in checked:
            checked.add(shard.folder)
            if data.read(index, 0, min(CHECKED_ROWS, shard.layout.num_rows)).segment_ids.any():
                problems.add(
                    f"{shard.path}: has rows with two segments, but the model JSON's type_vocab_size is 1; set "
                    f"bert_model_config.type_vocab_size to 2, or prepare data with one segment (--objective mlm)"
                )
    problems.raise_if_any()


def build_stream(
    training: Sequence[PretrainingDataset],
    rank_info: RankInfo,
    seed: int,
    masking: DataRequest | None,
    segment: Segment,
) -> TrainingStream:
    """The stream of the segment's steps over the data of its phase; `training` has one dataset per length."""
    phase = segment.phase
    return TrainingStream(
        training[phase.index],
        seed=seed,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        micro_batch_size=phase.micro,
        gradient_accumulation_steps=segment.accumulation,
        masking=None if masking is None else build_policy(masking, segment),
        stream_start=phase.first_sample,
    )


def build_policy(request: DataRequest, segment: Segment) -> MaskingPolicy:
    tokenizer, rates, phase = request.tokenizer, request.flags.masking_rate, segment.phase
    assert tokenizer is not None  # find_tokenizer() checks it
    steps = rates.in_steps(segment.rows * phase.tokens_per_row, phase.tokens_before)
    return MaskingPolicy(
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
        max_predictions_per_seq=request.lengths[phase.index].max_predictions,
        rate=rates.points[0][1],
        rate_schedule=steps if len(rates.points) > 1 else (),
        unit=request.flags.masking_unit,
        continuation_ids=tokenizer.continuation_ids,
    )
