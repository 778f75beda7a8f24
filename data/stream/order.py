"""The order of samples: a pure function (seed, epoch, position in the epoch) → (shard, row).

An epoch puts all blocks (neighbours in a file) of all shards in a random order, groups them into shuffle windows of a
few blocks, and shuffles the rows of each window. A row can appear anywhere in an epoch, its neighbours in the file are
spread over a whole window, and a reader needs one window in memory.

Blocks are read in units. Where a unit is a whole block (shards of other tools, and our older ones), the rows of a
window are in random order. Where a block has several units, the window takes a row of each unit in turn, and the rows
of each unit in random order: every run of positions has the same number of rows of each unit, give or take one, so
ranks can share a batch such that each unit is decoded by one of them (`data/stream/row_source.py`).

Cost: the order of blocks is drawn once per epoch (about 20 ns per block), the order of rows once per window. A jump to
any position costs the same as the next position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from data.randomness import generator

WINDOW_ROWS = 8192  # about 8 MB at 128 tokens
INTERLEAVED_WINDOW_ROWS = 16384  # 512 units: one for each of 512 ranks
INTERLEAVED_WINDOW_TOKENS = 2**23  # fewer rows where they are longer than 512 tokens
MIN_WINDOW_BLOCKS = 8  # with fewer, neighbours in a file would often meet in a batch


class ShardSize(NamedTuple):
    """Number of rows of a shard, of one of its blocks, and of one unit of a block; 0: a block is one unit."""

    num_rows: int
    block_rows: int
    unit_rows: int = 0


@dataclass(frozen=True)
class ShuffleWindow:
    """Some units and the order of their rows: position k is row `order[k]` of the concatenated units."""

    shards: np.ndarray  # [units]
    starts: np.ndarray  # [units]; first row of each unit in its shard
    stops: np.ndarray  # [units]
    order: np.ndarray  # [rows]
    units: np.ndarray  # [rows]; the unit of each position

    @cached_property
    def places(self) -> np.ndarray:
        """[rows]; where in the window the unit of each position is: 16-bit integers, which numpy sorts fastest."""
        return (self.units * 2**16 // len(self.shards)).astype(np.uint16)

    @cached_property
    def firsts(self) -> np.ndarray:
        """[units]; the first row of each unit among the concatenated units."""
        sizes = self.stops - self.starts
        return np.cumsum(sizes) - sizes


class SampleOrder:
    """The order of the rows of one dataset."""

    def __init__(self, sizes: Sequence[ShardSize], seed: int, row_length: int = 0) -> None:
        """`row_length`: tokens per row, which limits the size of an interleaved window; 0: not known."""
        self.seed = seed
        starts = [np.arange(0, size.num_rows, size.block_rows, dtype=np.int64) for size in sizes]
        self._shards = np.repeat(np.arange(len(sizes)), [len(found) for found in starts])
        self._starts = np.concatenate(starts)
        num_rows, block_rows, unit_rows = np.array(sizes, dtype=np.int64).T
        self._stops = np.minimum(self._starts + block_rows[self._shards], num_rows[self._shards])
        self.num_rows = int(num_rows.sum())
        self.is_interleaved = bool(unit_rows.any())
        self._is_short = self._stops - self._starts < block_rows[self._shards]
        self._unit_rows = np.where(unit_rows > 0, unit_rows, block_rows)
        window_rows = WINDOW_ROWS
        if self.is_interleaved:
            window_rows = min(INTERLEAVED_WINDOW_ROWS, INTERLEAVED_WINDOW_TOKENS // max(1, row_length))
        self._window_blocks = max(MIN_WINDOW_BLOCKS, window_rows // int(np.minimum(num_rows, block_rows).max()))
        # A batch needs one or two epochs and windows; the following batches need the same ones.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self.window = lru_cache(maxsize=16)(self._draw_window)  # (epoch, index) -> ShuffleWindow

    @property
    def num_windows(self) -> int:
        """Number of shuffle windows per epoch."""
        return -(-len(self._shards) // self._window_blocks)

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks in the order of this epoch, and the first position of each window, followed by the last end."""
        order = generator(self.seed, "blocks", epoch).permutation(len(self._shards))
        if self.is_interleaved:  # shorter blocks last, so that other windows have equally many units
            order = order[np.argsort(self._is_short[order], kind="stable")]
        sizes = (self._stops - self._starts)[order]
        ends = np.cumsum(sizes)[self._window_blocks - 1 :: self._window_blocks]
        bounds = np.concatenate([[0], ends])
        return order, bounds if bounds[-1] == self.num_rows else np.append(bounds, self.num_rows)

    def _draw_window(self, epoch: int, index: int) -> ShuffleWindow:
        order, bounds = self._epoch(epoch)
        blocks = order[index * self._window_blocks : (index + 1) * self._window_blocks]
        random = generator(self.seed, "rows", epoch, index)
        shards, starts, stops = self._shards[blocks], self._starts[blocks], self._stops[blocks]
        if not self.is_interleaved:
            order = random.permutation(bounds[index + 1] - bounds[index])
            units = np.searchsorted(np.cumsum(stops - starts), order, side="right")
            return ShuffleWindow(shards, starts, stops, order, units)
        shards, starts, stops = self._split_into_units(shards, starts, stops)
        order, units = _interleave(stops - starts, random)
        return ShuffleWindow(shards, starts, stops, order, units)

    def _split_into_units(
        self, shards: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shards, starts and stops of the units of these blocks, block after block."""
        heights = self._unit_rows[shards]
        counts = -(-(stops - starts) // heights)
        block = np.repeat(np.arange(len(shards)), counts)
        within = np.arange(len(block)) - (np.cumsum(counts) - counts)[block]
        unit_starts = starts[block] + within * heights[block]
        return shards[block], unit_starts, np.minimum(unit_starts + heights[block], stops[block])

    def split_by_window(self, epoch: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split positions [start, stop) of an epoch: (window, start and stop within the window)."""
        _, bounds = self._epoch(epoch)
        window = int(np.searchsorted(bounds, start, side="right")) - 1
        found = []
        while start < stop:
            end = min(stop, int(bounds[window + 1]))
            found.append((window, start - int(bounds[window]), end - int(bounds[window])))
            start, window = end, window + 1
        return found

    def locate(self, epoch: int, index: int, positions: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Shards and rows, each [positions], of these positions of a window."""
        window = self.window(epoch, index)
        units = window.units[positions]
        return window.shards[units], window.starts[units] + window.order[positions] - window.firsts[units]


def _interleave(sizes: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The order of the rows of units with these sizes, and the unit of each position.

    In each round every unit gives one row, a unit with half the rows in every other round. Within a round the units
    are in bit-reversed order, so that every part of a round, too, is spread evenly over the window.
    """
    unit = np.repeat(np.arange(len(sizes)), sizes)
    turn = np.arange(len(unit)) - (np.cumsum(sizes) - sizes)[unit]
    # Integer keys without ties: sorting them is fast, and gives the same result on every processor.
    shuffled = np.argsort(unit << 47 | random.integers(2**32, size=len(unit)) << 15 | turn)
    order = np.argsort((turn * sizes.max() // sizes[unit]) << 32 | _reverse_bits(len(sizes))[unit])
    return shuffled[order], unit[order]


def _reverse_bits(count: int) -> np.ndarray:
    """[count] each number below `count` with its bits in reverse order: 0, 4, 2, 6, 1, 5, 3, 7 for 8."""
    numbers, reversed_bits = np.arange(count), np.zeros(count, dtype=np.int64)
    for bit in range(max(1, (count - 1).bit_length())):
        reversed_bits = reversed_bits << 1 | numbers >> bit & 1
    return reversed_bits
