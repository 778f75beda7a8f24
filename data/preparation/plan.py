"""Plans which documents are held out, which piece donates random segments to which, and which rows make a shard."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from common.console import console
from common.errors import UserError
from common.words import counted
from data.preparation.duplicates import DROPPED
from data.preparation.settings import DEFAULT_VALIDATION_SHARE, Settings
from data.preparation.work_folder import WorkFolder
from data.randomness import derive_key, generator

MIN_HELD_OUT_ROWS = 200  # with fewer, the loss of a split says little
_MARGIN = 1.25  # since documents differ in length
_MIN_DOCUMENTS = 4  # one document alone has no random pairs
_MAX_SHARE = 0.1  # of the documents that are held out without being asked for
_BYTES_PER_TOKEN = 5  # a cautious estimate, so that the rows are not overestimated

InstanceSet = tuple[str, str, int, int]  # piece, donor, copy, number of instances


class RowRange(NamedTuple):
    """Rows [start, stop) of the instances of one piece and copy, and the number of the first in the whole split."""

    piece: str
    donor: str
    copy: int
    start: int
    stop: int
    first_number: int


class ShardTask(NamedTuple):
    split: str
    length: int
    predictions: int
    number: int
    total: int
    ranges: tuple[RowRange, ...]

    @property
    def name(self) -> str:
        return f"{self.split}-{self.length}-{self.number:05d}-of-{self.total:05d}"


def donor_shift(settings: Settings, split: str, length: int, copy: int, num_pieces: int) -> int:
    """Return the distance from a piece to the one that donates its random segments; 0 if there is only one piece."""
    if num_pieces < 2:
        return 0
    return 1 + int(generator(settings.seed, "donor", split, length, copy).integers(num_pieces - 1))


def choose_donors(sole_keys: Sequence[int | None], shift: int) -> list[int]:
    """Return for each piece the number of its donor, `shift` pieces further on, cyclically.

    `sole_keys` has the key of the document if a piece has only one, else None. The pieces of one document follow each
    other and donate nothing to each other, unless there is no other piece.
    """
    count = len(sole_keys)
    donors: list[int] = []
    for key, group in groupby(sole_keys):
        size = len(list(group))
        runs = [1] * size if key is None else [size]
        for run in runs:
            end, others = len(donors) + run, count - run
            for offset in range(run):
                donors.append((end + (shift - 1 + offset) % others) % count if others else (offset + shift) % count)
    return donors


def plan_shards(
    split: str, length: int, predictions: int, parts: Sequence[InstanceSet], shard_rows: int
) -> list[ShardTask]:
    """Divide the numbered rows of a split evenly among shards of at most `shard_rows`."""
    total_rows = sum(part[3] for part in parts)
    total = -(-total_rows // shard_rows)
    ranges: list[list[RowRange]] = [[] for _ in range(total)]
    index = first = 0
    for piece, donor, copy, count in parts:
        low = first
        while low < first + count:
            end = total_rows * (index + 1) // total  # of the current shard
            high = min(first + count, end)
            ranges[index].append(RowRange(piece, donor, copy, low - first, high - first, low))
            low = high
            index += high == end
        first += count
    return [ShardTask(split, length, predictions, number, total, tuple(part)) for number, part in enumerate(ranges)]


def shares_of(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return [documents] a number from 0 to 1 that decides the split: a function of the text and the seed."""
    mixed = (keys ^ np.uint64(derive_key(seed, "split"))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2**53


def splits_of(keys: np.ndarray, settings: Settings) -> np.ndarray:
    """Return [documents] 0 training, 1 validation, 2 test."""
    assert settings.validation_share is not None, "with_validation_share chooses it first"
    shares = shares_of(keys, settings.seed)
    below = settings.validation_share + settings.test_share
    return np.where(shares < settings.validation_share, 1, np.where(shares < below, 2, 0))


def with_validation_share(settings: Settings, folder: WorkFolder, pieces: Sequence[str]) -> Settings:
    """Choose the share, if none is given: one that leaves enough rows, from 1 % to a tenth of the documents."""
    if settings.validation_share is not None:
        return settings
    keys = np.unique(np.concatenate([folder.load_array("keys", piece) for piece in pieces]))
    shares = np.sort(shares_of(keys[keys != DROPPED], settings.seed))
    num_bytes = sum(folder.text_path(piece).stat().st_size for piece in pieces)
    num_rows = max(len(shares), num_bytes / _BYTES_PER_TOKEN / max(settings.max_seq_lengths))
    needed = max(_MIN_DOCUMENTS, math.ceil(_MARGIN * MIN_HELD_OUT_ROWS * len(shares) / num_rows))
    allowed = int(len(shares) * _MAX_SHARE * (1 - settings.test_share))
    share = DEFAULT_VALIDATION_SHARE
    num_held_out = min(needed, allowed)
    if num_held_out and shares[num_held_out - 1] >= share:
        share = math.ceil((shares[num_held_out - 1] + 1e-9) * 1e4) / 1e4
        held_out = f"{int((shares < share).sum()):,} of {counted(len(shares), 'document')}"
        console.say(f"--validation_share {share:g}: {held_out} are held out, so that the loss can be measured")
    return replace(settings, validation_share=share)


def check_splits(settings: Settings, rows: dict[tuple[str, int], int], counts: Counter[str]) -> None:
    """Refuse a preparation without training rows before a shard is written; warn about splits of few rows."""
    for length in settings.max_seq_lengths:
        if not rows.get(("training", length)):
            raise UserError(
                f"--max_seq_length {length}: {counted(counts['documents'], 'document')}, "
                f"{counts['training_documents']:,} of them for training, gave not one row to train on; give more text, "
                f"or a smaller --validation_share, --test_share or --min_document_words"
            )
    for split, share in (("validation", settings.validation_share), ("test", settings.test_share)):
        if share and not counts[f"{split}_documents"]:
            console.warn(
                f"no document is left for {split}: --{split}_share {share:g} selected none of {counts['documents']:,}, "
                f"and a document belongs to one split as a whole; give more documents, or a larger share"
            )
        elif share:
            _warn_about_few_rows(settings, rows, split, share)


def _warn_about_few_rows(settings: Settings, rows: dict[tuple[str, int], int], split: str, share: float) -> None:
    length = min(settings.max_seq_lengths, key=lambda length: rows.get((split, length), 0))
    found = rows.get((split, length), 0)
    if found >= MIN_HELD_OUT_ROWS:
        return
    total = sum(count / settings.copies(name) for (name, width), count in rows.items() if width == length)
    enough = _MARGIN * MIN_HELD_OUT_ROWS * max(1 / total, share / max(1, found))
    digits = 10 ** (1 - math.floor(math.log10(enough)))  # two of them
    enough = math.ceil(enough * digits) / digits
    remedy = f"--{split}_share {enough:g} would be enough" if enough <= 0.5 else "give more text"
    console.warn(
        f"--max_seq_length {length}: {counted(found, 'row')} for {split} ({share:g} of the documents), fewer than "
        f"{MIN_HELD_OUT_ROWS}, so its loss is uncertain; {remedy}"
    )
