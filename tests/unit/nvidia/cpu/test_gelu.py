"""GELU with a bias, plain and gated: value and gradients of the formula, on any number of threads."""

from collections.abc import Generator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nvidia.cpu import by_rows
from nvidia.cpu.gelu import gelu, has_loop


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(by_rows, "_BLOCK", 40)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def formula(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    x = x if bias is None else x + bias
    if name == "gelu":
        return functional.gelu(x)
    left, right = x.chunk(2, dim=-1)
    return functional.gelu(left) * right


def value_and_gradients(compute: object, x: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, bias) if tensor is not None]
    value = compute(leaves[0], leaves[1] if bias is not None else None, name)  # type: ignore[operator]
    weights = torch.linspace(-1, 2, value.numel()).view_as(value).to(value)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]


@pytest.mark.parametrize("name", ["gelu", "geglu"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [13, 1, 0])
def test_value_and_gradients_are_those_of_the_formula(name: str, has_bias: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 14, generator=generator) * 3
    bias = torch.randn(14, generator=generator) if has_bias else None
    exact = value_and_gradients(formula, x.double(), None if bias is None else bias.double(), name)
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(value_and_gradients(gelu, x, bias, name))
    for ours, again, expected in zip(*found, exact, strict=True):
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=2e-6)


def test_far_from_zero_it_is_exact_and_broken_numbers_are_not_hidden() -> None:
    x = torch.tensor([[-1e30, -20.0, 0.0, 20.0, 1e30, float("nan"), float("inf")]])
    found = gelu(x, None, "gelu")[0]
    assert found[:5].tolist() == [0.0, 0.0, 0.0, 20.0, pytest.approx(1e30)]
    assert found[5].isnan()
    assert found[6].isinf()


def test_only_gelu_of_rows_in_fp32_has_loop() -> None:
    x = torch.zeros(2, 3)
    assert has_loop(x, "gelu")
    assert has_loop(x, "geglu")
    assert not any(has_loop(x, name) for name in ("gelu_tanh", "relu", "swiglu"))
    assert not any(has_loop(other, "gelu") for other in (x.double(), x.bfloat16(), x[0], x.to("meta")))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not has_loop(x, "gelu")
