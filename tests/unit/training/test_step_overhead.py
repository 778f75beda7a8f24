"""What a step adds to the work of its micro-steps: values read from the device, and exchanges between ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import write_project
from tests.unit.training.in_process import run_here
from training.engine.build import all_ranks_take_step
from training.runtime import collectives


class ReadValues(TorchDispatchMode):
    """Counts item(), float(), bool() and tolist() of tensors, which all wait for the device."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_at_a_micro_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step reads one value from a tensor, whether the gradient is finite, with one micro-step or with four."""
    counts: list[int] = []

    def counted_step(*given: Any) -> None:
        with ReadValues() as read:
            all_ranks_take_step(*given)
        counts.append(read.num)

    monkeypatch.setattr("training.loop.all_ranks_take_step", counted_step)
    for micro in (8, 2):
        words = write_project(tmp_path / str(micro), train_micro_batch_size_per_gpu=micro)
        model = tmp_path / str(micro) / "model.json"  # dropout on a CPU reads its seeds from a host tensor
        model.write_text(
            model.read_text().replace(
                '"hidden_size"', '"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "hidden_size"'
            )
        )
        run_here([*words, "--max_steps", "3"])
    assert counts == [1] * 6


def test_requests_are_exchanged_once_per_step_whatever_the_number_of_micro_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges, ask = [], collectives.all_ranks_any

    def count(*flags: bool) -> list[bool]:
        exchanges.append(flags)
        return ask(*flags)

    monkeypatch.setattr(collectives, "all_ranks_any", count)
    # Whether a step is read ahead depends on the machine: without it the reader asks before each step, too.
    monkeypatch.setattr("data.stream.loader.TrainingStream.has_next", property(lambda _self: False))
    counts = []
    for micro in (8, 1):
        folder = tmp_path / str(micro)
        words = write_project(folder, train_micro_batch_size_per_gpu=micro)
        content = json.loads((folder / "model.json").read_text())
        del content["validation"]  # whose exchanges follow its own batches
        (folder / "model.json").write_text(json.dumps(content))
        exchanges.clear()
        run_here([*words, "--max_steps", "5", "--ckpt_to_save", "99"])
        counts.append(len(exchanges))
    assert counts[0] == counts[1]
