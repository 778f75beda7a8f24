"""Attention written out on the padded batch: the reference, and the only backend with every option."""

import torch
from torch import Tensor

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext, in_window, unpack_heads
from nvidia.cpu.dropout import dropout


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """softmax(QKᵀ/√D + bias)·V; keys that are padding or outside the sparse layout or the window get no weight."""
    packing = inputs.packing
    q, k, v = unpack_heads(qkv, packing)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # [B, A, S, S]
    if inputs.score_bias is not None:
        scores = scores + inputs.score_bias
    hidden_keys = ~packing.key_mask().unsqueeze(1).unsqueeze(1)
    if (sparse := inputs.sparse) is not None:
        visible = packing.mask(("plain", sparse), lambda: sparse.visible_keys(packing.row_length).to(qkv.device))
        hidden_keys = hidden_keys | ~visible
    if inputs.window:
        seen = packing.mask(("plain", inputs.window), lambda: in_window(packing.key_mask().cumsum(1), inputs.window))
        hidden_keys = hidden_keys | ~seen
    # The lowest finite number instead of -inf: a padded query under a sparse layout may see no key at all.
    scores = scores.float().masked_fill(hidden_keys, torch.finfo(torch.float32).min)
    probabilities = scores.softmax(dim=-1).to(v.dtype)
    used = dropout(probabilities, inputs.dropout_prob, training=True)
    if inputs.head_mask is not None:
        used = used * inputs.head_mask[:, None, None].to(used.dtype)
    context = (used @ v).transpose(1, 2)  # [B, S, A, D]
    return packing.pack(context), probabilities


def reason_against(context: BackendContext) -> None:
    return None


BACKEND = Backend(attend, reason_against)
