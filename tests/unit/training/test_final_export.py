"""--export_dir: the end of a run, and a finished run started again, leave a Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from common.errors import UserError
from tests.support import write_project
from tests.unit.training.in_process import run_here
from training.checkpoint import CheckpointFolder
from training.export import export_checkpoint


def check_export(folder: Path) -> None:
    """It is what the command line's export makes of the last checkpoint, and stock transformers loads it."""
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    export_checkpoint(checkpoints.folder / checkpoints.choose(None), folder / "later", None, None)
    expected = load_file(folder / "later" / "model.safetensors")
    found = load_file(folder / "hf" / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    AutoModelForMaskedLM.from_pretrained(folder / "hf")
    assert "| 3 |" in (folder / "hf" / "README.md").read_text()  # the last validation's figures


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_run_ends_with_an_export(stage: int, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage})
    run_here([*words, "--max_steps", "3", "--export_dir", str(tmp_path / "hf")])
    check_export(tmp_path)


def test_a_finished_run_exports_when_asked_later(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "3"]
    run_here(words)
    run_here([*words, "--export_dir", str(tmp_path / "hf")])
    check_export(tmp_path)


def test_a_file_in_its_place_is_refused_before_the_run(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "hf").write_text("")
    with pytest.raises(UserError, match=r"--export_dir .* is a file"):
        run_here([*words, "--export_dir", str(tmp_path / "hf")])
