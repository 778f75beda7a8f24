"""Estimates of what is left of a run."""

import pytest

from training.plan.horizon import Horizon, find_early_end, look_ahead
from training.plan.learning_rate import Schedule
from training.plan.step_plan import Phase, plan_steps
from training.plan.time_budget import Budget


def horizon(**changes: int) -> Horizon:
    plan = plan_steps([(0, Phase(0, 24, 4, 30, 18.5))], None, accumulation=1, world_size=1)
    values = {"num_epochs": 2, "total_steps": 15, "schedule_origin": 0}
    return Horizon(plan=plan, start_step=0, **{**values, **changes})


def test_tokens_and_epochs() -> None:
    outlook = look_ahead(horizon(), step=5, samples=20)
    assert outlook.data_tokens == pytest.approx(30 * 18.5)
    assert outlook.steps_left == 10
    assert outlook.epochs_left == pytest.approx(40 / 30)
    assert outlook.tokens_left == pytest.approx(40 * 18.5)


def test_tokens_and_epochs_across_two_lengths() -> None:
    phases = [(0, Phase(0, 24, 4, 30, 18.0)), (700, Phase(1, 48, 2, 20, 36.0))]
    plan = plan_steps(phases, None, accumulation=1, world_size=1)
    assert plan.phases[1].first_sample == 40  # the first step that begins at 700 tokens or later
    outlook = look_ahead(Horizon(plan, 3, 15, 0, 0), step=5, samples=20)
    assert outlook.tokens_left == pytest.approx(20 * 18.0 + 10 * 36.0)
    assert outlook.epochs_left == pytest.approx(20 / 30 + 10 / 20)


def test_data_that_ends_before_the_time_budget_does() -> None:
    schedule = Schedule("linear", peak=1.0, total_steps=150, warmup_proportion=0.1)
    budget = Budget(100.0, clock=lambda: 0.0)
    text = find_early_end(horizon(), schedule, budget, seconds_to_last_step=48.5)
    assert "in about 0:48" in str(text)
    assert "56% of the peak" in str(text)
    assert find_early_end(horizon(), schedule, budget, seconds_to_last_step=98.0) is None
    assert find_early_end(horizon(), schedule, Budget(None), seconds_to_last_step=1.0) is None
    assert find_early_end(horizon(max_steps=9), schedule, budget, seconds_to_last_step=1.0) is None
