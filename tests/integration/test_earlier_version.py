"""Shards and a checkpoint that version 0.1 wrote, kept in tests/data, still train, resume and export."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from tests.support import PROJECT, read_metrics
from tests.unit.training.in_process import run_here

WRITTEN = PROJECT / "tests" / "data" / "written_by_0.1"
SAVED_STEP, LAST_STEP = 3, 6
NO_DROPOUT = ("--set", "bert_model_config.hidden_dropout_prob=0", "bert_model_config.attention_probs_dropout_prob=0")


def words(folder: Path) -> list[str]:
    return [
        *("--cf", str(folder / "model.json"), "--deepspeed_config", str(folder / "deepspeed.json")),
        *("--output_dir", str(folder / "out"), "--data_path_prefix", str(folder)),
        *("--max_seq_length", "24", "--max_predictions_per_seq", "4", "--print_steps", "1"),
        *("--max_steps", str(LAST_STEP)),
    ]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_losses_are_those_of_the_earlier_version(is_resumed: bool, tmp_path: Path) -> None:
    """With its checkpoint the run resumes at step 3; without it the same shards are trained from new weights.

    The checkpoint's model has dropout, whose masks may change from one version to the next: then the losses of the
    resumed run are recorded anew. The others are those of version 0.1.
    """
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    if is_resumed:
        shutil.copytree(WRITTEN / "saved_models", tmp_path / "out" / "saved_models")
    run_here([*words(tmp_path), "--export_dir", str(tmp_path / "export"), *(() if is_resumed else NO_DROPOUT)])
    expected = json.loads((WRITTEN / "losses.json").read_text())["resumed" if is_resumed else "new"]
    first = SAVED_STEP + 1 if is_resumed else 1
    losses = {row["step"]: row["loss"] for row in read_metrics(tmp_path, "train", "old")}
    # Not bit for bit: the file was written on another processor.
    assert losses == {step: pytest.approx(expected[str(step)], abs=1e-4) for step in range(first, LAST_STEP + 1)}
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "export")
    assert model.config.vocab_size == 95  # without the rows that pad the table
