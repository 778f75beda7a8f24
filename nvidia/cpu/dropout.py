"""Dropout, alone and fused with the residual sum, with masks that are cheap on a CPU.

On CPUs torch draws one Mersenne Twister number per element, serially: 7 ns each, a tenth of a training step. Here a
mask uses 8 bits per element of a small, fast generator and is drawn again in the backward pass instead of being stored:
0.3 ns per element and no memory. The seed comes from torch's generator, so `torch.manual_seed` and the random state
that gradient checkpointing saves determine the masks. Other devices use torch's own dropout.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LEVELS = 1 << 16  # a probability is rounded to 1/65536
_ALL_BITS = (1 << 64) - 1
_LOWEST = -(1 << 7)  # the smallest int8, as which 8 random bits are read
_BLOCK = 1 << 18  # elements of a mask at a time, so that it stays in the cache until it is used


class MaskStream:
    """A sequence of random 0/1 masks; the same seed gives the same sequence.

    8 bits per element alone would round probabilities to 1/256. So each row (along the last dimension) randomly gets
    one of the two thresholds next to the requested one: every element is dropped with the requested probability, and
    two elements of a row have a correlation below 1/16,000 at a probability of 0.1, and of at most 1/256 at lower ones.
    """

    def __init__(self, seed: int | Sequence[int], probability: float) -> None:
        num_dropped = min(round(probability * _LEVELS), _LEVELS - 1)
        threshold, num_higher = divmod(num_dropped, 256)  # of 256 rows, the number with the next threshold
        kind = np.int8 if threshold < 255 else np.int16  # the highest threshold does not fit into 8 bits
        self.thresholds = kind(_LOWEST + threshold + 1), kind(_LOWEST + threshold)
        self.higher = np.int8(_LOWEST + num_higher)
        self.scale = _LEVELS / (_LEVELS - num_dropped)  # the factor of kept elements
        self.drops = num_dropped > 0
        self.seed = seed

    @cached_property
    def random(self) -> np.random.Generator:
        """Made for the first mask: attention without dropout draws none."""
        return np.random.Generator(np.random.SFC64(self.seed))

    def draw(self, shape: Sequence[int], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """1 for kept elements, 0 for dropped ones; written to `out` if given."""
        count, rows = math.prod(shape), math.prod(shape[:-1])
        words = self.random.integers(_ALL_BITS, size=-(-(count + rows) // 8), dtype=np.uint64, endpoint=True)
        drawn = words.view(np.int8)
        bits, for_rows = drawn[:count].reshape(shape), drawn[count : count + rows].reshape(*shape[:-1], 1)
        thresholds = np.where(for_rows < self.higher, *self.thresholds)
        return torch.ge(
            torch.from_numpy(bits),
            torch.from_numpy(thresholds),
            out=torch.empty(shape, dtype=dtype) if out is None else out,
        )

    def draw_blocks(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """A mask for `x` [N, …] in blocks of rows: (slice of rows, mask). All masks share one scratch buffer."""
        rows = max(1, _BLOCK // max(1, math.prod(x.shape[1:])))
        scratch = x.new_empty(min(rows, len(x)), *x.shape[1:])
        for start in range(0, len(x), rows):
            block = slice(start, min(start + rows, len(x)))
            shape = (block.stop - start, *x.shape[1:])
            yield block, self.draw(shape, x.dtype, out=scratch[: shape[0]])


def draw_seed() -> int:
    """A seed from torch's CPU generator; never waits for a device."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


class _DropoutAdd(torch.autograd.Function):
    """residual + scale · dropout(x), both of one shape"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, probability: float, scale: float) -> Tensor:
        ctx.seed, ctx.probability, ctx.scale = draw_seed(), probability, scale
        stream = MaskStream(ctx.seed, probability)
        summed = torch.empty(x.shape, dtype=torch.result_type(x, residual))
        for rows, mask in stream.draw_blocks(x):
            torch.addcmul(residual[rows], x[rows], mask, value=scale * stream.scale, out=summed[rows])
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _masked(gradient, ctx.seed, ctx.probability, ctx.scale), gradient, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        ctx.seed, ctx.probability = draw_seed(), probability
        return _masked(x, ctx.seed, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _masked(gradient, ctx.seed, ctx.probability), None


def _masked(x: Tensor, seed: int, probability: float, scale: float = 1.0) -> Tensor:
    """scale · dropout(x) with the mask of this seed"""
    stream, dropped, zero = MaskStream(seed, probability), torch.empty_like(x), x.new_zeros(())
    for rows, mask in stream.draw_blocks(x):
        torch.addcmul(zero, x[rows], mask, value=scale * stream.scale, out=dropped[rows])
    return dropped


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero each element with `probability` and scale the others so that the mean is kept."""
    if not training or probability == 0.0:
        return x
    if has_fast_masks(x):
        return _Dropout.apply(x, probability)
    return functional.dropout(x, probability, training=True)


def dropout_add(x: Tensor, residual: Tensor, probability: float, training: bool, scale: float = 1.0) -> Tensor:
    """residual + scale · dropout(x)"""
    if not training or probability == 0.0:
        return torch.add(residual, x, alpha=scale)
    if has_fast_masks(x):
        return _DropoutAdd.apply(x, residual, probability, scale)
    return torch.add(residual, functional.dropout(x, probability, training=True), alpha=scale)


def has_fast_masks(x: Tensor) -> bool:
    """Whether `MaskStream` draws the masks for `x`. Not in a traced graph, which needs what torch can compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
