"""Assembles rows from instances: tokens, [CLS] and [SEP], segments, padding.

N rows, S tokens per row, P predictions per row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.instances.segments import Documents, Instances
from data.shards.schema import Rows


class SpecialIds(NamedTuple):
    pad: int
    cls: int
    sep: int


class Text(NamedTuple):
    """The tokens of several pieces, concatenated."""

    tokens: np.ndarray  # [T] int32
    word_starts: np.ndarray  # [T] bool


def join_texts(texts: Sequence[Documents]) -> Text:
    """Return at least one piece's tokens, concatenated with those of the others."""
    tokens = np.concatenate([text.tokens for text in texts]).astype(np.int32, copy=False)
    return Text(tokens, np.concatenate([text.word_starts for text in texts]))


def assemble_rows(text: Text, instances: Instances, special: SpecialIds, max_seq_length: int, predictions: int) -> Rows:
    """Return unmasked rows; `a_start` and `b_start` are places in `text`. About ten passes over [N, S]."""
    a_length, b_length = (lengths.astype(np.int32)[:, None] for lengths in (instances.a_length, instances.b_length))
    column = np.arange(max_seq_length, dtype=np.int32)
    # [CLS] a … [SEP] b … [SEP]; the second [SEP] only where there is a segment B
    length = a_length + 2 + np.where(b_length > 0, b_length + 1, 0)
    after_a = column >= a_length + 2
    a_shift, b_shift = instances.a_start[:, None] - 1, instances.b_start[:, None] - (a_length + 2)
    source = np.where(after_a, b_shift, a_shift) + column
    input_mask = column < length
    input_ids = text.tokens.take(source, mode="clip")  # of any tokens where there is no text
    word_starts = text.word_starts.take(source, mode="clip")
    np.copyto(input_ids, special.pad, where=~input_mask)
    word_starts |= ~input_mask
    index = np.arange(instances.num_rows)
    for place, token in ((0, special.cls), (instances.a_length + 1, special.sep), (length[:, 0] - 1, special.sep)):
        input_ids[index, place] = token
        word_starts[index, place] = True
    return Rows(
        input_ids=input_ids,
        input_mask=input_mask.view(np.int8),
        segment_ids=(input_mask & after_a).view(np.int8),
        masked_lm_positions=np.zeros((instances.num_rows, predictions), dtype=np.int32),
        masked_lm_ids=np.zeros((instances.num_rows, predictions), dtype=np.int32),
        next_sentence_labels=instances.label.astype(np.int8),
        word_starts=np.packbits(word_starts, axis=1),
    )
