"""The order of samples: a pure function (seed, epoch, position in the epoch) → (shard, row).

Rows are read in blocks (neighbours in a file). An epoch lays all blocks of all shards in a random order, takes them in
windows of a few blocks, and shuffles the rows of a window among each other. So a row can come up anywhere in an epoch,
its neighbours in the file are spread over a whole window, and a reader needs one window in memory, never a corpus.

Cost: the order of blocks is drawn once an epoch (about 20 ns a block), the order of rows once a window; nothing depends
on how far a position is from the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.randomness import generator

WINDOW_ROWS = 8192  # about 8 MB at 128 tokens
MIN_WINDOW_BLOCKS = 8  # with fewer, neighbours would meet in a batch too often


@dataclass(frozen=True)
class Extent:
    """What the plan must know of a shard: its rows, and how many of them are read at once."""

    num_rows: int
    block_rows: int


@dataclass(frozen=True)
class MetricsWindow:
    """Some blocks and the shuffled order of their rows: position k is row `order[k]` of the blocks laid end to end."""

    shards: np.ndarray  # [blocks]
    starts: np.ndarray  # [blocks]; first row of each block in its shard
    stops: np.ndarray  # [blocks]
    order: np.ndarray  # [rows]


class Plan:
    """The order of one dataset's rows."""

    def __init__(self, extents: Sequence[Extent], seed: int) -> None:
        self.seed = seed
        shards, starts, stops = [], [], []
        for shard, extent in enumerate(extents):
            first = np.arange(0, extent.num_rows, extent.block_rows, dtype=np.int64)
            shards.append(np.full(len(first), shard, dtype=np.int64))
            starts.append(first)
            stops.append(np.minimum(first + extent.block_rows, extent.num_rows))
        self._shards, self._starts, self._stops = (np.concatenate(part) for part in (shards, starts, stops))
        self.num_rows = int((self._stops - self._starts).sum())
        largest = max(min(extent.num_rows, extent.block_rows) for extent in extents)
        self.window_blocks = max(MIN_WINDOW_BLOCKS, WINDOW_ROWS // largest)
        # An epoch is asked for thousands of times in a row, two of them at its end; a window likewise.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self.window = lru_cache(maxsize=4)(self._draw_window)

    @property
    def num_windows(self) -> int:
        """In every epoch."""
        return -(-len(self._shards) // self.window_blocks)

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks in this epoch's order, and the position at which each window begins (and the last one ends)."""
        order = generator(self.seed, "blocks", epoch).permutation(len(self._shards))
        sizes = (self._stops - self._starts)[order]
        ends = np.cumsum(sizes)[self.window_blocks - 1 :: self.window_blocks]
        bounds = np.concatenate([[0], ends])
        return order, bounds if bounds[-1] == self.num_rows else np.append(bounds, self.num_rows)

    def _draw_window(self, epoch: int, index: int) -> MetricsWindow:
        order, bounds = self._epoch(epoch)
        blocks = order[index * self.window_blocks : (index + 1) * self.window_blocks]
        rows = generator(self.seed, "rows", epoch, index).permutation(bounds[index + 1] - bounds[index])
        return MetricsWindow(self._shards[blocks], self._starts[blocks], self._stops[blocks], rows)

    def pieces(self, epoch: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The windows that positions [start, stop) of an epoch lie in: (window, first and last + 1 within it)."""
        _, bounds = self._epoch(epoch)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        pieces = []
        while start < stop:
            end = min(stop, int(bounds[first + 1]))
            pieces.append((first, start - int(bounds[first]), end - int(bounds[first])))
            start, first = end, first + 1
        return pieces

    def locate(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """[stop - start, 2] (shard, row) of the positions [start, stop) of an epoch."""
        found = [self.locate_in_window(epoch, *piece) for piece in self.pieces(epoch, start, stop)]
        return np.concatenate(found) if found else np.empty((0, 2), dtype=np.int64)

    def locate_in_window(self, epoch: int, index: int, start: int, stop: int) -> np.ndarray:
        window = self.window(epoch, index)
        ends = np.cumsum(window.stops - window.starts)
        offsets = window.order[start:stop]
        block = np.searchsorted(ends, offsets, side="right")
        rows = window.stops[block] - (ends[block] - offsets)
        return np.stack([window.shards[block], rows], axis=1)
