"""Rotary positions: queries and keys are rotated by angles that grow with the position of their token.

N rows, K kinds (queries, keys, values), A heads, D head size. Feature i of a head forms a pair with feature i + D/2, as
in ModernBERT and Llama checkpoints.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.unpadding import Packing

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [N, 1, 1, D/2]


def rotation(packing: Packing, position_ids: Tensor | None, base: float, head_size: int) -> Rotation:
    """The rotation of each packed token. Made once per batch and base, and shared by the layers."""

    def make() -> Rotation:
        positions = packing.position_of if position_ids is None else position_ids
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
        angles = positions.float().unsqueeze(1) * (1.0 / base**exponents)
        angles = angles.unsqueeze(1).unsqueeze(1)
        return angles.cos(), angles.sin()

    made: Rotation = packing.mask(("rotary", base, head_size), make)
    return made


def rotate(x: Tensor, by: Rotation, num_rotated: int, num_heads: int) -> Tensor:
    """Rotate the first `num_rotated` kinds of `x` [N, K·A·D] in place; `x` must not be a view."""
    return _Rotate.apply(x, *by, num_rotated, num_heads)


class _Rotate(torch.autograd.Function):
    """Works in place because queries, keys and values are among the largest tensors of a block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, num_heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = num_rotated, num_heads
        ctx.mark_dirty(x)
        _turn(x, cos, sin, *ctx.sizes)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = gradient.clone()
        _turn(turned, cos, -sin, *ctx.sizes)
        return turned, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, num_heads: int) -> None:
    """Rotate the first kinds of `x` [N, K·A·D] in place, in fp32, as the angles are.

    Few temporary tensors: each costs more than the arithmetic.
    """
    head_size = 2 * cos.shape[-1]
    shape = (len(x), x.shape[1] // (num_heads * head_size), num_heads, head_size)
    left, right = x.view(shape).narrow(1, 0, num_rotated).chunk(2, dim=-1)
    crossed = left * sin
    if x.dtype.itemsize < cos.dtype.itemsize:
        torch.sub(left * cos, right * sin, out=left)
        torch.add(right * cos, crossed, out=right)
    else:
        left.mul_(cos).sub_(right * sin)
        right.mul_(cos).add_(crossed)
