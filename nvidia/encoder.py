"""The stack of blocks on packed tokens, with gradient checkpointing over chunks of them and progressive layer drop.

T real tokens, U used tokens (those whose final state is read), H hidden size.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from nvidia.block import BertBlock
from nvidia.checkpointing import Checkpointing, recomputed
from nvidia.config import BertConfig
from nvidia.layers import LayerNorm
from nvidia.self_attention import AttentionCall
from nvidia.unpadding import empty_packing


class EncoderOutput(NamedTuple):
    last: Tensor  # [T, H] or [U, H]
    states: tuple[Tensor, ...]  # packed, the embeddings first; empty unless asked for


class BertEncoder(nn.Module):
    """All blocks in order and, in a pre-LN model, a final layer norm."""

    def __init__(self, config: BertConfig, block: Callable[[BertConfig, int], BertBlock], has_final_norm: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList(block(config, index) for index in range(config.num_hidden_layers))
        self.FinalLayerNorm = LayerNorm(config) if has_final_norm else None
        self.checkpoint_chunk = 0  # blocks recomputed together in the backward pass; 0 = keep everything
        self.branch_scales = (1.0,) * config.num_hidden_layers  # in training; 0 drops a block

    def set_checkpointing(self, choice: Checkpointing) -> None:
        """Choose what the backward pass recomputes: whole blocks, or parts of them."""
        self.checkpoint_chunk = choice.layers
        for block in self.layer:
            assert isinstance(block, BertBlock)
            block.checkpointing = choice

    def set_branch_scales(self, scales: Sequence[float]) -> None:
        """Set the factor of each block's branches in training; 0 drops a block."""
        self.branch_scales = tuple(scales)

    def forward(self, hidden: Tensor, call: AttentionCall, return_states: bool = False) -> EncoderOutput:
        """[T, H] → [U, H] for `call.rows`, to which the last block is limited; `call.head_mask` is [layers, A]."""
        states = []
        if self.checkpoint_chunk and self.training and not call.has_options and not return_states:
            hidden = self.run_checkpointed(hidden, call)
        else:
            for index in range(len(self.layer)):
                if return_states:
                    states.append(hidden)
                hidden = self.run_layer(index, hidden, call)
        if self.FinalLayerNorm is not None:
            hidden = self.FinalLayerNorm(hidden)
        return EncoderOutput(hidden, (*states, hidden) if return_states else ())

    def run_layer(self, index: int, hidden: Tensor, call: AttentionCall) -> Tensor:
        scale = self.branch_scales[index] if self.training else 1.0
        call = call._replace(
            rows=call.rows if index == len(self.layer) - 1 else None,
            head_mask=None if call.head_mask is None else call.head_mask[index],
        )
        if scale == 0.0:
            hidden = call.select(hidden)
            return hidden + self.run_on_no_rows(index, hidden)
        return self.layer[index](hidden, call, scale)

    def run_on_no_rows(self, index: int, hidden: Tensor) -> Tensor:
        """0, computed by a block from no rows, so that a dropped block gets gradients of zero instead of none.

        With none, ZeRO's partitions would keep the gradient of an earlier step.
        """
        return self.layer[index](hidden[:0], AttentionCall(empty_packing(hidden))).sum()

    def run_checkpointed(self, hidden: Tensor, call: AttentionCall) -> Tensor:
        for start in range(0, len(self.layer), self.checkpoint_chunk):
            chunk = range(start, min(start + self.checkpoint_chunk, len(self.layer)))

            def run(state: Tensor, chunk: range = chunk) -> Tensor:
                for index in chunk:
                    state = self.run_layer(index, state, call)
                return state

            hidden = recomputed(True, run, hidden)
        return hidden
