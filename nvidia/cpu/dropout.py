"""Dropout, alone and fused with the residual sum, with masks that are cheap on a CPU.

On CPUs torch draws one Mersenne Twister number per element, serially: 7 ns each, a tenth of a training step. Here the
bits of an element are a function of the seed, its row and its column, computed where they are used in both passes
(nvidia/cpu/loops.py): less than 0.1 ns per element, no memory, any number of threads. The seed comes from torch's
generator, so `torch.manual_seed` and the random state that gradient checkpointing saves determine the masks. Other
devices and fp64 use torch's own dropout.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nvidia.cpu.by_rows import Blocks, as_rows, loops, run_by_rows

_LEVELS = 1 << 16  # 16 bits per element: a probability is rounded to 1/65536


class Masks(NamedTuple):
    """Random masks: the same seed gives the same ones."""

    seed: int
    probability: float

    @property
    def num_dropped(self) -> int:
        """Of 65536 elements."""
        return min(round(self.probability * _LEVELS), _LEVELS - 1)

    @property
    def scale(self) -> float:
        """The factor of kept elements."""
        return _LEVELS / (_LEVELS - self.num_dropped)

    def as_numbers(self) -> tuple[Any, Any, Any]:
        """As compiled loops take them. An element is dropped if its bits are below the second number."""
        return np.uint64(self.seed), np.uint16(self.num_dropped), np.float32(self.scale)


def draw_seed() -> int:
    """A seed from torch's CPU generator; never waits for a device."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


class _DropoutAdd(torch.autograd.Function):
    """residual + scale · dropout(x), both of one shape"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, probability: float, scale: float) -> Tensor:
        ctx.masks, ctx.scale = Masks(draw_seed(), probability), scale
        return _drop(x, ctx.masks, scale, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _drop(gradient, ctx.masks, ctx.scale), gradient, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        ctx.masks = Masks(draw_seed(), probability)
        return _drop(x, ctx.masks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _drop(gradient, ctx.masks), None


def _drop(x: Tensor, masks: Masks, scale: float = 1.0, residual: Tensor | None = None) -> Tensor:
    """residual + scale · dropout(x), computed in fp32."""
    assert residual is None or residual.shape == x.shape
    out, width = torch.empty(x.shape, dtype=torch.float32), x.shape[-1]
    arrays = [as_rows(tensor) for tensor in (x, x if residual is None else residual, out)]

    def drop(blocks: Blocks) -> None:
        words = np.empty(-(-width // 4), dtype=np.uint64)
        loops().drop(*arrays, blocks, masks.as_numbers(), scale, residual is not None, words)

    run_by_rows(drop, len(arrays[0]), width)
    return out.to(x.dtype if residual is None else torch.result_type(x, residual))


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
    if has_fast_masks(x) and has_fast_masks(residual):
        return _DropoutAdd.apply(x, residual, probability, scale)
    return torch.add(residual, functional.dropout(x, probability, training=True), alpha=scale)


def has_fast_masks(x: Tensor) -> bool:
    """Whether the compiled loop drops elements of `x`. Not in a traced graph, which needs what torch can compile."""
    return x.device.type == "cpu" and x.dtype != torch.float64 and not torch.compiler.is_compiling()
