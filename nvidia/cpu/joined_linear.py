"""Several linear layers on one input as one matmul, each with separate parameters.

The joined weight exists only while a pass uses it. autograd would keep it for the backward pass: a second copy of the
parameters, and under ZeRO-3 a complete one where each rank should have only its partition.
Under torch.autocast the product has autocast's type, like that of a linear layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nvidia.cpu.linear import linear, times_weight, transposed_times


def joined_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """[T, I] → [T, sum of the layers' outputs], side by side"""
    return _JoinedLinear.apply(_as_autocast(x), None, len(layers), *_parameters(layers))


def joined_linear_of_some(x: Tensor, rows: Tensor, first: nn.Linear, *others: nn.Linear) -> tuple[Tensor, Tensor]:
    """The output of the first layer for `rows` [U] only, and of the others for all: [U, O], [T, sum of their outputs]

    One node of the graph, like `joined_linear`, so that gradients arrive in the same order from both: which of the two
    runs may differ between ranks, and DeepSpeed reduces gradients in the order of their arrival.
    """
    layers = (first, *others)
    return _JoinedLinear.apply(_as_autocast(x), rows, len(layers), *_parameters(layers))


class _JoinedLinear(torch.autograd.Function):
    """`rows`: the rows that the first layer is applied to, with a separate output; None: all rows, joined output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor | None, num_layers: int, *parameters: Tensor) -> Any:
        weights, biases = parameters[:num_layers], parameters[num_layers:]
        ctx.save_for_backward(x, rows, *weights)
        ctx.has_bias = bool(biases)
        if rows is None:
            return _product(x, weights, biases)
        return _product(x.index_select(0, rows), weights[:1], biases[:1]), _product(x, weights[1:], biases[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, *weights = ctx.saved_tensors  # gradients have the type of x; autograd casts those of parameters
        parts = [(gradients[-1], x, weights if rows is None else weights[1:])]
        if rows is not None:
            parts.insert(0, (gradients[0], x.index_select(0, rows), weights[:1]))
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = times_weight(gradients[-1], _joined(parts[-1][2], x.dtype))
            if rows is not None:
                of_x.index_add_(0, rows, times_weight(gradients[0], weights[0].to(x.dtype)))
        of_weights: list[Tensor] = []
        of_biases: list[Tensor] = []
        for gradient, taken, used in parts:
            sizes = [len(weight) for weight in used]
            of_weights += transposed_times(gradient, taken).split(sizes)
            of_biases += gradient.sum(0).split(sizes) if ctx.has_bias else ()
        return of_x, None, None, *of_weights, *of_biases


def _parameters(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """All weights, then all biases: the order in which ZeRO-3 gathers them, equal on all ranks."""
    return [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias is not None]


def _as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if is_on else x


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return linear(x, _joined(weights, x.dtype), _joined(biases, x.dtype) if biases else None)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(tuple(tensors)).to(dtype)
