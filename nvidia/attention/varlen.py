"""torch's variable-length FlashAttention: CUDA, fp16 or bf16, no dropout, no padding."""

from torch import Tensor

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler, which takes seconds

    query, key, value = qkv.unbind(1)
    starts, max_length = inputs.packing.boundaries, inputs.packing.row_length
    reach = inputs.window // 2 if inputs.window else -1
    context = varlen_attn(query, key, value, starts, starts, max_length, max_length, window_size=(reach, reach))
    assert isinstance(context, Tensor)
    return context, None


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options(has_window=True)) is not None:
        return reason
    if context.device == "cpu" or not context.is_half:
        return context.reason_against_device()
    return context.reason_against_dropout() or context.reason_against_flash()


BACKEND = Backend(attend, reason_against)
