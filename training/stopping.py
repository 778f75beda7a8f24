"""Requests to stop: a signal, or a launcher that has gone. All ranks agree on the step, save and leave.

SIGTERM is what schedulers and the launcher send, SIGINT is Ctrl-C, SIGUSR1 is Slurm's early warning
(`--signal=USR1@120`). A second Ctrl-C does not wait.
"""

import os
import signal
import types
from pathlib import Path

from common.processes import STOP_SIGNALS, is_launcher
from training import distributed


class StopRequests:
    """Notes requests to this process while entered; `is_agreed()` asks all ranks, who must call it together."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.agreed = False
        self._before: dict[signal.Signals, signal.Handlers | int | types.FrameType | object | None] = {}

    def __enter__(self) -> "StopRequests":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def is_agreed(self) -> bool:
        """Whether any rank was asked to stop. The same answer on all."""
        self.agreed = self.agreed or distributed.any_rank(self.reason is not None)[0]
        return self.agreed


class Launcher:
    """The DeepSpeed launcher above this process, if there is one: it dies without telling its ranks."""

    def __init__(self) -> None:
        parent = os.getppid()
        self.chain = [(os.getpid(), parent)] if _is_launcher(parent) else []
        if self.chain and _is_launcher(grandparent := _parent_of(parent)):
            self.chain.append((parent, grandparent))

    def is_gone(self) -> bool:
        return any(_parent_of(child) != parent for child, parent in self.chain)


def _parent_of(process: int) -> int:
    try:
        # After the command's name, which is in parentheses and may hold anything: state, then the parent.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_launcher(process: int) -> bool:
    try:
        return is_launcher(Path(f"/proc/{process}/cmdline").read_text().split("\0"))
    except (OSError, ValueError):
        return False
