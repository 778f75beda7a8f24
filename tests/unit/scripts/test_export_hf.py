"""Which checkpoint is exported, with which tokenizer, and what is printed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import UserError
from scripts.export_hf import main
from tests.support import VOCAB, read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.retention import Best, write_best


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
