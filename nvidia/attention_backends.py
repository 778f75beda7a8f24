"""Ways to compute the same attention over packed sequences, and which of them to take.

B sequences, S padded length, T real tokens, A heads, D head size, L one sequence's length.
All take queries, keys and values side by side, [T, 3, A, D], and give [T, A, D].
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import UserError
from nvidia.dropout import dropout
from nvidia.unpadding import Packing


def plain_attention(
    qkv: Tensor,
    packing: Packing,
    dropout_prob: float = 0.0,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula written out on the padded batch; the reference, and the only one with every option.

    `bias` [B, A, S, S] is added to the scores, `visible` [A or 1, S, S] says which keys a query may see, `head_mask`
    (broadcast to [B, A, S, S]) multiplies the probabilities. Also gives the probabilities [B, A, S, S] as they were
    before dropout.
    """
    q, k, v = _padded(qkv, packing)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # [B, A, S, S]
    if bias is not None:
        scores = scores + bias
    hidden_keys = ~packing.key_mask()[:, None, None, :]
    if visible is not None:
        hidden_keys = hidden_keys | ~visible
    # The least finite number, not -inf: a padded query under a sparse layout may see no key at all.
    scores = scores.float().masked_fill(hidden_keys, torch.finfo(torch.float32).min)
    probabilities = scores.softmax(dim=-1).to(v.dtype)
    used = dropout(probabilities, dropout_prob, training=True)
    if head_mask is not None:
        used = used * head_mask
    context = (used @ v).transpose(1, 2)  # [B, S, A, D]
    return packing.pack(context), probabilities


def sdpa_attention(qkv: Tensor, packing: Packing, dropout_prob: float = 0.0) -> Tensor:
    """torch's scaled_dot_product_attention: a call per length where lengths are known, else one padded and masked."""
    if not packing.groups:
        q, k, v = _padded(qkv, packing)
        mask = packing.key_mask()[:, None, None, :]
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_prob)
        return packing.pack(context.transpose(1, 2))
    parts = []
    sizes = [count * length for count, length in packing.groups]
    for (count, length), group in zip(packing.groups, qkv.split(sizes), strict=True):
        q, k, v = group.view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()  # [n, A, L, D]
        context = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_prob)
        parts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _padded(qkv: Tensor, packing: Packing) -> tuple[Tensor, ...]:
    """[T, 3, A, D] → three [B, A, S, D]"""
    return packing.unpack(qkv).permute(2, 0, 3, 1, 4).unbind()


def choose_backend(requested: str, device: str, dropout_prob: float, needs_plain: bool) -> str:
    """The backend to run. `needs_plain`: an option is in use that only the written-out formula has."""
    if needs_plain:
        if requested not in ("auto", "plain"):
            raise UserError(
                f"attention_backend is {requested!r}, but relative positions, head masks, returned probabilities and "
                "sparse layouts on a CPU are computed by 'plain' only; use 'auto' or 'plain'"
            )
        return "plain"
    if requested != "auto":
        return requested
    return "grouped" if device == "cpu" else "sdpa"
