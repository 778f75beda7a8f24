"""Self-attention in a model: the context that it chooses a backend by, and traces of the CUDA branch without a GPU."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nvidia import pretraining, self_attention, unpadding
from nvidia.attention import sdpa, varlen
from nvidia.attention.backend import AttentionInputs, BackendContext
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import KnownTokens, Packing, find_tokens, make_packing, plan_packing
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config


def test_the_context_has_the_head_size_and_the_capability_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BackendContext] = []

    def choose(requested: str, context: BackendContext) -> str:
        seen.append(context)
        return "sdpa"

    monkeypatch.setattr(self_attention, "choose_backend", choose)
    monkeypatch.setattr(self_attention, "cuda_capability", lambda device: (9, 0))
    BertForPreTrainingPreLN(tiny_config(num_hidden_layers=1, attention_probs_dropout_prob=0.2))(make_batch())
    assert set(seen) == {BackendContext("cpu", torch.float32, 8, dropout_prob=0.2, capability=(9, 0))}


def test_a_padded_call_equals_one_call_per_length() -> None:
    """The CUDA form of sdpa, for which the host does not know the lengths."""
    mask = make_batch()[2].bool()
    by_length, in_order = plan_packing(mask), make_packing(mask, torch.nonzero(mask.flatten()).squeeze(1))
    padded = torch.randn(5, 11, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    left = by_length.unpack(sdpa.attend(by_length.pack(padded), AttentionInputs(by_length))[0])
    right = in_order.unpack(sdpa.attend(in_order.pack(padded), AttentionInputs(in_order))[0])
    assert largest_difference(left, right) <= 1e-6


def cuda_packing(rows: int, width: int, tokens: int, device: str) -> Packing:
    """A packing as on CUDA, with unknown content."""
    return make_packing(
        torch.empty(rows, width, dtype=torch.bool, device=device), torch.empty(tokens, dtype=torch.long, device=device)
    )


MODERN = {"position_embedding_type": "rotary", "attention_window": 4, "global_attention_every": 2, "type_vocab_size": 0,
          "hidden_act": "geglu", "use_bias": False, "norm_bias": False, "qk_norm": True}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes"), [(BertForPreTrainingPreLN, {}), (BertForPreTraining, {}), (BertForPreTrainingPreLN, MODERN)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_cuda_branch_traces_on_fake_tensors(
    dtype: torch.dtype,
    dropout: float,
    kind: type[PreTrainingModel],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes, types and devices of a whole forward pass as CUDA would run it.

    Reading the two counts is the only wait for the device, and where the host knows the tokens there is none; any
    other would raise here.
    """
    asked: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(unpadding, "read_counts", lambda *masks: asked.append(masks) or [30, 9])
    config = tiny_config(
        hidden_size=48, attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout, **changes,
        attention_backend="sdpa" if changes and dtype == torch.float32 else "auto",  # "auto" would compile flex
    )  # fmt: skip
    model = kind(config)
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
        ids = torch.empty(4, 11, dtype=torch.long)
        batch = (2, ids, ids, ids, torch.empty(4, dtype=torch.long), ids)
        known = KnownTokens(torch.empty(30, dtype=torch.long), torch.empty(9, dtype=torch.long))
        loss = model(batch, tokens=known)
        assert asked == []
        assert loss.shape == model(batch).shape
        assert (loss.shape, loss.dtype, loss.device.type) == ((), torch.float32, "cuda")
        assert model.details is not None
        assert all(value.device.type == "cuda" for value in model.details)
        packing = cuda_packing(4, 11, 30, "cuda")
        states = model.encode_rows(ids, ids, packing, torch.empty(9, dtype=torch.long))
        assert (states.shape, states.dtype, states.device.type) == ((9, 48), dtype, "cuda")
    assert len(asked) == 1


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_the_device_form_of_a_step_has_the_loss_and_gradients_of_the_cpu(
    kind: type[PreTrainingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpadding in batch order and attention on padded rows, as on a device, computed on the CPU.

    The device counts the tokens, or the host has found them.
    """
    model = kind(tiny_config())
    spread_weights(model)
    found, batch = [], make_batch()
    known = find_tokens(batch[2], batch[5] != pretraining.NO_LABEL)
    for is_device, tokens in ((False, None), (True, None), (True, known)):
        if is_device:
            monkeypatch.setattr(pretraining, "plan_with_rows", lambda mask, wanted: unpadding.plan_in_order(
                mask, wanted & mask, *unpadding.read_counts(mask, wanted & mask)))  # fmt: skip
        model.zero_grad(set_to_none=True)
        loss = model(batch, tokens=tokens)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((loss, gradients, model.details))
    assert largest_difference(found[0][0], found[1][0]) <= 1e-5
    assert all(largest_difference(gradient, found[1][1][name]) <= 1e-5 for name, gradient in found[0][1].items())
    torch.testing.assert_close(found[0][2], found[1][2])
    assert torch.equal(found[1][0], found[2][0])
    assert all(torch.equal(gradient, found[2][1][name]) for name, gradient in found[1][1].items())


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
        context, _ = varlen.attend(qkv, AttentionInputs(cuda_packing(4, 11, 30, "cuda")))
        assert context.shape == (30, 4, 64)
