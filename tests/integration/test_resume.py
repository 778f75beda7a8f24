"""A run that was killed resumes with the same command and ends with the weights of an undisturbed run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import torch

from tests.rank_server import RankServer
from tests.support import PROJECT, read_metrics, run_plain, with_slow_steps, write_project
from training.checkpoints.folder import CheckpointFolder
from training.export.hugging_face import read_weights

COMMON = ["--max_steps", "40", "--save_every_steps", "7", "--validate_every_steps", "10"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    return read_weights(checkpoints.folder / checkpoints.choose(None))


def kill_after_first_checkpoint(words: list[str], folder: Path) -> None:
    process = subprocess.Popen(
        with_slow_steps(words),  # so that it cannot be over before it is killed
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not CheckpointFolder(folder / "out" / "saved_models" / "tiny").tags():
        assert process.poll() is None, "ended before its first checkpoint"
        assert time.monotonic() < deadline, "no checkpoint within five minutes"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    outcome = run_plain([*write_project(whole), *COMMON])
    assert outcome.returncode == 0, outcome.stderr

    words = [*write_project(broken), *COMMON]
    kill_after_first_checkpoint(words, broken)
    outcome = run_plain(words)
    assert outcome.returncode == 0, outcome.stderr
    assert "from " + str(broken / "out" / "saved_models" / "tiny" / "step_") in outcome.stdout

    for kind in ("train", "validation"):
        steps, losses = (
            [[row[key] for row in read_metrics(folder, kind)] for folder in (whole, broken)] for key in ("step", "loss")
        )
        assert steps[0] == steps[1]
        assert losses[0] == losses[1]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(broken)[name]), name

    again = run_plain(words)
    assert again.returncode == 0
    assert "finished already, at step 40" in again.stdout


def test_another_zero_stage_is_refused_with_a_sentence(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    assert rank_server.run(words, 1, tmp_path).codes == [0]
    write_project(tmp_path, zero_optimization={"stage": 1})
    outcome = rank_server.run([*words[:-1], "3"], 1, tmp_path)
    assert outcome.codes == [2]
    assert "was saved with ZeRO stage 0 in fp32, but this run uses stage 1 in fp32" in outcome.text
    assert "Traceback" not in outcome.text
