"""Dropout, alone and fused with the residual sum."""

from torch import Tensor
from torch.nn import functional


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero each element with `probability` and scale the rest so that the mean stays."""
    if not training or probability == 0.0:
        return x
    return functional.dropout(x, probability, training=True)


def dropout_add(x: Tensor, residual: Tensor, probability: float, training: bool, scale: float = 1.0) -> Tensor:
    """residual + scale · dropout(x)"""
    branch = dropout(x, probability, training)
    return residual + (branch if scale == 1.0 else branch * scale)
