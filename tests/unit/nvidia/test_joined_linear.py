"""Several linear layers as one product: the same outputs and gradients, and no second copy of the weights kept."""

import pytest
import torch
from torch import nn

from nvidia.joined_linear import joined_linear
from tests.unit.nvidia.helpers import largest_difference


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 13])
def test_outputs_and_gradients(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(7, size, bias=bias) for size in (3, 5, 4)]
    x = torch.randn(rows, 7, requires_grad=True)
    weights = torch.randn(rows, 12)
    wanted = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    joined, apart = joined_linear(x, *layers), torch.cat([layer(x) for layer in layers], dim=1)
    assert largest_difference(joined, apart) <= 1e-6
    for ours, plain in zip(
        torch.autograd.grad((joined * weights).sum(), wanted),
        torch.autograd.grad((apart * weights).sum(), wanted),
        strict=True,
    ):
        assert ours.shape == plain.shape
        assert largest_difference(ours, plain) <= 1e-5


def test_only_the_input_and_the_parameters_are_kept() -> None:
    layers = [nn.Linear(7, 5) for _ in range(3)]
    x = torch.randn(4, 7, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        joined_linear(x, *layers)
    own = {tensor.data_ptr() for tensor in (x, *(layer.weight for layer in layers))}
    assert {tensor.data_ptr() for tensor in kept} == own
