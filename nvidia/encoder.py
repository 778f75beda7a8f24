"""The stack of blocks, pre-LN and post-LN, on packed tokens.

T real tokens, U used tokens (those whose final state anybody reads), H hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvidia.attention.layer import PLAIN_REQUEST, AttentionOptions, BertAttention
from nvidia.checkpointing import Checkpointing, recomputed
from nvidia.config import BertConfig
from nvidia.layers import BertIntermediate, LayerNorm, NormedResidualOutput, ResidualOutput
from nvidia.unpadding import Packing, empty_packing, select_rows


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
        self.checkpointing = Checkpointing()

    def norms(self) -> tuple[LayerNorm | None, LayerNorm | None]:
        """What comes before attention and before the wide layer: nothing, unless the block is pre-LN."""
        return None, None

    def forward(
        self, hidden: Tensor, packing: Packing, options: AttentionOptions, rows: Tensor | None, scale: float = 1.0
    ) -> LayerOutput:
        """`rows` [U] cuts the block down to these from attention on; `scale` multiplies both branches."""
        first_norm, second_norm = self.norms()
        context, probabilities = self.attend(hidden, packing, options, first_norm, rows)
        (hidden,) = select_rows(rows, hidden)
        hidden = self.attention.output(context, hidden, scale)
        return LayerOutput(self.feed_forward(hidden, scale, second_norm), probabilities)

    def attend(
        self,
        hidden: Tensor,
        packing: Packing,
        options: AttentionOptions,
        norm: nn.Module | None,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        recompute_norm = self.checkpointing.norm and norm is not None
        if norm is not None and not recompute_norm:
            hidden = norm(hidden)
        return self.attention.self(
            hidden, packing, options, norm if recompute_norm else None, self.checkpointing.attention, rows
        )

    def feed_forward(self, x: Tensor, scale: float, norm: nn.Module | None) -> Tensor:
        """x + FeedForward(norm(x)), `chunk_size` rows at a time when set, which bounds the memory of the wide layer."""
        if not self.chunk_size:
            return self._feed_forward(x, scale, norm)
        return torch.cat([self._feed_forward(part, scale, norm) for part in x.split(self.chunk_size)])

    def _feed_forward(self, x: Tensor, scale: float, norm: nn.Module | None) -> Tensor:
        choice = self.checkpointing
        recompute_norm = choice.norm and norm is not None
        normed = x if norm is None or recompute_norm else norm(x)
        wide = self.intermediate(normed, norm if recompute_norm else None, activate=not choice.activation)
        if not choice.activation:
            return self.output(wide, x, scale)
        activate = self.intermediate.dense_act.act
        return recomputed(True, lambda before, residual: self.output(activate(before), residual, scale), wide, x)


class PreLNLayer(BertLayer):
    """a = x + Attention(LN1(x)); y = a + FeedForward(LN2(a))"""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__(config, layer, ResidualOutput)
        self.PreAttentionLayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.PostAttentionLayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def norms(self) -> tuple[LayerNorm | None, LayerNorm | None]:
        return self.PreAttentionLayerNorm, self.PostAttentionLayerNorm


class PostLNLayer(BertLayer):
    """a = LN(x + Attention(x)); y = LN(a + FeedForward(a))"""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__(config, layer, NormedResidualOutput)


class EncoderOutput(NamedTuple):
    last: Tensor  # [T, H] or [U, H]
    states: tuple[Tensor, ...]  # packed, the embeddings first; empty unless asked for
    probabilities: tuple[Tensor, ...]  # one [B, A, S, S] a layer that layer drop kept; empty unless asked for


class BertEncoder(nn.Module):
    """All blocks in order, with gradient checkpointing over chunks of them and progressive layer drop."""

    def __init__(self, config: BertConfig, pre_ln: bool) -> None:
        super().__init__()
        kind = PreLNLayer if pre_ln else PostLNLayer
        self.layer = nn.ModuleList(kind(config, index) for index in range(config.num_hidden_layers))
        self.FinalLayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps) if pre_ln else None
        self.checkpoint_chunk = 0  # blocks recomputed together in the backward pass; 0 = keep everything
        self.branch_scales = (1.0,) * config.num_hidden_layers  # in training; 0 leaves a block out

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
            return EncoderOutput(self.finish(self.run_checkpointed(hidden, packing, rows)), (), ())
        states, probabilities = [], []
        for index in range(len(self.layer)):
            if return_states:
                states.append(hidden)
            hidden, layer_probabilities = self.run_layer(index, hidden, packing, options, rows)
            if layer_probabilities is not None:
                probabilities.append(layer_probabilities)
        hidden = self.finish(hidden)
        return EncoderOutput(hidden, (*states, hidden) if return_states else (), tuple(probabilities))

    def finish(self, hidden: Tensor) -> Tensor:
        return hidden if self.FinalLayerNorm is None else self.FinalLayerNorm(hidden)

    def run_layer(
        self, index: int, hidden: Tensor, packing: Packing, options: AttentionOptions, rows: Tensor | None
    ) -> LayerOutput:
        scale = self.branch_scales[index] if self.training else 1.0
        used = rows if index == len(self.layer) - 1 else None
        if scale == 0.0:
            (hidden,) = select_rows(used, hidden)
            return LayerOutput(hidden + self.no_rows(index, hidden), None)
        return self.layer[index](hidden, packing, options.of_layer(index), used, scale)

    def no_rows(self, index: int, hidden: Tensor) -> Tensor:
        """0, from a block run on no rows: a block that is left out gets gradients of zero instead of none.

        ZeRO's partitions would otherwise keep an earlier step's gradient for it.
        """
        return self.layer[index](hidden[:0], empty_packing(hidden), PLAIN_REQUEST, None).hidden.sum()

    def run_checkpointed(self, hidden: Tensor, packing: Packing, rows: Tensor | None) -> Tensor:
        for start in range(0, len(self.layer), self.checkpoint_chunk):
            chunk = range(start, min(start + self.checkpoint_chunk, len(self.layer)))

            def run(state: Tensor, chunk: range = chunk) -> Tensor:
                for index in chunk:
                    state = self.run_layer(index, state, packing, PLAIN_REQUEST, rows).hidden
                return state

            hidden = recomputed(True, run, hidden)
        return hidden
