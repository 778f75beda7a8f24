"""Which checkpoints stay: the last N, the best, every K-th step, and any that someone is reading."""

import fcntl
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import write_atomically

BEST = "best.json"


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
    except (OSError, ValueError, TypeError):
        return None
    return best if best.tag in tags else None


def retire(folder: Path, tags: list[str], retention: Retention, best: Best | None) -> None:
    """Note a new `best`, then drop what need not stay. `tags` are all there are, oldest first."""
    before = read_best(folder, tags)
    if best is not None:
        write_atomically(folder / BEST, json.dumps(asdict(best)) + "\n")
        if before is not None and before.is_only_best and before.tag != best.tag:
            _drop(folder / before.tag)
    kept = best or before
    surplus = [] if retention.keep_last is None else tags[: -retention.keep_last]
    for tag in surplus:
        is_kept_step = retention.keep_every is not None and step_of(tag) % retention.keep_every == 0
        if not is_kept_step and (kept is None or tag != kept.tag):
            _drop(folder / tag)


def step_of(tag: str) -> int:
    """The step in a tag's name; -1 where there is none."""
    digits = re.search(r"(\d+)$", tag)
    return int(digits.group(1)) if digits else -1


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint unless it is being read. The manifest goes first: half a folder is not a checkpoint."""
    manifest = checkpoint / "manifest.json"
    try:
        with manifest.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            manifest.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        return  # in use: dropped after a later save
    shutil.rmtree(checkpoint, ignore_errors=True)
