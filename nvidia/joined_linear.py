"""Several linear layers on one input as one matmul, each with parameters of its own.

The joined weight exists only while a pass uses it. Kept for the backward pass, as autograd would, it would be a second
copy of these parameters, and under ZeRO-3 a whole one where each rank should hold its part.
Under torch.autocast the product is computed in autocast's type, as a linear layer's is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nvidia.linear import linear, times_weight


def joined_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """[T, I] → [T, sum of the layers' outputs], side by side"""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return _JoinedLinear.apply(x, len(layers), *weights, *biases)


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_layers: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num_layers], parameters[num_layers:]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = bool(biases)
        return linear(x, _joined(weights, x.dtype), _joined(biases, x.dtype) if biases else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors  # `gradient` has the type of x, and autograd gives parameters theirs
        sizes = [len(weight) for weight in weights]
        x_gradient = times_weight(gradient, _joined(weights, x.dtype)) if ctx.needs_input_grad[0] else None
        weight_gradients = (gradient.t() @ x).split(sizes)
        bias_gradients = gradient.sum(0).split(sizes) if ctx.has_bias else ()
        return x_gradient, None, *weight_gradients, *bias_gradients


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(tuple(tensors)).to(dtype)
