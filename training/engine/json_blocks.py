"""The DeepSpeed JSON as a model, built on DeepSpeed's own models of its blocks, and what becomes of each key.

DeepSpeed ignores unknown keys; here no key that the user gave is ignored silently.
"""

import copy
from typing import Annotated, Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from common.validation import describe_value

MAX_ROWS = 2**31 - 1  # per step
# Keys that are refused if they are on, and what to use instead. DeepSpeed 0.19 has removed some of these features.
REFUSED_KEYS = {
    "scheduler": "the learning rate comes from the model JSON and --lr_schedule; remove the block",
    "amp": "apex is not used; use fp16 or bf16",
    "curriculum_learning": "DeepSpeed's data pipeline is not used; remove the block",
    "data_efficiency": "DeepSpeed's data pipeline is not used; remove the block",
    "elasticity": "DeepSpeed has removed it; a run resumes with any number of ranks without it; remove the block",
    "nebula": "DeepSpeed has removed it; checkpoints are written by this project; remove the block",
    "compression_training": "DeepSpeed has removed its compression library; remove the block",
    "sparse_gradients": "DeepSpeed has removed it, and the gradients of this model are dense; remove the key",
}
# Keys that change nothing in a run, and what does.
KEYS_WITHOUT_EFFECT = {
    "autotuning": "pass --find_micro_batch",
    "compile": "pass --compile, which compiles the feed-forward half of each block",
    "dataloader_drop_last": "DeepSpeed's data loader is not used",
    "datastates_ckpt": "checkpoints are written by this project",
    "disable_allgather": "DeepSpeed itself does not use it",
    "expert_parallel": "the model has no experts; use zero_optimization to distribute memory",
    "hybrid_engine": "it is for reinforcement learning from human feedback",
    "pipeline": "the model is not split into stages; use zero_optimization to distribute memory",
    "seq_parallel_communication_data_type": "there is no sequence parallelism; see communication_data_type",
    "use_data_before_expert_parallelism": "the model has no experts",
    "vocabulary_size": "the tokenizer or bert_model_config.vocab_size determines the number of tokens",
    "weight_quantization": "it is for inference",
}


class LayerDropBlock(BaseModel):
    """`progressive_layer_drop`: blocks are kept with a probability that falls from 1 towards `theta`."""

    model_config = {"extra": "forbid", "frozen": True}

    enabled: bool = False
    theta: float = Field(default=0.5, gt=0.0, le=1.0)
    gamma: float = Field(default=0.001, ge=0.0)


class ActivationBlock(BaseModel):
    """`activation_checkpointing`: computed by our own recomputation, which has none of the other options."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    number_checkpoints: int | None = Field(default=None, ge=1)
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    def wanted_options(self) -> list[str]:
        """The options that are on."""
        return [name for name, value in self.model_dump().items() if value is True]


# The blocks that docs/configuration.md lists key by key.
BLOCKS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "progressive_layer_drop": LayerDropBlock,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}
OTHER_BLOCKS: dict[str, type[BaseModel]] = {
    "activation_checkpointing": ActivationBlock,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "hybrid_engine": HybridEngineConfig,
    "tensor_parallel": TPTrainingConfig,
}
OBJECTS = """
    aio autotuning checkpoint compression_training data_types elasticity flops_profiler nebula optimizer
    sparse_attention timers torch_autocast
""".split()
VALUES = """
    amp communication_data_type curriculum_learning data_efficiency dataloader_drop_last datastates_ckpt
    disable_allgather disable_python_gc dump_state expert_parallel gradient_allreduce_op gradient_predivide_factor
    log_level managed_gradient_accumulation memory_breakdown pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type sparse_gradients steps_per_print use_data_before_expert_parallelism
    vocabulary_size wall_clock_breakdown weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
""".split()
Rows = Annotated[int, Field(ge=1, le=MAX_ROWS, strict=True)] | None

# Every top-level key that DeepSpeed 0.19 reads, and the two blocks that our model reads: LayerDropBlock and
# sparse_attention. DeepSpeed's reading of the values that are Any here is tried by find_refusal().
DeepSpeedJson: type[BaseModel] = create_model(
    "DeepSpeedJson",
    __config__=ConfigDict(extra="forbid"),
    train_batch_size=(Rows, None),
    train_micro_batch_size_per_gpu=(Rows, None),
    gradient_accumulation_steps=(Rows, None),
    gradient_clipping=(Annotated[float, Field(ge=0, lt=1e300, strict=True)], 1.0),
    **{key: (kind, None) for key, kind in (BLOCKS | OTHER_BLOCKS).items()},  # type: ignore[call-overload]
    **dict.fromkeys(OBJECTS, (dict[str, Any], None)),
    **dict.fromkeys(VALUES, (Any, None)),
)


def find_refusal(config: dict[str, Any]) -> str | None:
    """Why DeepSpeed would refuse `config`, or None; tried as for a world of one.

    DeepSpeed checks many values only here. Its engine would report them too, but after the data has been opened, the
    process group has been joined and the model has been built.
    """
    alone = copy.deepcopy(config)
    alone.pop("train_batch_size", None)
    try:
        DeepSpeedConfig(alone)
    except ValidationError as error:
        detail = error.errors()[0]
        return f"{'.'.join(map(str, detail['loc']))}: {describe_value(detail)}"
    except Exception as error:  # assertion, key and type errors: whatever the value leads to
        return f"{type(error).__name__}: {error}"
    return None


def is_off(value: Any) -> bool:
    """Whether a block or value turns its feature off explicitly."""
    return value is None or value is False or (isinstance(value, dict) and value.get("enabled") is False)


def find_ignored(content: dict[str, Any]) -> list[str]:
    """One line for each given key that has no effect, with what does; none for a key that is off or empty."""
    lines = [
        f"{key!r} has no effect here: {instead}"
        for key, instead in KEYS_WITHOUT_EFFECT.items()
        if key in content and _requests_something(content[key])
    ]
    zero = content.get("zero_optimization", {})
    has_nvme = any((zero.get(part) or {}).get("device") == "nvme" for part in ("offload_optimizer", "offload_param"))
    if content.get("aio") and not has_nvme:
        lines.append("'aio' has no effect here: it is for zero_optimization's offloading to the device 'nvme'")
    return lines


def _requests_something(value: Any) -> bool:
    if isinstance(value, dict) and not is_off(value):
        return any(_requests_something(part) for part in value.values())
    return not is_off(value)


def checkpoint_layers(content: dict[str, Any], num_layers: int) -> int | None:
    """Layers that the block activation_checkpointing asks to recompute together.

    0: the default number. None: the block is absent, or asks for nothing.
    """
    block = ActivationBlock(**content.get("activation_checkpointing", {}))
    if block.number_checkpoints:
        return -(-num_layers // min(block.number_checkpoints, num_layers))
    return 0 if block.wanted_options() else None
