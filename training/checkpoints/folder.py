"""The checkpoints in a run's folder: which there are, which one is used, which are kept, and read locks.

A checkpoint is a folder with a valid manifest. DeepSpeed's tools read the same layout:
`<saved_models>/<job_name>/{latest,<tag>/…}`.
"""

import fcntl
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common.console import console
from common.errors import UserError
from common.files import lock_file
from common.weights import WEIGHTS
from training.checkpoints.manifest import find_damage
from training.checkpoints.paths import DAMAGED, DROPPED, MANIFEST, RUN_TAG, TAG, step_of
from training.checkpoints.state import Best, read_best, write_best

RUN_FOLDER_HINT = "Pass a run's <output_dir>/saved_models/<job_name> that contains complete checkpoints"


@dataclass(frozen=True)
class Retention:
    """`keep_last` None keeps all. Steps that are multiples of `keep_every` are never removed."""

    keep_last: int | None = None
    keep_every: int | None = None


class CheckpointFolder:
    """The checkpoints of one run: `<output_dir>/saved_models/<job_name>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.valid: set[str] = set()  # tags that this process has verified or written
        self.damaged: set[str] = set()  # tags that this process has skipped; retention does not count them

    def _names(self) -> list[str]:
        """Names in the folder, oldest step first. glob() would take one that cannot be read for an empty one."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path.name for path in found if not path.is_symlink()), key=lambda name: (step_of(name), name))

    def tags(self) -> list[str]:
        """Tags of the folders that have a manifest, oldest step first."""
        named = [name for name in self._names() if TAG.fullmatch(name) and not name.endswith(DAMAGED)]
        return [name for name in named if (self.folder / name / MANIFEST).is_file()]

    def newest_valid(self, before_step: int | None = None) -> str | None:
        """The newest checkpoint that passes its manifest, or None; skipped ones are reported with the reason.

        Copies under other names belong to the user and are not considered.
        """
        for tag in filter(RUN_TAG.fullmatch, reversed(self._names())):
            if before_step is not None and step_of(tag) >= before_step:
                continue
            problem = find_damage(self.folder / tag)
            if problem is None:
                self.valid.add(tag)
                return tag
            self.valid.discard(tag)
            self.damaged.add(tag)
            console.warn(f"{self.folder / tag}: skipped, {problem}")
        return None

    def newest_known_valid(self) -> str | None:
        """The newest checkpoint that this process has verified or written. Reads no large file."""
        return next((tag for tag in reversed(self.tags()) if tag in self.valid), None)

    def best(self) -> Best | None:
        """The checkpoint that best.json names, if it exists."""
        return read_best(self.folder, self.tags())

    def choose(self, tag: str | None) -> str:
        """The checkpoint that a user asked for (None: the newest valid one); UserError if it is not valid."""
        self.check_exists()
        if tag is None:
            newest = self.newest_valid()
            if newest is None:
                raise UserError(f"{self.folder}: contains no complete checkpoint named step_N. {self._remedy()}")
            return newest
        if tag not in self.tags():
            known = ", ".join(self.tags()) or "none"
            raise UserError(
                f"{self.folder}: has no checkpoint {tag!r} (found: {known}). Pass one of them with --load_checkpoint_id"
            )
        problem = find_damage(self.folder / tag)
        if problem is not None:
            raise UserError(
                f"{self.folder / tag}: is not valid: {problem}. Choose another checkpoint (--load_checkpoint_id, or "
                f"export_hf.py --checkpoint)"
            )
        return tag

    def check_exists(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder. {RUN_FOLDER_HINT}")

    def _remedy(self) -> str:
        """What to pass instead, if the folder is something else that this project writes."""
        if (self.folder / MANIFEST).is_file():
            return f"It is a checkpoint itself: pass {self.folder.parent} and --load_checkpoint_id {self.folder.name}"
        if (self.folder / WEIGHTS).is_file():
            return "It is a Hugging Face folder, not a run's; a run starts from its weights with --use_pretrain"
        return RUN_FOLDER_HINT


def retire(folder: Path, tags: list[str], retention: Retention, best: Best | None) -> None:
    """Write a new `best`, then remove what is not kept. `tags` are the candidates, oldest first."""
    before = read_best(folder, tags)
    also = []
    if best is not None:
        write_best(folder, best)
        if before is not None and before.is_only_best and before.tag != best.tag:
            also = [before.tag]
    kept = best or before
    for tag in find_surplus(tags, retention, None if kept is None else kept.tag, also):
        _drop(folder / tag)


def find_surplus(tags: list[str], retention: Retention, best: str | None, also: Sequence[str] = ()) -> list[str]:
    """Those of `tags` that are not among the last, and those in `also`, unless they are kept for another reason.

    Copies under other names belong to the user: they are neither counted nor removed.
    """
    named = [tag for tag in tags if RUN_TAG.fullmatch(tag)]
    surplus = [] if retention.keep_last is None else named[: -retention.keep_last]
    every = retention.keep_every
    return [tag for tag in (*surplus, *also) if tag != best and (every is None or step_of(tag) % every != 0)]


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint unless it is read-locked. It is renamed first: half a folder must not look like one."""
    away = checkpoint.with_name(f"{DROPPED}{checkpoint.name}")
    try:
        with (checkpoint / MANIFEST).open("r+") as stream:  # network file systems lock only writable files
            if not lock_file(stream, fcntl.LOCK_EX):
                return  # removed after a later save
            checkpoint.rename(away)
    except OSError:
        return
    shutil.rmtree(away, ignore_errors=True)


def read_lock(checkpoint: Path, stack: ExitStack) -> bool:
    """Keep a checkpoint from being removed by its run until `stack` closes; False if it no longer exists."""
    try:
        stream = stack.enter_context((checkpoint / MANIFEST).open())
        return lock_file(stream, fcntl.LOCK_SH) and (checkpoint / MANIFEST).exists()
    except FileNotFoundError:
        return False
