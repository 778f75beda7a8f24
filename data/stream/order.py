"""The order of samples: a pure function (seed, epoch, position in the epoch) → (shard, row).

Rows are read in blocks (neighbours in a file). An epoch puts all blocks of all shards in a random order, groups them
into shuffle windows of a few blocks, and shuffles the rows of each window. A row can appear anywhere in an epoch, its
neighbours in the file are spread over a whole window, and a reader needs one window in memory.

Cost: the order of blocks is drawn once per epoch (about 20 ns per block), the order of rows once per window. A jump to
any position costs the same as the next position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.randomness import generator

WINDOW_ROWS = 8192  # about 8 MB at 128 tokens
MIN_WINDOW_BLOCKS = 8  # with fewer, neighbours in a file would often meet in a batch


class ShardSize(NamedTuple):
    """Number of rows of a shard, and of one of its blocks."""

    num_rows: int
    block_rows: int


@dataclass(frozen=True)
class ShuffleWindow:
    """Some blocks and the order of their rows: position k is row `order[k]` of the concatenated blocks."""

    shards: np.ndarray  # [blocks]
    starts: np.ndarray  # [blocks]; first row of each block in its shard
    stops: np.ndarray  # [blocks]
    order: np.ndarray  # [rows]


class SampleOrder:
    """The order of the rows of one dataset."""

    def __init__(self, sizes: Sequence[ShardSize], seed: int) -> None:
        self.seed = seed
        starts = [np.arange(0, num_rows, block_rows, dtype=np.int64) for num_rows, block_rows in sizes]
        self._shards = np.repeat(np.arange(len(sizes)), [len(found) for found in starts])
        self._starts = np.concatenate(starts)
        num_rows, block_rows = np.array(sizes, dtype=np.int64).T
        self._stops = np.minimum(self._starts + block_rows[self._shards], num_rows[self._shards])
        self.num_rows = int(num_rows.sum())
        self._window_blocks = max(MIN_WINDOW_BLOCKS, WINDOW_ROWS // int(np.minimum(num_rows, block_rows).max()))
        # A batch needs one or two epochs and windows; the following batches need the same ones.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self.window = lru_cache(maxsize=4)(self._draw_window)  # (epoch, index) -> ShuffleWindow

    @property
    def num_windows(self) -> int:
        """Number of shuffle windows per epoch."""
        return -(-len(self._shards) // self._window_blocks)

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks in the order of this epoch, and the first position of each window, followed by the last end."""
        order = generator(self.seed, "blocks", epoch).permutation(len(self._shards))
        sizes = (self._stops - self._starts)[order]
        ends = np.cumsum(sizes)[self._window_blocks - 1 :: self._window_blocks]
        bounds = np.concatenate([[0], ends])
        return order, bounds if bounds[-1] == self.num_rows else np.append(bounds, self.num_rows)

    def _draw_window(self, epoch: int, index: int) -> ShuffleWindow:
        order, bounds = self._epoch(epoch)
        blocks = order[index * self._window_blocks : (index + 1) * self._window_blocks]
        rows = generator(self.seed, "rows", epoch, index).permutation(bounds[index + 1] - bounds[index])
        return ShuffleWindow(self._shards[blocks], self._starts[blocks], self._stops[blocks], rows)

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

    def locate(self, epoch: int, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Shards and rows, each [stop - start], of the positions [start, stop) of a window."""
        window = self.window(epoch, index)
        ends = np.cumsum(window.stops - window.starts)
        offsets = window.order[start:stop]
        block = np.searchsorted(ends, offsets, side="right")
        return window.shards[block], window.stops[block] - (ends[block] - offsets)
