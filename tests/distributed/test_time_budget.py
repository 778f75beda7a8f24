"""Two ranks with a time budget end together: rank 0's clock decides for both."""

from pathlib import Path

from tests.support import read_metrics, run_deepspeed, write_project


def test_two_ranks_end_together_when_the_time_is_over(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--time_budget", "12s", "--validate_every_steps", "5", "--save_every_steps", "5"]
    outcome = run_deepspeed([*words, "--lr_schedule", "linear"], num_ranks=2)
    assert outcome.returncode == 0, outcome.stderr
    rows = read_metrics(tmp_path, "train")
    assert rows[-1]["learning_rate"] < 0.003
    assert read_metrics(tmp_path, "validation")[-1]["step"] == rows[-1]["step"]
