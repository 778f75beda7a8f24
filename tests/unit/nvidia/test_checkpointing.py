"""Gradient checkpointing: loss and gradients are bit-equal for every choice of what is recomputed."""

import pytest
import torch

from common.errors import UserError
from nvidia.attention import grouped
from nvidia.checkpointing import Checkpointing, default_chunk
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import make_batch, spread_weights, tiny_config

CHOICES = [
    Checkpointing(layers=1),
    Checkpointing(layers=2),
    Checkpointing(layers=7),
    Checkpointing(activation=True),
    Checkpointing(attention=True),
    Checkpointing(norm=True),
    Checkpointing(layers=2, activation=True, attention=True, norm=True),
]


def run(model: PreTrainingModel) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(11)
    model.zero_grad(set_to_none=True)
    loss = model(make_batch())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients, torch.get_rng_state()


CASES = [(BertForPreTrainingPreLN, choice) for choice in CHOICES]
CASES += [(BertForPreTraining, choice) for choice in CHOICES if not choice.norm]


@pytest.mark.parametrize(("kind", "choice"), CASES, ids=str)
@pytest.mark.parametrize(("backend", "min_skipped"), [("auto", 1 << 40), ("auto", 0), ("plain", 0), ("sdpa", 0)])
def test_gradients_are_bit_equal_with_dropout(
    kind: type[PreTrainingModel], backend: str, min_skipped: int, choice: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`min_skipped`: with 0 the last block skips queries that are not read."""
    monkeypatch.setattr(grouped, "_MIN_SKIPPED", min_skipped)
    config = tiny_config(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, attention_backend=backend)
    model = kind(config)
    spread_weights(model)
    model.set_layer_drop(theta=0.5, seed=4)
    assert [scale > 0 for scale in model.bert.encoder.branch_scales] == [True, False, True]
    loss, gradients, random_state = run(model)
    model.set_checkpointing(choice)
    again, recomputed, random_state_after = run(model)
    assert torch.equal(loss, again)
    assert gradients.keys() == recomputed.keys()
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
    assert torch.equal(random_state, random_state_after)


def kept_bytes(model: PreTrainingModel) -> int:
    """Bytes of distinct storages that autograd keeps for the backward pass, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(make_batch((19,) * 4, 19))
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_each_choice_keeps_fewer_bytes(choice: Checkpointing) -> None:
    config = tiny_config(num_hidden_layers=4, intermediate_size=96, attention_backend="plain")
    model = BertForPreTrainingPreLN(config)
    plain = kept_bytes(model)
    model.set_checkpointing(choice)
    assert kept_bytes(model) < plain


def test_the_default_chunk_is_the_square_root_of_the_depth() -> None:
    assert [default_chunk(layers) for layers in (1, 2, 4, 12, 24)] == [1, 2, 2, 4, 5]
    model = BertForPreTrainingPreLN(tiny_config())
    model.gradient_checkpointing_enable()
    assert model.bert.encoder.checkpoint_chunk == 2
    model.gradient_checkpointing_enable(chunk_size=3)
    assert model.bert.encoder.checkpoint_chunk == 3
    model.gradient_checkpointing_disable()
    assert model.bert.encoder.checkpoint_chunk == 0


def test_post_ln_has_no_norms_to_recompute() -> None:
    with pytest.raises(UserError, match="post-LN"):
        BertForPreTraining(tiny_config()).set_checkpointing(Checkpointing(norm=True))


def test_a_negative_chunk_is_rejected() -> None:
    with pytest.raises(UserError, match="-1 layers"):
        Checkpointing(layers=-1)


@pytest.mark.parametrize("choice", [Checkpointing(layers=1), Checkpointing(attention=True)])
def test_nested_tensors_are_not_recomputed(choice: Checkpointing) -> None:
    model = BertForPreTrainingPreLN(tiny_config(attention_backend="jagged"))
    with pytest.raises(UserError, match=r"jagged.* cannot be recomputed"):
        model.set_checkpointing(choice)
    model.set_checkpointing(Checkpointing(activation=True))
