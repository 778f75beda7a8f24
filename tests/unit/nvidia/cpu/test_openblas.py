"""OpenBLAS: when its threads may be used beside those of torch, and what a process sets before both are imported."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from types import SimpleNamespace

import pytest
import torch

from nvidia.cpu import openblas
from nvidia.cpu.openblas import SPIN_COUNT
from nvidia.cpu.startup import prepare_libraries
from tests.support import PROJECT

pytestmark = pytest.mark.skipif(not openblas.is_available(), reason="a numpy without OpenBLAS")


@pytest.fixture(autouse=True)
def threads() -> Generator[None]:
    before = torch.get_num_threads(), openblas.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    openblas.set_num_threads(before[1])


@pytest.mark.parametrize(
    ("num_threads", "spins", "policy", "openmp", "is_usable"),
    [
        (1, "", "", "libiomp", True),
        (2, "", "", "libgomp", False),
        (2, "1000", "", "libgomp", True),
        (2, "300000", "", "libgomp", False),
        (2, "infinity", "", "libgomp", False),
        (2, "", "PASSIVE", "libgomp", True),
        (2, "1000", "", "libiomp", False),
    ],
)
def test_its_threads_need_cores_that_idle_threads_of_torch_leave(
    num_threads: int, spins: str, policy: str, openmp: str, is_usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(num_threads)
    monkeypatch.setenv(SPIN_COUNT, spins)
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    found = SimpleNamespace(lib_controllers=[SimpleNamespace(prefix=openmp)])
    monkeypatch.setattr(openblas, "ThreadpoolController", lambda: SimpleNamespace(select=lambda **_: found))
    openblas._is_gnu.cache_clear()
    try:
        assert (openblas.kernels() is not None) == is_usable
    finally:
        openblas._is_gnu.cache_clear()


def test_without_openblas_nothing_is_used_or_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "_library", lambda: None)
    openblas.set_num_threads(3)
    assert (openblas.kernels(), openblas.get_num_threads(), openblas.is_available()) == (None, 1, False)


def test_nothing_is_set_once_the_libraries_are_imported() -> None:
    environment: dict[str, str] = {}
    assert prepare_libraries(environment) == environment == {}


CHILD = """
import json
from nvidia.cpu.startup import prepare_libraries
added = prepare_libraries()
import torch
from nvidia.cpu import openblas
before = openblas.get_num_threads()
torch.set_num_threads(2)
openblas.set_num_threads(torch.get_num_threads())
print(json.dumps([added, before, openblas.get_num_threads(), openblas.kernels() is not None]))
"""


@pytest.mark.parametrize("own", [{}, {"OPENBLAS_THREAD_TIMEOUT": "20", SPIN_COUNT: "1000"}])
def test_a_process_prepares_its_libraries_and_keeps_what_the_user_has_set(own: dict[str, str]) -> None:
    names = ("OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT")
    unset = (*names, SPIN_COUNT, "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | own
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    added, before, after, is_usable = json.loads(child.stdout)
    assert set(added) == set(names) - set(own)
    assert (before, after) == (1, min(2, os.cpu_count() or 1))
    assert is_usable == (SPIN_COUNT in own)
