"""Writing a run's checkpoints: DeepSpeed's files and ours, visible only when complete.

Every rank writes below `.saving/`. Then rank 0, in the background, adds our files and the manifest, publishes the
folder by renaming it, and updates the pointers `latest` and `best.json`. No valid checkpoint is lost on the way.
"""

import ctypes
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.console import console
from common.files import flush_folder, write_atomically
from training.checkpoints.folder import CheckpointFolder, Retention, retire
from training.checkpoints.manifest import find_damage, size_in, write_manifest
from training.checkpoints.paths import DAMAGED, DROPPED, LATEST, REPLACED, STAGING, STATE, step_of, tag_of_step
from training.checkpoints.state import Best, TrainingState, read_state, write_best
from training.runtime import collectives

AT_FDCWD = -100  # relative paths start at the current folder
RENAME_EXCHANGE = 2
Sources = dict[str, str | bytes]  # the user's files by name, saved verbatim


class SaveFailed(Exception):
    """A checkpoint could not be written; earlier ones are intact. The message says how much space is needed."""


class CheckpointWriter(CheckpointFolder):
    """The checkpoint folder that this run writes to."""

    def __init__(self, folder: Path, offer: Callable[[str, bool], None] | None = None) -> None:
        """`offer` is called on rank 0 with each published checkpoint, and whether it is the best so far."""
        super().__init__(folder)
        self._offer = offer
        self._needed: int | None = None  # bytes of the checkpoint that was begun last; rank 0 knows them
        self._commit: threading.Thread | None = None
        self._commit_failure: Exception | None = None

    def all_ranks_save(
        self, engine: Any, state: TrainingState, sources: Sources, retention: Retention, best: Best | None
    ) -> None:
        """Write a checkpoint. Collective. Rank 0 commits it in the background; `all_ranks_finish()` waits for that.

        `best` marks it as the best so far: it is kept until there is a better one. Raises SaveFailed on all ranks.
        """
        tag, staging = tag_of_step(state.step), self.folder / STAGING
        exists, problem = collectives.all_ranks_from_main(lambda: self._prepare(staging, state, engine))
        if problem is not None:
            raise SaveFailed(problem)
        if exists:
            if best is not None and collectives.is_main():
                self.update_pointers(tag, retention, best)
            return
        engine.save_checkpoint(str(staging), tag=tag, save_latest=False)
        names, failure = engine.checkpoint_engine.take_outcome()
        if collectives.all_ranks_any(failure is not None)[0]:
            collectives.all_ranks_from_main(lambda: shutil.rmtree(staging, ignore_errors=True))
            raise SaveFailed(self.explain(failure, tag))
        names_by_rank = collectives.all_ranks_gather(names)
        if collectives.is_main():
            files = [(rank, *file) for rank, found in enumerate(names_by_rank) for file in found]
            task = (staging / tag, best, state, sources, retention, files)
            self._commit = threading.Thread(target=self._commit_in_background, args=task, name="commit")
            self._commit.start()

    def join(self) -> None:
        """Wait for the commit in the background on this rank, whether or not it succeeds."""
        if self._commit is not None:
            self._commit.join()

    def all_ranks_finish(self) -> None:
        """Wait for the commit in the background. Collective. Raises SaveFailed on all ranks if it failed."""

        def join() -> str | None:
            self.join()
            self._commit, failure, self._commit_failure = None, self._commit_failure, None
            if failure is not None and not isinstance(failure, OSError):
                raise failure
            return None if failure is None else self.explain(failure, "the last checkpoint")

        problem = collectives.all_ranks_from_main(join)
        if problem is not None:
            raise SaveFailed(problem)

    def all_ranks_finish_or_warn(self) -> bool:
        """Wait for the commit in the background. Whether it succeeded; if not, the reason is reported."""
        try:
            self.all_ranks_finish()
        except SaveFailed as failure:
            console.warn(str(failure))
            return False
        return True

    def update_pointers(self, tag: str, retention: Retention, best: Best | None) -> None:
        """Make `latest` name the checkpoint `tag`, mark `best` as the best so far, and remove what is not kept."""
        try:
            point_to(self.folder, tag)
            # Later steps were skipped when this run resumed; they must not push out valid ones.
            earlier = [each for each in self.tags() if step_of(each) <= step_of(tag) and each not in self.damaged]
            retire(self.folder, earlier, retention, best)
        except OSError as error:
            console.warn(f"{self.folder}: {tag} was saved, but its pointers could not be written ({error})")

    def repair_pointers(self, tag: str, state: TrainingState) -> None:
        """Update `latest` and `best.json` if a kill after the rename left them behind; `state` is that of `tag`."""
        with suppress(OSError):
            point_to(self.folder, tag)
            best, saved = self.best(), best_of(state)
            if saved is None or saved.cost is None or saved.tag not in self.tags():
                return
            if best is None or best.cost is None or best.probe != saved.probe or best.cost > saved.cost:
                write_best(self.folder, saved)

    def size_of_next(self, engine: Any) -> int:
        """Bytes that the next checkpoint needs: the size of the newest one, else 12 per parameter."""
        newest = self.newest_known_valid()
        if newest is not None:
            return size_in(self.folder / newest)
        return 12 * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())

    def explain(self, failure: Exception | None, tag: str) -> str:
        """Why `tag` was not saved, the last valid checkpoint and the space needed. `failure` None: on another rank."""
        reason = "a file could not be written on another rank" if failure is None else str(failure)
        valid = self.newest_known_valid() or "none yet"
        text = f"{self.folder}: {tag} was not saved ({reason}); the last valid checkpoint is {valid}"
        if isinstance(failure, FileNotFoundError):  # space is not the reason
            return text
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return f"{text}; the folder cannot be reached"
        missing = (self._needed or 0) - free
        needed = "" if self._needed is None else f"It needs {self._needed / 1e6:,.1f} MB and "
        remedy = (
            f": free {missing / 1e6:,.1f} MB more" if missing > 0 else "; check that the disk is writable and not full"
        )
        return f"{text}. {needed}{free / 1e6:,.1f} MB are free{remedy}"

    def _prepare(self, staging: Path, state: TrainingState, engine: Any) -> tuple[bool, str | None]:
        """Whether the checkpoint exists already, and otherwise why it cannot be written, or None.

        A checkpoint of the same step but fewer samples seen (rows after it gave no step) is written again.
        """
        tag = tag_of_step(state.step)
        if tag in self.valid and tag in self.tags() and read_state(self.folder / tag).samples == state.samples:
            return True, None
        try:
            for rest in (staging, *self.folder.glob(f"{DROPPED}*")):  # of a save or a removal that was killed
                shutil.rmtree(rest, ignore_errors=True)
            staging.mkdir(parents=True)
            self._needed = self.size_of_next(engine)
            if shutil.disk_usage(self.folder).free < self._needed:
                raise OSError("not enough space")
        except OSError as error:
            return False, self.explain(error, tag)
        return False, None

    def _commit_in_background(self, staged: Path, best: Best | None, *rest: Any) -> None:
        try:
            self.commit(staged, best, *rest)
            self.valid.add(staged.name)
            if self._offer is not None:
                self._offer(staged.name, best is not None)
        except Exception as error:  # raised by all_ranks_finish()
            self._commit_failure = error
            shutil.rmtree(staged.parent, ignore_errors=True)

    def commit(
        self,
        staged: Path,
        best: Best | None,
        state: TrainingState,
        sources: Sources,
        retention: Retention,
        written: Sequence[tuple[int, str, int]],
    ) -> None:
        """Complete and publish `staged`, in an order that makes a kill at any moment harmless. Rank 0 only."""
        write_atomically(staged / STATE, json.dumps(asdict(state), indent=2) + "\n")
        for name, text in sources.items():
            write_atomically(staged / name, text)
        write_manifest(staged, written)
        publish(staged, self.folder / staged.name)
        self.damaged.discard(staged.name)
        shutil.rmtree(staged.parent, ignore_errors=True)
        console.say(f"checkpoint: {self.folder / staged.name}" + (" (the best so far)" if best else ""))
        self.update_pointers(staged.name, retention, best)


def point_to(folder: Path, tag: str) -> None:
    """Write DeepSpeed's pointer. This project never follows it: it goes by the manifests."""
    write_atomically(folder / LATEST, tag)


def best_of(state: TrainingState) -> Best | None:
    """What best.json contained when `state` was saved."""
    if state.best_tag is None:
        return None
    if state.best_by is None:
        return Best(state.best_tag, state.best_validation_loss, state.best_is_only)
    value = state.best_probe if state.probe_name == state.best_by else None  # the run goes by another one now
    return Best(state.best_tag, None, state.best_is_only, state.best_by, value)


def publish(staged: Path, target: Path) -> None:
    """Rename the finished folder `staged` to `target`.

    An existing `target` is either damaged, and is set aside, or a valid checkpoint of the same step with fewer samples
    seen, which stays valid until the new one has its name.
    """
    if not target.exists():
        settle(staged, target)
        return
    is_valid = find_damage(target) is None
    if is_valid and exchange(staged, target):
        flush_folder(target.parent)
        shutil.rmtree(staged, ignore_errors=True)
        return
    # A kill between the two renames leaves a valid one as REPLACED, and recover() renames it back.
    aside = target.with_name(f"{REPLACED}{target.name}" if is_valid else f"{target.name}{DAMAGED}")
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    try:
        settle(staged, target)
    except OSError:
        if is_valid and not target.exists():
            settle(aside, target)
        raise
    if is_valid:
        shutil.rmtree(aside, ignore_errors=True)
    else:
        console.warn(f"{target}: was damaged and has been saved again; the old one is {aside.name}, remove it yourself")


def settle(staged: Path, target: Path) -> None:
    staged.rename(target)
    flush_folder(target.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically; False if that fails: not all kernels and file systems support it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other)
    return rename is not None and rename(*paths, RENAME_EXCHANGE) == 0


def recover(folder: Path) -> None:
    """Clean up after a save that was killed: remove the staging folder, and restore a checkpoint that was set aside.

    Only the process that holds the folder's lock may call this; for another one the save may still be running.
    """
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    for spare in folder.glob(f"{REPLACED}*"):
        target = spare.with_name(spare.name.removeprefix(REPLACED))
        if target.exists():
            shutil.rmtree(spare, ignore_errors=True)
        else:
            settle(spare, target)
