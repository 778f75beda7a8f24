"""evaluation.run under the deepspeed launcher: two CPU ranks score as one does."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import free_port, run_command
from tests.unit.evaluation.tiny import save_model, write_pairs, write_reviews


@pytest.mark.slow
def test_two_ranks_score_as_one(tmp_path: Path) -> None:
    save_model(tmp_path / "ours")
    write_reviews(tmp_path / "reviews.csv", 80)
    (tmp_path / "blimp").mkdir()
    write_pairs(tmp_path / "blimp" / "order.jsonl", 15)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 4096, "zero_optimization": {"stage": 2}}))
    words = [
        *("--model", str(tmp_path / "ours"), "--tasks", str(tmp_path / "reviews.csv"), "blimp", "--text", "text"),
        *("--label", "stars", "--data", str(tmp_path), "--seeds", "1", "--untrained_seeds", "0", "--epochs", "5"),
        *("--learning_rate", "3e-3", "--batch_size", "8"),
    ]
    launcher = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--module", "evaluation.run"]
    two = run_command(
        [*launcher, *words, "--output", str(tmp_path / "two"), "--deepspeed_config", str(tmp_path / "ds.json")]
    )
    assert two.returncode == 0, two.stderr[-3000:]
    one = run_command([sys.executable, "-m", "evaluation.run", *words, "--output", str(tmp_path / "one")])
    assert one.returncode == 0, one.stderr[-3000:]
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two")]
    for task in range(2):
        values = [report["tasks"][task]["results"][0]["values"]["accuracy"][0] for report in reports]
        assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert reports[0]["tasks"][0]["results"][0]["values"]["accuracy"][0] == 1
    assert two.stdout.count("cells computed") == 1  # one rank reports
    assert "local_rank" not in reports[1]["command"]  # which the launcher adds
