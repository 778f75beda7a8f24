"""Checkpoints: DeepSpeed's files plus our state, visible only when complete.

A checkpoint is written below `.saving/`, then described by a manifest, then renamed to its place, and last of all the
pointer `latest` moves. A folder without a valid manifest is not a checkpoint. DeepSpeed's own tools read the result:
`<saved_models>/<job_name>/{latest,<tag>/…}` is the layout they know.
"""

import json
import os
import re
import shutil
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import UserError
from common.files import file_digest, flush_folder, write_atomically
from training import distributed

MANIFEST = "manifest.json"
STATE = "bert_pretraining.json"
STAGING = ".saving"
BEST = "best.json"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class TrainingState:
    """What a run must know to go on, beside DeepSpeed's own state. Readable JSON in the checkpoint."""

    step: int  # optimizer steps applied, those of an earlier phase included
    start_step: int  # the step at which this run began; not 0 when it began from another run's checkpoint
    samples: int  # the data cursor: rows consumed from this run's data
    tokens: int  # real tokens seen in this run
    seed: int
    world_size: int
    zero_stage: int
    precision: str
    data_digest: str
    tokenizer_digest: str | None
    best_validation_loss: float | None
    model_config: dict[str, Any]
    is_preln: bool
    seconds: float = 0.0  # that this run has taken, over all its restarts


@dataclass(frozen=True)
class Best:
    """The pointer `best.json`: which checkpoint, its validation loss, and whether it was saved for that alone."""

    tag: str
    mlm_loss: float
    is_only_best: bool


class CheckpointFolder:
    """The checkpoints of one run: `<output_dir>/saved_models/<job_name>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        engine: Any,
        state: TrainingState,
        sources: dict[str, str],
        keep_last: int | None = None,
        best: "Best | None" = None,
    ) -> Path:
        """Write and commit a checkpoint. Called on every rank; `sources` are the user's files, kept verbatim.

        `best`: it is the best so far, and stays until there is a better one.
        """
        tag = tag_of(state)
        staging = self.folder / STAGING
        distributed.on_main_rank_first(lambda: self._clear_staging(staging))
        engine.save_checkpoint(str(staging), tag=tag, save_latest=False)
        distributed.barrier()
        distributed.on_main_rank_first(lambda: self._commit(staging / tag, state, sources, keep_last, best))
        return self.folder / tag

    def _clear_staging(self, staging: Path) -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def _commit(
        self,
        staged: Path,
        state: TrainingState,
        sources: dict[str, str],
        keep_last: int | None,
        best: "Best | None",
    ) -> None:
        write_atomically(staged / STATE, json.dumps(asdict(state), indent=2) + "\n")
        for name, text in sources.items():
            write_atomically(staged / name, text)
        write_manifest(staged)
        target = self.folder / staged.name
        if target.exists():
            shutil.rmtree(target)
        staged.rename(target)
        flush_folder(self.folder)
        write_atomically(self.folder / "latest", target.name)
        shutil.rmtree(staged.parent, ignore_errors=True)
        if best is not None:
            self._mark_best(best)
        if keep_last is not None:
            kept = self.best()
            for old in self.tags()[:-keep_last]:
                if kept is None or old != kept.tag:
                    shutil.rmtree(self.folder / old)

    def _mark_best(self, best: "Best") -> None:
        """Point to the new best, then drop the old one if it was kept for nothing else."""
        old = self.best()
        write_atomically(self.folder / BEST, json.dumps(asdict(best)) + "\n")
        if old is not None and old.is_only_best and old.tag != best.tag and old.tag in self.tags():
            shutil.rmtree(self.folder / old.tag)

    def best(self) -> "Best | None":
        """The checkpoint with the lowest validation loss, where one was marked and is still there."""
        try:
            best = Best(**json.loads((self.folder / BEST).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return best if best.tag in self.tags() else None

    def tags(self) -> list[str]:
        """Tags of the folders that carry a manifest, oldest step first."""
        if not self.folder.is_dir():
            return []
        found = [
            path
            for path in self.folder.iterdir()
            if not path.is_symlink() and TAG.fullmatch(path.name) and (path / MANIFEST).is_file()
        ]
        return [path.name for path in sorted(found, key=lambda path: (_step_of(path), path.name))]

    def newest_valid(self) -> str | None:
        """The newest checkpoint whose files are all there and unchanged; those passed over are named."""
        for tag in reversed(self.tags()):
            problem = find_damage(self.folder / tag)
            if problem is None:
                return tag
            console.warn(f"{self.folder / tag}: passed over: {problem}")
        return None

    def choose(self, tag: str | None) -> str:
        """The checkpoint a user asked for (None: the newest); anything but a sound one is an error."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: there is no such folder; expected one with checkpoints in it")
        if tag is None:
            newest = self.newest_valid()
            if newest is None:
                raise UserError(f"{self.folder}: holds no complete checkpoint; expected folders with a {MANIFEST}")
            return newest
        if not TAG.fullmatch(tag) or tag not in self.tags():
            known = ", ".join(self.tags()) or "none"
            raise UserError(f"{self.folder}: has no checkpoint {tag!r}; found: {known}")
        problem = find_damage(self.folder / tag)
        if problem is not None:
            raise UserError(f"{self.folder / tag}: cannot be used: {problem}; choose another with --load_checkpoint_id")
        return tag


def tag_of(state: TrainingState) -> str:
    return f"step_{state.step:08d}"


def write_manifest(folder: Path) -> None:
    """List every file of `folder` with size and digest, and flush them to disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_digest(path)}
    flush_folder(folder)
    write_atomically(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=2) + "\n")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size} bytes, its manifest says {expected['size']}"
            if file_digest(path) != expected["sha256"]:
                return f"{name} differs from its digest in the manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be used ({error})"
    return None if STATE in files else f"{STATE} is missing"


def read_state(folder: Path) -> TrainingState:
    """Our part of a checkpoint that has been found sound."""
    content = json.loads((folder / STATE).read_text())
    names = {field.name for field in fields(TrainingState)}
    required = {field.name for field in fields(TrainingState) if field.default is MISSING}
    if not required <= set(content) <= names:
        raise UserError(f"{folder / STATE}: was written by another version of this project; keys differ")
    return TrainingState(**content)


def _step_of(folder: Path) -> int:
    digits = re.search(r"(\d+)$", folder.name)
    return int(digits.group(1)) if digits else -1
