"""Whether the other machines of a run can still be reached.

A machine that loses power or its network closes no connection: ranks would wait for it inside a collective until the
watchdog ends them. So each rank counts in the store that rank 0 (or torchrun's agent) serves. A rank whose own count
gets no answer has lost that machine; rank 0 sees which others no longer count. Silence is measured in rounds of this
process, not by the clock: a process that was suspended has not asked meanwhile.
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
        self.max_silent_rounds = round(silent_seconds / self.interval)
        self._keys = [f"pulse_{rank}" for rank in range(rank_info.world_size)]
        self._num_answers, self._checked_answers, self._silent_checks = 0, 0, 0
        self._counts: dict[int, tuple[int, int]] = {}  # of each rank: its count, and for how many rounds it is that
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
                    self._note_counts([store.add(key, 0) for key in self._keys])
                self._num_answers += 1
        self._ended.set()

    def _note_counts(self, counts: Sequence[int]) -> None:
        for rank, count in enumerate(counts):
            before, rounds = self._counts.get(rank, (-1, 0))
            self._counts[rank] = (count, rounds + 1 if count == before else 0)

    def _check(self) -> None:
        while not self._ended.wait(self.interval):
            lost = self.find_lost()
            if lost is not None and not self._ended.is_set():
                if self.rank_info.local_rank == 0:
                    write_error(f"error: {lost}")
                else:
                    time.sleep(REPORT_SECONDS)
                self.leave(STUCK_EXIT_CODE)

    def find_lost(self) -> str | None:
        """The message that names the lost machines, or None. Call it once per round."""
        here = self.hosts[self.rank_info.rank]
        has_answer = self._num_answers != self._checked_answers
        self._checked_answers = self._num_answers
        self._silent_checks = 0 if has_answer else self._silent_checks + 1
        if self._silent_checks > self.max_silent_rounds:
            return self._describe([self.hosts[0]], f"{here} reaches neither it nor rank 0 there")
        silent = [rank for rank, (_, rounds) in self._counts.items() if rounds > self.max_silent_rounds]
        if silent:
            hosts = sorted({self.hosts[rank] for rank in silent})
            return self._describe(hosts, f"rank {', '.join(map(str, silent))} cannot be reached from {here}")
        return None

    def _describe(self, hosts: Sequence[str], why: str) -> str:
        return (
            f"no sign of life from {', '.join(hosts)} for {self.silent_seconds:.0f} s: {why}. Check the machine and "
            f"the network; the last checkpoint is valid: run the same command again"
        )
