"""x·Wᵀ + b, computed by the library that is fastest on this processor.

torch computes fp32 products on CPUs with MKL. oneDNN, which is part of torch too, is faster with AVX-512 and slower
with AVX2 alone (docs/performance.md has figures). On processors with AVX-512, oneDNN computes the large products:
forward, for the gradient of x, and for the gradient of a wide W. torch computes all others.
`torch.backends.mkldnn.enabled = False` turns oneDNN off. `startup.configure_onednn` limits its caches.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Activations that oneDNN computes with the product: its names for the function and the formula. relu is not among them
# because oneDNN's turns NaN into 0, which would hide a broken model in a validation.
_FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "tanh": ("tanh", ""),
    "silu": ("swish", ""),
    "swish": ("swish", ""),
}
_MIN_WORK = 1 << 28  # multiplications; below that, building a kernel for a new shape costs more than it saves


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, I] → […, O], as torch.nn.functional.linear."""
    if is_for_onednn(x, weight):
        return _OneDnnLinear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x·Wᵀ + b) for the activation of that name.

    One kernel where oneDNN has it and gradients are off: they need the input of `act`.
    """
    fused = _FUSED.get(name)
    if fused is not None and not torch.is_grad_enabled() and is_for_onednn(x, weight):
        return _onednn(x, weight, bias, fused)
    return act(linear(x, weight, bias))


def times_weight(gradient: Tensor, weight: Tensor) -> Tensor:
    """[T, O] · [O, I]: the gradient of the input of a linear layer."""
    return _onednn(gradient, weight.t()) if is_for_onednn(gradient, weight) else gradient @ weight


def transposed_times(gradient: Tensor, x: Tensor) -> Tensor:
    """[T, O]ᵀ · [T, I]: the gradient of the weight of a linear layer.

    oneDNN needs the first matrix contiguous; the copy pays off if it is much the smaller of the two.
    """
    columns = gradient.t()
    if 2 * len(columns) <= x.shape[1] and is_for_onednn(columns, x):
        return _onednn(columns.contiguous(), x.t())
    return columns @ x


class Linear(nn.Linear):
    """torch's linear layer with the product of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes this product. Not in a traced graph, which needs operations that torch can compile."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.float32 == weight.dtype
        and x.dim() == 2
        and len(x) * weight.numel() >= _MIN_WORK
        and bool(torch.backends.mkldnn.enabled)
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN uses AVX-512: the processor has it, and ONEDNN_MAX_CPU_ISA does not exclude it."""
    may_use = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper().startswith(("AVX512", "AVX10", "ALL", "DEFAULT"))
    return may_use and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, act: tuple[str, str] = ("none", "")) -> Tensor:
    in_order = None if bias is None else bias.contiguous()  # oneDNN ignores its strides
    return torch.ops.mkldnn._linear_pointwise(x, weight, in_order, act[0], [], act[1])


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            times_weight(gradient, weight) if needs_x else None,
            transposed_times(gradient, x) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )
