"""The machines of the tests themselves: they reach only each other, can be made twice, and leave nothing behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.machines import Machine, find_missing, started, two_machines, wait_until
from tests.cluster.runs import find_words
from tests.support import PROJECT

PROGRAM = """\
import sys, time
from pathlib import Path
from tests.cluster.machines import started, two_machines, wait_until
from tests.cluster.test_machines import is_sleeping
folder = Path(sys.argv[1])
with two_machines(folder) as machines, started(machines[0], ["sleep", "3600"], folder / "sleep.txt"):
    wait_until(lambda: is_sleeping(machines[0]), "a process")
    print(*(process.pid for machine in machines for process in (machine.init, *machine.processes())), flush=True)
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    missing = find_missing()
    if missing is not None:
        pytest.skip(missing)


def interfaces() -> list[str]:
    return sorted(psutil.net_if_addrs())


@pytest.mark.parametrize("time", ["first", "second"])
def test_machines_reach_only_each_other(time: str, tmp_path: Path) -> None:
    before = interfaces()
    with two_machines(tmp_path) as machines, started(machines[1], ["sleep", "3600"], tmp_path / "sleep.txt"):
        assert machines[0].run("ssh", "worker-1", "hostname") == "worker-1\n"
        for machine in machines:
            routes = machine.run("ip", "route").splitlines()
            assert [route.split()[:3] for route in routes] == [["10.77.0.0/24", "dev", "eth0"]], "no way out"
        wait_until(lambda: is_sleeping(machines[1]), "a process")
        left = [process for machine in machines for process in (machine.init, *machine.processes())]
    assert len(left) >= 5
    wait_until(lambda: not any(is_alive(process) for process in left), "the end of all processes")
    assert interfaces() == before


def is_sleeping(machine: Machine) -> bool:
    return any(find_words(process)[:1] == ["sleep"] for process in machine.processes())


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_killed_tests_leave_nothing_behind(tmp_path: Path) -> None:
    before = interfaces()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(left) >= 5
    wait_until(lambda: not any(is_alive(each) for each in left), "the end of all processes")
    assert interfaces() == before
