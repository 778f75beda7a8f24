"""From a process's first line to its first step: there is nothing to save, so a request to stop ends it at once.

Importing takes seconds, and joining the other ranks may take for ever, inside calls during which Python runs no signal
handler. So a thread listens: the system hands it every signal's number through a pipe. It looks after the launcher too.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from typing import Any

from common.launchers import Launcher
from common.processes import STOP_SIGNALS, STOPPED_EXIT_CODE

LAUNCHER_SECONDS = 1.0  # between two looks at the launcher


class Start:
    """The start of this process. begin(), hand_over() and end() in that order, from the main thread."""

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._is_over = threading.Event()

    def begin(self) -> None:
        """From now on a stop signal, or the launcher's end, ends the process. A second call changes nothing."""
        if self._pipe is not None:
            return
        self._is_over.clear()
        self.launcher = Launcher()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(self._pipe[0],), name="start", daemon=True).start()

    def hand_over(self) -> None:
        """Others see to signals and to the launcher from here on."""
        self._is_over.set()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def end(self) -> None:
        """Leave the signals as they were found."""
        self.hand_over()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self._pipe is not None:
            os.close(self._pipe[1])  # the thread reads the end of it, and closes the other side
            self._pipe = None

    def _listen(self, descriptor: int) -> None:
        while True:
            ready, _, _ = select.select([descriptor], [], [], LAUNCHER_SECONDS)
            received = os.read(descriptor, 1) if ready else None
            if received == b"":
                os.close(descriptor)
                return
            if self._is_over.is_set():
                continue
            if received is not None and received[0] in STOP_SIGNALS:
                _leave(signal.Signals(received[0]).name)
            assert self.launcher is not None
            if self.launcher.is_gone():
                _leave("the launcher has gone")


def _leave(reason: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"stopped before the first step ({reason}): there was nothing to save\n".encode())
    os._exit(STOPPED_EXIT_CODE)


start = Start()
