"""Which processes a rank must not outlive, by launcher."""

import os
from pathlib import Path

import pytest

from training.runtime import launchers
from training.runtime.launchers import Launcher

ME = 100
LAUNCH = ["/usr/bin/python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30=", "--master_port=29500"]
DEEPSPEED = ["/usr/bin/python", "/venv/bin/deepspeed", "--hostfile", "hosts"]
PDSH = ["pdsh", "-S", "-w", "worker-0", "export A=1;", *LAUNCH, "deepspeed_train.py"]
SSHD, SHELL = ["sshd: root@notty"], ["bash", "-c", "cd /; python"]

# Ancestors of a rank from its parent up, other processes of the machine (by pid: parent and command), and the links
# that are watched.
CASES = {
    "one machine": ([LAUNCH, DEEPSPEED, SHELL, SSHD], {}, [(100, 101), (101, 102)]),
    "pdsh, another machine": ([LAUNCH, SHELL, SSHD, SSHD], {}, [(100, 101), (101, 102), (102, 103)]),
    "pdsh, the machine of deepspeed": (
        [LAUNCH, SSHD, SSHD],
        {200: (201, PDSH), 201: (1, DEEPSPEED), 300: (301, [*PDSH[:5], "--world_info=other"]), 301: (1, DEEPSPEED)},
        [(100, 101), (101, 102), (200, 201)],
    ),
    "pdsh without deepspeed": ([LAUNCH, SSHD], {200: (1, PDSH)}, [(100, 101), (101, 102)]),
    "mpirun": ([["helper"], ["hydra_pmi_proxy"], ["mpiexec"], DEEPSPEED], {}, [(100 + i, 101 + i) for i in range(4)]),
    "mpirun, another machine": ([["orted"], SSHD], {}, [(100, 101)]),
    "torchrun": ([["python", "/venv/bin/torchrun"], SHELL, SSHD], {}, [(100, 101)]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_watches(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    above, others, expected = CASES[case]
    commands = {ME: ["python", "deepspeed_train.py"], **{ME + 1 + i: words for i, words in enumerate(above)}}
    parents = {process: process + 1 for process in commands} | {ME + len(above): 1}
    for process, (parent, words) in others.items():
        parents[process], commands[process] = parent, words
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "getpid", lambda: ME)
    monkeypatch.setattr(launchers, "_parent_of", lambda process: parents.get(process, 0))
    monkeypatch.setattr(launchers, "_words_of", lambda process: commands.get(process, [""]))
    for process in commands:
        (tmp_path / str(process)).touch()
    monkeypatch.setattr(launchers, "PROCESSES", tmp_path)
    launcher = Launcher()
    assert launcher.chain == expected
    assert launcher.sees_command == (case not in ("pdsh, another machine", "pdsh without deepspeed"))
    assert not launcher.is_gone()
    for child, parent in expected:
        parents[child] = 1
        assert launcher.is_gone()
        parents[child] = parent
