"""Where the ranks of a run meet: the store that rank 0 or torchrun's agent serves at MASTER_ADDR and MASTER_PORT.

Each rank brings what must be the same on all machines, or why it cannot start. So a mistake on one machine is reported
at once, with its name, and no other machine waits for it.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from common.errors import Problems, RankLost, ReportedElsewhere, UserError, describe_error, exit_code_of
from common.processes import USER_ERROR_EXIT_CODE
from training.runtime.ranks import RankInfo, is_agent_store

T = TypeVar("T")
JOIN_TIMEOUT = default_pg_timeout  # between the first rank and the last: DEEPSPEED_TIMEOUT, in minutes
LONGER_THAN_TORCH = timedelta(seconds=5)  # because torch's own error says more
FAILURE_TIMEOUT = timedelta(seconds=30)  # that a rank which cannot start tries to say so
NUM_READ = "num_read"
MAX_NAMED = 16  # ranks or hosts in a message
REMEDY = "Check its log, its machine and the network between, and start again"


@dataclass(frozen=True)
class Arrival:
    """What a rank brings. `facts` must be equal on all machines; `error`: why it cannot start, and its exit code."""

    host: str
    facts: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    code: int = 0


def meet(rank_info: RankInfo, facts: Mapping[str, str], timeout: timedelta | None = None) -> tuple[Store, list[str]]:
    """The store through which all ranks have met, and their machines; RankLost names those that did not join."""
    timeout = timeout or JOIN_TIMEOUT
    store = open_store(rank_info, rank_info.is_main and not is_agent_store(), timeout)
    keys = _keys(rank_info)
    try:
        _bring(store, rank_info, Arrival(socket.gethostname(), facts))
        try:
            store.wait(keys, timeout)
            arrivals = [_read(value) for value in store.multi_get(keys)]
            store.add(NUM_READ, 1)
        except torch.distributed.DistStoreError:
            hosts = [_read(store.get(key)).host if store.check([key]) else None for key in keys]
            raise RankLost(_describe_missing(hosts, timeout)) from None
    except torch.distributed.DistNetworkError:
        raise RankLost(
            f"rank 0 has left {_meeting_point()} while it waited for other ranks; its own message says why"
        ) from None
    _compare(arrivals, rank_info, store)
    return store, [arrival.host for arrival in arrivals]


def _compare(arrivals: Sequence[Arrival], rank_info: RankInfo, store: Store) -> None:
    """Rank 0 raises a UserError with all that is wrong, the others ReportedElsewhere."""
    failed = [(rank, arrival) for rank, arrival in enumerate(arrivals) if arrival.error is not None]
    problems = Problems()
    problems.messages += [f"{arrival.host} (rank {rank}): {arrival.error}" for rank, arrival in failed]
    problems.messages += find_differences(arrivals)
    if problems.messages and not rank_info.is_main:
        code = failed[-1][1].code if failed else USER_ERROR_EXIT_CODE
        raise ReportedElsewhere("rank 0 reports what differs between the machines", code)
    if problems.messages:
        _wait_for_readers(store, rank_info)
    problems.raise_if_any()


def find_differences(arrivals: Sequence[Arrival]) -> list[str]:
    """Machines that differ from that of rank 0, each fact once."""
    first = arrivals[0]
    found: dict[str, None] = {}
    for arrival in arrivals:
        for name, value in arrival.facts.items():
            expected = first.facts.get(name, value)
            if value != expected:
                found[
                    f"{arrival.host}: its {name} is {value}, but {first.host} (rank 0) has {expected}; expected the "
                    f"same on all machines. Install the same versions, and copy or mount the same files there"
                ] = None
    return list(found)


@contextmanager
def sharing_failures(rank_info: RankInfo) -> Generator[None]:
    """Have a mistake that one machine finds before the meeting reported by rank 0, and end the others."""
    try:
        yield
    except (UserError, OSError) as error:
        text = describe_error(error)
        is_one_machine = rank_info.local_size == rank_info.world_size
        if text is None or is_one_machine or not _bring_failure(rank_info, text, exit_code_of(error)):
            raise
        raise ReportedElsewhere(text, exit_code_of(error)) from None


def _bring_failure(rank_info: RankInfo, text: str, code: int) -> bool:
    """Whether rank 0 reports it. Rank 0 itself only waits for the others, so that they learn of it."""
    try:
        is_served_here = rank_info.is_main and not is_agent_store()
        store = open_store(rank_info, is_served_here, FAILURE_TIMEOUT)
        _bring(store, rank_info, Arrival(socket.gethostname(), error=text, code=code))
        store.add(NUM_READ, 1)  # it needs no answer
        if is_served_here:
            _wait_for_readers(store, rank_info)
    except (RuntimeError, UserError, RankLost):
        return False
    return not rank_info.is_main


def _wait_for_readers(store: Store, rank_info: RankInfo) -> None:
    """On rank 0, before it ends and the store with it: until all ranks have read why."""
    deadline = time.monotonic() + FAILURE_TIMEOUT.total_seconds()
    while store.add(NUM_READ, 0) < rank_info.world_size and time.monotonic() < deadline:
        time.sleep(0.1)


def _keys(rank_info: RankInfo) -> list[str]:
    return [f"rank_{rank}" for rank in range(rank_info.world_size)]


def _bring(store: Store, rank_info: RankInfo, arrival: Arrival) -> None:
    store.set(_keys(rank_info)[rank_info.rank], json.dumps(asdict(arrival)))


def _read(value: bytes) -> Arrival:
    return Arrival(**json.loads(value))


def open_store(rank_info: RankInfo, is_served_here: bool = False, timeout: timedelta | None = None) -> Store:
    """A connection to the store that rank 0 serves, or torchrun's agent.

    A single rank serves it at any free port: no other process asks for it. The agent's store outlives a restart, so
    keys are prefixed with the attempt: old ones are addresses of dead ranks.
    """
    timeout = timeout or JOIN_TIMEOUT
    is_agents = is_agent_store()
    port = 0 if rank_info.world_size == 1 and is_served_here else int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
    connect = partial(
        TCPStore,
        os.environ["MASTER_ADDR"],
        port,
        is_master=is_served_here,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=not is_agents,  # a second run in one process finds its port in use otherwise
    )
    try:
        store = connect() if is_served_here else _call_within(timeout + LONGER_THAN_TORCH, connect)
        return PrefixStore(f"bert_pretraining/{rank_info.world_size}_ranks/attempt_{attempt}", store)
    except TimeoutError:
        raise RankLost(
            f"rank 0 did not answer at {_meeting_point()} (MASTER_ADDR and MASTER_PORT) within "
            f"{timeout.total_seconds():.0f} s, though the port is open there. If another program uses it, choose a "
            f"free one (`deepspeed --master_port N`), the same on all machines"
        ) from None
    except torch.distributed.DistNetworkError as error:
        text, here = str(error), socket.gethostname()
        variables = "environment variables MASTER_ADDR and MASTER_PORT"
        if "EADDRINUSE" in text:
            raise UserError(
                f"{variables}: {_meeting_point()} is in use. Choose another free port (`deepspeed --master_port N`), "
                f"the same on all machines"
            ) from None
        if not rank_info.is_main:
            raise RankLost(
                f"rank 0 did not join at {_meeting_point()} (MASTER_ADDR and MASTER_PORT) within "
                f"{timeout.total_seconds():.0f} s, or cannot be reached there from {here}. {REMEDY}"
            ) from None
        raise UserError(
            f"{variables}: {here} (rank 0) cannot reach {_meeting_point()}; expected an address of the machine of rank "
            f"0, where all ranks meet. Set it to one that all machines can reach (`deepspeed --master_addr ADDRESS`)"
        ) from None


def _call_within(timeout: timedelta, action: Callable[[], T]) -> T:
    """The result of `action`, else TimeoutError: torch has no limit for a server that accepts and never answers."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(action())
        except Exception as error:  # raised below
            outcome.set_exception(error)

    threading.Thread(target=call, name="connect", daemon=True).start()
    return outcome.result(timeout.total_seconds())


def _describe_missing(hosts: list[str | None], timeout: timedelta) -> str:
    """`hosts`: the machine of each rank, None for those that did not join."""
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    came = sorted({host for host in hosts if host is not None})
    return (
        f"{len(missing)} of the {len(hosts)} ranks did not join at {_meeting_point()} within "
        f"{timeout.total_seconds():.0f} s: rank {_shortened_list(missing)}. The others run on "
        f"{_shortened_list(came)}. {REMEDY}"
    )


def _shortened_list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:MAX_NAMED])) + (" …" if len(items) > MAX_NAMED else "")


def _meeting_point() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
