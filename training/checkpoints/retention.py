"""Which checkpoints are kept: the last N, the best, every K-th step, and any that another process is reading."""

import fcntl
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import lock_file, write_atomically
from training.checkpoints.paths import BEST, DROPPED, MANIFEST, is_run_tag, step_of


@dataclass(frozen=True)
class Retention:
    """`keep_last` None keeps all. Steps that are multiples of `keep_every` are never removed."""

    keep_last: int | None = None
    keep_every: int | None = None


@dataclass(frozen=True)
class Best:
    """The content of `best.json`: the checkpoint, its loss or probe, and whether it was saved only for that."""

    tag: str
    mlm_loss: float | None = None  # None: it was chosen by a probe
    is_only_best: bool = False
    probe: str | None = None
    value: float | None = None  # of the probe

    @property
    def cost(self) -> float:
        """Lower is better, among those chosen by the same figure."""
        if self.probe is None:
            assert self.mlm_loss is not None
            return self.mlm_loss
        assert self.value is not None
        return -self.value

    def is_usable(self) -> bool:
        figure = self.mlm_loss if self.probe is None else self.value
        return isinstance(figure, int | float) and isinstance(self.tag, str) and isinstance(self.probe, str | None)


def read_best(folder: Path, tags: list[str]) -> Best | None:
    """The content of `best.json` if it can be read and names one of `tags`."""
    try:
        best = Best(**json.loads((folder / BEST).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return best if best.is_usable() and best.tag in tags else None


def write_best(folder: Path, best: Best) -> None:
    content = {key: value for key, value in asdict(best).items() if value is not None}
    write_atomically(folder / BEST, json.dumps(content) + "\n")


def retire(folder: Path, tags: list[str], retention: Retention, best: Best | None) -> None:
    """Write a new `best`, then remove what is not kept. `tags` are the candidates, oldest first.

    Copies under other names belong to the user: they are neither counted nor removed.
    """
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
    """Those of `tags` that are not among the last, and those in `also`, unless they are kept for another reason."""
    named = [tag for tag in tags if is_run_tag(tag)]
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


def sweep(folder: Path) -> None:
    """Remove what a killed _drop() left."""
    for rest in folder.glob(f"{DROPPED}*"):
        shutil.rmtree(rest, ignore_errors=True)


def read_lock(checkpoint: Path, stack: ExitStack) -> bool:
    """Keep a checkpoint from being removed by its run until `stack` closes; False if it no longer exists."""
    try:
        stream = stack.enter_context((checkpoint / MANIFEST).open())
        return lock_file(stream, fcntl.LOCK_SH) and (checkpoint / MANIFEST).exists()
    except FileNotFoundError:
        return False
