"""The checkpoint that a start goes on from: chosen, kept from being removed, and refused where it does not fit."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from common.console import console
from common.errors import Problems, UserError
from training.checkpoints.folder import CheckpointFolder, TrainingState, read_lock, read_state
from training.checkpoints.match import ResumePoint, check_match, check_model
from training.checkpoints.publish import DAMAGED, recover
from training.checkpoints.retention import step_of
from training.runtime import collectives
from training.settings.resolve import Settings


def find_resume_point(settings: Settings, checkpoints: CheckpointFolder) -> ResumePoint | None:
    """This run's newest sound checkpoint; else the one the user named; else None, a new run."""
    if not settings.training_flags.dry_run:  # which holds no lock, and changes nothing
        recover(checkpoints.folder)
    own = checkpoints.newest_valid()
    if own is None and (checkpoints.tags() or any(checkpoints.folder.glob(f"step_*{DAMAGED}"))):
        raise UserError(
            f"{checkpoints.folder}: holds checkpoints, but none that is sound and named step_N; restore one, or pass "
            f"another --job_name"
        )
    if own is not None:
        report_unused_checkpoint(settings, checkpoints.folder / own)
        best = checkpoints.best()
        is_before = best is not None and step_of(best.tag) <= step_of(own)
        return ResumePoint(
            checkpoints.folder, own, is_own=True, best_loss=best.mlm_loss if best and is_before else None
        )
    if settings.checkpoint_flags.load_training_checkpoint is not None:
        other = CheckpointFolder(settings.checkpoint_flags.load_training_checkpoint)
        tag = other.choose(settings.checkpoint_flags.load_checkpoint_id)
        return ResumePoint(other.folder, tag, is_own=False, is_only_weights=settings.model_flags.finetune)
    return None


def report_unused_checkpoint(settings: Settings, own: Path) -> None:
    """--load_training_checkpoint says what a run begins with; the same command, run again, goes on where it was."""
    other, tag = settings.checkpoint_flags.load_training_checkpoint, settings.checkpoint_flags.load_checkpoint_id
    if other is not None:
        chosen = other if tag is None else other / tag
        console.say(
            f"note: --load_training_checkpoint: {chosen} is not used, because this run has a checkpoint of its own and "
            f"goes on from {own}; to begin from it again pass another --job_name"
        )


@contextmanager
def locked_resume_point(
    settings: Settings, checkpoints: CheckpointFolder, fresh: TrainingState
) -> Generator[ResumePoint | None]:
    """find_resume_point()'s choice, locked while it is read. Where it vanished first, the next newest."""
    for _ in range(3):
        origin = collectives.all_ranks_from_main(lambda: find_resume_point(settings, checkpoints))
        with ExitStack() as stack:
            has_gone = origin is not None and not read_lock(origin.path, stack)
            if not collectives.all_ranks_any(has_gone)[0]:
                if origin is not None:
                    collectives.all_ranks_from_main(partial(check_resume_point, origin, fresh, settings))
                yield origin
                return
    assert origin is not None
    raise UserError(
        f"{origin.path}: was removed by the run that owns it; start again to take a newer one, or raise that run's "
        f"--keep_last"
    )


def check_resume_point(origin: ResumePoint, fresh: TrainingState, settings: Settings) -> None:
    """Refuse what a run that would begin as `fresh` cannot go on from, before anything is built."""
    saved = read_state(origin.path)
    if origin.is_only_weights:
        check_model(saved, fresh.model_config, fresh.is_preln, origin.path)
        return
    problems = Problems()
    problems.attempt(lambda: check_match(saved, fresh, origin))
    if not origin.is_own:
        problems.attempt(lambda: check_schedule(saved, settings, origin))
    problems.raise_if_any()


def check_schedule(saved: TrainingState, settings: Settings, origin: ResumePoint) -> None:
    """Refuse another run's checkpoint that lies past the end of this run's schedule: not one step would be taken."""
    total = settings.training.total_training_steps
    if saved.step >= total and settings.time_budget is None and not settings.training_flags.rewarmup:
        raise UserError(
            f"{origin.path}: is of step {saved.step}, but the model JSON's total_training_steps is {total}, so there "
            f"is nothing left to train; pass --rewarmup to count the schedule's steps from there, or raise "
            f"total_training_steps"
        )
