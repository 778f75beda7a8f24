"""Attention on a CPU with no padded and no stored score matrix: a sequence at a time, in pieces that fit a cache.

T real tokens, A heads, D head size, n sequences of length L, P = n·A pairs of sequence and head, R queries of a piece.
torch's own kernel for CPUs has no dropout. Here scores exist for one piece at a time, in both passes, so memory grows
with T, not with T·L. Short sequences of one length are taken together. In a block of which only some rows are read,
U queries take part.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext
from nvidia.cpu.dropout import MaskStream, draw_seed
from nvidia.unpadding import Packing

Groups = tuple[tuple[int, int], ...]  # (number of sequences, their length), as they lie in the packed rows

# Scores at a time, 2 MiB: they stay in the cache from the product that makes them to the one that reads them.
_PIECE = 1 << 19
# Scores of all heads below which copying sequences of one length together costs less than taking each by itself.
_SHORT = 1 << 17


def grouped_attention(qkv: Tensor, groups: Groups, dropout_prob: float) -> Tensor:
    """[T, 3, A, D], sequences in runs of one length as `groups` (n, L) says → [T, A, D]"""
    return _GroupedAttention.apply(qkv, None, _runs(groups, heads=qkv.shape[2]), dropout_prob)


def attention_of_some(q: Tensor, kv: Tensor, groups: Groups, counts: Sequence[int], dropout_prob: float) -> Tensor:
    """The same for some queries only, [U, A, D], `counts` of them a sequence, on all keys and values [T, 2, A, D]."""
    return _GroupedAttention.apply(kv, q, _runs_of_some(groups, counts), dropout_prob)


class _Run(NamedTuple):
    """Sequences of one length that are taken together, and where they lie in the packed rows."""

    sequences: int  # n
    length: int  # L
    tokens: slice
    queries: slice  # the same, unless queries are packed by themselves

    @property
    def queries_each(self) -> int:
        return (self.queries.stop - self.queries.start) // self.sequences

    @property
    def is_viewed(self) -> bool:
        """One sequence is used where it lies, unless it is cut into pieces of queries, which read keys many times."""
        return self.sequences == 1 and self.queries_each * self.length <= _PIECE


class _GroupedAttention(torch.autograd.Function):
    """Of [T, 3, A, D], or of keys and values [T, 2, A, D] and packed queries [U, A, D] → [T or U, A, D]"""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, some: Tensor | None, runs: tuple[_Run, ...], dropout_prob: float) -> Tensor:
        ctx.save_for_backward(packed, some)
        ctx.runs, ctx.dropout_prob = runs, dropout_prob
        ctx.seed = draw_seed() if dropout_prob else 0
        masks, room = MaskStream(ctx.seed, dropout_prob), _Room(packed, runs, 2)
        context = torch.empty_like(packed[:, 0] if some is None else some, memory_format=torch.contiguous_format)
        for run in runs:
            q, k, v = _of_run(run, packed, some)
            (out,) = _heads_first(context[run.queries].unsqueeze(1), run)
            for pairs, queries in _pieces(len(q), run.queries_each, run.length):
                probabilities = _probabilities(q[pairs, queries], k[pairs], room)
                if masks.drops:
                    probabilities *= masks.draw(
                        probabilities.shape, packed.dtype, out=room.take(probabilities.shape, 1)
                    )
                _product(out[pairs, queries], probabilities, v[pairs], masks.scale)
            _put_back(context[run.queries].unsqueeze(1), (out,), run)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, some = ctx.saved_tensors
        masks, room = MaskStream(ctx.seed, ctx.dropout_prob), _Room(packed, ctx.runs, 4)
        packed_gradient = torch.empty_like(packed)
        some_gradient = None if some is None else torch.empty_like(some)
        for run in ctx.runs:
            inputs = (*_of_run(run, packed, some), *_heads_first(gradient[run.queries].unsqueeze(1), run))
            gradients = _of_run(run, packed_gradient, some_gradient)
            if run.queries_each == 0:  # nobody looked at this sequence
                packed_gradient[run.tokens] = 0
            for pairs, queries in _pieces(len(gradients[0]), run.queries_each, run.length):
                _add_piece(gradients, inputs, pairs, queries, masks, room)
            if some_gradient is None:
                _put_back(packed_gradient[run.tokens], gradients, run)
            else:
                _put_back(some_gradient[run.queries].unsqueeze(1), gradients[:1], run)
                _put_back(packed_gradient[run.tokens], gradients[1:], run)
        return packed_gradient, some_gradient, None, None


class _Room:
    """Memory for a piece of scores, a few times over: taken once a pass, for asking for it costs as much as filling."""

    def __init__(self, like: Tensor, runs: tuple[_Run, ...], times: int) -> None:
        heads = like.shape[2]
        sizes = (min(max(_PIECE, run.length), run.sequences * heads * run.queries_each * run.length) for run in runs)
        self.scores = like.new_empty(times, max(sizes, default=0))

    def take(self, shape: Sequence[int], which: int) -> Tensor:
        return self.scores[which, : math.prod(shape)].view(*shape)


def _add_piece(
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    pairs: slice,
    queries: slice,
    masks: MaskStream,
    room: _Room,
) -> None:
    """One piece's part of the gradients of queries, keys and values, each [P, …, D]; the first piece's is written."""
    q, k, v, out_gradient = inputs
    q, k, v, out_gradient = q[pairs, queries], k[pairs], v[pairs], out_gradient[pairs, queries]
    probabilities = _probabilities(q, k, room)  # [P, R, L]
    used, scale, is_added = probabilities, q.shape[-1] ** -0.5, queries.start > 0
    if masks.drops:
        mask = masks.draw(probabilities.shape, probabilities.dtype, out=room.take(probabilities.shape, 1))
        used = torch.mul(probabilities, mask, out=room.take(probabilities.shape, 2))
    _product(gradients[2][pairs], used.transpose(1, 2), out_gradient, masks.scale, is_added)
    gradient = _product(room.take(probabilities.shape, 3), out_gradient, v.transpose(1, 2), masks.scale)
    if masks.drops:
        gradient *= mask
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)
    _product(gradients[0][pairs, queries], gradient, k, scale)
    _product(gradients[1][pairs], gradient.transpose(1, 2), q, scale, is_added)


def _probabilities(q: Tensor, k: Tensor, room: _Room) -> Tensor:
    """softmax(q·kᵀ/√D), [P, R, L]; summed in fp32 whatever the type."""
    scores = room.take((len(q), q.shape[1], k.shape[1]), 0)
    return torch.softmax(_product(scores, q, k.transpose(1, 2), q.shape[-1] ** -0.5), dim=-1, out=scores)


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float, is_added: bool = False) -> Tensor:
    """out = scale·a·b, or += ; `out` may be a view of something larger."""
    return torch.baddbmm(out, a, b, beta=int(is_added), alpha=scale, out=out)


def _runs(groups: Groups, heads: int) -> tuple[_Run, ...]:
    """One sequence at a time, or all short ones of a length."""
    runs, start = [], 0
    for count, length in groups:
        together = count if _is_short(heads, length) else 1
        for _ in range(0, count, together):
            tokens = slice(start, start + together * length)
            runs.append(_Run(together, length, tokens, tokens))
            start = tokens.stop
    return tuple(runs)


def _runs_of_some(groups: Groups, counts: Sequence[int]) -> tuple[_Run, ...]:
    """One sequence at a time, for each has its own number of queries."""
    lengths = [length for count, length in groups for _ in range(count)]
    ends, query_ends = accumulate(lengths), accumulate(counts)
    return tuple(
        _Run(1, length, slice(end - length, end), slice(query_end - count, query_end))
        for length, end, count, query_end in zip(lengths, ends, counts, query_ends, strict=True)
    )


def _is_short(heads: int, length: int) -> bool:
    return heads * length * length < _SHORT


def _pieces(num_pairs: int, num_queries: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Cut [P, queries, L] scores into pieces of at most `_PIECE` (or one row)."""
    if num_queries == 0:
        return
    rows = max(1, min(num_queries, _PIECE // length))
    pairs = max(1, _PIECE // (rows * length))
    for first in range(0, num_pairs, pairs):
        for row in range(0, num_queries, rows):
            yield slice(first, min(first + pairs, num_pairs)), slice(row, min(row + rows, num_queries))


def _of_run(run: _Run, packed: Tensor, some: Tensor | None) -> tuple[Tensor, ...]:
    """A run's queries, keys and values, [P, …, D] each."""
    queries = () if some is None else _heads_first(some[run.queries].unsqueeze(1), run)
    return (*queries, *_heads_first(packed[run.tokens], run))


def _heads_first(tokens: Tensor, run: _Run) -> tuple[Tensor, ...]:
    """[n·L, K, A, D] → K of [P, L, D]: views where the run is viewed, else copies."""
    total, kinds, heads, size = tokens.shape
    parts = tokens.view(run.sequences, total // run.sequences, kinds, heads, size).permute(2, 0, 3, 1, 4)
    if not run.is_viewed:
        parts = parts.clone(memory_format=torch.contiguous_format)
    return parts.flatten(1, 2).unbind()


def _put_back(tokens: Tensor, parts: Sequence[Tensor], run: _Run) -> None:
    """K of [P, L, D] into [n·L, K, A, D], unless they are views of that."""
    if run.is_viewed:
        return
    for kind, part in enumerate(parts):
        pairs, length, size = part.shape
        by_token = part.view(run.sequences, pairs // run.sequences, length, size).transpose(1, 2)
        tokens[:, kind].view(by_token.shape).copy_(by_token)


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    return grouped_attention(qkv, inputs.packing.groups, inputs.dropout_prob), None


def attend_some(q: Tensor, kv: Tensor, inputs: AttentionInputs, counts: Sequence[int]) -> Tensor:
    return attention_of_some(q, kv, inputs.packing.groups, counts, inputs.dropout_prob)


def should_skip_queries(packing: Packing, num_heads: int) -> bool:
    """Whether skipping queries outweighs computing each sequence by itself: not where all are short."""
    return any(not _is_short(num_heads, length) for _, length in packing.groups)


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options()) is not None:
        return reason
    return None if context.device == "cpu" else f"is for CPUs, but the model is on {context.device}"


BACKEND = Backend(attend, reason_against, attend_some, should_skip_queries)
