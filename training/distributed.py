"""The few collectives a run needs, through DeepSpeed's communication layer."""

import os
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import deepspeed
import deepspeed.comm as dist
import torch

from common.errors import ToldElsewhere, UserError

T = TypeVar("T")


def start(device: torch.device) -> None:
    """Join the world that the environment's variables describe."""
    # Compiling this operation takes a minute and needs a compiler; only DeepSpeed's inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    except torch.distributed.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = "is in use" if "EADDRINUSE" in str(error) else f"cannot be reached ({str(error).splitlines()[0]})"
        raise UserError(
            f"environment variables MASTER_ADDR and MASTER_PORT: {place} {reason}; choose another free port "
            f"(`deepspeed --master_port N`), the same on all machines"
        ) from None


def any_rank(*flags: bool) -> list[bool]:
    """For each flag whether it holds on any rank: the same answer on all. Never waits for a device."""
    if dist.get_world_size() == 1:
        return list(flags)
    told = torch.tensor([int(flag) for flag in flags])
    torch.distributed.all_reduce(told, group=_host_group())
    return [bool(count) for count in told.tolist()]


@cache
def _host_group() -> torch.distributed.ProcessGroup | None:
    """The default group where it is gloo; beside NCCL a gloo group of its own. Made by all ranks at the same time."""
    return torch.distributed.new_group(backend="gloo") if torch.distributed.get_backend() != "gloo" else None


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over all ranks, in place and returned."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def is_main() -> bool:
    return bool(dist.get_rank() == 0)


def barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def ask_main_rank(action: Callable[[], T]) -> T:
    """`action`'s result on rank 0, on every rank; a failure there fails all instead of leaving them waiting."""
    failure, result = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:  # re-raised below, after the others have been told
            failure = error
    if dist.get_world_size() > 1:
        told = [(failure is None, result)]
        torch.distributed.broadcast_object_list(told, src=0, group=_host_group())
        is_done, result = told[0]
        if failure is None and not is_done:
            raise ToldElsewhere("rank 0 failed; its message says why")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def leave() -> None:
    _host_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
