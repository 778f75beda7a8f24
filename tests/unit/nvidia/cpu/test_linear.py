"""Linear layers by oneDNN and OpenBLAS: results and gradients equal torch's; oneDNN in bounded memory."""

import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nvidia.activations import activation
from nvidia.cpu import linear as module
from nvidia.cpu import openblas
from nvidia.cpu.libraries import Libraries, in_use, use
from nvidia.cpu.linear import Linear, choose, linear, linear_activation, times_weight
from nvidia.cpu.startup import configure_onednn
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import PROJECT
from tests.unit.nvidia.helpers import make_batch, tiny_config

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")


needs_openblas = pytest.mark.skipif(not openblas.is_available(), reason="a numpy without OpenBLAS")
ONEDNN = Libraries(*["onednn"] * 4)
OPENBLAS = Libraries(*["openblas"] * 5)


BOTH = [pytest.param(ONEDNN, marks=needs_onednn), pytest.param(OPENBLAS, marks=needs_openblas)]


@pytest.fixture
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[Libraries]:
    """Use the libraries of the parameter for every product on any processor."""
    monkeypatch.setattr(module, "_MIN_WORK", 1)
    before = in_use()
    use(request.param)
    yield request.param
    use(before)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Use oneDNN for every product on any processor."""
    monkeypatch.setattr(module, "_MIN_WORK", 1)
    before = in_use()
    use(ONEDNN)
    yield
    use(before)


def results(x: Tensor, weight: Tensor, bias: Tensor | None, function: object) -> list[Tensor]:
    """The product and all gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    out = function(*leaves)  # type: ignore[operator]
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("libraries", BOTH, indirect=True)
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("out_size", [40, 12])  # 12 rows make a narrow weight
@pytest.mark.parametrize("has_bias", [True, False])
def test_results_and_gradients_equal_those_of_torch(
    rows: int, out_size: int, has_bias: bool, libraries: Libraries
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 24), torch.randn(out_size, 24), torch.randn(out_size) if has_bias else None
    expected_library = "torch" if libraries == ONEDNN and rows == 0 else libraries.forward
    assert choose("forward", x, weight, (rows, out_size, 24)) == expected_library
    found, expected = results(x, weight, bias, linear), results(x, weight, bias, functional.linear)
    assert len(found) == (4 if has_bias else 3)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize(("out_size", "expected"), [(12, 2), (13, 3)])
def test_the_gradient_of_a_narrow_weight_has_a_library_of_its_own(
    out_size: int, expected: int, onednn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(replace(ONEDNN, narrow_weight_gradient="torch"))
    product, calls = module._onednn, []
    monkeypatch.setattr(module, "_onednn", lambda *tensors: calls.append(1) or product(*tensors))
    results(torch.randn(7, 24), torch.randn(out_size, 24), None, linear)
    assert len(calls) == expected


@needs_onednn
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "tanh", "silu", "swish", "geglu"])
def test_without_gradients_the_activation_is_part_of_the_product(
    act: str, onednn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 24), torch.randn(40, 24), torch.randn(40)
    layer = partial(linear_activation, name=act, act=activation(act))
    plain = activation(act)(functional.linear(x, weight, bias))
    torch.testing.assert_close(layer(x, weight, bias), plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, weight, bias), plain, rtol=1e-5, atol=1e-5)
        x[2, 3] = weight[1, 1] = float("nan")
        broken = activation(act)(functional.linear(x, weight, bias))
        assert torch.equal(layer(x, weight, bias).isnan(), broken.isnan())
        # With the product replaced: activations that oneDNN does not have, or has without NaN, still use it.
        monkeypatch.setattr(module, "linear", lambda *_: torch.zeros(9, 40))
        assert bool(layer(x, weight, torch.zeros(40)).any()) == (act not in ("relu", "geglu"))


@pytest.mark.parametrize("libraries", BOTH, indirect=True)
def test_arrays_of_any_strides_are_multiplied(libraries: Libraries) -> None:
    x, weight = torch.randn(9, 24), torch.randn(40, 24)
    for bias in (torch.randn(80)[::2], torch.randn(1).expand(40)):
        torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    for other in (torch.randn(24, 9).t(), torch.randn(9, 48)[:, ::2], torch.randn(1, 24).expand(9, 24), x[:, :1] + x):
        torch.testing.assert_close(linear(other, weight), functional.linear(other, weight), rtol=1e-5, atol=1e-5)
    gradients = results(x, weight, None, lambda *leaves: linear(*leaves).sum(1))  # of stride 0
    for ours, theirs in zip(
        gradients, results(x, weight, None, lambda *xs: functional.linear(*xs).sum(1)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_openblas
def test_openblas_computes_nan_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    broken = torch.tensor([[float("nan"), 1.0], [float("inf"), -3e38]])
    assert openblas.multiply(broken, torch.full((2, 2), 1e38)).isnan().sum() == 2
    assert not recwarn.list


@needs_onednn
def test_a_gradient_that_is_not_needed_is_not_computed(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_be_called(*_: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(module, "times_weight", must_not_be_called)
    layer = Linear(8, 4)
    layer(torch.randn(3, 8)).sum().backward()  # the first layer of a model: its input needs none
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("libraries", BOTH, indirect=True)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_has_the_loss_and_gradients_of_the_products_of_torch(
    checkpointed: bool, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    torch.manual_seed(0)
    model = BertForPreTrainingPreLN(config)
    if checkpointed:
        model.gradient_checkpointing_enable(1)

    def run() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = model(make_batch())
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    use(Libraries())
    expected = run()
    use(libraries)
    shapes = []
    place, name = (module, "_onednn") if libraries == ONEDNN else (openblas, "multiply")
    product = getattr(place, name)

    def noted(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        shapes.append(tuple(weight.shape if libraries == ONEDNN else weight.t().shape))
        return product(x, weight, *rest)

    monkeypatch.setattr(place, name, noted)
    found = run()
    assert len(shapes) >= 8 * config.num_hidden_layers  # four products per block forward, four for gradients
    assert (3 * config.hidden_size, config.hidden_size) in shapes  # Q, K and V joined
    assert (config.vocab_size, config.hidden_size) in shapes
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_has_the_type_and_the_names_of_torch() -> None:
    assert isinstance(Linear(8, 4), nn.Linear)
    assert [name for name, _ in Linear(8, 4).named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("library", ["onednn", "openblas"])
def test_other_libraries_compute_only_fp32_products_of_two_dimensions(library: str) -> None:
    before = in_use()
    use(Libraries(forward=library, others="openblas"))  # type: ignore[arg-type]
    large, weight = torch.empty(1 << 10, 1 << 9), torch.empty(1 << 9, 1 << 9)

    def chosen(x: Tensor, weight: Tensor) -> str:
        return choose("forward", x, weight, (len(x), *weight.shape))

    try:
        assert chosen(large, weight) == library
        assert chosen(large[1:], weight) == "openblas"  # 2²⁸ multiplications are the minimum for oneDNN
        assert chosen(large.unsqueeze(0), weight) == "torch"
        assert chosen(large.bfloat16(), weight.bfloat16()) == "torch"
        assert chosen(large.to("meta"), weight.to("meta")) == "torch"
        with torch.autocast("cpu", torch.bfloat16):
            assert chosen(large, weight) == "torch"
        with torch.backends.mkldnn.flags(enabled=False):
            assert chosen(large, weight) == "openblas"
        assert choose("input_gradient", large, weight, (1 << 10, 1 << 9, 1 << 9)) == "torch"
    finally:
        use(before)


@needs_onednn
@pytest.mark.parametrize("role", ["forward", "input_gradient", "narrow_weight_gradient"])
def test_each_kind_of_product_has_its_own_library(role: str, onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use(replace(Libraries(), **{role: "onednn"}))
    product, calls = module._onednn, []
    monkeypatch.setattr(module, "_onednn", lambda *tensors: calls.append(tensors[0].shape) or product(*tensors))
    x, weight = torch.randn(7, 24), torch.randn(12, 24)
    found, expected = results(x, weight, None, linear), results(x, weight, None, functional.linear)
    assert calls == [{"forward": (7, 24), "input_gradient": (7, 12), "narrow_weight_gradient": (12, 7)}[role]]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_other_products_are_computed_by_torch() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert torch.equal(times_weight(x @ weight.t(), weight), (x @ weight.t()) @ weight)


CHANGING_SHAPES = """
import psutil, torch
from nvidia.cpu import linear as module
from nvidia.cpu.libraries import Libraries, use
from nvidia.cpu.startup import configure_onednn
configure_onednn()
use(Libraries(forward="onednn"))
module._MIN_WORK = 0
weight = torch.randn(768, 768)
for rows in range(100, 500):
    module.linear(torch.randn(rows, 768), weight)
    if rows == 199:
        start = psutil.Process().memory_info().rss
print((psutil.Process().memory_info().rss - start) >> 20)
"""


@needs_onednn
def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    """With the limits it grows by 19 to 63 MB, depending on the processor and its load; without them by 180 to 190."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_CACHE_CAPACITY")}
    command = [sys.executable, "-c", CHANGING_SHAPES]
    child = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 110


def test_importing_the_model_sets_no_environment_variables() -> None:
    code = "import os; before = dict(os.environ); import nvidia.modelingpreln; assert dict(os.environ) == before"
    child = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr


def test_start_up_keeps_the_limits_that_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    configure_onednn()
    assert (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"]) == ("7", "64")
