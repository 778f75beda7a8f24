"""The few collectives a run needs, through DeepSpeed's communication layer."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import deepspeed
import deepspeed.comm as dist
import torch

from common.errors import RankLost, ToldElsewhere, UserError
from common.processes import STUCK_EXIT_CODE

T = TypeVar("T")
LOST_RANK_EXIT_CODE = 1
# What gloo and NCCL say when the other side of a connection has gone.
LOST_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def start(device: torch.device) -> None:
    """Join the world that the environment's variables describe."""
    # Compiling this operation takes a minute and needs a compiler; only DeepSpeed's inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    except torch.distributed.DistNetworkError as error:
        reason = "is in use" if "EADDRINUSE" in str(error) else f"cannot be reached ({str(error).splitlines()[0]})"
        raise UserError(
            f"environment variables MASTER_ADDR and MASTER_PORT: {_meeting_point()} {reason}; choose another free port "
            f"(`deepspeed --master_port N`), the same on all machines"
        ) from None
    except torch.distributed.DistStoreError as error:
        reason = str(error).splitlines()[0]
        raise RankLost(
            f"not all of the {os.environ.get('WORLD_SIZE')} ranks came to {_meeting_point()} ({reason}); see which of "
            f"them wrote nothing, look at its machine and at the network, and start again",
            STUCK_EXIT_CODE,
        ) from None


def _meeting_point() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


@contextmanager
def told_of_lost_ranks() -> Generator[None]:
    """A connection that breaks is another rank's end: one message instead of the traceback of who waited for it."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not any(sign in text for sign in LOST_SIGNS):
            raise
        raise RankLost(
            f"the connection to another rank broke ({text.splitlines()[0][:200]}): that rank has ended, and its own "
            f"message says why",
            LOST_RANK_EXIT_CODE,
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


def gather(value: T) -> list[T]:
    """Every rank's `value`, in the order of the ranks."""
    gathered = [value] * dist.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, value, group=_host_group())
    return gathered


def leave() -> None:
    _host_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
