"""Whether the other machines of a run can still be reached.

A machine that loses power or its network closes no connection: ranks would wait for it inside a collective until the
watchdog ends them. So each rank counts in the store that rank 0 (or torchrun's agent) serves. A rank whose own count
gets no answer has lost that machine; rank 0 sees which others no longer count. Times are those of one machine only.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch._C._distributed_c10d import Store

from common.console import write_error
from common.processes import STUCK_EXIT_CODE
from training.runtime.ranks import RankInfo

PULSE_SECONDS = 5.0
MAX_SILENT_SECONDS = 120.0
REPORT_SECONDS = 5.0  # that the other ranks of a machine give the one that reports


class Pulse:
    """Use as a context manager. On one machine it does nothing."""

    def __init__(
        self,
        connect: Callable[[], Store],
        rank_info: RankInfo,
        hosts: Sequence[str],
        silent_seconds: float = MAX_SILENT_SECONDS,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """`connect`: opens a connection for this object alone, as a call may never return. `hosts`: of each rank."""
        self.connect, self.rank_info, self.hosts, self.leave = connect, rank_info, hosts, leave
        self.silent_seconds = silent_seconds
        self.interval = min(PULSE_SECONDS, silent_seconds / 4)
        self._keys = [f"pulse_{rank}" for rank in range(rank_info.world_size)]
        self._answered = time.monotonic()
        self._counts: dict[int, tuple[int, float]] = {}  # of each rank: its count, and since when it is that
        self._ended = threading.Event()

    def __enter__(self) -> "Pulse":
        if len(set(self.hosts)) > 1:
            threading.Thread(target=self._count, args=(self.connect(),), name="pulse", daemon=True).start()
            threading.Thread(target=self._check, name="pulse check", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _count(self, store: Store) -> None:
        with suppress(RuntimeError):  # a closed connection: that rank has ended, which collectives report
            while not self._ended.wait(self.interval):
                store.add(self._keys[self.rank_info.rank], 1)
                if self.rank_info.is_main:
                    self._note_counts([store.add(key, 0) for key in self._keys], time.monotonic())
                self._answered = time.monotonic()
        self._ended.set()

    def _note_counts(self, counts: Sequence[int], now: float) -> None:
        for rank, count in enumerate(counts):
            if rank not in self._counts or self._counts[rank][0] != count:
                self._counts[rank] = (count, now)

    def _check(self) -> None:
        while not self._ended.wait(self.interval):
            lost = self.find_lost(time.monotonic())
            if lost is not None and not self._ended.is_set():
                if self.rank_info.local_rank == 0:
                    write_error(f"error: {lost}")
                else:
                    time.sleep(REPORT_SECONDS)
                self.leave(STUCK_EXIT_CODE)

    def find_lost(self, now: float) -> str | None:
        """The message that names the lost machines, or None."""
        here = self.hosts[self.rank_info.rank]
        if now - self._answered > self.silent_seconds:
            return self._describe([self.hosts[0]], f"{here} reaches neither it nor rank 0 there")
        silent = [rank for rank, (_, since) in self._counts.items() if now - since > self.silent_seconds]
        if silent:
            hosts = sorted({self.hosts[rank] for rank in silent})
            return self._describe(hosts, f"rank {', '.join(map(str, silent))} cannot be reached from {here}")
        return None

    def _describe(self, hosts: Sequence[str], why: str) -> str:
        return (
            f"no sign of life from {', '.join(hosts)} for {self.silent_seconds:.0f} s: {why}. Check the machine and "
            f"the network; the last checkpoint is valid: run the same command again"
        )
