"""The data of a run: opened and checked whole, before anything is built on it."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import Problems
from data.schema import Split
from data.shards import PretrainingDataset, check_apart, check_masked, check_tokenizer, open_dataset
from training.data_fit import check_fit
from training.environment import Place
from training.settings import Settings


class Datasets(NamedTuple):
    training: tuple[PretrainingDataset, ...]  # one for each length
    validation: PretrainingDataset | None

    @property
    def digest(self) -> str:
        """The identity of the training data of all lengths."""
        digests = [data.digest for data in self.training]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    @property
    def summary(self) -> str:
        return " and ".join(f"{data.num_rows:,} rows in {len(data.files)} files" for data in self.training)


def open_data(settings: Settings, place: Place) -> Datasets:
    """Every rank opens all the data; with --verify_data each reads its share of the files whole.

    What is wrong with any of it is told at once.
    """
    options: dict[str, Any] = {
        "max_predictions_per_seq": settings.flags.max_predictions_per_seq,
        "vocab_size": settings.model_config.num_tokens,
        "verify": settings.flags.verify_data,
        "share": (place.rank, place.world_size),
    }
    problems = Problems()

    def open_split(folders: Sequence[Path], split: Split, length: int, weights: Sequence[float] | None = None) -> Any:
        return problems.attempt(
            lambda: open_dataset(folders, split=split, max_seq_length=length, weights=weights, **options)
        )

    opened = [open_split(each.folders, "training", each.length, each.weights) for each in settings.lengths]
    training = tuple(data for data in opened if data is not None)
    validation = None
    if settings.validation_folder is not None:
        validation = open_split([settings.validation_folder], "validation", settings.flags.max_seq_length)
    found = [*training, *([] if validation is None else [validation])]
    for data in found:
        problems.attempt(partial(check_fit, data, settings.model_config))
    problems.attempt(lambda: check_tokenizer(found, settings.tokenizer.digest if settings.tokenizer else None))
    if not settings.flags.dynamic_masking:
        for data in training:
            problems.attempt(partial(check_masked, data, "pass --dynamic_masking"))
    if validation is not None:
        problems.attempt(lambda: check_masked(validation, "name another folder as the model JSON's validation.path"))
        problems.attempt(lambda: check_apart(training, validation))
    problems.raise_if_any()
    return Datasets(training, validation)
