"""The checkpoint that a run resumes from: chosen, read-locked, and refused if it does not match the run."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.console import console
from common.errors import Problems, UserError
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.match import ResumePoint, check_match, check_model
from training.checkpoints.paths import DAMAGED, step_of
from training.checkpoints.publish import recover
from training.checkpoints.remote import RemoteCheckpoints
from training.checkpoints.retention import read_lock
from training.checkpoints.state import TrainingState, read_state
from training.runtime import collectives


@dataclass(frozen=True)
class ResumeRequest:
    """What the flags say about where a run starts."""

    other: Path | None  # --load_training_checkpoint: another run's folder
    other_tag: str | None  # --load_checkpoint_id; None: the newest valid one
    is_only_weights: bool  # --finetune
    is_dry_run: bool  # holds no lock and changes nothing
    remote: RemoteCheckpoints | None  # --upload_checkpoints
    schedule_end: int | None  # the step at which the schedule ends, counted as the other run counts; None: no limit


def find_resume_point(request: ResumeRequest, checkpoints: CheckpointFolder) -> ResumePoint | None:
    """This run's newest valid checkpoint, else the one that the user named, else None: a new run."""
    if not request.is_dry_run:
        recover(checkpoints.folder)
    own = checkpoints.newest_valid()
    if request.remote is not None:
        request.remote.lease.acquire(checkpoints.folder)
        fetched = request.remote.fetch_newest(checkpoints.folder, after_step=-1 if own is None else step_of(own))
        if fetched is not None:
            checkpoints.valid.add(fetched)
            own = fetched
    if own is None and (checkpoints.tags() or any(checkpoints.folder.glob(f"step_*{DAMAGED}"))):
        raise UserError(
            f"{checkpoints.folder}: contains checkpoints, but none that is valid and named step_N. Restore one, or "
            f"pass another --job_name"
        )
    if own is not None:
        _report_unused(request, checkpoints.folder / own)
        best = checkpoints.best()
        is_before = best is not None and step_of(best.tag) <= step_of(own)
        return ResumePoint(checkpoints.folder, own, is_own=True, best=best if is_before else None)
    if request.other is not None:
        other = CheckpointFolder(request.other)
        tag = other.choose(request.other_tag)
        return ResumePoint(other.folder, tag, is_own=False, is_only_weights=request.is_only_weights)
    return None


def _report_unused(request: ResumeRequest, own: Path) -> None:
    """--load_training_checkpoint only says where a run starts; the same command, run again, resumes that run."""
    if request.other is not None:
        chosen = request.other if request.other_tag is None else request.other / request.other_tag
        console.say(
            f"note: --load_training_checkpoint: {chosen} is not used, because this run has its own checkpoint and "
            f"resumes from {own}; to start from {chosen} again, pass another --job_name"
        )


@contextmanager
def all_ranks_lock_resume_point(
    request: ResumeRequest, checkpoints: CheckpointFolder, fresh: TrainingState
) -> Generator[ResumePoint | None]:
    """The choice of find_resume_point(), read-locked while entered. If it is removed before the lock, the next one.

    Collective. `fresh` is the state of a new run, which the checkpoint must match.
    """
    for _ in range(3):
        point = collectives.all_ranks_from_main(lambda: find_resume_point(request, checkpoints))
        with ExitStack() as stack:
            is_gone = point is not None and not read_lock(point.path, stack)
            if not collectives.all_ranks_any(is_gone)[0]:
                if point is not None:
                    collectives.all_ranks_from_main(partial(check_resume_point, point, fresh, request.schedule_end))
                yield point
                return
    assert point is not None
    raise UserError(
        f"{point.path}: was removed by the run that owns it. Start again to use a newer one, or raise that run's "
        f"--keep_last"
    )


def check_resume_point(point: ResumePoint, fresh: TrainingState, schedule_end: int | None) -> None:
    """Refuse a checkpoint that a run with the state `fresh` cannot resume from, before anything is built."""
    saved = read_state(point.path)
    if point.is_only_weights:
        check_model(saved, fresh.model_config, fresh.is_preln, point.path)
        return
    problems = Problems()
    problems.attempt(lambda: check_match(saved, fresh, point))
    if not point.is_own and schedule_end is not None and saved.step >= schedule_end:
        problems.add(
            f"{point.path}: is of step {saved.step}, but the model JSON's total_training_steps is {schedule_end}, so "
            f"no step is left to train. Pass --rewarmup to count the schedule's steps from there, or raise "
            f"total_training_steps"
        )
    problems.raise_if_any()
