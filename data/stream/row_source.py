"""Rows of any global samples: reads shuffle windows ahead, keeps a few in memory, draws new masks if asked to.

A rank reads its share of a window's units: rows of a global batch are ordered by the place of their unit in its window
and cut into as many runs as there are ranks, so a rank takes rows of the same units from every batch of a window, and
the ranks together decode each unit about once.
"""

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from data.masking import MaskingPolicy, mask_rows
from data.shards.dataset import PretrainingDataset
from data.shards.schema import Rows, concatenate_rows
from data.stream.mixture import Component, Mixture, Span
from data.stream.order import ShuffleWindow

_WINDOWS_KEPT = 3  # per component: the one in use, its neighbour when a batch covers both, the one read ahead
_WINDOWS_FETCHED = 8  # windows whose shards are fetched ahead from a store
_ROWS_TOGETHER = 512


class WindowKey(NamedTuple):
    """Identifies one shuffle window of a stream."""

    component: int
    epoch: int
    window: int  # index within the epoch


class Pick(NamedTuple):
    """Some positions of one window, and their global sample indices."""

    key: WindowKey
    positions: np.ndarray
    samples: np.ndarray


def _join(picks: list[Pick]) -> list[Pick]:
    """The same rows with one pick for each window."""
    by_key: dict[WindowKey, list[Pick]] = {}
    for pick in picks:
        by_key.setdefault(pick.key, []).append(pick)
    return [
        Pick(key, np.concatenate([pick.positions for pick in found]), np.concatenate([pick.samples for pick in found]))
        for key, found in by_key.items()
    ]


class UnitStore:
    """The units of one window that this rank has read or is reading."""

    def __init__(self, num_units: int) -> None:
        self._part = np.full(num_units, -1)  # the read that a unit belongs to
        self._offset = np.zeros(num_units, dtype=np.int64)  # its first row within that read
        self._reads: list[Future[Rows]] = []

    def missing(self, units: np.ndarray) -> np.ndarray:
        """Those of `units` that are not there, in ascending order."""
        return units[self._part[units] < 0]

    def add(self, units: np.ndarray, sizes: np.ndarray, read: "Future[Rows]") -> None:
        self._part[units] = len(self._reads)
        self._offset[units] = np.cumsum(sizes) - sizes
        self._reads.append(read)

    def take(self, units: np.ndarray, rows: np.ndarray) -> Rows:
        """Row `rows[i]` of unit `units[i]` for all i."""
        parts, offsets = self._part[units], self._offset[units] + rows
        used = np.unique(parts)
        if len(used) == 1:
            return self._reads[used[0]].result().take(offsets)
        found = concatenate_rows([self._reads[part].result().take(offsets[parts == part]) for part in used])
        return found.take(np.argsort(np.argsort(parts, kind="stable"), kind="stable"))


class RowSource:
    """Rows by global sample index, for one rank of `world_size`. One thread reads all files, beside the caller."""

    def __init__(
        self,
        dataset: PretrainingDataset,
        seed: int,
        masking: MaskingPolicy | None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._masking = masking
        self._rank, self._world_size = rank, world_size
        self._mixture = Mixture(dataset, seed)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="shard-reader")
        self._stores: OrderedDict[WindowKey, UnitStore] = OrderedDict()  # least recently used first
        self._ready: dict[int, tuple[Rows, np.ndarray]] = {}  # batches that were read with an earlier one, by start
        self._fetched_until = -1  # sample up to which fetch_ahead() has been called
        self.decoded_rows = 0  # asked for so far, by this rank

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._stores.clear()
        self._dataset.close()

    def read(self, start: int, stop: int, *, step: int = 0) -> tuple[Rows, np.ndarray]:
        """This rank's masked rows of the samples [start, stop), and their row numbers in the dataset."""
        if start not in self._ready:
            self._ready = self._read_together(start, stop - start, step)
        return self._ready.pop(start)

    def _read_together(self, start: int, batch_rows: int, step: int) -> dict[int, tuple[Rows, np.ndarray]]:
        """The batch at `start`, and the next ones as long as they are small: one call of numpy costs as much as many
        rows. With a schedule the masks depend on the step."""
        is_scheduled = self._masking is not None and bool(self._masking.rate_schedule)
        limit = min(_ROWS_TOGETHER * self._world_size, self.window_rows)
        count = 1 if is_scheduled else max(1, limit // batch_rows)
        starts = [start + i * batch_rows for i in range(count)]
        picks = _join([pick for first in starts for pick in self._find_share(first, first + batch_rows)])
        for pick in picks:
            self._start_reading(pick)
        numbers = np.concatenate([self._row_numbers(pick) for pick in picks])
        rows = concatenate_rows([self._rows(pick, step) for pick in picks])
        self._forget_old_windows(count * batch_rows)
        if len(picks) > 1:
            order = np.argsort(np.concatenate([pick.samples for pick in picks]), kind="stable")
            rows, numbers = rows.take(order), numbers[order]
        share = batch_rows // self._world_size
        parts = [slice(i * share, (i + 1) * share) for i in range(count)]
        return {first: (rows.take(part), numbers[part]) for first, part in zip(starts, parts, strict=True)}

    def read_ahead(self, start: int, stop: int) -> None:
        """Start to read this rank's rows of the samples [start, stop) in the background."""
        for pick in self._find_share(start, stop):
            self._start_reading(pick)

    def fetch_ahead(self, start: int) -> None:
        """Begin to fetch the shards of this rank's share of the next windows from sample `start` on, if in a store."""
        if start < self._fetched_until or not self._dataset.is_fetched:
            return
        self._fetched_until = start + self.window_rows
        keys = dict.fromkeys(
            pick.key
            for span in self._mixture.spans(start, start + _WINDOWS_FETCHED * self.window_rows)
            for pick in self._picks_of(span)
        )
        found: dict[int, None] = {}
        for key in keys:
            shards = self._window(key).shards
            share = shards[self._share_of(len(shards))]
            found.update(dict.fromkeys(self._component(key).shards[share].tolist()))
        self._dataset.fetch_ahead(found)

    @property
    def window_rows(self) -> int:
        """Approximate number of samples that one window of each component lasts for."""
        return min(order.num_rows // order.num_windows for order, _ in self._mixture.components)

    def _find_share(self, start: int, stop: int) -> list[Pick]:
        """This rank's share of the samples [start, stop), by window."""
        picks = [pick for span in self._mixture.spans(start, stop) for pick in self._picks_of(span)]
        if self._world_size == 1:
            return picks
        places = [self._window(pick.key).places[pick.positions[0] : pick.positions[-1] + 1] for pick in picks]
        count = (stop - start) // self._world_size
        first = self._rank * count
        chosen = np.sort(np.argsort(np.concatenate(places), kind="stable")[first : first + count])
        firsts = np.cumsum([0] + [len(pick.samples) for pick in picks])
        bounds = np.searchsorted(chosen, firsts)
        share = []
        for number, pick in enumerate(picks):
            index = chosen[bounds[number] : bounds[number + 1]] - firsts[number]
            if len(index):
                share.append(Pick(pick.key, pick.positions[index], pick.samples[index]))
        return share

    def _picks_of(self, span: Span) -> Iterator[Pick]:
        """All samples of the span, whose positions in each window are neighbours."""
        order, done = self._mixture.components[span.component].order, 0
        for index, start, stop in order.split_by_window(span.epoch, span.start, span.stop):
            samples = span.samples[done : done + stop - start]
            yield Pick(WindowKey(span.component, span.epoch, index), np.arange(start, stop), samples)
            done += stop - start

    def _component(self, key: WindowKey) -> Component:
        return self._mixture.components[key.component]

    def _window(self, key: WindowKey) -> ShuffleWindow:
        return self._component(key).order.window(key.epoch, key.window)

    def _row_numbers(self, pick: Pick) -> np.ndarray:
        order, component_shards = self._component(pick.key)
        shards, rows = order.locate(pick.key.epoch, pick.key.window, pick.positions)
        return self._dataset.row_numbers(component_shards[shards], rows)

    def _rows(self, pick: Pick, step: int) -> Rows:
        window = self._window(pick.key)
        units = window.units[pick.positions]
        rows = self._stores[pick.key].take(units, window.order[pick.positions] - window.firsts[units])
        if self._masking is None:
            return rows
        numbers, epoch = self._row_numbers(pick), pick.key.epoch
        rows = rows.with_originals()
        return mask_rows(rows, self._masking, seed=self._seed, epoch=epoch, row_numbers=numbers, step=step)

    def _start_reading(self, pick: Pick) -> None:
        """Read the units of `pick` that are not there, and with a window's first ones all units of this rank's share.

        The share of a rank varies from batch to batch, by about one unit where rows are interleaved.
        """
        window = self._window(pick.key)
        num_units = len(window.shards)
        wanted = [window.units[pick.positions]]
        if pick.key not in self._stores:
            self._stores[pick.key] = UnitStore(num_units)
            wanted.append(np.arange(num_units)[self._share_of(num_units)])
        store = self._stores[pick.key]
        self._stores.move_to_end(pick.key)
        units = store.missing(np.unique(np.concatenate(wanted)))
        if len(units):
            shards = self._component(pick.key).shards[window.shards[units]]
            starts, stops = window.starts[units], window.stops[units]
            with_words = self._masking is not None and self._masking.unit != "token"
            read = self._reader.submit(self._dataset.read_blocks, shards, starts, stops, with_words)
            store.add(units, stops - starts, read)
            self.decoded_rows += int((stops - starts).sum())

    def _share_of(self, num_units: int) -> slice:
        """This rank's units of a window of `num_units`."""
        first, end = self._rank * num_units, (self._rank + 1) * num_units
        return slice(first // self._world_size, -(-end // self._world_size))

    def _forget_old_windows(self, batch_rows: int) -> None:
        """Keep the windows of a batch, of the one that is read ahead, and of their neighbours."""
        limit = _WINDOWS_KEPT * len(self._mixture.components) + 2 * (batch_rows // self.window_rows)
        while len(self._stores) > limit:
            self._stores.popitem(last=False)
