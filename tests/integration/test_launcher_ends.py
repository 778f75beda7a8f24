"""How a run ends under the real launcher: signals to any of its processes, kills, and restarts."""

import json
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

from common.launchers import is_launcher
from common.processes import STOPPED_EXIT_CODE
from tests.distributed.test_ranks import without_dropout
from tests.support import PROJECT, free_port, read_metrics, run_command, run_deepspeed, write_json, write_project
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state


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
        deadline = time.monotonic() + 150
        while not checkpoints(folder).tags():
            assert process.poll() is None, (folder / "output.txt").read_text()
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.02)
        yield process


@contextmanager
def started(command: list[str], folder: Path) -> Generator[subprocess.Popen[str]]:
    """A command whose processes, wherever it has put them, are gone afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, text=True, stdout=output, stderr=output, start_new_session=True
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
        words = member.cmdline()
        if any(word.endswith("deepspeed_train.py") for word in words):
            found["launcher" if is_launcher(words) else "rank"].append(member)
    return found


def deepspeed(words: list[str]) -> list[str]:
    return ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "deepspeed_train.py", *words]


# Which process gets which signal, and the exit code of the `deepspeed` command.
ENDS = {
    "rank": (signal.SIGTERM, STOPPED_EXIT_CODE),
    "launcher": (signal.SIGTERM, 1),
    "launcher interrupted": (signal.SIGINT, 1),
    "launcher warned": (signal.SIGUSR1, 0),  # it knows no such signal, and dies of it
    "launcher killed": (signal.SIGKILL, 0),  # DeepSpeed's; scripts/supervise.py knows better
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
        began = time.monotonic()
        code = process.wait(60)
        _, alive = psutil.wait_procs([*members["rank"], *members["launcher"]], timeout=30)
        assert not alive, "orphans"
        assert time.monotonic() - began < 30
    text = (tmp_path / "output.txt").read_text()
    assert "stopped at step" in text, text
    assert code == expected
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None
    assert f"stopped at step {read_state(checkpoints(tmp_path).folder / newest).step} " in text


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGUSR1))]
)
def test_a_signal_to_the_supervisor_of_several_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """All is saved, nothing is left or started again, and the code is that of a stop, which `deepspeed` would hide.

    Ctrl-C in a terminal comes to the supervisor alone, so that no traceback of DeepSpeed's own is seen either.
    """
    words = write_endless(tmp_path)
    command = [sys.executable, "scripts/supervise.py", "--max_restarts", "2", "--pause", "0.1", "--", *deepspeed(words)]
    with running(command, tmp_path) as process:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(60) == STOPPED_EXIT_CODE, (tmp_path / "output.txt").read_text()
        assert time.monotonic() - began < 30
        _, alive = psutil.wait_procs(below, timeout=5)
        assert not alive, "orphans"
    text = (tmp_path / "output.txt").read_text()
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None
    assert f"stopped at step {read_state(checkpoints(tmp_path).folder / newest).step} ({number.name})" in text
    assert "restart" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_launcher_that_ends_while_ranks_import(number: signal.Signals, tmp_path: Path) -> None:
    """Ranks are seconds away from their first step, and must not go on to it alone."""
    words = write_endless(tmp_path)
    with started(deepspeed(words), tmp_path) as process:
        deadline = time.monotonic() + 60
        while len(family(process)["rank"]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)  # Python itself takes a moment to its first line
        members = family(process)
        members["launcher"][-1].send_signal(number)
        _, alive = psutil.wait_procs([*members["rank"], *members["launcher"]], timeout=15)
        assert not alive, "orphans"
        process.wait(15)
    text = (tmp_path / "output.txt").read_text()
    assert "stopped before the first step" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_importing(number: signal.Signals, tmp_path: Path) -> None:
    words = write_endless(tmp_path)
    with started([sys.executable, "deepspeed_train.py", *words], tmp_path) as process:
        time.sleep(1.0)
        process.send_signal(number)
        assert process.wait(10) == STOPPED_EXIT_CODE
    text = (tmp_path / "output.txt").read_text()
    assert text == f"stopped before the first step ({number.name}): there was nothing to save\n"


@pytest.mark.parametrize("with_ranks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_supervised_launcher_that_is_killed_is_no_success(with_ranks: bool, tmp_path: Path) -> None:
    """The `deepspeed` command ends with 0 then; with its ranks killed too, there is nobody left to say otherwise."""
    words = write_endless(tmp_path)
    command = [sys.executable, "scripts/supervise.py", "--max_restarts", "0", "--", *deepspeed(words)]
    with running(command, tmp_path) as process:
        members = family(process)
        launcher = [member for member in members["launcher"] if "deepspeed.launcher.launch" in member.cmdline()]
        ranks = [member for member in members["rank"] if "--local_rank" in " ".join(member.cmdline())]
        for member in [*launcher, *(ranks if with_ranks else [])]:
            member.kill()
        assert process.wait(60) == 1
    assert "giving up" in (tmp_path / "output.txt").read_text()


# The other machine is this one, reached by a `pdsh` whose first connection breaks without a sign, and which hands on no
# more of the environment than the real one does. pdsh -S -f 1024 -w HOST command…
PDSH = """#!/bin/sh
case "$*" in *pkill*) exit 0;; esac
if mkdir "{folder}/has_broken" 2> /dev/null; then exit 0; fi
shift 5
exec env -i HOME="$HOME" OMP_NUM_THREADS=1 sh -c "$(echo "$*" | sed s/%n/0/)"
"""


@pytest.mark.slow
def test_a_supervised_run_on_other_machines_is_believed_when_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"pdsh": PDSH.format(folder=tmp_path), "ssh": "#!/bin/sh\necho 127.0.0.1\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("elsewhere slots=2\n")
    words = [*write_project(tmp_path), "--max_steps", "3"]
    launcher = ["deepspeed", "--hostfile", str(tmp_path / "hosts"), "--force_multi", "--master_port", str(free_port())]
    supervisor = [sys.executable, "scripts/supervise.py", "--max_restarts", "2", "--pause", "0.1", "--"]
    with started([*supervisor, *launcher, "deepspeed_train.py", *words], tmp_path) as process:
        assert process.wait(120) == 0, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert "the run died with code 1: restart 1 of 2" in text
    assert "restart 2 of 2" not in text
    assert checkpoints(tmp_path).newest_valid() == "step_00000003"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["runs", "saved_models"]


def test_python_alone_starts_again(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "100", "--save_every_steps", "5", "--max_restarts", "2"]
    with running([sys.executable, "deepspeed_train.py", *words], tmp_path) as process:
        (child,) = psutil.Process(process.pid).children()
        child.kill()
        assert process.wait(90) == 0, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert "the run died with code 137: restart 1 of 2" in text
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(1, 61))


def test_a_supervisor_above_one_that_starts_itself_again(tmp_path: Path) -> None:
    """Ctrl-C reaches the rank once, so that it saves; and an end that the child came to is one for both above it."""
    words = [*write_project(tmp_path), "--save_every_steps", "5", "--max_restarts", "1"]
    command = [sys.executable, "scripts/supervise.py", "--max_restarts", "1", "--pause", "0.1", "--"]
    command += [sys.executable, "deepspeed_train.py", *words]
    with running(command, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == STOPPED_EXIT_CODE, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert "stopped at step" in text
    assert "interrupted" not in text
    outcome = run_command(command)
    assert outcome.returncode == 0, outcome.stderr
    assert "restart 1" not in outcome.stdout + outcome.stderr


def test_a_supervisor_that_is_asked_before_there_are_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/supervise.py", "--", sys.executable, "-c", "import time; time.sleep(60)"]
    with started(command, tmp_path) as process:
        while not psutil.Process(process.pid).children():
            time.sleep(0.02)
        process.terminate()
        assert process.wait(20) == STOPPED_EXIT_CODE


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
