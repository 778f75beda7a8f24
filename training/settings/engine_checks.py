"""Checks of the DeepSpeed JSON against the flags and against what this machine supports."""

from functools import partial
from importlib.util import find_spec

import torch

from common.console import console
from common.errors import Problems, shortened
from nvidia.compiling import find_compiler_problem
from training.engine.json_blocks import ActivationBlock, checkpoint_layers, find_ignored
from training.engine.kernel import FLAG as KERNEL
from training.runtime.precision import SPELLINGS, choose_precision, find_abilities
from training.settings.deepspeed_file import DeepSpeedFile
from training.settings.flags import CommandLine, ModelFlags


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
    for name in ("gelu_checkpoint", "normalize_invertible"):
        if getattr(flags, name):
            problems.add(
                f"--compile and --{name}: the compiler chooses what a compiled part recomputes; drop one, or use "
                f"--gradient_checkpointing"
            )
    reason = find_compiler_problem("cuda" if torch.cuda.is_available() else "cpu")
    if reason is not None:
        problems.add(f"--compile: {reason}; install them or drop the flag")


def _check_monitors(deepspeed: DeepSpeedFile, problems: Problems) -> None:
    """Check that the packages of enabled DeepSpeed monitors are installed."""
    for block, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if deepspeed.content.get(block, {}).get("enabled") and find_spec(package) is None:
            problems.add(f"{deepspeed.path}: {block} is enabled, but its package is missing; pip install {package}")
