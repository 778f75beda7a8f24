"""Samples that are left out, over restarts and at the end of the data."""

import json
from pathlib import Path

import pytest

from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import TrainingState, read_state

BATCH = 8  # rows a step in tests.support's project


def newest_state(folder: Path) -> TrainingState:
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    return read_state(checkpoints.folder / checkpoints.choose(None))


def note(folder: Path, *batches: int) -> None:
    """Leave out the batches of these numbers, the first being 0."""
    skips = [[number * BATCH, (number + 1) * BATCH] for number in batches]
    (folder / "out" / "saved_models" / "tiny" / "skips.json").write_text(json.dumps(skips))


def test_what_the_checkpoint_knows_and_what_is_noted_beside_it_are_left_out(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    run_here([*words, "--max_steps", "1"])
    note(tmp_path, 1, 3)
    run_here([*words, "--max_steps", "2"])
    note(tmp_path, 5)  # as where the first ones could not be written
    run_here([*words, "--max_steps", "4"])
    assert [row["samples"] // BATCH for row in read_metrics(tmp_path, "train")] == [1, 3, 5, 7]
    assert [first // BATCH for first, _ in newest_state(tmp_path).skips] == [1, 3, 5]


def test_a_run_whose_last_rows_are_left_out_ends_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No row of the next epoch is trained on instead, and what is saved knows that it is the end."""
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
