"""A process before its first step: a stop request ends it at once, because there is nothing to save.

Importing takes seconds and joining the other ranks may take minutes, inside calls during which Python runs no signal
handlers. So a thread receives the signals through a pipe (signal.set_wakeup_fd). It also watches the launcher.
"""

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NoReturn

from common.processes import STOP_SIGNALS, STOPPED_EXIT_CODE, handle_stop_signals
from training.runtime.launchers import Launcher, given_rank

LAUNCHER_SECONDS = 1.0  # between two checks of the launcher


class Start:
    """The start of this process. Call begin(), hand_over() and end() in that order, from the main thread."""

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self._before_leaving: Callable[[], None] | None = None
        self._handlers = ExitStack()
        self._pipe: tuple[int, int] | None = None
        self._is_over = threading.Event()
        self._request: Callable[[str], None] = lambda _: None

    def begin(self) -> None:
        """From now on a stop signal, or the launcher's end, ends the process. A second call changes nothing."""
        if self._pipe is not None:
            return
        self._is_over.clear()
        self.launcher = Launcher()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)  # first: no handler may swallow a signal
        self._handlers.enter_context(handle_stop_signals(lambda *_: None))
        threading.Thread(target=self._listen, args=(self._pipe[0],), name="start", daemon=True).start()

    def hand_over(self, request: Callable[[str], None] = lambda _: None) -> None:
        """From now on StopRequests handles signals and the watchdog watches the launcher.

        `request` is called, from a thread, with a signal that came just before.
        """
        self._request = request
        self._is_over.set()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def end(self) -> None:
        """Restore the signal handlers."""
        self.hand_over()
        self._before_leaving = None
        self._handlers.close()
        if self._pipe is not None:
            os.close(self._pipe[1])  # the thread reads the end of file and closes the other side
            self._pipe = None

    def call_before_leaving(self, action: Callable[[], None] | None) -> None:
        """Call `action`, from a thread, when a stop ends the process; None calls nothing."""
        self._before_leaving = action

    def _listen(self, descriptor: int) -> None:
        while True:
            ready, _, _ = select.select([descriptor], [], [], LAUNCHER_SECONDS)
            received = os.read(descriptor, 1) if ready else None
            if received == b"":
                os.close(descriptor)
                return
            reason = signal.Signals(received[0]).name if received and received[0] in STOP_SIGNALS else None
            if self._is_over.is_set():
                if reason is not None:
                    self._request(reason)
                continue
            if reason is not None:
                self.leave(reason)
            assert self.launcher is not None
            if self.launcher.is_gone():
                self.leave("the launcher has ended")

    def leave(self, reason: str) -> NoReturn:
        """End the process, which has nothing to save."""
        if self._before_leaving is not None:
            self._before_leaving()
        if given_rank() in ("0", None):
            with suppress(OSError):
                os.write(2, f"stopped before the first step ({reason}): there was nothing to save\n".encode())
        os._exit(STOPPED_EXIT_CODE)


start = Start()
