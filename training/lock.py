"""One run at a time in a run's folder."""

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import UserError
from common.files import lock_file

LOCK = ".lock"


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold `folder` for this process; UserError when another holds it. The system lets go when the process dies."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / LOCK).open("a+")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); pass another --output_dir or mend its permissions"
        ) from None
    with stream:
        if not lock_file(stream, fcntl.LOCK_EX):
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise UserError(
                f"{folder}: another run is writing there ({holder}); wait for it, stop it, or pass another --job_name"
            )
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        try:
            yield
        except UserError:  # the run could not begin: a folder made for it goes again, if nothing else came into it
            if made:
                (folder / LOCK).unlink(missing_ok=True)
            for place in made:
                with suppress(OSError):
                    place.rmdir()
            raise
