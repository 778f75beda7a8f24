"""The team: parts run once each, at the same time, on the threads of torch, and their errors reach the caller."""

import gc
import signal
import sys
import threading
import time
from collections.abc import Generator
from types import SimpleNamespace

import pytest
import torch

from nvidia.cpu import team


@pytest.fixture(autouse=True)
def threads() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


needs_team = pytest.mark.skipif(team._fork() is None, reason="a torch without GNU's OpenMP")


@needs_team
def test_parts_run_at_the_same_time_on_two_threads() -> None:
    meeting, idents = threading.Barrier(2, timeout=60), []

    def meet() -> None:
        idents.append(threading.get_ident())
        meeting.wait()

    team.run([meet, meet])
    assert len(set(idents)) == 2
    assert threading.get_ident() in idents


@needs_team
def test_the_parts_of_a_part_run_on_its_thread() -> None:
    idents: list[tuple[int, int]] = []

    def start_others() -> None:
        assert not team.is_available()
        outer = threading.get_ident()
        team.run([lambda: idents.append((outer, threading.get_ident()))] * 3)
        assert not team.is_available()

    team.run([start_others, start_others])
    assert len(idents) == 6
    assert all(outer == inner for outer, inner in idents)
    assert team.is_available()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_each_part_runs_once(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    calls: list[int] = []
    team.run([lambda number=number: calls.append(number) for number in range(7)])
    assert sorted(calls) == list(range(7))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_any_part_is_raised(error: type[BaseException]) -> None:
    calls: list[int] = []

    def fail() -> None:
        raise error

    with pytest.raises(error):
        team.run([fail, lambda: calls.append(1), fail, lambda: calls.append(2)])
    assert set(calls) <= {1, 2}
    team.run([lambda: calls.append(3), lambda: calls.append(4)])  # the team still works
    assert {3, 4} <= set(calls)


class Stopped(Exception):
    pass


@needs_team
def test_what_a_signal_handler_raises_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may raise where C has just called Python, which drops the exception."""

    def stop(*_: object) -> None:
        raise Stopped

    def run_until_stopped(delay: float) -> None:
        deadline = time.monotonic() + 5
        signal.setitimer(signal.ITIMER_REAL, delay)
        while time.monotonic() < deadline:
            team.run([lambda: None] * 4)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's would fail the test with a traceback
    before = signal.signal(signal.SIGALRM, stop)
    gc.disable()  # hypothesis has a function that it calls, where Python drops exceptions, too
    try:
        for number in range(200):
            with pytest.raises(Stopped):
                run_until_stopped(1e-4 + number * 1e-6)
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert team.is_available()


@pytest.mark.parametrize(
    ("libraries", "is_known"),
    [
        ([("libgomp", "torch/lib")], True),
        ([("libgomp", "elsewhere")], True),  # a distribution's torch
        ([("libgomp", "torch/lib"), ("libgomp", "sklearn")], True),
        ([("libiomp", "torch/lib"), ("libgomp", "sklearn")], False),
        ([("libgomp", "torch/lib"), ("libiomp", "preloaded")], False),  # which takes torch's calls
        ([("libgomp", "elsewhere"), ("libgomp", "sklearn")], False),  # either may be torch's
        ([("libomp", "elsewhere")], False),
        ([], False),
    ],
)
def test_only_the_openmp_that_torch_uses_is_used(
    libraries: list[tuple[str, str]], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers = [
        SimpleNamespace(prefix=prefix, filepath=f"/site/{folder}/{prefix}.so") for prefix, folder in libraries
    ]
    found = SimpleNamespace(lib_controllers=controllers)
    monkeypatch.setattr(team, "ThreadpoolController", lambda: SimpleNamespace(select=lambda **_: found))
    monkeypatch.setattr(torch, "__file__", "/site/torch/__init__.py")
    monkeypatch.setattr(team.ctypes, "CDLL", lambda path: SimpleNamespace(GOMP_parallel=SimpleNamespace(path=path)))
    team._fork.cache_clear()
    try:
        assert team.is_available() == is_known
        torch.set_num_threads(1)
        assert not team.is_available()
    finally:
        team._fork.cache_clear()
