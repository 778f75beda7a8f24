"""One run at a time in a run's folder."""

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import UserError
from common.files import lock_file, temporary_folders

LOCK = ".lock"


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Create and lock `folder` for this process; UserError if another process has it. The system releases the lock.

    Folders created here are removed again if a UserError ends the run before anything else was written to them.
    """
    with temporary_folders(folder) as made:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stream = (folder / LOCK).open("a+")
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written to ({error.strerror}); expected a folder that this user can write to. "
                f"Pass another --output_dir, or fix its permissions"
            ) from None
        with stream:
            if not lock_file(stream, fcntl.LOCK_EX):
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                raise UserError(
                    f"{folder}: another run is writing there ({holder}); expected a folder that no other run uses. "
                    f"Wait for that run, stop it, or pass another --job_name"
                )
            _sign(folder / LOCK)
            try:
                yield
            except UserError:
                if made and [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink(missing_ok=True)
                raise


def _sign(path: Path) -> None:
    """Write which process has the lock, for the message of the next one. A full disk does not matter."""
    with suppress(OSError), path.open("w") as stream:
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
