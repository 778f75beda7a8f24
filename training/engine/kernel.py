"""DeepSpeed's fused CUDA layer (--deepspeed_transformer_kernel): whether it is available, and how to build it."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec

import torch
from torch import nn

from common.errors import Problems, UserError
from nvidia.config import BertConfig
from nvidia.interop.padded_layers import find_unsupported, use_padded_layers
from nvidia.pretraining import PreTrainingModel

FLAG = "--deepspeed_transformer_kernel"


def check_kernel(config: BertConfig | None, precision: str | None, problems: Problems) -> None:
    """Add the reasons why the layer cannot be used with this model, in this precision, or on this machine.

    `config` and `precision` are None if they are not known because of other problems.
    """
    if config is not None and (found := find_unsupported(config)):
        problems.add(
            f"{FLAG} does not compute {', '.join(found)}; expected dense attention with absolute positions, gelu and "
            "biases; drop the flag, or change the model"
        )
    for reason in missing_parts():
        problems.add(f"{FLAG}: DeepSpeed's fused layer needs CUDA, and {reason}. Drop the flag")
    if precision == "bf16":
        problems.add(f"{FLAG}: that layer computes in fp16 or fp32, but this run is in bf16; pass --precision fp16")


def missing_parts() -> list[str]:
    """What building the layer needs and this machine lacks."""
    if not torch.cuda.is_available():
        return [f"torch {torch.__version__} finds no CUDA device"]
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import TransformerBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    if installed_ops.get("transformer"):  # built when DeepSpeed was installed
        return []
    missing = []
    builder = TransformerBuilder()
    if builder is None or not builder.is_compatible():
        missing.append("DeepSpeed cannot build it for this device")
    if CUDA_HOME is None:
        missing.append("there is no CUDA toolkit (nvcc) to build it")
    if find_spec("ninja") is None:
        missing.append("the package ninja, which builds it, is not installed")
    return missing


def use_kernel(model: PreTrainingModel, make_layer: Callable[[], nn.Module]) -> None:
    """Replace the blocks by DeepSpeed's layers; a failure to build one is a UserError."""
    try:
        with redirect_stdout(io.StringIO()):  # each layer prints its configuration
            use_padded_layers(model, make_layer)
    except (RuntimeError, ImportError, OSError) as error:
        raise UserError(
            f"{FLAG}: DeepSpeed's layer could not be built ({error}). Drop the flag, or see `ds_report`"
        ) from error


def layer_factory(
    config: BertConfig, *, micro_batch: int, is_fp16: bool, seed: int, pre_layer_norm: bool, **options: bool
) -> Callable[[], nn.Module]:
    """A function that makes one layer of this model; the caller overwrites its initial weights.

    `micro_batch` is the maximum number of rows. `seed`, for the layer's own dropout, should differ between ranks.
    `options` are other switches of DeepSpeedTransformerConfig: normalize_invertible, gelu_checkpoint,
    attn_dropout_checkpoint and stochastic_mode.
    """
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    return lambda: DeepSpeedTransformerLayer(
        DeepSpeedTransformerConfig(
            batch_size=micro_batch,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            attn_dropout_ratio=config.attention_probs_dropout_prob,
            hidden_dropout_ratio=config.hidden_dropout_prob,
            num_hidden_layers=config.num_hidden_layers,
            initializer_range=config.initializer_range,
            layer_norm_eps=config.layer_norm_eps,
            seed=seed,
            fp16=is_fp16,
            pre_layer_norm=pre_layer_norm,
            **options,
        )
    )
