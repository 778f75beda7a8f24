"""How a run ends: exit codes, and the signals that ask it to stop."""

import signal
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2
STUCK_EXIT_CODE = 71  # a rank made no progress; the system's EX_OSERR
STOPPED_EXIT_CODE = 75  # stopped on request with everything saved; the system's EX_TEMPFAIL
# From schedulers and launchers, from Ctrl-C, Slurm's early warning (--signal=USR1@120), and a terminal that was closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def handle_stop_signals(handler: Callable[[int, types.FrameType | None], object]) -> Generator[None]:
    """Have `handler` called for STOP_SIGNALS while entered; restore the previous handlers afterwards."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # which stays so
    numbers = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not is_nohup]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
