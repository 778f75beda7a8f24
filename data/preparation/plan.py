"""Plans which piece donates random segments to which, and which rows make up which shard."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from data.preparation.settings import Settings
from data.randomness import generator

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
