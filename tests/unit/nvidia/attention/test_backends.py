"""Which backend runs where, and traces of the CUDA branch on tensors without content."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex

from common.errors import UserError
from nvidia import pretraining, unpadding
from nvidia.attention import backends as attention_backends
from nvidia.attention import layer as attention
from nvidia.attention.backends import (
    BackendContext,
    choose_backend,
    cuda_capability,
    flex_mask,
    sdpa_attention,
    varlen_attention,
)
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import Packing, make_packing, plan_packing
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config

HALF = BackendContext("cuda", torch.float16, head_size=64)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (BackendContext("cpu", torch.float32, 64, dropout_prob=0.1), "grouped"),
        (BackendContext("cpu", torch.bfloat16, 64, dropout_prob=0.1), "grouped"),
        (BackendContext("cpu", torch.float32, 64), "sdpa"),
        (BackendContext("cpu", torch.float32, 64, needs_plain=True), "plain"),
        (BackendContext("cpu", torch.float32, 64, dropout_prob=0.1, is_sparse=True), "plain"),
        (HALF, "varlen"),
        (HALF._replace(dtype=torch.bfloat16), "varlen"),
        (HALF._replace(dropout_prob=0.1), "sdpa"),
        (HALF._replace(dtype=torch.float32), "sdpa"),
        (HALF._replace(is_sparse=True), "flex"),
        (HALF._replace(is_sparse=True, dropout_prob=0.1), "plain"),
        (HALF._replace(is_sparse=True, needs_plain=True), "plain"),
        # What the kernels ask of the device and of a head: varlen is FlashAttention-2, flex Triton's.
        (HALF._replace(capability=(8, 0)), "varlen"),
        (HALF._replace(capability=(12, 0)), "varlen"),
        (HALF._replace(capability=(7, 5)), "sdpa"),
        (HALF._replace(head_size=256), "varlen"),
        (HALF._replace(head_size=264), "sdpa"),
        (HALF._replace(head_size=36), "sdpa"),
        (HALF._replace(head_size=8), "varlen"),
        (HALF._replace(head_size=16, is_sparse=True), "flex"),
        (HALF._replace(head_size=8, is_sparse=True), "plain"),
        (HALF._replace(is_sparse=True, capability=(7, 0)), "flex"),
        (HALF._replace(is_sparse=True, capability=(6, 1)), "plain"),
    ],
)
def test_auto(given: BackendContext, expected: str) -> None:
    assert choose_backend("auto", given) == expected


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("grouped", HALF, "is for CPUs, but the model is on cuda"),
        (
            "varlen",
            BackendContext("cpu", torch.float32, 64),
            "needs fp16 or bf16 on a CUDA device, but the model is float32 on cpu",
        ),
        ("varlen", HALF._replace(dropout_prob=0.1), "has no dropout, but attention_probs_dropout_prob is 0.1"),
        ("varlen", HALF._replace(capability=(7, 5)), r"needs compute capability 8.0, but this device has 7.5"),
        ("varlen", HALF._replace(head_size=20), "in multiples of 8, but theirs is 20"),
        ("flex", HALF._replace(dropout_prob=0.1), "has no dropout"),
        ("flex", HALF._replace(head_size=12), "needs heads of at least 16, but theirs is 12"),
        ("flex", BackendContext("cpu", torch.float32, 64), "has no backward pass on CPUs"),
        ("jagged", HALF._replace(dtype=torch.float32), "needs fp16 or bf16 on a CUDA device"),
        ("jagged", HALF._replace(capability=(7, 5)), r"needs compute capability 8.0"),
        ("jagged", HALF._replace(is_sparse=True), "has no sparse layouts"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_reason(name: str, given: BackendContext, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        choose_backend(name, given)


def test_jagged_runs_where_it_is_asked_for_with_dropout_too() -> None:
    for given in (HALF, HALF._replace(dropout_prob=0.1), BackendContext("cpu", torch.float32, 64, dropout_prob=0.1)):
        assert choose_backend("jagged", given) == "jagged"
        assert choose_backend("auto", given) != "jagged"


@pytest.mark.parametrize("name", ["grouped", "sdpa", "varlen", "flex", "jagged"])
def test_options_of_the_plain_formula_are_refused_elsewhere(name: str) -> None:
    with pytest.raises(UserError, match="relative positions, head masks"):
        choose_backend(name, BackendContext("cpu", torch.float32, 64, needs_plain=True))


def test_the_model_tells_its_head_size_and_its_device_s_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BackendContext] = []

    def choose(requested: str, given: BackendContext) -> str:
        seen.append(given)
        return "sdpa"

    monkeypatch.setattr(attention, "choose_backend", choose)
    monkeypatch.setattr(attention, "cuda_capability", lambda device: (9, 0))
    BertForPreTrainingPreLN(tiny_config(num_hidden_layers=1, attention_probs_dropout_prob=0.2))(make_batch())
    assert seen == [BackendContext("cpu", torch.float32, 8, dropout_prob=0.2, capability=(9, 0))]


def test_capability_is_asked_of_cuda_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, device.index))
        cuda_capability.cache_clear()
        assert cuda_capability(torch.device("cuda", 1)) == ((7, 1) if is_there else None)
        assert cuda_capability(torch.device("cpu")) is None
    cuda_capability.cache_clear()


def test_flex_is_compiled_on_devices_and_eager_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, the maker of block masks would hold a mask of all heads and pairs of tokens."""
    compiled: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiled.append((function, options)) or "compiled"
    )
    for choose, function in (
        (attention_backends._flex_kernel, flex.flex_attention),
        (attention_backends._flex_mask_maker, flex.create_block_mask),
    ):
        choose.cache_clear()
        assert choose(False) is function
        assert compiled == []
        assert choose(True) == "compiled"
        assert compiled.pop() == (function, {"dynamic": True})
        choose.cache_clear()


def test_a_compiled_block_mask_is_the_eager_one_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path's call, traced: batches of other sizes and contents give the eager mask, from one graph for all."""
    counter = CompileCounter()
    traced = torch.compile(flex.create_block_mask, dynamic=True, backend=counter)
    layout = torch.ones(1, 8, 8, dtype=torch.bool).tril()
    for lengths in ((11, 7, 11, 1) * 12, (2, 3, 8, 8) * 30):
        packing = plan_packing(make_batch(lengths)[2].bool())
        eager = flex_mask(packing, 3, layout, 2)
        assert 0 < float(eager.to_dense().float().mean()) < 1
        with monkeypatch.context() as patch:
            patch.setattr(attention_backends, "_flex_mask_maker", lambda compiled: traced)
            mask = flex_mask(packing, 3, layout, 2)
        assert torch.equal(mask.to_dense(), eager.to_dense())
    assert counter.frame_count == 1


def test_a_padded_call_gives_what_a_call_per_length_gives() -> None:
    """The CUDA form of sdpa, which knows no lengths on the host."""
    mask = make_batch()[2].bool()
    by_length, in_order = plan_packing(mask), make_packing(mask, torch.nonzero(mask.flatten()).squeeze(1))
    padded = torch.randn(5, 11, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    left = by_length.unpack(sdpa_attention(by_length.pack(padded), by_length))
    right = in_order.unpack(sdpa_attention(in_order.pack(padded), in_order))
    assert largest_difference(left, right) <= 1e-6


def cuda_packing(rows: int, width: int, tokens: int, device: str) -> Packing:
    """A plan as CUDA gets it, its content unknown."""
    return make_packing(
        torch.empty(rows, width, dtype=torch.bool, device=device), torch.empty(tokens, dtype=torch.long, device=device)
    )


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_cuda_branch_traces_on_fake_tensors(
    dtype: torch.dtype, dropout: float, kind: type[PreTrainingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, types and devices of a whole forward pass as CUDA would run it.

    Reading the two counts is the only wait for the device; any other would raise here.
    """
    asked: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(unpadding, "read_counts", lambda *masks: asked.append(masks) or [30, 9])
    config = tiny_config(hidden_size=48, attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout)
    model = kind(config)
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
        ids = torch.empty(4, 11, dtype=torch.long)
        loss = model((2, ids, ids, ids, torch.empty(4, dtype=torch.long), ids))
        assert (loss.shape, loss.dtype, loss.device.type) == ((), torch.float32, "cuda")
        assert model.details is not None
        assert all(value.device.type == "cuda" for value in model.details)
        packing = cuda_packing(4, 11, 30, "cuda")
        states = model.encode_rows(ids, ids, packing, torch.empty(9, dtype=torch.long))
        assert (states.shape, states.dtype, states.device.type) == ((9, 48), dtype, "cuda")
    assert len(asked) == 1


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_the_device_form_of_a_step_gives_the_cpus_loss_and_gradients(
    kind: type[PreTrainingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpadding in batch order and attention on padded rows, as a device has them, run on the CPU."""
    model = kind(tiny_config())
    spread_weights(model)
    found = []
    for is_device in (False, True):
        if is_device:
            monkeypatch.setattr(pretraining, "plan_with_rows", lambda mask, wanted: unpadding.plan_in_order(
                mask, wanted & mask, *unpadding.read_counts(mask, wanted & mask)))  # fmt: skip
        model.zero_grad(set_to_none=True)
        loss = model(make_batch())
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((loss, gradients, model.details))
    assert largest_difference(found[0][0], found[1][0]) <= 1e-5
    assert all(largest_difference(gradient, found[1][1][name]) <= 1e-5 for name, gradient in found[0][1].items())
    torch.testing.assert_close(found[0][2], found[1][2])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_device_branch_has_a_backward_pass(dropout: float) -> None:
    """Forward and backward with the device branch on meta tensors: every parameter gets a gradient of its shape."""
    config = tiny_config(attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout, attention_backend="sdpa")
    model = BertForPreTrainingPreLN(config).to("meta")
    packing = cuda_packing(4, 11, 30, "meta")
    ids = torch.empty(4, 11, dtype=torch.long, device="meta")
    states = model.encode_rows(ids, ids, packing, torch.empty(9, dtype=torch.long, device="meta"))
    (model.cls.predictions(states).sum() + model.cls.seq_relationship(model.bert.pooler(states)).sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape


def test_varlen_attention_traces() -> None:
    with FakeTensorMode(), torch.no_grad():
        qkv = torch.empty(30, 3, 4, 64, dtype=torch.float16, device="cuda")
        assert varlen_attention(qkv, cuda_packing(4, 11, 30, "cuda")).shape == (30, 4, 64)
