"""Stop requests: a signal, or a launcher that has ended. All ranks agree on the step, save and exit.

SIGTERM is what schedulers and launchers send, SIGINT is Ctrl-C, SIGUSR1 is Slurm's early warning
(`--signal=USR1@120`), SIGHUP a closed terminal. A second Ctrl-C ends the process at once.
"""

import signal
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager

from common.console import console
from common.processes import handle_stop_signals
from training.runtime import collectives
from training.runtime.starting import start


class StopRequests:
    """Records stop requests to this process while `receiving()`; `all_ranks_agreed()` exchanges them between ranks."""

    def __init__(self, interrupt: Callable[[], None] | None = None) -> None:
        """`interrupt` is called with a request, possibly in a signal handler: it ends what may wait for long."""
        self._interrupt = interrupt
        self.reason: str | None = None
        self.agreed = False

    @contextmanager
    def receiving(self) -> Generator[None]:
        with handle_stop_signals(self._note):
            start.hand_over(self.request)
            yield

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self._interrupt is not None:
            self._interrupt()

    def all_ranks_agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all ranks."""
        return self.agreed or self.all_ranks_agree(False)[0]

    def all_ranks_agree(self, flag: bool) -> tuple[bool, bool]:
        """all_ranks_agreed(), and in the same exchange whether `flag` is true on any rank."""
        is_asked, is_flagged = collectives.all_ranks_any(self.reason is not None, flag)
        self.agreed = self.agreed or is_asked
        return self.agreed, is_flagged


def all_ranks_warn_if_unwatched() -> None:
    """Warn if the `deepspeed` command runs where no rank can see that it ends."""
    if not collectives.all_ranks_any(start.launcher is None or start.launcher.sees_command)[0]:
        console.warn(
            "`deepspeed` was started on a machine outside the hostfile, where no rank can see it: if it alone is "
            "killed, the ranks train on. Start it on a machine of the hostfile, for example with `ssh -tt HOST`"
        )
