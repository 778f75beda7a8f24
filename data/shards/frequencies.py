"""How often each token occurs in the text of a dataset."""

from collections.abc import Iterable, Iterator

import numpy as np

from data.shards.dataset import PretrainingDataset
from data.shards.report import text_tokens
from data.shards.schema import Rows

READ_ROWS = 4096  # at a time
SAMPLED_PLACES, SAMPLED_ROWS = 32, 1024  # evenly spaced places, and rows read at each: about 10⁶ to 10⁷ tokens


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
