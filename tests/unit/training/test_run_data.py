"""The datasets of a run: their weights in the stream, and which rows it is validated on."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import make_rows, read_metrics, write_nvidia_shard, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.inputs.datasets import open_data
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.resolve import resolve_settings
from training.validation import validation_rows


def test_weights_of_datasets_reach_the_stream(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    content = json.loads((tmp_path / "model.json").read_text())
    content["data"]["mixed_seq_datasets"]["24"]["other"] = "other"
    content["data"]["mixed_seq_weights"] = {"24": {"other": 1, "wiki": 3}}  # in another order than the datasets
    (tmp_path / "model.json").write_text(json.dumps(content))
    place = RankInfo(0, 0, 1, 1)
    (data,) = open_data(resolve_settings(read_arguments(words)[0], place).data, place).training
    assert data.weights == (3.0, 1.0)
    run_here([*words, "--max_steps", "20"])
    assert read_metrics(tmp_path, "train")[-1]["epoch"] == pytest.approx(20 * 8 / data.num_rows)


def test_validation_shards_with_the_other_suffix_are_found(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "held_out" / "24").mkdir(parents=True)
    (tmp_path / "data" / "wiki_test_0.hdf5").rename(tmp_path / "held_out" / "24" / "wiki_test_0.h5")
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**content, "validation": {"path": "held_out"}}))
    place = RankInfo(0, 0, 1, 1)
    validation = open_data(resolve_settings(read_arguments(words)[0], place).data, place).validation
    assert validation is not None
    assert [path.name for path in validation.files] == ["wiki_test_0.h5"]


def test_validation_rows_may_have_another_length_and_number_of_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows, padded to less and to more than the 24 tokens of training, have the same loss."""
    words = write_project(tmp_path)
    rows = make_rows(11, 16, 4, seed=9)
    found = []
    for width in (16, 32):
        added = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), width - 16)
        added |= dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), 2)
        wide = {name: np.pad(rows[name], ((0, 0), (0, more))) for name, more in added.items()}
        write_nvidia_shard(tmp_path / "held_out" / str(width) / "wiki_test_0.hdf5", rows | wide)
        content = json.loads((tmp_path / "model.json").read_text())
        content["validation"] = {"path": f"held_out/{width}"}
        (tmp_path / "model.json").write_text(json.dumps(content))
        run_here([*words, "--max_steps", "1", "--job_name", f"at_{width}"])
        assert f"validation   11 rows of {width} in 1 file" in capsys.readouterr().out
        found.append(read_metrics(tmp_path, "validation", f"at_{width}")[-1]["mlm_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_longer_rows_are_validated_fewer_at_a_time() -> None:
    assert [validation_rows(64, 128, length) for length in (64, 128, 512, 100_000)] == [64, 64, 16, 1]


def test_a_folder_without_validation_shards_means_no_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data.prepare` writes such a folder when the text is one document."""
    words = write_project(tmp_path)
    (tmp_path / "data" / "wiki_test_0.hdf5").unlink()
    assert resolve_settings(read_arguments(words)[0], RankInfo(0, 0, 1, 1)).validation_folder is None
    assert "has no shards with 'validation' or 'test' in their names" in capsys.readouterr().err
    for length in (8, 64):
        folder = tmp_path / "data" / str(length)
        folder.mkdir()
        (folder / "wiki_test_0.hdf5").touch()
    assert resolve_settings(read_arguments(words)[0], RankInfo(0, 0, 1, 1)).validation_folder is None
    assert "has shards for other lengths (8, 64), not for 24 tokens; training without" in capsys.readouterr().err


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    flags = ["--max_steps", "9", "--validate_every_steps", "1", "--keep_best", "--keep_last", "1"]
    run_here([*write_project(tmp_path), *flags])
    rows = read_metrics(tmp_path, "validation")
    lowest = min(rows, key=lambda row: row["mlm_loss"])
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    best = checkpoints.best()
    assert best is not None
    assert best.tag == f"step_{lowest['step']:08d}"
    assert best.mlm_loss == lowest["mlm_loss"]
    assert checkpoints.tags() == sorted({best.tag, "step_00000009"})
