"""How packed sequences are divided for attention on a CPU: runs, which are independent, and the tiles of their scores.

T real tokens, A heads, D head size. A run has n sequences of at most L tokens and R queries each, and P = n·A pairs of
sequence and head. It is at most as large as a tile: a long sequence is divided by its heads, and then by its queries.
Which tiles there are depends on the batch alone, not on the number of threads.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nvidia.attention.backend import WINDOW_QUERIES

Groups = tuple[tuple[int, int], ...]  # (number of sequences, their length), in the order of the packed rows

# Scores of a tile, 2 MiB: they stay in the cache between the product that writes them and the one that reads them.
TILE = 1 << 19
# Scores of short sequences in a run, so that a small batch, too, has runs for several threads.
TOGETHER = 1 << 18
# Scores of all heads below which copying sequences together costs less than computing each by itself.
SHORT = 1 << 17
# Scores of padding that cost as much as the calls of another run.
MAX_PADDING = 1 << 15


class _Alone:
    """One sequence: used where it is, or copied so that the rows of each head are side by side."""

    hidden = None

    def __init__(self, is_copied: bool) -> None:
        self.is_copied = is_copied

    def spread(self, packed: Tensor, has_zeros: bool = False) -> Tensor:
        """[N, K, A, D] → [K, A, N, D]"""
        spread = packed.permute(1, 2, 0, 3)
        return spread.contiguous() if self.is_copied else spread

    def empty(self, packed: Tensor) -> Tensor:
        spread = packed.permute(1, 2, 0, 3)
        return spread.new_empty(spread.shape) if self.is_copied else spread

    def collect(self, spread: Tensor, packed: Tensor) -> None:
        """Results are in their place already, unless there is a copy."""
        if self.is_copied:
            packed.permute(1, 2, 0, 3).copy_(spread)


class _Together:
    """Sequences of N rows in all, copied side by side: each pair of sequence and head has `width` rows of its own."""

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        self.sequences, self.heads, self.width = len(lengths), heads, max(lengths)
        sizes, steps = torch.tensor(lengths, dtype=torch.int32), torch.arange(self.width, dtype=torch.int32)
        self.is_real = steps < sizes[:, None]  # [n, width]
        self.is_ragged = min(lengths) < self.width
        ends = sizes.cumsum(0, dtype=torch.int32)
        self.row = torch.where(self.is_real, (ends - sizes)[:, None] + steps, 0)  # [n, width]
        self.indices: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def hidden(self) -> Tensor | None:
        """[P, 1, width], added to the scores: -∞ for padding, 0 for other keys; None without padding."""
        if not self.is_ragged:
            return None
        seen = torch.zeros(self.sequences, self.width).masked_fill(~self.is_real, -math.inf)
        return seen.repeat_interleave(self.heads, dim=0).unsqueeze(1)

    def index(self, num_kinds: int) -> tuple[Tensor, Tensor]:
        """The rows of D elements of [N, K, A, D] in the order of [K, n, A, width, D], and the way back."""
        if num_kinds not in self.indices:
            kinds, heads = (torch.arange(count, dtype=torch.int32) for count in (num_kinds, self.heads))
            there = (self.row[:, None] * num_kinds + kinds[:, None, None, None]) * self.heads + heads[:, None]
            sequence, step = self.is_real.nonzero().int()[:, :, None, None].unbind(1)  # each [N, 1, 1]
            back = ((kinds[:, None] * self.sequences + sequence) * self.heads + heads) * self.width + step
            self.indices[num_kinds] = there.flatten(), back.flatten()
        return self.indices[num_kinds]

    def spread(self, packed: Tensor, has_zeros: bool = False) -> Tensor:
        """[N, K, A, D] → [K, P, width, D]; with zeros on padding, if asked for, else with values of other rows."""
        there, _ = self.index(packed.shape[1])
        spread = packed.reshape(-1, packed.shape[-1]).index_select(0, there).view(*self.shape(packed))
        if has_zeros and self.is_ragged:
            by_sequence = spread.view(-1, self.sequences, self.heads, self.width, spread.shape[-1])
            by_sequence.masked_fill_(~self.is_real[:, None, :, None], 0)
        return spread

    def empty(self, packed: Tensor) -> Tensor:
        """An array as `spread` makes it, without values."""
        return packed.new_empty(self.shape(packed))

    def shape(self, packed: Tensor) -> tuple[int, ...]:
        return packed.shape[1], self.sequences * self.heads, self.width, packed.shape[-1]

    def collect(self, spread: Tensor, packed: Tensor) -> None:
        """Copy [K, P, width, D] back into [N, K, A, D]."""
        _, back = self.index(len(spread))
        torch.index_select(spread.view(-1, packed.shape[-1]), 0, back, out=packed.view(-1, packed.shape[-1]))


class Run(NamedTuple):
    """Sequences that are computed together, or some heads of one, and their slices of the packed rows."""

    number: int
    pairs: int  # P
    length: int  # L, of the longest
    queries_each: int  # R, of the one with most
    tokens: slice
    queries: slice  # equal to `tokens` unless queries are packed separately
    heads: slice | None  # None for all
    token_rows: _Alone | _Together
    query_rows: _Alone | _Together
    reach: int | None  # how many tokens a query sees on each side; None for all

    def of_tokens(self, packed: Tensor) -> Tensor:
        """[T, K, A, D] → the tokens and heads of this run"""
        return packed[self.tokens] if self.heads is None else packed[self.tokens, :, self.heads]

    def of_queries(self, packed: Tensor) -> Tensor:
        """[U, A, D] → the queries and heads of this run"""
        return packed[self.queries] if self.heads is None else packed[self.queries, self.heads]

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """(pairs, queries, keys) of the largest tile."""
        return self.pairs, *_tile_shape(self.pairs, self.queries_each, self.length, self.reach)

    def tiles(self) -> Iterator["Tile"]:
        """Divide the scores [P, R, L] that are needed by their queries."""
        _, rows, _ = self.tile_shape
        for first in range(0, self.queries_each, max(1, rows)):
            queries = slice(first, min(first + rows, self.queries_each))
            if (reach := self.reach) is None:
                yield Tile(queries, slice(0, self.length), self.token_rows.hidden)
            else:
                keys = slice(max(0, queries.start - reach), min(queries.stop + reach, self.length))
                shift = queries.start - keys.start
                hidden = _hidden_keys(queries.stop - queries.start, keys.stop - keys.start, shift, reach)
                yield Tile(queries, keys, hidden)


class Tile(NamedTuple):
    """Scores that are computed together, of all pairs of a run."""

    queries: slice
    keys: slice
    hidden: Tensor | None  # added to the scores


def make_runs(groups: Groups, heads: int, window: int = 0, counts: Sequence[int] | None = None) -> tuple[Run, ...]:
    """Runs of short sequences of similar length, or of the heads of one sequence; of one length with a window, because
    padding outside of it would see nothing. `counts`: queries per sequence that are packed separately; None: all
    tokens."""
    runs: list[Run] = []
    start = first = 0
    lengths = sequence_lengths(groups)
    wanted = lengths if counts is None else counts
    for together in _together(lengths, wanted, heads, 0 if window else MAX_PADDING):
        chosen, asked = lengths[together], wanted[together]
        tokens, queries = slice(start, start + sum(chosen)), slice(first, first + sum(asked))
        length, most = chosen[0], max(asked)
        reach = window // 2 if 0 < window // 2 < length - 1 else None
        if len(chosen) == 1:
            alone = _Alone(length * most > TILE)  # a copy, because tiles reread keys
            # With a window, tiles of fewer heads are slower, but one sequence must not keep a single thread busy.
            is_slow = reach is not None and length > sum(lengths) // 3
            for part, count in _head_slices(heads, length, most, reach, TILE // 4 if is_slow else TILE):
                runs.append(Run(len(runs), count, length, most, tokens, queries, part, alone, alone, reach))
        else:
            rows = _Together(chosen, heads)
            query_rows = rows if counts is None else _Together(asked, heads)
            pairs = len(chosen) * heads
            runs.append(Run(len(runs), pairs, length, most, tokens, queries, None, rows, query_rows, reach))
        start, first = tokens.stop, queries.stop
    return tuple(runs)


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """[P, N, …] → the rows of a tile. Often these are all; then no call of torch: runs compete for Python's lock."""
    return x if rows.stop - rows.start == x.shape[1] else x[:, rows]


def sequence_lengths(groups: Groups) -> list[int]:
    return [length for count, length in groups for _ in range(count)]


def _together(lengths: Sequence[int], counts: Sequence[int], heads: int, max_padding: int) -> Iterator[slice]:
    """Neighbours that are computed together: short ones, with at most `max_padding` scores of padding."""
    start, most, real = 0, 0, 0
    for place, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        most, real = max(most, count), real + length * count
        padded = (place + 1 - start) * lengths[start] * most
        is_short = heads * lengths[start] * most < SHORT
        fits = heads * padded <= TOGETHER and heads * (padded - real) <= max_padding
        if place > start and not (is_short and fits):
            yield slice(start, place)
            start, most, real = place, count, length * count
    if lengths:
        yield slice(start, len(lengths))


def _head_slices(
    heads: int, length: int, queries: int, reach: int | None, max_scores: int
) -> Iterator[tuple[slice | None, int]]:
    """The heads of one sequence in about equal parts with tiles of `max_scores`, and how many heads these have."""
    rows, keys = _tile_shape(1, queries, length, reach)
    parts = math.ceil(heads / max(1, max_scores // max(1, rows * keys)))
    bounds = [heads * part // parts for part in range(parts + 1)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop) if parts > 1 else None, stop - start


def _tile_shape(pairs: int, queries: int, length: int, reach: int | None) -> tuple[int, int]:
    """(queries, keys) of the largest tile of as many pairs: at most `TILE` scores, or one query."""
    keys = length
    if reach is not None:
        queries = min(queries, max(WINDOW_QUERIES, reach // 2))
        keys = min(keys, queries + 2 * reach)
    parts = math.ceil(queries / max(1, TILE // (pairs * keys)))
    return math.ceil(queries / max(1, parts)), keys


@lru_cache(maxsize=64)
def _hidden_keys(num_queries: int, num_keys: int, shift: int, reach: int) -> Tensor:
    """[queries, keys]: 0 where a query sees a key and -∞ elsewhere; the first query is at key `shift`."""
    distance = torch.arange(num_queries)[:, None] + shift - torch.arange(num_keys)
    return torch.zeros(num_queries, num_keys).masked_fill(distance.abs() > reach, -math.inf)
