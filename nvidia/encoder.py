"""The stack of blocks, pre-LN and post-LN, on packed tokens.

T real tokens, U used tokens (those whose final state anybody reads), H hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nvidia.attention import PLAIN_REQUEST, AttentionOptions, BertAttention
from nvidia.config import BertConfig
from nvidia.layers import BertIntermediate, LayerNorm, NormedResidualOutput, ResidualOutput
from nvidia.unpadding import Packing


class LayerOutput(NamedTuple):
    hidden: Tensor  # [T, H], or [U, H] where only used rows were asked for
    probabilities: Tensor | None


class BertLayer(nn.Module):
    """What both kinds of block share: attention, a wide layer, and the way back."""

    def __init__(self, config: BertConfig, layer: int, output: type[ResidualOutput]) -> None:
        super().__init__()
        self.attention = BertAttention(config, layer, output)
        self.intermediate = BertIntermediate(config)
        self.output = output(config.intermediate_size, config)
        self.chunk_size = config.chunk_size_feed_forward

    def feed_forward(self, x: Tensor, residual: Tensor, scale: float) -> Tensor:
        """[T, H] → [T, H], `chunk_size` rows at a time when set, which bounds the memory of the wide layer."""
        if not self.chunk_size:
            return self.output(self.intermediate(x), residual, scale)
        chunks = zip(x.split(self.chunk_size), residual.split(self.chunk_size), strict=True)
        return torch.cat([self.output(self.intermediate(part), rest, scale) for part, rest in chunks])


class PreLNLayer(BertLayer):
    """a = x + Attention(LN1(x)); y = a + FeedForward(LN2(a))"""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__(config, layer, ResidualOutput)
        self.PreAttentionLayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.PostAttentionLayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        options: AttentionOptions,
        rows: Tensor | None = None,
        scale: float = 1.0,
    ) -> LayerOutput:
        context, probabilities = self.attention.self(self.PreAttentionLayerNorm(hidden), packing, options)
        if rows is not None:
            context, hidden = context.index_select(0, rows), hidden.index_select(0, rows)
        hidden = self.attention.output(context, hidden, scale)
        return LayerOutput(self.feed_forward(self.PostAttentionLayerNorm(hidden), hidden, scale), probabilities)


class PostLNLayer(BertLayer):
    """a = LN(x + Attention(x)); y = LN(a + FeedForward(a))"""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__(config, layer, NormedResidualOutput)

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        options: AttentionOptions,
        rows: Tensor | None = None,
        scale: float = 1.0,
    ) -> LayerOutput:
        context, probabilities = self.attention.self(hidden, packing, options)
        if rows is not None:
            context, hidden = context.index_select(0, rows), hidden.index_select(0, rows)
        hidden = self.attention.output(context, hidden, scale)
        return LayerOutput(self.feed_forward(hidden, hidden, scale), probabilities)


class EncoderOutput(NamedTuple):
    last: Tensor  # [T, H] or [U, H]
    states: tuple[Tensor, ...]  # packed, the embeddings first; empty unless asked for
    probabilities: tuple[Tensor, ...]  # one [B, A, S, S] a layer; empty unless asked for


class BertEncoder(nn.Module):
    """All blocks in order, with gradient checkpointing over chunks of them."""

    def __init__(self, config: BertConfig, pre_ln: bool) -> None:
        super().__init__()
        kind = PreLNLayer if pre_ln else PostLNLayer
        self.layer = nn.ModuleList(kind(config, index) for index in range(config.num_hidden_layers))
        self.FinalLayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps) if pre_ln else None
        self.checkpoint_chunk = 0  # layers recomputed together in the backward pass; 0 = keep everything

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        options: AttentionOptions = PLAIN_REQUEST,
        rows: Tensor | None = None,
        return_states: bool = False,
    ) -> EncoderOutput:
        """`rows` [U]: packed positions whose final state is needed; the last block works on these only."""
        if self.checkpoint_chunk and self.training and options.are_default and not return_states:
            hidden = self.run_checkpointed(hidden, packing, rows)
            return EncoderOutput(self.finish(hidden), (), ())
        states, probabilities = [], []
        for index, layer in enumerate(self.layer):
            if return_states:
                states.append(hidden)
            is_last = index == len(self.layer) - 1
            hidden, layer_probabilities = layer(hidden, packing, options.of_layer(index), rows if is_last else None)
            if layer_probabilities is not None:
                probabilities.append(layer_probabilities)
        hidden = self.finish(hidden)
        return EncoderOutput(hidden, (*states, hidden) if return_states else (), tuple(probabilities))

    def finish(self, hidden: Tensor) -> Tensor:
        return hidden if self.FinalLayerNorm is None else self.FinalLayerNorm(hidden)

    def run_checkpointed(self, hidden: Tensor, packing: Packing, rows: Tensor | None) -> Tensor:
        def run(hidden: Tensor, start: int, stop: int) -> Tensor:
            for index in range(start, stop):
                is_last = index == len(self.layer) - 1
                hidden = self.layer[index](hidden, packing, PLAIN_REQUEST, rows if is_last else None).hidden
            return hidden

        for start in range(0, len(self.layer), self.checkpoint_chunk):
            stop = min(start + self.checkpoint_chunk, len(self.layer))
            hidden = checkpoint(run, hidden, start, stop, use_reentrant=False)
        return hidden
