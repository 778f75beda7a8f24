"""Synthetic batches of a given length and share of real tokens, from a fixed generator."""

from typing import NamedTuple

import torch
from torch import Tensor

MASKED_SHARE = 0.15
CLS, SEP, MASK = 101, 102, 103
FIRST_WORD = 999  # below are special and unused tokens in BERT's vocabulary


class Batch(NamedTuple):
    """The six fields of a training batch."""

    kind: int
    input_ids: Tensor
    input_mask: Tensor
    segment_ids: Tensor
    next_sentence_label: Tensor
    masked_lm_labels: Tensor


def make_batch(rows: int, length: int, fullness: float, vocab_size: int, max_predictions: int, seed: int) -> Batch:
    """`fullness` is the mean share of real tokens: most rows are full, the others of any length."""
    generator = torch.Generator().manual_seed(seed)
    shortest = 0.1
    num_short = round(rows * (1 - fullness) / (1 - (1 + shortest) / 2))
    shares = torch.linspace(shortest, 1, num_short + 2)[1:-1] if num_short else torch.empty(0)
    lengths = torch.cat([torch.full((rows - num_short,), length), (shares * length).long()])
    lengths = lengths[torch.randperm(rows, generator=generator)][:, None]
    places = torch.arange(length)
    mask = places < lengths
    middle = lengths // 2
    ids = torch.randint(FIRST_WORD, vocab_size, (rows, length), generator=generator)
    special = (places == 0) | (places == middle) | (places == lengths - 1)
    ids = torch.where(places == 0, CLS, torch.where(special, SEP, ids)) * mask
    chances = torch.rand(rows, length, generator=generator).masked_fill(special | ~mask, -1.0)
    wanted = (lengths * MASKED_SHARE).round().clamp(1, max_predictions)
    chosen = (chances.argsort(dim=1, descending=True).argsort(dim=1) < wanted) & (chances >= 0)
    labels = torch.where(chosen, ids, -1)
    return Batch(
        kind=2,
        input_ids=torch.where(chosen, MASK, ids),
        input_mask=mask.long(),
        segment_ids=((places > middle) & mask).long(),
        next_sentence_label=torch.randint(0, 2, (rows,), generator=generator),
        masked_lm_labels=labels,
    )


def num_tokens(batches: list[Batch]) -> int:
    """Number of real tokens."""
    return int(sum(batch.input_mask.sum() for batch in batches))
