"""Statistics of the text of a dataset: how often each token occurs, and word vectors from the tokens near each."""

from collections.abc import Iterable, Iterator

import numpy as np

from data.shards.dataset import PretrainingDataset
from data.shards.report import is_text, text_tokens
from data.shards.schema import Rows

READ_ROWS = 4096  # at a time
SAMPLED_PLACES, SAMPLED_ROWS = 32, 1024  # evenly spaced places, and rows read at each: about 10⁶ to 10⁷ tokens
WINDOW = 4  # tokens on each side that are neighbours
MAX_SAMPLED_TOKENS = 2**23
MAX_CELLS = 2**25  # of the table of counts: with many tokens, only the most frequent ones count as neighbours
SMOOTHING = 0.75  # power of the neighbours' frequencies, which lowers the weight of rare ones
EXTRA_RANK, ROUNDS = 16, 2  # of the randomized decomposition


def log_frequencies(dataset: PretrainingDataset, num_tokens: int) -> np.ndarray:
    """[num_tokens] natural logarithms of the tokens' shares in a sample of rows; every count is increased by one.

    The sample depends on the data only, so it is the same on every rank and in every start of a run.
    """
    return smoothed_log_shares(count_ids(text_tokens(rows) for rows in sample_rows(dataset, SAMPLED_ROWS)), num_tokens)


def smoothed_log_shares(counts: np.ndarray, num_tokens: int) -> np.ndarray:
    """[num_tokens] natural logarithms of the shares of `counts`, each increased by one."""
    smoothed = np.pad(counts, (0, max(0, num_tokens - len(counts))))[:num_tokens] + 1.0
    return np.log(smoothed) - np.log(smoothed.sum())


def count_ids(parts: Iterable[np.ndarray]) -> np.ndarray:
    """counts[id] over all parts."""
    counts = np.zeros(0, dtype=np.int64)
    for ids in parts:
        total = np.bincount(ids, minlength=len(counts))
        total[: len(counts)] += counts
        counts = total
    return counts


def read_in_parts(dataset: PretrainingDataset, max_rows: int) -> Iterator[Rows]:
    num_rows = min(dataset.num_rows, max_rows)
    for start in range(0, num_rows, READ_ROWS):
        yield dataset.read_range(start, min(num_rows, start + READ_ROWS))


def sample_rows(dataset: PretrainingDataset, rows_per_place: int) -> Iterator[Rows]:
    """All rows, or those from evenly spaced places on if there are more."""
    if dataset.num_rows <= SAMPLED_PLACES * rows_per_place:
        yield from read_in_parts(dataset, dataset.num_rows)
        return
    for place in range(SAMPLED_PLACES):
        start = place * dataset.num_rows // SAMPLED_PLACES
        yield dataset.read_range(start, start + rows_per_place)


def word_vectors(dataset: PretrainingDataset, num_tokens: int, size: int) -> np.ndarray:
    """[num_tokens, size] float32 vectors of norm √size; zeros for tokens that have no neighbours in the sampled text.

    They are the left singular vectors, times the roots of the singular values, of the positive pointwise mutual
    information of tokens and their neighbours, in a random rotation. Tokens in similar contexts have similar vectors.
    """
    length = dataset.read_range(0, 1).input_ids.shape[1]
    rows_per_place = max(1, MAX_SAMPLED_TOKENS // (SAMPLED_PLACES * length))
    ids = np.concatenate([_text_ids(rows, num_tokens) for rows in sample_rows(dataset, rows_per_place)])
    vectors = _left_vectors(positive_information(count_neighbours(ids, num_tokens)), size)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    is_known = norms > 1e-6 * norms.max()
    return np.where(is_known, vectors * (size**0.5 / np.where(is_known, norms, 1.0)), 0.0).astype(np.float32)


def _text_ids(rows: Rows, num_tokens: int) -> np.ndarray:
    """[N, S] original ids; -1 for what is not text."""
    ids = rows.with_originals().input_ids.astype(np.int64)
    return np.where(is_text(rows) & (ids < num_tokens), ids, -1)


def count_neighbours(ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """[num_tokens, neighbours] how often each token is near each neighbour, which are the most frequent tokens."""
    num_neighbours = min(num_tokens, max(1, MAX_CELLS // num_tokens))
    frequencies = np.bincount(ids[ids >= 0], minlength=num_tokens)
    column = np.full(num_tokens + 1, -1)  # the last one is that of -1
    column[np.argsort(-frequencies, kind="stable")[:num_neighbours]] = np.arange(num_neighbours)
    counts = np.zeros(num_tokens * num_neighbours)
    for distance in range(1, WINDOW + 1):
        left, right = ids[:, :-distance], ids[:, distance:]
        cells = []
        for token, neighbour in ((left, right), (right, left)):
            columns = column[neighbour]
            is_pair = (token >= 0) & (columns >= 0)
            cells.append(token[is_pair] * num_neighbours + columns[is_pair])
        counts += np.bincount(np.concatenate(cells), minlength=counts.size)
    return counts.reshape(num_tokens, num_neighbours)


def positive_information(counts: np.ndarray) -> np.ndarray:
    """max(0, log P(neighbour | token) / P(neighbour)) of each cell, float32; 0 where nothing was counted."""
    expected = counts.sum(0) ** SMOOTHING
    expected /= max(expected.sum(), 1e-300)
    totals = counts.sum(1)
    token, neighbour = np.nonzero(counts)
    information = np.zeros(counts.shape, dtype=np.float32)
    found = np.log(counts[token, neighbour] / (totals[token] * expected[neighbour]))
    information[token, neighbour] = np.maximum(found, 0.0)
    return information


def _left_vectors(matrix: np.ndarray, size: int) -> np.ndarray:
    """[rows, size] left singular vectors times the roots of their values, rotated; by subspace iteration."""
    random = np.random.default_rng(0)
    rank = min(size + EXTRA_RANK, *matrix.shape)
    basis = np.linalg.qr(matrix @ random.standard_normal((matrix.shape[1], rank), dtype=np.float32))[0]
    for _ in range(ROUNDS):
        basis = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ basis)[0])[0]
    left, values, _ = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    vectors = ((basis @ left) * np.sqrt(values))[:, :size]
    rotation = np.linalg.qr(random.standard_normal((size, size)))[0]
    return vectors @ rotation[: vectors.shape[1]]
