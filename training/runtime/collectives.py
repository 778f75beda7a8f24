"""The collectives of a run, through DeepSpeed's communication layer."""

import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import NoReturn, TypeVar

import deepspeed
import deepspeed.comm as dist
import torch
from torch.distributed import distributed_c10d

from common.console import console
from common.errors import RankLost, ReportedElsewhere, exit_code_of
from training.runtime import meeting
from training.runtime.ranks import RankInfo

T = TypeVar("T")
LOST_RANK_EXIT_CODE = 1
LONGER_THAN_STUCK = timedelta(minutes=2)
MAX_COLLECTIVE_SECONDS = 30 * 24 * 3600.0  # that a collective waits, whatever --stuck_after_minutes is
# In the errors of gloo and NCCL when the other side of a connection has ended.
LOST_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")

_hosts: set[str] = set()  # machines of the run


def start(
    device: torch.device,
    rank_info: RankInfo,
    stuck_seconds: float,
    facts: Mapping[str, str] | None = None,
    join_timeout: timedelta | None = None,
) -> list[str]:
    """Join the world that the environment variables describe. Returns the machine of each rank.

    `facts`: what must be the same on all machines; a UserError names the machine that differs.
    A collective waits longer than the watchdog does, because only the watchdog's message names the missing rank.
    """
    # Compiling this operation takes a minute and needs a compiler; only DeepSpeed's inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store, hosts = meeting.meet(rank_info, facts or {}, join_timeout)
    longest = timedelta(seconds=min(stuck_seconds, MAX_COLLECTIVE_SECONDS)) + LONGER_THAN_STUCK
    timeout = max(join_timeout or meeting.JOIN_TIMEOUT, longest)
    # DeepSpeed creates groups without a timeout.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and rank_info.world_size > 1 else None,  # as DeepSpeed does
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
    _hosts.update(hosts)
    return hosts


class Unreadable(Exception):
    """A rank cannot read its data. All ranks raise this together; `failure` is the error of this rank, or None."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__("a rank cannot read its data")
        self.failure = failure


@contextmanager
def reporting_lost_ranks() -> Generator[None]:
    """Turn the error of one rank into one message, instead of tracebacks of the ranks that waited for it."""
    try:
        yield
    except Unreadable as agreed:
        all_ranks_raise_first_failure(agreed.failure)
    except RuntimeError as error:
        text = str(error)
        if not any(sign in text for sign in LOST_SIGNS):
            raise
        raise RankLost(
            f"the connection to another rank{_name_machine(text)} broke ({text.splitlines()[0][:200]}): that rank has "
            f"ended, and its own message says why",
            LOST_RANK_EXIT_CODE,
        ) from None


def _name_machine(text: str) -> str:
    """ " on HOST" for the address in gloo's message, if it is that of a machine of this run."""
    for host in _hosts:
        with suppress(OSError):
            if f"[{socket.gethostbyname(host)}]" in text:
                return f" on {host}"
    return ""


def all_ranks_raise_first_failure(failure: BaseException | None) -> NoReturn:
    """On all ranks, of which at least one has failed: raise its error there, ReportedElsewhere on the others."""
    codes = all_ranks_gather(None if failure is None else exit_code_of(failure))
    reporter, code = next((rank, code) for rank, code in enumerate(codes) if code is not None)
    if failure is None or dist.get_rank() != reporter:
        raise ReportedElsewhere(f"rank {reporter} cannot read its data; its message says why", code) from None
    console.enable()
    raise failure


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of `action`, and its failure, to be raised when all ranks know of it."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def all_ranks_read(read: Callable[[], T]) -> T:
    """The result of `read()` on every rank; raises Unreadable on all if it fails on one."""
    result, failure = attempt(read)
    if all_ranks_any(failure is not None)[0]:
        raise Unreadable(failure)
    return result  # type: ignore[return-value]


def all_ranks_any(*flags: bool) -> list[bool]:
    """For each flag whether it is true on any rank; the same answer on all. Never waits for a device."""
    if dist.get_world_size() == 1:
        return list(flags)
    counts = torch.tensor([int(flag) for flag in flags])
    torch.distributed.all_reduce(counts, group=_all_ranks_host_group())
    return [bool(count) for count in counts.tolist()]


@cache
def _all_ranks_host_group() -> torch.distributed.ProcessGroup | None:
    """The default group if it is gloo, else a separate gloo group. The first call is a collective."""
    return torch.distributed.new_group(backend="gloo") if torch.distributed.get_backend() != "gloo" else None


def all_ranks_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over all ranks, in place and returned."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def is_main() -> bool:
    return bool(dist.get_rank() == 0)


def all_ranks_barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def all_ranks_from_main(action: Callable[[], T]) -> T:
    """The result of `action` on rank 0, on every rank; its failure is raised on all ranks."""
    result, failure = attempt(action) if dist.get_rank() == 0 else (None, None)
    if dist.get_world_size() > 1:
        sent = [(failure is None, result)]
        torch.distributed.broadcast_object_list(sent, src=0, group=_all_ranks_host_group())
        is_done, result = sent[0]
        if failure is None and not is_done:
            raise ReportedElsewhere("rank 0 failed; its message says why")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def all_ranks_gather(value: T) -> list[T]:
    """Every rank's `value`, in the order of the ranks."""
    gathered = [value] * dist.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, value, group=_all_ranks_host_group())
    return gathered


def leave() -> None:
    _all_ranks_host_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
