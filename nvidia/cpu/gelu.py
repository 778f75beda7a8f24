"""GELU of a product and its bias, plain or gated, in one pass over the product.

torch reads and writes the product once for the bias, once for the activation and, in the backward pass, once for the
sum that is the gradient of the bias.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvidia.cpu.by_rows import as_rows, has_loops, loops, num_blocks, run_by_rows

GATED = {"gelu": False, "geglu": True}  # activations by name, and whether they are gated


def has_loop(x: Tensor, name: str) -> bool:
    """Whether the loop computes this activation of `x`, or of a product of `x`."""
    return name in GATED and x.dim() == 2 and has_loops(x) and not torch.is_autocast_enabled("cpu")


def gelu(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """gelu(x + bias) [N, H] of x [N, H]; gated: of the first half of x [N, 2H], times the second half."""
    return _Gelu.apply(x, bias, GATED[name])


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, is_gated: bool) -> Tensor:
        ctx.save_for_backward(x, None if bias is None else bias.clone())  # ZeRO-3 frees parameters
        ctx.is_gated, ctx.has_bias = is_gated, bias is not None
        width = x.shape[1] // (1 + is_gated)
        out = x.new_empty(len(x), width)
        arrays = as_rows(x), _as_vector(bias, x), out.numpy()
        run_by_rows(lambda blocks: loops().gelu(*arrays, blocks, is_gated), len(x), width)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        width = gradient.shape[1]
        of_x, of_bias = x.new_empty(x.shape), x.new_zeros(num_blocks(len(x), width), x.shape[1])
        arrays = as_rows(x), _as_vector(bias, x), as_rows(gradient), of_x.numpy(), of_bias.numpy()
        run_by_rows(lambda blocks: loops().gelu_backward(*arrays, blocks, ctx.is_gated), len(x), width)
        return of_x, of_bias.sum(0) if ctx.has_bias else None, None


def _as_vector(bias: Tensor | None, x: Tensor) -> Any:
    return (x.new_zeros(x.shape[1]) if bias is None else bias.detach().contiguous()).numpy()
