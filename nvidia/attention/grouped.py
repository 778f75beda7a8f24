"""Attention on a CPU with next to no padding and without storing the scores: in tiles that fit a cache.

T real tokens, A heads, D head size, n sequences of at most L tokens and R queries, P = n·A pairs of sequence and head.
torch's own kernel for CPUs has no dropout. Here scores exist for one tile at a time, in both passes, so memory grows
with T, not with T·L. Short sequences of similar length are padded to one length and computed together. In a block of
which only some rows are read, only U queries are computed. With a window, a tile has the keys that its queries see and
no others, so work grows with T·window.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.attention.backend import WINDOW_QUERIES, AttentionInputs, Backend, BackendContext
from nvidia.cpu import openblas
from nvidia.cpu.dropout import MaskStream, draw_seed
from nvidia.cpu.libraries import in_use
from nvidia.unpadding import Packing

Groups = tuple[tuple[int, int], ...]  # (number of sequences, their length), in the order of the packed rows

# Scores of a tile, 2 MiB: they stay in the cache between the product that writes them and the one that reads them.
_TILE = 1 << 19
# Scores of all heads below which copying sequences together costs less than computing each by itself.
_SHORT = 1 << 17
# Scores of padding that cost as much as the calls of another run.
_MAX_PADDING = 1 << 15
# Scores of a batch from which on gathering some queries costs less than queries that nobody reads.
_MIN_SKIPPED = 1 << 16


def grouped_attention(qkv: Tensor, packing: Packing, dropout_prob: float, window: int = 0) -> Tensor:
    """[T, 3, A, D], packed by length → [T, A, D]; `window` as in AttentionInputs."""
    heads = qkv.shape[2]
    runs = packing.mask(("grouped", heads, window), lambda: _runs(packing.groups, heads, window))
    return _GroupedAttention.apply(qkv, None, runs, dropout_prob)


def attention_of_some(q: Tensor, kv: Tensor, groups: Groups, counts: Sequence[int], dropout_prob: float) -> Tensor:
    """The same for some queries [U, A, D], `counts` per sequence, with all keys and values [T, 2, A, D]."""
    return _GroupedAttention.apply(kv, q, _runs(groups, q.shape[1], counts=counts), dropout_prob)


class _InPlace:
    """One sequence, used where it is."""

    hidden = None

    def spread(self, packed: Tensor, has_zeros: bool = False) -> Tensor:
        """[N, K, A, D] → [K, P, N, D]"""
        return packed.permute(1, 2, 0, 3)

    empty = spread

    def collect(self, spread: Tensor, packed: Tensor) -> None:
        """The results are in their place already."""


class _Copied:
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


class _Run(NamedTuple):
    """Sequences that are computed together, and their slices of the packed rows."""

    sequences: int  # n
    length: int  # L, of the longest
    queries_each: int  # R, of the one with most
    tokens: slice
    queries: slice  # equal to `tokens` unless queries are packed separately
    token_rows: _InPlace | _Copied
    query_rows: _InPlace | _Copied
    reach: int | None  # how many tokens a query sees on each side; None for all


class _Tile(NamedTuple):
    """Scores that are computed together."""

    pairs: slice
    queries: slice
    keys: slice
    hidden: Tensor | None  # added to the scores


class _GroupedAttention(torch.autograd.Function):
    """[T, 3, A, D], or keys and values [T, 2, A, D] and packed queries [U, A, D] → [T or U, A, D]"""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, some: Tensor | None, runs: tuple[_Run, ...], dropout_prob: float) -> Tensor:
        ctx.save_for_backward(packed, some)
        ctx.runs, ctx.dropout_prob = runs, dropout_prob
        ctx.seed = draw_seed() if dropout_prob else 0
        masks, scratch = MaskStream(ctx.seed, dropout_prob), _Scratch(packed, runs, 2)
        context = torch.empty_like(packed[:, 0] if some is None else some, memory_format=torch.contiguous_format)
        for run in runs:
            q, k, v = _of_run(run, packed, some)
            target = context[run.queries].unsqueeze(1)
            out = run.query_rows.empty(target)
            for tile in _tiles(len(q), run):
                pairs, queries, keys, _ = tile
                probabilities = _probabilities(q[pairs, queries], k[pairs, keys], tile, scratch)
                if masks.drops:
                    probabilities *= masks.draw(
                        probabilities.shape, packed.dtype, out=scratch.take(probabilities.shape, 1)
                    )
                _product(out[0, pairs, queries], probabilities, v[pairs, keys], masks.scale)
            run.query_rows.collect(out, target)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, some = ctx.saved_tensors
        masks, scratch = MaskStream(ctx.seed, ctx.dropout_prob), _Scratch(packed, ctx.runs, 4)
        packed_gradient = torch.empty_like(packed, memory_format=torch.contiguous_format)
        some_gradient = None if some is None else torch.empty_like(some, memory_format=torch.contiguous_format)
        for run in ctx.runs:
            (out_gradient,) = run.query_rows.spread(gradient[run.queries].unsqueeze(1), has_zeros=True)
            inputs = (*_of_run(run, packed, some), out_gradient)
            targets = [(run.token_rows, packed_gradient[run.tokens])]
            if some_gradient is not None:
                targets.insert(0, (run.query_rows, some_gradient[run.queries].unsqueeze(1)))
            spread = [rows.empty(target) for rows, target in targets]
            gradients = [part for parts in spread for part in parts]
            if run.queries_each == 0 or run.reach is not None:  # nothing is written, or tiles overlap in some keys
                gradients[1].zero_()
                gradients[2].zero_()
            for tile in _tiles(len(gradients[0]), run):
                is_added = tile.queries.start > 0 or run.reach is not None
                _add_tile(gradients, inputs, tile, masks, scratch, is_added)
            for parts, (rows, target) in zip(spread, targets, strict=True):
                rows.collect(parts, target)
        return packed_gradient, some_gradient, None, None


class _Scratch:
    """Scratch buffers for the scores of a tile, allocated once per pass: allocating costs as much as filling them."""

    def __init__(self, like: Tensor, runs: tuple[_Run, ...], times: int) -> None:
        sizes = (math.prod(_tile_shape(run.sequences * like.shape[2], run)) for run in runs)
        self.scores = like.new_empty(times, max(sizes, default=0))

    def take(self, shape: Sequence[int], which: int) -> Tensor:
        return self.scores[which, : math.prod(shape)].view(*shape)


def _add_tile(
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tile: _Tile,
    masks: MaskStream,
    scratch: _Scratch,
    is_added: bool,
) -> None:
    """Write, or add, the part of one tile to the gradients of queries, keys and values, each [P, …, D]."""
    pairs, queries, keys, _ = tile
    q, k, v, out_gradient = inputs
    q, k, v, out_gradient = q[pairs, queries], k[pairs, keys], v[pairs, keys], out_gradient[pairs, queries]
    probabilities = _probabilities(q, k, tile, scratch)  # [P, R, keys]
    used, scale = probabilities, q.shape[-1] ** -0.5
    if masks.drops:
        mask = masks.draw(probabilities.shape, probabilities.dtype, out=scratch.take(probabilities.shape, 1))
        used = torch.mul(probabilities, mask, out=scratch.take(probabilities.shape, 2))
    _product(gradients[2][pairs, keys], used.transpose(1, 2), out_gradient, masks.scale, is_added)
    gradient = _product(scratch.take(probabilities.shape, 3), out_gradient, v.transpose(1, 2), masks.scale)
    if masks.drops:
        gradient *= mask
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)
    _product(gradients[0][pairs, queries], gradient, k, scale)
    _product(gradients[1][pairs, keys], gradient.transpose(1, 2), q, scale, is_added)


def _probabilities(q: Tensor, k: Tensor, tile: _Tile, scratch: _Scratch) -> Tensor:
    """softmax(q·kᵀ/√D), [P, R, keys]; summed in fp32 for every type."""
    scores = scratch.take((len(q), q.shape[1], k.shape[1]), 0)
    _product(scores, q, k.transpose(1, 2), q.shape[-1] ** -0.5)
    if tile.hidden is not None:
        scores += tile.hidden
    return torch.softmax(scores, dim=-1, out=scores)


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float, is_added: bool = False) -> Tensor:
    """out = scale·a·b, or += if `is_added`; `out` may be a view of a larger tensor."""
    if in_use().attention_products == "openblas" and out.dtype == torch.float32:
        return openblas.add_batched(out, a, b, scale, is_added)
    return torch.baddbmm(out, a, b, beta=int(is_added), alpha=scale, out=out)


def _runs(groups: Groups, heads: int, window: int = 0, counts: Sequence[int] | None = None) -> tuple[_Run, ...]:
    """Runs of one sequence, or of short sequences of similar length; of one length with a window, because padding
    outside of it would see nothing. `counts`: queries per sequence that are packed separately; None: all tokens."""
    runs, start, first = [], 0, 0
    lengths = _lengths(groups)
    wanted = lengths if counts is None else counts
    for together in _together(lengths, wanted, heads, 0 if window else _MAX_PADDING):
        chosen, asked = lengths[together], wanted[together]
        tokens, queries = slice(start, start + sum(chosen)), slice(first, first + sum(asked))
        num_queries = max(asked)
        reach = window // 2 if 0 < window // 2 < chosen[0] - 1 else None
        rows = _rows(chosen, heads, chosen[0] * num_queries)
        query_rows = rows if counts is None else _rows(asked, heads, chosen[0] * num_queries)
        runs.append(_Run(len(chosen), chosen[0], num_queries, tokens, queries, rows, query_rows, reach))
        start, first = tokens.stop, queries.stop
    return tuple(runs)


def _lengths(groups: Groups) -> list[int]:
    return [length for count, length in groups for _ in range(count)]


def _rows(lengths: Sequence[int], heads: int, scores: int) -> _InPlace | _Copied:
    """A single sequence is used in place, unless its queries are split into tiles, which reread keys."""
    return _InPlace() if len(lengths) == 1 and scores <= _TILE else _Copied(lengths, heads)


def _together(lengths: Sequence[int], counts: Sequence[int], heads: int, max_padding: int) -> Iterator[slice]:
    """Neighbours that are computed together: short ones, with at most `max_padding` scores of padding in all."""
    start, most, real = 0, 0, 0
    for place, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        most, real = max(most, count), real + length * count
        padded = (place + 1 - start) * lengths[start] * most
        is_short = heads * lengths[start] * most < _SHORT
        if place > start and not (is_short and heads * (padded - real) <= max_padding):
            yield slice(start, place)
            start, most, real = place, count, length * count
    if lengths:
        yield slice(start, len(lengths))


def _tile_shape(num_pairs: int, run: _Run) -> tuple[int, int, int]:
    """(pairs, queries, keys) of the largest tile: at most `_TILE` scores, or one query of one pair."""
    queries, keys = run.queries_each, run.length
    if run.reach is not None:
        queries = min(queries, max(WINDOW_QUERIES, run.reach // 2))
        keys = min(keys, queries + 2 * run.reach)
    queries = min(queries, max(1, _TILE // keys))
    return min(num_pairs, max(1, _TILE // max(1, queries * keys))), queries, keys


def _tiles(num_pairs: int, run: _Run) -> Iterator[_Tile]:
    """Split the scores [P, R, L] that are needed into tiles."""
    pairs, rows, _ = _tile_shape(num_pairs, run)
    for first in range(0, num_pairs, pairs):
        for row in range(0, run.queries_each, max(1, rows)):
            chosen, queries = slice(first, min(first + pairs, num_pairs)), slice(row, min(row + rows, run.queries_each))
            if (reach := run.reach) is None:
                hidden = None if run.token_rows.hidden is None else run.token_rows.hidden[chosen]
                yield _Tile(chosen, queries, slice(0, run.length), hidden)
            else:
                keys = slice(max(0, queries.start - reach), min(queries.stop + reach, run.length))
                shift = queries.start - keys.start
                hidden = _hidden_keys(queries.stop - queries.start, keys.stop - keys.start, shift, reach)
                yield _Tile(chosen, queries, keys, hidden)


@lru_cache(maxsize=64)
def _hidden_keys(num_queries: int, num_keys: int, shift: int, reach: int) -> Tensor:
    """[queries, keys]: 0 where a query sees a key and -∞ elsewhere; the first query is at key `shift`."""
    distance = torch.arange(num_queries)[:, None] + shift - torch.arange(num_keys)
    return torch.zeros(num_queries, num_keys).masked_fill(distance.abs() > reach, -math.inf)


def _of_run(run: _Run, packed: Tensor, some: Tensor | None) -> tuple[Tensor, ...]:
    """The queries, keys and values of a run, each [P, …, D]."""
    queries = () if some is None else run.query_rows.spread(some[run.queries].unsqueeze(1)).unbind()
    return (*queries, *run.token_rows.spread(packed[run.tokens]).unbind())


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    return grouped_attention(qkv, inputs.packing, inputs.dropout_prob, inputs.window), None


def attend_some(q: Tensor, kv: Tensor, inputs: AttentionInputs, counts: Sequence[int]) -> Tensor:
    return attention_of_some(q, kv, inputs.packing.groups, counts, inputs.dropout_prob)


def should_skip_queries(packing: Packing, num_heads: int, num_queries: int, window: int) -> bool:
    """Whether skipping queries outweighs gathering those that are read: not where there are few scores, and not with a
    window, where all queries cost little."""
    if window:
        return False
    scores = [num_heads * length * length for length in _lengths(packing.groups)]
    is_worth_it = sum(scores) >= _MIN_SKIPPED and 2 * num_queries <= packing.num_tokens
    return is_worth_it or max(scores, default=0) >= _SHORT


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options(has_window=True)) is not None:
        return reason
    return None if context.device == "cpu" else f"is for CPUs, but the model is on {context.device}"


BACKEND = Backend(attend, reason_against, attend_some, should_skip_queries)
