"""Skipped samples: where the next step begins, over restarts and at the end of the data."""

import json
from pathlib import Path

import pytest

from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import Skips, TrainingState, read_state

BATCH = 8  # rows per step in tests.support's project


def newest_state(folder: Path) -> TrainingState:
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    return read_state(checkpoints.folder / checkpoints.choose(None))


def note(folder: Path, *batches: int) -> None:
    """Skip the batches with these numbers, the first being 0."""
    skips = [[number * BATCH, (number + 1) * BATCH] for number in batches]
    (folder / "out" / "saved_models" / "tiny" / "skips.json").write_text(json.dumps(skips))


def test_ranges_of_the_checkpoint_and_of_the_file_are_skipped(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    run_here([*words, "--max_steps", "1"])
    note(tmp_path, 1, 3)
    run_here([*words, "--max_steps", "2"])
    note(tmp_path, 5)  # as if the first ones could not be written
    run_here([*words, "--max_steps", "4"])
    assert [row["samples"] // BATCH for row in read_metrics(tmp_path, "train")] == [1, 3, 5, 7]
    assert [first // BATCH for first, _ in newest_state(tmp_path).skips] == [1, 3, 5]


def test_a_run_whose_last_rows_are_skipped_ends_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No row of the next epoch replaces them, and the saved state is that of a finished run."""
    words = write_project(tmp_path)
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"num_epochs": 100', '"num_epochs": 1'))
    run_here([*words, "--max_steps", "7"])
    note(tmp_path, 7)  # the last of the epoch
    run_here(words)
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(1, 8))
    state = newest_state(tmp_path)
    assert (state.step, state.samples) == (7, 8 * BATCH)
    assert not list((tmp_path / "out").rglob("*.damaged"))
    capsys.readouterr()
    run_here(words)
    assert "finished already, at step 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sample", "rows", "expected"),
    [
        (0, 8, 0),
        (8, 8, 16),  # exactly the skipped batch
        (16, 8, 16),
        (32, 8, 48),  # two adjacent ranges
        (0, 16, 16),  # the batch has doubled: the range is in its second half
        (4, 8, 16),  # begins before the range and ends in it
        (12, 8, 16),  # begins in the range
        (24, 16, 48),
        (48, 64, 48),
    ],
)
def test_no_step_touches_a_range(sample: int, rows: int, expected: int) -> None:
    skips = ((40, 48), (8, 16), (32, 40))
    found = Skips(skips).next_sample(sample, rows)
    assert found == expected
    assert all(found >= end or found + rows <= first for first, end in skips)
