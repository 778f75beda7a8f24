"""Attention on a CPU with no padded and no stored score matrix: a sequence at a time, in pieces that fit a cache.

T real tokens, A heads, D head size, n sequences of length L, P = n·A pairs of sequence and head, R queries of a piece.
torch's own kernel for CPUs has no dropout. Here scores exist for one piece at a time, in both passes, so memory grows
with T, not with T·L. Short sequences of one length are taken together.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.dropout import MaskStream, draw_seed

# Scores at a time, 2 MiB: they stay in the cache from the product that makes them to the one that reads them.
_PIECE = 1 << 19
# Scores of all heads below which copying sequences of one length together costs less than taking each by itself.
_SHORT = 1 << 17


def grouped_attention(qkv: Tensor, groups: tuple[tuple[int, int], ...], dropout_prob: float) -> Tensor:
    """[T, 3, A, D], sequences in runs of one length as `groups` (n, L) says → [T, A, D]"""
    return _GroupedAttention.apply(qkv, groups, dropout_prob)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, groups: tuple[tuple[int, int], ...], dropout_prob: float) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.groups, ctx.dropout_prob = groups, dropout_prob
        ctx.seed = draw_seed() if dropout_prob else 0
        masks, room = MaskStream(ctx.seed, dropout_prob), _Room(qkv, groups, 2)
        context = torch.empty_like(qkv[:, 0], memory_format=torch.contiguous_format)
        for rows, count, length in _runs(groups, heads=qkv.shape[2]):
            q, k, v = _heads_first(qkv[rows], count)
            (out,) = _heads_first(context[rows].unsqueeze(1), count)
            for pairs, queries in _pieces(len(q), length):
                probabilities = _probabilities(q[pairs, queries], k[pairs], room)
                if masks.drops:
                    probabilities *= masks.draw(probabilities.shape, qkv.dtype, out=room.like(probabilities, 1))
                _product(out[pairs, queries], probabilities, v[pairs], masks.scale)
            _put_back(context[rows].unsqueeze(1), out.unsqueeze(0), count)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (qkv,) = ctx.saved_tensors
        masks, room = MaskStream(ctx.seed, ctx.dropout_prob), _Room(qkv, ctx.groups, 4)
        qkv_gradient = torch.empty_like(qkv)
        for rows, count, length in _runs(ctx.groups, heads=qkv.shape[2]):
            inputs = (*_heads_first(qkv[rows], count), *_heads_first(gradient[rows].unsqueeze(1), count))
            gradients = _heads_first(qkv_gradient[rows], count)
            for pairs, queries in _pieces(len(gradients[0]), length):
                _add_piece(gradients, inputs, pairs, queries, masks, room)
            _put_back(qkv_gradient[rows], gradients, count)
        return qkv_gradient, None, None


class _Room:
    """Memory for a piece of scores, a few times over: taken once a pass, for asking for it costs as much as filling."""

    def __init__(self, like: Tensor, groups: tuple[tuple[int, int], ...], times: int) -> None:
        heads = like.shape[2]
        largest = max((min(max(_PIECE, length), n * heads * length * length) for n, length in groups), default=0)
        self.scores = like.new_empty(times, largest)

    def take(self, shape: tuple[int, int, int], which: int) -> Tensor:
        pairs, queries, keys = shape
        return self.scores[which, : pairs * queries * keys].view(shape)

    def like(self, scores: Tensor, which: int) -> Tensor:
        pairs, queries, keys = scores.shape
        return self.take((pairs, queries, keys), which)


def _add_piece(
    gradients: Tensor, inputs: tuple[Tensor, ...], pairs: slice, queries: slice, masks: MaskStream, room: _Room
) -> None:
    """One piece's part of the gradients of queries, keys and values, [3, P, L, D]; the first piece's is written."""
    q, k, v, out_gradient = inputs
    q, k, v, out_gradient = q[pairs, queries], k[pairs], v[pairs], out_gradient[pairs, queries]
    probabilities = _probabilities(q, k, room)  # [P, R, L]
    used, scale, is_added = probabilities, q.shape[-1] ** -0.5, queries.start > 0
    if masks.drops:
        mask = masks.draw(probabilities.shape, probabilities.dtype, out=room.like(probabilities, 1))
        used = torch.mul(probabilities, mask, out=room.like(probabilities, 2))
    _product(gradients[2, pairs], used.transpose(1, 2), out_gradient, masks.scale, is_added)
    gradient = _product(room.like(probabilities, 3), out_gradient, v.transpose(1, 2), masks.scale)
    if masks.drops:
        gradient *= mask
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)
    _product(gradients[0, pairs, queries], gradient, k, scale)
    _product(gradients[1, pairs], gradient.transpose(1, 2), q, scale, is_added)


def _probabilities(q: Tensor, k: Tensor, room: _Room) -> Tensor:
    """softmax(q·kᵀ/√D), [P, R, L]; summed in fp32 whatever the type."""
    scores = room.take((len(q), q.shape[1], k.shape[1]), 0)
    return torch.softmax(_product(scores, q, k.transpose(1, 2), q.shape[-1] ** -0.5), dim=-1, out=scores)


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float, is_added: bool = False) -> Tensor:
    """out = scale·a·b, or += ; `out` may be a view of something larger."""
    return torch.baddbmm(out, a, b, beta=int(is_added), alpha=scale, out=out)


def _runs(groups: tuple[tuple[int, int], ...], heads: int) -> Iterator[tuple[slice, int, int]]:
    """What to take together, and where it lies in the packed rows: one sequence, or all short ones of a length."""
    start = 0
    for count, length in groups:
        together = count if heads * length * length < _SHORT else 1
        for _ in range(0, count, together):
            yield slice(start, start + together * length), together, length
            start += together * length


def _pieces(num_pairs: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Cut [P, L, L] scores into pieces of at most `_PIECE` (or one row)."""
    rows = max(1, min(length, _PIECE // length))
    pairs = max(1, _PIECE // (rows * length))
    for first in range(0, num_pairs, pairs):
        for row in range(0, length, rows):
            yield slice(first, min(first + pairs, num_pairs)), slice(row, min(row + rows, length))


def _heads_first(tokens: Tensor, count: int) -> Tensor:
    """[n·L, K, A, D] → [K, P, L, D], a view where `_is_viewed`, else a copy."""
    kinds, heads, size = tokens.shape[1:]
    parts = tokens.view(count, -1, kinds, heads, size).permute(2, 0, 3, 1, 4)
    if not _is_viewed(count, parts.shape[3]):
        parts = parts.clone(memory_format=torch.contiguous_format)
    return parts.flatten(1, 2)


def _put_back(tokens: Tensor, pairs: Tensor, count: int) -> None:
    """[K, P, L, D] into [n·L, K, A, D], unless it is a view of that."""
    kinds, num_pairs, length, size = pairs.shape
    if not _is_viewed(count, length):
        parts = pairs.view(kinds, count, num_pairs // count, length, size).permute(1, 3, 0, 2, 4)
        tokens.view(parts.shape).copy_(parts)


def _is_viewed(count: int, length: int) -> bool:
    """One sequence is used where it lies, unless it is cut into pieces of queries, which read the keys many times."""
    return count == 1 and length * length <= _PIECE
