"""Folders of shards are found, checked and opened as one dataset."""

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from common.errors import UserError
from data.shards import dataset as shards
from data.shards import reader, report, structure
from data.shards.chunks import ChunkTable
from data.shards.folder import split_of
from data.shards.report import text_tokens
from data.shards.schema import DATASETS, MANIFEST_NAME, concatenate_rows
from data.shards.statistics import log_frequencies
from tests.unit.data.shards_on_disk import (
    VOCAB_SIZE,
    equal,
    make_rows,
    opened,
    packed_twice,
    write_nvidias,
    write_ours,
    write_with,
)


def test_messages_name_the_file_the_flag_and_the_remedy(tmp_path: Path) -> None:
    write_ours(tmp_path, [5])
    with pytest.raises(
        UserError,
        match=r"training_000.hdf5: rows are 24 tokens wide, but --max_seq_length is 512\. .*pass --max_seq_length 24\.",
    ):
        opened(tmp_path, max_seq_length=512)
    with pytest.raises(UserError, match=r"--max_predictions_per_seq is 2\. Pass --max_predictions_per_seq 4"):
        opened(tmp_path, max_predictions_per_seq=2)
    with pytest.raises(UserError, match=r"no such folder .*data.prepare"):
        opened(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no HDF5 file.*data.prepare"):
        opened(tmp_path / "empty")
    with pytest.raises(UserError, match="none with 'validation' in its name"):
        opened(tmp_path, split="validation")


def test_all_bad_files_are_reported_together(tmp_path: Path) -> None:
    write_ours(tmp_path, [5, 5, 5])
    (tmp_path / "training_000.hdf5").write_text("no HDF5 at all")
    (tmp_path / "training_002.hdf5").write_bytes((tmp_path / "training_002.hdf5").read_bytes()[:1000])
    with pytest.raises(UserError) as caught:
        opened(tmp_path)
    assert "training_000.hdf5: is not an HDF5 file" in str(caught.value)
    assert "training_002.hdf5: is damaged or incomplete" in str(caught.value)
    assert "training_001" not in str(caught.value)


def test_nvidia_test_files_serve_as_validation(tmp_path: Path) -> None:
    write_ours(tmp_path, [5], split="test")
    assert opened(tmp_path, split="validation").num_rows == 5


def test_files_are_compared_with_the_manifest(tmp_path: Path) -> None:
    (path,) = write_ours(tmp_path, [50])
    content = path.read_bytes()
    entry = {"name": path.name, "rows": 50, "bytes": len(content), "sha256": "0" * 64}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"files": [entry]}))
    opened(tmp_path)
    with pytest.raises(UserError, match="sha256"):
        opened(tmp_path, verify=True)
    path.write_bytes(content + b"x")
    with pytest.raises(UserError, match="its size differs from the manifest"):
        opened(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("[]")
    with pytest.raises(UserError, match="is not a manifest"):
        opened(tmp_path)


def test_missing_and_unlisted_files_are_reported(tmp_path: Path) -> None:
    paths = write_ours(tmp_path, [50, 50]) + write_ours(tmp_path, [9], split="validation")
    entries = [
        {"name": path.name, "rows": 9 if "validation" in path.name else 50, "bytes": path.stat().st_size, "sha256": "0"}
        for path in paths
    ]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"files": entries}))
    opened(tmp_path)
    paths[1].rename(tmp_path / "training_007.hdf5")
    with pytest.raises(UserError) as caught:
        opened(tmp_path)
    assert "training_001.hdf5: is missing, but manifest.json lists it" in str(caught.value)
    assert "training_007.hdf5: is not listed in the manifest.json" in str(caught.value)
    opened(tmp_path, split="validation")
    paths[2].unlink()
    write_ours(tmp_path, [9], split="test")  # would serve as validation data if the manifest listed none
    with pytest.raises(UserError, match=r"validation_000.hdf5: is missing"):
        opened(tmp_path, split="validation")


def test_ranks_share_the_verification_of_digests(tmp_path: Path) -> None:
    paths = write_ours(tmp_path, [50, 50])
    entries = [
        {"name": path.name, "rows": 50, "bytes": path.stat().st_size, "sha256": f"{number}" * 64}
        for number, path in enumerate(paths)
    ]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"files": entries}))
    for rank in (0, 1):
        with pytest.raises(UserError, match=f"training_00{rank}.hdf5: its content") as caught:
            opened(tmp_path, verify=True, share=(rank, 2))
        assert f"training_00{1 - rank}" not in str(caught.value)


def test_a_file_is_in_one_split_only(tmp_path: Path) -> None:
    names = {
        "wiki_latest_training_0.hdf5": "training",  # "latest" holds "test"
        "training_validation_0.hdf5": "training",
        "validation_test_0.hdf5": "validation",
        "wiki_test_0.h5": "test",
        "wiki_0.hdf5": None,
    }
    assert {name: split_of(tmp_path / name) for name in names} == names
    write_nvidias(tmp_path / "wiki_latest_training_0.hdf5", make_rows(5))
    with pytest.raises(UserError, match="none with 'validation' in its name"):
        opened(tmp_path, split="validation")


def test_no_folder_and_a_folder_listed_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data folder was given"):
        opened()
    write_ours(tmp_path, [5])
    with pytest.raises(UserError, match="listed twice"):
        opened(tmp_path, tmp_path / ".")


def test_a_shard_deleted_during_a_run_is_reported(tmp_path: Path) -> None:
    (path,) = write_ours(tmp_path, [50])
    dataset = opened(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"training_000.hdf5: no such file \(expected a shard\)\. Check the folder"):
        dataset.read(0, 0, 5)


def test_a_reopened_file_is_checked_again_only_if_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_nvidias(tmp_path / f"training_{number}.hdf5", make_rows(50, 50 * number)) for number in range(2)]
    monkeypatch.setattr(shards, "_MAX_OPEN_FILES", 1)
    dataset = opened(tmp_path)
    checked: list[str] = []

    def check(part: h5py.Dataset, size: int) -> ChunkTable:
        checked.append(part.file.filename)
        return structure.check_dataset(part, size)

    monkeypatch.setattr(reader, "check_dataset", check)
    for number in (0, 1, 0, 1):
        assert equal(dataset.read(number, 0, 50), make_rows(50, 50 * number))
    assert checked == []
    os.utime(paths[0], (1, 1))  # as a write would, whatever the resolution of the file system's clock
    assert len(dataset.read(0, 0, 5)) == 5
    assert checked == [str(paths[0])] * len(DATASETS)
    write_with(tmp_path / "other", packed_twice).replace(paths[1])
    with pytest.raises(UserError, match="uses the filters deflate, deflate"):
        dataset.read(1, 0, 5)


@pytest.mark.parametrize(("max_bytes", "opened_by_hdf5"), [(960, 0), (900, 1), (0, 3)])
def test_files_are_opened_by_hdf5_once_their_tables_take_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, opened_by_hdf5: int
) -> None:
    write_ours(tmp_path, [500, 40, 40])  # 16, 2 and 2 chunks of each of the six datasets, 8 bytes in a table for each
    monkeypatch.setattr(shards, "_MAX_TABLE_BYTES", max_bytes)
    dataset = opened(tmp_path)
    files: list[Path] = []
    opening = reader._open
    monkeypatch.setattr(reader, "_open", lambda path: files.append(path) or opening(path))
    assert equal(dataset.read_range(0, 580), concatenate_rows([make_rows(500), make_rows(40, 500), make_rows(40, 540)]))
    assert len(files) == opened_by_hdf5


def test_frequencies_come_from_rows_over_the_whole_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets are often several corpora in a row, so the first rows alone would not represent them."""
    write_ours(tmp_path, [30, 50, 20])
    data = opened(tmp_path)
    every = np.exp(log_frequencies(data, VOCAB_SIZE))
    assert every.sum() == pytest.approx(1.0)
    counts = np.bincount(text_tokens(data.read_range(0, 100)), minlength=VOCAB_SIZE)
    assert every == pytest.approx((counts + 1) / (counts + 1).sum())
    monkeypatch.setattr("data.shards.statistics.SAMPLED_PLACES", 4)
    monkeypatch.setattr("data.shards.statistics.SAMPLED_ROWS", 5)
    sampled = [data.read_range(start, start + 5) for start in (0, 25, 50, 75)]
    counts = np.bincount(np.concatenate([text_tokens(rows) for rows in sampled]), minlength=VOCAB_SIZE)
    assert np.exp(log_frequencies(data, VOCAB_SIZE)) == pytest.approx((counts + 1) / (counts + 1).sum())


def test_the_rows_of_a_report_are_spread_over_all_shards_and_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SAMPLE_ROWS", 40)
    monkeypatch.setattr(report, "_ROWS_AT_ONCE", 8)
    write_ours(tmp_path, [20, 45, 3, 30])
    data = opened(tmp_path)
    found = report.describe(data, "training", None)
    assert 32 < found.rows_looked_at <= 40
    assert found.repeated_rows_share == 0
    sampled = {int(row) // 8 for row in report._sample(data).input_ids[:, 1] - 5}
    assert {0, 11} <= sampled, "the first and the last rows"
