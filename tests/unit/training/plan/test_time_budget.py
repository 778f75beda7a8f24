"""Time budgets, with a clock that the test controls."""

import time

import psutil
import pytest

from common.errors import UserError
from training.plan.time_budget import Budget, Duration, process_start


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2700), ("24h", 86400), ("1d12h", 129600), ("1.5h", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration.parse(text).seconds == seconds


@pytest.mark.parametrize("text", ["24", "h", "-3h", "24 h", "0s", "1w"])
def test_malformed_durations_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="such as 90s, 45m, 24h or 1d12h"):
        Duration.parse(text)


def test_restarts_add_up_and_the_time_between_does_not_count() -> None:
    moments = iter([1000.0, 1040.0])
    budget = Budget(100.0, used_before=50.0, clock=lambda: next(moments))
    assert budget.used() == 90.0


def test_progress_reaches_one_when_the_reserve_begins() -> None:
    budget = Budget(100.0)
    assert (budget.progress(0.0), budget.progress(48.5), budget.progress(97.0)) == (0.0, 0.5, 1.0)
    assert Budget(1e6).reserved == 600.0


def test_stops_in_time_for_the_last_checkpoint() -> None:
    budget = Budget(100.0)
    assert not budget.is_over(95.0, seconds_per_step=1.0)
    assert budget.is_over(96.5, seconds_per_step=1.0)
    budget = Budget(100.0)
    budget.note_pause(5.0)  # validation and checkpoint took longer than what is kept back
    assert budget.is_over(90.0, seconds_per_step=1.0)
    budget.end()
    assert budget.used() == 100.0  # used up, also for a restart
    assert not Budget(None).is_over(1e9, 1.0)


def test_time_for_an_export_is_reserved_too() -> None:
    for num_pauses, is_over in ((2, False), (3, True)):
        budget = Budget(100.0, num_last_pauses=num_pauses)
        budget.note_pause(5.0)
        assert budget.is_over(80.0, seconds_per_step=1.0) is is_over


def test_the_clock_starts_with_the_process() -> None:
    age = time.time() - psutil.Process().create_time()
    assert time.monotonic() - process_start() == pytest.approx(age, abs=0.5)
    budget = Budget(100.0, used_before=10.0, clock=lambda: 50.0, began=20.0)
    assert budget.used() == 40.0
    assert budget.left() == 100.0 - 3.0 - 40.0
