"""Compiling extensions: a process that is killed while it compiles does not block later runs.

torch keeps processes apart that build the same extension by the existence of a file `lock` in the extension's folder. A
process killed there leaves it behind, and every later run waits for it forever.

A process of ours first takes a flock on a file next to it, GUARD, and marks it while it compiles. The system releases
the flock when the process dies, so a process that gets it and finds the mark knows that `lock` was left by a dead run.
A `lock` without the mark belongs to another program: it is waited for, and reported after a while.
"""

import fcntl
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from torch.utils import file_baton
from torch.utils.file_baton import FileBaton

from common.console import write_error

GUARD = ".bert_pretraining_compiles"
MARK = "compiling\n"
PATIENCE_SECONDS = 120.0  # an extension takes about one minute to compile


def guard_compiles() -> None:
    """Replace torch's lock by CompileLock in this process."""
    for module in (file_baton, sys.modules.get("torch.utils.cpp_extension")):
        if module is not None:
            module.FileBaton = CompileLock  # type: ignore[attr-defined]


class CompileLock(FileBaton):
    """torch calls try_acquire(), then compiles and calls release(), or else wait().

    Every process of ours gets the lock in turn; ninja finds nothing to do for all but the first.
    """

    guard: IO[str] | None = None

    def try_acquire(self) -> bool:
        """Wait for other processes of ours, then take torch's lock; False if another program has it."""
        lock = Path(self.lock_file_path)
        guard = lock.with_name(GUARD).open("a+")
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: only torch's own is left
            guard.close()
            return bool(super().try_acquire())
        guard.seek(0)
        if guard.read() and lock.exists():
            write_error(f"warning: {lock}: was left by a run that died while compiling; compiling again")
            lock.unlink()
        self._mark(guard, MARK)
        if super().try_acquire():
            self.guard = guard
            return True
        self._mark(guard, "")
        guard.close()
        return False

    def wait(self) -> None:
        """Wait until another program has compiled the extension."""
        lock, began, is_reported = Path(self.lock_file_path), time.monotonic(), False
        while lock.exists():
            if not is_reported and time.monotonic() - began > PATIENCE_SECONDS:
                write_error(
                    f"warning: {lock}: waiting for another program to compile this; if there is none, remove it"
                )
                is_reported = True
            time.sleep(self.wait_seconds)

    def release(self) -> None:
        with suppress(FileNotFoundError):  # a user may have removed it
            super().release()
        if self.guard is not None:
            self._mark(self.guard, "")
            self.guard.close()
            self.guard = None

    def _mark(self, guard: IO[str], content: str) -> None:
        guard.truncate(0)
        guard.write(content)
        guard.flush()
