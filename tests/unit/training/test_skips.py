"""Samples that are left out, over restarts and at the end of the data."""

import json
from pathlib import Path

from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoint import CheckpointFolder, TrainingState, read_state

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
