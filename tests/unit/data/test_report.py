"""What inspecting says of good and of bad data, and the unigram cross entropy."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data import inspect
from data.schema import Rows
from data.shards import PretrainingDataset, open_dataset
from data.statistics import text_tokens, unigram_cross_entropy
from data.writer import write_shard
from tests.unit.data.shards_on_disk import CLS, SEP, make_rows, write_nvidias


def test_inspect_describes_nvidia_s_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(400)
    write_nvidias(tmp_path / "training_0.hdf5", rows)
    assert inspect.main([str(tmp_path), "--report_dir", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr()
    assert "400 in 1 files" in printed.out
    assert "few" in printed.err
    report = json.loads((tmp_path / "report" / "report.json").read_text())["splits"][0]
    assert report["fill"] == pytest.approx(rows.input_mask.mean(), rel=1e-6)
    assert sum(report["lengths"]) == 400
    assert (tmp_path / "report" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report" / "report.md").read_text().startswith(f"# {tmp_path}")


def test_inspect_warns_of_data_that_leaves_a_loss_stuck(tmp_path: Path) -> None:
    rows = make_rows(10)
    repeated = rows.take(np.tile(np.arange(10), 20)).replace(next_sentence_labels=np.zeros(200, dtype=np.int8))
    write_nvidias(tmp_path / "training_0.hdf5", repeated)
    (found,) = inspect.inspect_folder(tmp_path, None)
    assert any("repeat" in warning for warning in found.warnings)
    assert any("labelled 1" in warning for warning in found.warnings)


def test_inspect_tells_what_is_no_folder_of_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        inspect.main([str(tmp_path / "absent")])
    with pytest.raises(UserError, match=r"no \.hdf5 file"):
        inspect.main([str(tmp_path)])


def dataset_of(folder: Path, rows: Rows) -> PretrainingDataset:
    write_shard(folder / "training_0.hdf5", rows, {})
    return open_dataset([folder], split="training", max_seq_length=24, max_predictions_per_seq=4)


def test_text_tokens_leave_specials_and_padding_out() -> None:
    rows = make_rows(50)
    tokens = text_tokens(rows)
    assert len(tokens) == rows.input_mask.sum() - 3 * 50
    assert not np.isin(tokens, [0, CLS, SEP]).any()


def test_unigram_cross_entropy_is_that_of_the_formula(tmp_path: Path) -> None:
    training, validation = make_rows(60, seed=1), make_rows(30, seed=2)
    found = unigram_cross_entropy(dataset_of(tmp_path / "t", training), dataset_of(tmp_path / "v", validation), 20)
    counts = np.bincount(text_tokens(training), minlength=5000)
    targets = validation.masked_lm_ids[:20][validation.masked_lm_positions[:20] > 0]
    size = max(targets.max(), text_tokens(training).max()) + 1
    total = counts.sum() + size
    expected = -np.mean([math.log((counts[target] + 1) / total) for target in targets])
    assert found == pytest.approx(expected, rel=1e-9)
