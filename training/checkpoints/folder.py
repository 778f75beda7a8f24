"""Checkpoints: DeepSpeed's files plus our state, visible only when complete.

A checkpoint is written below `.saving/`, then described by a manifest, then renamed to its place, and last of all the
pointer `latest` moves. A folder without a valid manifest is not a checkpoint. DeepSpeed's own tools read the result:
`<saved_models>/<job_name>/{latest,<tag>/…}` is the layout they know.
"""

import fcntl
import json
import re
import shutil
import threading
from collections.abc import Container, Sequence
from contextlib import ExitStack, suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.console import console
from common.errors import UserError, shortened
from common.files import lock_file, write_atomically
from training.checkpoints.manifest import MANIFEST, STATE, WrittenFile, find_damage, size_in, write_manifest
from training.checkpoints.publish import DAMAGED, STAGING, publish
from training.checkpoints.random_states import RANDOM_STATES, RandomStates, as_text
from training.checkpoints.retention import Best, Retention, is_ours, read_best, retire, step_of, sweep, write_best
from training.checkpoints.skips import Ranges, as_skips
from training.runtime import collectives
from training.settings.json_files import load_json

A_RUNS_FOLDER = "give a run's <output_dir>/saved_models/<job_name> with complete checkpoints in it"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class TrainingState:
    """What a run must know to go on, beside DeepSpeed's own state. Readable JSON in the checkpoint.

    The order of samples and every rank's dropout follow from `seed` and `samples`; random states have their own file.
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
    is_kernel: bool = False  # whether DeepSpeed's fused layers read_lock the blocks' weights, under names of their own
    seconds: float = 0.0  # that this run has taken, over all its restarts
    longest_pause: float = 0.0  # seconds of a validation or checkpoint: what --time_budget keeps back for the last ones
    skips: Ranges = ()  # samples from … to … that are left out
    rollbacks: Ranges = ()  # those of them that came of going back, and were not written by hand
    recipe: dict[str, Any] | None = None  # batch, schedule and optimizer, to tell what has changed on resume
    data_summary: str | None = None  # files and rows, to tell what has changed
    best_tag: str | None = None  # with --keep_best: the checkpoint of best_validation_loss
    best_is_only: bool = False  # whether that one was saved for its loss alone


STATE_TYPE = TypeAdapter(TrainingState)


class SaveFailed(Exception):
    """A checkpoint could not be written. Nothing is lost but this one; the message says what it takes."""


class CheckpointFolder:
    """The checkpoints of one run: `<output_dir>/saved_models/<job_name>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound: set[str] = set()  # tags that this process has verified or written
        self.damaged: set[str] = set()  # damaged ones: they must not push out those that are good
        self._commit: threading.Thread | None = None
        self._commit_failure: Exception | None = None

    def save(
        self,
        engine: Any,
        state: TrainingState,
        sources: dict[str, str | bytes],
        retention: Retention,
        best: Best | None = None,
    ) -> None:
        """Write a checkpoint; rank 0 goes on to commit it in the background, `finish()` waits for that.

        Called on every rank. `sources` are the user's files, kept verbatim. `best`: it is the best so far, and stays
        until there is a better one. Raises SaveFailed on all ranks alike.
        """
        tag = tag_of(state)
        staging = self.folder / STAGING
        is_known, problem = collectives.all_ranks_from_main(lambda: self._prepare(staging, state, engine))
        if problem is not None:
            raise SaveFailed(problem)
        if is_known:
            if best is not None and collectives.is_main():
                self.note_best(retention, best)
            return
        engine.save_checkpoint(str(staging), tag=tag, save_latest=False)
        names, failure = engine.checkpoint_engine.take_outcome()
        if collectives.all_ranks_any(failure is not None)[0]:
            collectives.all_ranks_from_main(lambda: shutil.rmtree(staging, ignore_errors=True))
            raise SaveFailed(self.explain(failure, tag, engine))
        told = collectives.all_ranks_gather((names, RandomStates.now()))
        if collectives.is_main():
            files = [WrittenFile(rank, *file) for rank, (found, _) in enumerate(told) for file in found]
            sources = {**sources, RANDOM_STATES: as_text([random_state for _, random_state in told])}
            task = (staging / tag, state, sources, retention, best, files, self.damaged)
            self._commit = threading.Thread(target=self._commit_quietly, args=task, name="commit")
            self._commit.start()

    def note_best(self, retention: Retention, best: Best) -> None:
        """Mark a checkpoint that is there already."""
        try:
            retire(self.folder, [tag for tag in self.tags() if tag not in self.damaged], retention, best)
        except OSError as error:
            console.warn(f"{self.folder}: {best.tag} is the best so far, but best.json cannot be written ({error})")

    def repair_pointers(self, tag: str, state: TrainingState) -> None:
        """What a kill right after the rename left undone: `latest`, and `best.json` from the state of `tag`."""
        with suppress(OSError):
            if _read_pointer(self.folder) != tag:
                point_to(self.folder, tag)
            noted, lowest = self.best(), state.best_validation_loss
            if state.best_tag not in self.tags() or lowest is None or (noted and noted.mlm_loss <= lowest):
                return
            assert state.best_tag is not None
            write_best(self.folder, Best(state.best_tag, lowest, state.best_is_only))

    def join(self) -> None:
        """Wait for the commit in the background, on this rank alone and whatever comes of it."""
        if self._commit is not None:
            self._commit.join()

    def finish(self) -> None:
        """Wait for the commit in the background; SaveFailed on all ranks when it could not be done."""

        def join() -> str | None:
            if self._commit is not None:
                self._commit.join()
            self._commit, failure, self._commit_failure = None, self._commit_failure, None
            if failure is not None and not isinstance(failure, OSError):
                raise failure
            return None if failure is None else self.explain(failure, "the last checkpoint", None)

        problem = collectives.all_ranks_from_main(join)
        if problem is not None:
            raise SaveFailed(problem)

    def _prepare(self, staging: Path, state: TrainingState, engine: Any) -> tuple[bool, str | None]:
        """Whether the checkpoint is there already, and if not, why there can be none.

        One of the same step from before the cursor moved on, over rows that gave no step, is not the same.
        """
        tag = tag_of(state)
        if tag in self.sound and tag in self.tags() and read_state(self.folder / tag).samples == state.samples:
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
        newest = self.newest_known_valid()
        if newest is not None:
            return size_in(self.folder / newest)
        return 12 * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())

    def newest_known_valid(self) -> str | None:
        """The newest of those that this process has verified or written. Reads no large file."""
        return next((tag for tag in reversed(self.tags()) if tag in self.sound), None)

    def explain(self, failure: Exception | None, tag: str, engine: Any) -> str:
        reason = "a file could not be written on another rank" if failure is None else str(failure)
        good = self.newest_known_valid()
        text = f"{self.folder}: {tag} was not saved ({reason}); the last good checkpoint is {good or 'none yet'}"
        if isinstance(failure, FileNotFoundError):  # not for want of space
            return text
        try:
            free = shutil.disk_usage(self.folder).free
            needed = self.size_of_next(engine) if engine is not None or good is not None else 0
        except OSError:
            return f"{text}; the folder cannot be reached"
        missing = max(0, needed - free)
        return f"{text}. It takes {_megabytes(needed)} and {_megabytes(free)} are free" + (
            f": make room for {_megabytes(missing)} more" if missing else "; see that the disk is writable and not full"
        )

    def _commit_quietly(self, *task: Any) -> None:
        try:
            self.damaged.discard(task[0].name)  # it is written anew
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
            if not path.is_symlink()
            and TAG.fullmatch(path.name)
            and not path.name.endswith(DAMAGED)
            and (path / MANIFEST).is_file()
        ]
        return [path.name for path in sorted(found, key=lambda path: (step_of(path.name), path.name))]

    def incomplete(self) -> list[str]:
        """Names of folders that look like checkpoints of ours but have no manifest."""
        if not self.folder.is_dir():
            return []
        return [path.name for path in self.folder.iterdir() if is_ours(path.name) and not (path / MANIFEST).is_file()]

    def newest_valid(self, before_step: int | None = None) -> str | None:
        """The newest checkpoint whose files are all there and unchanged; those passed over are named.

        A copy under another name is somebody's own, whatever its name ends with: it is taken only when it is asked for.
        """
        ours = [tag for tag in self.tags() if is_ours(tag)]
        for tag in sorted([*ours, *self.incomplete()], key=lambda tag: (step_of(tag), tag), reverse=True):
            if before_step is not None and step_of(tag) >= before_step:
                continue
            problem = find_damage(self.folder / tag)
            if problem is None:
                self.sound.add(tag)
                return tag
            self.sound.discard(tag)
            self.damaged.add(tag)
            console.warn(f"{self.folder / tag}: passed over: {problem}")
        return None

    def check_is_there(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: there is no such folder; {A_RUNS_FOLDER}")

    def _remedy(self) -> str:
        """What to give instead, where the folder is something else of ours."""
        if (self.folder / MANIFEST).is_file():
            return f"it is one itself; give {self.folder.parent} and --load_checkpoint_id {self.folder.name}"
        if (self.folder / "model.safetensors").is_file():
            return "it is a Hugging Face folder; give it with --use_pretrain"
        return A_RUNS_FOLDER

    def choose(self, tag: str | None) -> str:
        """The checkpoint a user asked for (None: the newest); anything but a sound one is an error."""
        self.check_is_there()
        if tag is None:
            newest = self.newest_valid()
            if newest is None:
                raise UserError(f"{self.folder}: holds no complete checkpoint named step_N; {self._remedy()}")
            return newest
        if not TAG.fullmatch(tag) or tag not in self.tags():
            known = ", ".join(self.tags()) or "none"
            raise UserError(
                f"{self.folder}: has no checkpoint {tag!r}; found: {known}; give one with --load_checkpoint_id"
            )
        problem = find_damage(self.folder / tag)
        if problem is not None:
            raise UserError(
                f"{self.folder / tag}: cannot be used: {problem}; choose another (--load_checkpoint_id, or "
                f"export_hf.py --checkpoint)"
            )
        return tag


def commit(
    folder: Path,
    staged: Path,
    state: TrainingState,
    sources: dict[str, str | bytes],
    retention: Retention,
    best: Best | None,
    written: Sequence[WrittenFile] = (),
    damaged: Container[str] = (),
) -> None:
    """Rank 0's part, in the order that makes a kill at any moment harmless."""
    write_atomically(staged / STATE, json.dumps(asdict(state), indent=2) + "\n")
    for name, text in sources.items():
        write_atomically(staged / name, text)
    write_manifest(staged, written)
    publish(staged, folder / staged.name)
    shutil.rmtree(staged.parent, ignore_errors=True)
    console.say(f"checkpoint: {folder / staged.name}" + (" (the best so far)" if best else ""))
    try:
        point_to(folder, staged.name)
        # One of a later step was passed over when this run was resumed; it must not push out those that are good.
        earlier = [tag for tag in CheckpointFolder(folder).tags() if step_of(tag) <= step_of(staged.name)]
        retire(folder, [tag for tag in earlier if tag not in damaged], retention, best)
    except OSError as error:
        console.warn(f"{folder}: the checkpoint is there, but its pointers could not be written ({error})")


def point_to(folder: Path, tag: str) -> None:
    """Move DeepSpeed's pointer. What it says is not believed: we go by the manifests."""
    write_atomically(folder / "latest", tag)


def _read_pointer(folder: Path) -> str | None:
    try:
        return (folder / "latest").read_text()
    except (OSError, ValueError):
        return None


def read_state(folder: Path) -> TrainingState:
    """Our part of a checkpoint that has been found sound. Its values are a stranger's until they are checked."""
    path = folder / STATE
    content = load_json(path, "the state of a run")
    names = {field.name for field in fields(TrainingState)}
    required = {field.name for field in fields(TrainingState) if field.default is MISSING}
    if not required <= set(content) <= names:
        missing, unknown = (
            ", ".join(sorted(keys)) or "none" for keys in (required - set(content), set(content) - names)
        )
        raise UserError(
            f"{path}: was written by another version of this project (missing keys: {missing}; unknown keys: "
            f"{shortened(unknown)}); expected those of this version; use the one that wrote it"
        )
    try:
        for key in ("skips", "rollbacks"):
            as_skips(content.get(key, []))
        state = STATE_TYPE.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise UserError(
            f"{path}: {place}: found {shortened(detail['input'])}, but {detail['msg']}; use another checkpoint"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; use another checkpoint") from None
    _check_ranges(state, path)
    return state


def _check_ranges(state: TrainingState, path: Path) -> None:
    numbers = {
        field.name: value
        for field in fields(state)
        if isinstance(value := getattr(state, field.name), int | float) and field.name != "best_validation_loss"
    }
    for name, value in numbers.items():
        if not 0 <= value < 2**63:
            raise UserError(f"{path}: {name}: found {shortened(value)}, expected 0 to 2^63 - 1; use another checkpoint")
    if state.world_size < 1 or state.zero_stage > 3 or state.start_step > state.step:
        raise UserError(
            f"{path}: world_size {state.world_size}, zero_stage {state.zero_stage}, start_step {state.start_step} and "
            f"step {state.step} cannot be; use another checkpoint"
        )


def tag_of(state: TrainingState) -> str:
    return f"step_{state.step:08d}"


def read_lock(checkpoint: Path, stack: ExitStack) -> bool:
    """Keep a checkpoint from being retired by the run that owns it until `stack` closes; False: it has gone."""
    try:
        stream = stack.enter_context((checkpoint / MANIFEST).open())
        return lock_file(stream, fcntl.LOCK_SH) and (checkpoint / MANIFEST).exists()
    except FileNotFoundError:
        return False


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
