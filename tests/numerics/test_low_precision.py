"""fp16 and bf16 stay near fp32, and what must be fp32 inside is."""

import pytest
import torch
from torch.nn import functional

from nvidia.attention_backends import plain_attention, sdpa_attention
from nvidia.grouped_attention import grouped_attention
from nvidia.layers import LayerNorm
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import plan_packing
from tests.unit.nvidia.helpers import make_batch, tiny_config

# type → relative spacing of its numbers
EPSILON = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
TYPES = list(EPSILON)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("backend", ["grouped", "plain", "sdpa"])
@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_loss_and_gradients_stay_near_fp32(kind: type[PreTrainingModel], backend: str, dtype: torch.dtype) -> None:
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
            continue  # zero in exact arithmetic, so all of it is rounding
        error = (parameter.grad.float() - reference).norm() / reference.norm()
        assert float(error) <= 24 * EPSILON[dtype], name


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm_is_fp32_inside(dtype: torch.dtype) -> None:
    """Only the result is rounded: sums of squares that overflow fp16 do no harm."""
    x = (torch.randn(5, 768, generator=torch.Generator().manual_seed(0)) * 3000).to(dtype)
    norm = LayerNorm(768, 1e-12).to(dtype)
    exact = functional.layer_norm(x.float(), (768,), eps=1e-12)
    error = (norm(x).float() - exact).abs() / exact.abs().clamp(min=1e-3)
    assert float(error.detach().max()) <= 1.01 * EPSILON[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_softmax_is_fp32_inside(dtype: torch.dtype) -> None:
    """Equal scores over many keys: a sum in half precision would be off by whole percents."""
    length = 2047
    packing = plan_packing(torch.ones(1, length, dtype=torch.bool))
    qkv = torch.zeros(length, 3, 1, 8, dtype=dtype)
    qkv[:, 2] = 1
    for context in (grouped_attention(qkv, packing.groups, 0.0), plain_attention(qkv, packing)[0]):
        assert (context.float() - 1).abs().max() <= 2 * EPSILON[dtype]
    assert (sdpa_attention(qkv, packing).float() - 1).abs().max() <= 2 * EPSILON[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    """Queries are scaled before the product: 64 · 40² is past fp16's range, an eighth of it is not."""
    packing = plan_packing(torch.ones(1, 3, dtype=torch.bool))
    qkv = torch.full((3, 3, 1, 64), 40.0, dtype=dtype)
    assert grouped_attention(qkv, packing.groups, 0.0).isfinite().all()
    assert plain_attention(qkv, packing)[0].isfinite().all()
