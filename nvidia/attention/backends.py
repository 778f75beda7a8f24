"""Ways to compute the same attention over packed sequences, and which of them to take.

B sequences, S padded length, T real tokens, A heads, D head size, L one sequence's length.
All take queries, keys and values side by side, [T, 3, A, D], and give [T, A, D].
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn

from common.errors import UserError
from nvidia.cpu.dropout import dropout
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
    hidden_keys = ~packing.key_mask().unsqueeze(1).unsqueeze(1)
    if visible is not None:
        hidden_keys = hidden_keys | ~visible
    # The least finite number, not -inf: a padded query under a sparse layout may see no key at all.
    scores = scores.float().masked_fill(hidden_keys, torch.finfo(torch.float32).min)
    probabilities = scores.softmax(dim=-1).to(v.dtype)
    used = dropout(probabilities, dropout_prob, training=True)
    if head_mask is not None:
        used = used * head_mask.to(used.dtype)
    context = (used @ v).transpose(1, 2)  # [B, S, A, D]
    return packing.pack(context), probabilities


def sdpa_attention(qkv: Tensor, packing: Packing, dropout_prob: float = 0.0) -> Tensor:
    """torch's scaled_dot_product_attention: a call per length where lengths are known, else one padded and masked."""
    if not packing.groups:
        q, k, v = _padded(qkv, packing)
        mask = packing.key_mask().unsqueeze(1).unsqueeze(1)
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


def varlen_attention(qkv: Tensor, packing: Packing) -> Tensor:
    """torch's variable-length flash attention: CUDA, fp16 or bf16, no dropout."""
    query, key, value = qkv.unbind(1)
    starts, longest = packing.boundaries, packing.row_length
    context = varlen_attn(query, key, value, starts, starts, longest, longest)
    assert isinstance(context, Tensor)
    return context


def jagged_attention(qkv: Tensor, packing: Packing, dropout_prob: float = 0.0) -> Tensor:
    """scaled_dot_product_attention on nested tensors: no padding, and dropout. On CUDA it is torch's flash attention.

    On CPUs torch takes the sequences one by one, which is slow; it is there to be tested.
    """
    offsets, longest = packing.boundaries.long(), packing.row_length
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(part, offsets, min_seqlen=1, max_seqlen=longest).transpose(1, 2)
        for part in qkv.transpose(0, 1).contiguous().unbind()
    )  # each [B, A, its length, D]; lengths are bounded by what is known, so that nobody waits for the device
    context = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout_prob)
    return context.transpose(1, 2).values()


def flex_attention(qkv: Tensor, mask: flex.BlockMask) -> Tensor:
    """FlexAttention over the packed row; `mask` is `flex_mask`'s."""
    query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1).unbind()  # [1, A, T, D]
    return _flex_kernel(qkv.is_cuda)(query, key, value, block_mask=mask)[0].transpose(0, 1)


def flex_mask(
    packing: Packing, heads: int, layout: Tensor | None = None, block: int = 1, looks_back_only: bool = False
) -> flex.BlockMask:
    """A token sees of its own sequence what `layout` [A or 1, N, N] allows, and no later token if it looks back."""
    sequence, position, place = packing.sequence_of, packing.position_of, packing.position_of // block
    per_head = layout is not None and layout.shape[0] > 1
    table = None if layout is None else layout.to(sequence.device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sequence[query] == sequence[key]
        if table is not None:
            seen = seen & table[head if per_head else 0, place[query], place[key]]
        return seen & (position[query] >= position[key]) if looks_back_only else seen

    tokens, make = packing.num_tokens, _flex_mask_maker(sequence.is_cuda)
    return make(sees, None, heads if per_head else None, tokens, tokens, device=sequence.device)


@lru_cache(maxsize=2)
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    """FlexAttention is a fused kernel only when compiled; sizes change from batch to batch."""
    kernel: Any = flex.flex_attention
    return torch.compile(kernel, dynamic=True) if compiled else kernel


@lru_cache(maxsize=2)
def _flex_mask_maker(compiled: bool) -> Callable[..., flex.BlockMask]:
    """Compiled, it counts the blocks without ever holding the [A, T, T] mask."""
    maker: Any = flex.create_block_mask
    return torch.compile(maker, dynamic=True) if compiled else maker


class BackendContext(NamedTuple):
    """What decides which backends can run."""

    device: str  # its type: cpu, cuda …
    dtype: torch.dtype
    head_size: int
    dropout_prob: float = 0.0
    needs_plain: bool = False  # an option is in use that only the written-out formula has
    is_sparse: bool = False
    capability: tuple[int, int] | None = None  # CUDA's compute capability; None where there is none to ask


@lru_cache
def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, or None: another kind of device, or one that is not really there."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_there else None


def choose_backend(requested: str, given: BackendContext) -> str:
    """The backend to run, or a UserError with the reason why `requested` cannot."""
    reasons = {name: _reason_against(name, given) for name in _PREFERENCE}
    if requested == "auto":
        # torch's fused CPU kernel is the faster one where there is no dropout, which it does not have.
        fused_on_cpu = given.device == "cpu" and not given.dropout_prob
        order = ("sdpa", *_PREFERENCE) if fused_on_cpu else _PREFERENCE
        return next(name for name in order if reasons[name] is None)
    if reasons[requested] is not None:
        raise UserError(f"attention_backend {requested!r} {reasons[requested]}; use 'auto'")
    return requested


# Best first; a machine has one or two of them. `jagged` comes last, so that only who asks for it by name gets it: it is
# a prototype of torch's, and no trace of its CUDA form can be made without a GPU.
_PREFERENCE = ("grouped", "varlen", "sdpa", "flex", "plain", "jagged")


def _reason_against(name: str, given: BackendContext) -> str | None:
    """Why a backend cannot be used here, or None if it can."""
    if name == "plain":
        return None
    if given.needs_plain:
        return "has no relative positions, head masks or returned probabilities"
    if given.is_sparse and name != "flex":
        return "has no sparse layouts"
    if name == "grouped" and given.device != "cpu":
        return f"is for CPUs, but the model is on {given.device}"
    is_half = given.dtype in (torch.float16, torch.bfloat16)
    if (name == "varlen" and (given.device == "cpu" or not is_half)) or (
        name == "jagged" and given.device != "cpu" and not is_half
    ):
        kind = str(given.dtype).removeprefix("torch.")
        return f"needs fp16 or bf16 on a CUDA device, but the model is {kind} on {given.device}"
    if name == "flex" and given.device == "cpu" and torch.is_grad_enabled():
        return "has no backward pass on CPUs"
    if name in ("varlen", "flex") and given.dropout_prob:
        return f"has no dropout, but attention_probs_dropout_prob is {given.dropout_prob}"
    return _reason_against_kernel(name, given) if given.device != "cpu" else None


# The least compute capability: varlen and jagged are FlashAttention-2, flex is compiled by Triton.
_MIN_CAPABILITY = {"varlen": (8, 0), "jagged": (8, 0), "flex": (7, 0)}


def _reason_against_kernel(name: str, given: BackendContext) -> str | None:
    """What the CUDA kernels themselves ask of the device and of the size of a head."""
    least, size = _MIN_CAPABILITY.get(name, (0, 0)), given.head_size
    if given.capability is not None and given.capability < least:
        found = ".".join(map(str, given.capability))
        return f"needs compute capability {least[0]}.{least[1]}, but this device has {found}"
    if name in ("varlen", "jagged") and (size > 256 or size % 8):
        return f"needs heads of at most 256, in multiples of 8, but theirs is {size} (hidden_size / heads)"
    if name == "flex" and size < 16:
        return f"needs heads of at least 16, but theirs is {size} (hidden_size / heads)"
    return None
