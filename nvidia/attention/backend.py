"""What an attention backend is: a function and the reason why it cannot run in a context. `registry` lists them.

B sequences, S padded length, T real tokens, A heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nvidia.attention.sparsity import SparseHeads
from nvidia.unpadding import Packing

# Queries that are computed together with a window: fewer would make the products too small, more would add keys that
# are not seen.
WINDOW_QUERIES = 64
_MAX_MASKED_LENGTH = 1024  # of rows whose windows may be masks of all scores


class BackendContext(NamedTuple):
    """The inputs that decide which backends can run."""

    device: str  # the device type: cpu, cuda …
    dtype: torch.dtype
    head_size: int
    dropout_prob: float = 0.0
    needs_plain: bool = False  # whether an option is in use that only the written-out formula has
    is_sparse: bool = False
    has_window: bool = False  # whether a token sees only its neighbours
    has_wide_window: bool = False  # see is_wide_window()
    capability: tuple[int, int] | None = None  # CUDA compute capability; None if there is no CUDA device

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    def reason_against_options(self, has_sparse: bool = False, has_window: bool = False) -> str | None:
        """Why a backend without the options of the plain formula cannot run."""
        if self.needs_plain:
            return "does not support relative positions, head masks or returned probabilities"
        if self.has_window and not has_window:
            return "does not support attention_window"
        return "does not support sparse layouts" if self.is_sparse and not has_sparse else None

    def reason_against_dropout(self) -> str | None:
        if not self.dropout_prob:
            return None
        return f"does not support dropout, but attention_probs_dropout_prob is {self.dropout_prob}"

    def reason_against_device(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"needs fp16 or bf16 on a CUDA device, but the model is {dtype} on {self.device}"

    def reason_against_capability(self, minimum: tuple[int, int]) -> str | None:
        if self.capability is None or self.capability >= minimum:
            return None
        return "needs compute capability {}.{}, but this device has {}.{}".format(*minimum, *self.capability)

    def reason_against_flash(self) -> str | None:
        """Why the CUDA kernel FlashAttention-2 cannot run."""
        if (reason := self.reason_against_capability((8, 0))) is not None:
            return reason
        if self.head_size <= 256 and self.head_size % 8 == 0:
            return None
        return (
            f"needs a head size (hidden_size / num_attention_heads) of at most 256 in multiples of 8, "
            f"but it is {self.head_size}"
        )


@dataclass(frozen=True)
class AttentionInputs:
    """What a backend gets beside queries, keys and values. The context has ruled out what it does not support."""

    packing: Packing
    dropout_prob: float = 0.0
    window: int = 0  # a token sees window // 2 real tokens on each side; 0: the whole sequence
    rows: Tensor | None = None  # [U], for `attend_some`: the packed positions of the queries, in order
    sparse: SparseHeads | None = None
    score_bias: Tensor | None = None  # [B, A, S, S], added to the scaled scores
    head_mask: Tensor | None = None  # [A], multiplies the probabilities


def _never(packing: Packing, num_heads: int, num_queries: int, window: int) -> bool:
    return False


@dataclass(frozen=True)
class Backend:
    """`attend` maps queries, keys and values [T, 3, A, D] to the context [T, A, D], and to the probabilities
    [B, A, S, S] before dropout if it has them.

    A backend that can skip queries has `attend_some`: queries [U, A, D] ordered by sequence, keys and values
    [T, 2, A, D], and the number of queries of each sequence → [U, A, D]. `should_skip_queries` decides whether that is
    faster for a batch, a number of heads, a number of queries and a window.
    """

    attend: Callable[[Tensor, AttentionInputs], tuple[Tensor, Tensor | None]]
    reason_against: Callable[[BackendContext], str | None]
    attend_some: Callable[[Tensor, Tensor, AttentionInputs, Sequence[int]], Tensor] | None = None
    should_skip_queries: Callable[[Packing, int, int, int], bool] = _never


def is_wide_window(window: int, length: int) -> bool:
    """Whether a window hides so little of a row that computing all of its scores is faster: tiles of queries with their
    keys would contain more than half of them, and the row is so short that a mask is small."""
    return window > 0 and length <= min(2 * (WINDOW_QUERIES + window), _MAX_MASKED_LENGTH)


def in_window(index: Tensor, window: int) -> Tensor:
    """Which keys a query sees: [S] or [B, S], the number of each token among the real ones → bool [S, S] or
    [B, 1, S, S]. Padding has the number of a real token, so that it, too, sees one."""
    seen = (index.unsqueeze(-1) - index.unsqueeze(-2)).abs() <= window // 2
    return seen if index.dim() == 1 else seen.unsqueeze(1)


def unpack_heads(qkv: Tensor, packing: Packing) -> tuple[Tensor, ...]:
    """[T, 3, A, D] → three [B, A, S, D] with zeros on padding."""
    return packing.unpack(qkv).permute(2, 0, 3, 1, 4).unbind()
