"""Reports come at regular steps, whatever else happens in between."""

import re
from pathlib import Path

import pytest

from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.state import read_state


def tokens_by_step(folder: Path) -> dict[int, float]:
    return {row["step"]: row["tokens"] for row in read_metrics(folder, "train")}


def test_epochs_checkpoints_and_validations_do_not_move_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Epochs end after steps 8 and 16, validations and checkpoints come every 3 and 7 steps."""
    often = [*write_project(tmp_path / "often"), "--max_steps", "18"]
    run_here(often)
    capsys.readouterr()
    words = [*write_project(tmp_path / "rarely"), "--max_steps", "18", "--print_steps", "5"]
    run_here([*words, "--validate_every_steps", "3", "--save_every_steps", "7"])
    rows = read_metrics(tmp_path / "rarely", "train")
    assert [row["step"] for row in rows] == [5, 10, 15, 18]
    assert [row["window_steps"] for row in rows] == [5, 5, 5, 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == [
        "step 5/18",
        "step 10/18",
        "step 15/18",
        "step 18/18 (last 3 steps only)",
    ]
    # Each step is counted once: in the reports, and in the checkpoints between them.
    expected = tokens_by_step(tmp_path / "often")
    assert tokens_by_step(tmp_path / "rarely") == {step: expected[step] for step in (5, 10, 15, 18)}
    saved = tmp_path / "rarely" / "out" / "saved_models" / "tiny"
    for step in (7, 8, 14, 16, 18):
        assert read_state(saved / f"step_{step:08d}").tokens == expected[step]


def test_a_window_is_the_mean_over_all_its_steps(tmp_path: Path) -> None:
    run_here([*write_project(tmp_path / "often"), "--max_steps", "10"])
    run_here([*write_project(tmp_path / "once"), "--max_steps", "10", "--print_steps", "10", "--save_every_steps", "4"])
    losses = [row["nsp_loss"] for row in read_metrics(tmp_path / "often", "train")]
    (row,) = read_metrics(tmp_path / "once", "train")
    assert row["nsp_loss"] == pytest.approx(sum(losses) / 10, rel=1e-5)


def test_keep_best_on_few_rows_says_how_uncertain_its_choice_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here([*write_project(tmp_path), "--max_steps", "4", "--validate_every_steps", "2", "--keep_best"])
    shown = capsys.readouterr()
    assert len(re.findall(r"validation at step \d: mlm loss \d\.\d{3} ± \d\.\d{3} \(perplexity", shown.out)) == 2
    assert shown.err.count("--keep_best: the validation data has 11 rows, expected at least 200") == 1
    run_here([*write_project(tmp_path / "other"), "--max_steps", "2"])
    assert "±" not in capsys.readouterr().out
