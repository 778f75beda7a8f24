"""Cheap dropout masks: the right frequency, the right scale, the same mask in both passes."""

import pytest
import torch

from nvidia.cpu.dropout import draw_seed, dropout, dropout_add
from tests.unit.nvidia.helpers import kept_elements


@pytest.mark.parametrize("probability", [0.002, 0.1, 0.5, 0.9, 0.998])
def test_share_and_scale(probability: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 1001)
    y = dropout(x, probability, training=True)
    share = float((y == 0).float().mean())
    assert abs(share - probability) < 5 * (probability * (1 - probability) / x.numel()) ** 0.5
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - probability)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_neighbours_and_rows_are_independent(probability: float) -> None:
    torch.manual_seed(3)
    kept = (dropout(torch.ones(2000, 1000), probability, training=True) > 0).float() - (1 - probability)
    bound = 5 / kept.numel() ** 0.5 * probability * (1 - probability)
    of_rows = kept.mean(1).var() / (probability * (1 - probability) / kept.shape[1])
    assert abs(float(of_rows) - 1) < 5 * (2 / len(kept)) ** 0.5
    for left, right in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1]), (kept[:, 4:], kept[:, :-4])):
        assert abs(float((left * right).mean())) < bound


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_are_those_of_the_definition_on_any_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvidia.cpu.by_rows._BLOCK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        found = dropout(torch.ones(10, 7), 0.3, training=True)
    finally:
        torch.set_num_threads(before)
    torch.manual_seed(1)
    torch.testing.assert_close(found, kept_elements(draw_seed(), 10, 7, 0.3) / 0.7, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(37, 23), (3, 5, 7), (700, 1000), (0, 4), (9,)])
def test_both_passes_use_one_mask(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, requires_grad=True)
    y = dropout(x, 0.3, training=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * gradient)


@pytest.mark.parametrize("shape", [(11, 7), (3, 5, 7), (700, 1000), (0, 4)])
def test_dropout_add_is_dropout_and_a_sum(shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    torch.manual_seed(2)
    fused = dropout_add(x, residual, 0.4, training=True, scale=1.5)
    torch.manual_seed(2)
    apart = residual + 1.5 * dropout(x, 0.4, training=True)
    torch.testing.assert_close(fused, apart)
    assert type(fused.grad_fn).__name__ == "_DropoutAddBackward"  # one pass, not two
    weights = torch.randn(shape)
    for ours, plain in zip(
        torch.autograd.grad((fused * weights).sum(), (x, residual)),
        torch.autograd.grad((apart * weights).sum(), (x, residual)),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain)


def test_a_sum_of_two_types_has_the_wider_type_in_training_too() -> None:
    x, residual = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bfloat16)
    for training in (True, False):
        assert dropout_add(x, residual, 0.5, training).dtype == torch.float32


def test_a_nan_is_not_hidden_by_dropping_it() -> None:
    assert dropout(torch.full((20, 20), float("nan")), 0.5, training=True).isnan().all()


def test_the_default_type_of_torch_changes_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert set(dropout(torch.ones(9, 9, dtype=torch.float32), 0.5, training=True).unique().tolist()) == {0.0, 2.0}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_probability_near_one_keeps_some_elements() -> None:
    y = dropout(torch.ones(1000, 1000), 0.999999, training=True)
    assert 0 < int((y != 0).sum()) < 100


def test_the_seed_of_torch_determines_the_masks() -> None:
    x = torch.ones(50, 50)
    torch.manual_seed(7)
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    torch.manual_seed(7)
    assert torch.equal(dropout(x, 0.5, True), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_outside_training() -> None:
    x = torch.randn(5, 5)
    assert dropout(x, 0.5, training=False) is x
    assert torch.equal(dropout_add(x, x, 0.5, training=False, scale=2.0), 3 * x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_stay_half(dtype: torch.dtype) -> None:
    x = torch.ones(64, 64, dtype=dtype, requires_grad=True)
    y = dropout_add(x, x.detach(), 0.25, training=True)
    y.sum().backward()
    assert y.dtype == dtype
    assert x.grad is not None
    assert x.grad.dtype == dtype
    torch.testing.assert_close(y.detach().unique().float(), torch.tensor([1.0, 1 + 4 / 3]), rtol=1e-2, atol=0)
