"""OpenBLAS: its products, whole and divided among the threads of torch, and when it may be used."""

import os
import subprocess
import sys
from collections.abc import Generator

import pytest
import torch

from nvidia.cpu import openblas, team
from tests.support import PROJECT

pytestmark = pytest.mark.skipif(not openblas.is_available(), reason="a numpy without OpenBLAS")


@pytest.fixture(autouse=True)
def threads() -> Generator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(team._fork() is None, reason="a torch without GNU's OpenMP")
@pytest.mark.parametrize("num_threads", [2, 3, 4])
@pytest.mark.parametrize("size", [(37, 5, 90), (200, 9, 3), (1, 7, 64), (64, 64, 64), (0, 3, 2), (5, 4, 3, 2)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_divided_product_is_that_of_torch(
    num_threads: int, size: tuple[int, ...], is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    *pairs, rows, inner, columns = size
    if is_transposed:
        a, b = torch.randn(*pairs, inner, rows).mT, torch.randn(*pairs, columns, inner).mT
    else:
        a, b = torch.randn(*pairs, rows, inner), torch.randn(*pairs, inner, columns)
    torch.set_num_threads(num_threads)
    monkeypatch.setattr(openblas, "_MIN_DIVIDED", 0)
    counts = []
    run = team.run
    monkeypatch.setattr(team, "run", lambda parts: (counts.append(len(parts)), run(parts)))
    wide = torch.full((*pairs, rows, columns + 3), -7.0)  # the output may be a part of a larger tensor
    product = openblas.multiply(a, b, wide[..., :columns])
    torch.testing.assert_close(product, a @ b)
    assert (wide[..., columns:] == -7.0).all()
    assert torch.equal(openblas.multiply(a, b), product)
    assert len(counts) == 2
    assert max(counts) <= num_threads
    assert (rows < 32 and not pairs) or min(counts) > 1


def test_it_needs_one_thread_or_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_fork", lambda: None)
    torch.set_num_threads(2)
    assert openblas.kernels() is None
    torch.set_num_threads(1)
    assert openblas.kernels() is not None
    monkeypatch.setattr(openblas, "_library", lambda: None)
    assert (openblas.kernels(), openblas.is_available()) == (None, False)


CHILD = """
import torch
from nvidia.cpu import openblas
torch.set_num_threads(2)
a = torch.ones(512, 512)
assert (openblas.multiply(a, a) == 512).all()
print(openblas._library().get_num_threads())
"""


def test_its_own_threads_are_off_from_the_first_product_on() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "1\n", "")
