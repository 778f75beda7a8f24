"""How a run ends under the real launcher: signals to any of its processes, kills, and restarts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from common.processes import STOPPED_EXIT_CODE, is_launcher
from tests.distributed.test_ranks import without_dropout
from tests.support import PROJECT, free_port, read_metrics, run_deepspeed, write_project
from training.checkpoint import CheckpointFolder, read_state

ENDLESS = ["--max_steps", "100000", "--save_every_steps", "5", "--keep_last", "2"]


def checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / "out" / "saved_models" / "tiny")


@contextmanager
def running(command: list[str], folder: Path) -> Generator[subprocess.Popen[str]]:
    """A command that has written its first checkpoint."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, text=True, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 150
        while not checkpoints(folder).tags():
            assert process.poll() is None, (folder / "output.txt").read_text()
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.02)
        yield process
    finally:
        for member in psutil.process_iter():
            if _session(member) == process.pid:
                member.kill()


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def family(process: subprocess.Popen[str]) -> dict[str, list[psutil.Process]]:
    """The launcher's processes and the ranks."""
    found: dict[str, list[psutil.Process]] = {"launcher": [], "rank": []}
    for member in psutil.Process(process.pid).children(recursive=True):
        words = member.cmdline()
        if any(word.endswith("deepspeed_train.py") for word in words):
            found["launcher" if is_launcher(words) else "rank"].append(member)
    return found


def deepspeed(words: list[str]) -> list[str]:
    return ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "deepspeed_train.py", *words]


@pytest.mark.parametrize("target", ["rank", "launcher", "launcher killed"])
def test_a_stop_leaves_a_checkpoint_and_no_process(target: str, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), *ENDLESS]
    with running(deepspeed(words), tmp_path) as process:
        members = family(process)
        assert len(members["rank"]) == 2
        victim = members[target.split()[0]][-1]
        victim.send_signal(signal.SIGKILL if "killed" in target else signal.SIGTERM)
        began = time.monotonic()
        code = process.wait(60)
        _, alive = psutil.wait_procs([*members["rank"], *members["launcher"]], timeout=30)
        assert not alive, "orphans"
        assert time.monotonic() - began < 30
    text = (tmp_path / "output.txt").read_text()
    assert "stopped at step" in text, text
    if target == "rank":
        assert code == STOPPED_EXIT_CODE
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None
    assert f"stopped at step {read_state(checkpoints(tmp_path).folder / newest).step} " in text


def test_a_lost_rank_is_replaced_by_a_restart(tmp_path: Path) -> None:
    """kill -9 of one rank under the supervisor; the run goes on with one rank less and ends as if undisturbed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    limits = ["--max_steps", "200", "--save_every_steps", "5", "--keep_last", "2"]
    for folder in (whole, broken):
        write_project(folder, zero_optimization={"stage": 1})
        without_dropout(folder)
    outcome = run_deepspeed([*write_words(whole), *limits], num_ranks=2)
    assert outcome.returncode == 0, outcome.stderr
    command = [sys.executable, "scripts/supervise.py", "--max_restarts", "2", "--pause", "0.1", "--fewer_ranks", "--"]
    with running([*command, *deepspeed([*write_words(broken), *limits])], broken) as process:
        ranks = [member for member in family(process)["rank"] if "supervise.py" not in " ".join(member.cmdline())]
        ranks[-1].kill()
        assert process.wait(150) == 0, (broken / "output.txt").read_text()
    text = (broken / "output.txt").read_text()
    assert "restart 1 of 2" in text
    assert "saved by 2 ranks, cut anew for 1" in text
    ours, theirs = (read_metrics(folder, "validation")[-1] for folder in (broken, whole))
    assert ours["step"] == theirs["step"] == 60
    assert ours["mlm_loss"] == pytest.approx(theirs["mlm_loss"], abs=1e-3)  # other sums, over many steps


def write_words(folder: Path) -> list[str]:
    return [
        *("--cf", str(folder / "model.json"), "--deepspeed_config", str(folder / "deepspeed.json")),
        *("--output_dir", str(folder / "out"), "--data_path_prefix", str(folder)),
        *("--max_seq_length", "24", "--max_predictions_per_seq", "4", "--print_steps", "20"),
    ]
