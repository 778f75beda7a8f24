"""Checks of the flags against each other, against the DeepSpeed JSON and against what this machine supports.

Reading a wrongly given flag raises Unsure, so each check is attempted separately, and only those that need it are left
out.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from common.console import console
from common.errors import Problems, UserError, shortened
from common.files import check_folder_to_write
from nvidia.compiling import find_compiler_problem
from nvidia.interop.stock_config import export_obstacles
from training.engine.json_blocks import ActivationBlock, checkpoint_layers, find_ignored
from training.engine.kernel import FLAG as KERNEL
from training.plan.step_plan import check_batches
from training.runtime.precision import SPELLINGS, choose_precision, find_abilities
from training.settings.deepspeed_file import DeepSpeedFile
from training.settings.flags import CommandLine, ModelFlags
from training.settings.model_parts import ModelParts

MAX_JOB_NAME_BYTES = 200  # file systems allow 255, and some tools append to the name
RUN_FOLDERS = ("saved_models", "runs")  # in --output_dir
DEFAULT_MASKING = ("0.15", "token")

# Two flags of which at most one may be given, and why.
EXCLUSIVE = {
    ("keep_best", "keep_best_by"): "choose the best checkpoint by different figures; expected one; drop the other",
    ("use_pretrain", "load_training_checkpoint"): "both name the initial weights; expected one; drop the other",
    ("log_histograms", "dry_run"): "cannot be combined: a dry run writes nothing; drop one",
    ("batch_schedule", "train_batch_size"): "both give the rows per step; expected one; drop the other",
    ("batch_schedule", "max_steps_per_epoch"): "cannot be combined: the batch size changes within an epoch; drop one",
    ("length_schedule", "max_steps_per_epoch"): "cannot be combined: the batch size changes within an epoch; drop one",
    ("deepspeed_transformer_kernel", "find_micro_batch"): "cannot be combined: that layer is built for one size; drop "
    "one, and set train_micro_batch_size_per_gpu in the DeepSpeed JSON",
    ("deepspeed_transformer_kernel", "progressive_layer_drop"): "cannot be combined: that layer cannot scale its "
    "branches; drop one",
    ("deepspeed_transformer_kernel", "gradient_checkpointing"): "cannot be combined: that layer draws its own dropout, "
    "which recomputation would change; use --gelu_checkpoint, --attention_dropout_checkpoint and "
    "--normalize_invertible, which it supports",
    ("deepspeed_transformer_kernel", "compile"): "cannot be combined: that layer is compiled already; drop one",
    **dict.fromkeys(
        (("compile", "gelu_checkpoint"), ("compile", "normalize_invertible")),
        "cannot be combined: the compiler chooses what a compiled part recomputes; drop one, or use "
        "--gradient_checkpointing",
    ),
}
# A flag that has no effect without a second one, and what that is.
NEEDED = {
    ("stochastic_mode", "deepspeed_transformer_kernel"): "the layer that has this mode; pass both or neither",
    ("load_checkpoint_id", "load_training_checkpoint"): "the folder of that checkpoint",
    ("export", "export_dir"): "the folder to write; pass both or neither",
    **dict.fromkeys(
        (("probe_data", "probe"), ("probe_every_steps", "probe"), ("probe_seconds", "probe")),
        "the tasks to score; add it, or drop the other",
    ),
}
# Whether other flags contradict each other, and the message, in which {f} are the flags.
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
        lambda f: f.checkpoints.export == "best" and not f.checkpoints.keeps_best,
        "--export best needs --keep_best, which keeps the checkpoint with the lowest validation loss; add it, or pass "
        "--export last",
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
        lambda f: f.model.normalize_invertible and not f.model.preln,
        "--normalize_invertible saves no memory with --no-preln, where LayerNorms write the residual stream; drop one",
    ),
    (
        lambda f: not f.data.dynamic_masking and (str(f.data.masking_rate), f.data.masking_unit) != DEFAULT_MASKING,
        "--masking_rate and --masking_unit apply only to masks drawn during training; add --dynamic_masking",
    ),
    (
        lambda f: (
            f.training.find_micro_batch
            and any(each.key == "train_micro_batch_size_per_gpu" for each in f.training.overrides or ())
        ),
        "--find_micro_batch and --set train_micro_batch_size_per_gpu both give the rows per micro-step; expected one; "
        "drop the other",
    ),
)


# A part of the run that does not exist, whether the flags need it, and the message.
MISSING_PARTS: tuple[tuple[str, Callable[[CommandLine], bool], str], ...] = (
    (
        "tokenizer",
        lambda f: f.probes.probe is not None,
        "--probe {f.probes.probe[0]}: needs a tokenizer; set the model JSON's bert_token_file",
    ),
    (
        "validation_folder",
        lambda f: f.checkpoints.export == "best" and f.checkpoints.keep_best_by is None,
        "--export best: without validation data there is no best checkpoint; expected a folder with validation shards "
        "in the model JSON's validation.path; set it, or pass --export last",
    ),
    (
        "validation_folder",
        lambda f: f.probes.stop_after_no_gain is not None and f.probes.probe is None,
        "--stop_after_no_gain {f.probes.stop_after_no_gain}: there is neither validation data nor a probe to improve; "
        "set the model JSON's validation.path, or pass --probe",
    ),
)


def check_flags(flags: CommandLine, micro_rows: int | None, problems: Problems) -> None:
    """`micro_rows`: rows per micro-step over all ranks; None if the DeepSpeed JSON has problems."""
    values = flags.values()
    for (first, second), reason in EXCLUSIVE.items():
        if _is_given(values.get(first)) and _is_given(values.get(second)):
            problems.add(f"--{first} and --{second} {reason}")
    for (first, second), reason in NEEDED.items():
        if _is_given(values.get(first)) and not _is_given(values.get(second, True)):
            value = "" if values[first] is True else f" {values[first]}"
            problems.add(f"--{first}{value} needs --{second}, {reason}")
    for is_wrong, message in CONTRADICTIONS:
        if problems.attempt(partial(is_wrong, flags)):
            problems.add(message.format(f=flags))
    if micro_rows is not None:
        problems.attempt(lambda: check_batches(flags.training.batch_schedule, micro_rows))
    problems.attempt(lambda: _check_export(flags.checkpoints.export_dir, flags.required.output_dir))


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


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


def check_parts(parts: ModelParts, has_prefixes: bool, flags: CommandLine, problems: Problems) -> None:
    """Refuse what needs parts that do not exist, and what the export could not write at the end of the run.

    Without `has_prefixes`, their folders are a problem that has been reported.
    """
    for part, is_wrong, message in MISSING_PARTS:
        if has_prefixes and getattr(parts, part) is None and problems.attempt(partial(is_wrong, flags)):
            problems.add(message.format(f=flags))
    export_dir = problems.attempt(lambda: flags.checkpoints.export_dir)
    if export_dir is None or parts.model_config is None or parts.is_pre_ln is None:
        return
    obstacles = export_obstacles(parts.model_config, parts.is_pre_ln)
    if obstacles:
        problems.add(
            f"--export_dir {export_dir}: this model cannot be exported to transformers ({'; '.join(obstacles)}); "
            f"change the model JSON, or drop --export_dir"
        )


def check_engine(flags: CommandLine, deepspeed: DeepSpeedFile, problems: Problems) -> str | None:
    """The run's precision; None if it cannot be determined."""
    precision = problems.attempt(
        lambda: choose_precision(flags.training.precision, deepspeed.wanted_precision, find_abilities(), deepspeed.path)
    )
    _check_accumulation(deepspeed, precision, problems)
    _check_monitors(deepspeed, problems)
    for line in find_ignored(deepspeed.content):
        console.warn(f"{deepspeed.path}: {line}")
    problems.attempt(partial(_warn_about_recomputation, flags.model, deepspeed))
    for check in (_check_sparse_attention, _check_layer_drop, _check_compile):
        problems.attempt(partial(check, flags.model, deepspeed, problems))
    return precision


def _warn_about_recomputation(flags: ModelFlags, deepspeed: DeepSpeedFile) -> None:
    """Say what becomes of the block 'activation_checkpointing', which maps to --gradient_checkpointing."""
    content, block = deepspeed.content, f"{deepspeed.path}: the block 'activation_checkpointing'"
    if checkpoint_layers(content, 1) is None:
        return
    if flags.deepspeed_transformer_kernel:
        console.warn(f"{block} has no effect with {KERNEL}, whose dropout would not be repeated")
    elif flags.gradient_checkpointing is not None:
        console.warn(f"{block} has no effect beside --gradient_checkpointing, which takes precedence")
    else:
        options = ActivationBlock(**content["activation_checkpointing"]).wanted_options()
        verb = "has" if len(options) == 1 else "have"
        console.warn(
            f"{block} is computed as --gradient_checkpointing"
            + (f"; {', '.join(options)} {verb} no further effect" if options else "")
        )


def warn_about_unused_rate(deepspeed: DeepSpeedFile, learning_rate: float) -> None:
    """DeepSpeed's usual place for the learning rate is not where this project reads it."""
    optimizer = deepspeed.content.get("optimizer", {})
    rate = optimizer.get("params", {}).get("lr", learning_rate)
    if rate != learning_rate and optimizer["type"].lower() != "muon":  # for which it is a reference
        console.warn(
            f"{deepspeed.path}: optimizer.params.lr {rate:g} has no effect here: the peak is the model JSON's "
            f"learning_rate {learning_rate:g}; pass --learning_rate {rate:g} to use the other"
        )


def _check_sparse_attention(flags: ModelFlags, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    path, has_block = deepspeed.path, "sparse_attention" in deepspeed.content
    if flags.deepspeed_sparse_attention and not has_block:
        problems.add(
            f"--deepspeed_sparse_attention needs a block 'sparse_attention' in {path}; add it or drop the flag"
        )
    if has_block and not flags.deepspeed_sparse_attention:
        console.warn(f"{path}: the block 'sparse_attention' has no effect without --deepspeed_sparse_attention")


def _check_layer_drop(flags: ModelFlags, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    path, enabled = deepspeed.path, deepspeed.content.get("progressive_layer_drop", {}).get("enabled")
    if flags.progressive_layer_drop and enabled is False:
        problems.add(
            f"--progressive_layer_drop: that block of {path} has enabled: false; set it to true, or drop the flag"
        )
    if enabled and not flags.progressive_layer_drop:
        console.warn(f"{path}: the block 'progressive_layer_drop' has no effect without --progressive_layer_drop")


def _check_accumulation(deepspeed: DeepSpeedFile, precision: str | None, problems: Problems) -> None:
    """Check the type in which the gradients of micro-steps are summed: DeepSpeed does not support every combination."""
    wanted = deepspeed.content.get("data_types", {}).get("grad_accum_dtype")
    if wanted is None:
        return
    where = f"{deepspeed.path}: data_types.grad_accum_dtype is {shortened(wanted)}"
    if not any(wanted in names for names in SPELLINGS.values()):
        problems.add(f"{where}, expected one of {', '.join(SPELLINGS)}; use one of these, or remove the key")
    elif precision is not None and deepspeed.zero_stage == 0 and wanted not in SPELLINGS[precision]:
        problems.add(
            f"{where}, but in {precision} at ZeRO stage 0 DeepSpeed sums gradients only in {precision}; set "
            f"zero_optimization.stage to 1, or remove the key"
        )
    elif precision == "bf16" and deepspeed.zero_stage == 1 and wanted in SPELLINGS["fp32"]:
        # DeepSpeed switches to another optimizer, with another file layout and without our guards.
        problems.add(
            f"{where}, but for that DeepSpeed's optimizer for bf16 at ZeRO stage 1 does not skip a step whose gradient "
            f"is not finite; use ZeRO stage 2, or remove the key"
        )


def _check_compile(flags: ModelFlags, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    if not flags.compile:
        return
    if deepspeed.zero_stage == 3:
        problems.add(
            f"--compile: {deepspeed.path} selects ZeRO stage 3, which gathers parameters inside the compiled part; "
            f"use stage 0, 1 or 2, or drop the flag"
        )
    reason = find_compiler_problem("cuda" if torch.cuda.is_available() else "cpu")
    if reason is not None:
        problems.add(f"--compile: {reason}; install them or drop the flag")


def _check_monitors(deepspeed: DeepSpeedFile, problems: Problems) -> None:
    """Check that the packages of enabled DeepSpeed monitors are installed."""
    for block, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if deepspeed.content.get(block, {}).get("enabled") and find_spec(package) is None:
            problems.add(f"{deepspeed.path}: {block} is enabled, but its package is missing; pip install {package}")
