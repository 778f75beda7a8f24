"""Predicted work against torch's FLOP counter and the kernels that the model launches."""

import sys
from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from nvidia.attention.backend import WINDOW_QUERIES
from tests.support import run_command
from tests.unit.training.planning.measuring import (
    LENGTHS,
    as_on_a_gpu,
    build_model,
    executed_flops,
    make_batch,
    small_batch,
    small_config,
)
from training.planning import compute
from training.planning.accelerators import read_table
from training.planning.compute import count_kernels, estimate_micro_step, forward_products
from training.planning.memory import estimate_activations
from training.planning.workload import Batch, RowLengths, flops_per_row, plan_execution


def test_executed_flops_are_those_that_torch_counts() -> None:
    """In a fresh process: what torch recomputes, and so counts, depends on what ran before in the same process."""
    outcome = run_command([sys.executable, "-m", "tests.unit.training.planning.executed_flops"])
    assert outcome.returncode == 0, outcome.stderr[-2000:]


def test_model_flops_are_what_runs_report() -> None:
    """They count no recomputed scores and no padding, so they are a little less than what is executed."""
    config, batch = small_config(), small_batch()
    model = flops_per_row(config, batch.lengths) * batch.rows
    executed = executed_flops(config, batch, plan_execution(config, "fp32", "cpu", None))
    assert 0.9 * executed < model < executed


def test_windows_are_planned_as_work_that_grows_with_the_window() -> None:
    """On a GPU with long rows: attention of the windowed layers almost vanishes, and time and memory follow."""
    rows = Batch(4, RowLengths(8192, 8192, 8192**2, 1229))
    a100, flops, seconds, stored = read_table()["A100-80"], [], [], []
    for changes in ({}, {"attention_window": 128, "global_attention_every": 3}):
        config = small_config(num_hidden_layers=6, max_position_embeddings=8192, attention_probs_dropout_prob=0.0,
                              position_embedding_type="rotary", **changes)  # fmt: skip
        execution = plan_execution(config, "bf16", "cuda", (8, 0))
        assert execution.in_layer(config, 1, 8192).backend == "varlen"
        attention = [product.flops for product in forward_products(config, rows, execution) if product.is_attention]
        flops.append(sum(attention))
        seconds.append(estimate_micro_step(config, rows, execution, a100).seconds)
        stored.append(estimate_activations(config, rows, execution)[0])
    assert flops[1] / flops[0] == pytest.approx(1 / 3 + 2 / 3 * (128 + WINDOW_QUERIES) / 8192, rel=1e-6)
    assert seconds[1] < 0.6 * seconds[0]
    assert stored[1] == stored[0]


class _KernelCounter(TorchDispatchMode):
    VIEWS = (
        *("view", "transpose", "t.default", "permute", "select", "slice", "unbind", "expand", "detach", "alias"),
        *("split", "narrow", "unsqueeze", "squeeze", "_unsafe_view", "empty", "as_strided", "_reshape_alias", "chunk"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(f"aten.{view}" in str(func) for view in self.VIEWS):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for layers in (2, 5):
        config = small_config(num_hidden_layers=layers)
        model = build_model(config, "bf16", "meta")
        with as_on_a_gpu(monkeypatch), _KernelCounter() as counter:
            model(make_batch(device="meta")).backward()
        expected = count_kernels(config, plan_execution(config, "bf16", "cuda", None))
        assert sum(counter.counts.values()) == pytest.approx(expected, rel=0.1)


def test_time_grows_with_the_batch_and_is_bound_by_the_host_below() -> None:
    config, accelerator = small_config(), read_table()["H100"]
    execution = plan_execution(config, "bf16", "cuda", (9, 0))
    small, large = (
        estimate_micro_step(config, small_batch(LENGTHS * times), execution, accelerator) for times in (1, 5000)
    )
    assert small.seconds == small.launch_seconds > small.device_seconds
    assert large.seconds == large.device_seconds > large.launch_seconds
    assert large.memory_seconds == pytest.approx(5000 * small.memory_seconds)
    with_hooks = estimate_micro_step(config, small_batch(), execution, accelerator, zero_stage=3)
    assert with_hooks.seconds == pytest.approx(compute.ZERO3_HOST_TIME * small.seconds)


def test_a_fast_memory_helps_what_products_do_not_bind() -> None:
    config, table = small_config(), read_table()
    execution = plan_execution(config, "bf16", "cuda", (9, 0))
    batch = small_batch(LENGTHS * 5000)
    h100, h200 = (estimate_micro_step(config, batch, execution, table[name]) for name in ("H100", "H200"))
    assert h200.memory_seconds < h100.memory_seconds
    assert h200.product_seconds <= h100.product_seconds
