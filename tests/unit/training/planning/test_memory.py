"""Predicted states against a real DeepSpeed engine, at every stage."""

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch

from nvidia.config import BertConfig
from tests.support import free_port
from tests.unit.training.in_process import own_environment
from tests.unit.training.planning.measuring import build_model, make_batch, small_config
from training.optimizers.build import build_optimizer
from training.planning.memory import ZeroSettings, estimate_states
from training.planning.workload import count_parameters
from training.runtime import collectives
from training.runtime.ranks import RankInfo

SCALARS = 8 * 60  # bytes: the optimizer counts its steps, once per parameter


@pytest.fixture(scope="module")
def world_of_one() -> Generator[None]:
    """As runs join theirs, whatever world another test of this process has left."""
    with own_environment():
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
        collectives.start(torch.device("cpu"), RankInfo(0, 0, 1, 1), stuck_seconds=60)
        yield


def kept_gradients(engine: Any, stage: int) -> int:
    """Bytes of gradients between two micro-steps, where each stage keeps them."""
    if stage == 3:
        return engine.optimizer.grad_partitions_flat_buffer.nbytes
    if stage == 2:
        return sum(tensor.nbytes for group in engine.optimizer.all_grad_tensors.values() for tensor in group)
    return sum(parameter.grad.nbytes for parameter in engine.module.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_those_of_the_engine(stage: int, precision: str, world_of_one: None) -> None:
    import deepspeed

    config, zero = small_config(), {"stage": stage, "reduce_bucket_size": 100_000}
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
    }
    content |= {} if precision == "fp32" else {precision: {"enabled": True}}
    model = build_model(config)
    optimizer, _ = build_optimizer(model, {"type": "AdamW"}, learning_rate=1e-3, weight_decay=0.01, zero=zero)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={**content, "zero_allow_untested_optimizer": True},
        dist_init_required=False,
    )
    for micro_step in range(2):
        engine.backward(engine(make_batch()))
        if micro_step == 0:
            kept = kept_gradients(engine, stage)
        engine.step()
    found = estimate_states(count_parameters(config), precision, ZeroSettings.of(content), world_size=1)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = [value for values in inner.state.values() for value in values.values() if torch.is_tensor(value)]
    assert found.optimizer == pytest.approx(sum(tensor.nbytes for tensor in state), abs=SCALARS)
    if stage == 3:
        masters = engine.optimizer.fp32_partitioned_groups_flat
    else:
        own = {id(parameter) for parameter in model.parameters()}
        masters = [one for group in inner.param_groups for one in group["params"] if id(one) not in own]
    assert found.master_weights == sum(tensor.nbytes for tensor in masters)
    assert found.gradients == kept
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    small = count_parameters(config).small(100_000) * weights[0].element_size() if stage == 3 else 0
    assert found.weights == sum(tensor.nbytes for tensor in weights) + small


def test_parameters_of_bert() -> None:
    base = count_parameters(BertConfig(vocab_size=30528))
    assert (base.total, max(base.sizes)) == (110_112_578, 30528 * 768)
    assert base.encoder_matrices == 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert base.small(768 * 768) == base.total - base.encoder_matrices - (30528 + 2 * 768) * 768


def test_partitions_divide_states_by_the_ranks() -> None:
    parameters = count_parameters(small_config())
    stages = {
        stage: estimate_states(parameters, "bf16", ZeroSettings(stage, reduce_bucket_size=2), 8) for stage in range(4)
    }
    total = parameters.total
    assert stages[0].optimizer == 8 * total
    assert [stages[stage].optimizer for stage in (1, 2, 3)] == [total] * 3
    assert [stages[stage].gradients for stage in range(4)] == [2 * total, 2 * total, total / 4, total / 4]
    assert [stages[stage].weights for stage in range(3)] == [2 * total] * 3
    assert stages[3].weights == total / 4 + 2 * parameters.small(100_000)


def test_optimizers_have_their_own_states() -> None:
    parameters = count_parameters(small_config())
    found = {
        name: estimate_states(parameters, "fp32", ZeroSettings(0, optimizer=name), 1).optimizer
        for name in ("adamw", "lamb", "lion", "muon")
    }
    assert found["adamw"] == found["lamb"] == 2 * found["lion"] == 8 * parameters.total
    assert found["muon"] == 8 * parameters.total - 4 * parameters.encoder_matrices


def test_offloading_moves_states_to_the_host() -> None:
    content = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    found = estimate_states(count_parameters(small_config()), "bf16", ZeroSettings.of(content), 4)
    assert (found.optimizer, found.master_weights) == (0, 0)
    assert found.host > 0


def test_buckets_count_whole_and_twice_where_they_overlap() -> None:
    parameters = count_parameters(small_config())
    plain, doubled = (
        estimate_states(parameters, "bf16", ZeroSettings(2, overlaps=overlaps), 64) for overlaps in (False, True)
    )
    assert plain.buffers == 2 * 500_000_000
    assert doubled.buffers == 2 * plain.buffers
    assert doubled.peak - plain.peak == plain.buffers
