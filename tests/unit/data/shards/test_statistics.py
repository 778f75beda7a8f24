"""Word vectors from neighbours: counts, information, and vectors of low rank."""

import numpy as np
import pytest

from data.shards import statistics
from data.shards.statistics import _left_vectors, count_neighbours, positive_information


def test_neighbours_on_both_sides_within_the_window_and_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "WINDOW", 2)
    ids = np.array([[-1, 1, 2, 3, 1, -1], [-1, 3, 0, -1, -1, -1]])
    columns = [1, 3, 0, 2]  # the most frequent first, then by id
    expected = np.zeros((4, 4))
    for token, neighbour in ((1, 2), (1, 3), (2, 3), (2, 1), (3, 1), (3, 0)):
        expected[token, columns.index(neighbour)] += 1
        expected[neighbour, columns.index(token)] += 1
    assert count_neighbours(ids, 4).tolist() == expected.tolist()
    monkeypatch.setattr(statistics, "MAX_CELLS", 8)  # for four tokens, only two neighbours
    assert count_neighbours(ids, 4).tolist() == expected[:, :2].tolist()


def test_information_is_that_of_the_formula_and_never_negative() -> None:
    counts = np.array([[8.0, 0.0, 2.0], [1.0, 5.0, 2.0], [0.0, 0.0, 0.0]])
    smoothed = counts.sum(0) ** statistics.SMOOTHING
    with np.errstate(divide="ignore", invalid="ignore"):
        formula = np.log(counts / counts.sum(1, keepdims=True) / (smoothed / smoothed.sum()))
    assert positive_information(counts) == pytest.approx(np.nan_to_num(np.maximum(formula, 0.0)), abs=1e-6)


@pytest.mark.parametrize("size", [5, 12])
def test_vectors_have_the_inner_products_of_the_leading_singular_vectors(size: int) -> None:
    """Also if there are fewer singular vectors than the size asks for."""
    matrix = np.random.default_rng(1).standard_normal((13, 9)).astype(np.float32)
    left, values, _ = np.linalg.svd(matrix, full_matrices=False)
    vectors = _left_vectors(matrix, size)
    assert vectors.shape == (13, size)
    assert vectors @ vectors.T == pytest.approx((left[:, :size] * values[:size]) @ left[:, :size].T, abs=1e-4)
