"""Attention on a CPU with next to no padding and without storing the scores: in tiles that fit a cache.

T real tokens, A heads, D head size, U queries that are read, P pairs of sequence and head.
torch's own kernel for CPUs has no dropout. Here scores exist for one tile at a time, in both passes, so memory grows
with T, not with T·L for sequences of L tokens. Runs of sequences are computed at the same time on all threads: a single
one is too small to be divided. In a block of which only some rows are read, only U queries are computed. With a window,
a tile has the keys that its queries see and no others, so work grows with T·window.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.attention import runs
from nvidia.attention.backend import AttentionInputs, Backend, BackendContext
from nvidia.attention.runs import Groups, Run, Tile, make_runs, rows_of, sequence_lengths
from nvidia.cpu import openblas, team
from nvidia.cpu.dropout import MaskStream, draw_seed
from nvidia.cpu.libraries import in_use
from nvidia.unpadding import Packing

# Scores of a batch from which on gathering some queries costs less than queries that nobody reads.
_MIN_SKIPPED = 1 << 16

Take = Callable[[Sequence[int], int], Tensor]  # a tensor of a shape in the scratch buffer with a number


def grouped_attention(qkv: Tensor, packing: Packing, dropout_prob: float, window: int = 0) -> Tensor:
    """[T, 3, A, D], packed by length → [T, A, D]; `window` as in AttentionInputs."""
    heads = qkv.shape[2]
    of_batch = packing.mask(("grouped", heads, window), lambda: make_runs(packing.groups, heads, window))
    return _GroupedAttention.apply(qkv, None, of_batch, dropout_prob)


def attention_of_some(q: Tensor, kv: Tensor, groups: Groups, counts: Sequence[int], dropout_prob: float) -> Tensor:
    """The same for some queries [U, A, D], `counts` per sequence, with all keys and values [T, 2, A, D]."""
    return _GroupedAttention.apply(kv, q, make_runs(groups, q.shape[1], counts=counts), dropout_prob)


class _GroupedAttention(torch.autograd.Function):
    """[T, 3, A, D], or keys and values [T, 2, A, D] and packed queries [U, A, D] → [T or U, A, D]"""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, some: Tensor | None, of_batch: tuple[Run, ...], dropout: float) -> Tensor:
        ctx.save_for_backward(packed, some)
        ctx.runs, ctx.dropout, ctx.seed = of_batch, dropout, draw_seed() if dropout else 0
        context = torch.empty_like(packed[:, 0] if some is None else some, memory_format=torch.contiguous_format)
        _compute(_attend_run, ctx, _Scratch(packed, of_batch, 2), packed, some, context)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, some = ctx.saved_tensors
        gradients = torch.empty_like(packed, memory_format=torch.contiguous_format)
        of_some = None if some is None else torch.empty_like(some, memory_format=torch.contiguous_format)
        _compute(_run_gradients, ctx, _Scratch(packed, ctx.runs, 4), packed, some, gradient, gradients, of_some)
        return gradients, of_some, None, None


def _compute(function: Callable[..., None], ctx: Any, scratch: "_Scratch", *tensors: Tensor | None) -> None:
    """function(run, masks, scratch, *tensors) for every run, each with random masks of its own."""
    inputs = [None if tensor is None else tensor.detach() for tensor in tensors]

    without_gradients = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def compute(run: Run) -> None:
        with without_gradients():  # a thread of the team has its own setting
            function(run, MaskStream((ctx.seed, run.number), ctx.dropout), scratch, *inputs)

    team.run([partial(compute, run) for run in ctx.runs])


def _attend_run(
    run: Run, masks: MaskStream, scratch: "_Scratch", packed: Tensor, some: Tensor | None, context: Tensor
) -> None:
    """Write the context of a run."""
    q, k, v = _of_run(run, packed, some)
    q = q * q.shape[-1] ** -0.5
    target = run.of_queries(context).unsqueeze(1)
    spread = run.query_rows.empty(target)
    (out,) = spread
    with scratch.borrow() as take:
        for tile in run.tiles():
            probabilities = _probabilities(rows_of(q, tile.queries), rows_of(k, tile.keys), tile, take)
            if masks.drops:
                probabilities *= masks.draw(probabilities.shape, packed.dtype, out=take(probabilities.shape, 1))
            _product(rows_of(out, tile.queries), probabilities, rows_of(v, tile.keys))
    if masks.drops:
        out *= masks.scale
    run.query_rows.collect(spread, target)


def _run_gradients(
    run: Run,
    masks: MaskStream,
    scratch: "_Scratch",
    packed: Tensor,
    some: Tensor | None,
    gradient: Tensor,
    packed_gradient: Tensor,
    some_gradient: Tensor | None,
) -> None:
    """Write the gradients of the queries, keys and values of a run."""
    (out_gradient,) = run.query_rows.spread(run.of_queries(gradient).unsqueeze(1), has_zeros=True)
    q, k, v = _of_run(run, packed, some)
    scale = q.shape[-1] ** -0.5
    inputs = q * scale, k, v, out_gradient * masks.scale if masks.drops else out_gradient
    targets = [(run.token_rows, run.of_tokens(packed_gradient))]
    if some_gradient is not None:
        targets.insert(0, (run.query_rows, run.of_queries(some_gradient).unsqueeze(1)))
    spread = [rows.empty(target) for rows, target in targets]
    gradients = [part for parts in spread for part in parts]
    if run.queries_each == 0 or run.reach is not None:  # nothing is written, or tiles overlap in some keys
        gradients[1].zero_()
        gradients[2].zero_()
    with scratch.borrow() as take:
        for tile in run.tiles():
            _tile_gradients(gradients, inputs, tile, masks, take, tile.queries.start > 0 or run.reach is not None)
    gradients[0].mul_(scale)
    for parts, (rows, target) in zip(spread, targets, strict=True):
        rows.collect(parts, target)


class _Scratch:
    """Buffers for the scores of a tile, for each thread once per pass: allocating costs as much as filling them."""

    def __init__(self, like: Tensor, of_batch: tuple[Run, ...], times: int) -> None:
        self.like, self.free = like, list[tuple[Tensor, ...]]()
        self.shape = times, max((math.prod(run.tile_shape) for run in of_batch), default=0)

    @contextmanager
    def borrow(self) -> Iterator[Take]:
        """The buffers, for one thread."""
        try:
            buffers = self.free.pop()
        except IndexError:
            buffers = self.like.new_empty(self.shape).unbind()
        yield lambda shape, which: buffers[which].as_strided(shape, (shape[1] * shape[2], shape[2], 1))
        self.free.append(buffers)


def _tile_gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Tensor], tile: Tile, masks: MaskStream, take: Take, is_added: bool
) -> None:
    """Write, or add, the part of one tile to the gradients of scaled queries, keys and values, each [P, …, D]."""
    queries, keys, _ = tile
    q, k, v, out_gradient = inputs
    q, k, v, out_gradient = rows_of(q, queries), rows_of(k, keys), rows_of(v, keys), rows_of(out_gradient, queries)
    probabilities = _probabilities(q, k, tile, take)  # [P, R, keys]
    shape, used = probabilities.shape, probabilities
    if masks.drops:
        mask = masks.draw(shape, probabilities.dtype, out=take(shape, 1))
        used = torch.mul(probabilities, mask, out=take(shape, 2))
    _product(rows_of(gradients[2], keys), used.transpose(1, 2), out_gradient, is_added)
    gradient = _product(take(shape, 3), out_gradient, v.transpose(1, 2))
    if masks.drops:
        gradient *= mask
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)
    _product(rows_of(gradients[0], queries), gradient, k)
    _product(rows_of(gradients[1], keys), gradient.transpose(1, 2), q, is_added)


def _probabilities(q: Tensor, k: Tensor, tile: Tile, take: Take) -> Tensor:
    """softmax(q·kᵀ) for scaled queries, [P, R, keys]; summed in fp32 for every type."""
    scores = _product(take((len(q), q.shape[1], k.shape[1]), 0), q, k.transpose(1, 2))
    if tile.hidden is not None:
        scores += tile.hidden
    return torch.softmax(scores, dim=-1, out=scores)


def _product(out: Tensor, a: Tensor, b: Tensor, is_added: bool = False) -> Tensor:
    """out = a·b, or += if `is_added`; `out` may be a view of a larger tensor."""
    if in_use().attention_products == "openblas" and out.dtype == torch.float32:
        return out.add_(openblas.multiply(a, b)) if is_added else openblas.multiply(a, b, out)
    return torch.baddbmm(out, a, b, beta=int(is_added), out=out)


def _of_run(run: Run, packed: Tensor, some: Tensor | None) -> tuple[Tensor, ...]:
    """The queries, keys and values of a run, each [P, …, D]."""
    tokens = run.token_rows.spread(run.of_tokens(packed)).unbind()
    if some is None:
        return tokens
    return *run.query_rows.spread(run.of_queries(some).unsqueeze(1)).unbind(), *tokens


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    return grouped_attention(qkv, inputs.packing, inputs.dropout_prob, inputs.window), None


def attend_some(q: Tensor, kv: Tensor, inputs: AttentionInputs, counts: Sequence[int]) -> Tensor:
    return attention_of_some(q, kv, inputs.packing.groups, counts, inputs.dropout_prob)


def should_skip_queries(packing: Packing, num_heads: int, num_queries: int, window: int) -> bool:
    """Whether skipping queries outweighs gathering those that are read: not where there are few scores, and not with a
    window, where all queries cost little."""
    if window:
        return False
    scores = [num_heads * length * length for length in sequence_lengths(packing.groups)]
    is_worth_it = sum(scores) >= _MIN_SKIPPED and 2 * num_queries <= packing.num_tokens
    return is_worth_it or max(scores, default=0) >= runs.SHORT


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options(has_window=True)) is not None:
        return reason
    return None if context.device == "cpu" else f"is for CPUs, but the model is on {context.device}"


BACKEND = Backend(attend, reason_against, attend_some, should_skip_queries)
