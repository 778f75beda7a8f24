"""fp16 and bf16 stay close to fp32, and layer norm, softmax and loss are computed in fp32."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from nvidia.attention import grouped, plain, sdpa
from nvidia.attention.backend import AttentionInputs
from nvidia.config import BertConfig
from nvidia.layers import LayerNorm
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN, BertModel
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import plan_packing
from tests.unit.nvidia.helpers import make_batch, tiny_config

# type → relative spacing of its numbers
EPSILON = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
TYPES = list(EPSILON)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("backend", "min_skipped"), [("grouped", 1 << 40), ("grouped", 0), ("plain", 0), ("sdpa", 0)])
@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_loss_and_gradients_stay_near_fp32(
    kind: type[PreTrainingModel], backend: str, min_skipped: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`min_skipped`: with 0 the last block skips queries that are not read."""
    monkeypatch.setattr(grouped, "_MIN_SKIPPED", min_skipped)
    torch.manual_seed(0)
    half = kind(tiny_config(attention_backend=backend, initializer_range=0.1)).to(dtype)
    single = kind(tiny_config(initializer_range=0.1))
    single.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    loss, expected = half(make_batch()), single(make_batch())
    assert loss.dtype == torch.float32  # the loss itself is computed in fp32
    assert abs(float(loss.detach() - expected.detach())) <= 4 * EPSILON[dtype] * float(expected.detach())
    (loss * 64).backward()
    (expected * 64).backward()
    for name, parameter in half.named_parameters():
        reference = single.get_parameter(name).grad
        assert parameter.grad is not None
        assert reference is not None
        assert parameter.grad.dtype == dtype
        if name.endswith("key.bias"):
            continue  # zero in exact arithmetic, so it consists of rounding errors
        error = (parameter.grad.float() - reference).norm() / reference.norm()
        assert float(error) <= 24 * EPSILON[dtype], name


def run_autocast(model: PreTrainingModel, enabled: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients; the same seed gives the same dropout in both types."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        loss = model(make_batch())
    (loss * 64).backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_near(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    """Each gradient is fp32 and within the rounding of bf16 of the reference or of a hundredth of all gradients' norm.

    The latter is for sums over few rows that nearly cancel, such as the bias of a head or of the keys.
    """
    whole = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        error = (gradient - reference[name]).norm() / max(reference[name].norm(), whole / 100)
        assert float(error) <= 12 * EPSILON[torch.bfloat16], name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("changes", [
    {"attention_backend": "grouped"}, {"attention_backend": "sdpa"}, {"attention_backend": "plain"},
    {"use_bias": False}, {"position_embedding_type": "relative_key"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_autocast_stays_near_fp32(kind: type[PreTrainingModel], changes: dict[str, Any], dropout: float) -> None:
    """Parameters in fp32, products in bf16."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = kind(tiny_config(initializer_range=0.1, **rates, **changes))
    expected, reference = run_autocast(model, enabled=False)
    loss, gradients = run_autocast(model, enabled=True)
    epsilon = EPSILON[torch.bfloat16]
    assert loss.dtype == torch.float32
    assert not torch.equal(loss, expected)
    assert abs(float(loss - expected)) <= 2 * epsilon * float(expected)
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert_near(gradients, reference)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("is_inside", [False, True])  # whether the backward pass is
def test_an_encoder_alone_under_autocast(is_inside: bool, dropout: float) -> None:
    model = BertModel(
        tiny_config(initializer_range=0.1, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )
    _, ids, mask, segments, *_ = make_batch()
    weights = torch.randn(5, 11, 24, generator=torch.Generator().manual_seed(2))
    found = []
    for enabled in (False, True):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = model(ids, segments, mask)
            assert output.pooled is not None
            total = (output.last_hidden_state * weights).sum() + output.pooled.sum()
            if is_inside:
                total.backward()
        if not is_inside:
            total.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append((output.last_hidden_state.detach(), gradients))
    (expected, reference), (states, gradients) = found
    assert states.dtype == torch.float32  # the residual stream keeps the type of the embeddings
    assert 0 < float((states - expected).norm() / expected.norm()) <= 2 * EPSILON[torch.bfloat16]
    assert_near(gradients, reference)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_half_precision_model_accepts_a_head_mask_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = BertModel(tiny_config(initializer_range=0.1)).to(dtype).eval()
    single = BertModel(tiny_config()).eval()
    single.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    _, ids, mask, segments, *_ = make_batch()
    head_mask = torch.tensor([1.0, 0.0, 0.5])
    given = {"token_type_ids": segments, "attention_mask": mask, "head_mask": head_mask, "output_attentions": True}
    half, expected = model(ids, **given), single(ids, **given)
    assert half.last_hidden_state.dtype == half.attentions[0].dtype == dtype
    error = (half.last_hidden_state.float() - expected.last_hidden_state).norm() / expected.last_hidden_state.norm()
    assert float(error.detach()) <= 4 * EPSILON[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm_is_fp32_inside(dtype: torch.dtype) -> None:
    """Only the result is rounded: sums of squares may exceed the range of fp16."""
    x = (torch.randn(5, 768, generator=torch.Generator().manual_seed(0)) * 3000).to(dtype)
    norm = LayerNorm(BertConfig(vocab_size=8)).to(dtype)
    exact = functional.layer_norm(x.float(), (768,), eps=1e-12)
    error = (norm(x).float() - exact).abs() / exact.abs().clamp(min=1e-3)
    assert float(error.detach().max()) <= 1.01 * EPSILON[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_softmax_is_fp32_inside(dtype: torch.dtype) -> None:
    """Equal scores over many keys: a sum in half precision would be wrong by several percent."""
    length = 2047
    inputs = AttentionInputs(plan_packing(torch.ones(1, length, dtype=torch.bool)))
    qkv = torch.zeros(length, 3, 1, 8, dtype=dtype)
    qkv[:, 2] = 1
    for backend in (grouped, plain, sdpa):
        assert (backend.attend(qkv, inputs)[0].float() - 1).abs().max() <= 2 * EPSILON[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    """Scaling comes before rounding: 64 · 40² exceeds the range of fp16, an eighth of it does not."""
    inputs = AttentionInputs(plan_packing(torch.ones(1, 3, dtype=torch.bool)))
    qkv = torch.full((3, 3, 1, 64), 40.0, dtype=dtype)
    assert grouped.attend(qkv, inputs)[0].isfinite().all()
    assert plain.attend(qkv, inputs)[0].isfinite().all()
