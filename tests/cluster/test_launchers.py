"""Every way to start a run on two machines trains as one machine with as many ranks does. docs/clusters.md."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.machines import PATHS, Machine
from tests.cluster.runs import deepspeed, documented, printed, run_everywhere, run_to_end, write_hostfile
from tests.distributed.test_ranks import TOLERANCE, losses, without_dropout
from tests.support import run_deepspeed, run_plain, tiny_words, write_project

NUM_STEPS = 4
Machines = tuple[Machine, Machine]
Expect = Callable[[int], list[float]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expect:
    """The losses of one machine, by number of ranks."""
    known: dict[int, list[float]] = {}

    def find(num_ranks: int) -> list[float]:
        if num_ranks not in known:
            folder = tmp_path_factory.mktemp("one_machine")
            outcome = run_deepspeed([*write_project(folder), "--max_steps", str(NUM_STEPS)], num_ranks)
            assert outcome.returncode == 0, outcome.stderr
            known[num_ranks] = losses(folder)
        return known[num_ranks]

    return find


def require(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name, path=PATHS) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def documented_deepspeed(folder: Path, slots: int, *options: str, part: str = "", **changes: str) -> list[str]:
    start = " ".join(["deepspeed --hostfile hostfile", *options])
    return documented(start, {"hostfile": write_hostfile(folder, slots), **changes}, part)


def start_pdsh(machines: Machines, folder: Path, words: Sequence[str], slots: int) -> list[int]:
    command = documented_deepspeed(folder, slots, "deepspeed_train.py", part="--data_path_prefix data")
    return [run_to_end(machines[0], [*command, *words], folder)]


def start_open_mpi(machines: Machines, folder: Path, words: Sequence[str], slots: int) -> list[int]:
    require("ompi_info", "mpirun.openmpi")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [*documented_deepspeed(folder, slots, "--launcher openmpi"), *words]
    return [run_to_end(machines[0], command, folder, **as_root, PATH=first_on_path(folder, "mpirun.openmpi"))]


def start_mpich(machines: Machines, folder: Path, words: Sequence[str], slots: int) -> list[int]:
    require("mpirun.mpich")
    command = [*documented_deepspeed(folder, slots, "--launcher mpich"), *words]
    return [run_to_end(machines[0], command, folder, PATH=first_on_path(folder, "mpirun.mpich"))]


def first_on_path(folder: Path, program: str) -> str:
    """Debian installs several MPIs side by side; `deepspeed` starts the one called mpirun."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "mpirun"
    script.write_text(f'#!/bin/sh\nexec {shutil.which(program, path=PATHS)} "$@"\n')
    script.chmod(0o755)
    return f"{folder / 'bin'}:{PATHS}"


def start_without_ssh(machines: Machines, folder: Path, words: Sequence[str], slots: int) -> list[int]:
    for machine in machines:
        machine.stop_sshd()
    places = [{"0": str(node)} for node in range(len(machines))]
    commands = [[*documented_deepspeed(folder, slots, "--no_ssh", **place), *words] for place in places]
    return run_everywhere(machines, commands, folder)


def start_torchrun(machines: Machines, folder: Path, words: Sequence[str], slots: int) -> list[int]:
    command = [*documented("torchrun --nnodes 2:4", {"2:4": "2", "8": str(slots)}), *words]
    return run_everywhere(machines, [command, command], folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


LAUNCHERS = {
    "pdsh": start_pdsh,
    "openmpi": start_open_mpi,
    "mpich": start_mpich,
    "no_ssh": start_without_ssh,
    "torchrun": start_torchrun,
}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_machines_train_as_one_does(
    launcher: str, slots: int, machines: Machines, expected: Expect, tmp_path: Path
) -> None:
    words = [*write_project(tmp_path), "--max_steps", str(NUM_STEPS)]
    codes = LAUNCHERS[launcher](machines, tmp_path, words, slots)
    assert set(codes) == {0}, printed(tmp_path)
    assert f"× {2 * slots} ranks" in printed(tmp_path)
    assert losses(tmp_path) == expected(2 * slots)


def test_open_mpi_without_an_address_is_refused(machines: Machines, tmp_path: Path) -> None:
    require("mpirun.openmpi")
    words = write_project(tmp_path)
    command = ["mpirun.openmpi", "--allow-run-as-root", "-hostfile", write_hostfile(tmp_path), "-n", "2"]
    assert run_to_end(machines[0], [*command, sys.executable, "deepspeed_train.py", *words], tmp_path) == 2
    assert "mpirun of Open MPI started this process, but MASTER_ADDR is not set" in printed(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_machines_one_two(stage: int, machines: Machines, tmp_path: Path) -> None:
    """A run resumes on one machine and on two again, as if it had always had the same."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        write_project(folder, zero_optimization={"stage": stage})
        without_dropout(folder)
    outcome = run_plain([*tiny_words(whole), "--max_steps", "6"])
    assert outcome.returncode == 0, outcome.stderr
    for last_step, is_on_two in ((2, True), (4, False), (6, True)):
        limited = [*tiny_words(parts), "--max_steps", str(last_step)]
        command = deepspeed(parts, limited) if is_on_two else ["python", "deepspeed_train.py", *limited]
        assert run_to_end(machines[0], command, parts) == 0, printed(parts)
    assert losses(parts) == pytest.approx(losses(whole), abs=TOLERANCE)
