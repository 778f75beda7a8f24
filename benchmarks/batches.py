"""Synthetic batches from a fixed generator: rows as long as those of real shards, or a given share of real tokens."""

import torch
from torch import Tensor

from data.stream.batches import PRETRAINING_KIND, Batch

MASKED_SHARE = 0.15
CLS, SEP, MASK = 101, 102, 103
FIRST_WORD = 999  # below are special and unused tokens in BERT's vocabulary

# Lengths of rows at equal steps from the shortest to the longest, in shards of data.prepare: 5 MB of English film
# reviews, encyclopedia, books and speech, sentence pairs, vocabulary 30,522.
REAL_LENGTHS = {
    128: (7, 33, 43, 52, 60, 69, 76, 84, 93, 101, 109, 118, 127, *(128,) * 20),
    512: (9, 37, 51, 62, 72, 83, 93, 102, 113, 123, 133, 141, 151, 158, 167, 177, 187, 197, 210, 221, 235, 251, 270,
          290, 312, 338, 365, 400, 439, 494, 512, 512, 512),
}  # fmt: skip


def make_batch(
    rows: int, length: int, fullness: float | None, vocab_size: int, max_predictions: int, seed: int
) -> Batch:
    """`fullness` is the mean share of real tokens, most rows being full; None: lengths of real shards."""
    generator = torch.Generator().manual_seed(seed)
    lengths = draw_lengths(rows, length, generator) if fullness is None else spread_lengths(rows, length, fullness)
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
        kind=torch.tensor(PRETRAINING_KIND),
        input_ids=torch.where(chosen, MASK, ids),
        input_mask=mask.long(),
        segment_ids=((places > middle) & mask).long(),
        next_sentence_label=torch.randint(0, 2, (rows,), generator=generator),
        masked_lm_labels=labels,
    )


def draw_lengths(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """[rows], one from each of as many equal parts of the real distribution."""
    known = torch.tensor(REAL_LENGTHS[length], dtype=torch.float64)
    places = (torch.arange(rows) + torch.rand(rows, generator=generator)) / rows * (len(known) - 1)
    below = places.long().clamp(max=len(known) - 2)
    return torch.lerp(known[below], known[below + 1], places.double() - below).long()


def spread_lengths(rows: int, length: int, fullness: float) -> Tensor:
    """[rows] with a given mean: full rows, and others evenly from a tenth of the length up."""
    shortest = 0.1
    num_short = round(rows * (1 - fullness) / (1 - (1 + shortest) / 2))
    shares = torch.linspace(shortest, 1, num_short + 2)[1:-1] if num_short else torch.empty(0)
    return torch.cat([torch.full((rows - num_short,), length), (shares * length).long()])


def num_tokens(batches: list[Batch]) -> int:
    """Number of real tokens."""
    return int(sum(batch.input_mask.sum() for batch in batches))
