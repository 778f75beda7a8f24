"""Flags that do not go together, or name what is not there: each found by itself, so that all are told at once.

A flag that was given wrongly raises Unsure when it is asked for; then the one check that needs it is left out.
"""

import math
import os
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.errors import Problems, UserError
from common.files import check_folder_to_write
from training.export.folder import check_export_folder
from training.plan.step_plan import check_batches
from training.plan.time_budget import parse_duration
from training.plan.token_schedule import TokenSchedule

MAX_JOB_NAME_BYTES = 200  # bytes; file systems take 255, and some tools add to it
RUN_FOLDERS = ("saved_models", "runs")  # below --output_dir
DEFAULT_MASKING = ("0.15", "token")

# What cannot be, and the message, in which {f} is the flags.
CONTRADICTIONS: tuple[tuple[Callable[[Namespace], bool], str], ...] = (
    (
        lambda f: f.refresh_bucket_size != 1,
        "--refresh_bucket_size {f.refresh_bucket_size}: datasets are mixed row by row, so there is no bucket to "
        "repeat; expected 1, the default; drop the flag",
    ),
    (
        lambda f: f.stochastic_mode and not f.deepspeed_transformer_kernel,
        "--stochastic_mode is a mode of --deepspeed_transformer_kernel; pass both or neither",
    ),
    (
        lambda f: f.load_checkpoint_id is not None and f.load_training_checkpoint is None,
        "--load_checkpoint_id needs --load_training_checkpoint, the folder to look in",
    ),
    (
        lambda f: f.finetune and f.load_training_checkpoint is None and f.use_pretrain is None,
        "--finetune loads weights only; say from where with --load_training_checkpoint or --use_pretrain",
    ),
    (
        lambda f: f.use_pretrain is not None and f.load_training_checkpoint is not None,
        "--use_pretrain and --load_training_checkpoint both give the first weights; expected one; drop the other",
    ),
    (
        lambda f: f.normalize_invertible and not f.preln,
        "--normalize_invertible saves nothing with --no-preln, where LayerNorms write the residual stream",
    ),
    (
        lambda f: not f.dynamic_masking and (f.masking_rate, f.masking_unit) != DEFAULT_MASKING,
        "--masking_rate and --masking_unit are about masks drawn anew; add --dynamic_masking",
    ),
    (
        lambda f: f.log_histograms and f.dry_run,
        "--log_histograms and --dry_run: a dry run writes nothing; drop one",
    ),
    (
        lambda f: not 0 <= f.lr_offset < math.inf,
        "--lr_offset {f.lr_offset}: expected a finite number that is not negative, such as 0.0",
    ),
    (
        lambda f: f.batch_schedule is not None and f.max_steps_per_epoch is not None,
        "--batch_schedule and --max_steps_per_epoch do not go together: an epoch has no one batch size",
    ),
    (
        lambda f: f.length_schedule is not None and f.max_steps_per_epoch is not None,
        "--length_schedule and --max_steps_per_epoch do not go together: an epoch has no one batch size",
    ),
)


def check_flags(flags: Namespace, micro_rows: int | None, problems: Problems) -> None:
    """`micro_rows`: of a micro-step over all ranks; None where the DeepSpeed JSON does not tell."""
    for is_wrong, message in CONTRADICTIONS:
        problems.attempt(partial(_refuse, flags, is_wrong, message))
    problems.attempt(lambda: _check_rates(flags.masking_rate))
    problems.attempt(lambda: _check_budget(flags.time_budget))
    problems.attempt(lambda: _check_batches(flags.batch_schedule, micro_rows))
    problems.attempt(lambda: _check_export(flags, problems))


def _refuse(flags: Namespace, is_wrong: Callable[[Namespace], bool], message: str) -> None:
    if is_wrong(flags):
        raise UserError(message.format(f=flags))


def _check_rates(text: str) -> None:
    rates = TokenSchedule.parse(text, "--masking_rate")
    if not all(0.0 < rate < 1.0 for _, rate in rates.points):
        raise UserError(f"--masking_rate {text}: rates must lie between 0 and 1; BERT uses 0.15")


def _check_budget(text: str | None) -> None:
    if text is not None:
        parse_duration(text)


def _check_batches(text: str | None, micro_rows: int | None) -> None:
    if text is None:
        return
    schedule = TokenSchedule.parse(text, "--batch_schedule")
    if micro_rows is not None:
        check_batches(schedule, micro_rows)


def _check_export(flags: Namespace, problems: Problems) -> None:
    if flags.export_dir is None:
        return
    folder, output = flags.export_dir.resolve(), flags.output_dir.resolve()
    if output.is_relative_to(folder) or any(folder.is_relative_to(output / part) for part in RUN_FOLDERS):
        raise UserError(
            f"--export_dir {flags.export_dir}: the run itself writes there (--output_dir {flags.output_dir}); expected "
            f"a folder of its own; give for example {flags.output_dir / 'export'}"
        )
    check_export_folder(flags.export_dir, "--export_dir", problems)


def check_prefixes(flags: Namespace, problems: Problems) -> bool:
    """Whether the folders that the model JSON's own are below are there."""
    found = [
        problems.attempt(partial(_has_folder, flags, name))
        for name in ("data_path_prefix", "validation_data_path_prefix")
    ]
    return all(found)


def _has_folder(flags: Namespace, name: str) -> bool:
    folder = getattr(flags, name)
    if folder is not None and not folder.is_dir():
        raise UserError(
            f"--{name} {folder}: there is no such folder; give the one that the folders in the model JSON are below"
        )
    return True


def check_places(output_dir: Path, job_name: str, problems: Problems) -> None:
    """The job's name and the folders that a run writes to."""
    if Path(job_name).name != job_name or job_name in (".", "..") or not job_name.isprintable():
        problems.add(
            f"job name {job_name!r}: names a folder, so it must be a single plain name; pass another --job_name"
        )
    elif len(os.fsencode(job_name)) > MAX_JOB_NAME_BYTES:
        problems.add(
            f"job name {job_name!r}: is too long for a folder; expected at most {MAX_JOB_NAME_BYTES} bytes; pass a "
            f"shorter --job_name"
        )
    else:
        before = len(problems.messages)
        for part in RUN_FOLDERS:
            check_folder_to_write(output_dir / part / job_name, "--output_dir", problems)
            if len(problems.messages) > before:
                break  # both lie below the same folder: one message is enough
