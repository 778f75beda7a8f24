"""Attention on a CPU without padding and without storing the scores, in compiled loops (nvidia/cpu/attention_loops.py).

T real tokens, A heads, D head size, U queries that are read, n sequences.
torch's own kernel for CPUs has no dropout. Here each head of a sequence is computed by one thread from beginning to
end, in tiles of queries whose scores fit a cache, and the backward pass computes them again. So memory grows with T,
not with T·L for sequences of L tokens. In a block of which only some rows are read, only U queries are computed. With a
window a tile has the keys that its queries see and no others, so work grows with T·window.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.attention.backend import WINDOW_QUERIES, AttentionInputs, Backend, BackendContext
from nvidia.cpu import team
from nvidia.cpu.dropout import Masks, draw_seed
from nvidia.unpadding import Packing

# Scores of a batch from which on gathering some queries costs less than queries that nobody reads.
_MIN_SKIPPED = 1 << 16
# Scores of a tile, 256 KiB: two of them stay in the cache of a core.
_TILE = 1 << 16
_PARTS = 4  # of the work for each thread, so that all end at about the same time
_MIN_PART = 1 << 15  # scores of a part: starting one costs as much as computing some thousands


class Sequences(NamedTuple):
    """The sequences of a batch and which of their queries are computed."""

    rows: Any  # [U] int64, the packed position of each query
    table: Any  # [n, 4] int64: first token, tokens, first query, queries
    reach: int  # how many tokens a query sees on each side

    @property
    def longest(self) -> int:
        return int(self.table[:, 1].max(initial=0))


def list_sequences(packing: Packing, window: int, rows: Tensor | None = None, counts: Sequence[int] = ()) -> Sequences:
    """`rows` [U]: the packed positions of the queries, `counts` of each sequence; None: of all tokens."""
    lengths = packing.boundaries.diff().numpy().astype(np.int64)
    asked = lengths if rows is None else np.array(counts, dtype=np.int64)
    table = np.stack([lengths.cumsum() - lengths, lengths, asked.cumsum() - asked, asked], axis=1)
    positions = np.arange(packing.num_tokens) if rows is None else rows.numpy()
    return Sequences(positions, table, window // 2 if window else packing.num_tokens)


class _GroupedAttention(torch.autograd.Function):
    """[T, 3, A, D], or keys and values [T, 2, A, D] and packed queries [U, A, D] → [T or U, A, D]"""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, some: Tensor | None, sequences: Sequences, probability: float) -> Tensor:
        ctx.sequences, ctx.masks = sequences, Masks(draw_seed() if probability else 0, probability)
        inputs = [_as_array(x) for x in _split(packed, some)]
        context = packed.new_empty(inputs[0].shape, dtype=torch.float32)
        softmaxes = context.new_empty(*context.shape[1::-1], 2)  # [A, U, 2]
        _compute("attend", [*inputs, context.numpy(), softmaxes.numpy()], sequences, ctx.masks)
        context = context.to(packed.dtype)
        ctx.save_for_backward(packed, some, context, softmaxes)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, some, context, softmaxes = ctx.saved_tensors
        gradients = packed.new_empty(packed.shape, dtype=torch.float32)
        of_some = None if some is None else gradients.new_empty(some.shape)
        inputs = [_as_array(x) for x in (*_split(packed, some), context, gradient.contiguous())]
        outputs = [x.numpy() for x in _split(gradients, of_some)]
        _compute("attend_backward", [*inputs, softmaxes.numpy(), *outputs], ctx.sequences, ctx.masks)
        return gradients.to(packed.dtype), None if of_some is None else of_some.to(packed.dtype), None, None


def _split(packed: Tensor, some: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values, each [T or U, A, D]."""
    return packed.unbind(1) if some is None else (some, *packed.unbind(1))


def _as_array(x: Tensor) -> Any:
    """In fp32, in which attention is computed for every type, with the elements of a head side by side."""
    x = x.detach().float()
    return (x if x.stride(-1) == 1 else x.contiguous()).numpy()


def _compute(name: str, arrays: Sequence[Any], sequences: Sequences, masks: Masks) -> None:
    """Run a loop for all pairs of sequence and head, on all threads. Which thread computes a pair changes no bit."""
    from nvidia.cpu import attention_loops  # loading it takes half a second, which runs on GPUs do not need

    loop = getattr(attention_loops, name)
    longest, reach, heads = sequences.longest, sequences.reach, arrays[0].shape[1]

    def compute(first: int, stop: int) -> None:
        scratch = attention_loops.make_scratch(max(_TILE, WINDOW_QUERIES * longest), longest + 4)
        division = first, stop, reach, _TILE, WINDOW_QUERIES
        loop(*arrays, (sequences.rows, sequences.table), division, masks.as_numbers(), scratch)

    team.run([partial(compute, *part) for part in _divide(sequences, heads)])


def _divide(sequences: Sequences, heads: int) -> list[tuple[int, int]]:
    """Divide the pairs of sequence and head into parts with about as many scores."""
    lengths, asked = sequences.table[:, 1], sequences.table[:, 3]
    scores = np.minimum(lengths, 2 * sequences.reach + WINDOW_QUERIES) * asked + 1
    ends = scores.repeat(heads).cumsum()
    total = int(ends[-1]) if len(ends) else 0
    count = min(_PARTS * torch.get_num_threads(), total // _MIN_PART) if team.is_available() else 1
    bounds = np.searchsorted(ends, [total * part // count for part in range(1, count)]) + 1
    return list(pairwise(sorted({0, *bounds.tolist(), len(ends)})))


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    packing, window = inputs.packing, inputs.window
    sequences = packing.mask(("grouped", window), lambda: list_sequences(packing, window))
    return _GroupedAttention.apply(qkv, None, sequences, inputs.dropout_prob), None


def attend_some(q: Tensor, kv: Tensor, inputs: AttentionInputs, counts: Sequence[int]) -> Tensor:
    sequences = list_sequences(inputs.packing, inputs.window, inputs.rows, counts)
    return _GroupedAttention.apply(kv, q, sequences, inputs.dropout_prob)


def should_skip_queries(packing: Packing, num_heads: int, num_queries: int, window: int) -> bool:
    """Whether skipping queries outweighs gathering those that are read."""
    scores = num_heads * sum(count * length * length for count, length in packing.groups)
    return scores >= _MIN_SKIPPED and 2 * num_queries <= packing.num_tokens


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options(has_window=True)) is not None:
        return reason
    if context.dtype == torch.float64:
        return "computes in fp32, but the model is float64"
    return None if context.device == "cpu" else f"is for CPUs, but the model is on {context.device}"


BACKEND = Backend(attend, reason_against, attend_some, should_skip_queries)
