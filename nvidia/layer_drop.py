"""Progressive layer drop: which blocks a training step drops, as a pure function of the step and a seed.

θ(t) = (1-θ)·e^(-γt) + θ falls from 1 to θ. Block i of L (counted from 1) is kept with probability 1 - i/L·(1-θ(t)), so
deeper blocks are dropped more often. The branches of a kept block are divided by that probability.
"""

import math

import torch


def keep_theta(step: int, theta: float, gamma: float) -> float:
    """Return θ(t) at an optimizer step; θ and γ are those of `progressive_layer_drop` in the DeepSpeed JSON."""
    return (1.0 - theta) * math.exp(-gamma * step) + theta


def branch_scales(num_layers: int, theta: float, seed: int) -> tuple[float, ...]:
    """Return the factor of each block's branches, 0 for a dropped block; equal on all ranks for the same seed."""
    chances = torch.rand(num_layers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    keeps = [1.0 - (index + 1) / num_layers * (1.0 - theta) for index in range(num_layers)]
    return tuple(1.0 / keep if chance < keep else 0.0 for chance, keep in zip(chances, keeps, strict=True))
