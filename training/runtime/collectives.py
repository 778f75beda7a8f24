"""The few collectives a run needs, through DeepSpeed's communication layer."""

import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import NoReturn, TypeVar

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import distributed_c10d

from common.console import console
from common.errors import RankLost, ReportedElsewhere, UserError, exit_code_of
from common.processes import STUCK_EXIT_CODE
from training.runtime.ranks import RankInfo

T = TypeVar("T")
LOST_RANK_EXIT_CODE = 1
JOIN_TIMEOUT = default_pg_timeout  # between the first rank's coming and the last's: DEEPSPEED_TIMEOUT, in minutes
LONGER_THAN_STUCK = timedelta(minutes=2)
MAX_COLLECTIVE_SECONDS = 30 * 24 * 3600.0  # that a collective waits, whatever --stuck_after_minutes says
MAX_NAMED = 16  # ranks or hosts in a message
REMEDY = "look at its log and its machine, and at the network between, and start again"
# What gloo and NCCL say when the other side of a connection has gone.
LOST_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def start(device: torch.device, rank_info: RankInfo, stuck_seconds: float) -> None:
    """Join the world that the environment's variables describe.

    A collective waits longer than the watchdog does: the one says that it timed out, the other for whom.
    """
    # Compiling this operation takes a minute and needs a compiler; only DeepSpeed's inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    meeting = _meet(rank_info)
    timeout = max(JOIN_TIMEOUT, timedelta(seconds=min(stuck_seconds, MAX_COLLECTIVE_SECONDS)) + LONGER_THAN_STUCK)
    # DeepSpeed makes groups of its own, and does not say how long they wait.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
    del meeting  # until here rank 0 is its server


def _meet(rank_info: RankInfo) -> Store:
    """The store by which all ranks have found each other; RankLost names those that did not come."""
    store = _open_store(rank_info)
    keys = [f"bert_pretraining/rank_{rank}" for rank in range(rank_info.world_size)]
    try:
        store.set(keys[rank_info.rank], socket.gethostname())
        try:
            store.wait(keys, JOIN_TIMEOUT)
        except torch.distributed.DistStoreError:
            hosts = [store.get(key).decode() if store.check([key]) else None for key in keys]
            raise RankLost(_describe_missing(hosts), STUCK_EXIT_CODE) from None
    except torch.distributed.DistNetworkError:
        raise RankLost(
            f"rank 0 has gone from {_meeting_point()} while others were waited for, and its own message says why",
            STUCK_EXIT_CODE,
        ) from None
    return store


def _open_store(rank_info: RankInfo) -> Store:
    """Rank 0 serves it, but for torchrun, which does so itself. torch's own store on this port shares the server."""
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank_info.is_main and not is_served,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=not is_served,
        )
    except torch.distributed.DistNetworkError as error:
        text = str(error)
        if "timed out" in text and not rank_info.is_main:
            raise RankLost(
                f"rank 0 did not come to {_meeting_point()} (MASTER_ADDR and MASTER_PORT) within "
                f"{JOIN_TIMEOUT.total_seconds():.0f} s, or cannot be reached there; {REMEDY}",
                STUCK_EXIT_CODE,
            ) from None
        reason = "is in use" if "EADDRINUSE" in text else f"cannot be reached ({text.splitlines()[0]})"
        raise UserError(
            f"environment variables MASTER_ADDR and MASTER_PORT: {_meeting_point()} {reason}; choose another free port "
            f"(`deepspeed --master_port N`), the same on all machines"
        ) from None


def _describe_missing(hosts: list[str | None]) -> str:
    """`hosts`: where each rank runs, None for those that did not come."""
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    came = sorted({host for host in hosts if host is not None})
    return (
        f"{len(missing)} of the {len(hosts)} ranks did not come to {_meeting_point()} within "
        f"{JOIN_TIMEOUT.total_seconds():.0f} s: rank {_shortened_list(missing)}. The others run on "
        f"{_shortened_list(came)}; {REMEDY}"
    )


def _shortened_list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:MAX_NAMED])) + (" …" if len(items) > MAX_NAMED else "")


def _meeting_point() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


class Unreadable(Exception):
    """A rank cannot read its data. All ranks raise this together; `failure` is this rank's own, or None."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__("a rank cannot read its data")
        self.failure = failure


@contextmanager
def reporting_lost_ranks() -> Generator[None]:
    """One message for what happened on one rank, instead of the tracebacks of those who waited for it.

    A connection that breaks is another rank's end.
    """
    try:
        yield
    except Unreadable as agreed:
        _raise_on_first_failed_rank(agreed.failure)
    except RuntimeError as error:
        text = str(error)
        if not any(sign in text for sign in LOST_SIGNS):
            raise
        raise RankLost(
            f"the connection to another rank broke ({text.splitlines()[0][:200]}): that rank has ended, and its own "
            f"message says why",
            LOST_RANK_EXIT_CODE,
        ) from None


def _raise_on_first_failed_rank(failure: BaseException | None) -> NoReturn:
    """On all ranks, of which at least one has failed: its own error there, ReportedElsewhere on the others."""
    codes = all_ranks_gather(None if failure is None else exit_code_of(failure))
    speaker, code = next((rank, code) for rank, code in enumerate(codes) if code is not None)
    if failure is None or dist.get_rank() != speaker:
        raise ReportedElsewhere(f"rank {speaker} cannot read its data; its message says why", code) from None
    console.enabled = True
    raise failure


def all_ranks_read(read: Callable[[], T]) -> T:
    """`read()` on every rank; Unreadable on all where it fails on one."""
    failure = None
    try:
        result = read()
    except Exception as error:  # raised below, after the others have been told
        failure = error
    if all_ranks_any(failure is not None)[0]:
        raise Unreadable(failure)
    return result


def all_ranks_any(*flags: bool) -> list[bool]:
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
            raise ReportedElsewhere("rank 0 failed; its message says why")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def all_ranks_gather(value: T) -> list[T]:
    """Every rank's `value`, in the order of the ranks."""
    gathered = [value] * dist.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, value, group=_host_group())
    return gathered


def leave() -> None:
    _host_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
