"""Attention on a CPU with no padded and no stored score matrix: one length at a time, in pieces that fit a cache.

T real tokens, A heads, D head size, n sequences of length L, P = n·A pairs of sequence and head, R queries of a piece.
torch's own kernel for CPUs has no dropout. Here scores exist for one piece at a time, in both passes, so memory grows
with T, not with T·L.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.dropout import MaskStream, draw_seed

_PIECE = (
    1 << 19
)  # scores at a time, 2 MiB: they stay in the cache from the matmul that makes to the one that reads them


def grouped_attention(qkv: Tensor, groups: tuple[tuple[int, int], ...], dropout_prob: float) -> Tensor:
    """[T, 3, A, D], sequences in runs of one length as `groups` (n, L) says → [T, A, D]"""
    return _GroupedAttention.apply(qkv, groups, dropout_prob)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, groups: tuple[tuple[int, int], ...], dropout_prob: float) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.groups, ctx.dropout_prob = groups, dropout_prob
        ctx.seed = draw_seed() if dropout_prob else 0
        masks = MaskStream(ctx.seed, dropout_prob) if dropout_prob else None
        context = torch.empty_like(qkv[:, 0], memory_format=torch.contiguous_format)
        for rows, count, length in _runs(groups):
            q, k, v = _heads_first(qkv[rows], count, length)
            out = torch.empty_like(q)
            for pairs, queries in _pieces(*q.shape[:2]):
                probabilities = _probabilities(q[pairs, queries], k[pairs])
                if masks is not None:
                    probabilities *= masks.draw(probabilities.shape, probabilities.dtype)
                torch.bmm(probabilities, v[pairs], out=out[pairs, queries])
            if masks is not None:
                out *= masks.scale
            context[rows] = _tokens_first(out, count, length)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (qkv,) = ctx.saved_tensors
        masks = MaskStream(ctx.seed, ctx.dropout_prob) if ctx.dropout_prob else None
        qkv_gradient = torch.empty_like(qkv)
        for rows, count, length in _runs(ctx.groups):
            q, k, v = _heads_first(qkv[rows], count, length)
            (out_gradient,) = _heads_first(gradient[rows].unsqueeze(1), count, length, scaled=False)
            if masks is not None:
                out_gradient *= masks.scale
            grads = torch.zeros(3, *q.shape, dtype=q.dtype)
            for pairs, queries in _pieces(*q.shape[:2]):
                mask = None if masks is None else masks.draw((len(q[pairs]), len(q[0, queries]), length), q.dtype)
                _add_piece(grads, q, k, v, out_gradient, pairs, queries, mask)
            grads[0] *= q.shape[-1] ** -0.5
            heads, size = qkv.shape[2:]
            parts = grads.view(3, count, heads, length, size).permute(1, 3, 0, 2, 4)  # [n, L, 3, A, D]
            qkv_gradient[rows] = parts.reshape(count * length, 3, heads, size)
        return qkv_gradient, None, None


def _add_piece(
    grads: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_gradient: Tensor,
    pairs: slice,
    queries: slice,
    mask: Tensor | None,
) -> None:
    """Add one piece's part of the gradients of (scaled) queries, keys and values, [3, P, L, D]."""
    q, k, v, out_gradient = q[pairs, queries], k[pairs], v[pairs], out_gradient[pairs, queries]
    probabilities = _probabilities(q, k)  # [P, R, L]
    used = probabilities if mask is None else probabilities * mask
    grads[2, pairs].baddbmm_(used.transpose(1, 2), out_gradient)
    gradient = torch.bmm(out_gradient, v.transpose(1, 2))
    if mask is not None:
        gradient *= mask
    gradient = torch._softmax_backward_data(gradient, probabilities, -1, gradient.dtype)
    torch.bmm(gradient, k, out=grads[0, pairs, queries])
    grads[1, pairs].baddbmm_(gradient.transpose(1, 2), q)


def _probabilities(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q·kᵀ) in fp32, given in the inputs' type; queries are already scaled. [P, R, L]"""
    return torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1, dtype=torch.float32).to(q.dtype)


def _runs(groups: tuple[tuple[int, int], ...]) -> Iterator[tuple[slice, int, int]]:
    """Where each group of equal lengths lies in the packed rows."""
    start = 0
    for count, length in groups:
        yield slice(start, start + count * length), count, length
        start += count * length


def _pieces(num_pairs: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Cut [P, L, L] scores into pieces of at most `_PIECE` (or one row)."""
    rows = max(1, min(length, _PIECE // length))
    pairs = max(1, _PIECE // (rows * length))
    for first in range(0, num_pairs, pairs):
        for row in range(0, length, rows):
            yield slice(first, min(first + pairs, num_pairs)), slice(row, min(row + rows, length))


def _heads_first(tokens: Tensor, count: int, length: int, scaled: bool = True) -> tuple[Tensor, ...]:
    """[n·L, K, A, D] → K contiguous [P, L, D]; the first, if `scaled`, times 1/√D."""
    kinds, heads, size = tokens.shape[1:]
    parts = tokens.view(count, length, kinds, heads, size).permute(2, 0, 3, 1, 4)
    copy = parts.clone(memory_format=torch.contiguous_format).view(kinds, count * heads, length, size)
    if scaled:
        copy[0] *= size**-0.5
    return copy.unbind()


def _tokens_first(pairs: Tensor, count: int, length: int) -> Tensor:
    """[P, L, D] → [n·L, A, D]"""
    heads, size = pairs.shape[0] // count, pairs.shape[-1]
    return pairs.view(count, heads, length, size).transpose(1, 2).reshape(count * length, heads, size)
