"""Data, disks and terminals that fail."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.patching import Fault, before


def _reader_dies(fault: Fault) -> None:
    """A shard is closed while this rank reads it, after `reads` reads of it: the next read raises an error.

    Reads are counted from the first read of a `step` or of the `validation` (`since`) on, where that is given.
    """
    from data.shards.reader import ShardFile
    from training.faults.step_reader import StepReader
    from training.validation import Validator

    files: list[Path] = []

    def lose(self: Any, *_: Any, **__: Any) -> None:
        files.append(self.path)
        if fault["name"] == self.path.name and files.count(self.path) > fault["reads"]:
            self.close()

    first_calls = {"step": (StepReader, "all_ranks_next"), "validation": (Validator, "all_ranks_measure")}
    begun: list[bool] = []

    def begin(*_: Any) -> None:
        if not begun:
            begun.append(True)
            before(ShardFile, "read", lose)

    if "since" in fault:
        before(*first_calls[fault["since"]], begin)
    else:
        before(ShardFile, "read", lose)


def _slow_reader(fault: Fault) -> None:
    """A reader that is never ahead of the training."""
    from data.stream.loader import TrainingStream

    before(TrainingStream, "_make_step", lambda *_: time.sleep(fault["seconds"]))


def _lose_output(fault: Fault) -> None:
    """Redirect standard output (with `both`, errors too) to a full disk, or to a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    target = os.open("/dev/full", os.O_WRONLY) if fault["how"] == "full" else writer
    for descriptor in (1, 2) if fault.get("both") else (1,):
        os.dup2(target, descriptor)


def _fill_disk(fault: Fault) -> None:
    """Another process takes the last byte of the disk of `folder` right before the step of these samples."""
    from training import loop

    def fill(_engine: Any, step: Any, *_: Any) -> None:
        if step.next_sample == fault["next_sample"]:
            free = os.statvfs(fault["folder"])
            Path(fault["folder"], "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))

    before(loop, "all_ranks_take_step", fill)


KINDS: dict[str, Callable[[Fault], None]] = {
    "reader_dies": _reader_dies,
    "slow_reader": _slow_reader,
    "lose_output": _lose_output,
    "fill_disk": _fill_disk,
}
