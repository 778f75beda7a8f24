"""A finished checkpoint's last move, to where it is looked for; the one it takes the place of is never lost."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from common.console import console
from common.files import flush_folder
from training.checkpoints.manifest import find_damage

STAGING = ".saving"
DAMAGED = ".damaged"
REPLACED = ".replaced_"
AT_FDCWD = -100  # paths are taken as they are
RENAME_EXCHANGE = 2
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # what kernels and file systems answer that have none


def publish(staged: Path, target: Path) -> None:
    """The one rename that makes a checkpoint of the folder.

    What is in its place is a damaged one, which is set aside, or the same step with fewer rows seen: that one is good
    until the moment when the new one has its name.
    """
    if not target.exists():
        settle(staged, target)
    elif find_damage(target) is None:
        replace(staged, target)
    else:
        aside = target.with_name(f"{target.name}{DAMAGED}")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        console.warn(f"{target}: was damaged and is written anew; {aside.name} is the old one, for you to remove")
        settle(staged, target)


def settle(staged: Path, target: Path) -> None:
    staged.rename(target)
    flush_folder(target.parent)


def replace(staged: Path, target: Path) -> None:
    """Put `staged` where a sound checkpoint is. Without an exchange of names there is a moment that recover() mends."""
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
    """Swap two folders' names in one step; False where the system cannot (older kernels, network file systems)."""
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
    """What a kill in the middle of a save left: an old checkpoint gets its name again, unless the new one has it.

    By the process that holds the folder's lock: for another it may be the middle of a save.
    """
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    for spare in folder.glob(f"{REPLACED}*"):
        target = spare.with_name(spare.name.removeprefix(REPLACED))
        if target.exists():
            shutil.rmtree(spare, ignore_errors=True)
        else:
            settle(spare, target)
