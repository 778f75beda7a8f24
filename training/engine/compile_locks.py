"""Compiling extensions: a lock that does not outlive the process that compiles.

torch keeps processes apart that build the same extension by an empty file, `lock`, in the extension's folder. Who is
killed there leaves it behind, and every later start waits for it for ever.

Ours is the same file, so that we and foreign programs go on waiting for each other. But it has a mark in it, and its
holder has it locked (flock) from the moment it appears; the system ends that with the process at the latest. So a file
with our mark that nobody has locked was left by a run that died, and whoever comes first takes it over. An empty one is
a foreign program's, of which nothing is known: it is waited for, and named after a while.
"""

import fcntl
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from torch.utils import file_baton
from torch.utils.file_baton import FileBaton

from common.console import write_error

MARK = b"bert-pretraining\n"
PATIENCE_SECONDS = 120.0  # an extension takes about one minute to compile


def guard_compiles() -> None:
    """From now on this process holds and waits for such locks as described above."""
    for module in (file_baton, sys.modules.get("torch.utils.cpp_extension")):
        if module is not None:
            module.FileBaton = CompileLock  # type: ignore[attr-defined]


class CompileLock(FileBaton):
    """In the place of torch's lock: torch asks try_acquire(), then compiles and calls release(), or else wait().

    One rank of a machine comes to speak of it, and that may be any.
    """

    fd: int | None  # type: ignore[assignment]

    def try_acquire(self) -> bool:
        """True: this process is to compile. False: another one did so, which has been waited for."""
        if self._create():
            return True
        path, began, is_told = Path(self.lock_file_path), time.monotonic(), False
        while path.exists():
            if self._take_over():
                write_error(f"warning: {path}: was left by a run that died while it compiled; compiling it now")
                return True
            if not is_told and time.monotonic() - began > PATIENCE_SECONDS:
                write_error(
                    f"warning: {path}: waiting for another process to compile this; if there is none, remove it"
                )
                is_told = True
            time.sleep(self.wait_seconds)
        return False

    def wait(self) -> None:
        """try_acquire() has waited already, and who holds the lock by now only looks whether all is compiled."""

    def release(self) -> None:
        """Removed while still locked: nobody can take it over in between."""
        with suppress(FileNotFoundError):
            Path(self.lock_file_path).unlink()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _create(self) -> bool:
        """Make the file, with its mark and locked from the first moment that others see it; False: there is one."""
        place = Path(self.lock_file_path)
        descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f"{place.name}.")
        try:
            os.write(descriptor, MARK)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(temporary, place)
        except FileExistsError:
            os.close(descriptor)
            return False
        except OSError:  # a file system without locks or links; there it is torch's own, which is never taken over
            os.close(descriptor)
            return bool(super().try_acquire())
        finally:
            Path(temporary).unlink()
        self.fd = descriptor
        return True

    def _take_over(self) -> bool:
        """Lock the file that is there, if it has our mark; False: it is held, or nothing can be told of it."""
        try:
            descriptor = os.open(self.lock_file_path, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            # Another file may stand there since it was opened: the holder has gone, and the next one has come.
            is_left = found.st_size == len(MARK) and os.path.samestat(found, Path(self.lock_file_path).stat())
        except OSError:
            is_left = False
        if not is_left:
            os.close(descriptor)
            return False
        self.fd = descriptor
        return True
