"""torch's scaled_dot_product_attention: one call per length where lengths are known, else one padded, masked call."""

import torch
from torch import Tensor
from torch.nn import functional

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext, in_window, unpack_heads


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


def reason_against(context: BackendContext) -> str | None:
    return context.reason_against_options(has_window=True)


BACKEND = Backend(attend, reason_against)
