"""x·Wᵀ + b, by the library whose product is fastest on this processor.

torch computes fp32 products on CPUs with MKL. oneDNN, which comes with torch too, is faster where there is AVX-512 and
slower where there is only AVX2 (docs/performance.md has figures). On the first kind of processor it takes the large
products: forward, for the gradient of x, and for that of W where W is wide. All else is torch's own.
`torch.backends.mkldnn.enabled = False` turns it off.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Activations that oneDNN computes with the product: its names for them and for the formula. Not relu: its relu makes 0
# of NaN, and a validation of a broken model would look sound.
_FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "tanh": ("tanh", ""),
    "silu": ("swish", ""),
    "swish": ("swish", ""),
}
_MIN_WORK = 1 << 28  # multiplications; below, building a kernel for a new shape costs more than it brings


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
    """[T, O] · [O, I]: the gradient of a linear layer's input."""
    return _onednn(gradient, weight.t()) if is_for_onednn(gradient, weight) else gradient @ weight


def transposed_times(gradient: Tensor, x: Tensor) -> Tensor:
    """[T, O]ᵀ · [T, I]: the gradient of a linear layer's weight.

    oneDNN wants the first matrix in order; putting it there pays where that is the much smaller of the two.
    """
    columns = gradient.t()
    if 2 * len(columns) <= x.shape[1] and is_for_onednn(columns, x):
        return _onednn(columns.contiguous(), x.t())
    return columns @ x


class Linear(nn.Linear):
    """torch's linear layer, with the product chosen here."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether this product goes to oneDNN; a traced graph keeps to operations that torch can compile."""
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
    """Whether oneDNN has AVX-512: the processor does, and the user's limit on its instructions allows it."""
    may_use = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper().startswith(("AVX512", "AVX10", "ALL", "DEFAULT"))
    return may_use and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, act: tuple[str, str] = ("none", "")) -> Tensor:
    in_order = None if bias is None else bias.contiguous()  # its strides are not looked at
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
