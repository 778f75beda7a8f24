"""The self-attention of a block: one projection to queries, keys and values, then a backend.

T real tokens, U used tokens, H hidden size, A heads, D head size, S padded length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext, is_wide_window
from nvidia.attention.registry import BACKENDS, choose_backend, cuda_capability
from nvidia.attention.rotary import rotate, rotation
from nvidia.attention.sparsity import SparseHeads
from nvidia.checkpointing import Checkpointing, recomputed, then
from nvidia.config import BertConfig
from nvidia.cpu.joined_linear import joined_linear, joined_linear_of_some
from nvidia.layers import BranchOutput, RMSNorm
from nvidia.unpadding import Packing, select_rows


class AttentionCall(NamedTuple):
    """What a forward pass asks of a layer's attention."""

    packing: Packing
    rows: Tensor | None = None  # [U], the packed positions whose context is needed; None: all
    head_mask: Tensor | None = None  # [A], multiplies the probabilities
    probabilities: list[Tensor] | None = None  # each layer appends its [B, A, S, S] here
    position_ids: Tensor | None = None  # [T], for rotary positions; None: the position in the row

    def select(self, x: Tensor) -> Tensor:
        """[T, …] → [U, …], the rows whose context is needed."""
        return select_rows(self.rows, x)

    @property
    def has_options(self) -> bool:
        """Whether the call asks for anything beyond the context."""
        return self.head_mask is not None or self.probabilities is not None


def training_context(
    config: BertConfig, device: str, dtype: torch.dtype, capability: tuple[int, int] | None
) -> BackendContext:
    """What decides the backend of this model's layers in training, of those with a window if it has any."""
    return BackendContext(
        device=device,
        dtype=dtype,
        head_size=config.head_size,
        dropout_prob=config.attention_probs_dropout_prob,
        needs_plain=config.is_relative,
        is_sparse=config.is_sparse,
        has_window=config.attention_window > 0,
        capability=capability,
    )


class BertSelfAttention(nn.Module):
    """softmax(QKᵀ/√D)·V on packed tokens. Query, key and value keep separate parameters but share one matmul."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.pruned = config.pruned_heads.get(layer, ())
        self.num_heads = num_heads = config.num_heads(layer)
        self.head_size = config.head_size
        width = num_heads * config.head_size
        self.query = nn.Linear(config.hidden_size, width, bias=config.has_attention_bias)
        self.key = nn.Linear(config.hidden_size, width, bias=config.has_attention_bias)
        self.value = nn.Linear(config.hidden_size, width, bias=config.has_attention_bias)
        self.query_norm = RMSNorm(config.head_size, config.layer_norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_size, config.layer_norm_eps) if config.qk_norm else None
        self.rope_base = config.rope_base(layer) if config.is_rotary else None
        self.window = config.window(layer)
        self.dropout_prob = config.attention_probs_dropout_prob
        self.backend = config.attention_backend
        self.sparse = config.sparse_attention if config.is_sparse else None
        self.position_type = config.position_embedding_type
        self.max_positions = config.max_position_embeddings
        self.distance_embedding = (
            nn.Embedding(2 * config.max_position_embeddings - 1, config.head_size) if config.is_relative else None
        )

    def forward(self, x: Tensor, call: AttentionCall, norm: nn.Module | None, recompute: Checkpointing) -> Tensor:
        """[T, H] → context [U, A·D] of `call.rows`, or [T, A·D]; `norm` is applied to `x` first."""
        if call.rows is not None and self.choose(x, call).should_skip_queries(
            call.packing, self.num_heads, len(call.rows), self.window
        ):
            return self.attend_some(x, call, call.rows, norm, recompute)
        qkv = recomputed(recompute.norm, then(norm, lambda normed: self.project(normed, call)), x)
        context, probabilities = recomputed(recompute.attention, lambda qkv: self.attend(qkv, call), qkv)
        if call.probabilities is not None and probabilities is not None:
            call.probabilities.append(probabilities)
        return call.select(context).flatten(1)

    def attend(self, qkv: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """[T, 3, A, D] → context [T, A, D] and, from backends that have them, probabilities [B, A, S, S]."""
        if call.packing.num_tokens == 0:
            return self.attend_nothing(qkv), None
        return self.choose(qkv, call).attend(qkv, self.make_inputs(qkv, call))

    def attend_some(
        self, x: Tensor, call: AttentionCall, rows: Tensor, norm: nn.Module | None, recompute: Checkpointing
    ) -> Tensor:
        """Context [U, A·D] of the packed positions `rows`, from keys and values of all tokens and queries of these."""
        order = rows.argsort()
        ordered = rows.index_select(0, order)
        ends = torch.searchsorted(ordered, call.packing.boundaries[1:].to(ordered.dtype))  # queries up to each end
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()

        def project(x: Tensor) -> tuple[Tensor, Tensor]:
            q, kv = joined_linear_of_some(x, ordered, self.query, self.key, self.value)
            return self.place(q, call, [self.query_norm], ordered).squeeze(1), self.place(kv, call, [self.key_norm])

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            compute = self.choose(kv, call).attend_some
            assert compute is not None
            return compute(q, kv, AttentionInputs(call.packing, self.active_dropout, self.window, rows=ordered), counts)

        context = recomputed(recompute.attention, attend, *recomputed(recompute.norm, then(norm, project), x))
        return torch.empty_like(context).index_copy(0, order, context).flatten(1)

    def choose(self, x: Tensor, call: AttentionCall) -> Backend:
        """The backend for the type and the device of `x`."""
        context = BackendContext(
            device=x.device.type,
            dtype=x.dtype,
            head_size=self.head_size,
            dropout_prob=self.active_dropout,
            needs_plain=call.has_options or self.distance_embedding is not None,
            is_sparse=self.sparse is not None,
            has_window=self.window > 0,
            has_wide_window=is_wide_window(self.window, call.packing.row_length),
            capability=cuda_capability(x.device),
        )
        return BACKENDS[choose_backend(self.backend, context)]

    def make_inputs(self, qkv: Tensor, call: AttentionCall) -> AttentionInputs:
        kept = self.kept_heads()
        return AttentionInputs(
            packing=call.packing,
            dropout_prob=self.active_dropout,
            window=self.window,
            sparse=None if self.sparse is None else SparseHeads(self.sparse, self.num_heads + len(self.pruned), kept),
            score_bias=self.relative_scores(qkv, call.packing),
            head_mask=None if call.head_mask is None else call.head_mask[list(kept)],
        )

    @property
    def active_dropout(self) -> float:
        return self.dropout_prob if self.training else 0.0

    def attend_nothing(self, qkv: Tensor) -> Tensor:
        """[0, 3, A, D] → [0, A, D], connected to every parameter."""
        context = qkv.sum(1)
        if self.distance_embedding is not None:
            context = context + self.distance_embedding(qkv.new_empty(0, dtype=torch.long)).sum()
        return context

    def kept_heads(self) -> tuple[int, ...]:
        """The indices, in the unpruned layer, of the heads that were kept."""
        return tuple(head for head in range(self.num_heads + len(self.pruned)) if head not in self.pruned)

    def keep_heads(self, columns: Tensor, num_heads: int, pruned: tuple[int, ...]) -> None:
        """Keep the given features of the projections, those of `num_heads` heads."""
        for part in (self.query, self.key, self.value):
            _select(part, columns, dim=0)
        self.num_heads, self.pruned = num_heads, pruned

    def project(self, x: Tensor, call: AttentionCall) -> Tensor:
        """[T, H] → [T, 3, A, D], from one matmul."""
        joined = joined_linear(x, self.query, self.key, self.value)
        return self.place(joined, call, [self.query_norm, self.key_norm])

    def place(
        self, joined: Tensor, call: AttentionCall, norms: Sequence[RMSNorm | None], rows: Tensor | None = None
    ) -> Tensor:
        """Normalize and rotate queries and keys, where the model does: [N, K·A·D] → [N, K, A, D]

        Queries and keys come first, one for each of `norms`, then values, which are left as they are. `rows` are the
        packed positions, None for all.
        """
        shape = (joined.shape[1] // (self.num_heads * self.head_size), self.num_heads, self.head_size)
        if any(norm is not None for norm in norms):
            kinds = joined.unflatten(1, shape).unbind(1)
            queries_and_keys, values = kinds[: len(norms)], kinds[len(norms) :]
            normed = [x if norm is None else norm(x) for norm, x in zip(norms, queries_and_keys, strict=True)]
            joined = torch.cat([x.flatten(1) for x in (*normed, *values)], dim=1)
        if self.rope_base is not None:
            cos, sin = rotation(call.packing, call.position_ids, self.rope_base, self.head_size)
            joined = rotate(joined, (select_rows(rows, cos), select_rows(rows, sin)), len(norms), self.num_heads)
        return joined.unflatten(1, shape)

    def relative_scores(self, qkv: Tensor, packing: Packing) -> Tensor | None:
        """The scaled score terms of relative positions, [B, A, S, S]; None for absolute positions."""
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
    """Self-attention and the projection that ends its branch, under the names that checkpoints use."""

    def __init__(self, config: BertConfig, layer: int, is_post_ln: bool) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layer)
        width = self.self.num_heads * config.head_size
        self.output = BranchOutput(width, config, is_post_ln, config.has_attention_bias)

    def prune(self, before: tuple[int, ...], after: tuple[int, ...], config: BertConfig) -> None:
        """Remove the weights of heads in `after` but not in `before`; heads are numbered as in the unpruned layer."""
        left = [head for head in range(config.num_attention_heads) if head not in before]
        kept = [index for index, head in enumerate(left) if head not in after]
        columns = (torch.tensor(kept)[:, None] * config.head_size + torch.arange(config.head_size)).flatten()
        self.self.keep_heads(columns, len(kept), after)
        _select(self.output.dense, columns, dim=1)


def _select(linear: nn.Linear, index: Tensor, dim: int) -> None:
    """Keep the given rows (dim 0, with their biases) or columns (dim 1) of a linear layer, in place."""
    index = index.to(linear.weight.device)
    linear.weight = _selected(linear.weight, dim, index)
    if dim == 0 and linear.bias is not None:
        linear.bias = _selected(linear.bias, 0, index)
    linear.out_features, linear.in_features = linear.weight.shape


def _selected(parameter: Tensor, dim: int, index: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().index_select(dim, index), requires_grad=parameter.requires_grad)
