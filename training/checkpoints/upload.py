"""Uploads of checkpoints in a thread: training never waits for them. Only the newest one and the best one wait."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.console import console
from common.errors import UserError
from training.checkpoints.remote import RemoteCheckpoints
from training.checkpoints.retention import Retention, read_best
from training.runtime import collectives
from training.runtime.stopping import StopRequests

# A run that was asked to stop waits this long for its last checkpoint: launchers kill ranks 30 s after their signal.
STOP_SECONDS = 15.0
ROUND_SECONDS = 0.5  # between two exchanges of the ranks that wait


class Uploader:
    """Uploads the checkpoints of `folder`. Only rank 0's is given any."""

    def __init__(self, remote: RemoteCheckpoints, folder: Path, retention: Retention) -> None:
        self._remote, self._folder, self._retention = remote, folder, retention
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._best: str | None = None  # of those waiting
        self._current: str | None = None
        self._newest: str | None = None  # that was offered
        self._uploaded: str | None = None  # the newest that was uploaded
        self._failure = ""
        self._thread: threading.Thread | None = None

    def offer(self, tag: str, is_best: bool = False) -> None:
        """Upload this checkpoint next, instead of an older one that is still waiting."""
        with self._changed:
            self._newest = tag
            if is_best:
                self._best = tag
            older_best = [self._best] if self._best not in (None, tag) else []
            self._waiting = [tag, *(best for best in older_best if best is not None)]
            if self._thread is None:
                # A daemon, because a store that hangs must not keep the process from its end.
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Whether nothing is left to upload, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._current is None, seconds)

    def all_ranks_finish(self, stop: StopRequests, note: Callable[[str], None]) -> None:
        """Wait for the last upload: after a stop request for STOP_SECONDS, else to its end. Collective.

        `note` is called again and again, for the watchdog.
        """
        is_announced, deadline = False, None
        while True:
            note("upload")
            if deadline is None and stop.all_ranks_agreed():
                deadline = time.monotonic() + STOP_SECONDS

            def is_over(deadline: float | None = deadline) -> bool:
                return self.wait(ROUND_SECONDS) or (deadline is not None and time.monotonic() > deadline)

            if collectives.all_ranks_from_main(is_over):
                return
            if not is_announced:
                is_announced = True
                console.say(f"uploading {self._newest} to {self._remote.store.url}")

    def close(self) -> None:
        """At the end of the run: report what was not uploaded, and let other runs upload there."""
        self.report_missing()
        self._remote.lease.release()

    def report_missing(self) -> None:
        if self._newest is not None and self._uploaded != self._newest:
            reason = f" ({self._failure})" if self._failure else ""
            console.warn(
                f"{self._folder / self._newest}: was not uploaded to {self._remote.store.url}{reason}; the newest of "
                f"this run there is {self._uploaded or 'none'}. The same command, run on this disk, uploads it"
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                tag = self._current = self._waiting.pop(0)
                if tag == self._best:
                    self._best = None
            failure = ""
            try:
                if self._remote.upload(self._folder / tag):
                    self._uploaded = max(self._uploaded or tag, tag)
                    best = read_best(self._folder, [path.name for path in self._folder.iterdir()])
                    self._remote.retire(self._retention, None if best is None else best.tag)
            except UserError as error:
                failure = str(error)
            except Exception as error:  # of any file system; training must not end because of it
                failure = f"{self._remote.store.url}: {type(error).__name__}: {error}"
            if failure:
                console.warn(f"{failure}. {tag} was not uploaded; training continues, and the next one is tried")
            with self._changed:
                self._failure, self._current = failure, None
                self._changed.notify_all()
