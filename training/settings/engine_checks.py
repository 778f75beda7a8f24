"""What the DeepSpeed JSON and the flags ask of the engine together, and whether it can be had here."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from common.console import console
from common.errors import Problems, shortened
from nvidia.compiling import find_compiler_problem
from training.runtime.precision import SPELLINGS, choose_precision, find_abilities
from training.settings.deepspeed_file import DeepSpeedFile


def check_engine(flags: Namespace, deepspeed: DeepSpeedFile, problems: Problems) -> str | None:
    """The precision that comes of both; None where it cannot be told."""
    precision = problems.attempt(
        lambda: choose_precision(flags.precision, deepspeed.wanted_precision, find_abilities(), deepspeed.path)
    )
    _check_accumulation(deepspeed, precision, problems)
    _check_monitors(deepspeed, problems)
    checks: tuple[Callable[[Namespace, DeepSpeedFile, Problems], None], ...] = (
        _check_sparse_attention,
        _check_layer_drop,
        _check_compile,
    )
    for check in checks:
        problems.attempt(partial(check, flags, deepspeed, problems))
    return precision


def _check_sparse_attention(flags: Namespace, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    path, has_block = deepspeed.path, "sparse_attention" in deepspeed.content
    if flags.deepspeed_sparse_attention and not has_block:
        problems.add(
            f"--deepspeed_sparse_attention needs a block 'sparse_attention' in {path}; add it or drop the flag"
        )
    if has_block and not flags.deepspeed_sparse_attention:
        console.warn(f"{path}: the block 'sparse_attention' does nothing without --deepspeed_sparse_attention")


def _check_layer_drop(flags: Namespace, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    path, enabled = deepspeed.path, deepspeed.content.get("progressive_layer_drop", {}).get("enabled")
    if flags.progressive_layer_drop and enabled is False:
        problems.add(f"--progressive_layer_drop: {path} says enabled: false in its block of that name; change either")
    if enabled and not flags.progressive_layer_drop:
        console.warn(f"{path}: the block 'progressive_layer_drop' does nothing without --progressive_layer_drop")


def _check_accumulation(deepspeed: DeepSpeedFile, precision: str | None, problems: Problems) -> None:
    """The type in which gradients of micro-steps are summed up, where DeepSpeed has only one."""
    wanted = deepspeed.content.get("data_types", {}).get("grad_accum_dtype")
    if wanted is not None and not any(wanted in names for names in SPELLINGS.values()):
        problems.add(
            f"{deepspeed.path}: data_types.grad_accum_dtype is {shortened(wanted)}, expected one of "
            f"{', '.join(SPELLINGS)}; write one, or remove the key"
        )
        return
    if precision is None or deepspeed.zero_stage > 0 or wanted is None or wanted in SPELLINGS[precision]:
        return
    problems.add(
        f"{deepspeed.path}: data_types.grad_accum_dtype is {wanted!r}, but in {precision} at ZeRO stage 0 DeepSpeed "
        f"sums gradients up in {precision} only; set zero_optimization.stage to 1, or remove the key"
    )


def _check_compile(flags: Namespace, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    if not flags.compile:
        return
    if deepspeed.zero_stage == 3:
        problems.add(
            f"--compile: {deepspeed.path} asks for ZeRO stage 3, which gathers parameters inside the compiled part; "
            f"use stage 0, 1 or 2, or drop the flag"
        )
    for name in ("gelu_checkpoint", "normalize_invertible"):
        if getattr(flags, name):
            problems.add(
                f"--compile and --{name}: what a compiled part recomputes is the compiler's choice; drop one, or use "
                f"--gradient_checkpointing"
            )
    reason = find_compiler_problem("cuda" if torch.cuda.is_available() else "cpu")
    if reason is not None:
        problems.add(f"--compile: {reason}; install them or drop the flag")


def _check_monitors(deepspeed: DeepSpeedFile, problems: Problems) -> None:
    """DeepSpeed's monitors that need a package of their own."""
    for block, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if deepspeed.content.get(block, {}).get("enabled") and find_spec(package) is None:
            problems.add(f"{deepspeed.path}: {block} is enabled, but the package is missing; pip install {package}")
