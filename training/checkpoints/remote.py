"""Copies of a run's checkpoints in a store: `<URL>/<job_name>/<tag>/…`, valid once they have their manifest.

The manifest is written last, and removed first where a checkpoint is replaced, so a reader never takes half of one.
Uploads happen in a thread: training never waits for them. Only the newest one and the best one wait.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path, PurePosixPath

from common.console import console
from common.errors import UserError
from common.stores import Store
from training.checkpoints.folder import Retention, find_surplus, read_lock
from training.checkpoints.lease import Lease
from training.checkpoints.manifest import find_damage
from training.checkpoints.paths import MANIFEST, RUN_TAG, STAGING, step_of
from training.checkpoints.state import read_best, read_state
from training.checkpoints.writer import publish
from training.runtime import collectives
from training.runtime.stopping import StopRequests

FLAG = "--upload_checkpoints"
# A run that was asked to stop waits this long for its last checkpoint: launchers kill ranks 30 s after their signal.
STOP_SECONDS = 15.0
ROUND_SECONDS = 0.5  # between two exchanges of the ranks that wait


class RemoteCheckpoints:
    def __init__(self, url: str, job_name: str) -> None:
        self.store = Store(f"{url.rstrip('/')}/{job_name}", FLAG)
        self.lease = Lease(self.store)

    def tags(self) -> list[str]:
        """Tags of all checkpoints, also of those that are not complete, oldest first."""
        return sorted(filter(RUN_TAG.fullmatch, self.store.list()), key=step_of)

    def upload(self, checkpoint: Path) -> bool:
        """Copy a published checkpoint; False if it was removed or replaced meanwhile. UserError without the lease."""
        self.lease.check()
        tag = checkpoint.name
        with ExitStack() as stack:
            if not read_lock(checkpoint, stack):
                return False
            manifest = (checkpoint / MANIFEST).read_bytes()
            before = self._read_manifest(tag)
            if before == manifest:
                return True
            if before is not None:
                self.store.remove(f"{tag}/{MANIFEST}")
            for name in json.loads(manifest)["files"]:
                self.store.upload(checkpoint / name, f"{tag}/{name}")
            if (checkpoint / MANIFEST).read_bytes() != manifest:  # saved again, with more samples seen
                return False
            self.lease.check()  # another run may have started while this one could not reach the store
            self.store.write(f"{tag}/{MANIFEST}", manifest)
        return True

    def retire(self, retention: Retention, best: str | None) -> None:
        """Remove the copies that are not kept, as on the disk."""
        for tag in find_surplus(self.tags(), retention, best):
            self.store.remove(f"{tag}/{MANIFEST}")
            self.store.remove(tag)

    def fetch_newest(self, folder: Path, after_step: int) -> str | None:
        """Copy the newest valid checkpoint, and its best one, to a run's folder; None if none is after `after_step`."""
        for tag in reversed(self.tags()):
            if step_of(tag) <= after_step:
                break
            if self._fetch(tag, folder):
                best = read_state(folder / tag).best_tag
                if best is not None and best != tag and best in self.tags() and not (folder / best).exists():
                    self._fetch(best, folder)
                return tag
        return None

    def _fetch(self, tag: str, folder: Path) -> bool:
        """Whether the checkpoint is valid, and now in `folder`; if not, the reason is reported."""
        staged = folder / STAGING / tag
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            problem = self._download(tag, staged)
            if problem is None:
                publish(staged, folder / tag)
                return True
            console.warn(f"{self.store.url_of(tag)}: skipped, {problem}")
            return False
        finally:
            shutil.rmtree(folder / STAGING, ignore_errors=True)

    def _download(self, tag: str, staged: Path) -> str | None:
        """Copy the files that the manifest lists; what is wrong with them, or None."""
        manifest = self._read_manifest(tag)
        if manifest is None:
            return f"it has no {MANIFEST}: its upload was never completed"
        try:
            sizes = {str(name): int(entry["size"]) for name, entry in json.loads(manifest)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{MANIFEST} cannot be used ({error})"
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in sizes):
            return f"{MANIFEST} lists files outside of the checkpoint"
        free, needed = shutil.disk_usage(staged).free, sum(sizes.values())
        if needed > free:
            raise UserError(
                f"{staged.parent.parent}: {self.store.url_of(tag)} needs {needed / 1e9:.3g} GB, but {free / 1e9:.3g} "
                f"GB are free; expected room for it. Free some space there, or pass another --output_dir"
            )
        console.say(f"fetching {self.store.url_of(tag)} ({needed / 1e9:.3g} GB)")
        for name in sizes:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                self.store.download(name=f"{tag}/{name}", local=staged / name)
            except FileNotFoundError:
                return f"{name} is missing"
        (staged / MANIFEST).write_bytes(manifest)
        return find_damage(staged)

    def _read_manifest(self, tag: str) -> bytes | None:
        try:
            return self.store.read(f"{tag}/{MANIFEST}")
        except FileNotFoundError:
            return None


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
        # A daemon, because a store that hangs must not keep the process from its end.
        threading.Thread(target=self._work, name="upload", daemon=True).start()

    def offer(self, tag: str, is_best: bool = False) -> None:
        """Upload this checkpoint next, instead of an older one that is still waiting."""
        with self._changed:
            self._newest = tag
            if is_best:
                self._best = tag
            self._waiting = list(dict.fromkeys(filter(None, (tag, self._best))))
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Whether nothing is left to upload, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._current is None, seconds)

    def all_ranks_finish(self, stop: StopRequests, note: Callable[[str], None]) -> None:
        """Wait for the last upload: after a stop request for STOP_SECONDS, else to its end. Collective.

        `note` is called again and again, for the watchdog.
        """
        deadline = math.inf

        def is_over() -> bool:
            return self.wait(ROUND_SECONDS) or time.monotonic() > deadline

        for number in count():
            note("upload")
            if deadline == math.inf and stop.all_ranks_agreed():
                deadline = time.monotonic() + STOP_SECONDS
            if collectives.all_ranks_from_main(is_over):
                return
            if number == 0:
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
            except Exception as error:  # of any file system; training must not end because of it
                kind = "" if isinstance(error, UserError) else f"{self._remote.store.url}: {type(error).__name__}: "
                failure = f"{kind}{error}"
                console.warn(f"{failure}. {tag} was not uploaded; training continues, and the next one is tried")
            with self._changed:
                self._failure, self._current = failure, None
                self._changed.notify_all()
