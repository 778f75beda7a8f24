"""Masks many rows at once for masked-language modelling: chooses tokens to predict, and replaces them.

N rows, S tokens per row, P predictions per row. Every choice is a function of (key, row number), never of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from common.errors import UserError
from data.randomness import derive_key, row_bits
from data.shards.schema import Rows

Unit = Literal["token", "word", "span"]
UNITS: tuple[Unit, ...] = ("token", "word", "span")

# Spans as in SpanBERT: lengths in words follow a geometric distribution, truncated at ten.
_SPAN_END_PROBABILITY = 0.2
_MAX_SPAN = 10

_POSITION_BITS = np.uint64(16)  # of a sort key; rows are far shorter than 65,536 tokens
_POSITION_MASK = np.uint64(0xFFFF)


@dataclass(frozen=True)
class MaskingPolicy:
    """How rows are masked. As in BERT, 80 % of the chosen tokens become [MASK], 10 % a random token, 10 % stay."""

    mask_id: int
    special_ids: tuple[int, ...]  # never predicted, never a random replacement; [PAD], [UNK], [CLS], [SEP], [MASK]
    vocab_size: int
    max_predictions_per_seq: int
    rate: float = 0.15
    rate_schedule: tuple[tuple[int, float], ...] = ()  # (step, rate) points, interpolated linearly; replaces `rate`
    unit: Unit = "token"
    continuation_ids: tuple[int, ...] = ()  # ids that continue a word; used if a shard has no word starts
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        rates = [rate for _, rate in self.rate_schedule] or [self.rate]
        if not all(0.0 < rate < 1.0 for rate in rates):
            raise UserError(f"masking rate: found {rates}, expected values between 0 and 1; BERT uses 0.15")
        if self.unit not in UNITS:
            raise UserError(f"masking unit: found {self.unit!r}, expected one of {', '.join(UNITS)}")
        steps = [step for step, _ in self.rate_schedule]
        if steps != sorted(set(steps)):
            raise UserError(f"masking rate schedule: found steps {steps}, expected increasing steps")

    def rate_at(self, step: int) -> float:
        if not self.rate_schedule:
            return self.rate
        steps, rates = zip(*self.rate_schedule, strict=True)
        return float(np.interp(step, steps, rates))

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """The ids that a random replacement may be: the vocabulary without special tokens."""
        return np.setdiff1d(np.arange(self.vocab_size, dtype=np.int32), np.array(self.special_ids, dtype=np.int32))

    @cached_property
    def is_special(self) -> np.ndarray:
        return self._table(self.special_ids)

    @cached_property
    def is_continuation(self) -> np.ndarray:
        return self._table(self.continuation_ids)

    def _table(self, ids: Sequence[int]) -> np.ndarray:
        table = np.zeros(self.vocab_size, dtype=bool)
        table[list(ids)] = True
        return table


def mask_rows(
    rows: Rows, policy: MaskingPolicy, *, seed: int, epoch: int, row_numbers: np.ndarray, step: int = 0
) -> Rows:
    """Return `rows`, which contain original tokens, with masks drawn for (seed, epoch, row number)."""
    key = derive_key(seed, "masking", epoch)
    maskable = ~policy.is_special[rows.input_ids]  # [N, S]
    maskable &= rows.input_mask != 0
    maskable[:, 0] = False  # position 0 means "no prediction" in the shard
    lengths = rows.input_mask.sum(axis=1, dtype=np.int64)
    budget = np.clip(np.rint(lengths * policy.rate_at(step)).astype(np.int64), 1, policy.max_predictions_per_seq)  # [N]
    bits = row_bits(key, row_numbers, rows.input_ids.shape[1])
    if policy.unit == "token":
        chosen = _choose_tokens(bits, maskable, budget)
    else:
        begins = _unit_starts(rows, policy, bits, maskable)
        chosen = _choose_groups(bits, maskable, begins, budget)
    return _replace_chosen(rows, policy, chosen, derive_key(seed, "replacing", epoch), row_numbers)


def _choose_tokens(bits: np.ndarray, maskable: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Return [N, P] sorted positions, 0 = none: the `budget` maskable tokens with the smallest random numbers."""
    width, most = bits.shape[1], int(budget.max(initial=1))
    # 32 bits with the position in the low ones: sorting the numbers sorts the positions with them, at SIMD speed.
    low = np.uint32((1 << max(1, (width - 1).bit_length())) - 1)
    keys = ((bits >> np.uint64(32)).astype(np.uint32) & ~low) | np.arange(width, dtype=np.uint32)
    keys[~maskable] = np.uint32(0xFFFFFFFF)
    keys.sort(axis=1)
    keys = keys[:, :most]
    valid = keys != np.uint32(0xFFFFFFFF)
    valid &= np.arange(keys.shape[1]) < budget[:, None]
    return _sorted_positions(np.where(valid, keys & low, 0))


def _choose_groups(bits: np.ndarray, maskable: np.ndarray, begins: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Return [N, P] sorted positions, 0 = none: whole groups in random order, each taken if it fits the budget."""
    count, width = bits.shape
    columns = np.arange(width, dtype=np.int64)
    begin = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)  # where each token's group begins
    draw = np.take_along_axis(bits, begin, axis=1) >> np.uint64(32)
    keys = (draw << np.uint64(32)) | (begin.astype(np.uint64) << _POSITION_BITS) | columns.astype(np.uint64)
    keys[~maskable] = np.uint64(0xFFFFFFFFFFFFFFFF)
    keys.sort(axis=1)  # groups in random order, the tokens of a group together and in order
    position = (keys & _POSITION_MASK).astype(np.int64)
    alive = keys != np.uint64(0xFFFFFFFFFFFFFFFF)
    position[~alive] = 0
    begin = np.take_along_axis(begin, position, axis=1)
    size, rank = _group_sizes(begin, alive)
    taken = np.zeros((count, width), dtype=bool)
    remaining = budget.copy()
    while True:
        eligible = alive & ~taken & (size <= remaining[:, None])
        end = np.cumsum(eligible, axis=1) + (size - 1 - rank)  # tokens used once this token's group is complete
        fits = eligible & (end <= remaining[:, None])
        if not fits.any():
            break
        taken |= fits
        remaining -= fits.sum(axis=1)
    order = np.argsort(~taken, axis=1, kind="stable")[:, : int(budget.max(initial=1))]
    kept = np.take_along_axis(taken, order, axis=1)
    return _sorted_positions(np.where(kept, np.take_along_axis(position, order, axis=1), 0))


def _group_sizes(begin: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for tokens sorted by group [N, S] the size of its group, and how many of the group precede it."""
    count, width = begin.shape
    flat = (begin + np.arange(count)[:, None] * width).ravel()
    sizes = np.bincount(flat[alive.ravel()], minlength=count * width)
    is_first = np.ones((count, width), dtype=bool)
    is_first[:, 1:] = begin[:, 1:] != begin[:, :-1]
    columns = np.arange(width)
    rank = columns - np.maximum.accumulate(np.where(is_first, columns, 0), axis=1)
    return sizes[flat].reshape(count, width), rank


def _unit_starts(rows: Rows, policy: MaskingPolicy, bits: np.ndarray, maskable: np.ndarray) -> np.ndarray:
    """Return [N, S] where a word or a span begins."""
    width = rows.input_ids.shape[1]
    if rows.word_starts is not None:
        starts = np.unpackbits(rows.word_starts, axis=1, count=width).astype(bool)
    elif policy.continuation_ids:
        starts = ~policy.is_continuation[rows.input_ids]
    else:
        raise UserError(
            f"masking unit {policy.unit!r}: the shards do not contain word starts; give "
            "the tokenizer that they were made with, or mask by token"
        )
    starts[:, 1:] |= ~maskable[:, :-1]  # a special token ends a word
    starts |= ~maskable
    return starts if policy.unit == "word" else _span_starts(starts, maskable, bits)


def _span_starts(word_starts: np.ndarray, maskable: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Cut the row into spans: after each word, the span ends with a fixed probability."""
    ends = (bits & np.uint64(0xFFFF)) < np.uint64(int(_SPAN_END_PROBABILITY * 0x10000))
    starts = word_starts & ends
    starts |= ~maskable
    starts[:, 1:] |= ~maskable[:, :-1]
    words = np.cumsum(word_starts, axis=1)
    words_before = np.maximum.accumulate(np.where(starts, words, 0), axis=1)
    return starts | (word_starts & ((words - words_before) % _MAX_SPAN == 0))


def _sorted_positions(positions: np.ndarray) -> np.ndarray:
    """Sort the positions of each row, with the zeros (none) at the end."""
    positions = positions.astype(np.uint32)
    positions[positions == 0] = np.uint32(0xFFFFFFFF)
    positions.sort(axis=1)
    positions[positions == np.uint32(0xFFFFFFFF)] = 0
    return positions.astype(np.int32)


def _replace_chosen(
    rows: Rows, policy: MaskingPolicy, positions: np.ndarray, key: int, row_numbers: np.ndarray
) -> Rows:
    width = policy.max_predictions_per_seq
    padded = np.zeros((len(positions), width), dtype=np.int32)
    padded[:, : positions.shape[1]] = positions[:, :width]
    row_index, column = np.nonzero(padded)
    where = padded[row_index, column]
    originals = rows.input_ids[row_index, where]
    bits = row_bits(key, row_numbers, width)[row_index, column]
    share = (bits >> np.uint64(40)).astype(np.float64) / 2**24
    replacement = originals.copy()
    replacement[share < policy.mask_share] = policy.mask_id
    is_random = (share >= policy.mask_share) & (share < policy.mask_share + policy.random_share)
    pick = (bits[is_random] & np.uint64(0xFFFFFFFF)) * np.uint64(len(policy.ordinary_ids)) >> np.uint64(32)
    replacement[is_random] = policy.ordinary_ids[pick]
    input_ids = rows.input_ids.copy()
    input_ids[row_index, where] = replacement
    labels = np.zeros_like(padded)
    labels[row_index, column] = originals
    return rows.replace(input_ids=input_ids, masked_lm_positions=padded, masked_lm_ids=labels)
