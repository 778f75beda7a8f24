"""One run at a time in a run's folder."""

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from common.errors import UserError

LOCK = ".lock"


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold `folder` for this process; UserError when another holds it. The system lets go when the process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / LOCK).open("a+")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); pass another --output_dir or mend its permissions"
        ) from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise UserError(
                f"{folder}: another run is writing there ({holder}); wait for it, stop it, or pass another --job_name"
            ) from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
