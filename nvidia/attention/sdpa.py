"""torch's scaled_dot_product_attention: one call per length where lengths are known, else one padded, masked call.

T real tokens, A heads, D head size, n sequences of L keys and R queries.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext, in_window, unpack_heads
from nvidia.unpadding import Packing


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    packing, dropout_prob = inputs.packing, inputs.dropout_prob
    if not packing.groups:
        q, k, v = unpack_heads(qkv, packing)
        real = packing.key_mask()
        mask = real.unsqueeze(1).unsqueeze(1)
        if inputs.window:
            mask = packing.mask(("sdpa", inputs.window), lambda: mask & in_window(real.cumsum(1), inputs.window))
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_prob)
        return packing.pack(context.transpose(1, 2)), None
    parts = []
    sizes = [count * length for count, length in packing.groups]
    for (count, length), group in zip(packing.groups, qkv.split(sizes), strict=True):
        q, k, v = group.view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()  # [n, A, L, D]
        band = in_window(torch.arange(length, device=qkv.device), inputs.window) if inputs.window else None
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=band, dropout_p=dropout_prob)
        parts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts), None


def attend_some(q: Tensor, kv: Tensor, inputs: AttentionInputs, counts: Sequence[int]) -> Tensor:
    """The context of some queries, in one call for the longest sequences and one for all others, which are padded."""
    lengths = [length for count, length in inputs.packing.groups for _ in range(count)]
    num_longest = inputs.packing.groups[0][0]
    parts = list(pairwise(sorted({0, num_longest if 4 * num_longest >= len(lengths) else 0, len(lengths)})))
    num_queries = [sum(counts[first:last]) for first, last in parts]
    queries, positions = q.split(num_queries), _positions(inputs).split(num_queries)
    tokens = kv.split([sum(lengths[first:last]) for first, last in parts])
    contexts = [
        _attend_part(queries[i], tokens[i], counts[first:last], lengths[first:last], positions[i], inputs)
        for i, (first, last) in enumerate(parts)
        if num_queries[i]
    ]
    return torch.cat(contexts)


def _attend_part(
    q: Tensor, kv: Tensor, counts: Sequence[int], lengths: Sequence[int], positions: Tensor, inputs: AttentionInputs
) -> Tensor:
    """Queries [U, A, D] at `positions` [U] of sequences that are padded to one length → [U, A, D]"""
    is_query, is_key = _real_items(counts), _real_items(lengths)
    k, v = _pad(kv, is_key).permute(2, 0, 3, 1, 4).unbind()  # [n, A, L, D]
    mask = is_key[:, None, None] if len(set(lengths)) > 1 else None  # [n, 1, 1, L]
    if inputs.window:  # a query that is padding is at position 0, so that it sees a key
        distance = (_pad(positions, is_query) * is_query).unsqueeze(2) - torch.arange(lengths[0])
        near = (distance.abs() <= inputs.window // 2).unsqueeze(1)  # [n, 1, R, L]
        mask = near if mask is None else near & mask
    context = functional.scaled_dot_product_attention(
        _pad(q, is_query).transpose(1, 2), k, v, attn_mask=mask, dropout_p=inputs.dropout_prob
    )  # [n, A, R, D]
    return context.transpose(1, 2).flatten(0, 1).index_select(0, torch.nonzero(is_query.flatten()).squeeze(1))


def _positions(inputs: AttentionInputs) -> Tensor:
    """[U]: the position of each query in its sequence."""
    starts = inputs.packing.boundaries[:-1].long()
    assert inputs.rows is not None
    return inputs.rows - starts[torch.searchsorted(starts, inputs.rows, right=True) - 1]


def _real_items(sizes: Sequence[int]) -> Tensor:
    """[n, longest] bool: the items of each sequence before its padding."""
    return torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)


def _pad(items: Tensor, is_real: Tensor) -> Tensor:
    """[N, …] → [n, longest, …]; padding repeats the item before it, which keeps no copy for the backward pass."""
    if len(items) < is_real.numel():
        items = items.index_select(0, (is_real.flatten().cumsum(0) - 1).clamp_(min=0))
    return items.view(*is_real.shape, *items.shape[1:])


def should_skip_queries(packing: Packing, num_heads: int, num_queries: int, window: int) -> bool:
    """Whether padding queries and keys costs less than the queries that are not needed."""
    return len(packing.groups) > 0 and 0 < 2 * num_queries <= packing.num_tokens


def reason_against(context: BackendContext) -> str | None:
    return context.reason_against_options(has_window=True)


BACKEND = Backend(attend, reason_against, attend_some, should_skip_queries)
