"""Checks datasets against each other, and against the tokenizer and the masking of a run."""

from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from data.shards.dataset import PretrainingDataset, check_same_tokenizer
from data.shards.reader import PREPARE_COMMAND


def check_tokenizer(datasets: Sequence[PretrainingDataset], digest: str | None) -> None:
    """Refuse data made with another tokenizer than `digest`, if it is known, or than the other datasets."""
    for data in datasets:
        if None not in (digest, data.tokenizer_digest) and data.tokenizer_digest != digest:
            raise UserError(
                f"{data.files[0].parent}: was made with another tokenizer than the model JSON's bert_token_file. Use "
                f"the tokenizer that prepared the data, or prepare the data again."
            )
    check_same_tokenizer([shard for data in datasets for shard in data.shards])


def check_masked(data: PretrainingDataset, remedy: str) -> None:
    """Refuse shards that were prepared without masks; `remedy`: what else helps than preparing them with masks."""
    unmasked = next((shard for shard in data.shards if not shard.is_masked), None)
    if unmasked is not None:
        raise UserError(
            f"{unmasked.path}: was prepared without masks (--dupe_factor 0). To use it, {remedy}, or prepare it with "
            f"--dupe_factor 1 or more."
        )


def check_disjoint(training: Sequence[PretrainingDataset], validation: PretrainingDataset) -> None:
    """Refuse a validation file that is also training data: the same file, or the same content by its digest."""
    trained = {identity: path for data in training for path, identity in _identities(data)}
    for path, identity in _identities(validation):
        if identity in trained:
            raise UserError(
                f"{path}: is validation data, but {trained[identity]} is the same file and is training data, so the "
                f"validation loss would mean nothing. Prepare a separate split with "
                f"`{PREPARE_COMMAND} --validation_share 0.01`."
            )


def _identities(data: PretrainingDataset) -> list[tuple[Path, Path | str]]:
    """Two identities of each file: its path with links resolved, and its digest."""
    return [(shard.path, identity) for shard in data.shards for identity in (shard.path.resolve(), shard.digest)]
