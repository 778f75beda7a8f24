"""Every parameter group moves in the first step, or a warning names it; Muon's matrices are counted."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support import write_project
from tests.unit.training.in_process import run_here
from training.engine.gradients import describe_muon
from training.optimizers.build import set_rate_factors
from training.optimizers.muon import MuonWithAdamW

MUON = {"type": "Muon", "params": {"lr": 0.003, "adam_lr": 0.001}}
STEPS = ["--max_steps", "3"]  # the learning rate of the first is zero
WARNING = r"the optimizer did not change any weight of its parameter (group \d[^:]*)"


@pytest.mark.parametrize("stage", [0, 3])
def test_every_group_moves_and_muon_names_its_matrices(
    stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = {"type": "AdamW"} if stage == 3 else MUON
    run_here([*write_project(tmp_path, optimizer=optimizer, zero_optimization={"stage": stage}), *STEPS])
    said = capsys.readouterr()
    assert not re.search(WARNING, said.err + said.out)
    found = re.findall(r"^  optimizer +Muon orthogonalises (\d+) matrices with", said.out, re.MULTILINE)
    assert found == {0: ["12"], 3: []}[stage]  # six in each of two layers


def test_matrices_that_deepspeed_marks_are_counted() -> None:
    """At ZeRO stages above 0 the groups hold flat partitions, and DeepSpeed's Muon marks the parameters."""
    module = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3))
    for name, parameter in module.named_parameters():
        parameter.use_muon = name == "0.weight"  # type: ignore[attr-defined]
    groups = [{"params": [torch.zeros(7)], "use_muon": is_muon} for is_muon in (True, False)]
    engine = SimpleNamespace(module=module, optimizer=SimpleNamespace(param_groups=groups))
    assert describe_muon(engine) == "Muon orthogonalises 1 matrix with 2.0 k parameters, AdamW updates the other 163"
    set_rate_factors(groups, MUON, learning_rate=0.1)
    assert [group["rate_factor"] for group in groups] == pytest.approx([1.0, 1 / 3])


def test_a_group_that_does_not_move_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MuonWithAdamW, "_muon_step", lambda self, group: None)
    run_here([*write_project(tmp_path, optimizer=MUON), *STEPS])
    assert re.findall(WARNING, capsys.readouterr().err) == [
        "group 0 (Muon's matrices, weight decay 0.01, learning rate 5.0e-04) in the first step"
    ]
