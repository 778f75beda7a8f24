"""How a run ends under the `deepspeed` launcher: signals to any of its processes, and kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from common.processes import STOP_SIGNALS, STOPPED_EXIT_CODE
from tests.support import PROJECT, free_port, write_json, write_project
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.runtime.launchers import is_launcher


def write_endless(folder: Path) -> list[str]:
    """A project whose run does not come to its end before a signal does, on a fast machine too."""
    words = write_project(folder)
    content = json.loads((folder / "model.json").read_text())
    for training in content["mixed_seq_training"].values():
        training.update(total_training_steps=100_000, num_epochs=100_000)
    write_json(folder / "model.json", content)
    return [*words, "--save_every_steps", "5", "--keep_last", "2"]


def checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / "out" / "saved_models" / "tiny")


@contextmanager
def running(command: list[str], folder: Path) -> Generator[subprocess.Popen[str]]:
    """A command that has written its first checkpoint."""
    with started(command, folder) as process:
        deadline = time.monotonic() + 300
        while not checkpoints(folder).tags():
            assert process.poll() is None, (folder / "output.txt").read_text()
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.02)
        yield process


@contextmanager
def started(command: list[str], folder: Path) -> Generator[subprocess.Popen[str]]:
    """A command whose processes, wherever it has put them, are gone afterwards; it starts with the usual SIGHUP."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=PROJECT,
            env=environment,
            text=True,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run below nohup
        )
    try:
        yield process
    finally:
        for member in psutil.process_iter():
            if _session(member) == process.pid or str(folder) in " ".join(_words(member)):
                member.kill()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def family(process: subprocess.Popen[str]) -> dict[str, list[psutil.Process]]:
    """The launcher's processes and the ranks."""
    found: dict[str, list[psutil.Process]] = {"launcher": [], "rank": []}
    for member in psutil.Process(process.pid).children(recursive=True):
        words = _words(member)
        if any(word.endswith("deepspeed_train.py") for word in words):
            found["launcher" if is_launcher(words) else "rank"].append(member)
    return found


def await_condition(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_listening(process: int) -> bool:
    """Whether the process handles the last of the signals that it listens to from its first line on."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (STOP_SIGNALS[-1] - 1) & 1)


def deepspeed(words: list[str]) -> list[str]:
    return ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "deepspeed_train.py", *words]


# Which process gets which signal, and the exit code of the `deepspeed` command.
ENDS = {
    "rank": (signal.SIGTERM, STOPPED_EXIT_CODE),
    "launcher": (signal.SIGTERM, 1),
    "launcher interrupted": (signal.SIGINT, 1),
    "launcher warned": (signal.SIGUSR1, 0),  # it knows no such signal, and dies of it
    "launcher killed": (signal.SIGKILL, 0),  # by DeepSpeed
    "command": (signal.SIGTERM, -signal.SIGTERM),
    "command interrupted": (signal.SIGINT, -signal.SIGINT),
    "command warned": (signal.SIGUSR1, -signal.SIGUSR1),
}


LIKE_OTHERS = ("command interrupted", "command warned", "launcher interrupted", "launcher warned")


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in ENDS]
)
def test_a_stop_leaves_a_checkpoint_and_no_process(target: str, tmp_path: Path) -> None:
    words = write_endless(tmp_path)
    number, expected = ENDS[target]
    with running(deepspeed(words), tmp_path) as process:
        members = family(process)
        assert len(members["rank"]) == 2
        victim = psutil.Process(process.pid) if "command" in target else members[target.split()[0]][-1]
        victim.send_signal(number)
        code = process.wait(120)
        _, alive = psutil.wait_procs([*members["rank"], *members["launcher"]], timeout=300)
        assert not alive, "orphans"
    text = (tmp_path / "output.txt").read_text()
    assert "stopped at step" in text, text
    assert code == expected
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None
    assert f"stopped at step {read_state(checkpoints(tmp_path).folder / newest).step} " in text


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_launcher_that_ends_while_ranks_import(number: signal.Signals, tmp_path: Path) -> None:
    """Ranks are seconds away from their first step and must not take it without their launcher."""
    words = write_endless(tmp_path)
    with started(deepspeed(words), tmp_path) as process:
        await_condition(lambda: [is_listening(rank.pid) for rank in family(process)["rank"]] == [True, True])
        members = family(process)
        members["launcher"][-1].send_signal(number)
        _, alive = psutil.wait_procs([*members["rank"], *members["launcher"]], timeout=300)
        assert not alive, "orphans"
        process.wait(60)
    text = (tmp_path / "output.txt").read_text()
    assert "stopped before the first step" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_while_importing(number: signal.Signals, tmp_path: Path) -> None:
    words = write_endless(tmp_path)
    with started([sys.executable, "deepspeed_train.py", *words], tmp_path) as process:
        await_condition(lambda: is_listening(process.pid))
        process.send_signal(number)
        assert process.wait(60) == STOPPED_EXIT_CODE
    text = (tmp_path / "output.txt").read_text()
    assert text == f"stopped before the first step ({number.name}): there was nothing to save\n"
