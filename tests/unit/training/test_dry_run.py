"""--dry_run reports what a run would cost and writes nothing."""

import re
from pathlib import Path

import pytest

from tests.support import write_project
from tests.unit.training.in_process import run_here

START_TABLE = (
    r"^tiny$",
    r"^  model +pre-LN, 2 layers of 32, 61 tokens, [\d,]+ parameters$",
    r"^  batch +8 rows of 24: 4 × 2 micro-steps × 1 rank$",
    r"^  data +64 rows of 24 in 3 files, about 1\.\d k tokens$",
    r"^  validation +11 rows of 24 in 1 file$",
    r"^  length +to step 60: 7\.50 epochs, about [89]\.\d k tokens left$",
    r"^  engine +fp32, ZeRO stage 0, cpu, (1 thread|\d+ threads) per rank$",
    r"^  lr +LE, peak 0\.003$",
    r"^  checkpoints +{folder}/out/saved_models/tiny$",
    r"^  logs +{folder}/out/runs/tiny$",
    r"^  start +from new weights$",
)


def test_dry_run_reports_the_cost_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.banner.find_attention_notes", lambda config, *_: [f"heads of {config.head_size}"])
    # Kibibytes instead of GiB: the parts of a model this small would all be 0.00.
    monkeypatch.setattr(
        "training.dry_run._gib", lambda tensors: sum(t.numel() * t.element_size() for t in tensors) / 1024
    )
    run_here([*write_project(tmp_path, train_micro_batch_size_per_gpu=4), "--dry_run"])
    said = capsys.readouterr().out
    for row in START_TABLE:
        assert re.search(row.format(folder=re.escape(str(tmp_path))), said, re.MULTILINE), row
    assert "note: heads of 16" in said
    parameters = float(re.findall(r"([\d,]+) parameters", said)[0].replace(",", ""))
    parts = re.search(
        r"GiB per rank at its peak: parameters (.*), gradients (.*), optimizer (.*), activations and", said
    )
    assert parts
    sizes = [float(part) for part in parts.groups()]
    assert sizes == pytest.approx([4 * parameters / 1024, 4 * parameters / 1024, 8 * parameters / 1024], rel=0.01)
    assert re.search(r"speed +[\d.]+ s/step, [\d,]+ tokens/s, matmul \d+%", said)
    assert re.search(r"left +60 steps, \d+:\d\d:\d\d \(hours:minutes:seconds\), about [\d.]+ k tokens", said)
    assert not (tmp_path / "out").exists()


def test_dry_run_with_monitors_writes_nothing_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitors = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "events")},
    }
    words = write_project(tmp_path, **monitors)
    before = set(tmp_path.rglob("*"))
    run_here([*words, "--dry_run"])
    assert "nothing was written" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before


def test_dry_run_with_steps_that_grow_and_with_a_time_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has 8 rows, the other 59 have 80: ten times the time and tokens."""
    monkeypatch.setattr("training.dry_run.fastest_step", lambda *_: 1.0)
    words = write_project(tmp_path, train_micro_batch_size_per_gpu=8)
    run_here([*words, "--dry_run", "--batch_schedule", "0:8,1:80"])
    said = capsys.readouterr().out
    assert "60 steps, 0:09:51 (hours:minutes:seconds)" in said
    tokens = re.search(r"seconds\), about ([\d.]+) k tokens", said)
    assert tokens
    assert float(tokens.group(1)) == pytest.approx((8 + 59 * 80) * 18.4 / 1000, rel=0.1)

    run_here([*words, "--dry_run", "--time_budget", "1000s"])
    said = capsys.readouterr().out
    assert "800 steps, 0:13:20" in said, "100 epochs, although there is time for more"
    assert "num_epochs ends the run in about 13:20, but its time budget allows for" in said
    assert "warm-up" not in said
    run_here([*words, "--dry_run", "--time_budget", "100s"])
    said = capsys.readouterr().out
    assert re.search(r"left +about (89|9\d) steps, 0:01:3\d", said), said
    assert "1:40 in total, 1:3" in said
    assert "num_epochs ends" not in said
