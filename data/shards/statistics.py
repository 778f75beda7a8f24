"""What a model must beat: the cross entropy of guessing masked tokens by their frequency alone."""

from collections.abc import Iterator

import numpy as np

from data.shards.dataset import PretrainingDataset
from data.shards.schema import Rows

_ROWS_AT_ONCE = 4096
_MAX_TRAINING_ROWS = 200_000  # frequencies are known well enough by then


def unigram_cross_entropy(training: PretrainingDataset, validation: PretrainingDataset) -> float:
    """Cross entropy, in nats, of validation's masked tokens under the unigram distribution of training's tokens.

    Originals are restored before counting; [CLS], [SEP] and padding do not count; one is added to every count.
    """
    targets = _count_targets(validation)
    counts = _count_tokens(training)
    size = max(len(targets), len(counts))
    targets, counts = _padded(targets, size), _padded(counts, size)
    log_probabilities = np.log(counts + 1.0) - np.log((counts + 1.0).sum())
    return float(-(targets * log_probabilities).sum() / targets.sum())


def _count_tokens(dataset: PretrainingDataset) -> np.ndarray:
    counts = np.zeros(0, dtype=np.int64)
    for rows in _blocks(dataset, min(dataset.num_rows, _MAX_TRAINING_ROWS)):
        counts = _add(counts, np.bincount(text_tokens(rows)))
    return counts


def _count_targets(dataset: PretrainingDataset) -> np.ndarray:
    counts = np.zeros(0, dtype=np.int64)
    for rows in _blocks(dataset, dataset.num_rows):
        counts = _add(counts, np.bincount(rows.masked_lm_ids[rows.masked_lm_positions > 0]))
    return counts


def text_tokens(rows: Rows) -> np.ndarray:
    """[T] original ids of real text: everything but padding, [CLS] and [SEP], which stand first and at segment ends."""
    ids = rows.with_originals().input_ids
    is_text = rows.input_mask != 0
    is_text[:, 0] = False
    # A segment's last token is its [SEP]: the next column is padding or another segment.
    following_mask = np.pad(rows.input_mask[:, 1:], ((0, 0), (0, 1)))
    following_segment = np.pad(rows.segment_ids[:, 1:], ((0, 0), (0, 1)))
    is_text &= (following_mask != 0) & (following_segment == rows.segment_ids)
    return ids[is_text]


def _blocks(dataset: PretrainingDataset, num_rows: int) -> Iterator[Rows]:
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        yield dataset.read_range(start, min(num_rows, start + _ROWS_AT_ONCE))


def _add(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    size = max(len(counts), len(more))
    return _padded(counts, size) + _padded(more, size)


def _padded(counts: np.ndarray, size: int) -> np.ndarray:
    return np.pad(counts, (0, size - len(counts)))
