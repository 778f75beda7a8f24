"""The parts that blocks are made of: layer norm, linear + activation, embeddings, the projection ending a branch.

T real tokens, H hidden size, I intermediate size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nvidia.activations import activation, is_gated
from nvidia.config import BertConfig
from nvidia.cpu.dropout import dropout
from nvidia.cpu.gelu import has_loop
from nvidia.cpu.linear import Linear, activate, linear_activation, project
from nvidia.unpadding import Packing


class LayerNorm(nn.Module):
    """Layer norm with statistics and affine step computed in fp32 for inputs and weights of any type."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size)) if config.norm_bias else None
        self.eps = config.layer_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if x.dtype == torch.float32 == self.weight.dtype:
            return functional.layer_norm(x, shape, self.weight, self.bias, self.eps)
        bias = None if self.bias is None else self.bias.float()
        return functional.layer_norm(x.float(), shape, self.weight.float(), bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class LinearActivation(nn.Module):
    """x·Wᵀ + b, then an activation. With a gated activation W has twice as many rows as there are outputs."""

    def __init__(self, in_size: int, out_size: int, act: str, bias: bool = True) -> None:
        super().__init__()
        rows = 2 * out_size if is_gated(act) else out_size
        self.weight = nn.Parameter(torch.empty(rows, in_size))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.act_name, self.act = act, activation(act)

    def forward(self, x: Tensor, half: str | None = None) -> Tensor:
        """`half`: "product" computes what "activation" needs; None computes both."""
        if half == "product":
            return project(x, self.weight, self.bias, self.act_name)
        if half == "activation":
            return activate(x, self.bias, self.act_name, self.act)
        return linear_activation(x, self.weight, self.bias, self.act_name, self.act)


class BertEmbeddings(nn.Module):
    """The sum of word embeddings and those of positions and segments, if the model has them; layer norm, dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = (
            nn.Embedding(config.position_offset + config.max_position_embeddings, config.hidden_size)
            if config.position_embedding_type == "absolute"
            else None
        )
        self.position_offset = config.position_offset
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.LayerNorm = LayerNorm(config)
        self.dropout_prob = config.hidden_dropout_prob

    def forward(self, words: Tensor, segments: Tensor, packing: Packing, position_ids: Tensor | None = None) -> Tensor:
        """`words` are packed ids [T] or packed embeddings [T, H] → [T, H]"""
        summed = self.word_embeddings(words) if words.dim() == 1 else words
        if self.token_type_embeddings is not None:
            summed = summed + self.token_type_embeddings(segments)
        if self.position_embeddings is not None:
            positions = packing.position_of if position_ids is None else position_ids
            summed = summed + self.position_embeddings(positions + self.position_offset)
        return dropout(self.LayerNorm(summed), self.dropout_prob, self.training)


class BranchOutput(nn.Module):
    """The projection that ends a branch and, in a post-LN block, the norm after the sum, under checkpoints' names."""

    LayerNorm: nn.Module  # in post-LN blocks only

    def __init__(self, in_size: int, config: BertConfig, is_post_ln: bool, bias: bool) -> None:
        super().__init__()
        self.dense = Linear(in_size, config.hidden_size, bias=bias)
        if is_post_ln:
            self.LayerNorm = LayerNorm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class BertIntermediate(nn.Module):
    """The first, wide half of the feed-forward layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense_act = LinearActivation(
            config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.has_mlp_bias
        )

    def forward(self, x: Tensor, half: str | None = None) -> Tensor:
        return self.dense_act(x, half)

    # Both halves are calls of the module, because ZeRO-3 gathers parameters when their module is called.

    def project(self, x: Tensor) -> Tensor:
        return self(x, "product")

    def activate(self, product: Tensor) -> Tensor:
        layer = self.dense_act
        reads_bias = layer.bias is not None and has_loop(product, layer.act_name)
        return self(product, "activation") if reads_bias else activate(product, None, layer.act_name, layer.act)


def initialize_weights(model: nn.Module, config: BertConfig) -> None:
    """Initialize all parameters: N(0, range) for matrices and embeddings, zero biases, norms 1 and 0.

    The projections that write into the residual stream get range/√(2·layers), so that the variance of the stream does
    not grow with depth.
    """
    shrunk = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
    writers = {id(module.dense) for module in model.modules() if isinstance(module, BranchOutput)}
    for module in model.modules():
        std = shrunk if id(module) in writers else config.initializer_range
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
            elif isinstance(module, LayerNorm | RMSNorm) and name == "weight":
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)
