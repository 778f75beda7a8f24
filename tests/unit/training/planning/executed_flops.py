"""Predicted FLOPs against torch's counter, for each way of recomputing; run by test_compute.py in its own process."""

import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nvidia.checkpointing import Checkpointing
from tests.unit.training.planning.measuring import (
    build_model,
    counted_attention,
    executed_flops,
    make_batch,
    small_batch,
    small_config,
)
from training.planning.workload import plan_execution

LONG = ((400, 300), 400, 60)
CASES: list[tuple[dict[str, Any], Checkpointing, Any]] = [
    ({}, Checkpointing(), None),
    ({}, Checkpointing(), LONG),
    ({"attention_backend": "plain"}, Checkpointing(), None),
    ({"hidden_act": "geglu", "sentence_head": "none"}, Checkpointing(), None),
    ({}, Checkpointing(layers=2), None),
    ({"attention_backend": "plain"}, Checkpointing(attention=True), None),
    ({}, Checkpointing(norm=True), None),
    ({}, Checkpointing(norm=True, activation=True), None),
]


def main() -> None:
    torch.set_num_threads(1)  # products on other threads are not counted
    for changes, choice, rows in CASES:
        config = small_config(**changes)
        model = build_model(config, choice=choice)
        with FlopCounterMode(display=False) as counter, counted_attention() as attention:
            model(make_batch(*(rows or ()))).backward()
        execution = plan_execution(config, "fp32", "cpu", None, True, choice)
        found, counted = (
            executed_flops(config, small_batch(*(rows or ())), execution),
            counter.get_total_flops() + sum(attention),
        )
        assert math.isclose(found, counted, rel_tol=0.005), (changes, choice, rows, found, counted)


if __name__ == "__main__":
    main()
