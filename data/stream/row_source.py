"""Rows of any global samples: reads the windows of the plan ahead, holds a few, draws new masks where asked to."""

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from data.masking import MaskingPolicy, mask_rows
from data.shards.dataset import PretrainingDataset
from data.shards.schema import Rows, concatenate_rows
from data.stream.mixture import Mixture
from data.stream.order import Plan

_WINDOWS_HELD = 3  # for each part: the one in use, its neighbour when a batch lies across both, the one read ahead
_MASKED_AT_ONCE = 512  # positions; masking a handful of rows costs as much as masking a few hundred
_MASKED_HELD = 4

WindowKey = tuple[int, int, int]  # part, epoch, number of the window


class RowSource:
    """Samples by number. All files are read in one thread of its own, so reading goes on while rows are handed out."""

    def __init__(self, dataset: PretrainingDataset, seed: int, masking: MaskingPolicy | None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._masking = masking
        self._mixture = Mixture.of(dataset, seed)
        self._windows: OrderedDict[Hashable, Future[Rows]] = OrderedDict()
        self._masked: OrderedDict[Hashable, Rows] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="shard-reader")

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._windows.clear()
        self._masked.clear()
        self._dataset.close()

    def read(self, start: int, stop: int, *, step: int = 0) -> tuple[Rows, np.ndarray]:
        """The rows of the samples [start, stop), masked, and their numbers in the dataset."""
        parts: list[Rows] = []
        numbers: list[np.ndarray] = []
        samples: list[np.ndarray] = []
        for run in self._mixture.runs(start, stop):
            for window, first, last in run.plan.pieces(run.epoch, run.start, run.stop):
                parts.append(self._piece((run.part, run.epoch, window), first, last, step))
                numbers.append(self._numbers((run.part, run.epoch, window), first, last))
            samples.append(run.samples)
        if len(parts) == 1:
            return parts[0], numbers[0]
        order = np.argsort(np.concatenate(samples), kind="stable")
        return concatenate_rows(parts).take(order), np.concatenate(numbers)[order]

    def read_ahead(self, start: int, stop: int) -> None:
        """Begin to read the windows of samples that will be asked for later."""
        for run in self._mixture.runs(start, stop):
            for window, _, _ in run.plan.pieces(run.epoch, run.start, run.stop):
                self._window((run.part, run.epoch, window))

    @property
    def window_rows(self) -> int:
        """About how many samples one window of each part lasts for."""
        return min(plan.num_rows // plan.num_windows for plan, _ in self._mixture.parts)

    def _plan(self, key: WindowKey) -> Plan:
        return self._mixture.parts[key[0]][0]

    def _numbers(self, key: WindowKey, start: int, stop: int) -> np.ndarray:
        located = self._plan(key).locate_in_window(key[1], key[2], start, stop)
        return self._dataset.row_numbers(self._mixture.globally(key[0], located))

    def _piece(self, key: WindowKey, start: int, stop: int, step: int) -> Rows:
        """Positions [start, stop) of a window."""
        if self._masking is None:
            return self._plain(key, start, stop)
        if self._masking.rate_schedule:  # the same row is masked otherwise at another step
            return self._mask(key, start, stop, step)
        chunks = range(start // _MASKED_AT_ONCE, -(-stop // _MASKED_AT_ONCE))
        first = chunks[0] * _MASKED_AT_ONCE
        return concatenate_rows([self._masked_chunk(key, chunk) for chunk in chunks]).take(
            slice(start - first, stop - first)
        )

    def _masked_chunk(self, key: WindowKey, chunk: int) -> Rows:
        def make() -> Rows:
            end = len(self._plan(key).window(key[1], key[2]).order)
            return self._mask(key, chunk * _MASKED_AT_ONCE, min(end, (chunk + 1) * _MASKED_AT_ONCE), 0)

        if (key, chunk) not in self._masked:
            self._masked[key, chunk] = make()
            _forget_oldest(self._masked, _MASKED_HELD * self._mixture.num_parts)
        self._masked.move_to_end((key, chunk))
        return self._masked[key, chunk]

    def _mask(self, key: WindowKey, start: int, stop: int, step: int) -> Rows:
        assert self._masking is not None
        rows = self._plain(key, start, stop).with_originals()
        numbers = self._numbers(key, start, stop)
        return mask_rows(rows, self._masking, seed=self._seed, epoch=key[1], row_numbers=numbers, step=step)

    def _plain(self, key: WindowKey, start: int, stop: int) -> Rows:
        order = self._plan(key).window(key[1], key[2]).order[start:stop]
        return self._window(key).result().take(order)

    def _window(self, key: WindowKey) -> "Future[Rows]":
        if key not in self._windows:
            window = self._plan(key).window(key[1], key[2])
            shards = self._mixture.shards_of(key[0], window.shards)
            self._windows[key] = self._reader.submit(self._dataset.read_blocks, shards, window.starts, window.stops)
            _forget_oldest(self._windows, _WINDOWS_HELD * self._mixture.num_parts)
        self._windows.move_to_end(key)
        return self._windows[key]


def _forget_oldest(held: OrderedDict[Hashable, Any], limit: int) -> None:
    while len(held) > limit:
        held.popitem(last=False)
