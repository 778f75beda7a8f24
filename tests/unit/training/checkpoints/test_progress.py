"""Changes of a run's state: each by one method, which leaves the rest as it is."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from training.checkpoints.state import Best, Progress, TrainingState

STATE = TrainingState(5, 0, 40, 300, 42, 2, 0, "fp32", "", None, 3.0, {}, is_preln=True, seconds=7.0)


def changed(progress: Progress) -> dict[str, Any]:
    before, now = asdict(STATE), asdict(progress.state)
    return {key: value for key, value in now.items() if value != before[key]}


def test_a_step_and_its_rows() -> None:
    progress = Progress(STATE)
    progress.advance(6, 48)
    assert (progress.step, progress.samples) == (6, 48)
    progress.advance(6, 56)  # a step that the engine skipped
    progress.add_tokens(100)
    progress.set_seconds(9.0)
    assert changed(progress) == {"step": 6, "samples": 56, "tokens": 400, "seconds": 9.0}


@pytest.mark.parametrize("loss", [3.0, 3.5, math.nan, math.inf])
def test_a_validation_that_is_not_the_best_changes_nothing(loss: float) -> None:
    progress = Progress(STATE)
    assert progress.note_validation(loss, is_kept=True, is_saved_anyway=True) is None
    assert changed(progress) == {}


def test_the_best_validation_is_marked_where_it_is_kept() -> None:
    progress = Progress(STATE)
    assert progress.note_validation(2.5, is_kept=False, is_saved_anyway=False) is None
    assert changed(progress) == {"best_validation_loss": 2.5}
    best = progress.note_validation(2.0, is_kept=True, is_saved_anyway=False)
    assert best == Best("step_00000005", 2.0, is_only_best=True)
    assert changed(progress) == {"best_validation_loss": 2.0, "best_tag": best.tag, "best_is_only": True}


def test_a_rollback_keeps_the_time_and_skips_the_samples() -> None:
    progress = Progress(replace(STATE, skips=((8, 16),)))
    saved = replace(STATE, step=3, samples=24, tokens=180, seconds=4.0, world_size=1)
    progress.roll_back(saved, ((32, 40),))
    assert changed(progress) == {
        "step": 3,
        "samples": 24,
        "tokens": 180,
        "skips": ((8, 16), (32, 40)),
        "rollbacks": ((32, 40),),
    }
