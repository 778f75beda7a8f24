"""ZeRO-Offload trains: the optimizer's state on the CPU at every stage, and the parameters at stage 3."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import read_metrics, run_plain, write_project


def train(folder: Path, extensions: Path, **zero: Any) -> tuple[list[float], str]:
    """The losses of a few steps, and what the run said. Real processes: DeepSpeed compiles its CPU Adam."""
    words = write_project(folder, zero_optimization=zero)
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions), "MAX_JOBS": str(os.cpu_count() or 1)}
    outcome = run_plain([*words, "--max_steps", "3"], timeout=500, env=environment)
    assert outcome.returncode == 0, outcome.stderr
    return [row["loss"] for row in read_metrics(folder, "train")], outcome.stdout


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.mark.slow
def test_offloading_trains_and_compiling_is_announced_once(extensions: Path, tmp_path: Path) -> None:
    expected, _ = train(tmp_path / "plain", extensions, stage=1)
    cpu = {"device": "cpu"}
    kinds = [{"stage": stage, "offload_optimizer": cpu} for stage in (1, 2, 3)]
    kinds.append({"stage": 3, "offload_optimizer": cpu, "offload_param": cpu})
    said = []
    for index, zero in enumerate(kinds):
        losses, output = train(tmp_path / str(index), extensions, **zero)
        assert losses == pytest.approx(expected, abs=2e-3), zero
        said.append(output)
    assert "compiling DeepSpeed's extension cpu_adam: once on this machine" in said[0]
    assert "compiling" not in "".join(said[1:])
