"""The DeepSpeed JSON: checked before DeepSpeed sees it, because it ignores what it does not know."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import Problems, UserError, nearest, shortened
from common.words import counted
from training.engine.json_blocks import BLOCKS, LayerDropBlock, check_blocks, find_refusal
from training.optimizers.build import check_optimizer
from training.settings.json_files import load_json

# Every top-level key that DeepSpeed 0.19 reads, and the two blocks that our model reads itself.
KNOWN_KEYS = frozenset(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type compile
    comet compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state elasticity expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine
    log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_communication_data_type sparse_attention sparse_gradients
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)
REFUSED_KEYS = {
    "scheduler": "the rate comes from the model JSON and --lr_schedule; remove the block",
    "amp": "apex is not used; use fp16 or bf16",
    "curriculum_learning": "DeepSpeed's data pipeline is not used; remove the block",
    "data_efficiency": "DeepSpeed's data pipeline is not used; remove the block",
}
REFUSED = "{path}: DeepSpeed cannot use it: {refusal}; change that value, or remove its key"
MAX_ROWS = 2**31 - 1  # a step
# Blocks that belong to our model; DeepSpeed no longer has them.
MODEL_KEYS = ("progressive_layer_drop", "sparse_attention")
MONITOR_KEYS = ("tensorboard", "csv_monitor", "wandb", "comet")
OBJECTS = (
    *("activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger"),
    *("compile", "compression_training", "csv_monitor", "data_types", "elasticity", "flops_profiler", "fp16"),
    *("hybrid_engine", "nebula", "optimizer", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "wandb"),
    *("zero_optimization", *MODEL_KEYS),
)


@dataclass(frozen=True)
class BatchSizes:
    """`total` rows make an optimizer step: `micro` rows a micro-step, on each rank, `accumulation` times."""

    micro: int
    accumulation: int
    total: int


@dataclass(frozen=True)
class DeepSpeedFile:
    """The checked file: what it asks for, before the machine has its say."""

    path: Path
    content: dict[str, Any]
    batch: BatchSizes
    wanted_precision: str
    zero_stage: int
    layer_drop: LayerDropBlock

    def for_engine(self, precision: str, has_monitors: bool = True) -> dict[str, Any]:
        """The dictionary that deepspeed.initialize() gets. Monitors write or send from the moment they are built."""
        if precision == "bf16" and self.zero_stage == 1:
            _check_sums(self.content, self.path)
        config = copy.deepcopy(self.content)
        for key in MODEL_KEYS if has_monitors else (*MODEL_KEYS, *MONITOR_KEYS):
            config.pop(key, None)
        config.update(
            train_batch_size=self.batch.total,
            train_micro_batch_size_per_gpu=self.batch.micro,
            gradient_accumulation_steps=self.batch.accumulation,
        )
        config.setdefault("gradient_clipping", 1.0)
        # Throughput lines are ours to print, so the engine's own come never.
        config.setdefault("steps_per_print", 2**62)
        for name, key in (("fp16", "fp16"), ("bf16", "bf16")):
            block = config.pop(key, {})
            if precision == name:
                config[key] = {**block, "enabled": True}
        config.pop("bfloat16", None)
        config.setdefault("zero_allow_untested_optimizer", True)
        return config


def load_deepspeed_file(path: Path, world_size: int) -> DeepSpeedFile:
    content = load_json(path, "a DeepSpeed JSON (--deepspeed_config)")
    problems = Problems()
    for key in content:
        if key not in KNOWN_KEYS:
            hint = nearest(key, KNOWN_KEYS, otherwise="; expected one of those in docs/configuration.md; remove it")
            problems.add(f"{path}: unknown key {key!r}{hint}")
        elif key in REFUSED_KEYS:
            problems.add(f"{path}: {key!r} cannot be used here: {REFUSED_KEYS[key]}")
    _check_objects(content, path, problems)
    checkpoint = content.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("load_universal"):
        problems.add(
            f"{path}: 'checkpoint.load_universal' cannot be used here: it is not needed, since any number of ranks can "
            f"resume any checkpoint, and it loads files that were not checked; remove it"
        )
    if isinstance(checkpoint, dict) and checkpoint.get("use_node_local_storage"):
        problems.add(
            f"{path}: 'checkpoint.use_node_local_storage' cannot be used here: a checkpoint counts only when the files "
            f"of all ranks lie in one folder; remove it, and give an --output_dir that all machines see"
        )
    _move_old_clipping(content, path)
    _check_values(content, path, problems)
    batch = _resolve_batch(content, path, world_size, problems)
    check_blocks(content, str(path), problems)
    if "optimizer" in content:
        check_optimizer(content["optimizer"], content.get("zero_optimization", {}), str(path), problems)
    if problems.messages:
        _check_other_blocks(content, path, problems)
    problems.raise_if_any()
    assert batch is not None
    file = DeepSpeedFile(
        path=path,
        content=content,
        batch=batch,
        wanted_precision=_wanted_precision(content),
        zero_stage=int(content.get("zero_optimization", {}).get("stage", 0)),
        layer_drop=LayerDropBlock(**content.get("progressive_layer_drop", {})),
    )
    refusal = find_refusal(file.for_engine(file.wanted_precision))
    if refusal is not None:
        problems.add(REFUSED.format(path=path, refusal=refusal))
    problems.raise_if_any()
    return file


def _check_other_blocks(content: dict[str, Any], path: Path, problems: Problems) -> None:
    """Of a file with mistakes, what DeepSpeed says of each block that only it knows."""
    for key in OBJECTS:
        if key in content and key not in (*BLOCKS, *MODEL_KEYS, "optimizer"):
            refusal = find_refusal({"train_micro_batch_size_per_gpu": 1, key: content[key]})
            if refusal is not None:
                problems.add(REFUSED.format(path=path, refusal=f"{key}: {refusal}"))


def _check_sums(content: dict[str, Any], path: Path) -> None:
    """At stage 1 DeepSpeed takes another optimizer for this, with files of another layout and without our guards."""
    if content.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32", "torch.float32"):
        raise UserError(
            f"{path}: data_types.grad_accum_dtype fp32 with bf16 and ZeRO stage 1: DeepSpeed's optimizer for that does "
            f"not skip a step whose gradient is not finite; use ZeRO stage 2, or remove the key"
        )


def _check_objects(content: dict[str, Any], path: Path, problems: Problems) -> None:
    for key in OBJECTS:
        if not isinstance(content.get(key, {}), dict):
            problems.add(f"{path}: {key!r} must be an object {{…}}, but found {shortened(content[key])}")
            content.pop(key)


def _check_values(content: dict[str, Any], path: Path, problems: Problems) -> None:
    for key, value in content.items():
        if value == "auto":
            problems.add(f'{path}: {key!r} is "auto", which nothing here fills in; give a value or remove the key')
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        problems.add(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3, but found {shortened(stage)}")
        content["zero_optimization"] = {}
    if content.get("zero_optimization", {}).get("parameter_alignment"):
        problems.add(
            f"{path}: zero_optimization.parameter_alignment puts gaps between parameters, so that a checkpoint could "
            f"not be cut anew for another number of ranks; expected none; remove it"
        )
    clipping = content.get("gradient_clipping", 1.0)
    if isinstance(clipping, bool) or not isinstance(clipping, int | float) or not 0 <= clipping < 1e300:
        problems.add(
            f"{path}: gradient_clipping must be a number of at least 0 (0: off), but found {shortened(clipping)}"
        )
    if _enabled(content, "fp16") and (_enabled(content, "bf16") or _enabled(content, "bfloat16")):
        problems.add(f"{path}: both fp16 and bf16 are enabled; expected one of them, or neither; disable the other")


def _move_old_clipping(content: dict[str, Any], path: Path) -> None:
    """Old files give the clipping as the optimizer's max_grad_norm; it is a top-level key now."""
    params = content.get("optimizer", {}).get("params", {})
    if not isinstance(params, dict) or "max_grad_norm" not in params:
        return
    limit = params.pop("max_grad_norm")
    if content.setdefault("gradient_clipping", limit) == limit:
        console.warn(f"{path}: optimizer.params.max_grad_norm {limit} is read as gradient_clipping, its name today")
    else:
        console.warn(f"{path}: gradient_clipping {content['gradient_clipping']} counts, not optimizer's max_grad_norm")


def _resolve_batch(content: dict[str, Any], path: Path, world_size: int, problems: Problems) -> BatchSizes | None:
    """Derive the missing one of DeepSpeed's three batch numbers: total = micro · accumulation · ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        value = content.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_ROWS):
            problems.add(f"{path}: {name} must be a whole number of at least 1, but found {shortened(value)}")
            return None
    total, micro, accumulation = (content.get(name) for name in names)
    if total is None and micro is None:
        problems.add(
            f"{path}: has neither train_batch_size nor train_micro_batch_size_per_gpu; expected one of them, or both; "
            f"give the rows of a step, or of a micro-step on one rank"
        )
        return None
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchSizes(micro, accumulation, micro * accumulation * world_size)
    if micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world_size)
    elif accumulation is None:
        accumulation = total // (micro * world_size)
    if micro * accumulation * world_size != total or not micro * accumulation:
        problems.add(
            f"{path}: train_batch_size {total} is not micro batch {micro or '?'} × accumulation "
            f"{accumulation or '?'} × {counted(world_size, 'rank')}; change one of the three numbers, or "
            f"leave one out to have it derived"
        )
        return None
    return BatchSizes(micro, accumulation, total)


def _enabled(content: dict[str, Any], key: str) -> bool:
    block = content.get(key, {})
    return isinstance(block, dict) and bool(block.get("enabled", False))


def _wanted_precision(content: dict[str, Any]) -> str:
    if _enabled(content, "fp16"):
        return "fp16"
    return "bf16" if _enabled(content, "bf16") or _enabled(content, "bfloat16") else "fp32"
