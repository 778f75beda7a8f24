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
    overwritten = functional.pad(scores * 1, (0, num_padding), value=1e9)
    loss, correct = cross_entropy_sum(overwritten, labels, 37)
    assert correct == (scores.argmax(-1) == labels).sum()
    (gradient,) = torch.autograd.grad(loss / 7, scores, retain_graph=True)
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, scores)


def test_no_tokens_give_zero() -> None:
    scores = torch.zeros(0, 5, requires_grad=True)
    loss, correct = cross_entropy_sum(scores * 1, torch.zeros(0, dtype=torch.long), 4)
    loss.backward()
    assert scores.grad.shape == (0, 5)
    assert (loss, correct) == (0, 0)


@pytest.mark.parametrize("device_form", [False, True])
def test_a_prediction_is_correct_if_the_first_maximum_is_at_the_label(
    device_form: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: device_form)
    scores = torch.tensor([[0.5, 2.0, 2.0, 9.0]])  # the last one is padding
    assert [int(cross_entropy_sum(scores.clone(), torch.tensor([label]), 3)[1]) for label in range(3)] == [0, 1, 0]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(300, 11, generator=generator)
    labels = torch.where(torch.rand(300, generator=generator) < 0.5, scores.argmax(-1), 3)
    expected = (scores.argmax(-1) == labels).sum()
    assert cross_entropy_sum(scores, labels, 11)[1] == expected > 150


@pytest.mark.parametrize("label", [-100, -1, 4, 5, 10**9])
def test_a_label_that_is_no_token_is_an_error(label: int) -> None:
    with pytest.raises(IndexError, match=f"labels from .*{label}.* expected 0 to 3"):
        cross_entropy_sum(torch.zeros(2, 5), torch.tensor([2, label]), 4)


def test_another_user_of_the_scores_gets_an_error_and_no_wrong_gradient() -> None:
    scores = torch.randn(3, 5, requires_grad=True) * 1
    squared = scores * scores
    cross_entropy_sum(scores, torch.zeros(3, dtype=torch.long), 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_a_nan_is_not_hidden() -> None:
    scores = torch.zeros(3, 5)
    scores[1, 2] = float("nan")
    assert cross_entropy_sum(scores, torch.tensor([0, 2, 1]), 5)[0].isnan()
