"""Progressive layer drop: its schedule, its frequencies, and that a dropped block has no effect."""

import math

import pytest
import torch

from nvidia.layer_drop import branch_scales, keep_theta
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import make_batch, spread_weights, tiny_config


def test_schedule() -> None:
    assert keep_theta(0, theta=0.5, gamma=0.001) == 1.0
    assert keep_theta(700, theta=0.5, gamma=0.001) == pytest.approx(0.5 * math.exp(-0.7) + 0.5)
    assert keep_theta(10**6, theta=0.5, gamma=0.001) == pytest.approx(0.5)


def test_deeper_blocks_are_dropped_more_often_and_scaled_by_their_probability() -> None:
    layers, theta, draws = 4, 0.4, 4000
    kept = torch.zeros(layers)
    for seed in range(draws):
        scales = torch.tensor(branch_scales(layers, theta, seed))
        kept += scales > 0
        for index, scale in enumerate(scales.tolist()):
            keep = 1 - (index + 1) / layers * (1 - theta)
            assert scale == 0 or scale == pytest.approx(1 / keep)
    expected = 1 - torch.arange(1, layers + 1) / layers * (1 - theta)
    assert (kept / draws - expected).abs().max() < 5 * (0.25 / draws) ** 0.5


def test_the_same_seed_drops_the_same_blocks() -> None:
    assert branch_scales(12, 0.5, 8) == branch_scales(12, 0.5, 8)
    assert len({branch_scales(12, 0.5, seed) for seed in range(20)}) > 10
    assert branch_scales(12, 1.0, 8) == (1.0,) * 12


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
@pytest.mark.parametrize("dropped", [0, 2])
def test_a_dropped_block_has_no_effect(kind: type[PreTrainingModel], dropped: int) -> None:
    model = kind(tiny_config())
    spread_weights(model)
    model.bert.encoder.branch_scales = tuple(0.0 if index == dropped else 1.0 for index in range(3))
    smaller = kind(tiny_config(num_hidden_layers=2))
    state = model.state_dict()
    for name in list(state):
        parts = name.split(".")
        if parts[2:3] == ["layer"]:
            index = int(parts[3])
            tensor = state.pop(name)
            if index != dropped:
                state[".".join([*parts[:3], str(index - (index > dropped)), *parts[4:]])] = tensor
    smaller.load_state_dict(dict(sorted(state.items())))
    # Without its last block, the smaller model computes only the queries that are read in the block before it.
    rounding = 1e-5 if dropped == 2 else 0.0
    torch.testing.assert_close(model(make_batch()), smaller(make_batch()), rtol=0, atol=rounding)
    model.eval()
    assert not torch.equal(model(make_batch()), smaller(make_batch()))  # nothing is dropped outside training


def test_kept_branches_are_scaled() -> None:
    model = BertForPreTrainingPreLN(tiny_config(num_hidden_layers=1))
    spread_weights(model)
    model.bert.encoder.branch_scales = (1.25,)
    scaled = model(make_batch())
    with torch.no_grad():
        for name in ("attention.output.dense", "output.dense"):
            module = model.get_submodule(f"bert.encoder.layer.0.{name}")
            module.weight *= 1.25
            module.bias *= 1.25
    model.bert.encoder.branch_scales = (1.0,)
    torch.testing.assert_close(scaled, model(make_batch()))


def test_set_layer_drop_until_called_again() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    model.set_layer_drop(theta=0.1, seed=5)
    assert model.bert.encoder.branch_scales == branch_scales(3, 0.1, 5)
    model.set_layer_drop(theta=1.0, seed=5)
    assert model.bert.encoder.branch_scales == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
@pytest.mark.parametrize("changes", [{}, {"position_embedding_type": "relative_key"}, {"chunk_size_feed_forward": 4}])
def test_a_dropped_block_gets_gradients_of_zero(kind: type[PreTrainingModel], changes: dict) -> None:
    model = kind(tiny_config(**changes))
    model.bert.encoder.branch_scales = (1.0, 0.0, 0.0)
    model(make_batch()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        dropped = name.startswith(("bert.encoder.layer.1.", "bert.encoder.layer.2."))
        if not name.endswith("key.bias"):
            assert bool(parameter.grad.any()) != dropped, name
