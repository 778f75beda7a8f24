"""What pre-LN and post-LN blocks share: their parts, and the way from branch to residual stream.

T real tokens, U used tokens, H hidden size.
"""

import torch
from torch import Tensor, nn

from nvidia.checkpointing import Checkpointing, recomputed, then
from nvidia.config import BertConfig
from nvidia.cpu.dropout import dropout_add
from nvidia.layers import BertIntermediate, BranchOutput
from nvidia.self_attention import AttentionCall, BertAttention


class BertBlock(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream. Subclasses place the layer norms.

    `checkpointing` and `chunk_size` change how the branches are computed, never what they compute.
    """

    is_post_ln: bool

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.attention = BertAttention(config, layer, self.is_post_ln)
        self.intermediate = BertIntermediate(config)
        self.output = BranchOutput(config.intermediate_size, config, self.is_post_ln, config.has_mlp_bias)
        self.dropout_prob = config.hidden_dropout_prob
        self.chunk_size = config.chunk_size_feed_forward  # rows at a time, which needs less memory; 0 = all at once
        self.checkpointing = Checkpointing()

    def forward(self, x: Tensor, call: AttentionCall, scale: float = 1.0) -> Tensor:
        """[T, H] → [U, H] for `call.rows`, or [T, H]; `scale` multiplies both branches (progressive layer drop)."""
        a = self.add_attention(x, call, scale)
        if not self.chunk_size:
            return self.add_feed_forward(a, scale)
        return torch.cat([self.add_feed_forward(rows, scale) for rows in a.split(self.chunk_size)])

    def add_attention(self, x: Tensor, call: AttentionCall, scale: float) -> Tensor:
        """The first half of the block, [T, H] → [U, H]."""
        raise NotImplementedError

    def add_feed_forward(self, a: Tensor, scale: float) -> Tensor:
        """The second half of the block, [U, H] → [U, H], row by row."""
        raise NotImplementedError

    def compile_feed_forward(self) -> None:
        """Compile the second half of the block, for any number of rows: it differs between batches."""
        self.add_feed_forward = torch.compile(self.add_feed_forward, dynamic=True)  # type: ignore[method-assign]

    def attend(self, x: Tensor, call: AttentionCall, norm: nn.Module | None = None) -> Tensor:
        """attention(norm(x)), [T, H] → [U, H]"""
        return self.attention.output(self.attention.self(x, call, norm, self.checkpointing))

    def feed_forward(self, a: Tensor, norm: nn.Module | None = None) -> Tensor:
        """W2·act(W1·norm(a)), [U, H] → [U, H]"""
        if not torch.is_grad_enabled():  # there are kernels that compute W1 and the activation together
            return self.output(then(norm, self.intermediate)(a))
        wide = recomputed(self.checkpointing.norm, then(norm, self.intermediate.project), a)
        return recomputed(self.checkpointing.activation, then(self.intermediate.activate, self.output), wide)

    def add(self, residual: Tensor, branch: Tensor, scale: float) -> Tensor:
        """residual + scale · dropout(branch)"""
        return dropout_add(branch, residual, self.dropout_prob, self.training, scale)
