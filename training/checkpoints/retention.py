"""Which checkpoints stay: the last N, the best, every K-th step, and any that someone is reading."""

import fcntl
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import lock_file, write_atomically

BEST = "best.json"
DROPPED = ".dropped_"


@dataclass(frozen=True)
class Retention:
    """`keep_last` None keeps all. `keep_every`: steps that are multiples of it stay for good."""

    keep_last: int | None = None
    keep_every: int | None = None


@dataclass(frozen=True)
class Best:
    """The pointer `best.json`: which checkpoint, its validation loss, and whether it was saved for that alone."""

    tag: str
    mlm_loss: float
    is_only_best: bool


def read_best(folder: Path, tags: list[str]) -> Best | None:
    """The checkpoint with the lowest validation loss, where one was marked and is among `tags`."""
    try:
        best = Best(**json.loads((folder / BEST).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_usable = isinstance(best.mlm_loss, int | float) and isinstance(best.tag, str)
    return best if is_usable and best.tag in tags else None


def retire(folder: Path, tags: list[str], retention: Retention, best: Best | None) -> None:
    """Note a new `best`, then drop what need not stay. `tags` are all there are, oldest first.

    A copy under another name is somebody's own: it neither counts nor goes.
    """
    before = read_best(folder, tags)
    ours = [tag for tag in tags if is_ours(tag)]
    surplus = [] if retention.keep_last is None else ours[: -retention.keep_last]
    if best is not None:
        write_best(folder, best)
        if before is not None and before.is_only_best and before.tag != best.tag:
            surplus = [*surplus, before.tag]
    kept = best or before
    for tag in surplus:
        is_kept_step = retention.keep_every is not None and step_of(tag) % retention.keep_every == 0
        if not is_kept_step and (kept is None or tag != kept.tag):
            _drop(folder / tag)


def write_best(folder: Path, best: Best) -> None:
    write_atomically(folder / BEST, json.dumps(asdict(best)) + "\n")


def is_ours(tag: str) -> bool:
    """Whether a run gave this name to a checkpoint."""
    return re.fullmatch(r"step_\d+", tag) is not None


def step_of(tag: str) -> int:
    """The step in a tag's name; -1 where there is none."""
    digits = re.search(r"(\d+)$", tag)
    return int(digits.group(1)) if digits else -1


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint unless it is being read. It is renamed first: half a folder must not look like one."""
    away = checkpoint.with_name(f"{DROPPED}{checkpoint.name}")
    try:
        with (checkpoint / "manifest.json").open("r+") as stream:  # network file systems lock only what can be written
            if not lock_file(stream, fcntl.LOCK_EX):
                return  # in use: dropped after a later save
            checkpoint.rename(away)
    except OSError:
        return
    shutil.rmtree(away, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Finish what a kill left half removed."""
    for rest in folder.glob(f"{DROPPED}*"):
        shutil.rmtree(rest, ignore_errors=True)
