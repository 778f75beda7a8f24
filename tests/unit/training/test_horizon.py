"""Where runs and epochs end."""

from training.horizon import Horizon
from training.step_plan import Phase, plan_steps

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
    """Step to the end; the last step and the samples at which reading went on."""
    step, samples, seen = plan.start_step, 0, []
    while not plan.is_finished(step, samples):
        samples = plan.next_sample(samples + plan.plan.rows_at(samples))
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


def test_max_steps_per_epoch_goes_on_at_the_next_epochs_first_row() -> None:
    step, seen = walk(horizon(max_steps_per_epoch=2))
    assert seen == [8, 100, 108, 200, 208, 300]
    assert step == horizon(max_steps_per_epoch=2).last_step() == 6
