"""Slurm: sbatch scripts/slurm.sh trains as one machine does, and a job that must end early continues by itself."""

import re
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, wait_until
from tests.cluster.runs import checkpoints, documented, newest_step, run_to_end, saved_step, wait_for_no_rank
from tests.cluster.slurm import CPUS, Slurm
from tests.cluster.test_faults import NOTICED
from tests.distributed.test_ranks import losses
from tests.integration.test_launcher_ends import write_endless
from tests.support import run_deepspeed, write_project

Machines = tuple[Machine, Machine]
NO_GPUS = ["--gpus-per-node=0", "--cpus-per-task=1"]


@pytest.fixture
def slurm(machines: Machines, tmp_path: Path) -> Slurm:
    return Slurm(machines, tmp_path / "slurm")


def submit(slurm: Slurm, folder: Path, words: list[str], *options: str, ranks: int = 1) -> int:
    """The job of scripts/slurm.sh, with options for machines without GPUs."""
    sizes = ["--nodes=2", f"--ntasks-per-node={ranks}", *NO_GPUS, "--open-mode=append", f"--output={folder}/job.txt"]
    script = documented("sbatch scripts/slurm.sh", {})[2]
    return slurm.submit(*sizes, *options, script, *words)


def wait_for_checkpoint(slurm: Slurm, job: int, folder: Path) -> None:
    slurm.wait_for(job, "RUNNING")
    wait_until(lambda: checkpoints(folder).tags() or slurm.show(job, "JobState") != "RUNNING", "a checkpoint")
    assert slurm.show(job, "JobState") == "RUNNING", (folder / "job.txt").read_text() + slurm.logs()


def read_output(folder: Path) -> str:
    return (folder / "job.txt").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_early_signal_costs_nothing(ranks: int, slurm: Slurm, machines: Machines, tmp_path: Path) -> None:
    """Saved with 75 and requeued by the script; cancelled, submitted again, and the losses of an undisturbed run."""
    words = write_endless(tmp_path)
    job = submit(slurm, tmp_path, words, ranks=ranks)
    wait_for_checkpoint(slurm, job, tmp_path)
    slurm.ask("scancel", "--signal=USR1", str(job))
    wait_until(lambda: slurm.show(job, "Restarts") == "1", "a restart")
    wait_for_progress(tmp_path, "SIGUSR1")
    cancel(slurm, job, machines, tmp_path)
    last_step = saved_step(tmp_path) + 3
    ended = submit(slurm, tmp_path, [*words, "--max_steps", str(last_step)], ranks=ranks)
    assert slurm.wait_for(ended, "COMPLETED", "FAILED") == "COMPLETED", read_output(tmp_path)
    assert f"× {2 * ranks} ranks" in read_output(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    outcome = run_deepspeed([*write_endless(whole), "--max_steps", str(last_step)], 2 * ranks)
    assert outcome.returncode == 0, outcome.stderr
    assert losses(tmp_path) == losses(whole)


def wait_for_progress(folder: Path, reason: str) -> None:
    """Until there is a checkpoint after that of the step at which the first start was stopped."""
    (step,) = re.findall(rf"stopped at step (\d+) \({reason}\)", read_output(folder))
    wait_until(lambda: newest_step(folder) > int(step), "a checkpoint of the second start")


def cancel(slurm: Slurm, job: int, machines: Machines, folder: Path) -> None:
    """scancel sends SIGTERM, waits for KillWait seconds, and ends the job for good."""
    slurm.ask("scancel", str(job))
    wait_for_no_rank(machines, NOTICED)
    assert slurm.wait_for(job, "CANCELLED", "COMPLETED", "PENDING") == "CANCELLED"
    assert f"stopped at step {saved_step(folder)} (SIGTERM)" in read_output(folder)


def test_the_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm sends the signal itself, some time before the limit. The limit is set when there is something to save."""
    job = submit(slurm, tmp_path, write_endless(tmp_path), "--time=60", "--signal=USR1@60")
    wait_for_checkpoint(slurm, job, tmp_path)
    hours, minutes, _ = slurm.show(job, "RunTime").split(":")
    slurm.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")
    wait_until(lambda: slurm.show(job, "Restarts") == "1", "a restart")
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_for_progress(tmp_path, "SIGUSR1")


def test_a_preempted_job_continues_afterwards(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, write_endless(tmp_path))
    wait_for_checkpoint(slurm, job, tmp_path)
    urgent = slurm.submit(
        *("--partition=urgent", "--nodes=2", f"--ntasks-per-node={CPUS}", "--output=/dev/null", "--wrap=sleep 5")
    )
    slurm.wait_for(urgent, "COMPLETED")
    wait_for_progress(tmp_path, "SIGTERM")


def test_srun_without_an_address_is_refused(slurm: Slurm, machines: Machines, tmp_path: Path) -> None:
    words = write_project(tmp_path)
    command = slurm.command("srun", "--nodes=2", "--ntasks-per-node=1", "python", "deepspeed_train.py", *words)
    assert run_to_end(machines[0], command, tmp_path) == 2
    text = (tmp_path / "output.txt").read_text()
    assert "srun started this process, but MASTER_ADDR is not set" in text
    assert not (tmp_path / "out").exists()
