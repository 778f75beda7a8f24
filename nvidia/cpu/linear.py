"""x·Wᵀ + b and its gradients, computed by the library that was chosen for this process (nvidia/cpu/libraries.py).

torch computes fp32 products on CPUs with MKL. oneDNN, which is part of torch too, is faster on some processors and half
as fast on others (docs/performance.md has figures). It can compute the large products: forward, for the gradient of x,
and for the gradient of a W with few rows. torch computes all others.
`torch.backends.mkldnn.enabled = False` turns oneDNN off. `startup.configure_onednn` limits its caches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nvidia.cpu.libraries import Library, in_use

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
    libraries = in_use()
    if any(
        is_for_onednn(x, weight, library)
        for library in (libraries.forward, libraries.input_gradient, libraries.weight_gradient)
    ):
        return _Linear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x·Wᵀ + b) for the activation of that name.

    One kernel where oneDNN has it and gradients are off: they need the input of `act`.
    """
    fused = _FUSED.get(name)
    if fused is not None and not torch.is_grad_enabled() and is_for_onednn(x, weight, in_use().forward):
        return _onednn(x, weight, bias, fused)
    return act(linear(x, weight, bias))


def times_weight(gradient: Tensor, weight: Tensor) -> Tensor:
    """[T, O] · [O, I]: the gradient of the input of a linear layer."""
    library: Library = "onednn" if is_for_onednn(gradient, weight, in_use().input_gradient) else "torch"
    return PRODUCTS["input_gradient"][library](gradient, weight, gradient)


def transposed_times(gradient: Tensor, x: Tensor) -> Tensor:
    """[T, O]ᵀ · [T, I]: the gradient of the weight of a linear layer."""
    is_onednns = is_narrow(gradient.shape[1], x.shape[1]) and is_for_onednn(gradient.t(), x, in_use().weight_gradient)
    return PRODUCTS["weight_gradient"]["onednn" if is_onednns else "torch"](x, x, gradient)


class Linear(nn.Linear):
    """torch's linear layer with the product of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def is_for_onednn(x: Tensor, weight: Tensor, library: Library) -> bool:
    """Whether oneDNN computes this product, if `library` was chosen for products of its kind.

    Not in a traced graph, which needs operations that torch can compile.
    """
    return (
        library == "onednn"
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.float32 == weight.dtype
        and x.dim() == 2
        and is_large(len(x), *weight.shape)
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


def is_large(num_tokens: int, rows: int, columns: int) -> bool:
    """Whether the product of [num_tokens, rows] and [rows, columns] is large enough for oneDNN."""
    return num_tokens * rows * columns >= _MIN_WORK


def is_narrow(rows: int, columns: int) -> bool:
    """Whether oneDNN may compute the gradient of a weight of this shape.

    It needs the gradient of the output contiguous in the other order. That copy must be much smaller than x.
    """
    return 2 * rows <= columns


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, act: tuple[str, str] = ("none", "")) -> Tensor:
    in_order = None if bias is None else bias.contiguous()  # oneDNN ignores its strides
    return torch.ops.mkldnn._linear_pointwise(x, weight, in_order, act[0], [], act[1])


# Each kind of product by each library, from x [T, I], W [O, I] and the gradient of the output [T, O]. The forward one
# has a bias, for which torch makes another pass over the output; any row of that size serves to time it.
PRODUCTS: dict[str, dict[Library, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "forward": {
        "torch": lambda x, weight, gradient: functional.linear(x, weight, gradient[0]),
        "onednn": lambda x, weight, gradient: _onednn(x, weight, gradient[0]),
    },
    "input_gradient": {
        "torch": lambda x, weight, gradient: gradient @ weight,
        "onednn": lambda x, weight, gradient: _onednn(gradient, weight.t()),
    },
    "weight_gradient": {
        "torch": lambda x, weight, gradient: gradient.t() @ x,
        "onednn": lambda x, weight, gradient: _onednn(gradient.t().contiguous(), x.t()),
    },
}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if is_for_onednn(x, weight, in_use().forward):
            return _onednn(x, weight, bias)
        return functional.linear(x, weight, bias)

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
