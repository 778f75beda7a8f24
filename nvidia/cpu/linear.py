"""x·Wᵀ + b and its gradients, computed by the library that was chosen for this process (nvidia/cpu/libraries.py).

torch computes fp32 products on CPUs with MKL. oneDNN, which is part of torch too, and numpy's OpenBLAS are twice as
fast on some processors and half as fast on others (docs/performance.md has figures). oneDNN can compute the
large products, the others all.
`torch.backends.mkldnn.enabled = False` turns oneDNN off. `startup.configure_onednn` limits its caches.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nvidia.cpu import openblas
from nvidia.cpu.gelu import gelu, has_loop
from nvidia.cpu.libraries import Library, in_use

# What a product is for. For the gradient of a weight, oneDNN needs that of the output in another order. The copy is
# cheap only if the weight is narrow: if it has few rows.
Role = Literal["forward", "input_gradient", "weight_gradient", "narrow_weight_gradient"]
Size = tuple[int, ...]  # T, O, I: a product of T tokens with a weight [O, I], or one of its gradients

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
    size = (len(x), *weight.shape)
    roles: tuple[Role, ...] = ("forward", "input_gradient", weight_role(*weight.shape))
    if any(choose(role, x, weight, size) != "torch" for role in roles):
        return _Linear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x·Wᵀ + b) for the activation of that name.

    One kernel where oneDNN has it and gradients are off, which need the input of `act`.
    """
    fused = None if torch.is_grad_enabled() else _FUSED.get(name)
    if fused is not None and choose("forward", x, weight, (len(x), *weight.shape)) == "onednn":
        return _onednn(x, weight, bias, fused)
    return activate(project(x, weight, bias, name), bias, name, act)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """What `activate` needs for the activation of that name: x·Wᵀ + b, or x·Wᵀ where it adds the bias itself."""
    return linear(x, weight, None if has_loop(x, name) else bias)


def activate(product: Tensor, bias: Tensor | None, name: str, act: Callable[[Tensor], Tensor]) -> Tensor:
    """The second half of `linear_activation`."""
    return gelu(product, bias, name) if has_loop(product, name) else act(product)


def times_weight(gradient: Tensor, weight: Tensor) -> Tensor:
    """[T, O] · [O, I]: the gradient of the input of a linear layer."""
    library = choose("input_gradient", gradient, weight, (len(gradient), *weight.shape))
    return PRODUCTS["input_gradient"][library](gradient, weight, gradient)


def transposed_times(gradient: Tensor, x: Tensor) -> Tensor:
    """[T, O]ᵀ · [T, I]: the gradient of the weight of a linear layer."""
    role = weight_role(gradient.shape[1], x.shape[1])
    return PRODUCTS[role][choose(role, gradient, x, (*gradient.shape, x.shape[1]))](x, x, gradient)


class Linear(nn.Linear):
    """torch's linear layer with the product of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def choose(role: Role, a: Tensor, b: Tensor, size: Size) -> Library:
    """The library for the product of `a` and `b`, which is of this kind and size."""
    if not _is_free(a, b):
        return "torch"
    libraries = in_use()
    library: Library = getattr(libraries, role)
    return libraries.others if library == "onednn" and not fits_onednn(size) else library


def weight_role(rows: int, columns: int) -> Role:
    """The kind of the product that gives the gradient of a weight of this shape."""
    return "narrow_weight_gradient" if 2 * rows <= columns else "weight_gradient"


def _is_free(a: Tensor, b: Tensor) -> bool:
    """Whether other libraries than torch's may compute the product.

    Not in a traced graph, which needs operations that torch can compile.
    """
    return (
        not torch.compiler.is_compiling()
        and a.device.type == "cpu"
        and a.dtype == torch.float32 == b.dtype
        and a.dim() == 2
        and not torch.is_autocast_enabled("cpu")
    )


def fits_onednn(size: Size) -> bool:
    """Whether oneDNN may compute a product of this size."""
    return math.prod(size) >= _MIN_WORK and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, act: tuple[str, str] = ("none", "")) -> Tensor:
    in_order = None if bias is None else bias.contiguous()  # oneDNN ignores its strides
    return torch.ops.mkldnn._linear_pointwise(x, weight, in_order, act[0], [], act[1])


def _openblas(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return openblas.multiply(x, weight.t()).add_(bias)


_OF_WEIGHT: dict[Library, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": lambda x, weight, gradient: gradient.t() @ x,
    "onednn": lambda x, weight, gradient: _onednn(gradient.t().contiguous(), x.t()),
    "openblas": lambda x, weight, gradient: openblas.multiply(gradient.t(), x),
}
# Each kind of product by each library, from x [T, I], W [O, I] and the gradient of the output [T, O]. The forward one
# has a bias, for which torch and OpenBLAS make another pass over the output; any row of that size serves to time it.
PRODUCTS: dict[Role, dict[Library, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "forward": {
        "torch": lambda x, weight, gradient: functional.linear(x, weight, gradient[0]),
        "onednn": lambda x, weight, gradient: _onednn(x, weight, gradient[0]),
        "openblas": lambda x, weight, gradient: _openblas(x, weight, gradient[0]),
    },
    "input_gradient": {
        "torch": lambda x, weight, gradient: gradient @ weight,
        "onednn": lambda x, weight, gradient: _onednn(gradient, weight.t()),
        "openblas": lambda x, weight, gradient: openblas.multiply(gradient, weight),
    },
    "weight_gradient": _OF_WEIGHT,
    "narrow_weight_gradient": _OF_WEIGHT,
}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        library = choose("forward", x, weight, (len(x), *weight.shape))
        if library == "torch":
            return functional.linear(x, weight, bias)
        if library == "onednn":
            return _onednn(x, weight, bias)
        return openblas.multiply(x, weight.t()) if bias is None else _openblas(x, weight, bias)

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
