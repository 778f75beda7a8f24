"""The activations of a feed-forward layer, plain and gated."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # exact: x·Φ(x)
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "swish": functional.silu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"geglu": functional.gelu, "swiglu": functional.silu}


def is_gated(name: str) -> bool:
    """Whether the input has twice the width of the output: act(first half) · second half."""
    return name in _GATES


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of that name; a gated one halves the last dimension."""
    if name in _PLAIN:
        return _PLAIN[name]
    gate = _GATES[name]

    def gated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return gate(left) * right

    return gated


def canonical(name: str) -> str:
    """Return the one name for functions with several: swish is silu."""
    return {"swish": "silu"}.get(name, name)


def ungated(name: str) -> str:
    """Return the activation of a layer without a gate (the transform of the MLM head): the inner function of a gate."""
    return {"geglu": "gelu", "swiglu": "silu"}.get(name, name)
