"""Which checkpoint is exported, with which tokenizer, and what is printed."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.errors import UserError
from common.weights import folder_digest
from scripts.export_hf import main
from tests.support import VOCAB, read_metrics, write_json, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder, Retention, retire
from training.checkpoints.state import Best, write_best
from training.export import hugging_face


def write_run(folder: Path, *flags: str) -> Path:
    """A run of 6 steps with 2 checkpoints, of which the first is marked as the best; its saved_models folder."""
    words = write_project(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bert_token_file": "vocab.txt"}))
    run_here([*words, "--max_steps", "6", "--validate_every_steps", "3", "--save_every_steps", "3", *flags])
    return folder / "out" / "saved_models" / "tiny"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = write_run(tmp_path_factory.mktemp("run"))
    write_best(saved, Best("step_00000003", 1.25, False))
    return saved


@pytest.mark.parametrize(
    ("flags", "step", "words"),
    [
        ([], 3, "(step 3, the best checkpoint, validation loss 1.2500) exported to"),
        (["--export", "best"], 3, "(step 3, the best checkpoint, validation loss 1.2500) exported to"),
        (["--export", "last"], 6, "(step 6, validation loss "),
    ],
)
def test_the_best_or_the_last_checkpoint_with_the_runs_tokenizer(
    flags: list[str], step: int, words: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--checkpoint", str(saved), "--output", str(tmp_path / "hf"), *flags]) == 0
    said = capsys.readouterr().out
    assert words in said
    assert "note:" not in said
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert f"| {step} |" in (tmp_path / "hf" / "README.md").read_text()
    if step == 6:
        assert f"{read_metrics(saved.parents[2], 'validation')[-1]['mlm_loss']:.4f}" in said


def evaluation_report(digest: str, score: float) -> dict[str, Any]:
    """What evaluation.run writes, as far as a model card shows it."""
    setting = {"learning_rate": 3e-5, "batch_size": 16, "epochs": 3, "warmup": 0.1, "weight_decay": 0.01}
    protocol = {"name": "fixed", "meaning": "one setting", "setting": setting | {"precision": "fp32"}, "seeds": [1]}
    summary = {"accuracy": {"mean": score, "std": None, "low": score, "high": score}}
    result = {"model": "mine", "untrained": False, "summary": summary, "num_collapsed": 0, "seeds": [1], "steps": [90]}
    task = {
        "title": "Reviews",
        "metrics": ["accuracy"],
        "num_rows": 12,
        "majority": {"accuracy": 0.5},
        "results": [result | {"setting": setting}],
    }
    return {"models": [{"name": "mine", "digest": digest}], "protocol": protocol, "tasks": [task]}


def test_results_of_an_evaluation_reach_the_card_of_the_evaluated_model(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--checkpoint", str(saved), "--output", str(tmp_path / "hf")]
    main(words)
    card = tmp_path / "hf" / "README.md"
    assert "Tasks, metrics and results: python -m evaluation.run" in card.read_text()
    report = write_json(tmp_path / "evaluated" / "report.json", evaluation_report(folder_digest(tmp_path / "hf"), 0.75))
    main(words)  # found beside the export
    assert "| Reviews | accuracy | 12 | 75.0" in card.read_text()
    report.rename(tmp_path / "report.json")
    main(words)
    assert "Reviews" not in card.read_text()
    main([*words, "--evaluation", str(tmp_path)])
    assert "| Reviews | accuracy | 12 | 75.0" in card.read_text()
    capsys.readouterr()
    main([*words, "--export", "last", "--evaluation", str(tmp_path)])  # other weights
    assert "Reviews" not in card.read_text()
    assert "has no results of this model" in capsys.readouterr().err
    for content in ("[]", "{", json.dumps({"models": [{"name": "mine", "digest": folder_digest(tmp_path / "hf")}]})):
        (tmp_path / "report.json").write_text(content)
        main([*words, "--export", "last", "--evaluation", str(tmp_path)])
        assert "Reviews" not in card.read_text()
    with pytest.raises(UserError, match=r"--evaluation .*lost: has no report.json"):
        main([*words, "--evaluation", str(tmp_path / "lost")])


def test_a_validation_that_is_not_finite_is_passed_over(saved: Path, tmp_path: Path) -> None:
    row = {"kind": "validation", "step": 3, "mlm_loss": 1.5, "mlm_accuracy": 0.25, "perplexity": 4.5}
    metrics = tmp_path / "metrics.jsonl"
    words = ["--checkpoint", str(saved / "step_00000006"), "--output", str(tmp_path / "hf"), "--metrics", str(metrics)]
    bad: tuple[dict[str, Any], ...] = (
        {"mlm_loss": "nan", "perplexity": "inf"},  # as the sinks write it
        {"mlm_loss": None, "perplexity": None},
        {"mlm_loss": math.nan},
    )
    for spoiled in bad:
        metrics.write_text("".join(json.dumps(line) + "\n" for line in (row, row | {"step": 6} | spoiled)))
        main(words)
        assert "| 3 | 1.500 | 4.5 | 25.0% |" in (tmp_path / "hf" / "README.md").read_text()
    metrics.write_text(json.dumps(row | {"mlm_loss": "low"}))
    with pytest.raises(UserError, match="its validation has no number for mlm_loss"):
        main(words)


def test_a_checkpoint_is_locked_while_it_is_exported(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must not remove it, and one that was removed in between is reported."""
    checkpoint = tmp_path / "tiny" / "step_00000003"
    shutil.copytree(saved / checkpoint.name, checkpoint)
    read = hugging_face.read_weights

    def remove_meanwhile(path: Path) -> dict[str, torch.Tensor]:
        retire(checkpoint.parent, [checkpoint.name, "step_00000006"], Retention(keep_last=1), None)
        return read(path)

    monkeypatch.setattr(hugging_face, "read_weights", remove_meanwhile)
    main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "hf")])
    assert checkpoint.is_dir()
    monkeypatch.setattr("scripts.export_hf.locate_checkpoint", lambda *_: tmp_path / "tiny" / "step_00000009")
    with pytest.raises(UserError, match="was removed by its run while it was chosen"):
        main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "other")])


def test_what_cannot_be_chosen(saved: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "hf")]
    with pytest.raises(UserError, match=r"is one of them; drop the flag"):
        main(["--checkpoint", str(saved / "step_00000003"), "--export", "best", *output])
    with pytest.raises(UserError, match="no such folder"):
        main(["--checkpoint", str(tmp_path / "lost"), "--export", "best", *output])


def test_a_run_without_a_best_checkpoint_or_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = write_run(tmp_path)
    with pytest.raises(UserError, match="has no best checkpoint, which a run with --keep_best"):
        main(["--checkpoint", str(saved), "--export", "best", "--output", str(tmp_path / "hf")])
    (tmp_path / "vocab.txt").unlink()
    assert main(["--checkpoint", str(saved), "--output", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert "(step 6, validation loss" in said
    assert "vocab.txt does not exist here); pass --tokenizer" in said


def test_a_run_with_keep_best_exports_its_best_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a learning rate that spoils the model, the first validation stays the best."""
    flags = ["--keep_best", "--learning_rate", "1000", "--set", "mixed_seq_training.24.warmup_proportion=0.9"]
    saved = write_run(tmp_path, *flags, "--export_dir", str(tmp_path / "hf"))
    best = CheckpointFolder(saved).best()
    assert best is not None
    assert f"export: {tmp_path / 'hf'} (step {int(best.tag[5:])}, the best checkpoint" in capsys.readouterr().out
    main(["--checkpoint", str(saved / best.tag), "--output", str(tmp_path / "again")])
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
