"""FlexAttention over the packed row, dense, with a window or with a sparse layout: CUDA, no dropout."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvidia.attention.backend import AttentionInputs, Backend, BackendContext
from nvidia.attention.sparsity import SparseHeads
from nvidia.unpadding import Packing

if TYPE_CHECKING:  # the import takes seconds because it loads torch's compiler; only its users wait for it
    from torch.nn.attention.flex_attention import BlockMask


def attend(qkv: Tensor, inputs: AttentionInputs) -> tuple[Tensor, None]:
    packing, sparse = inputs.packing, inputs.sparse
    mask = packing.mask(("flex", sparse, inputs.window), lambda: make_block_mask(packing, sparse, inputs.window))
    query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1).unbind()  # [1, A, T, D]
    return _kernel(qkv.is_cuda)(query, key, value, block_mask=mask)[0].transpose(0, 1), None


def make_block_mask(packing: Packing, sparse: SparseHeads | None = None, window: int = 0) -> "BlockMask":
    """The mask by which a token sees its own sequence, or the part of it that `sparse` or the window allows."""
    sequence, position = packing.sequence_of, packing.position_of
    layout = None if sparse is None else sparse.blocks(packing.row_length).to(sequence.device)
    block = position if sparse is None else position // sparse.block_size
    heads = None if layout is None or len(layout) == 1 else len(layout)
    is_causal = sparse is not None and sparse.is_causal

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sequence[query] == sequence[key]
        if layout is not None:
            seen = seen & layout[0 if heads is None else head, block[query], block[key]]
        if window:
            seen = seen & ((query - key).abs() <= window // 2)
        return seen & (position[query] >= position[key]) if is_causal else seen

    tokens, make = packing.num_tokens, _mask_maker(sequence.is_cuda)
    return make(sees, None, heads, tokens, tokens, device=sequence.device)


@lru_cache(maxsize=2)
def _kernel(compiled: bool) -> Callable[..., Any]:
    """FlexAttention is a fused kernel only when compiled. Sizes are symbolic because they change with every batch."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = flex_attention
    return torch.compile(kernel, dynamic=True) if compiled else kernel


@lru_cache(maxsize=2)
def _mask_maker(compiled: bool) -> Callable[..., "BlockMask"]:
    """When compiled, it counts blocks without materializing the [A, T, T] mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    maker: Any = create_block_mask
    return torch.compile(maker, dynamic=True) if compiled else maker


def reason_against(context: BackendContext) -> str | None:
    if (reason := context.reason_against_options(has_sparse=True, has_window=True)) is not None:
        return reason
    if context.device == "cpu" and torch.is_grad_enabled():
        return "has no backward pass on CPUs"
    if (reason := context.reason_against_dropout()) is not None or context.device == "cpu":
        return reason
    if (reason := context.reason_against_capability((7, 0))) is not None:  # the minimum of Triton, which compiles it
        return reason
    if context.head_size < 16:
        return f"needs a head size (hidden_size / num_attention_heads) of at least 16, but it is {context.head_size}"
    return None


BACKEND = Backend(attend, reason_against)
