"""Blocks computed by a foreign layer on padded rows, such as DeepSpeed's CUDA kernel, inside our encoder.

The caller passes a function that makes such a layer. Its parameters have DeepSpeed's names (attn_qkvw, attn_ow, …). Its
gelu is the tanh approximation and it computes padded rows, so results are close to ours, not equal.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from common.errors import UserError
from nvidia.config import BertConfig
from nvidia.interop.hugging_face import is_pre_ln
from nvidia.modelingpreln import PreLNBlock
from nvidia.pretraining import PreTrainingModel
from nvidia.self_attention import AttentionCall

_KERNEL_NAME = re.compile(r"(bert\.encoder\.layer\.\d+)\.layer\.(\w+)([wb])")  # bert.encoder.layer.0.layer.attn_qkvw
_KINDS = {"w": "weight", "b": "bias"}
_HIDDEN = -10000.0  # added to the scores of padding, as the kernel expects


class PaddedLayer(nn.Module):
    """Unpack, call the layer with an additive mask [B, 1, 1, S], pack again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, call: AttentionCall, scale: float = 1.0) -> Tensor:
        if call.has_options or scale != 1.0:
            raise UserError(
                "DeepSpeed's transformer layer does not support head masks, returned probabilities or progressive "
                "layer drop; use the standard blocks, or do without these options"
            )
        packing = call.packing
        mask = (~packing.key_mask()).to(hidden.dtype).unsqueeze(1).unsqueeze(1) * _HIDDEN
        output = self.layer(packing.unpack(hidden), mask)
        return call.select(packing.pack(output[0] if isinstance(output, tuple) else output))


def use_padded_layers(model: PreTrainingModel, make_layer: Callable[[], nn.Module]) -> None:
    """Replace every block by a layer that `make_layer` builds, with the weights of the block."""
    if found := find_unsupported(model.config):
        raise UserError(
            f"DeepSpeed's transformer layer does not compute {', '.join(found)}; expected dense attention with "
            "absolute positions, gelu and biases; change the model, or use the standard blocks"
        )
    encoder = model.bert.encoder
    for index, block in enumerate(encoder.layer):
        layer = make_layer()
        with torch.no_grad():
            for name, tensor in kernel_weights(block).items():
                layer.get_parameter(name).copy_(tensor)
        encoder.layer[index] = PaddedLayer(layer)


def find_unsupported(config: BertConfig) -> list[str]:
    """The parts of a model that the kernel does not compute."""
    parts = {
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "gelu",
        "use_bias false": not (config.has_attention_bias and config.has_mlp_bias),
        "norm_bias false": not config.norm_bias,
        "attention_window": config.attention_window > 0,
        "qk_norm": config.qk_norm,
        "first_attention_norm false": not config.first_attention_norm,
        "pruned_heads": bool(config.pruned_heads),
        "sparse attention": config.is_sparse,
        f"position_embedding_type {config.position_embedding_type!r}": config.position_embedding_type != "absolute",
        f"chunk_size_feed_forward {config.chunk_size_feed_forward}": config.chunk_size_feed_forward != 0,
    }
    return [name for name, is_used in parts.items() if is_used]


def kernel_weights(block: nn.Module) -> dict[str, Tensor]:
    """The weights of one of our blocks under the kernel's names."""
    weights = {}
    for kernel_name, modules in _module_names(isinstance(block, PreLNBlock)).items():
        for suffix, kind in _KINDS.items():
            parts = [block.get_parameter(f"{module}.{kind}").detach() for module in modules]
            weights[kernel_name + suffix] = torch.cat(parts)
    return weights


def with_block_names(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of kernel layers to our names; all others are unchanged."""
    pre_ln, weights = is_pre_ln(state_dict), {}
    for name, tensor in state_dict.items():
        found = _KERNEL_NAME.fullmatch(name)
        if found is None:
            weights[name] = tensor
            continue
        block, kernel_name, suffix = found.groups()
        modules = _module_names(pre_ln)[kernel_name]
        for module, part in zip(modules, tensor.chunk(len(modules)), strict=True):
            weights[f"{block}.{module}.{_KINDS[suffix]}"] = part
    return weights


def _module_names(pre_ln: bool) -> dict[str, tuple[str, ...]]:
    """The kernel's name without its last letter → modules of our block."""
    return {
        "attn_qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
        "attn_o": ("attention.output.dense",),
        "attn_n": ("PostAttentionLayerNorm" if pre_ln else "attention.output.LayerNorm",),
        "inter_": ("intermediate.dense_act",),
        "output_": ("output.dense",),
        "norm_": ("PreAttentionLayerNorm" if pre_ln else "output.LayerNorm",),
    }
