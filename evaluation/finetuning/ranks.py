"""The processes of one evaluation: which this is, and what all of them must agree on."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def num_ranks() -> int:
    """The number of ranks that the launcher started; 1 under plain python."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    return rank() == 0


def device() -> torch.device:
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")


def all_ranks_take_from_first(make: Callable[[], T]) -> T:
    """Run `make` on rank 0 and give its result to all ranks."""
    box: list[Any] = [make() if is_first() else None]
    if num_ranks() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def all_ranks_gather(part: list[Any]) -> list[Any]:
    """The parts of all ranks, in the order of ranks."""
    if num_ranks() == 1:
        return part
    parts: list[Any] = [None] * num_ranks()
    dist.all_gather_object(parts, part)
    return [item for one in parts for item in one]
