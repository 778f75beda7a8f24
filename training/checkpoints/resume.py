"""The checkpoint that a run resumes from: chosen, read-locked, and refused if it does not match the run."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.console import console
from common.errors import Problems, UserError
from nvidia.config import BertConfig
from training.checkpoints.folder import CheckpointFolder, read_lock
from training.checkpoints.paths import DAMAGED, step_of
from training.checkpoints.remote import RemoteCheckpoints
from training.checkpoints.state import Best, TrainingState, read_state
from training.checkpoints.writer import recover
from training.runtime import collectives

# Keys of a model that may differ: one for its export, and those that only new weights depend on.
NOT_COMPARED = ("export_as", "decoder_bias_init", "embedding_init")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from; `is_own` if this run wrote it, as opposed to another run."""

    path: Path
    is_own: bool
    is_only_weights: bool = False  # --finetune: without the optimizer's state and the step
    best: Best | None = None  # from best.json, which may be newer than the checkpoint


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
    folder, other = checkpoints.folder, request.other
    if not request.is_dry_run:
        recover(folder)
    own = checkpoints.newest_valid()
    if request.remote is not None:
        request.remote.lease.acquire(folder)
        fetched = request.remote.fetch_newest(folder, after_step=-1 if own is None else step_of(own))
        if fetched is not None:
            checkpoints.valid.add(fetched)
            own = fetched
    if own is None and (checkpoints.tags() or any(folder.glob(f"step_*{DAMAGED}"))):
        raise UserError(
            f"{folder}: contains checkpoints, but none that is valid and named step_N. Restore one, or pass another "
            f"--job_name"
        )
    if own is not None:
        if other is not None:  # it only says where a run starts; the same command, run again, resumes that run
            chosen = other if request.other_tag is None else other / request.other_tag
            console.say(
                f"note: --load_training_checkpoint: {chosen} is not used, because this run has its own checkpoint and "
                f"resumes from {folder / own}; to start from {chosen} again, pass another --job_name"
            )
        best = checkpoints.best()
        is_before = best is not None and step_of(best.tag) <= step_of(own)
        return ResumePoint(folder / own, is_own=True, best=best if is_before else None)
    if other is not None:
        tag = CheckpointFolder(other).choose(request.other_tag)
        return ResumePoint(other / tag, is_own=False, is_only_weights=request.is_only_weights)
    return None


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
    """Raise all reasons at once why a run with the state `fresh` cannot start from `point`."""
    saved, problems = read_state(point.path), Problems()
    found = [*find_other_model(saved, fresh)]
    if not point.is_only_weights:
        remedy = f"or start another --job_name from its weights with --load_training_checkpoint {point.path.parent}"
        found += [f"{mismatch}, {remedy} --finetune" for mismatch in find_mismatches(saved, fresh)]
        found += find_other_inputs(saved, fresh, point)
        if not point.is_own and schedule_end is not None and saved.step >= schedule_end:
            found.append(
                f"is of step {saved.step}, but the model JSON's total_training_steps is {schedule_end}, so no step is "
                f"left to train. Pass --rewarmup to count the schedule's steps from there, or raise "
                f"total_training_steps"
            )
    for problem in found:
        problems.add(f"{point.path}: {problem}")
    problems.raise_if_any()


def find_other_model(saved: TrainingState, now: TrainingState) -> Iterator[str]:
    here = now.model_config
    there = BertConfig(vocab_size=1).to_dict() | saved.model_config  # keys newer than the checkpoint get their defaults
    there |= {key: here.get(key) for key in NOT_COMPARED}
    differing = [
        f"{key}: {there.get(key)!r} there, {here.get(key)!r} now"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if saved.is_preln != now.is_preln:
        differing.append(f"preln: {saved.is_preln} there, {now.is_preln} now")
    if differing:
        yield (
            f"is of a different model ({'; '.join(differing)}). Use its settings, or start from new weights under "
            f"another --job_name"
        )


def find_mismatches(before: TrainingState, now: TrainingState) -> Iterator[str]:
    """Why the engine of `now` cannot load what that of `before` saved, beside the model; each with its remedy."""
    if before.is_kernel != now.is_kernel:
        words = {True: "with", False: "without"}
        yield (
            f"was saved {words[before.is_kernel]} --deepspeed_transformer_kernel, which names the weights differently, "
            f"but this run is {words[now.is_kernel]} it; use the flag as before"
        )
    if (before.zero_stage, before.precision) != (now.zero_stage, now.precision):
        yield (
            f"was saved with ZeRO stage {before.zero_stage} in {before.precision}, but this run uses stage "
            f"{now.zero_stage} in {now.precision}; use the same DeepSpeed JSON and --precision"
        )
    optimizers = _optimizer_of(before), _optimizer_of(now)
    if None not in optimizers and optimizers[0] != optimizers[1]:
        yield (
            f"was saved with the optimizer {optimizers[0]}, but this run uses {optimizers[1]}, which has "
            f"a different state; set the same optimizer.type in the DeepSpeed JSON"
        )


def _optimizer_of(state: TrainingState) -> str | None:
    """Adam and AdamW have the same state. None: the checkpoint does not say."""
    recipe = state.recipe or {}
    if "optimizer" not in recipe:
        return None
    name = str((recipe["optimizer"] or {}).get("type", "AdamW")).lower()
    return "adamw" if name == "adam" else name


def find_other_inputs(saved: TrainingState, now: TrainingState, point: ResumePoint) -> Iterator[str]:
    """Differences of seed, data and tokenizer."""
    if point.is_own and saved.seed != now.seed:
        yield (
            f"was started with --seed {saved.seed}, but this run has --seed {now.seed}, which orders the rows "
            f"differently. Pass --seed {saved.seed}, or another --job_name"
        )
    if point.is_own and saved.data_digest != now.data_digest:
        there, here = (f"{state.data_summary or 'data'} (digest {state.data_digest[:12]})" for state in (saved, now))
        yield (
            f"was trained on different data: {there} then, {here} now. Restore that data, or pass another --job_name "
            f"with --load_training_checkpoint {point.path.parent}"
        )
    digests = (saved.tokenizer_digest, now.tokenizer_digest)
    if digests[0] != digests[1] and (point.is_own or all(digests)):
        there, here = (f"digest {digest[:12]}" if digest else "none" for digest in digests)
        yield (
            f"was trained with a different tokenizer than the model JSON's bert_token_file: {there} then, {here} now. "
            f"Restore that file, or start from new weights under another --job_name"
        )
