"""Requests to stop: a signal, or a launcher that has gone. All ranks agree on the step, save and leave.

SIGTERM is what schedulers and the launcher send, SIGINT is Ctrl-C, SIGUSR1 is Slurm's early warning
(`--signal=USR1@120`). A second Ctrl-C does not wait.
"""

import signal
import types

from common.processes import STOP_SIGNALS
from common.starting import start
from training.runtime import collectives


class StopRequests:
    """Notes requests to this process while entered; `all_ranks_agreed()` asks all ranks, who must call it together."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.agreed = False
        self._before: dict[signal.Signals, signal.Handlers | int | types.FrameType | object | None] = {}

    def __enter__(self) -> "StopRequests":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        start.hand_over()
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

    def all_ranks_agreed(self) -> bool:
        """Whether any rank was asked to stop. The same answer on all."""
        return self.agreed or self.all_ranks_agree(False)[0]

    def all_ranks_agree(self, flag: bool) -> tuple[bool, bool]:
        """all_ranks_agreed(), and in the same exchange whether `flag` holds on any rank."""
        is_asked, is_flagged = collectives.all_ranks_any(self.reason is not None, flag)
        self.agreed = self.agreed or is_asked
        return self.agreed, is_flagged
