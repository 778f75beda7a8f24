"""The activations of a feed-forward layer, plain and gated."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # exact: x·Φ(x)
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "swish": functional.silu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
_GATES = {"geglu": "gelu", "swiglu": "silu"}


def is_gated(name: str) -> bool:
    """Whether the input has twice the width of the output: act(first half) · second half."""
    return name in _GATES


def ungated(name: str) -> str:
    """Return the activation of a layer without a gate (the transform of the MLM head): the inner function of a gate."""
    return _GATES.get(name, name)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of that name; a gated one halves the last dimension."""
    plain = _PLAIN[ungated(name)]

    def gated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return plain(left) * right

    return gated if is_gated(name) else plain
