"""Publishing a checkpoint: one rename makes a finished folder visible, and no valid checkpoint is lost on the way."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from common.console import console
from common.files import flush_folder
from training.checkpoints.manifest import find_damage
from training.checkpoints.paths import DAMAGED, REPLACED, STAGING

AT_FDCWD = -100  # relative paths start at the current folder
RENAME_EXCHANGE = 2
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # kernels and file systems without renameat2(EXCHANGE)


def publish(staged: Path, target: Path) -> None:
    """Rename the finished folder `staged` to `target`.

    An existing `target` is either damaged, and is set aside, or a valid checkpoint of the same step with fewer samples
    seen, which stays valid until the new one has its name.
    """
    if not target.exists():
        settle(staged, target)
    elif find_damage(target) is None:
        replace(staged, target)
    else:
        aside = target.with_name(f"{target.name}{DAMAGED}")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        console.warn(f"{target}: was damaged and has been saved again; the old one is {aside.name}, remove it yourself")
        settle(staged, target)


def settle(staged: Path, target: Path) -> None:
    staged.rename(target)
    flush_folder(target.parent)


def replace(staged: Path, target: Path) -> None:
    """Put `staged` in the place of a valid checkpoint.

    Where names cannot be exchanged, a kill between the two renames leaves REPLACED, which recover() renames back.
    """
    if exchange(staged, target):
        flush_folder(target.parent)
        shutil.rmtree(staged, ignore_errors=True)
        return
    spare = target.with_name(f"{REPLACED}{target.name}")
    shutil.rmtree(spare, ignore_errors=True)
    target.rename(spare)
    settle(staged, target)
    shutil.rmtree(spare, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically; False if the kernel or the file system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


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
