"""The shard's schema: the six datasets of NVIDIA's layout, our attributes, and rows of them in memory.

N rows, S tokens a row, P predictions a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Split = Literal["training", "validation", "test"]
SPLITS: tuple[Split, ...] = ("training", "validation", "test")

FORMAT_VERSION = 1
MAX_ROW_LENGTH = 8192  # tokens: the largest S that is written, and that is read
ATTRIBUTE = "bert_pretraining"  # the one root attribute: a JSON object, described in docs/data_format.md
MANIFEST_NAME = "manifest.json"
SUFFIXES = (".hdf5", ".h5")  # of a shard's name
WORD_STARTS = "word_starts"  # ours, optional: [N, ceil(S / 8)] uint8, one bit a token, set where a word begins

# name -> (shape, type as written)
DATASETS: dict[str, tuple[str, type[np.integer]]] = {
    "input_ids": ("NS", np.int32),
    "input_mask": ("NS", np.int8),
    "segment_ids": ("NS", np.int8),
    "masked_lm_positions": ("NP", np.int32),
    "masked_lm_ids": ("NP", np.int32),
    "next_sentence_labels": ("N", np.int8),
}


@dataclass(frozen=True)
class Rows:
    """Some rows of a shard, in the shard's own types."""

    input_ids: np.ndarray  # [N, S] int32
    input_mask: np.ndarray  # [N, S] int8
    segment_ids: np.ndarray  # [N, S] int8
    masked_lm_positions: np.ndarray  # [N, P] int32; 0 = no more
    masked_lm_ids: np.ndarray  # [N, P] int32
    next_sentence_labels: np.ndarray  # [N] int8
    word_starts: np.ndarray | None = None  # [N, ceil(S / 8)] uint8, packed bits; None where the file has none

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def of(cls, fields: Sequence[np.ndarray], word_starts: np.ndarray | None = None) -> "Rows":
        return cls(**dict(zip(DATASETS, fields, strict=True)), word_starts=word_starts)

    @property
    def fields(self) -> tuple[np.ndarray, ...]:
        """The six datasets in the schema's order."""
        return tuple(getattr(self, name) for name in DATASETS)

    def replace(self, **changes: Any) -> "Rows":
        return replace(self, **changes)

    def take(self, index: np.ndarray | slice) -> "Rows":
        starts = None if self.word_starts is None else self.word_starts[index]
        return Rows.of([field[index] for field in self.fields], starts)

    def with_room_for(self, predictions: int) -> "Rows":
        """The same rows with P grown to `predictions`."""
        missing = predictions - self.masked_lm_positions.shape[1]
        if missing <= 0:
            return self
        grown = [np.pad(field, ((0, 0), (0, missing))) for field in (self.masked_lm_positions, self.masked_lm_ids)]
        return self.replace(masked_lm_positions=grown[0], masked_lm_ids=grown[1])

    def with_originals(self) -> "Rows":
        """The same rows with every masked token put back and nothing to predict."""
        input_ids = self.input_ids.copy()
        row_index, column = np.nonzero(self.masked_lm_positions)
        input_ids[row_index, self.masked_lm_positions[row_index, column]] = self.masked_lm_ids[row_index, column]
        empty = np.zeros_like(self.masked_lm_positions)
        return self.replace(input_ids=input_ids, masked_lm_positions=empty, masked_lm_ids=empty)


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of several blocks as one; word starts survive only where every part has them."""
    if len(parts) == 1:
        return parts[0]
    fields = [np.concatenate(column) for column in zip(*(part.fields for part in parts), strict=True)]
    starts = [part.word_starts for part in parts]
    joined = None if any(s is None for s in starts) else np.concatenate([s for s in starts if s is not None])
    return Rows.of(fields, joined)
