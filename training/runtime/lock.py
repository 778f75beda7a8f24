"""One run at a time in a run's folder."""

import fcntl
import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ReportedElsewhere, UserError
from common.files import lock_file, temporary_folders
from training.runtime import collectives

LOCK = ".lock"
MAX_UNSEEN_SECONDS = 30.0


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
            with suppress(OSError):  # for the message of the next process; a full disk does not matter
                (folder / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            try:
                yield
            except UserError:
                if made and [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink(missing_ok=True)
                raise


def all_ranks_check_shared(folder: Path, hosts: Sequence[str]) -> None:
    """UserError on rank 0 if a machine does not see the folder that rank 0 has locked. `hosts`: of each rank."""
    if len(set(hosts)) == 1:
        return
    signature = collectives.all_ranks_from_main((folder / LOCK).read_text)
    seen = collectives.all_ranks_gather(_sees(folder, signature))
    blind = sorted({host for host, sees in zip(hosts, seen, strict=True) if not sees})
    text = (
        f"{folder}: {', '.join(blind)} cannot see what {hosts[0]} (rank 0) writes there; expected a folder on a file "
        f"system that all machines share. Mount it there, or pass another --output_dir"
    )
    if blind:
        raise UserError(text) if collectives.is_main() else ReportedElsewhere(text)


def _sees(folder: Path, signature: str) -> bool:
    """Wait for a network file system that remembers for a while that a file did not exist."""
    deadline = time.monotonic() + MAX_UNSEEN_SECONDS
    while True:
        with suppress(OSError):
            list(folder.iterdir())  # makes such a file system look again
            if (folder / LOCK).read_text() == signature:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
