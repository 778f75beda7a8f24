"""torch.compile on the parts of the model that trace as one graph: the wide half of each block."""

import torch

from common.errors import UserError
from nvidia.block import BertBlock
from nvidia.pretraining import PreTrainingModel


def compile_blocks(model: PreTrainingModel) -> None:
    """Compile each block's norm → wide layer → activation → projection → dropout → sum.

    Attention stays as it is: its backends are fused kernels, or steps through groups of lengths that no graph holds.
    Sizes are symbolic, because every batch has another number of real tokens. Dropout inside is torch's own, so its
    masks are others than without. Parameters keep their names.
    """
    for block in model.bert.encoder.layer:
        assert isinstance(block, BertBlock)
        block.add_feed_forward = torch.compile(block.add_feed_forward, dynamic=True)  # type: ignore[method-assign]


def check_compiler(device: str) -> None:
    """Compile something tiny: whatever keeps torch.compile from working here is found before a run is built."""
    try:
        torch.compile(lambda x: x.sin() + 1.0, dynamic=True)(torch.ones(3, device=device))
    except Exception as error:  # torch raises many kinds: no compiler, no headers, no triton, an unknown device
        cause = error.__cause__ or error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise UserError(
            f"--compile: torch.compile does not work on this machine ({reason}); it needs a C++ compiler such as "
            f"g++ and Python's headers, on a GPU triton too; install them or drop the flag"
        ) from None
    finally:
        torch.compiler.reset()
