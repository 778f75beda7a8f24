"""Attention on a CPU without padding and without storing the scores: one sequence at a time, in tiles that fit a cache.

T real tokens, A heads, D head size, n sequences of length L, P = n·A pairs of sequence and head, R queries of a tile.
torch's own kernel for CPUs has no dropout. Here scores exist for one tile at a time, in both passes, so memory grows
with T, not with T·L. Short sequences of one length are computed together. In a block of which only some rows are read,
only U queries are computed. With a window, a tile has the keys that its queries see and no others, so work grows with
T·window.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.attention.backend import WINDOW_QUERIES, AttentionInputs, Backend, BackendContext
from nvidia.cpu.dropout import MaskStream, draw_seed
from nvidia.unpadding import Packing

Groups = tuple[tuple[int, int], ...]  # (number of sequences, their length), in the order of the packed rows

# Scores of a tile, 2 MiB: they stay in the cache between the product that writes them and the one that reads them.
_TILE = 1 << 19
# Scores of all heads below which copying sequences of one length together costs less than computing each by itself.
_SHORT = 1 << 17
# Scores per sequence from which on computing each by itself costs less than queries that nobody reads.
_MIN_SKIPPED = 1 << 14


def grouped_attention(qkv: Tensor, groups: Groups, dropout_prob: float, window: int = 0) -> Tensor:
    """[T, 3, A, D] with sequences in groups of one length → [T, A, D]; `window` as in AttentionInputs."""
    return _GroupedAttention.apply(qkv, None, _runs(groups, qkv.shape[2], window), dropout_prob)


def attention_of_some(q: Tensor, kv: Tensor, groups: Groups, counts: Sequence[int], dropout_prob: float) -> Tensor:
    """The same for some queries [U, A, D], `counts` per sequence, with all keys and values [T, 2, A, D]."""
    return _GroupedAttention.apply(kv, q, _runs_of_some(groups, counts), dropout_prob)


class _Run(NamedTuple):
    """Sequences of one length that are computed together, and their slices of the packed rows."""

    sequences: int  # n
    length: int  # L
    tokens: slice
    queries: slice  # equal to `tokens` unless queries are packed separately
    reach: int | None = None  # how many tokens a query sees on each side; None for all

    @property
    def queries_each(self) -> int:
        return (self.queries.stop - self.queries.start) // self.sequences

    @property
    def is_viewed(self) -> bool:
        """Whether a single sequence is used in place: not if its queries are split into tiles, which reread keys."""
        return self.sequences == 1 and self.queries_each * self.length <= _TILE


class _Tile(NamedTuple):
    """Scores that are computed together."""

    pairs: slice
    queries: slice
    keys: slice
    hidden: Tensor | None  # with a window: added to the scores


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
            (out,) = _heads_first(context[run.queries].unsqueeze(1), run)
            for tile in _tiles(len(q), run):
                pairs, queries, keys, _ = tile
                probabilities = _probabilities(q[pairs, queries], k[pairs, keys], tile, scratch)
                if masks.drops:
                    probabilities *= masks.draw(
                        probabilities.shape, packed.dtype, out=scratch.take(probabilities.shape, 1)
                    )
                _product(out[pairs, queries], probabilities, v[pairs, keys], masks.scale)
            _put_back(context[run.queries].unsqueeze(1), (out,), run)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, some = ctx.saved_tensors
        masks, scratch = MaskStream(ctx.seed, ctx.dropout_prob), _Scratch(packed, ctx.runs, 4)
        packed_gradient = torch.empty_like(packed)
        some_gradient = None if some is None else torch.empty_like(some)
        for run in ctx.runs:
            inputs = (*_of_run(run, packed, some), *_heads_first(gradient[run.queries].unsqueeze(1), run))
            gradients = _of_run(run, packed_gradient, some_gradient)
            if run.queries_each == 0:  # the sequence has no queries
                packed_gradient[run.tokens] = 0
            if run.reach is not None:  # tiles overlap in some of their keys
                gradients[1].zero_()
                gradients[2].zero_()
            for tile in _tiles(len(gradients[0]), run):
                _add_tile(gradients, inputs, tile, masks, scratch)
            if some_gradient is None:
                _put_back(packed_gradient[run.tokens], gradients, run)
            else:
                _put_back(some_gradient[run.queries].unsqueeze(1), gradients[:1], run)
                _put_back(packed_gradient[run.tokens], gradients[1:], run)
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
) -> None:
    """Add the part of one tile to the gradients of queries, keys and values, each [P, …, D]; the first tile writes."""
    pairs, queries, keys, hidden = tile
    q, k, v, out_gradient = inputs
    q, k, v, out_gradient = q[pairs, queries], k[pairs, keys], v[pairs, keys], out_gradient[pairs, queries]
    probabilities = _probabilities(q, k, tile, scratch)  # [P, R, keys]
    used, scale, is_added = probabilities, q.shape[-1] ** -0.5, queries.start > 0 or hidden is not None
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
    if tile.hidden is not None:
        scores.copy_(tile.hidden)
    _product(scores, q, k.transpose(1, 2), q.shape[-1] ** -0.5, is_added=tile.hidden is not None)
    return torch.softmax(scores, dim=-1, out=scores)


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float, is_added: bool = False) -> Tensor:
    """out = scale·a·b, or += if `is_added`; `out` may be a view of a larger tensor."""
    return torch.baddbmm(out, a, b, beta=int(is_added), alpha=scale, out=out)


def _runs(groups: Groups, heads: int, window: int) -> tuple[_Run, ...]:
    """Runs of one sequence, or of all sequences of one length if they are short."""
    runs, start = [], 0
    for count, length in groups:
        reach = window // 2 if 0 < window // 2 < length - 1 else None
        together = count if _is_short(heads, length) else 1
        for _ in range(0, count, together):
            tokens = slice(start, start + together * length)
            runs.append(_Run(together, length, tokens, tokens, reach))
            start = tokens.stop
    return tuple(runs)


def _runs_of_some(groups: Groups, counts: Sequence[int]) -> tuple[_Run, ...]:
    """Runs of one sequence, because the number of queries differs between sequences."""
    lengths = [length for count, length in groups for _ in range(count)]
    ends, query_ends = accumulate(lengths), accumulate(counts)
    return tuple(
        _Run(1, length, slice(end - length, end), slice(query_end - count, query_end))
        for length, end, count, query_end in zip(lengths, ends, counts, query_ends, strict=True)
    )


def _is_short(heads: int, length: int) -> bool:
    return heads * length * length < _SHORT


def _tile_shape(num_pairs: int, run: _Run) -> tuple[int, int, int]:
    """(pairs, queries, keys) of the largest tile: at most `_TILE` scores, or one query of one pair."""
    queries, keys = run.queries_each, run.length
    if run.reach is not None:
        queries = min(queries, max(WINDOW_QUERIES, run.reach // 2))
        keys = min(keys, queries + 2 * run.reach)
    queries = min(queries, max(1, _TILE // keys))
    return min(num_pairs, max(1, _TILE // max(1, queries * keys))), queries, keys


def _tiles(num_pairs: int, run: _Run) -> Iterator[_Tile]:
    """Split the scores [P, queries, L] that are needed into tiles."""
    pairs, rows, _ = _tile_shape(num_pairs, run)
    for first in range(0, num_pairs, pairs):
        for row in range(0, run.queries_each, max(1, rows)):
            chosen, queries = slice(first, min(first + pairs, num_pairs)), slice(row, min(row + rows, run.queries_each))
            if (reach := run.reach) is None:
                yield _Tile(chosen, queries, slice(0, run.length), None)
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
    queries = () if some is None else _heads_first(some[run.queries].unsqueeze(1), run)
    return (*queries, *_heads_first(packed[run.tokens], run))


def _heads_first(tokens: Tensor, run: _Run) -> tuple[Tensor, ...]:
    """[n·L, K, A, D] → K tensors [P, L, D]: views if the run is used in place, else copies."""
    total, kinds, heads, size = tokens.shape
    parts = tokens.view(run.sequences, total // run.sequences, kinds, heads, size).permute(2, 0, 3, 1, 4)
    if not run.is_viewed:
        parts = parts.clone(memory_format=torch.contiguous_format)
    return parts.flatten(1, 2).unbind()


def _put_back(tokens: Tensor, parts: Sequence[Tensor], run: _Run) -> None:
    """Copy K tensors [P, L, D] back into [n·L, K, A, D], unless they are views of it."""
    if run.is_viewed:
        return
    for kind, part in enumerate(parts):
        pairs, length, size = part.shape
        by_token = part.view(run.sequences, pairs // run.sequences, length, size).transpose(1, 2)
        tokens[:, kind].view(by_token.shape).copy_(by_token)


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    return grouped_attention(qkv, inputs.packing.groups, inputs.dropout_prob, inputs.window), None


def attend_some(q: Tensor, kv: Tensor, inputs: AttentionInputs, counts: Sequence[int]) -> Tensor:
    return attention_of_some(q, kv, inputs.packing.groups, counts, inputs.dropout_prob)


def should_skip_queries(packing: Packing, num_heads: int, num_queries: int, window: int) -> bool:
    """Whether skipping queries outweighs computing each sequence by itself: not where all are short, and not with a
    window, where all queries cost little."""
    if window:
        return False
    scores = num_heads * sum(count * length * length for count, length in packing.groups)
    is_worth_it = scores >= _MIN_SKIPPED * packing.num_rows and 2 * num_queries <= packing.num_tokens
    return is_worth_it or any(not _is_short(num_heads, length) for _, length in packing.groups)


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options(has_window=True)) is not None:
        return reason
    return None if context.device == "cpu" else f"is for CPUs, but the model is on {context.device}"


BACKEND = Backend(attend, reason_against, attend_some, should_skip_queries)
