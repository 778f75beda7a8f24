"""The work folder of a preparation: what each task produced, which tasks are done, and when the folder is removed."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.console import console
from common.errors import UserError
from common.files import write_atomically
from data.instances.segments import Documents, Instances
from data.preparation.settings import Settings

WORK_FORMAT = 9  # changes with how sources are cut, what task results contain, and how shards are compressed
MARKER = "fingerprint"  # the file that names the preparation
DONE = "done"  # the folder of task results


class WorkFolder:
    """Intermediate files. A piece is a file of about 2 MB of clean text, the unit of work after reading.

    The result of a task is written last and atomically, so a task without a result is simply run again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("raw", "text", "hashes", "signatures", "keys", "tokens", "instances", DONE):
            (root / name).mkdir(parents=True, exist_ok=True)

    def result_path(self, stage: str, task: str) -> Path:
        return self.root / DONE / f"{stage}.{task}.json"

    def result(self, stage: str, task: str) -> Any | None:
        path = self.result_path(stage, task)
        return json.loads(path.read_text()) if path.is_file() else None

    def save_result(self, stage: str, task: str, result: Any) -> None:
        """Write a result atomically; without fsync, which would take longer than most tasks."""
        path = self.result_path(stage, task)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(result))
        temporary.replace(path)

    def text_path(self, piece: str) -> Path:
        return self.root / "text" / f"{piece}.txt"

    def texts(self, piece: str) -> list[str]:
        """Return the documents of a piece, one sentence per line."""
        return self.text_path(piece).read_text(encoding="utf-8").rstrip("\n").split("\n\n")

    def save_array(self, kind: str, name: str, array: np.ndarray) -> None:
        np.save(self.root / kind / f"{name}.npy", array, allow_pickle=False)

    def load_array(self, kind: str, name: str) -> np.ndarray:
        return np.load(self.root / kind / f"{name}.npy", allow_pickle=False)

    def save_documents(self, name: str, documents: Documents) -> None:
        np.savez(self.root / "tokens" / f"{name}.npz", **documents._asdict())

    def load_documents(self, name: str) -> Documents:
        with np.load(self.root / "tokens" / f"{name}.npz", allow_pickle=False) as stored:
            return Documents(*(stored[field] for field in Documents._fields))

    def save_instances(self, name: str, instances: Instances) -> None:
        self.save_array("instances", name, np.stack(instances).astype(np.int32))

    def load_instances(self, name: str) -> Instances:
        return Instances(*self.load_array("instances", name).astype(np.int64))


class Job(NamedTuple):
    """What every task of a preparation needs to know; small enough to be sent with each."""

    settings: Settings
    work: str
    output: str  # a folder or a URL
    tokenizer: str

    @property
    def folder(self) -> WorkFolder:
        return WorkFolder(Path(self.work))


def check_work_folder(work: Path) -> None:
    """Refuse a folder with files that are not of a preparation."""
    if work.is_dir() and not (work / MARKER).is_file() and not all(map(_is_marker, work.iterdir())):
        raise UserError(
            f"{work}: is not a work folder of this command, and not empty; expected a new or empty folder, or a work "
            f"folder of this command; give another --work_dir"
        )


def is_begun(work: Path, fingerprint: str) -> bool:
    """Whether the work folder belongs to this preparation, begun by any version of this program."""
    return _marker_in(work).partition(" ")[0] == fingerprint


def can_resume(work: Path, fingerprint: str) -> bool:
    """Whether this version of the program began this preparation in the work folder."""
    return _marker_in(work) == f"{fingerprint} {WORK_FORMAT}"


def open_work(work: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Open the work folder that an interrupted run of this preparation left, or a new one; return if it is resumed."""
    if can_resume(work, fingerprint) and not overwrite:
        console.say(f"{work}: resuming an earlier run")
        return True
    if is_begun(work, fingerprint) and not overwrite:
        console.say(f"{work}: begun by another version of this program; starting over")
    if work.exists():
        remove_work(work)
    work.mkdir(parents=True)
    write_atomically(work / MARKER, f"{fingerprint} {WORK_FORMAT}")
    return False


def close_work(work: Path, fingerprint: str, keep: bool) -> None:
    """Remove the work folder of a finished preparation, including one left by a run killed at its very end."""
    if can_resume(work, fingerprint) and not keep:
        remove_work(work)


@contextmanager
def using_work(work: Path) -> Iterator[None]:
    """If the input turns out to be a mistake, remove a new work folder and empty parent folders made for it.

    On Ctrl-C, say how to resume. Running tasks finish first; waiting ones are left for the next run.
    """
    made = [folder for folder in (work, *work.absolute().parents) if not folder.exists()]
    try:
        yield
    except KeyboardInterrupt:
        console.warn("interrupted; run the same command again to resume")
        raise
    except UserError:
        if made[:1] == [work]:
            with suppress(OSError):
                remove_work(work)
            for folder in made[1:]:
                with suppress(OSError):  # not empty: something else uses it by now
                    folder.rmdir()
        raise


def remove_work(work: Path) -> None:
    """Remove the folder so that a kill on the way leaves a valid one: task results first, the marker last."""
    for path in sorted(work.iterdir(), key=lambda path: (_is_marker(path), path.name != DONE)):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    work.rmdir()


def _is_marker(path: Path) -> bool:
    """Whether it is the marker, or a temporary file left by a kill while the marker was written."""
    return path.name == MARKER or path.name.startswith(f".{MARKER}.")


def _marker_in(work: Path) -> str:
    return (work / MARKER).read_text() if (work / MARKER).is_file() else ""
