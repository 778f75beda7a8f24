"""Batch sizes that change on the way."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.batch_plan import BatchPlan, check_batches, plan_batches
from training.token_schedule import TokenSchedule


def test_points_are_rows_seen() -> None:
    schedule = TokenSchedule.parse("0:8,1k:32", "--batch_schedule")
    plan = plan_batches(schedule, micro_rows=4, accumulation=99, tokens_per_row=10.0)
    assert plan.points == ((0, 2), (100, 8))
    assert [plan.rows_at(samples) for samples in (0, 99, 100, 5000)] == [8, 8, 32, 32]
    assert plan_batches(None, micro_rows=4, accumulation=3, tokens_per_row=10.0).rows_at(7) == 12


@given(
    micro=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    gaps=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    total=st.integers(1, 300),
)
def test_steps_are_those_of_walking(micro: int, sizes: list[int], gaps: list[int], total: int) -> None:
    starts = [sum(gaps[:index]) for index in range(len(sizes))]
    plan = BatchPlan(micro, tuple(zip(starts, sizes, strict=True)))
    steps = seen = 0
    while seen < total:
        seen += plan.rows_at(seen)
        steps += 1
    assert plan.steps_for(total) == steps


def test_rows_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="12 rows a step are no multiple of 8"):
        check_batches(TokenSchedule.parse("0:8,1k:12", "--batch_schedule"), 8)
    with pytest.raises(UserError, match="do not go together"):
        run_here([*write_project(tmp_path), "--batch_schedule", "0:8", "--max_steps_per_epoch", "3"])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_run_grows_its_batch_and_resumes_exactly(stage: int, tmp_path: Path) -> None:
    flags = ["--batch_schedule", "0:4,400:12", "--save_every_steps", "4"]
    micro = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4, "zero_optimization": {"stage": stage}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_here([*write_project(whole, **micro), *flags, "--max_steps", "10"])
    samples = [row["samples"] for row in read_metrics(whole, "train")]
    sizes = [after - before for before, after in zip([0, *samples], samples, strict=False)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 12}

    words = [*write_project(broken, **micro), *flags]
    run_here([*words, "--max_steps", "7"])
    run_here([*words, "--max_steps", "10"])
    losses = [[row["loss"] for row in read_metrics(folder, "train")] for folder in (whole, broken)]
    assert losses[0] == losses[1]
