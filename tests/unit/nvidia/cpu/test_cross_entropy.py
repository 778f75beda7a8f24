"""The cross entropy of masked tokens equals torch's, in the memory of the scores."""

import pytest
import torch
from torch.nn import functional

from nvidia.cpu.cross_entropy import cross_entropy_sum


@pytest.mark.parametrize(("spread", "num_padding"), [(1.0, 0), (1.0, 3), (300.0, 0)])
def test_value_and_gradient_equal_those_of_torch(spread: float, num_padding: int) -> None:
    """Scores 300 apart: probabilities of most labels underflow. With padding, the scores are a part of each row."""
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(13, 37, generator=generator) * spread).requires_grad_()
    labels = torch.randint(37, (13,), generator=generator)
    expected = functional.cross_entropy(scores, labels, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(expected / 7, scores)
    overwritten = functional.pad(scores * 1, (0, num_padding)).narrow(1, 0, 37)
    loss = cross_entropy_sum(overwritten, labels)
    (gradient,) = torch.autograd.grad(loss / 7, scores, retain_graph=True)
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, scores)


def test_no_tokens_give_zero() -> None:
    scores = torch.zeros(0, 5, requires_grad=True)
    cross_entropy_sum(scores * 1, torch.zeros(0, dtype=torch.long)).backward()
    assert scores.grad.shape == (0, 5)
