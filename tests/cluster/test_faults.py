"""What goes wrong between machines: all ranks end in time, one message names the machine, the same command resumes."""

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from common.processes import STUCK_EXIT_CODE, USER_ERROR_EXIT_CODE
from tests.cluster.machines import LAST_RESORT, Machine, started, wait_until
from tests.cluster.runs import deepspeed, printed, run_to_end, saved_step, training, wait_for_no_rank
from tests.distributed.test_ranks import losses
from tests.integration.test_launcher_ends import checkpoints, write_endless
from tests.support import read_metrics, run_deepspeed, tiny_words, write_project
from training.checkpoints.paths import STAGING

Machines = tuple[Machine, Machine]
STUCK = ["--stuck_after_minutes", "1"]
# Seconds that docs/clusters.md gives: until a lost connection is noticed, and until a lost machine is, with STUCK.
NOTICED, SILENT = 2.0, 30.0
# The highest code of all machines is that of `deepspeed`.
SSH_FAILED = 255
KILLED = 256 - signal.SIGKILL


def assert_resumes(machine: Machine, folder: Path, **env: str) -> None:
    step = saved_step(folder)
    command = deepspeed(folder, [*tiny_words(folder), "--max_steps", str(step + 2)])
    assert run_to_end(machine, command, folder, **env) == 0, printed(folder)
    assert [row["step"] for row in read_metrics(folder, "train")] == list(range(1, step + 3))


def test_a_killed_rank_ends_the_others(machines: Machines, tmp_path: Path) -> None:
    with training(machines[0], deepspeed(tmp_path, write_endless(tmp_path)), tmp_path) as process:
        machines[1].ranks()[0].kill()
        wait_for_no_rank(machines, NOTICED)
        assert process.wait(LAST_RESORT) == KILLED
    assert "the connection to another rank on worker-1 broke" in printed(tmp_path)
    assert "worker-0: ssh exited with exit code 1" in printed(tmp_path), "of the rank that lost it"
    assert_resumes(machines[0], tmp_path)


def suspend_in_a_save(machine: Machine, folder: Path) -> psutil.Process:
    """The only rank of a machine, suspended while a checkpoint is being written."""
    (rank,) = machine.ranks()

    def is_saving() -> bool:
        rank.suspend()
        if (checkpoints(folder).folder / STAGING).exists():
            return True
        rank.resume()
        return False

    wait_until(is_saving, "a save")
    return rank


@pytest.mark.parametrize("moment", ["steps", "a save"])
def test_a_cut_link(moment: str, machines: Machines, tmp_path: Path) -> None:
    words = [*write_endless(tmp_path), *STUCK, "--save_every_steps", "1" if moment == "a save" else "5"]
    with training(machines[0], deepspeed(tmp_path, words), tmp_path) as process, ExitStack() as stack:
        if moment == "a save":
            stack.callback(suspend_in_a_save(machines[0], tmp_path).resume)
        machines[1].cut_link()
        stack.close()
        wait_for_no_rank(machines, SILENT, with_launchers=False)
        machines[1].mend_link()  # until then ssh waits
        assert process.wait(LAST_RESORT) == STUCK_EXIT_CODE, printed(tmp_path)
    for machine in machines:
        assert f"error: no sign of life from {machine.name} for {SILENT:.0f} s" in printed(tmp_path)
        assert f"{machine.name}: ssh exited with exit code {STUCK_EXIT_CODE}" in printed(tmp_path)
    assert_resumes(machines[0], tmp_path)


def test_a_machine_without_ssh_at_a_restart(machines: Machines, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "4"]
    assert run_to_end(machines[0], deepspeed(tmp_path, [*words[:-1], "2"]), tmp_path) == 0, printed(tmp_path)
    machines[1].stop_sshd()
    settings = tmp_path / "deepspeed_env"
    settings.write_text("DEEPSPEED_TIMEOUT=1\n")  # minutes
    assert run_to_end(machines[0], deepspeed(tmp_path, words), tmp_path, DS_ENV_FILE=str(settings)) == SSH_FAILED
    assert "ssh exited with exit code 71" in printed(tmp_path), "of the rank that waited"
    assert "connect to host worker-1 port 22: Connection refused" in printed(tmp_path)
    assert (
        "1 of the 2 ranks did not join at 10.77.0.1:29500 within 60 s: rank 1. The others run on worker-0"
        in printed(tmp_path)
    )
    machines[1].start_sshd()
    assert run_to_end(machines[0], deepspeed(tmp_path, words), tmp_path) == 0, printed(tmp_path)
    assert len(losses(tmp_path)) == 4


@pytest.mark.parametrize("folder", ["data", "out"])
def test_a_machine_that_does_not_see_a_folder(folder: str, machines: Machines, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "4"]
    (tmp_path / folder).mkdir(exist_ok=True)
    machines[1].run("mount", "-t", "tmpfs", "tmpfs", str(tmp_path / folder))
    assert run_to_end(machines[0], deepspeed(tmp_path, words), tmp_path) == USER_ERROR_EXIT_CODE, printed(tmp_path)
    text = printed(tmp_path)
    assert text.count("error: ") == 1, text
    message = "error: worker-1 (rank 1): " if folder == "data" else "worker-1 cannot see what worker-0 (rank 0) writes"
    assert message in text
    machines[1].run("umount", str(tmp_path / folder))
    assert run_to_end(machines[0], deepspeed(tmp_path, words), tmp_path) == 0, printed(tmp_path)


def test_a_machine_with_other_data(machines: Machines, tmp_path: Path) -> None:
    """The same names, but other files: each rank would train on its own."""
    words = [*write_project(tmp_path), "--max_steps", "4"]
    write_project(tmp_path / "other")
    (tmp_path / "other" / "data" / "wiki_training_0.hdf5").unlink()
    machines[1].run("mount", "--bind", str(tmp_path / "other" / "data"), str(tmp_path / "data"))
    assert run_to_end(machines[0], deepspeed(tmp_path, words), tmp_path) == USER_ERROR_EXIT_CODE, printed(tmp_path)
    assert "error: worker-1: its training data is " in printed(tmp_path)


def test_a_wrong_address(machines: Machines, tmp_path: Path) -> None:
    """Nobody answers at MASTER_ADDR: both machines give up after DEEPSPEED_TIMEOUT."""
    settings = tmp_path / "deepspeed_env"
    settings.write_text("DEEPSPEED_TIMEOUT=1\n")
    command = deepspeed(tmp_path, write_project(tmp_path), "--master_addr", "10.77.0.9")
    assert run_to_end(machines[0], command, tmp_path, DS_ENV_FILE=str(settings)) == STUCK_EXIT_CODE
    text = printed(tmp_path)
    assert text.count("error: ") == len(machines)
    assert "MASTER_PORT: worker-0 (rank 0) cannot reach 10.77.0.9:29500; expected an address of the machine" in text
    assert "rank 0 did not join at 10.77.0.9:29500 (MASTER_ADDR and MASTER_PORT) within 60 s" in text
    assert f"ssh exited with exit code {USER_ERROR_EXIT_CODE}" in text, "of rank 0, which finds that it is a mistake"
    assert not any(machine.ranks() for machine in machines)


def test_a_port_in_use(machines: Machines, tmp_path: Path) -> None:
    """Another program answers where rank 0 would: it says so at once, the others give up after DEEPSPEED_TIMEOUT."""
    settings = tmp_path / "deepspeed_env"
    settings.write_text("DEEPSPEED_TIMEOUT=1\n")
    words = [*write_project(tmp_path), "--max_steps", "2"]
    with started(machines[0], [sys.executable, "-m", "http.server", "29500"], tmp_path / "server.txt"):
        wait_until(lambda: ":29500" in machines[0].run("ss", "-ltn"), "a server")
        code = run_to_end(machines[0], deepspeed(tmp_path, words), tmp_path, DS_ENV_FILE=str(settings))
    assert code == STUCK_EXIT_CODE, printed(tmp_path)
    assert "10.77.0.1:29500 is in use. Choose another free port" in printed(tmp_path)
    assert f"worker-0: ssh exited with exit code {USER_ERROR_EXIT_CODE}" in printed(tmp_path)
    assert not any(machine.ranks() for machine in machines)
    command = deepspeed(tmp_path, words, "--master_port", "29501")
    assert run_to_end(machines[0], command, tmp_path) == 0, printed(tmp_path)


def test_clocks_that_differ_by_an_hour(machines: Machines, tmp_path: Path) -> None:
    machines[1].shift_clock(-3600)
    ask = [sys.executable, "-c", "import time; print(time.time())"]
    assert float(machines[0].run(*ask)) - float(machines[1].run(*ask)) > 3000
    whole = tmp_path / "whole"
    whole.mkdir()
    limits = ["--max_steps", "6", "--save_every_steps", "2"]
    assert run_deepspeed([*write_project(whole), *limits], 2).returncode == 0
    command = deepspeed(tmp_path, [*write_project(tmp_path), *limits])
    assert run_to_end(machines[0], command, tmp_path) == 0, printed(tmp_path)
    assert losses(tmp_path) == losses(whole)
