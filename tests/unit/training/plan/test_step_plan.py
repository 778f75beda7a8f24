"""Steps whose rows change in number or in length."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.plan.step_plan import Phase, StepPlan, TokenSchedule, check_batches, plan_steps


def test_points_are_rows_seen() -> None:
    schedule = TokenSchedule.parse("0:8,1k:32")
    phases = [(0, Phase(0, 16, 4, 50, 10.0))]
    plan = plan_steps(phases, schedule, accumulation=99, world_size=1)
    assert [(segment.first_sample, segment.accumulation) for segment in plan.segments] == [(0, 2), (104, 8)]
    assert [plan.at(samples).rows for samples in (0, 103, 104, 5000)] == [8, 8, 32, 32]
    assert plan_steps(phases, None, accumulation=3, world_size=1).at(7).rows == 12


def test_micro_steps_to_come_are_counted_across_a_change() -> None:
    schedule = TokenSchedule.parse("0:8,1k:32")
    plan = plan_steps([(0, Phase(0, 16, 4, 50, 10.0))], schedule, accumulation=99, world_size=1)
    assert plan.micro_steps_in(0, 13) == 13 * 2
    assert plan.micro_steps_in(88, 12) == 2 * 2 + 10 * 8
    assert plan.sample_after(88, 12) == 104 + 10 * 32


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Any two schedules together: their points may be in the same step, or at the same tokens."""
    size_places = [0, *draw(st.lists(st.integers(1, 900), max_size=3, unique=True).map(sorted))]
    length_places = [0, *draw(st.lists(st.integers(1, 900), max_size=2, unique=True).map(sorted))]
    micros = [12, 6, 2][-len(length_places) :]
    world_size = draw(st.integers(1, 2))
    phases = [
        (place, Phase(index, 24 // micro, micro, draw(st.integers(1, 80)), draw(st.floats(0.5, 24 / micro))))
        for index, (place, micro) in enumerate(zip(length_places, micros, strict=True))
    ]
    rows = 2 * world_size
    points = tuple((place, float(rows * draw(st.integers(1, 4)))) for place in size_places)
    return plan_steps(phases, TokenSchedule(points), accumulation=1, world_size=world_size)


@given(plan=plans(), total=st.integers(1, 900))
def test_arithmetic_equals_stepping(plan: StepPlan, total: int) -> None:
    starts = {segment.first_sample for segment in plan.segments}
    seen, passes, cursors = 0, 0.0, [0]
    while seen < total:
        segment = plan.at(seen)
        passes += segment.rows / segment.phase.num_rows
        seen += segment.rows
        cursors.append(seen)
    assert plan.steps_for(total) == len(cursors) - 1
    assert plan.passes(seen) == pytest.approx(passes)
    assert {start for start in starts if start <= seen} <= set(cursors)  # a change comes between two steps
    for steps, cursor in enumerate(cursors):
        assert plan.sample_after(0, steps) == cursor
        assert plan.sample_after(cursor, len(cursors) - 1 - steps) == seen


@given(plan=plans(), samples=st.integers(0, 2000))
def test_epochs_are_counted_across_phases(plan: StepPlan, samples: int) -> None:
    before, after = (plan.at(place).phase.epoch_of(place) for place in (samples, samples + 1))
    assert 0 <= before <= after <= before + 1
    assert samples < plan.at(samples).phase.epoch_end(samples)
    for phase in plan.phases[1:]:  # every phase begins an epoch
        earlier = plan.at(phase.first_sample - 1).phase
        assert earlier.epoch_of(phase.first_sample - 1) + 1 == phase.epoch_of(phase.first_sample)


def test_rows_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found 12 rows per step, expected multiples of 8"):
        check_batches(TokenSchedule.parse("0:8,1k:12"), 8)
    with pytest.raises(UserError, match="cannot be combined"):
        run_here([*write_project(tmp_path), "--batch_schedule", "0:8", "--max_steps_per_epoch", "3"])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_run_grows_its_batch_and_resumes_exactly(stage: int, tmp_path: Path) -> None:
    flags = ["--batch_schedule", "0:4,350:12", "--save_every_steps", "4"]
    micro = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4, "zero_optimization": {"stage": stage}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_here([*write_project(whole, **micro), *flags, "--max_steps", "10"])
    samples = [row["samples"] for row in read_metrics(whole, "train")]
    sizes = [after - before for before, after in pairwise([0, *samples])]
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 12}

    words = [*write_project(broken, **micro), *flags]
    run_here([*words, "--max_steps", "7"])
    run_here([*words, "--max_steps", "10"])
    losses = [[row["loss"] for row in read_metrics(folder, "train")] for folder in (whole, broken)]
    assert losses[0] == losses[1]
