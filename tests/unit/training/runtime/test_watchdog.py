"""Which rank is reported as stuck: by what its file says, never by comparing the clocks of two machines."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.processes import STUCK_EXIT_CODE
from training.runtime import watchdog
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests
from training.runtime.watchdog import STOPPED, Beat, Watchdog, describe, find_stuck, intervals

HOUR = 3600.0
STUCK_SECONDS = 0.4


def beat(rank: int, count: int = 5, written_at: float = 0.0, is_waiting: bool = True) -> Beat:
    return Beat(rank, count, "forward", 2, f"host-{rank}", 100 + rank, written_at, "train (loop.py:1)", is_waiting)


@pytest.mark.parametrize("offset", [-HOUR, 0.0, HOUR])
def test_a_clock_that_is_off_makes_no_rank_silent(offset: float) -> None:
    earlier = [beat(0, written_at=1000.0), beat(1, written_at=1000.0 + offset)]
    now = [replace(found, time=found.time + 10.0) for found in earlier]
    assert find_stuck(now, earlier, 2) == []
    behind = replace(now[1], count=4)
    assert find_stuck([now[0], behind], earlier, 2) == [behind]


@pytest.mark.parametrize("offset", [-HOUR, 0.0, HOUR])
def test_a_rank_that_no_longer_writes_is_the_stuck_one(offset: float) -> None:
    """Though the other one has less progress: it waits."""
    earlier = [beat(0, count=4, written_at=1000.0), beat(1, written_at=1000.0 + offset)]
    now = [replace(earlier[0], time=1010.0), earlier[1]]
    assert find_stuck(now, earlier, 2) == [earlier[1]]


@pytest.mark.parametrize("stuck_seconds", [0.4, 4.2, 30.0, 1800.0])
def test_a_live_rank_writes_twice_between_two_reads(stuck_seconds: float) -> None:
    """A write waits for the next tick, and the first of the two reads is late by up to one."""
    tick, write = intervals(stuck_seconds)
    assert 2 * (write + tick) <= stuck_seconds - (stuck_seconds / 3 + tick)


def test_of_equal_ranks_those_outside_a_collective_are_stuck() -> None:
    beats = [beat(0), beat(1, is_waiting=False), beat(2)]
    assert find_stuck(beats, [], 3) == [beats[1]]
    assert "all ranks are at the same point" in describe(beats, [], 3, 60.0)
    assert "rank 3 has written nothing" in describe(beats, [], 4, 60.0)


@pytest.mark.parametrize("is_alive", [True, False])
def test_another_machine_whose_clock_is_an_hour_behind(
    is_alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A live one that is ahead of this rank is not reported; one that no longer writes is."""
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 0.1)
    left: list[int] = []
    other = tmp_path / "rank_1.json"
    count = 0

    def write_other() -> None:
        nonlocal count
        count += is_alive
        other.write_text(json.dumps(asdict(beat(1, count=50, written_at=time.time() - HOUR + count))))

    write_other()
    thread = Watchdog(tmp_path, RankInfo(0, 0, 2, 2), StopRequests(), STUCK_SECONDS, leave=left.append)
    if is_alive:
        thread.call_with_each_write(write_other)
    with thread:
        deadline = time.monotonic() + 60
        while not left:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert left[0] == STUCK_EXIT_CODE
    reported = capsys.readouterr().err
    assert ("rank 1 (host host-1" in reported) is not is_alive


class Ticks:
    """A clock that moves by these seconds from one check of the watchdog to the next, and then the end."""

    def __init__(self, seconds: list[float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def wait(self, _seconds: float) -> bool:
        self.now += self.seconds[0] if self.seconds else 0.0
        return not self.seconds or self.seconds.pop(0) < 0


@pytest.mark.parametrize(
    ("seconds", "is_stuck"), [([1.0] * 62, True), ([1.0] * 59, False), ([HOUR, *[1.0] * 50], False)]
)
def test_a_process_that_was_suspended_has_not_been_stuck(
    seconds: list[float], is_stuck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, left = Ticks(seconds), []
    clock = SimpleNamespace(monotonic=lambda: ticks.now, time=time.time, sleep=lambda _: None)
    monkeypatch.setattr(watchdog, "time", clock)
    watched = Watchdog(tmp_path, RankInfo(0, 0, 1, 1), StopRequests(), 60.0, leave=left.append)
    watched._ended = ticks  # type: ignore[assignment]
    watched._watch()
    assert bool(left) is is_stuck


@pytest.mark.parametrize(("section", "has_left"), [(STOPPED, True), ("forward", False)])
def test_a_rank_that_loses_one_which_was_asked_to_stop_stops_too(
    section: str, has_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(watchdog.start, "leave", reasons.append)
    (tmp_path / "rank_1.json").write_text(json.dumps(asdict(replace(beat(1), section=section))))
    watched = Watchdog(tmp_path, RankInfo(0, 0, 2, 2), StopRequests(), 60.0)
    with pytest.raises(RuntimeError), watched:
        raise RuntimeError("Connection closed by peer")
    assert reasons == (["another rank was asked to stop"] if has_left else [])
