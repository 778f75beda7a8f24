"""Checkpoints: DeepSpeed's files plus our state, visible only when complete.

A checkpoint is written below `.saving/`, then described by a manifest, then renamed to its place, and last of all the
pointer `latest` moves. A folder without a valid manifest is not a checkpoint. DeepSpeed's own tools read the result:
`<saved_models>/<job_name>/{latest,<tag>/…}` is the layout they know.
"""

import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import UserError
from common.files import file_digest, flush_folder, lock_file, write_atomically
from training import distributed
from training.retention import Best, Retention, read_best, retire, step_of, sweep

MANIFEST = "manifest.json"
STATE = "bert_pretraining.json"
STAGING = ".saving"
SKIPS = "skips.json"
A_RUNS_FOLDER = "give a run's <output_dir>/saved_models/<job_name> with complete checkpoints in it"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class TrainingState:
    """What a run must know to go on, beside DeepSpeed's own state. Readable JSON in the checkpoint.

    There is no random state in it: the order of samples and every rank's dropout follow from `seed` and `samples`.
    """

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
    is_kernel: bool = False  # whether DeepSpeed's fused layers hold the blocks' weights, under names of their own
    seconds: float = 0.0  # that this run has taken, over all its restarts
    longest_pause: float = 0.0  # seconds of a validation or checkpoint: what --time_budget keeps back for the last ones
    skips: tuple[tuple[int, int], ...] = ()  # samples from … to … that a rollback leaves out
    recipe: dict[str, Any] | None = None  # batch, schedule and optimizer, to tell what has changed on resume


class SaveFailed(Exception):
    """A checkpoint could not be written. Nothing is lost but this one; the message says what it takes."""


class CheckpointFolder:
    """The checkpoints of one run: `<output_dir>/saved_models/<job_name>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound: set[str] = set()  # tags that this process has verified or written
        self._commit: threading.Thread | None = None
        self._commit_failure: Exception | None = None

    def save(
        self,
        engine: Any,
        state: TrainingState,
        sources: dict[str, str],
        retention: Retention,
        best: Best | None = None,
    ) -> None:
        """Write a checkpoint; rank 0 goes on to commit it in the background, `finish()` waits for that.

        Called on every rank. `sources` are the user's files, kept verbatim. `best`: it is the best so far, and stays
        until there is a better one. Raises SaveFailed on all ranks alike.
        """
        tag = tag_of(state)
        staging = self.folder / STAGING
        is_known, problem = distributed.ask_main_rank(lambda: self._prepare(staging, tag, engine))
        if problem is not None:
            raise SaveFailed(problem)
        if is_known:
            if best is not None:
                distributed.ask_main_rank(lambda: retire(self.folder, self.tags(), retention, best))
            return
        engine.save_checkpoint(str(staging), tag=tag, save_latest=False)
        failure = engine.checkpoint_engine.take_failure()
        if distributed.any_rank(failure is not None)[0]:
            distributed.ask_main_rank(lambda: shutil.rmtree(staging, ignore_errors=True))
            raise SaveFailed(self.explain(failure, tag, engine))
        distributed.barrier()
        if distributed.is_main():
            task = (staging / tag, state, sources, retention, best)
            self._commit = threading.Thread(target=self._commit_quietly, args=task, name="commit")
            self._commit.start()

    def finish(self) -> None:
        """Wait for the commit in the background; SaveFailed on all ranks when it could not be done."""

        def join() -> str | None:
            if self._commit is not None:
                self._commit.join()
            self._commit, failure, self._commit_failure = None, self._commit_failure, None
            if failure is not None and not isinstance(failure, OSError):
                raise failure
            return None if failure is None else self.explain(failure, "the last checkpoint", None)

        problem = distributed.ask_main_rank(join)
        if problem is not None:
            raise SaveFailed(problem)

    def _prepare(self, staging: Path, tag: str, engine: Any) -> tuple[bool, str | None]:
        """Whether the checkpoint is there already, and if not, why there can be none."""
        if tag in self.sound and tag in self.tags():
            return True, None
        try:
            shutil.rmtree(staging, ignore_errors=True)
            sweep(self.folder)
            staging.mkdir(parents=True)
            if shutil.disk_usage(self.folder).free < self.size_of_next(engine):
                raise OSError("not enough space")
        except OSError as error:
            return False, self.explain(error, tag, engine)
        return False, None

    def size_of_next(self, engine: Any) -> int:
        """Bytes that a checkpoint takes: as the newest one did, else by the number of parameters."""
        for tag in reversed(self.tags()):
            files = _read_manifest(self.folder / tag)
            if files is not None:
                return sum(int(entry["size"]) for entry in files.values())
        return 12 * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())

    def explain(self, failure: Exception | None, tag: str, engine: Any) -> str:
        reason = "a file could not be written on another rank" if failure is None else str(failure)
        good = (self.tags() or ["none yet"])[-1]
        text = f"{self.folder}: {tag} was not saved ({reason}); the last good checkpoint is {good}"
        try:
            free = shutil.disk_usage(self.folder).free
            needed = self.size_of_next(engine) if engine is not None or self.tags() else 0
        except OSError:
            return f"{text}; the folder cannot be reached"
        missing = max(0, needed - free)
        return f"{text}. It takes {_megabytes(needed)} and {_megabytes(free)} are free" + (
            f": make room for {_megabytes(missing)} more" if missing else "; see that the disk is writable and not full"
        )

    def _commit_quietly(self, *task: Any) -> None:
        try:
            commit(self.folder, *task)
            self.sound.add(task[0].name)
        except Exception as error:  # told by finish()
            self._commit_failure = error
            shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    def best(self) -> Best | None:
        """The checkpoint with the lowest validation loss, where one was marked and is still there."""
        return read_best(self.folder, self.tags())

    def tags(self) -> list[str]:
        """Tags of the folders that carry a manifest, oldest step first."""
        if not self.folder.is_dir():
            return []
        found = [
            path
            for path in self.folder.iterdir()
            if not path.is_symlink() and TAG.fullmatch(path.name) and (path / MANIFEST).is_file()
        ]
        return [path.name for path in sorted(found, key=lambda path: (step_of(path.name), path.name))]

    def newest_valid(self, before_step: int | None = None) -> str | None:
        """The newest checkpoint whose files are all there and unchanged; those passed over are named."""
        for tag in reversed(self.tags()):
            if before_step is not None and step_of(tag) >= before_step:
                continue
            problem = find_damage(self.folder / tag)
            if problem is None:
                self.sound.add(tag)
                return tag
            self.sound.discard(tag)
            console.warn(f"{self.folder / tag}: passed over: {problem}")
        return None

    def choose(self, tag: str | None) -> str:
        """The checkpoint a user asked for (None: the newest); anything but a sound one is an error."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: there is no such folder; {A_RUNS_FOLDER}")
        if tag is None:
            newest = self.newest_valid()
            if newest is None:
                raise UserError(f"{self.folder}: holds no complete checkpoint; {A_RUNS_FOLDER}")
            return newest
        if not TAG.fullmatch(tag) or tag not in self.tags():
            known = ", ".join(self.tags()) or "none"
            raise UserError(
                f"{self.folder}: has no checkpoint {tag!r}; found: {known}; give one with --load_checkpoint_id"
            )
        problem = find_damage(self.folder / tag)
        if problem is not None:
            raise UserError(f"{self.folder / tag}: cannot be used: {problem}; choose another with --load_checkpoint_id")
        return tag


def commit(
    folder: Path,
    staged: Path,
    state: TrainingState,
    sources: dict[str, str],
    retention: Retention,
    best: Best | None,
) -> None:
    """Rank 0's part, in the order that makes a kill at any moment harmless."""
    write_atomically(staged / STATE, json.dumps(asdict(state), indent=2) + "\n")
    for name, text in sources.items():
        write_atomically(staged / name, text)
    write_manifest(staged)
    publish(staged, folder / staged.name)
    shutil.rmtree(staged.parent, ignore_errors=True)
    console.say(f"checkpoint: {folder / staged.name}" + (" (the best so far)" if best else ""))
    try:
        point_to(folder, staged.name)
        # One of a later step was passed over when this run was resumed; it must not push out those that are good.
        earlier = [tag for tag in CheckpointFolder(folder).tags() if step_of(tag) <= step_of(staged.name)]
        retire(folder, earlier, retention, best)
    except OSError as error:
        console.warn(f"{folder}: the checkpoint is there, but its pointers could not be written ({error})")


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


def publish(staged: Path, target: Path) -> None:
    """The one rename that makes a checkpoint of the folder. What is in its place can only be a damaged one."""
    if target.exists():
        aside = staged.with_name(f"{target.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    staged.rename(target)
    flush_folder(target.parent)


def point_to(folder: Path, tag: str) -> None:
    """Move DeepSpeed's pointer. We do not read it."""
    write_atomically(folder / "latest", tag)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if isinstance(files, dict) else None


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
    if not isinstance(content, dict) or not required <= set(content) <= names:
        raise UserError(f"{folder / STATE}: was written by another version of this project (keys differ); use that one")
    skips = tuple((first, last) for first, last in content.get("skips", ()))
    return TrainingState(**{**content, "skips": skips})


def tag_of(state: TrainingState) -> str:
    return f"step_{state.step:08d}"


@contextmanager
def in_use(checkpoint: Path) -> Generator[None]:
    """Keep a checkpoint from being retired by the run that owns it while it is read."""
    with ExitStack() as stack:
        try:
            stream = stack.enter_context((checkpoint / MANIFEST).open())
            is_there = lock_file(stream, fcntl.LOCK_SH) and (checkpoint / MANIFEST).exists()
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise UserError(f"{checkpoint}: was removed by the run that owns it; start again to take a newer one")
        yield


def write_skips(folder: Path, skips: Sequence[tuple[int, int]]) -> None:
    """Note the samples that a rollback leaves out where the next start finds them before the next checkpoint."""
    write_atomically(folder / SKIPS, json.dumps(skips) + "\n")


def read_skips(folder: Path) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((int(first), int(end)) for first, end in json.loads((folder / SKIPS).read_text()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / SKIPS}: cannot be read ({error}); mend it, or remove it to skip nothing") from None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
