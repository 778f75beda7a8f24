"""Self-attention: one projection to queries, keys and values, then a backend.

T real tokens, H hidden size, A heads, D head size, S padded length.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from nvidia.attention.backends import (
    BackendContext,
    choose_backend,
    cuda_capability,
    flex_attention,
    flex_mask,
    jagged_attention,
    plain_attention,
    sdpa_attention,
    varlen_attention,
)
from nvidia.attention.grouped import attention_of_some, grouped_attention, some_are_cheaper
from nvidia.attention.sparsity import SparseAttention, make_layout, visible_keys
from nvidia.checkpointing import recomputed
from nvidia.config import BertConfig
from nvidia.cpu.joined_linear import joined_linear, joined_linear_of_some
from nvidia.layers import ResidualOutput
from nvidia.unpadding import Packing, select_rows


class AttentionOptions(NamedTuple):
    """What a caller may ask of every layer's attention beyond the context."""

    head_mask: Tensor | None = None  # [layers, A]; one layer's is [A]
    return_probabilities: bool = False

    @property
    def are_default(self) -> bool:
        return self.head_mask is None and not self.return_probabilities

    def of_layer(self, layer: int) -> "AttentionOptions":
        return self if self.head_mask is None else self._replace(head_mask=self.head_mask[layer])


PLAIN_REQUEST = AttentionOptions()


class BertSelfAttention(nn.Module):
    """softmax(QKᵀ/√D)·V on packed tokens. Query, key and value keep their own parameters but share one matmul."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.pruned = config.pruned_heads.get(layer, ())
        self.num_heads = num_heads = config.num_heads(layer)
        self.head_size = config.head_size
        width = num_heads * config.head_size
        self.query = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.key = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.value = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.dropout_prob = config.attention_probs_dropout_prob
        self.backend = config.attention_backend
        self.sparse = config.sparse_attention if config.is_sparse else None
        self.position_type = config.position_embedding_type
        self.max_positions = config.max_position_embeddings
        self.distance_embedding = (
            None
            if config.position_embedding_type == "absolute"
            else nn.Embedding(2 * config.max_position_embeddings - 1, config.head_size)
        )

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        options: AttentionOptions,
        norm: nn.Module | None = None,
        recompute: bool = False,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, H] → context [T, A·D] and, when asked for, probabilities [B, A, S, S].

        `norm` goes before the projection and is recomputed in the backward pass; `recompute` does so with the scores.
        `rows` [U] asks for the context of these packed positions only, [U, A·D].
        """
        if rows is not None and self.can_leave_queries_out(hidden, packing, options):
            return self.attend_to_some(hidden, packing, norm, recompute, rows), None
        qkv = self.project(hidden) if norm is None else recomputed(True, lambda x: self.project(norm(x)), hidden)
        context, probabilities = recomputed(recompute, lambda rows: self.attend(rows, packing, options), qkv)
        (context,) = select_rows(rows, context)
        return context.flatten(1), probabilities if options.return_probabilities else None

    def can_leave_queries_out(self, hidden: Tensor, packing: Packing, options: AttentionOptions) -> bool:
        """Whether this batch's attention is the kind that can take queries of some rows only, and gains by it."""
        return some_are_cheaper(packing.groups, self.num_heads) and self.choose_backend(hidden, options) == "grouped"

    def attend_to_some(
        self, hidden: Tensor, packing: Packing, norm: nn.Module | None, recompute: bool, rows: Tensor
    ) -> Tensor:
        """Context [U, A·D] of packed positions `rows`: keys and values of all tokens, queries of these."""
        order = rows.argsort()
        ordered = rows.index_select(0, order)
        ends = torch.searchsorted(ordered, packing.boundaries[1:].to(ordered.dtype))  # queries up to a sequence's end
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        dropout_prob = self.dropout_prob if self.training else 0.0

        def project(x: Tensor) -> tuple[Tensor, Tensor]:
            normed = x if norm is None else norm(x)
            q, kv = joined_linear_of_some(normed, ordered, self.query, self.key, self.value)
            shape = (self.num_heads, self.head_size)
            return q.unflatten(-1, shape), kv.unflatten(-1, (2, *shape))

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            return attention_of_some(q, kv, packing.groups, counts, dropout_prob)

        context = recomputed(recompute, attend, *recomputed(norm is not None, project, hidden))
        return torch.empty_like(context).index_copy(0, order, context).flatten(1)

    def attend(self, qkv: Tensor, packing: Packing, options: AttentionOptions) -> tuple[Tensor, Tensor | None]:
        """[T, 3, A, D] → [T, A, D], by the backend that fits"""
        if packing.num_tokens == 0:
            return self.attend_nothing(qkv), None
        dropout_prob = self.dropout_prob if self.training else 0.0
        backend = self.choose_backend(qkv, options)
        if backend == "grouped":
            return grouped_attention(qkv, packing.groups, dropout_prob), None
        if backend == "varlen":
            return varlen_attention(qkv, packing), None
        if backend == "sdpa":
            return sdpa_attention(qkv, packing, dropout_prob), None
        if backend == "jagged":
            return jagged_attention(qkv, packing, dropout_prob), None
        if backend == "flex":
            return flex_attention(qkv, packing.mask("flex", self.pruned, lambda: self.flex_mask(packing))), None
        visible = packing.mask("plain", self.pruned, lambda: self.visible_keys(packing))
        head_mask = None if options.head_mask is None else options.head_mask[self.kept_heads(), None, None]
        return plain_attention(qkv, packing, dropout_prob, self.relative_scores(qkv, packing), visible, head_mask)

    def choose_backend(self, x: Tensor, options: AttentionOptions) -> str:
        """For `x`'s type on its device."""
        given = BackendContext(
            device=x.device.type,
            dtype=x.dtype,
            head_size=self.head_size,
            dropout_prob=self.dropout_prob if self.training else 0.0,
            needs_plain=not options.are_default or self.distance_embedding is not None,
            is_sparse=self.sparse is not None,
            capability=cuda_capability(x.device),
        )
        return choose_backend(self.backend, given)

    def attend_nothing(self, qkv: Tensor) -> Tensor:
        """[0, 3, A, D] → [0, A, D], connected to every parameter."""
        context = qkv.sum(1)
        if self.distance_embedding is not None:
            context = context + self.distance_embedding(qkv.new_empty(0, dtype=torch.long)).sum()
        return context

    def flex_mask(self, packing: Packing) -> BlockMask:
        if self.sparse is None:
            return flex_mask(packing, self.num_heads)
        layout = self.layout(self.sparse, packing.row_length)
        return flex_mask(packing, self.num_heads, layout, self.sparse["block"], self.sparse.looks_back_only)

    def visible_keys(self, packing: Packing) -> Tensor | None:
        """Which keys a query may see, [A or 1, S, S], or None where attention is dense."""
        if self.sparse is None:
            return None
        length = packing.row_length
        return visible_keys(self.sparse, self.layout(self.sparse, length), length).to(packing.indices.device)

    def layout(self, sparse: SparseAttention, length: int) -> Tensor:
        """Which blocks see which, [A or 1, N, N], for the heads that are left."""
        layout = make_layout(sparse, self.num_heads + len(self.pruned), length)
        return layout[self.kept_heads()] if len(layout) > 1 else layout

    def kept_heads(self) -> list[int]:
        """Numbers, as in the unpruned layer, of the heads that are left."""
        return [head for head in range(self.num_heads + len(self.pruned)) if head not in self.pruned]

    def project(self, hidden: Tensor) -> Tensor:
        """[T, H] → [T, 3, A, D], from one matmul."""
        joined = joined_linear(hidden, self.query, self.key, self.value)
        return joined.unflatten(-1, (3, self.num_heads, self.head_size))

    def relative_scores(self, qkv: Tensor, packing: Packing) -> Tensor | None:
        """Scaled score terms of relative positions, [B, A, S, S], or None where positions are absolute."""
        if self.distance_embedding is None:
            return None
        positions = torch.arange(packing.row_length, device=qkv.device)
        distance = positions[:, None] - positions[None, :] + self.max_positions - 1  # [S, S]
        vectors = self.distance_embedding(distance).to(qkv.dtype)  # [S, S, D]
        q = packing.unpack(qkv[:, 0]) * self.head_size**-0.5  # [B, S, A, D]
        scores = torch.einsum("bqad,qkd->baqk", q, vectors)
        if self.position_type == "relative_key_query":
            k = packing.unpack(qkv[:, 1]) * self.head_size**-0.5
            scores = scores + torch.einsum("bkad,qkd->baqk", k, vectors)
        return scores


class BertAttention(nn.Module):
    """Self-attention and the projection that ends its branch, under the names checkpoints have."""

    def __init__(self, config: BertConfig, layer: int, output: type[ResidualOutput]) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layer)
        self.output = output(self.self.num_heads * config.head_size, config)

    def prune(self, before: tuple[int, ...], after: tuple[int, ...], config: BertConfig) -> None:
        """Drop the weights of heads in `after` but not in `before`; heads are numbered as in the unpruned layer."""
        left = [head for head in range(config.num_attention_heads) if head not in before]
        kept = [place for place, head in enumerate(left) if head not in after]
        columns = (torch.tensor(kept)[:, None] * config.head_size + torch.arange(config.head_size)).flatten()
        for part in (self.self.query, self.self.key, self.self.value):
            _select(part, columns, dim=0)
        _select(self.output.dense, columns, dim=1)
        self.self.num_heads, self.self.pruned = len(kept), after


def _select(linear: nn.Linear, index: Tensor, dim: int) -> None:
    """Keep the given rows (dim 0, with their biases) or columns (dim 1) of a linear layer, in place."""
    index = index.to(linear.weight.device)
    linear.weight = _selected(linear.weight, dim, index)
    if dim == 0 and linear.bias is not None:
        linear.bias = _selected(linear.bias, 0, index)
    linear.out_features, linear.in_features = linear.weight.shape


def _selected(parameter: Tensor, dim: int, index: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().index_select(dim, index), requires_grad=parameter.requires_grad)
