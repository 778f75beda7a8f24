"""What scores over a few seeds and a finite evaluation file say: mean, deviation, intervals, paired tests.

S seeds, N rows, K sums of a metric, R resamples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evaluation.scoring.metrics import Array, Metric

NUM_RESAMPLES = 1000
NUM_PERMUTATIONS = 10_000
_VALUES_AT_ONCE = 1 << 24  # bounds the memory of counts per resample and row


class Summary(NamedTuple):
    mean: float
    std: float | None  # over seeds, with n - 1; None for one seed
    low: float  # 95 % interval
    high: float


def summarize(metric: Metric, parts: Sequence[Array]) -> Summary:
    """`parts`: the metric's per-row numbers [N, K] for each seed.

    The interval is a percentile bootstrap in which a resample draws seeds and rows, the same rows for every seed.
    """
    stacked = np.stack(parts)  # [S, N, K]
    generator = np.random.default_rng(0)
    resampled = np.concatenate(
        [metric.of_sums(_weighted(counts, stacked)) for counts in _row_counts(stacked.shape[1], generator)]
    )  # [R, S]
    drawn = generator.integers(0, len(parts), resampled.shape)
    low, high = np.percentile(np.take_along_axis(resampled, drawn, axis=1).mean(1), [2.5, 97.5])
    values = metric.of_sums(stacked.sum(1))
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Summary(float(np.mean(values)), std, float(low), float(high))


def _row_counts(num_rows: int, generator: np.random.Generator) -> list[Array]:
    """How often each row was drawn, [R, N] in some parts."""
    at_once = max(1, _VALUES_AT_ONCE // num_rows)
    parts = []
    for first in range(0, NUM_RESAMPLES, at_once):
        size = min(at_once, NUM_RESAMPLES - first)
        drawn = generator.integers(0, num_rows, (size, num_rows)) + num_rows * np.arange(size)[:, None]
        parts.append(np.bincount(drawn.ravel(), minlength=size * num_rows).reshape(size, num_rows).astype(np.float64))
    return parts


def _weighted(counts: Array, parts: Array) -> Array:
    """[R, N] · [S, N, K] → [R, S, K]"""
    return np.tensordot(counts, parts, axes=([1], [1]))


class Comparison(NamedTuple):
    difference: float  # B - A, of means over seeds
    low: float  # 95 % interval of the difference
    high: float
    p_value: float  # of the permutation test, two-sided


def compare(metric: Metric, first: Sequence[Array], second: Sequence[Array]) -> Comparison:
    """Paired over rows and seeds: both have the same rows and the same number of seeds.

    The interval is a bootstrap over rows. The test permutes: were both models alike, their results on a row could be
    exchanged; p is how often such an exchange gives a difference at least as large as the observed one.
    """
    a, b = np.stack(first), np.stack(second)  # [S, N, K]
    generator = np.random.default_rng(0)

    def difference(sums_a: Array, sums_b: Array) -> Array:
        return metric.of_sums(sums_b).mean(-1) - metric.of_sums(sums_a).mean(-1)

    observed = float(difference(a.sum(1), b.sum(1)))
    resampled = np.concatenate(
        [difference(_weighted(counts, a), _weighted(counts, b)) for counts in _row_counts(a.shape[1], generator)]
    )
    total_a, total_b, gain = a.sum(1), b.sum(1), b - a
    at_once = max(1, _VALUES_AT_ONCE // a.shape[1])
    as_large = 0
    for start in range(0, NUM_PERMUTATIONS, at_once):
        size = min(at_once, NUM_PERMUTATIONS - start)
        swapped = generator.integers(0, 2, (size, a.shape[1])).astype(np.float64)
        moved = _weighted(swapped, gain)
        as_large += int((np.abs(difference(total_a + moved, total_b - moved)) >= abs(observed) - 1e-12).sum())
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Comparison(observed, float(low), float(high), (as_large + 1) / (NUM_PERMUTATIONS + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for the number of tests (Holm, 1979)."""
    order = np.argsort(p_values)
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[int(index)] = highest
    return corrected
