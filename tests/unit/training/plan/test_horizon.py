"""Where runs and epochs end, and the time to the next checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest

from training.checkpoints.folder import Retention
from training.checkpoints.saving import SavePolicy, Saver
from training.plan.horizon import Horizon
from training.plan.step_plan import Phase, plan_steps

PLAN = plan_steps([(0, Phase(0, 128, 8, 100, 90.0))], None, accumulation=1, world_size=1)


def horizon(**changes: int | None) -> Horizon:
    values = {
        "plan": PLAN,
        "num_epochs": 3,
        "total_steps": 1000,
        "schedule_origin": 0,
        "start_step": 0,
    }
    return Horizon(**{**values, **changes})  # type: ignore[arg-type]


def walk(plan: Horizon) -> tuple[int, list[int]]:
    """Step to the end; the last step, and the sample at which each step started."""
    step, samples, seen = plan.start_step, 0, []
    while not plan.is_finished(step, samples):
        samples = plan.next_sample(samples + plan.plan.at(samples).rows)
        step += 1
        seen.append(samples)
    return step, seen


def test_epochs_are_passes_over_the_rows() -> None:
    step, seen = walk(horizon())
    assert step == horizon().last_step() == 38  # ⌈300 / 8⌉
    assert seen == [8 * count for count in range(1, 39)]


def test_max_steps_counts_this_runs_own_steps() -> None:
    plan = horizon(start_step=500, max_steps=7)
    assert walk(plan)[0] == plan.last_step() == 507


def test_total_steps_count_from_the_schedules_origin() -> None:
    assert walk(horizon(start_step=500, schedule_origin=500, total_steps=9))[0] == 509
    assert walk(horizon(start_step=500, schedule_origin=0, total_steps=505))[0] == 505


def test_steps_to_the_end_of_an_epoch() -> None:
    assert horizon().steps_to_epoch_end(0) == 13  # ⌈100 / 8⌉
    assert horizon().steps_to_epoch_end(96) == 1
    limited = horizon(max_steps_per_epoch=5)
    assert [limited.steps_to_epoch_end(samples) for samples in (0, 8, 32, 100, 116)] == [5, 4, 1, 5, 3]


def test_seconds_to_the_next_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps, by the end of the epoch, or by --save_every_minutes: whichever comes first."""
    monkeypatch.setattr("time.monotonic", lambda: 100.0)

    def seconds_to_next(seconds_per_step: float, **policy: Any) -> float:
        progress, nothing = SimpleNamespace(step=3, samples=24), SimpleNamespace(total=None)
        saver = Saver(
            None,  # type: ignore[arg-type]
            None,
            progress,  # type: ignore[arg-type]
            horizon(max_steps_per_epoch=5),
            nothing,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            SavePolicy(Retention(), **policy),
            {},
            print,
        )
        return saver.seconds_to_next(seconds_per_step)

    assert seconds_to_next(100.0) == 2 * 100.0
    assert seconds_to_next(100.0, every_minutes=1.0) == 60.0
    assert seconds_to_next(10.0, every_minutes=1.0, every_steps=4) == 10.0


def test_max_steps_per_epoch_continues_at_the_next_epochs_first_row() -> None:
    step, seen = walk(horizon(max_steps_per_epoch=2))
    assert seen == [8, 100, 108, 200, 208, 300]
    assert step == horizon(max_steps_per_epoch=2).last_step() == 6
