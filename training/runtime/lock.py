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
            f"{folder}: cannot be written to ({error.strerror}); expected a folder that this user can write to; pass "
            f"another --output_dir, or mend its permissions"
        ) from None
    with stream:
        if not lock_file(stream, fcntl.LOCK_EX):
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise UserError(
                f"{folder}: another run is writing there ({holder}); expected a folder of this run alone; wait for it, "
                f"stop it, or pass another --job_name"
            )
        _sign(folder / LOCK)
        try:
            yield
        except UserError:
            if made and [path.name for path in folder.iterdir()] == [LOCK]:
                _unmake(folder, made)  # the run could not begin
            raise


def _sign(path: Path) -> None:
    """Say who holds it, for the message of who comes later. The lock itself needs no space; a full disk has none."""
    with suppress(OSError), path.open("w") as stream:
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")


def _unmake(folder: Path, made: list[Path]) -> None:
    """Remove the lock's file and the folders that were made for it, as far as nothing else came into them."""
    with suppress(OSError):
        (folder / LOCK).unlink(missing_ok=True)
        for place in made:
            place.rmdir()
