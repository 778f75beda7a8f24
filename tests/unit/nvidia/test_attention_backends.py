"""Which backend runs where, and traces of the CUDA branch on tensors without content."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import UserError
from nvidia import grouped_attention as grouped
from nvidia.attention_backends import choose_backend, sdpa_attention, varlen_attention
from nvidia.dropout import MaskStream, draw_seed
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.unpadding import Packing, make_packing, plan_packing
from tests.unit.nvidia.helpers import largest_difference, make_batch, tiny_config


@pytest.mark.parametrize(
    ("device", "dtype", "dropout", "needs_plain", "is_sparse", "expected"),
    [
        ("cpu", torch.float32, 0.1, False, False, "grouped"),
        ("cpu", torch.bfloat16, 0.1, False, False, "grouped"),
        ("cpu", torch.float32, 0.0, False, False, "sdpa"),
        ("cpu", torch.float32, 0.0, True, False, "plain"),
        ("cpu", torch.float32, 0.1, False, True, "plain"),
        ("cuda", torch.float16, 0.0, False, False, "varlen"),
        ("cuda", torch.bfloat16, 0.0, False, False, "varlen"),
        ("cuda", torch.float16, 0.1, False, False, "sdpa"),
        ("cuda", torch.float32, 0.0, False, False, "sdpa"),
        ("cuda", torch.float16, 0.0, False, True, "flex"),
        ("cuda", torch.float16, 0.1, False, True, "plain"),
        ("cuda", torch.float16, 0.0, True, True, "plain"),
    ],
)
def test_auto(
    device: str, dtype: torch.dtype, dropout: float, needs_plain: bool, is_sparse: bool, expected: str
) -> None:
    assert choose_backend("auto", device, dtype, dropout, needs_plain, is_sparse) == expected


@pytest.mark.parametrize(
    ("name", "device", "dtype", "dropout", "reason"),
    [
        ("grouped", "cuda", torch.float16, 0.0, "is for CPUs, but the model is on cuda"),
        ("varlen", "cpu", torch.float32, 0.0, "needs fp16 or bf16 on a CUDA device, but the model is float32 on cpu"),
        ("varlen", "cuda", torch.float16, 0.1, "has no dropout, but attention_probs_dropout_prob is 0.1"),
        ("flex", "cuda", torch.float16, 0.1, "has no dropout"),
        ("flex", "cpu", torch.float32, 0.0, "has no backward pass on CPUs"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_reason(
    name: str, device: str, dtype: torch.dtype, dropout: float, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        choose_backend(name, device, dtype, dropout, needs_plain=False)


@pytest.mark.parametrize("name", ["grouped", "sdpa", "varlen", "flex"])
def test_options_of_the_plain_formula_are_refused_elsewhere(name: str) -> None:
    with pytest.raises(UserError, match="relative positions, head masks"):
        choose_backend(name, "cpu", torch.float32, 0.0, needs_plain=True)


def test_a_padded_call_gives_what_a_call_per_length_gives() -> None:
    """The CUDA form of sdpa, which knows no lengths on the host."""
    mask = make_batch()[2].bool()
    by_length, in_order = plan_packing(mask), make_packing(mask, torch.nonzero(mask.flatten()).squeeze(1))
    padded = torch.randn(5, 11, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    left = by_length.unpack(sdpa_attention(by_length.pack(padded), by_length))
    right = in_order.unpack(sdpa_attention(in_order.pack(padded), in_order))
    assert largest_difference(left, right) <= 1e-6


@pytest.mark.parametrize("piece", [1, 30, 200, 1 << 19])
def test_pieces_do_not_change_the_result(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = plan_packing(make_batch()[2].bool())
    qkv = torch.randn(packing.num_tokens, 3, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(packing.num_tokens, 3, 8, generator=torch.Generator().manual_seed(1))
    expected = sdpa_attention(qkv, packing)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), qkv)
    monkeypatch.setattr(grouped, "_PIECE", piece)
    untouched = qkv.detach().clone()
    context = grouped.grouped_attention(qkv, packing.groups, 0.0)
    (gradient,) = torch.autograd.grad((context * weights).sum(), qkv)
    assert largest_difference(context, expected) <= 1e-5
    assert largest_difference(gradient, expected_gradient) <= 1e-5
    assert torch.equal(qkv, untouched)


def test_attention_with_dropout_is_the_formula_with_its_mask() -> None:
    packing = plan_packing(torch.ones(2, 7, dtype=torch.bool))
    qkv = torch.randn(14, 3, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(14, 3, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    context = grouped.grouped_attention(qkv, packing.groups, 0.4)
    (gradient,) = torch.autograd.grad((context * weights).sum(), qkv)
    torch.manual_seed(5)
    masks = MaskStream(draw_seed(), 0.4)
    mask = masks.draw((6, 7, 7), torch.float32).view(2, 3, 7, 7) * masks.scale
    q, k, v = qkv.view(2, 7, 3, 3, 8).permute(2, 0, 3, 1, 4)
    probabilities = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    expected = ((probabilities * mask) @ v).transpose(1, 2).flatten(0, 1)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), qkv)
    assert 0 < int((mask == 0).sum()) < mask.numel()
    assert largest_difference(context, expected) <= 1e-5
    assert largest_difference(gradient, expected_gradient) <= 1e-5


def cuda_packing(rows: int, width: int, tokens: int, device: str) -> Packing:
    """A plan as CUDA gets it, its content unknown."""
    return make_packing(
        torch.empty(rows, width, dtype=torch.bool, device=device), torch.empty(tokens, dtype=torch.long, device=device)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_cuda_branch_traces_on_fake_tensors(dtype: torch.dtype, dropout: float) -> None:
    """Shapes, types and devices of the whole encoder as CUDA would run it; any wait for the device would raise here."""
    config = tiny_config(hidden_size=48, attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout)
    model = BertForPreTrainingPreLN(config)
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
        packing = cuda_packing(4, 11, 30, "cuda")
        ids = torch.empty(4, 11, dtype=torch.long, device="cuda")
        states = model.encode_rows(ids, ids, packing, torch.empty(9, dtype=torch.long, device="cuda"))
        assert (states.shape, states.dtype, states.device.type) == ((9, 48), dtype, "cuda")


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
