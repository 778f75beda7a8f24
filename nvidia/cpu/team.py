"""Work in parts on the threads that torch computes with: the team of GNU's OpenMP.

A library with threads of its own would have to share the cores with them: an idle thread of OpenMP keeps its core for
milliseconds. Parts are Python functions, so they must spend their time in calls that release Python's lock.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_thread = threading.local()


def run(parts: Sequence[Callable[[], object]]) -> None:
    """Call each part once, on as many threads as torch has, and return when all have ended.

    All of them even for fewer parts: a team of another size would need other threads. After an error no part is begun.
    """
    left, failures = iter(parts), list[BaseException]()
    if len(parts) > 1 and is_available():
        with _catch_lost(failures):
            _fork()(_FUNCTION(lambda _: _work_in_team(left, failures)), None, torch.get_num_threads(), 0)
    _work(left, failures)
    if failures:
        raise failures[0]


def _work(left: Iterator[Callable[[], object]], failures: list[BaseException]) -> None:
    """Take parts until none is left. A function that C calls must not raise."""
    try:
        for part in left:
            if failures:
                break
            part()
    except BaseException as error:
        failures.append(error)


def _work_in_team(left: Iterator[Callable[[], object]], failures: list[BaseException]) -> None:
    _thread.is_busy = True
    try:
        _work(left, failures)
    finally:
        _thread.is_busy = False


@contextmanager
def _catch_lost(failures: list[BaseException]) -> Iterator[None]:
    """Add what a signal handler raises in a function that C calls before or after its `try`: Python would drop it."""
    others = sys.unraisablehook

    def catch(lost: Any) -> None:
        if "ctypes callback" in str(lost.err_msg):
            failures.append(lost.exc_value)
        else:
            others(lost)

    sys.unraisablehook = catch
    try:
        yield
    finally:
        sys.unraisablehook = others


def is_available() -> bool:
    """Whether torch has several threads, and parts can run on them: not those of a part, whose team is busy."""
    return torch.get_num_threads() > 1 and not getattr(_thread, "is_busy", False) and _fork() is not None


@cache
def _fork() -> Any:
    """GNU's function for a parallel region; None if torch uses another OpenMP, or may use one that was loaded first."""
    found = ThreadpoolController().select(user_api="openmp").lib_controllers
    folder = Path(torch.__file__).parent
    torchs = [library for library in found if Path(library.filepath).is_relative_to(folder)] or found
    if len(torchs) != 1 or any(library.prefix != "libgomp" for library in found):
        return None
    function = ctypes.CDLL(torchs[0].filepath).GOMP_parallel
    function.argtypes, function.restype = [_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function
