"""ZeRO-Offload trains: the optimizer's state on the CPU at every stage, and the parameters at stage 3."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import PROJECT, read_metrics, run_plain, write_project


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


@pytest.mark.slow
def test_a_run_killed_while_it_compiles_does_not_block_the_next_one(tmp_path: Path) -> None:
    """The compiler of the first run never ends; that of the second fails at once, because only its turn matters."""
    words = write_project(tmp_path, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-c*) exec sleep 600;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path / "first.log"
    with log.open("wb") as output:
        command = [sys.executable, "deepspeed_train.py", *words, "--max_steps", "1"]
        first = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "extensions").rglob("lock")):
            assert time.monotonic() < deadline, log.read_text()
            assert first.poll() is None, log.read_text()
            time.sleep(0.1)
    finally:
        compilers = psutil.Process(first.pid).children(recursive=True)
        first.kill()
        first.wait()
        for process in compilers:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert "compiling DeepSpeed's extension cpu_adam" in log.read_text()
    (lock,) = (tmp_path / "extensions").rglob("lock")  # what it has left

    compiler.write_text("#!/bin/sh\nexit 1\n")
    outcome = run_plain([*words, "--max_steps", "1"], timeout=500, env=environment)
    assert "waiting for another program" not in outcome.stderr
    assert f"{lock}: was left by a run that died while compiling; compiling again" in outcome.stderr
    assert "could not compile cpu_adam" in outcome.stdout
    assert not lock.exists()
