"""A time budget on several ranks, and over processes that are killed."""

import json
import signal
from pathlib import Path

import pytest

from common.errors import UserError
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.paths import TIME_SPENT
from training.checkpoints.state import read_state


def test_two_ranks_end_together_when_the_time_is_over(rank_server: RankServer, tmp_path: Path) -> None:
    """Where the start alone takes that long, they end together after the first step."""
    words = [*write_project(tmp_path), "--time_budget", "6s", "--validate_every_steps", "5", "--save_every_steps", "5"]
    outcome = rank_server.run([*words, "--lr_schedule", "linear"], 2, tmp_path)
    assert outcome.codes == [0, 0], outcome.text
    rows = read_metrics(tmp_path, "train")
    assert rows[-1]["learning_rate"] < 0.003
    assert read_metrics(tmp_path, "validation")[-1]["step"] == rows[-1]["step"]


def test_time_that_a_killed_process_took_after_its_last_checkpoint_counts(
    rank_server: RankServer, tmp_path: Path
) -> None:
    """It is noted by a thread, so that it counts in a long save too; here three times a second, not every ten."""
    words = [*write_project(tmp_path), "--time_budget", "600s", "--ckpt_to_save", "1000000"]
    model = tmp_path / "model.json"
    model.write_text(model.read_text().replace('"num_epochs": 100', '"num_epochs": 1000000'))
    folder = tmp_path / "out" / "saved_models" / "tiny"
    kill = {"ranks": [0], "signal": signal.SIGKILL, "once": str(folder / TIME_SPENT), "after": 0.5}
    hurry = {"kind": "impatient", "seconds": 2.0, "file": str(tmp_path / "never")}
    outcome = rank_server.run(words, 1, tmp_path, faults=[hurry], signals=[kill])
    assert outcome.codes == [-signal.SIGKILL]
    assert not list(folder.glob("step_*"))
    noted = json.loads((folder / TIME_SPENT).read_text())["seconds"]
    assert 0 < noted <= outcome.seconds
    outcome = rank_server.run([*words, "--max_steps", "1"], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert noted < read_state(folder / "step_00000001").seconds <= noted + outcome.seconds


def test_a_budget_that_killed_processes_used_up_is_told(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--time_budget", "60s"]
    folder = tmp_path / "out" / "saved_models" / "tiny"
    folder.mkdir(parents=True)
    (folder / TIME_SPENT).write_text('{"seconds": 59.5}')
    with pytest.raises(UserError, match=r"have used it up \(1:00\) without saving a checkpoint.*time_spent.json"):
        run_here(words)


def test_what_was_lost_at_the_very_end_is_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or the run would end with weights whose rate never fell."""
    words = [*write_project(tmp_path), "--time_budget", "1h"]
    run_here([*words, "--max_steps", "2"])
    folder = tmp_path / "out" / "saved_models" / "tiny"
    (folder / TIME_SPENT).write_text('{"seconds": 3599.5}')
    run_here([*words, "--max_steps", "4"])
    assert "The steps after step 2 (59:5" in capsys.readouterr().out
    assert read_state(folder / "step_00000004").seconds < 600
