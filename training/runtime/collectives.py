"""The collectives of a run, through DeepSpeed's communication layer."""

import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import NoReturn, TypeVar

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from common.console import console
from common.errors import RankLost, ReportedElsewhere, UserError, exit_code_of
from common.processes import STUCK_EXIT_CODE
from training.runtime.ranks import RankInfo, is_agent_store

T = TypeVar("T")
LOST_RANK_EXIT_CODE = 1
JOIN_TIMEOUT = default_pg_timeout  # between the first rank and the last: DEEPSPEED_TIMEOUT, in minutes
LONGER_THAN_STUCK = timedelta(minutes=2)
MAX_COLLECTIVE_SECONDS = 30 * 24 * 3600.0  # that a collective waits, whatever --stuck_after_minutes is
MAX_NAMED = 16  # ranks or hosts in a message
REMEDY = "Check its log, its machine and the network between, and start again"
# In the errors of gloo and NCCL when the other side of a connection has ended.
LOST_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")

_hosts: set[str] = set()  # machines of the run


def start(device: torch.device, rank_info: RankInfo, stuck_seconds: float) -> list[str]:
    """Join the world that the environment variables describe. Returns the machine of each rank.

    A collective waits longer than the watchdog does, because only the watchdog's message names the missing rank.
    """
    # Compiling this operation takes a minute and needs a compiler; only DeepSpeed's inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store, hosts = _meet(rank_info)
    timeout = max(JOIN_TIMEOUT, timedelta(seconds=min(stuck_seconds, MAX_COLLECTIVE_SECONDS)) + LONGER_THAN_STUCK)
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


def _meet(rank_info: RankInfo) -> tuple[Store, list[str]]:
    """The store through which all ranks have met, and their machines; RankLost names those that did not join."""
    store = open_store(rank_info, is_served_here=rank_info.is_main and not is_agent_store())
    keys = [f"rank_{rank}" for rank in range(rank_info.world_size)]
    try:
        store.set(keys[rank_info.rank], socket.gethostname())
        try:
            store.wait(keys, JOIN_TIMEOUT)
            return store, [host.decode() for host in store.multi_get(keys)]
        except torch.distributed.DistStoreError:
            hosts = [store.get(key).decode() if store.check([key]) else None for key in keys]
            raise RankLost(_describe_missing(hosts), STUCK_EXIT_CODE) from None
    except torch.distributed.DistNetworkError:
        raise RankLost(
            f"rank 0 has left {_meeting_point()} while it waited for other ranks; its own message says why",
            STUCK_EXIT_CODE,
        ) from None


def open_store(rank_info: RankInfo, is_served_here: bool = False) -> Store:
    """A connection to the store that rank 0 serves, or torchrun's agent.

    The agent's store outlives a restart, so keys are prefixed with the attempt: old ones are addresses of dead ranks.
    """
    is_agents = is_agent_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=is_served_here,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=not is_agents,  # a second run in one process finds its port in use otherwise
        )
        return PrefixStore(f"bert_pretraining/{rank_info.world_size}_ranks/attempt_{attempt}", store)
    except torch.distributed.DistNetworkError as error:
        text = str(error)
        if "timed out" in text and not rank_info.is_main:
            raise RankLost(
                f"rank 0 did not join at {_meeting_point()} (MASTER_ADDR and MASTER_PORT) within "
                f"{JOIN_TIMEOUT.total_seconds():.0f} s, or cannot be reached there. {REMEDY}",
                STUCK_EXIT_CODE,
            ) from None
        reason = "is in use" if "EADDRINUSE" in text else f"cannot be reached ({text.splitlines()[0]})"
        raise UserError(
            f"environment variables MASTER_ADDR and MASTER_PORT: {_meeting_point()} {reason}. Choose another free port "
            f"(`deepspeed --master_port N`), the same on all machines"
        ) from None


def _describe_missing(hosts: list[str | None]) -> str:
    """`hosts`: the machine of each rank, None for those that did not join."""
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    came = sorted({host for host in hosts if host is not None})
    return (
        f"{len(missing)} of the {len(hosts)} ranks did not join at {_meeting_point()} within "
        f"{JOIN_TIMEOUT.total_seconds():.0f} s: rank {_shortened_list(missing)}. The others run on "
        f"{_shortened_list(came)}. {REMEDY}"
    )


def _shortened_list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:MAX_NAMED])) + (" …" if len(items) > MAX_NAMED else "")


def _meeting_point() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


class Unreadable(Exception):
    """A rank cannot read its data. All ranks raise this together; `failure` is the error of this rank, or None."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__("a rank cannot read its data")
        self.failure = failure


@contextmanager
def reporting_lost_ranks() -> Generator[None]:
    """Turn the error of one rank into one message, instead of tracebacks of the ranks that waited for it.

    A broken connection means that another rank has ended.
    """
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
    console.enabled = True
    raise failure


def all_ranks_read(read: Callable[[], T]) -> T:
    """The result of `read()` on every rank; raises Unreadable on all if it fails on one."""
    failure = None
    try:
        result = read()
    except Exception as error:  # raised below on all ranks
        failure = error
    if all_ranks_any(failure is not None)[0]:
        raise Unreadable(failure)
    return result


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
    failure, result = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:  # raised below on all ranks
            failure = error
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
