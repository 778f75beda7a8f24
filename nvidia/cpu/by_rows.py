"""Compiled loops over the rows of a matrix, in blocks that are divided among the threads."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nvidia.cpu import team

Blocks = tuple[int, int, int]  # the first, one past the last, and the rows of each

_BLOCK = 1 << 16  # elements: a thread needs as long for them as for starting


def loops() -> Any:
    """The compiled loops. Loading them takes half a second, which a run on GPUs does not need."""
    from nvidia.cpu import loops

    return loops


def has_loops(x: Tensor) -> bool:
    """Whether a loop computes on `x` instead of torch. Not in a traced graph, which needs what torch can compile, and
    not on one thread where torch would use several."""
    uses_threads = torch.get_num_threads() == 1 or team.is_available()
    return x.device.type == "cpu" and x.dtype == torch.float32 and uses_threads and not torch.compiler.is_compiling()


def num_blocks(num_rows: int, width: int) -> int:
    """Blocks of a matrix. They do not depend on the number of threads, so neither do sums over each."""
    return -(-num_rows // _rows_each(width))


def run_by_rows(loop: Callable[[Blocks], object], num_rows: int, width: int) -> None:
    """Call `loop` for all blocks, on all threads."""
    count = num_blocks(num_rows, width)
    threads = min(count, torch.get_num_threads() if team.is_available() else 1)
    bounds = [count * part // max(1, threads) for part in range(threads + 1)]
    team.run([partial(loop, (first, stop, _rows_each(width))) for first, stop in pairwise(bounds)])


def as_rows(x: Tensor) -> Any:
    """[…, H] → an array [N, H] of fp32, in which loops compute for every type."""
    return x.detach().float().contiguous().view(-1, x.shape[-1]).numpy()


def _rows_each(width: int) -> int:
    return max(1, _BLOCK // max(1, width))
