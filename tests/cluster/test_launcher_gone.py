"""The command that started a run on several machines goes away, in all the ways in which it can."""

import os
import shlex
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.machines import Machine
from tests.cluster.runs import deepspeed, printed, run_to_end, saved_step, training, wait_for_no_rank
from tests.integration.test_launcher_ends import write_endless
from tests.support import PROJECT, read_metrics, tiny_words, write_project

Machines = tuple[Machine, Machine]


def assert_resumes(machine: Machine, folder: Path) -> None:
    """The next start is not refused, and continues."""
    step = saved_step(folder)
    command = deepspeed(folder, [*tiny_words(folder), "--max_steps", str(step + 2)])
    assert run_to_end(machine, command, folder) == 0, printed(folder)
    assert f"step {step + 2}/{step + 2}" in printed(folder)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGHUP", "SIGTERM", "terminal closed"])
def test_ranks_save_and_end(end: str, machines: Machines, tmp_path: Path) -> None:
    words = write_endless(tmp_path)
    with training(machines[0], deepspeed(tmp_path, words), tmp_path) as process:
        assert [len(machine.ranks()) for machine in machines] == [1, 1]
        if end == "terminal closed":  # the system sends SIGHUP to all processes of its session
            os.killpg(process.pid, signal.SIGHUP)
        else:
            commands = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_deepspeed(child)]
            (commands or [psutil.Process(process.pid)])[0].send_signal(signal.Signals[end])
        wait_for_no_rank(machines)
    assert saved_step(tmp_path) == read_metrics(tmp_path, "train")[-1]["step"], "steps were lost"
    if end in ("SIGKILL", "SIGHUP"):  # otherwise pdsh has ended too, and nothing can be printed
        assert f"stopped at step {saved_step(tmp_path)} (the launcher has ended)" in printed(tmp_path)
    assert_resumes(machines[0], tmp_path)


def test_a_command_on_a_machine_outside_the_hostfile(machines: Machines, tmp_path: Path) -> None:
    """No rank can see whether it is killed: a warning says so."""
    words = ["deepspeed_train.py", *write_project(tmp_path), "--max_steps", "2"]
    hostfile = tmp_path / "one_host"
    hostfile.write_text("worker-0 slots=2\n")
    command = ["deepspeed", "--hostfile", str(hostfile), "--force_multi", "--master_addr", "worker-0", *words]
    assert run_to_end(machines[1], command, tmp_path) == 0, printed(tmp_path)
    assert printed(tmp_path).count("started on a machine outside the hostfile") == 1


def test_a_command_through_ssh_with_a_terminal(machines: Machines, tmp_path: Path) -> None:
    """What the warning recommends: the end of ssh closes the terminal of `deepspeed`."""
    shell = f"cd {PROJECT} && {shlex.join(deepspeed(tmp_path, write_endless(tmp_path)))}"
    with training(machines[1], ["ssh", "-tt", "worker-0", shell], tmp_path):
        (ssh,) = [process for process in machines[1].processes() if process.cmdline()[:2] == ["ssh", "-tt"]]
        ssh.kill()
        wait_for_no_rank(machines)
    assert "outside the hostfile" not in printed(tmp_path)
    assert saved_step(tmp_path) == read_metrics(tmp_path, "train")[-1]["step"], "steps were lost"
    assert_resumes(machines[0], tmp_path)


def _is_deepspeed(process: psutil.Process) -> bool:
    return any(word.endswith("/deepspeed") for word in process.cmdline()[:3])


def test_the_first_machine_is_gone(machines: Machines, tmp_path: Path) -> None:
    """Its power fails: no connection is closed. The rank of the other machine cannot save without it, and ends."""
    words = [*write_endless(tmp_path), "--stuck_after_minutes", "1"]
    with training(machines[0], deepspeed(tmp_path, words), tmp_path):
        machines[0].cut_link()
        machines[0].power_off()
        wait_for_no_rank(machines[1:])
    step = saved_step(tmp_path)
    resume = ["python", "deepspeed_train.py", *tiny_words(tmp_path), "--max_steps", str(step + 2)]
    assert run_to_end(machines[1], resume, tmp_path) == 0, printed(tmp_path)  # its lock is not in the way
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(1, step + 3))
