"""Schedules over tokens: their syntax, and a run that follows one."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from tests.support import VOCAB, read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.plan.step_plan import TokenSchedule


def test_points() -> None:
    assert TokenSchedule.parse("0.2").points == ((0, 0.2),)
    schedule = TokenSchedule.parse("0:0.30, 1.5k:0.2,100M:0.15")
    assert schedule.points == ((0, 0.3), (1500, 0.2), (100_000_000, 0.15))
    assert schedule.in_steps(1000) == ((0, 0.3), (2, 0.2), (100_000, 0.15))


@pytest.mark.parametrize("text", ["", "abc", "0:0.3,", "5:0.3", "0:0.3,10:0.2,10:0.1", "0:0.3;10:0.2", "0:-1"])
def test_malformed_schedules_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected"):
        TokenSchedule.parse(text)


def test_a_run_follows_its_masking_rate(tmp_path: Path) -> None:
    words = write_project(tmp_path, width=24, predictions=12)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**content, "bert_token_file": "vocab.txt"}))
    run_here([*words, "--max_steps", "9", "--dynamic_masking", "--masking_rate", "0:0.4,1k:0.1"])
    rates = [row["masking_rate"] for row in read_metrics(tmp_path, "train")]
    assert rates[0] == pytest.approx(0.4, abs=0.06)
    assert rates[-1] == pytest.approx(0.1, abs=0.04)
    assert rates[3] < rates[0]


def test_masking_flags_need_dynamic_masking(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add --dynamic_masking"):
        run_here([*write_project(tmp_path), "--masking_rate", "0.3"])
