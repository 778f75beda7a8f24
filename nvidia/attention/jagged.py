"""scaled_dot_product_attention on nested tensors: FlashAttention on CUDA, with dropout and without padding.

On a CPU torch computes one sequence at a time, which is slow; this form exists for tests.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    offsets, max_length = inputs.packing.boundaries.long(), inputs.packing.row_length
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(part, offsets, min_seqlen=1, max_seqlen=max_length).transpose(1, 2)
        for part in qkv.transpose(0, 1).contiguous().unbind()
    )  # each [B, A, length, D]; the bounds on the length are known, so nothing waits for the device
    context = functional.scaled_dot_product_attention(query, key, value, dropout_p=inputs.dropout_prob)
    return context.transpose(1, 2).values(), None


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options()) is not None or context.device == "cpu":
        return reason
    return context.reason_against_flash() if context.is_half else context.reason_against_device()


BACKEND = Backend(attend, reason_against)
