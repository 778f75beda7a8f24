"""Compiling extensions: a process that is killed while it compiles does not block later runs.

torch keeps processes apart that build the same extension by the existence of a file `lock` in the extension's folder. A
process killed there leaves it behind, and every later run waits for it forever.

A process of ours first takes a flock on a file next to it, GUARD, and marks it while it compiles. The system releases
the flock when the process dies, so a process that gets it and finds the mark knows that `lock` was left by a dead run.
A `lock` without the mark belongs to another program: it is waited for, and reported after a while.

Compiling takes minutes without any output, so it is announced, and the console shows that it continues.
"""

import fcntl
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from torch.utils import file_baton
from torch.utils.file_baton import FileBaton

from common.console import console, write_error

GUARD = ".bert_pretraining_compiles"
MARK = "compiling\n"
PATIENCE_SECONDS = 120.0  # an extension takes about one minute to compile
SECONDS_PER_LINE = 30.0  # between lines that say that compiling continues


def guard_compiles() -> None:
    """Replace torch's lock by CompileLock in this process."""
    for module in (file_baton, sys.modules.get("torch.utils.cpp_extension")):
        if module is not None:
            module.FileBaton = CompileLock  # type: ignore[attr-defined]


class Announcement:
    """Says that an extension is being compiled, by this process or another one, until end()."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.began, self.ended = folder, folder.name, time.monotonic(), threading.Event()
        console.say(f"compiling DeepSpeed's extension {self.name}: once on this machine, 1 to 4 minutes")
        threading.Thread(target=self._repeat, daemon=True).start()

    def _repeat(self) -> None:
        while not self.ended.wait(SECONDS_PER_LINE):
            console.say(f"still compiling {self.name}, for {self._seconds()} seconds")

    def end(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            is_compiled = any(self.folder.glob("*.so"))
            console.say(
                f"{'compiled' if is_compiled else 'could not compile'} {self.name} (after {self._seconds()} seconds)"
            )

    def _seconds(self) -> int:
        return round(time.monotonic() - self.began)


class CompileLock(FileBaton):
    """torch calls try_acquire(), then compiles and calls release(), or else wait().

    Every process of ours gets the lock in turn; ninja finds nothing to do for all but the first.
    """

    guard: IO[str] | None = None
    announcement: Announcement | None = None

    def try_acquire(self) -> bool:
        """Wait for other processes of ours, then take torch's lock; False if another program has it."""
        lock = Path(self.lock_file_path)
        if self.announcement is None and not any(lock.parent.glob("*.so")):
            self.announcement = Announcement(lock.parent)
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
        self._end_announcement()

    def release(self) -> None:
        self._end_announcement()
        with suppress(FileNotFoundError):  # a user may have removed it
            super().release()
        if self.guard is not None:
            self._mark(self.guard, "")
            self.guard.close()
            self.guard = None

    def _end_announcement(self) -> None:
        if self.announcement is not None:
            self.announcement.end()
            self.announcement = None

    def _mark(self, guard: IO[str], content: str) -> None:
        guard.truncate(0)
        guard.write(content)
        guard.flush()
