"""What differs between machines, and which one is to blame."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from scripts import doctor_hosts
from scripts.doctor_hosts import read_hosts
from training.runtime.machine_check import (
    MISSING,
    MachineReport,
    digest_of_data,
    find_interface,
    find_problems,
    read_versions,
)

GOOD = MachineReport(
    host="worker-0",
    versions={"Python": "3.11.7", "torch": "2.13.0"},
    data="abc",
    sees_output=True,
    disk_gib=100.0,
    gpus="none",
    interface="eth0",
    address="10.0.0.1",
    clock=1000.0,
)
OTHER = replace(GOOD, host="worker-1", address="10.0.0.2", clock=1000.1)


def test_equal_machines_have_no_problems() -> None:
    assert find_problems([GOOD, OTHER]) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"versions": {"Python": "3.11.7", "torch": "2.12.0"}}, "torch 2.12.0, but worker-0 has 2.13.0"),
        ({"data": "xyz"}, "other data (xyz) than worker-0 (abc)"),
        ({"data": MISSING}, "no shards in --data_path_prefix"),
        ({"sees_output": False}, "does not see --output_dir of worker-0"),
        ({"disk_gib": 1.25}, "1.2 GiB free in --output_dir"),
        ({"gpus": "8 × H100, driver 1"}, "GPUs 8 × H100, driver 1, but worker-0 has none"),
        ({"address": "127.0.1.1"}, "its own name has the address 127.0.1.1, which no other reaches"),
        ({"clock": 4600.0}, "its clock is +3600 s from that of worker-0"),
    ],
)
def test_the_machine_that_differs_is_named(change: dict[str, Any], problem: str) -> None:
    ((text, remedy),) = find_problems([GOOD, replace(OTHER, **change)])
    assert text == f"worker-1: {problem}"
    assert remedy


def test_digest_of_data_changes_with_shards_and_manifest(tmp_path: Path) -> None:
    assert digest_of_data(tmp_path) is None
    (tmp_path / "a.hdf5").write_bytes(b"12")
    first = digest_of_data(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    second = digest_of_data(tmp_path)
    (tmp_path / "a.hdf5").write_bytes(b"123")
    assert len({first, second, digest_of_data(tmp_path)}) == 3
    assert read_versions().keys() == {"Python", "torch", "deepspeed", "project"}


def test_interface_and_hostfile(tmp_path: Path) -> None:
    assert find_interface("127.0.0.1", 29500) == "lo"
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# machines\nworker-0 slots=8\n\nworker-1 slots=8 # new\n")
    assert read_hosts(hostfile) == ["worker-0", "worker-1"]
    hostfile.write_text("# none\n")
    with pytest.raises(UserError, match="no hosts; expected lines like `worker-0 slots=8`"):
        read_hosts(hostfile)


class HangingSsh:
    """In the place of Popen: worker-1 never answers, worker-0 does at once."""

    returncode = 0

    def __init__(self, words: list[str], **_: object) -> None:
        self.host, self.is_killed = words[-2], False

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self.host == "worker-1" and not self.is_killed:
            raise subprocess.TimeoutExpired("ssh", timeout or 0)
        assert self.is_killed or (timeout or 0) > 10, "time enough for the others"
        return "the table", ""

    def kill(self) -> None:
        self.is_killed = True


def test_a_host_that_hangs_is_named_and_the_others_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_hosts.subprocess, "Popen", HangingSsh)
    assert doctor_hosts.check_hosts(["worker-0", "worker-1"], 29500, []) == 1
    assert capsys.readouterr().out == "the table\n! worker-1: no result within 15 s\n"
