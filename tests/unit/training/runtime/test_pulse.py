"""Machines that no longer answer: judged by counts and by the clock of one machine."""

import threading
from collections import Counter

import pytest
from torch._C._distributed_c10d import HashStore

from common.processes import STUCK_EXIT_CODE
from training.runtime.pulse import Pulse
from training.runtime.ranks import RankInfo

HOSTS = ["worker-0", "worker-0", "worker-1", "worker-1"]


def watch(
    rank: int, store: object, seconds: float, hosts: list[str] = HOSTS
) -> tuple[Pulse, threading.Event, list[int]]:
    left, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()
        pulse._ended.set()

    pulse = Pulse(lambda: store, RankInfo(rank, rank % 2, 4, 2), hosts, seconds, leave)  # type: ignore[arg-type, return-value]
    return pulse, left, codes


class OneNeighbour:
    """A store in which rank 1 has counted whenever it is looked at, and no other rank counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self.counts[key] += amount + (key == "pulse_1")
        return self.counts[key]


def test_rank_0_names_the_machine_whose_ranks_no_longer_count(capfd: pytest.CaptureFixture[str]) -> None:
    pulse, left, codes = watch(0, OneNeighbour(), 0.4)
    with pulse:
        assert left.wait(60)
    assert codes == [STUCK_EXIT_CODE]
    message = capfd.readouterr().err
    assert "no sign of life from worker-1 for 0 s: rank 2, 3 cannot be reached from worker-0" in message


def test_a_store_that_does_not_answer(capfd: pytest.CaptureFixture[str]) -> None:
    class Silent:
        def add(self, _key: str, _amount: int) -> int:
            threading.Event().wait(30)
            return 0

    pulse, left, codes = watch(2, Silent(), 0.2)
    with pulse:
        assert left.wait(60)
    assert codes == [STUCK_EXIT_CODE]
    assert "from worker-0 for 0 s: worker-1 reaches neither it nor rank 0 there" in capfd.readouterr().err


@pytest.mark.parametrize("ending", ["answers", "closes", "one machine"])
def test_no_alarm(ending: str) -> None:
    """Neither while all count, nor after rank 0 has ended: collectives report that."""
    store = HashStore()

    class Closing:
        def add(self, _key: str, _amount: int) -> int:
            raise RuntimeError("Broken pipe")

    def never() -> None:
        raise AssertionError("connected on one machine")

    used: object = {"answers": store, "closes": Closing(), "one machine": store}[ending]
    pulse, left, _ = watch(2, used, 0.3, HOSTS if ending != "one machine" else ["worker-0"] * 4)
    if ending == "one machine":
        pulse.connect = never  # type: ignore[assignment]
    with pulse:
        assert not left.wait(0.8)
