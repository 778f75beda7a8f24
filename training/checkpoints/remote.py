"""Copies of a run's checkpoints in a store: `<URL>/<job_name>/<tag>/…`, valid once they have their manifest.

The manifest is written last, and removed first where a checkpoint is replaced, so a reader never takes half of one.
"""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from common.console import console
from common.errors import UserError
from common.stores import Store
from training.checkpoints.lease import Lease
from training.checkpoints.manifest import find_damage
from training.checkpoints.paths import MANIFEST, STAGING, is_run_tag, step_of
from training.checkpoints.publish import publish
from training.checkpoints.retention import Retention, find_surplus, read_lock
from training.checkpoints.state import read_state

FLAG = "--upload_checkpoints"


class RemoteCheckpoints:
    def __init__(self, url: str, job_name: str) -> None:
        self.store = Store(f"{url.rstrip('/')}/{job_name}", FLAG)
        self.lease = Lease(self.store)

    def tags(self) -> list[str]:
        """Tags of all checkpoints, also of those that are not complete, oldest first."""
        return sorted(filter(is_run_tag, self.store.list()), key=step_of)

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
