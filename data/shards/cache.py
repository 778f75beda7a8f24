"""Shards of a store in a local folder of limited size, shared by all processes of a machine.

A shard is fetched under a temporary name, compared with its manifest's digest, and renamed. Each has a lock file, whose
lock readers share; a process that fetches or removes the shard takes it exclusively. The system releases the locks of
processes that end. The time of a lock file is when its shard was last used; the least recently used are removed first.
"""

import errno
import fcntl
import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

from common.errors import UserError
from common.files import lock_file
from common.stores import POLL_SECONDS, Interrupted, Store
from common.words import counted

GB = 10**9
NUM_FETCHERS = 4  # threads of each process
PIECE_BYTES = 2**20
MAX_ROOM_SECONDS = 600.0  # that a process waits for others to close shards
DEFAULT_SHARE = 0.9  # of the free disk, where no limit is given
URGENT, AHEAD = 0, 1
LOCK, PART = ".lock", ".part"


class RemoteFile(NamedTuple):
    """A shard as its manifest describes it."""

    store: Store
    name: str  # relative to the store
    num_bytes: int
    sha256: str

    @property
    def local_name(self) -> str:
        return f"{self.sha256[:32]}-{self.name.rpartition('/')[2]}"

    @property
    def url(self) -> str:
        return self.store.url_of(self.name)


class LockedFile(NamedTuple):
    """A shard in the cache, which stays there until `lock` is closed."""

    path: Path
    lock: IO[str]


class ShardCache:
    """The cache in `folder`. `num_readers`: processes of this run on this machine."""

    def __init__(self, folder: Path, max_gb: float | None, num_readers: int = 1) -> None:
        self.folder, self.shards = folder.absolute(), folder.absolute() / "shards"
        self.num_readers = num_readers
        self._mirrors: dict[Path, Store] = {}  # the store that each local folder stands for
        self._is_interrupted = False
        self._wanted: dict[str, int] = {}  # bytes of all shards that this run reads, by local name
        self._num_datasets = 0
        self._tasks: dict[str, Future[None]] = {}  # that are waiting or running, by local name
        self._guard = threading.Lock()
        self._queue: queue.PriorityQueue[tuple[int, int, RemoteFile]] = queue.PriorityQueue()
        self._numbers = count()
        self._fetchers: list[threading.Thread] = []
        disk = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        available = shutil.disk_usage(disk).free + sum(size for _, size in self._sizes())
        self.max_bytes = int(DEFAULT_SHARE * available if max_gb is None else max_gb * GB)
        if self.max_bytes > available:
            raise UserError(
                f"--data_cache_gb {max_gb:g}: {folder} has room for {available / GB:.1f} GB; expected at most that. "
                f"Pass less, or a --data_cache on another disk"
            )

    def interrupt(self) -> None:
        """End all waiting in this process with Interrupted. Can be called by a signal handler."""
        self._is_interrupted = True
        for store in self._mirrors.values():
            store.interrupt()

    def add_mirror(self, folder: Path, store: Store) -> None:
        """From now on `folder` stands for `store`."""
        self._mirrors[folder] = store

    def is_mirrored(self, folder: Path) -> bool:
        return any(folder.is_relative_to(mirror) for mirror in self._mirrors)

    def remote_of(self, path: Path, num_bytes: int, sha256: str) -> RemoteFile:
        """The shard that a path in a mirror stands for."""
        folder = next(mirror for mirror in self._mirrors if path.is_relative_to(mirror))
        return RemoteFile(self._mirrors[folder], path.relative_to(folder).as_posix(), num_bytes, sha256)

    @property
    def fits_all(self) -> bool:
        """Whether all shards that this run reads fit, so that they can stay open."""
        return sum(self._wanted.values()) <= self.max_bytes

    def describe_refetching(self) -> str | None:
        """What a cache that cannot hold all shards costs; None if it can."""
        if self.fits_all:
            return None
        total = sum(self._wanted.values()) / GB
        return (
            f"--data_cache_gb {self.max_bytes / GB:g}: smaller than the {total:.3g} GB of shards. Rows are drawn from "
            f"all shards in random order, so most shards are fetched many times in an epoch, and training may wait for "
            f"them. Pass --data_cache_gb {total * 1.001:.4g} to fetch each once"
        )

    def add_dataset(self, files: Iterable[RemoteFile]) -> None:
        """Note a dataset that will be read. UserError if the cache is smaller than what is needed at one moment."""
        self._wanted.update({file.local_name: file.num_bytes for file in files})
        self._num_datasets += 1
        largest, total = max(self._wanted.values()), sum(self._wanted.values())
        # Each reader has one file of each dataset open, and waits for another.
        needed = min(total, self.num_readers * (self._num_datasets + 1) * largest)
        if needed > self.max_bytes:
            raise UserError(
                f"--data_cache_gb {self.max_bytes / GB:g}: too small for {counted(self.num_readers, 'rank')} that read "
                f"shards of up to {largest / GB:.3g} GB; expected at least {needed / GB:.3g}, and {total / GB:.3g} to "
                f"fetch each shard only once. Pass more, or a --data_cache on a larger disk"
            )

    def open(self, file: RemoteFile) -> LockedFile:
        """The shard, fetched if it is not there."""
        while True:
            self._check_interrupted()
            locked = self._lock(file)
            if locked is not None:
                return locked
            task = self._submit(file, URGENT)
            while not wait([task], POLL_SECONDS).done:
                self._check_interrupted()
            task.result()

    def fetch_ahead(self, files: Iterable[RemoteFile]) -> None:
        """Begin to fetch these shards, in their order, as many as fit in this process's part of the cache."""
        left = self.max_bytes // 2 // self.num_readers
        for file in files:
            left -= file.num_bytes
            if left < 0:
                return
            with suppress(FileNotFoundError):
                os.utime(self._lock_path(file))  # it will be used soon
            if not (self.shards / file.local_name).exists():
                self._submit(file, AHEAD)

    def _submit(self, file: RemoteFile, urgency: int) -> Future[None]:
        """The task that fetches the shard. One that waits in the queue is queued again where it is urgent."""
        with self._guard:
            while len(self._fetchers) < NUM_FETCHERS:
                # Daemons, because a read from a store that hangs must not keep the process from its end.
                self._fetchers.append(threading.Thread(target=self._work, name="fetch", daemon=True))
                self._fetchers[-1].start()
            is_new = file.local_name not in self._tasks
            task = self._tasks.setdefault(file.local_name, Future())
            if is_new or urgency == URGENT:
                self._queue.put((urgency, next(self._numbers), file))
            return task

    def _work(self) -> None:
        while True:
            urgency, _, file = self._queue.get()
            with self._guard:
                task = self._tasks.get(file.local_name)
                if task is None or task.running():
                    continue  # it was queued twice
                task.set_running_or_notify_cancel()
            try:
                self._fetch(file, urgency)
                finish: Callable[[], None] = partial(task.set_result, None)
            except BaseException as error:  # raised where the shard is opened
                finish = partial(task.set_exception, error)
            with self._guard:
                del self._tasks[file.local_name]
            finish()

    def _fetch(self, file: RemoteFile, urgency: int) -> None:
        """Fetch the shard. One that is not urgent is left out if another process fetches it or there is no room."""
        path = self.shards / file.local_name
        with self._lock_path(file).open("a") as lock:
            while not lock_file(lock, fcntl.LOCK_EX):
                self._check_interrupted()
                if urgency == AHEAD:
                    return
                time.sleep(POLL_SECONDS)
            if path.exists() or not self._make_room(file, urgency):
                return
            part, failures = self._part_path(file), count(1)
            try:
                file.store.attempt(lambda: self._download(file, part, next(failures)), file.name)
            except FileNotFoundError:
                raise UserError(
                    f"{file.url}: is missing, but the manifest beside it lists it. Copy it there again, and start again"
                ) from None
            part.rename(path)

    def _download(self, file: RemoteFile, part: Path, attempt: int) -> None:
        """Continue `part` to the end and compare it with the manifest."""
        try:
            out = part.open("a+b")
        except OSError as error:
            raise self._unwritable(error) from None
        with out:
            out.seek(0)
            digest, size = hashlib.file_digest(out, "sha256"), out.tell()
            is_resumed = size > 0
            with file.store.open(file.name) as stream:
                if is_resumed:
                    try:
                        stream.seek(size)
                    except (OSError, ValueError, NotImplementedError):  # a server that sends only whole files
                        out.truncate(0)
                        digest, size, is_resumed = hashlib.sha256(), 0, False
                while size <= file.num_bytes and (piece := stream.read(PIECE_BYTES)):
                    self._check_interrupted()
                    self._write(out, piece)
                    digest.update(piece)
                    size += len(piece)
                is_whole = size >= file.num_bytes or size == getattr(stream, "size", None)
            os.fsync(out.fileno())
        if size == file.num_bytes and digest.hexdigest() == file.sha256:
            return
        if is_whole:
            part.unlink()
        if is_whole and not is_resumed and attempt > 1:  # twice: it is not an error of the network
            raise UserError(
                f"{file.url}: does not match its manifest (found {size:,} bytes, sha256 {digest.hexdigest()[:12]}…; "
                f"expected {file.num_bytes:,} bytes, {file.sha256[:12]}…). It has changed or is damaged: copy the "
                f"folder there again from its source, and start again"
            )
        raise ConnectionError(f"received {size:,} of {file.num_bytes:,} bytes, or other bytes than the manifest lists")

    def _make_room(self, file: RemoteFile, urgency: int) -> bool:
        """Reserve space for the shard by creating its temporary file; remove others for it."""
        deadline = time.monotonic() + MAX_ROOM_SECONDS
        while True:
            with self._exclusive_space():
                if self._evict(file):
                    self._part_path(file).touch()
                    return True
            if urgency == AHEAD:
                return False
            if time.monotonic() > deadline:
                raise UserError(
                    f"--data_cache {self.folder}: its {self.max_bytes / GB:g} GB have been in use by other processes "
                    f"for {MAX_ROOM_SECONDS:.0f} s. Pass a larger --data_cache_gb, or another --data_cache"
                )
            self._check_interrupted()
            time.sleep(POLL_SECONDS)

    def _evict(self, file: RemoteFile) -> bool:
        """Remove the shards that were used longest ago and that no process has locked, until `file` fits."""
        own = self._part_path(file)
        sizes = dict(self._sizes())
        used = sum(sizes.values()) - sizes.pop(own, 0)
        for path in sorted(sizes, key=lambda path: _last_use(_lock_beside(path))):
            if used + file.num_bytes <= self.max_bytes:
                break
            with _lock_beside(path).open("a") as lock:
                if lock_file(lock, fcntl.LOCK_EX):
                    path.unlink(missing_ok=True)
                    used -= sizes[path]
        return used + file.num_bytes <= self.max_bytes

    def _sizes(self) -> Generator[tuple[Path, int]]:
        """Bytes of each shard; of one that is being fetched, all of its bytes, which its temporary name states."""
        for entry in os.scandir(self.shards) if self.shards.is_dir() else ():
            path = Path(entry.path)
            if path.suffix == PART:
                yield path, int(path.stem.rpartition(".")[2])
            elif path.suffix != LOCK:
                with suppress(FileNotFoundError):
                    yield path, entry.stat().st_size

    @contextmanager
    def _exclusive_space(self) -> Generator[None]:
        with (self.folder / f"space{LOCK}").open("a") as lock:
            while not lock_file(lock, fcntl.LOCK_EX):
                time.sleep(POLL_SECONDS / 10)
            yield

    def _lock(self, file: RemoteFile) -> LockedFile | None:
        """The shard with a shared lock; None if it is not there, or another process fetches or removes it."""
        path, lock_path = self.shards / file.local_name, self._lock_path(file)
        lock = lock_path.open("a")
        if lock_file(lock, fcntl.LOCK_SH) and path.exists():
            os.utime(lock_path)
            return LockedFile(path, lock)
        lock.close()
        return None

    def _lock_path(self, file: RemoteFile) -> Path:
        return self.shards / f"{file.local_name}{LOCK}"

    def _part_path(self, file: RemoteFile) -> Path:
        return self.shards / f"{file.local_name}.{file.num_bytes}{PART}"

    def _check_interrupted(self) -> None:
        if self._is_interrupted:
            raise Interrupted("stopped while waiting for a shard")

    def _write(self, out: IO[bytes], piece: bytes) -> None:
        try:
            out.write(piece)
            out.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError:
        text = os.strerror(error.errno or errno.EIO)
        return UserError(
            f"--data_cache {self.folder}: cannot be written to ({text}); expected room for {self.max_bytes / GB:g} GB. "
            f"Free some space there, pass a smaller --data_cache_gb, or another --data_cache"
        )


def _lock_beside(path: Path) -> Path:
    """The lock of a shard or of its temporary file."""
    name = path.name if path.suffix != PART else path.stem.rpartition(".")[0]
    return path.with_name(f"{name}{LOCK}")


def _last_use(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0
