"""torch's scaled_dot_product_attention: one call per length where lengths are known, else one padded, masked call."""

import torch
from torch import Tensor
from torch.nn import functional

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext, unpack_heads


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    packing, dropout_prob = inputs.packing, inputs.dropout_prob
    if not packing.groups:
        q, k, v = unpack_heads(qkv, packing)
        mask = packing.key_mask().unsqueeze(1).unsqueeze(1)
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_prob)
        return packing.pack(context.transpose(1, 2)), None
    parts = []
    sizes = [count * length for count, length in packing.groups]
    for (count, length), group in zip(packing.groups, qkv.split(sizes), strict=True):
        q, k, v = group.view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()  # [n, A, L, D]
        context = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_prob)
        parts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts), None


def reason_against(context: BackendContext) -> str | None:
    return context.reason_against_options()


BACKEND = Backend(attend, reason_against)
