"""What happens to a checkpoint while it is written, found or removed."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.patching import Fault, before, killer_of

# The moments of a save, in order; "between_files" is after the first of DeepSpeed's files on that rank.
SAVE_STAGES = ("before", "first_file", "between_files", "manifest", "rename", "pointer", "retire", "after")
# When a valid checkpoint is replaced: before and after their names are exchanged, and between the two
# renames of a file system that cannot exchange them.
REPLACE_STAGES = ("replace", "replaced", "set_aside")


def _kill(fault: Fault) -> None:
    """kill -9 at a stage of the save of `step`: of this rank, or by it of `all` or of the `launcher` (`who`)."""
    from training.checkpoints import writer as checkpoint
    from training.engine import checkpoint_files

    stage, tag = fault["stage"], f"step_{fault['step']:08d}"
    files: list[str] = []
    die = killer_of(fault.get("who", "self"))

    def at_file(_self: Any, state_dict: Any, path: str) -> None:
        if tag in path:
            files.append(path)
            if len(files) == (1 if stage == "first_file" else 2):
                die()

    def at_save(_self: Any, _engine: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.step == fault["step"]:
            die()

    def named(path: Path, *_: Any) -> None:
        if tag in str(path):
            die()

    if stage == "before":
        before(checkpoint.CheckpointWriter, "all_ranks_save", at_save)
    elif stage in ("first_file", "between_files"):
        before(checkpoint_files.CheckedFiles, "save", at_file)
    elif stage == "manifest":
        before(checkpoint, "write_manifest", named)
    elif stage == "rename":
        before(checkpoint, "publish", named)
    elif stage == "replace":
        before(checkpoint, "exchange", die)
    elif stage == "replaced":
        exchange = checkpoint.exchange
        checkpoint.exchange = lambda *paths: (exchange(*paths), die())[0]
    elif stage == "set_aside":
        checkpoint.exchange = lambda *_: False
        before(checkpoint, "settle", lambda staged, _: die() if any(staged.parent.parent.glob(".replaced_*")) else None)
    elif stage == "pointer":
        before(checkpoint, "point_to", lambda _folder, found: die() if found == tag else None)
    elif stage == "retire":
        before(checkpoint, "retire", lambda _folder, tags, *_: die() if tag in tags else None)
    else:
        assert stage == "after", stage
        original = checkpoint.CheckpointWriter.commit

        def commit(self: Any, staged: Path, *rest: Any) -> None:
            original(self, staged, *rest)
            named(staged)

        checkpoint.CheckpointWriter.commit = commit  # type: ignore[method-assign]


def _believe_in_space(_: Fault) -> None:
    """A disk that another process fills after we have looked."""
    from training.checkpoints import writer as checkpoint

    checkpoint.CheckpointWriter.size_of_next = lambda *_: 0  # type: ignore[method-assign]


def _slow_commit(fault: Fault) -> None:
    from training.checkpoints import writer as checkpoint

    before(checkpoint, "write_manifest", lambda *_: time.sleep(fault["seconds"]))


def _no_commit(fault: Fault) -> None:
    """The disk is full when the manifest of `step` or of a later one is written."""
    from training.checkpoints import writer as checkpoint

    def refuse(staged: Path, *_: Any) -> None:
        if int(staged.name.removeprefix("step_")) >= fault["step"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staged))

    before(checkpoint, "write_manifest", refuse)


def _patience(fault: Fault) -> None:
    """Wait less for space than people would want to."""
    from training.checkpoints import saving

    saving.RETRY_SECONDS = 0.1
    saving.Saver.all_ranks_save_last.__defaults__ = (None, float(fault["seconds"]))


def _file_elsewhere(_: Fault) -> None:
    """What this rank writes lands on a disk that rank 0 does not see."""
    from training.checkpoints import manifest
    from training.engine import checkpoint_files

    manifest.APPEARING_SECONDS = 0.3
    original = checkpoint_files.CheckedFiles.save

    def save(self: Any, state_dict: Any, path: str) -> None:
        original(self, state_dict, path)
        if int(os.environ["RANK"]) == 1:
            Path(path).unlink()

    checkpoint_files.CheckedFiles.save = save  # type: ignore[method-assign]


def _origin_vanishes(fault: Fault) -> None:
    """The run that owns the checkpoint `tag` removes it right after it was chosen."""
    from training.checkpoints import resume as choice

    original = choice.find_resume_point

    def find_resume_point(*args: Any) -> Any:
        origin = original(*args)
        if origin is not None and origin.path.name == fault["tag"]:
            origin.path.rename(origin.path.with_name(f".dropped_{origin.path.name}"))
        return origin

    choice.find_resume_point = find_resume_point


def _forget_optimizer_state(_: Fault) -> None:
    """Resharding that loses what the optimizer knew."""
    from training.checkpoints import loading as zero_files

    whole = zero_files.ZeroCheckpoint.read

    def without_state(folder: Path) -> zero_files.ZeroCheckpoint:
        saved = whole(folder)
        for states in saved.tensors.values():
            for key in states.keys() - {zero_files.WEIGHT}:
                states[key] = states[key] * 0
        return saved

    zero_files.ZeroCheckpoint.read = without_state  # type: ignore[method-assign,assignment]


KINDS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "believe_in_space": _believe_in_space,
    "slow_commit": _slow_commit,
    "no_commit": _no_commit,
    "patience": _patience,
    "file_elsewhere": _file_elsewhere,
    "origin_vanishes": _origin_vanishes,
    "forget_optimizer_state": _forget_optimizer_state,
}
