"""Files: atomic writes, locks, digests and temporary folders."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from common.errors import Problems


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside `path`, flush to disk, then rename over it."""
    payload = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(payload)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    flush_folder(path.parent)


def write_plainly(path: Path, content: str) -> bool:
    """Replace a small file atomically but without flushing it to disk; whether that succeeded."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content)
        temporary.replace(path)
    except OSError:
        return False
    return True


def append_whole(path: Path, content: str) -> None:
    """Append all of `content` or nothing: a partial write on a full disk is undone."""
    payload = content.encode()
    with path.open("ab", buffering=0) as stream:
        size = stream.tell()
        try:
            if stream.write(payload) < len(payload):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            stream.truncate(size)
            raise


@contextmanager
def temporary_folders(folder: Path) -> Generator[list[Path]]:
    """Yields those of `folder` and its parents that do not exist; afterwards removes them, or `folder`, if empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield missing
    finally:
        with suppress(OSError):
            for path in missing or [folder]:
                path.rmdir()


def check_folder_to_write(folder: Path, flag: str, problems: Problems) -> None:
    """Note why `folder`, which `flag` named, can be neither created nor written to. Changes nothing."""
    try:
        place = folder.absolute()
    except FileNotFoundError:
        problems.add(
            f"{flag} {folder}: the current folder no longer exists; expected one that exists. Change to another (cd)"
        )
        return
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not there.is_dir():
        kind = "a broken link" if there.is_symlink() else "a file"
        problems.add(f"{flag} {folder}: {there} is {kind}; expected a folder. Remove it, or pass another {flag}")
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        problems.add(
            f"{flag} {folder}: {there} cannot be written to (its permissions, or a read-only file system); expected a "
            f"folder that this user can write to. Change its permissions, or pass another {flag}"
        )


def lock_file(stream: IO[Any], kind: int) -> bool:
    """Take a lock (fcntl.LOCK_SH or LOCK_EX) without waiting; False if another process has it."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
            raise
    return True


def flush_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """The sha256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def give_usual_mode(path: Path) -> None:
    """Give a file the permissions that the umask leaves; some libraries create files for the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
