"""The command that started a run on several machines goes away, in all the ways in which it can."""

import os
import shlex
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from common.processes import STOPPED_EXIT_CODE, STUCK_EXIT_CODE
from tests.cluster.machines import LAST_RESORT, Machine, started, wait_until
from tests.cluster.runs import (
    deepspeed,
    documented,
    newest_step,
    printed,
    run_to_end,
    saved_step,
    training,
    wait_for_no_rank,
    write_hostfile,
)
from tests.cluster.test_faults import NOTICED, SILENT, STUCK
from tests.integration.test_launcher_ends import write_endless
from tests.support import PROJECT, read_metrics, tiny_words
from training.runtime.launchers import NODE_LAUNCHER

Machines = tuple[Machine, Machine]


def assert_resumes(machine: Machine, folder: Path) -> None:
    """The next start is not refused, and continues."""
    step = saved_step(folder)
    command = deepspeed(folder, [*tiny_words(folder), "--max_steps", str(step + 2)])
    assert run_to_end(machine, command, folder) == 0, printed(folder)
    assert f"step {step + 2}/{step + 2}" in printed(folder)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGHUP", "SIGTERM", "SIGINT", "terminal closed"])
def test_ranks_save_and_end(end: str, machines: Machines, tmp_path: Path) -> None:
    words = write_endless(tmp_path)
    with training(machines[0], deepspeed(tmp_path, words), tmp_path) as process:
        assert [len(machine.ranks()) for machine in machines] == [1, 1]
        if end == "terminal closed":  # the system sends SIGHUP to all processes of its session
            os.killpg(process.pid, signal.SIGHUP)
        else:
            commands = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_deepspeed(child)]
            (commands or [psutil.Process(process.pid)])[0].send_signal(signal.Signals[end])
        wait_for_no_rank(machines, NOTICED)
        if end in ("SIGKILL", "SIGHUP"):  # otherwise pdsh has ended too, and nothing can be printed
            for machine in machines:
                code = f"{machine.name}: ssh exited with exit code {STOPPED_EXIT_CODE}"
                wait_until(lambda code=code: code in printed(tmp_path), code)
        elif end != "terminal closed":
            assert process.wait(LAST_RESORT) == 1
    assert saved_step(tmp_path) == read_metrics(tmp_path, "train")[-1]["step"], "steps were lost"
    if end in ("SIGKILL", "SIGHUP"):
        assert f"stopped at step {saved_step(tmp_path)} (the launcher has ended)" in printed(tmp_path)
    assert_resumes(machines[0], tmp_path)


def test_a_command_on_a_machine_outside_the_hostfile(machines: Machines, tmp_path: Path) -> None:
    """No rank can see that it is killed: a warning says so. The end of its ssh processes ends the ranks."""
    words = ["deepspeed_train.py", *write_endless(tmp_path)]
    hostfile = tmp_path / "one_host"
    hostfile.write_text("worker-0 slots=2\n")
    command = ["deepspeed", "--hostfile", str(hostfile), "--force_multi", "--master_addr", "worker-0", *words]
    with training(machines[1], command, tmp_path):
        assert printed(tmp_path).count("started on a machine outside the hostfile") == 1
        kill(machines[1], "/bin/deepspeed")
        before = newest_step(tmp_path)
        wait_until(lambda: newest_step(tmp_path) > before + 5, "more checkpoints")
        kill(machines[1], NODE_LAUNCHER)  # as `pkill -f` does
        wait_for_no_rank(machines, NOTICED)
    assert saved_step(tmp_path) == read_metrics(tmp_path, "train")[-1]["step"], "steps were lost"
    assert_resumes(machines[0], tmp_path)


def kill(machine: Machine, part: str) -> None:
    """Kill the processes of a machine that have this in their command lines."""
    for process in machine.processes():
        with suppress(psutil.NoSuchProcess):
            if part in " ".join(process.cmdline()):
                process.kill()


def test_a_command_through_ssh_with_a_terminal(machines: Machines, tmp_path: Path) -> None:
    """What the warning recommends: the end of ssh closes the terminal of `deepspeed`."""
    *ssh_command, shell = documented("ssh -tt worker-0", {})
    shell = shell.replace("/shared/bert", str(PROJECT)).replace(" hostfile ", f" {write_hostfile(tmp_path)} ")
    shell = shell.replace("…", shlex.join(write_endless(tmp_path)))
    with training(machines[1], [*ssh_command, shell], tmp_path):
        (ssh,) = [process for process in machines[1].processes() if process.cmdline()[:2] == ["ssh", "-tt"]]
        ssh.kill()
        wait_for_no_rank(machines, NOTICED)
    assert "outside the hostfile" not in printed(tmp_path)
    assert saved_step(tmp_path) == read_metrics(tmp_path, "train")[-1]["step"], "steps were lost"
    assert_resumes(machines[0], tmp_path)


def _is_deepspeed(process: psutil.Process) -> bool:
    return any(word.endswith("/deepspeed") for word in process.cmdline()[:3])


@pytest.mark.parametrize("has_ssh", [True, False])
def test_the_first_machine_is_gone(has_ssh: bool, machines: Machines, tmp_path: Path) -> None:
    """Its power fails: no connection is closed. The rank of the other machine cannot save without it, and ends."""
    words = [*write_endless(tmp_path), *STUCK]
    place = ["--no_ssh", "--master_addr", "worker-0", "--node_rank"]
    with ExitStack() as stack:
        if has_ssh:
            stack.enter_context(training(machines[0], deepspeed(tmp_path, words), tmp_path))
        else:
            command = deepspeed(tmp_path, words, *place, "1")
            process = stack.enter_context(started(machines[1], command, tmp_path / "other.txt"))
            stack.enter_context(training(machines[0], deepspeed(tmp_path, words, *place, "0"), tmp_path))
        machines[0].cut_link()
        machines[0].power_off()
        wait_for_no_rank(machines[1:], SILENT)
        if not has_ssh:  # otherwise its output is lost with the connection
            assert process.wait(LAST_RESORT) == STUCK_EXIT_CODE
            assert f"error: no sign of life from worker-0 for {SILENT:.0f} s" in (tmp_path / "other.txt").read_text()
    step = saved_step(tmp_path)
    resume = ["python", "deepspeed_train.py", *tiny_words(tmp_path), "--max_steps", str(step + 2)]
    assert run_to_end(machines[1], resume, tmp_path) == 0, printed(tmp_path)  # its lock is not in the way
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(1, step + 3))
