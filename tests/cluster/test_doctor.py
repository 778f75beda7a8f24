"""scripts/doctor.py: one table of all machines within a minute, and the culprit named; what every start compares."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, started, wait_until
from tests.cluster.runs import documented, printed, run_everywhere, run_to_end, write_hostfile
from tests.cluster.slurm import Slurm
from tests.cluster.test_launchers import first_on_path, require
from tests.support import write_project

Machines = tuple[Machine, Machine]


def doctor(folder: Path, start: str = "python scripts/doctor.py --hostfile", slots: int = 1) -> list[str]:
    """The command of docs/clusters.md that starts so, for data and output below `folder`."""
    write_project(folder)
    (folder / "out").mkdir(exist_ok=True)
    changes = {"data": str(folder / "data"), "outputs": str(folder / "out")}
    if "srun" not in start and "torchrun" not in start:
        changes["hostfile"] = write_hostfile(folder, slots)
    return [*documented(start, changes), "--timeout", "300"]  # on a busy machine the imports alone can take a minute


def under_hostfile(machines: Machines, folder: Path) -> list[int]:
    return [run_to_end(machines[0], doctor(folder), folder)]


def under_torchrun(machines: Machines, folder: Path) -> list[int]:
    command = doctor(folder, "torchrun --nnodes 2 --nproc_per_node 1")
    return run_everywhere(machines, [command, command], folder)


def under_srun(machines: Machines, folder: Path) -> list[int]:
    slurm = Slurm(machines, folder / "slurm")
    command = slurm.command(*doctor(folder, "MASTER_ADDR=worker-0 MASTER_PORT=29500 srun"))
    return [run_to_end(machines[0], command, folder)]


def under_mpirun(machines: Machines, folder: Path) -> list[int]:
    require("mpirun.openmpi")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = doctor(folder, "mpirun --hostfile", slots=2)
    return [run_to_end(machines[0], command, folder, **as_root, PATH=first_on_path(folder, "mpirun.openmpi"))]


@pytest.mark.parametrize("start", [under_hostfile, under_torchrun, under_srun, under_mpirun])
def test_two_machines_that_are_alike(
    start: Callable[[Machines, Path], list[int]], machines: Machines, tmp_path: Path
) -> None:
    codes = start(machines, tmp_path)
    text = printed(tmp_path)
    assert set(codes) == {0}, text
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("worker-")}
    assert set(rows) == {"worker-0", "worker-1"}
    assert all("eth0" in row and "seen" in row for row in rows.values()), text
    assert text.count("all-reduce over 2 ranks on 2 machines: latency") == 1
    assert text.count("no problems found") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_every_culprit_is_named(machines: Machines, tmp_path: Path) -> None:
    command = doctor(tmp_path)
    for folder in ("data", "out"):
        machines[1].run("mount", "-t", "tmpfs", "tmpfs", str(tmp_path / folder))
    machines[1].shift_clock(-3600)
    assert run_to_end(machines[0], command, tmp_path) == 1
    text = printed(tmp_path)
    assert "! worker-1: no shards in --data_path_prefix" in text
    assert "! worker-1: does not see --output_dir of worker-0" in text
    assert "! worker-1: its clock is -3600 s" in text
    assert "! worker-0" not in text


def test_a_machine_that_cannot_be_reached(machines: Machines, tmp_path: Path) -> None:
    command = doctor(tmp_path)
    machines[1].stop_sshd()
    assert run_to_end(machines[0], command, tmp_path) == 1
    assert "! worker-1: ssh: connect to host worker-1 port 22: Connection refused" in printed(tmp_path)


def test_a_port_in_use(machines: Machines, tmp_path: Path) -> None:
    command = doctor(tmp_path)
    with started(machines[0], [sys.executable, "-m", "http.server", "29500"], tmp_path / "server.txt"):
        wait_until(lambda: ":29500" in machines[0].run("ss", "-ltn"), "a server")
        assert run_to_end(machines[0], [*command, "--timeout", "120"], tmp_path) == 1  # the other waits for most of it
    assert "! worker-0: " in printed(tmp_path)
    assert "worker-0:29500 is in use. Choose another free port" in printed(tmp_path)
    assert run_to_end(machines[0], [*command, "--master_port", "29501"], tmp_path) == 0, printed(tmp_path)


def test_a_start_compares_machines_in_less_than_two_seconds(machines: Machines, tmp_path: Path) -> None:
    write_project(tmp_path)
    place = ["MASTER_ADDR=worker-0", "MASTER_PORT=29500", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_SIZE=1"]
    check = [sys.executable, "-m", "tests.cluster.start_check", str(tmp_path)]
    commands = [["env", f"RANK={rank}", *place, *check] for rank in range(2)]
    assert run_everywhere(machines, commands, tmp_path) == [0, 0], printed(tmp_path)
    facts = "compared Python, torch, deepspeed, project, training data of worker-0 and worker-1"
    seconds = re.findall(rf"{facts} in ([\d.]+) s", printed(tmp_path))
    assert len(seconds) == 2, printed(tmp_path)
    assert max(map(float, seconds)) < 2
