"""Rows of any global samples: reads shuffle windows ahead, keeps a few in memory, draws new masks if asked to."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.masking import MaskingPolicy, mask_rows
from data.shards.dataset import PretrainingDataset
from data.shards.schema import Rows, concatenate_rows
from data.stream.mixture import Component, Mixture, Span

_WINDOWS_KEPT = 3  # per component: the one in use, its neighbour when a batch covers both, the one read ahead
_MASKED_TOGETHER = 512  # positions; masking a few rows costs as much as masking a few hundred
_MASKED_KEPT = 4  # per component: groups of positions that were masked together


class WindowKey(NamedTuple):
    """Identifies one shuffle window of a stream."""

    component: int
    epoch: int
    window: int  # index within the epoch


class RowSource:
    """Rows by global sample index. One thread reads all files, in parallel with the caller."""

    def __init__(self, dataset: PretrainingDataset, seed: int, masking: MaskingPolicy | None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._masking = masking
        self._mixture = Mixture(dataset, seed)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="shard-reader")
        num_components = len(self._mixture.components)
        self._window = lru_cache(maxsize=_WINDOWS_KEPT * num_components)(self._start_reading)
        self._masked_group = lru_cache(maxsize=_MASKED_KEPT * num_components)(self._mask_group)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._window.cache_clear()
        self._masked_group.cache_clear()
        self._dataset.close()

    def read(self, start: int, stop: int, *, step: int = 0) -> tuple[Rows, np.ndarray]:
        """The masked rows of the samples [start, stop), and their row numbers in the dataset."""
        parts: list[Rows] = []
        numbers: list[np.ndarray] = []
        samples: list[np.ndarray] = []
        for span in self._mixture.spans(start, stop):
            for key, first, last in self._windows_of(span):
                parts.append(self._rows(key, first, last, step))
                numbers.append(self._row_numbers(key, first, last))
            samples.append(span.samples)
        if len(parts) == 1:
            return parts[0], numbers[0]
        order = np.argsort(np.concatenate(samples), kind="stable")
        return concatenate_rows(parts).take(order), np.concatenate(numbers)[order]

    def read_ahead(self, start: int, stop: int) -> None:
        """Start to read the windows of the samples [start, stop) in the background."""
        for span in self._mixture.spans(start, stop):
            for key, _, _ in self._windows_of(span):
                self._window(key)

    @property
    def window_rows(self) -> int:
        """Approximate number of samples that one window of each component lasts for."""
        return min(order.num_rows // order.num_windows for order, _ in self._mixture.components)

    def _component(self, key: WindowKey) -> Component:
        return self._mixture.components[key.component]

    def _windows_of(self, span: Span) -> Iterator[tuple[WindowKey, int, int]]:
        """The windows of a span, each with the start and the stop of the span within it."""
        order = self._mixture.components[span.component].order
        for index, start, stop in order.split_by_window(span.epoch, span.start, span.stop):
            yield WindowKey(span.component, span.epoch, index), start, stop

    def _row_numbers(self, key: WindowKey, start: int, stop: int) -> np.ndarray:
        order, component_shards = self._component(key)
        shards, rows = order.locate(key.epoch, key.window, start, stop)
        return self._dataset.row_numbers(component_shards[shards], rows)

    def _rows(self, key: WindowKey, start: int, stop: int, step: int) -> Rows:
        """Positions [start, stop) of a window, masked if asked to."""
        if self._masking is None:
            return self._stored_rows(key, start, stop)
        if self._masking.rate_schedule:  # the masks of a row depend on the step
            return self._mask(key, start, stop, step)
        groups = range(start // _MASKED_TOGETHER, -(-stop // _MASKED_TOGETHER))
        offset = groups[0] * _MASKED_TOGETHER
        rows = concatenate_rows([self._masked_group(key, group) for group in groups])
        return rows.take(slice(start - offset, stop - offset))

    def _mask_group(self, key: WindowKey, group: int) -> Rows:
        end = len(self._component(key).order.window(key.epoch, key.window).order)
        return self._mask(key, group * _MASKED_TOGETHER, min(end, (group + 1) * _MASKED_TOGETHER), 0)

    def _mask(self, key: WindowKey, start: int, stop: int, step: int) -> Rows:
        assert self._masking is not None
        rows = self._stored_rows(key, start, stop).with_originals()
        numbers = self._row_numbers(key, start, stop)
        return mask_rows(rows, self._masking, seed=self._seed, epoch=key.epoch, row_numbers=numbers, step=step)

    def _stored_rows(self, key: WindowKey, start: int, stop: int) -> Rows:
        """Positions [start, stop) of a window as the shards hold them."""
        order = self._component(key).order.window(key.epoch, key.window).order[start:stop]
        return self._window(key).result().take(order)

    def _start_reading(self, key: WindowKey) -> "Future[Rows]":
        order, component_shards = self._component(key)
        window = order.window(key.epoch, key.window)
        shards = component_shards[window.shards]
        return self._reader.submit(self._dataset.read_blocks, shards, window.starts, window.stops)
