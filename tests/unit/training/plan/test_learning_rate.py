"""The learning rate's formulas, continuity and origin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.plan.learning_rate import SCHEDULES, Schedule


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
        ("linear", 1000, 0.0),
        ("polynomial", 550, 2e-3 * 0.5),
        ("cosine", 100, 2e-3),
        ("cosine", 550, 2e-3 * 0.5),
        ("cosine", 1000, 0.0),
        ("constant", 50, 2e-3 * 0.5),
        ("constant", 5000, 2e-3),
        ("wsd", 900, 2e-3),
        ("wsd", 950, 2e-3 * 0.5),
        ("wsd", 1200, 0.0),
    ],
)
def test_formulas(shape: str, step: int, expected: float) -> None:
    rate = schedule(shape).rate(step)
    if shape in ("LE", "EE", "EP"):
        assert rate == expected  # other people's runs follow these, bit for bit
    else:
        assert rate == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_offset_is_added_at_every_step() -> None:
    plain, lifted = schedule("LE"), schedule("LE", offset=1e-4)
    for step in (0, 50, 100, 700):
        assert lifted.rate(step) == plain.rate(step) + 1e-4


def test_origin_shifts_the_whole_curve() -> None:
    assert [schedule("EE", origin=300).rate(300 + step) for step in range(400)] == [
        schedule("EE").rate(step) for step in range(400)
    ]


@pytest.mark.parametrize("shape", sorted(SCHEDULES))
def test_without_warmup_the_decay_starts_at_once(shape: str) -> None:
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


def test_powers_floors_and_the_length_of_the_decay() -> None:
    assert schedule("polynomial", decay_power=2.0).rate(550) == pytest.approx(2e-3 * 0.25)
    for shape in ("linear", "polynomial", "cosine", "wsd"):
        assert schedule(shape, final_share=0.1).rate(1000) == pytest.approx(2e-4)
    wsd = schedule("wsd", decay_proportion=0.4)
    assert (wsd.rate(600), wsd.rate(800)) == (2e-3, pytest.approx(1e-3))


@given(
    shape=st.sampled_from(sorted(SCHEDULES)),
    total=st.integers(200, 100000),
    warmup=st.floats(0.01, 0.5),
    fall=st.floats(0.1, 1.0),
    step=st.integers(0, 100000),
)
def test_no_jumps(shape: str, total: int, warmup: float, fall: float, step: int) -> None:
    """The rate is continuous in the step: a billionth of the run changes it by almost nothing.

    EP alone falls at the joint, from 1 to (1 - warm-up)²: its formula is other people's, and kept.
    """
    curve = schedule(shape, total_steps=total, warmup_proportion=warmup, decay_proportion=fall, decay_step=total)
    joints = (curve.warmup_steps, (1.0 - fall) * total, float(total), float(min(step, total)))
    for joint in joints:
        near = total * 1e-9
        before, after = curve.rate(max(0.0, joint - near)), curve.rate(joint + near)
        if shape == "EP" and abs(joint - curve.warmup_steps) <= near:
            continue
        assert after == pytest.approx(before, abs=2e-3 * 1e-5)


@given(shape=st.sampled_from(sorted(SCHEDULES)), start=st.integers(0, 900), origin=st.integers(0, 300))
def test_the_same_after_resume(shape: str, start: int, origin: int) -> None:
    """A process that starts in the middle computes what the first one would have: there is no state."""
    whole = [schedule(shape, origin=origin).rate(step) for step in range(1000)]
    assert [schedule(shape, origin=origin).rate(step) for step in range(start, 1000)] == whole[start:]


@pytest.mark.parametrize("shape", sorted(SCHEDULES))
def test_falls_after_the_peak(shape: str) -> None:
    rates = [schedule(shape).rate(step) for step in range(100, 1100)]
    assert rates == sorted(rates, reverse=True)
