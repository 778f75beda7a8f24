"""scripts/doctor.py --hostfile: one table of all machines within a minute, and the culprit named."""

import time
from pathlib import Path

from tests.cluster.machines import Machine
from tests.cluster.runs import printed, run_to_end, write_hostfile
from tests.support import write_project

Machines = tuple[Machine, Machine]


def doctor(folder: Path) -> list[str]:
    write_project(folder)
    (folder / "out").mkdir(exist_ok=True)
    places = ["--data_path_prefix", str(folder / "data"), "--output_dir", str(folder / "out")]
    return ["python", "scripts/doctor.py", "--hostfile", write_hostfile(folder), *places]


def test_two_machines_that_are_alike(machines: Machines, tmp_path: Path) -> None:
    command, began = doctor(tmp_path), time.monotonic()
    code = run_to_end(machines[0], command, tmp_path)
    text = printed(tmp_path)
    assert code == 0, text
    assert time.monotonic() - began < 60
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("worker-")}
    assert set(rows) == {"worker-0", "worker-1"}
    assert all("eth0" in row and "seen" in row for row in rows.values()), text
    assert "all-reduce over 2 ranks on 2 machines: latency" in text
    assert "no problems found" in text
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
