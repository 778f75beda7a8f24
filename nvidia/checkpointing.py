"""Gradient checkpointing: what the forward pass drops and the backward pass recomputes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.errors import UserError


@dataclass(frozen=True)
class Checkpointing:
    """What to recompute. Gradients are bit-equal with any choice, random state included.

    `layers`: whole blocks, this many at a time (0 = none). Cheaper choices inside a block: `activation`, the output of
    the feed-forward activation; `attention`, scores and probabilities; `norm`, the outputs of a pre-LN block's layer
    norms.
    """

    layers: int = 0
    activation: bool = False
    attention: bool = False
    norm: bool = False

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise UserError(f"gradient checkpointing: chunks of {self.layers} layers, expected 1 or more (0 = none)")


def default_chunk(num_layers: int) -> int:
    """⌈√layers⌉ blocks per chunk, so that about as many states are kept as are recomputed at once."""
    return math.ceil(math.sqrt(num_layers))


def recomputed(active: bool, function: Callable[..., Any], *tensors: Tensor) -> Any:
    """function(*tensors); if `active`, its intermediate results are dropped and recomputed in the backward pass.

    Recomputation stops as soon as the last dropped tensor is available: a matmul at the end is not repeated.
    """
    return checkpoint(function, *tensors, use_reentrant=False) if active else function(*tensors)


def then(first: Callable[[Tensor], Tensor] | None, second: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """x → second(first(x)). Recomputed as one, the output of `first` is not kept for the gradients of `second`."""
    return second if first is None else lambda x: second(first(x))
