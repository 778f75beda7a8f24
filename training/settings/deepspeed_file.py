"""The DeepSpeed JSON, checked and turned into the dictionary that deepspeed.initialize() gets."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.console import console
from common.errors import Problems, UserError, shortened
from common.validation import describe_errors
from common.words import counted
from training.engine.json_blocks import (
    KEYS_WITHOUT_EFFECT,
    REFUSED_KEYS,
    DeepSpeedJson,
    LayerDropBlock,
    find_refusal,
    is_off,
)
from training.optimizers.build import check_optimizer
from training.runtime.precision import SPELLINGS
from training.settings.overrides import Override, load_with_overrides

KNOWN_KEYS = frozenset(DeepSpeedJson.model_fields)
REFUSED_OPTIONS = {  # of blocks, if they are on
    ("tensor_parallel", "autotp_size"): "the layers of this model cannot be partitioned; remove it, and use "
    "zero_optimization to distribute memory",
    ("checkpoint", "load_universal"): "any number of ranks can resume any checkpoint without it, and it loads files "
    "that have not been checked; remove it",
    ("checkpoint", "use_node_local_storage"): "a checkpoint is complete only if one folder holds the files of all "
    "ranks; remove it, and use an --output_dir that all machines share",
    ("zero_optimization", "parameter_alignment"): "it leaves gaps between parameters, so a checkpoint could not be "
    "resharded for another number of ranks; remove it",
}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MODEL_KEYS = ("progressive_layer_drop", "sparse_attention")  # blocks of our model, which DeepSpeed does not have
MONITOR_KEYS = ("tensorboard", "csv_monitor", "wandb", "comet")


@dataclass(frozen=True)
class BatchSizes:
    """`total` rows per optimizer step: `micro` rows per micro-step and rank, `accumulation` micro-steps."""

    micro: int
    accumulation: int
    total: int


@dataclass(frozen=True)
class DeepSpeedFile:
    """The checked file. `wanted_precision` is what it requests; the machine may not support it."""

    path: Path
    content: dict[str, Any]
    batch: BatchSizes
    wanted_precision: str
    zero_stage: int
    layer_drop: LayerDropBlock

    def describe_precision(self, precision: str) -> str:
        """What is computed, for people: torch_autocast computes in another type than that of the weights."""
        block = self.content.get("torch_autocast", {})
        if not block.get("enabled"):
            return precision
        dtype = block.get("dtype", "bfloat16")
        short = next((name for name, spellings in SPELLINGS.items() if dtype in spellings), dtype)
        return f"{precision} with {short} autocast"

    def for_engine(self, precision: str, has_monitors: bool = True) -> dict[str, Any]:
        """The dictionary that deepspeed.initialize() gets. Monitors write or send data as soon as they are built."""
        config = copy.deepcopy(self.content)
        # hybrid_engine would select another engine class, so what is said to have no effect must not reach DeepSpeed.
        for key in (*MODEL_KEYS, *KEYS_WITHOUT_EFFECT, *(() if has_monitors else MONITOR_KEYS)):
            config.pop(key, None)
        config.update(
            train_batch_size=self.batch.total,
            train_micro_batch_size_per_gpu=self.batch.micro,
            gradient_accumulation_steps=self.batch.accumulation,
        )
        config.setdefault("gradient_clipping", 1.0)
        # Our reports show the throughput; the engine's own lines are turned off.
        config.setdefault("steps_per_print", 2**62)
        blocks = {key: config.pop(key, {}) for key in ("fp16", "bf16", "bfloat16")}
        if precision != "fp32":
            config[precision] = {**blocks[precision], "enabled": True}
        config.setdefault("zero_allow_untested_optimizer", True)
        return config


def load_deepspeed_file(path: Path, world_size: int, overrides: Sequence[Override] = ()) -> DeepSpeedFile:
    """The checked DeepSpeed JSON at `path` with values set by --set; all its problems are reported at once."""
    given, where = load_with_overrides(path, "a DeepSpeed JSON (--deepspeed_config)", overrides)
    set_keys = {override.key for override in overrides}
    total, micro, accumulation = BATCH_KEYS
    if set_keys & {total, micro} and accumulation not in set_keys and total in given and micro in given:
        given.pop(accumulation, None)  # the file's number of micro-steps is for another batch: it is derived again
    return check_content(given, path, world_size, where)


def check_content(given: dict[str, Any], path: Path, world_size: int, where: str) -> DeepSpeedFile:
    """The checked content of the file at `path`; `where` names it in messages."""
    given, problems = copy.deepcopy(given), Problems()
    _rename_old_clipping(given, where)
    content = _check_keys(given, where, problems)
    batch = None
    if all(key in content for key in BATCH_KEYS if key in given):
        batch = _resolve_batch(content, where, world_size, problems)
    if "optimizer" in content:
        check_optimizer(content["optimizer"], content.get("zero_optimization", {}), where, problems)
    problems.raise_if_any()
    assert batch is not None
    file = DeepSpeedFile(
        path=path,
        content=content,
        batch=batch,
        wanted_precision=_wanted_precision(content),
        zero_stage=content.get("zero_optimization", {}).get("stage", 0),
        layer_drop=LayerDropBlock(**content.get("progressive_layer_drop", {})),
    )
    refusal = find_refusal(file.for_engine(file.wanted_precision))
    if refusal is not None:
        raise UserError(f"{where}: DeepSpeed refuses it: {refusal}; change that value, or remove its key")
    return file


def _check_keys(given: dict[str, Any], where: str, problems: Problems) -> dict[str, Any]:
    """The keys whose values are valid by themselves, for the checks of values against each other."""
    given = {key: value for key, value in given.items() if not (key in REFUSED_KEYS and is_off(value))}
    wrong = {key for key, value in given.items() if value == "auto" or key in REFUSED_KEYS}
    for key in sorted(wrong):
        reason = REFUSED_KEYS.get(key, 'nothing here fills in "auto"; give a value, or remove the key')
        problems.add(f"{where}: {key!r} cannot be used here: {reason}")
    content = {key: value for key, value in given.items() if key not in wrong}
    zero = content.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if type(stage) is not int or stage not in range(4):  # DeepSpeed would convert "2" and true
        problems.add(f"{where}: zero_optimization.stage: found {shortened(stage)}, expected 0, 1, 2 or 3")
        content.pop("zero_optimization")
    try:
        DeepSpeedJson.model_validate(content)
    except ValidationError as error:
        for key, message in describe_errors(DeepSpeedJson, error):
            problems.add(f"{where}: {message}")
            content.pop(key, None)
    if content.get("tensor_parallel", {}).get("autotp_size") == 1:  # off, but DeepSpeed would still prepare for it
        del content["tensor_parallel"]["autotp_size"]
    for (block, key), reason in REFUSED_OPTIONS.items():
        if content.get(block, {}).get(key):
            problems.add(f"{where}: '{block}.{key}' cannot be used here: {reason}")
    if _wanted_precision(content) == "fp16" and _wanted_precision({**content, "fp16": {}}) == "bf16":
        problems.add(f"{where}: both fp16 and bf16 are enabled; expected at most one of them; disable the other")
    return content


def _rename_old_clipping(content: dict[str, Any], where: str) -> None:
    """Old files give the clipping as the optimizer's max_grad_norm; it is a top-level key now."""
    optimizer = content.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if not isinstance(params, dict) or "max_grad_norm" not in params:
        return
    limit = params.pop("max_grad_norm")
    used = content.setdefault("gradient_clipping", limit)
    console.warn(
        f"{where}: optimizer.params.max_grad_norm {limit} is used as gradient_clipping, its current name"
        if used == limit
        else f"{where}: gradient_clipping {used} is used, and optimizer.params.max_grad_norm is ignored"
    )


def _resolve_batch(content: dict[str, Any], where: str, world_size: int, problems: Problems) -> BatchSizes | None:
    """Derive the missing one of DeepSpeed's three batch numbers: total = micro · accumulation · ranks."""
    numbers: list[Any] = [content.get(key) for key in BATCH_KEYS]
    total, micro, accumulation = numbers
    rows = (micro or 1) * (accumulation or 1)  # per rank and step, or what divides them
    if total is None and micro is None:
        problems.add(
            f"{where}: neither train_batch_size nor train_micro_batch_size_per_gpu is given; expected at least one of "
            f"them; give the rows per step, or per micro-step and rank"
        )
        return None
    if micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world_size)
    elif total is None:
        accumulation = accumulation or 1
        total = micro * accumulation * world_size
    elif accumulation is None:
        accumulation = total // (micro * world_size)
    if micro * accumulation * world_size != total or not micro * accumulation:
        problems.add(
            f"{where}: train_batch_size {total} is not micro batch {micro or '?'} × accumulation "
            f"{accumulation or '?'} × {counted(world_size, 'rank')}; change one of the three numbers, or "
            f"leave one out to have it derived. {_numbers_that_work(total, rows, world_size)}"
        )
        return None
    return BatchSizes(micro, accumulation, total)


def _numbers_that_work(total: int, rows: int, world_size: int) -> str:
    """Batches for this number of ranks, and numbers of ranks for this batch; `rows` divides the rows of a rank."""
    below = total // (rows * world_size) * rows * world_size
    batches = [str(batch) for batch in (below, below + rows * world_size) if batch]
    per_row = total // rows
    ranks = [count for count in range(1, min(per_row, 4 * world_size) + 1) if total % (rows * count) == 0]
    text = f"With {counted(world_size, 'rank')}, train_batch_size {' or '.join(batches)} would work"
    noun = "rank" if ranks == [1] else "ranks"
    return text + (f"; with {counted(total, 'row')}, {', '.join(map(str, ranks))} {noun} would" if ranks else "")


def _wanted_precision(content: dict[str, Any]) -> str:
    for key, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        if content.get(key, {}).get("enabled"):
            return precision
    return "fp32"
