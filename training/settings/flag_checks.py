"""Flags that contradict each other, or name folders that do not exist or cannot be written to.

Reading a wrongly given flag raises Unsure, so each check is attempted separately, and only those that need it are left
out.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.errors import Problems, UserError
from common.files import check_folder_to_write
from training.engine.kernel import FLAG as KERNEL
from training.plan.step_plan import check_batches
from training.settings.flags import CommandLine

MAX_JOB_NAME_BYTES = 200  # file systems allow 255, and some tools append to the name
RUN_FOLDERS = ("saved_models", "runs")  # in --output_dir
DEFAULT_MASKING = ("0.15", "token")

# Whether the flags contradict each other, and the message, in which {f} are the flags.
CONTRADICTIONS: tuple[tuple[Callable[[CommandLine], bool], str], ...] = (
    (
        lambda f: f.data.refresh_bucket_size != 1,
        "--refresh_bucket_size {f.data.refresh_bucket_size}: datasets are mixed row by row, so there are no buckets to "
        "repeat; expected 1, the default; drop the flag",
    ),
    (
        lambda f: bool(f.data.urls) and f.data.data_cache is None,
        "{f.data.urls[0]}: data behind a URL needs --data_cache, a folder on a local disk to which shards are fetched; "
        "expected one; pass it",
    ),
    (
        lambda f: not f.data.urls and (f.data.data_cache, f.data.data_cache_gb) != (None, None),
        "--data_cache and --data_cache_gb apply only to data behind a URL, but --data_path_prefix is the folder "
        "{f.data.data_path_prefix}; expected a URL such as s3://bucket/folder; pass one, or drop them",
    ),
    (
        lambda f: f.model.stochastic_mode and not f.model.deepspeed_transformer_kernel,
        f"--stochastic_mode is a mode of {KERNEL}; pass both or neither",
    ),
    (
        lambda f: f.checkpoints.load_checkpoint_id is not None and f.checkpoints.load_training_checkpoint is None,
        "--load_checkpoint_id needs --load_training_checkpoint, the folder of that checkpoint",
    ),
    (
        lambda f: f.checkpoints.export is not None and f.checkpoints.export_dir is None,
        "--export {f.checkpoints.export} needs --export_dir, the folder to write; pass both or neither",
    ),
    (
        lambda f: f.checkpoints.export == "best" and not f.checkpoints.keeps_best,
        "--export best needs --keep_best, which keeps the checkpoint with the lowest validation loss; add it, or pass "
        "--export last",
    ),
    (
        lambda f: f.checkpoints.keep_best and f.checkpoints.keep_best_by is not None,
        "--keep_best and --keep_best_by {f.checkpoints.keep_best_by} choose the best checkpoint by different figures; "
        "expected one; drop the other",
    ),
    (
        lambda f: (
            f.probes.probe is None and any((f.probes.probe_data, f.probes.probe_every_steps, f.probes.probe_seconds))
        ),
        "--probe_data, --probe_every_steps and --probe_seconds need --probe, the tasks to score; add it, or drop them",
    ),
    (
        lambda f: (
            f.probes.stop_after_no_gain is not None
            and f.training.validate_every_steps is None
            and f.probes.probe_every_steps is None
        ),
        "--stop_after_no_gain {f.probes.stop_after_no_gain}: without --validate_every_steps or --probe_every_steps "
        "there is only one measurement, at the end; add one of them",
    ),
    (
        lambda f: (
            f.model.finetune and f.checkpoints.load_training_checkpoint is None and f.checkpoints.use_pretrain is None
        ),
        "--finetune loads weights only; name their source with --load_training_checkpoint or --use_pretrain",
    ),
    (
        lambda f: f.checkpoints.use_pretrain is not None and f.checkpoints.load_training_checkpoint is not None,
        "--use_pretrain and --load_training_checkpoint both name the initial weights; expected one; drop the other",
    ),
    (
        lambda f: f.model.normalize_invertible and not f.model.preln,
        "--normalize_invertible saves no memory with --no-preln, where LayerNorms write the residual stream; drop one",
    ),
    (
        lambda f: not f.data.dynamic_masking and (str(f.data.masking_rate), f.data.masking_unit) != DEFAULT_MASKING,
        "--masking_rate and --masking_unit apply only to masks drawn during training; add --dynamic_masking",
    ),
    (
        lambda f: f.training.log_histograms and f.training.dry_run,
        "--log_histograms and --dry_run: a dry run writes nothing; drop one",
    ),
    (
        lambda f: f.training.batch_schedule is not None and f.training.train_batch_size is not None,
        "--batch_schedule and --train_batch_size both give the rows per step; expected one; drop the other",
    ),
    (
        lambda f: f.training.batch_schedule is not None and f.training.max_steps_per_epoch is not None,
        "--batch_schedule and --max_steps_per_epoch cannot be combined: the batch size changes within an epoch",
    ),
    (
        lambda f: f.training.length_schedule is not None and f.training.max_steps_per_epoch is not None,
        "--length_schedule and --max_steps_per_epoch cannot be combined: the batch size changes within an epoch",
    ),
    (
        lambda f: (
            f.training.find_micro_batch
            and any(each.key == "train_micro_batch_size_per_gpu" for each in f.training.overrides or ())
        ),
        "--find_micro_batch and --set train_micro_batch_size_per_gpu both give the rows per micro-step; expected one; "
        "drop the other",
    ),
    (
        lambda f: f.model.deepspeed_transformer_kernel and f.training.find_micro_batch,
        f"{KERNEL} and --find_micro_batch: that layer is built for one size; drop one, and set "
        f"train_micro_batch_size_per_gpu in the DeepSpeed JSON",
    ),
    (
        lambda f: f.model.deepspeed_transformer_kernel and f.model.progressive_layer_drop,
        f"{KERNEL} and --progressive_layer_drop: that layer cannot scale its branches; drop one",
    ),
    (
        lambda f: f.model.deepspeed_transformer_kernel and f.model.gradient_checkpointing is not None,
        f"{KERNEL} and --gradient_checkpointing: that layer draws its own dropout, which recomputation would change; "
        f"use --gelu_checkpoint, --attention_dropout_checkpoint and --normalize_invertible, which it supports",
    ),
    (
        lambda f: f.model.deepspeed_transformer_kernel and f.model.compile,
        f"{KERNEL} and --compile: that layer is compiled already; drop one",
    ),
)


def check_flags(flags: CommandLine, micro_rows: int | None, problems: Problems) -> None:
    """`micro_rows`: rows per micro-step over all ranks; None if the DeepSpeed JSON has problems."""
    for is_wrong, message in CONTRADICTIONS:
        if problems.attempt(partial(is_wrong, flags)):
            problems.add(message.format(f=flags))
    if micro_rows is not None:
        problems.attempt(lambda: check_batches(flags.training.batch_schedule, micro_rows))
    problems.attempt(lambda: _check_export(flags.checkpoints.export_dir, flags.required.output_dir))


def _check_export(export_dir: Path | None, output_dir: Path) -> None:
    if export_dir is None:
        return
    folder, output = export_dir.resolve(), output_dir.resolve()
    if output.is_relative_to(folder) or any(folder.is_relative_to(output / part) for part in RUN_FOLDERS):
        raise UserError(
            f"--export_dir {export_dir}: the run itself writes to that folder (--output_dir {output_dir}); expected a "
            f"separate folder; pass for example {output_dir / 'export'}"
        )


def check_places(output_dir: Path, job_name: str, problems: Problems) -> None:
    """Check the job's name and the folders that a run writes to."""
    if Path(job_name).name != job_name or job_name in (".", "..") or not job_name.isprintable():
        problems.add(f"job name {job_name!r}: cannot name a folder; expected a plain name; pass another --job_name")
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
                break  # both are in the same folder, so one message is enough
