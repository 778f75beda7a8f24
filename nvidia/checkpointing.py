"""Gradient checkpointing: what the forward pass does not keep and the backward pass computes again."""

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

    `layers`: whole blocks, this many at a time (0 = none). Cheaper choices, inside a block: `activation`, that of the
    wide layer; `attention`, scores and probabilities; `norm`, the outputs of a pre-LN block's layer norms.
    """

    layers: int = 0
    activation: bool = False
    attention: bool = False
    norm: bool = False

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise UserError(f"gradient checkpointing: chunks of {self.layers} layers, expected 1 or more (0 = none)")


def default_chunk(num_layers: int) -> int:
    """⌈√layers⌉ blocks a chunk: the states kept and the states recomputed at once are then about as many."""
    return math.ceil(math.sqrt(num_layers))


def recomputed(active: bool, function: Callable[..., Any], *tensors: Tensor) -> Any:
    """function(*tensors), whose inner results are dropped and recomputed in the backward pass if `active`.

    Recomputation stops as soon as the last dropped tensor is back: a matmul at the function's end is not done again.
    """
    return checkpoint(function, *tensors, use_reentrant=False) if active else function(*tensors)
