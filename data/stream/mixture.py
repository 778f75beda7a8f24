"""Several datasets in one stream: by size (every row once per epoch) or by given weights."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.randomness import derive_key, generator
from data.shards.dataset import PretrainingDataset
from data.stream.order import SampleOrder, ShardSize

PATTERN_LENGTH = 4096  # samples; every sequence of that many meets the weights to 1/4096


class Component(NamedTuple):
    """Shards that share one order of samples."""

    order: SampleOrder
    shards: np.ndarray  # their indices in the dataset


class Span(NamedTuple):
    """Positions [start, stop) of one epoch of one component, and their global sample indices."""

    component: int
    epoch: int
    start: int
    stop: int
    samples: np.ndarray  # [stop - start]


class Mixture:
    """Maps global sample indices to components and positions in their epochs. A pure function, like the order."""

    def __init__(self, dataset: PretrainingDataset, seed: int) -> None:
        """By size, all shards are one component. By weight, each folder is a component with its own order."""
        folders = np.array([shard.folder for shard in dataset.shards])
        if dataset.weights is None:
            groups = [(np.arange(len(folders)), seed)]
        else:
            numbers = range(len(dataset.weights))
            groups = [(np.flatnonzero(folders == folder), derive_key(seed, "part", folder)) for folder in numbers]
        layouts = [shard.layout for shard in dataset.shards]
        sizes = [ShardSize(each.num_rows, each.block_rows, each.unit_rows) for each in layouts]
        length = layouts[0].max_seq_length
        self.components = [
            Component(SampleOrder([sizes[i] for i in shards], key, length), shards) for shards, key in groups
        ]
        is_weighted = dataset.weights is not None and len(dataset.weights) > 1
        self._pattern = _draw_pattern(dataset.weights or (), seed) if is_weighted else None

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Split the samples [start, stop) into spans, one component after another."""
        samples = np.arange(start, stop)
        if self._pattern is None:
            yield from self._split_by_epoch(0, start, samples)
            return
        rounds, offsets = samples // PATTERN_LENGTH, samples % PATTERN_LENGTH
        for component in range(len(self.components)):
            chosen = self._pattern[offsets] == component
            if chosen.any():
                counts = np.cumsum(self._pattern == component)  # of this component, up to and including each offset
                first = int(rounds[chosen][0] * counts[-1] + counts[offsets[chosen][0]] - 1)
                yield from self._split_by_epoch(component, first, samples[chosen])

    def _split_by_epoch(self, component: int, first: int, samples: np.ndarray) -> Iterator[Span]:
        """Split consecutive samples of a component, starting with its sample `first`, where its epochs end."""
        num_rows = self.components[component].order.num_rows
        done = 0
        while done < len(samples):
            epoch, position = divmod(first + done, num_rows)
            count = min(len(samples) - done, num_rows - position)
            yield Span(component, epoch, position, position + count, samples[done : done + count])
            done += count


def _draw_pattern(weights: Sequence[float], seed: int) -> np.ndarray:
    """[PATTERN_LENGTH] shuffled component indices in the given shares (largest remainders), each at least once."""
    shares = np.array(weights, dtype=np.float64) / sum(weights) * PATTERN_LENGTH
    counts = np.maximum(1, np.floor(shares)).astype(int)
    while counts.sum() != PATTERN_LENGTH:
        direction = np.sign(PATTERN_LENGTH - counts.sum())
        counts[np.argmax((shares - counts) * direction)] += direction
    return generator(seed, "mixture").permutation(np.repeat(np.arange(len(weights)), counts))
