"""One run at a time uploads to a URL: a file there, which the run that has the lease changes every few seconds.

Stores have no locks, and the clocks of machines differ. So a run that finds the file of another one watches whether it
changes. A run whose file was replaced has lost the lease and uploads nothing more.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from common.console import console
from common.errors import UserError
from common.files import write_plainly
from common.stores import Store
from training.checkpoints.paths import UPLOAD_LEASE

FILE = "writer.json"
BEAT_SECONDS = 15.0
SILENT_SECONDS = 3 * BEAT_SECONDS  # after which a run that does not change its file has ended
POLL_SECONDS = 3.0
RELEASE_SECONDS = 5.0  # that the end of a run waits for the store: launchers kill ranks 30 s after their signal


@dataclass(frozen=True)
class Holder:
    """The content of the file."""

    identifier: str
    host: str
    process: int
    count: int = 0
    is_over: bool = False  # the run has ended


class Lease:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._own = Holder(uuid4().hex, socket.gethostname(), os.getpid())
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._is_acquired = False

    def acquire(self, folder: Path) -> None:
        """UserError if another run has the lease. A second call changes nothing.

        `folder`: the run's, which this process has locked. So the last process that uploaded from there has ended.
        """
        if self._is_acquired:
            return
        found, note, last = self._read(), folder / UPLOAD_LEASE, ""
        with suppress(OSError):
            last = note.read_text(errors="replace")
        if found is not None and not found.is_over and found.identifier != last:
            self._watch(found)
        self._write()
        write_plainly(note, self._own.identifier)  # a full disk does not matter
        self._is_acquired = True
        threading.Thread(target=self._beat, name="upload lease", daemon=True).start()

    def check(self) -> None:
        """UserError if another run has taken the lease since."""
        found = self._read()
        if self._is_acquired and found is not None and found.identifier != self._own.identifier and not found.is_over:
            raise self._refusal(found)

    def release(self) -> None:
        """At the end of the run, so that the next one need not watch. A store that does not answer is left alone."""
        self._ended.set()
        if self._is_acquired:
            thread = threading.Thread(target=self._renew, args=(True,), name="end of upload lease", daemon=True)
            thread.start()
            thread.join(RELEASE_SECONDS)

    def _watch(self, found: Holder) -> None:
        """Return when the other run has ended; UserError if it has not."""
        console.say(
            f"{self._store.url}: checking for {SILENT_SECONDS:.0f} s whether the run that uploaded there last (process "
            f"{found.process} on {found.host}) is still alive"
        )
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            now = self._read()
            if now is None:  # in some stores a file that is being written can be read
                continue
            if now.is_over:
                return
            if now != found:
                raise self._refusal(now)

    def _refusal(self, holder: Holder) -> UserError:
        return UserError(
            f"{self._store.flag}: {self._store.url}: another run uploads there (process {holder.process} on "
            f"{holder.host}); expected a URL and a job name that no other run uses. Stop that run, or pass another "
            f"--job_name"
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._renew()

    def _renew(self, is_over: bool = False) -> None:
        with suppress(UserError), self._writing:  # the next upload reports an error
            if is_over or not self._ended.is_set():
                self.check()
                self._own = replace(self._own, count=self._own.count + 1, is_over=is_over)
                self._write()

    def _write(self) -> None:
        self._store.write(FILE, json.dumps(asdict(self._own)).encode())

    def _read(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._store.read(FILE)))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):  # none, or not written by this version
            return None
