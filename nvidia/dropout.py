"""Dropout, alone and fused with the residual sum, with masks that are cheap on a CPU.

torch draws one Mersenne number an element on CPUs, serially: 7 ns each, a tenth of a training step. Here a mask comes
from 16 bits an element of a small fast generator, seeded from torch's, and is drawn again in the backward pass instead
of being kept: 0.6 ns an element and no memory. Because the seed is torch's, `torch.manual_seed` and the saved random
state of gradient checkpointing govern it. Other devices use torch's own dropout.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LEVELS = 1 << 16  # a probability is rounded to 1/65536
_LOWEST = -(1 << 15)  # of the int16 that 16 random bits are read as


class MaskStream:
    """Random 0/1 masks, one after the other; the same seed gives the same sequence."""

    def __init__(self, seed: int, probability: float) -> None:
        num_dropped = round(probability * _LEVELS)
        self.threshold = _LOWEST + num_dropped
        self.scale = _LEVELS / (_LEVELS - num_dropped)  # what kept elements are multiplied by
        self.drops = num_dropped > 0
        self.bits = np.random.SFC64(seed)

    def draw(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """1 where an element is kept, 0 where it is dropped; into `out` if given."""
        count = math.prod(shape)
        bits = torch.from_numpy(self.bits.random_raw(-(-count // 4)).view(np.int16))[:count].view(shape)
        return torch.ge(bits, self.threshold, out=torch.empty(shape, dtype=dtype) if out is None else out)


def draw_seed() -> int:
    """A seed from torch's CPU generator; nothing waits for a device."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


class _DropoutAdd(torch.autograd.Function):
    """residual + scale · dropout(x)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, probability: float, scale: float) -> Tensor:
        ctx.seed, ctx.probability, ctx.scale = draw_seed(), probability, scale
        stream = MaskStream(ctx.seed, probability)
        return torch.addcmul(residual, x, stream.draw(x.shape, x.dtype), value=scale * stream.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        stream = MaskStream(ctx.seed, ctx.probability)
        mask = stream.draw(gradient.shape, gradient.dtype)
        return mask.mul_(ctx.scale * stream.scale).mul_(gradient), gradient, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        ctx.seed, ctx.probability = draw_seed(), probability
        return _Dropout.masked(x, ctx.seed, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Dropout.masked(gradient, ctx.seed, ctx.probability), None

    @staticmethod
    def masked(x: Tensor, seed: int, probability: float) -> Tensor:
        stream = MaskStream(seed, probability)
        return stream.draw(x.shape, x.dtype).mul_(stream.scale).mul_(x)


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero each element with `probability` and scale the rest so that the mean stays."""
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
    """Whether masks for `x` come from here; a traced graph keeps to operations that torch can compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
