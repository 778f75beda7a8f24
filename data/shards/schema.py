"""The schema of a shard: the six datasets of NVIDIA's layout, our additions, and rows in memory.

N rows, S tokens per row, P predictions per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Split = Literal["training", "validation", "test"]
SPLITS: tuple[Split, ...] = ("training", "validation", "test")

FORMAT_VERSION = 1
MAX_ROW_LENGTH = 8192  # tokens; the largest S that is written or read
ATTRIBUTE = "bert_pretraining"  # the only root attribute: a JSON object, described in docs/data_format.md
MANIFEST_NAME = "manifest.json"
SUFFIXES = (".hdf5", ".h5")  # of a shard's file name
WORD_STARTS = "word_starts"  # ours, optional: [N, ceil(S / 8)] uint8, one bit per token, set where a word begins
NO_LABEL = -1  # in labels of batches: nothing to predict

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
    """Rows of one or more shards, in the types of the schema."""

    input_ids: np.ndarray  # [N, S] int32
    input_mask: np.ndarray  # [N, S] int8
    segment_ids: np.ndarray  # [N, S] int8
    masked_lm_positions: np.ndarray  # [N, P] int32; 0 = no more
    masked_lm_ids: np.ndarray  # [N, P] int32
    next_sentence_labels: np.ndarray  # [N] int8; NO_LABEL where the row has no sentence pair
    word_starts: np.ndarray | None = None  # [N, ceil(S / 8)] uint8, packed bits; None if the file has none

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, without `word_starts` if it is None."""
        named = {name: getattr(self, name) for name in (*DATASETS, WORD_STARTS)}
        return {name: array for name, array in named.items() if array is not None}

    def replace(self, **changes: Any) -> "Rows":
        return replace(self, **changes)

    def take(self, index: np.ndarray | slice) -> "Rows":
        return Rows(**{name: array[index] for name, array in self.arrays.items()})

    def padded_to_predictions(self, num_predictions: int) -> "Rows":
        """The same rows with P padded to `num_predictions`."""
        missing = num_predictions - self.masked_lm_positions.shape[1]
        if missing <= 0:
            return self
        names = ("masked_lm_positions", "masked_lm_ids")
        return self.replace(**{name: np.pad(getattr(self, name), ((0, 0), (0, missing))) for name in names})

    def with_originals(self) -> "Rows":
        """The same rows with the original tokens restored and nothing to predict."""
        empty = np.zeros_like(self.masked_lm_positions)
        originals = self.write_predictions(self.input_ids.copy())
        return self.replace(input_ids=originals, masked_lm_positions=empty, masked_lm_ids=empty)

    def write_predictions(self, values: np.ndarray) -> np.ndarray:
        """Write the original id of each token to predict to its place in `values`, [N, S], and return them."""
        row_index, column = np.nonzero(self.masked_lm_positions)
        values[row_index, self.masked_lm_positions[row_index, column]] = self.masked_lm_ids[row_index, column]
        return values


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate at least one part; `word_starts` is kept only if every part has it."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part.arrays for part in parts]
    names = [*DATASETS, *([WORD_STARTS] if all(WORD_STARTS in found for found in arrays) else [])]
    return Rows(**{name: np.concatenate([found[name] for found in arrays]) for name in names})
