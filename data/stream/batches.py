"""The batch that `data` produces and the model takes."""

from typing import NamedTuple

import numpy as np
import torch

from data.shards.schema import NO_LABEL, Rows

PRETRAINING_KIND = 2


class Batch(NamedTuple):
    """Six int64 fields; their order is a contract, since old code uses indices. B rows, S tokens."""

    kind: torch.Tensor  # []; 2 = pretraining
    input_ids: torch.Tensor  # [B, S]
    input_mask: torch.Tensor  # [B, S]; 1 = real token
    segment_ids: torch.Tensor  # [B, S]
    next_sentence_label: torch.Tensor  # [B]; 0 = B follows A, 1 = B is random, -1 = no label
    masked_lm_labels: torch.Tensor  # [B, S]; the original id of a token to predict, else -1


def batch_from_rows(rows: Rows) -> Batch:
    """Convert rows to int64 tensors, their masked positions and ids to labels."""
    unlabelled = np.full(rows.input_ids.shape, NO_LABEL, dtype=np.int64)
    return Batch(
        kind=torch.tensor(PRETRAINING_KIND, dtype=torch.int64),
        input_ids=_int64(rows.input_ids),
        input_mask=_int64(rows.input_mask),
        segment_ids=_int64(rows.segment_ids),
        next_sentence_label=_int64(rows.next_sentence_labels),
        masked_lm_labels=torch.from_numpy(rows.write_predictions(unlabelled)),
    )


def blank_rows(count: int, like: Rows) -> Rows:
    """Rows without labels, so without a loss, and with one visible token. They pad the last batch to its full shape."""
    arrays = {name: np.zeros((count, *array.shape[1:]), array.dtype) for name, array in like.arrays.items()}
    arrays["input_mask"][:, 0] = 1
    arrays["next_sentence_labels"][:] = NO_LABEL
    return Rows(**arrays)


def _int64(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))
