"""Several linear layers as one product: the same outputs and gradients, without a second copy of the weights."""

import pytest
import torch
from torch import nn

from nvidia.cpu.joined_linear import joined_linear, joined_linear_of_some
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [[], [4, 0, 4, 12]])
def test_the_first_layer_for_some_rows(bias: bool, rows: list[int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(7, size, bias=bias) for size in (3, 5, 4)]
    x, chosen = torch.randn(13, 7, requires_grad=True), torch.tensor(rows, dtype=torch.long)
    wanted = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    first, others = joined_linear_of_some(x, chosen, *layers)
    expected = layers[0](x[chosen]), torch.cat([layer(x) for layer in layers[1:]], dim=1)
    weights = torch.randn(first.shape), torch.randn(others.shape)
    assert largest_difference(first, expected[0]) <= 1e-6
    assert largest_difference(others, expected[1]) <= 1e-6
    for ours, plain in zip(
        torch.autograd.grad((first * weights[0]).sum() + (others * weights[1]).sum(), wanted),
        torch.autograd.grad((expected[0] * weights[0]).sum() + (expected[1] * weights[1]).sum(), wanted),
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
