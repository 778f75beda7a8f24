"""Machines that meet: what differs between them, and what one of them cannot do, is reported by rank 0."""

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest

from common.errors import RankLost, ReportedElsewhere, UserError
from tests.support import free_port
from training.runtime import meeting
from training.runtime.meeting import Arrival, find_differences, meet, sharing_failures
from training.runtime.ranks import RankInfo

FIRST, SECOND = RankInfo(0, 0, 2, 1), RankInfo(1, 0, 2, 1)


@pytest.fixture(autouse=True)
def meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(meeting, "JOIN_TIMEOUT", timedelta(seconds=120))


def test_each_difference_is_named_once() -> None:
    arrivals = [
        Arrival("worker-0", {"torch": "2.13.0", "training data": "aa"}),
        Arrival("worker-1", {"torch": "2.13.0", "training data": "bb"}),
        Arrival("worker-1", {"torch": "2.13.0", "training data": "bb"}),
    ]
    (difference,) = find_differences(arrivals)
    assert difference.startswith("worker-1: its training data is bb, but worker-0 (rank 0) has aa; expected the same")
    assert find_differences(arrivals[1:]) == []


def attend(rank_info: RankInfo, facts: dict[str, str], failure: Exception | None, ends: dict[int, object]) -> None:
    try:
        with sharing_failures(rank_info):
            if failure is not None:
                raise failure
        ends[rank_info.rank] = meet(rank_info, facts)  # the store stays open
    except Exception as error:
        ends[rank_info.rank] = error


@pytest.mark.parametrize(
    ("facts", "failures", "expected"),
    [
        (("1", "1"), (None, None), None),
        (("1", "2"), (None, None), "its torch is 2, but .* has 1"),
        (("1", "1"), (None, UserError("data: no such folder")), r"\(rank 1\): data: no such folder"),
        (("1", "1"), (UserError("ds.json: unknown key"), None), "^ds.json: unknown key$"),
    ],
)
def test_rank_0_reports_and_the_other_ends_with_the_same_code(
    facts: tuple[str, str], failures: tuple[Exception | None, Exception | None], expected: str | None
) -> None:
    ends: dict[int, Any] = {}
    arguments = zip((FIRST, SECOND), ({"torch": fact} for fact in facts), failures, strict=True)
    ranks = [threading.Thread(target=attend, args=(*each, ends)) for each in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    if expected is None:
        assert all(len(hosts) == 2 for _, hosts in ends.values())
        return
    assert isinstance(ends[0], UserError)
    assert isinstance(ends[1], ReportedElsewhere)
    assert ends[1].code == 2
    with pytest.raises(UserError, match=expected):
        raise ends[0]


def test_a_single_rank_starts_though_its_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        store, hosts = meet(RankInfo(0, 0, 1, 1), {})
    assert len(hosts) == 1
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_another_program_at_the_port_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and never answers."""
    monkeypatch.setattr(meeting, "JOIN_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr(meeting, "LONGER_THAN_TORCH", timedelta(0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RankLost, match="though the port is open there"):
            meet(SECOND, {})
