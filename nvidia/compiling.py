"""torch.compile for the part of the model that traces as one graph: the feed-forward half of each block."""

import torch

from nvidia.block import BertBlock
from nvidia.pretraining import PreTrainingModel


def compile_blocks(model: PreTrainingModel) -> None:
    """Compile norm → wide layer → activation → projection → dropout → sum of each block.

    Attention is not compiled: its backends are fused kernels, or loops over groups of lengths that do not trace.
    Dropout inside the graph is torch's own, so its masks differ from those of an uncompiled run. Parameters keep their
    names.
    """
    for block in model.bert.encoder.layer:
        assert isinstance(block, BertBlock)
        block.compile_feed_forward()


def find_compiler_problem(device: str) -> str | None:
    """Compile a tiny function; return why torch.compile does not work on this machine, or None if it does."""
    try:
        torch.compile(lambda x: x.sin() + 1.0, dynamic=True)(torch.ones(3, device=device))
    except Exception as error:  # torch raises many types: no compiler, no headers, no triton, an unknown device
        cause = error.__cause__ or error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        return (
            f"torch.compile does not work on this machine ({reason}); it needs a C++ compiler such as g++ and "
            "Python's headers, and triton on a GPU"
        )
    finally:
        torch.compiler.reset()
    return None
