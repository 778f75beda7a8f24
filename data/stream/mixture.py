"""Several datasets in one stream: by size (every row once an epoch) or by given weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.randomness import derive_key, generator
from data.shards.dataset import PretrainingDataset
from data.stream.order import Plan

PATTERN_LENGTH = 4096  # weights are met to 1/4096, and over every run of that many samples


@dataclass(frozen=True)
class Run:
    """Positions [start, stop) of one part's epoch, and which global samples they are."""

    part: int
    plan: Plan
    epoch: int
    start: int
    stop: int
    samples: np.ndarray  # [stop - start]
    shards: np.ndarray  # the part's shards, as numbers within the dataset

    def globally(self, located: np.ndarray) -> np.ndarray:
        """(shard of the part, row) → (shard of the dataset, row)."""
        return np.stack([self.shards[located[:, 0]], located[:, 1]], axis=1)


class Mixture:
    """Which part, and which of the part's samples, a global sample index is. A pure function, like the plan."""

    def __init__(self, parts: Sequence[tuple[Plan, np.ndarray]], weights: Sequence[float] | None, seed: int) -> None:
        self.parts = list(parts)
        if len(self.parts) == 1:
            weights = None
        self._pattern = None if weights is None else _pattern(weights, seed)

    @classmethod
    def of(cls, dataset: PretrainingDataset, seed: int) -> "Mixture":
        """By size, all shards are one part. By weight, each folder is a part with an order of its own."""
        extents = dataset.extents
        folders = np.array([shard.folder for shard in dataset.shards])
        if dataset.weights is None:
            return cls([(Plan(extents, seed), np.arange(len(extents)))], None, seed)
        parts = []
        for folder in range(len(dataset.weights)):
            shards = np.flatnonzero(folders == folder)
            parts.append((Plan([extents[shard] for shard in shards], derive_key(seed, "part", folder)), shards))
        return cls(parts, dataset.weights, seed)

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    def shards_of(self, part: int, shards: np.ndarray) -> np.ndarray:
        return self.parts[part][1][shards]

    def globally(self, part: int, located: np.ndarray) -> np.ndarray:
        return np.stack([self.shards_of(part, located[:, 0]), located[:, 1]], axis=1)

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The samples [start, stop) as runs of consecutive positions, part by part."""
        if self._pattern is None:
            yield from self._epochs_of(0, start, np.arange(start, stop))
            return
        samples = np.arange(start, stop)
        rounds, offsets = samples // PATTERN_LENGTH, samples % PATTERN_LENGTH
        for part in range(self.num_parts):
            mine = self._pattern[offsets] == part
            if mine.any():
                before = np.cumsum(self._pattern == part)  # of this part, up to and including each offset
                first = int(rounds[mine][0] * before[-1] + before[offsets[mine][0]] - 1)
                yield from self._epochs_of(part, first, samples[mine])

    def _epochs_of(self, part: int, first: int, samples: np.ndarray) -> Iterator[Run]:
        """Cut a part's consecutive samples, the first of which is its `first`, where its epochs end."""
        plan, shards = self.parts[part]
        done = 0
        while done < len(samples):
            epoch, position = divmod(first + done, plan.num_rows)
            count = min(len(samples) - done, plan.num_rows - position)
            yield Run(part, plan, epoch, position, position + count, samples[done : done + count], shards)
            done += count


def _pattern(weights: Sequence[float], seed: int) -> np.ndarray:
    """[PATTERN_LENGTH] part numbers in the given shares (largest remainders), every part at least once, shuffled."""
    shares = np.array(weights, dtype=np.float64) / sum(weights) * PATTERN_LENGTH
    counts = np.maximum(1, np.floor(shares)).astype(int)
    while counts.sum() != PATTERN_LENGTH:
        direction = np.sign(PATTERN_LENGTH - counts.sum())
        counts[np.argmax((shares - counts) * direction)] += direction
    return generator(seed, "mixture").permutation(np.repeat(np.arange(len(weights)), counts))
