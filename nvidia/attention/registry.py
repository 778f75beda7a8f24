"""The attention backends by name and in order of preference, and the choice among them.

To add a backend, write a file with a `BACKEND` and list it here.
"""

from functools import lru_cache

import torch

from common.errors import UserError
from nvidia.attention import flex, grouped, jagged, plain, sdpa, varlen
from nvidia.attention.backend import Backend, BackendContext
from nvidia.cpu.libraries import in_use

__all__ = ["AUTO", "BACKENDS", "BackendContext", "choose_backend", "cuda_capability"]

AUTO = "auto"
# Most preferred first. `jagged` comes after `plain`, which runs everywhere, so it runs only by name: nested tensors are
# a prototype in torch, and their CUDA form cannot be traced without a GPU.
BACKENDS: dict[str, Backend] = {
    "grouped": grouped.BACKEND,
    "varlen": varlen.BACKEND,
    "sdpa": sdpa.BACKEND,
    "flex": flex.BACKEND,
    "plain": plain.BACKEND,
    "jagged": jagged.BACKEND,
}


def choose_backend(requested: str, context: BackendContext) -> str:
    """Return the name of the backend to run; raise UserError with the reason if `requested` cannot run."""
    if requested != AUTO:
        reason = BACKENDS[requested].reason_against(context)
        if reason is not None:
            raise UserError(f"attention_backend: {requested!r} {reason}. Use {AUTO!r}.")
        return requested
    if context.device == "cpu" and (context.has_wide_window or not context.has_window):
        preferred = [in_use().attention(context.dropout_prob)]
    else:  # sdpa computes what a window hides, too
        preferred = ["grouped", "varlen", "flex"] if context.has_window else []
    return next(name for name in (*preferred, *BACKENDS) if BACKENDS[name].reason_against(context) is None)


@lru_cache
def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None for other devices and without CUDA (fake tensors)."""
    is_present = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_present else None
