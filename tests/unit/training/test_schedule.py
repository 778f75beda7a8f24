"""The learning rate's formulas, joints and origin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.schedule import SCHEDULES, Schedule


def schedule(shape: str, **changes: float) -> Schedule:
    values = {"peak": 2e-3, "total_steps": 1000, "warmup_proportion": 0.1, "decay_rate": 0.9, "decay_step": 50}
    return Schedule(shape=shape, **{**values, **changes})


@pytest.mark.parametrize(
    ("shape", "step", "expected"),
    [
        ("LE", 0, 0.0),
        ("LE", 25, 2e-3 * 25 / 100),
        ("LE", 100, 2e-3),
        ("LE", 175, 2e-3 * 0.9**1.5),
        ("EE", 25, 2e-3 * 0.25**2),
        ("EE", 150, 2e-3 * 0.9),
        ("EP", 25, 2e-3 * 0.25**1.5),
        ("EP", 600, 2e-3 * 0.4**2),
        ("EP", 1000, 0.0),
        ("EP", 1500, 0.0),
        ("linear", 550, 2e-3 * 0.5),
    ],
)
def test_formulas(shape: str, step: int, expected: float) -> None:
    assert schedule(shape).rate(step) == expected


def test_offset_is_added_at_every_step() -> None:
    plain, lifted = schedule("LE"), schedule("LE", offset=1e-4)
    for step in (0, 50, 100, 700):
        assert lifted.rate(step) == plain.rate(step) + 1e-4


def test_origin_shifts_the_whole_curve() -> None:
    assert [schedule("EE", origin=300).rate(300 + step) for step in range(400)] == [
        schedule("EE").rate(step) for step in range(400)
    ]


@pytest.mark.parametrize("shape", sorted(SCHEDULES))
def test_no_warmup_begins_at_the_decay(shape: str) -> None:
    assert schedule(shape, warmup_proportion=0.0).rate(0) == 2e-3


@given(
    shape=st.sampled_from(sorted(SCHEDULES)),
    total=st.integers(1, 5000),
    warmup=st.floats(0, 0.9),
    step=st.integers(0, 10000),
)
def test_never_negative_never_above_the_peak(shape: str, total: int, warmup: float, step: int) -> None:
    rate = schedule(shape, total_steps=total, warmup_proportion=warmup).rate(step)
    assert 0.0 <= rate <= 2e-3


@pytest.mark.parametrize("shape", sorted(SCHEDULES))
def test_falls_after_the_peak(shape: str) -> None:
    rates = [schedule(shape).rate(step) for step in range(100, 1100)]
    assert rates == sorted(rates, reverse=True)
