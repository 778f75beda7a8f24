"""A shard is hostile until checked."""

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from common.errors import UserError
from data.shards import dataset as shards
from data.shards import hdf5_checks, reader
from data.shards.dataset import PretrainingDataset, check_apart, check_tokenizer, open_dataset, split_of
from data.shards.reader import ShardFile
from data.shards.schema import DATASETS, MANIFEST_NAME
from data.shards.writer import shard_bytes
from tests.unit.data.shards_on_disk import (
    VOCAB_SIZE,
    equal,
    make_rows,
    read_all,
    replaced,
    write_nvidias,
    write_ours,
    write_with,
)


def opened(folder: Path, **options: object) -> PretrainingDataset:
    settings = {"split": "training", "max_seq_length": 24, "max_predictions_per_seq": 4, **options}
    return open_dataset([folder], **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", [None, 1])
def test_what_is_written_is_read_and_the_bytes_are_always_the_same(tmp_path: Path, compression: int | None) -> None:
    rows = make_rows(300).replace(word_starts=np.arange(900, dtype=np.uint8).reshape(300, 3))
    content = shard_bytes(rows, {"seed": 1}, compression=compression)
    assert content == shard_bytes(rows, {"seed": 1}, compression=compression)
    (tmp_path / "a.hdf5").write_bytes(content)
    found = read_all(tmp_path / "a.hdf5")
    assert equal(found, rows)
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert {name: file[name].dtype for name in DATASETS} == {
            name: np.dtype(kind) for name, (_, kind) in DATASETS.items()
        }


def test_the_bytes_do_not_depend_on_when_objects_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(600)
    expected = shard_bytes(rows, {})
    held = []
    create = h5py.Group.create_dataset

    def create_and_hold(*arguments: object, **options: object) -> h5py.Dataset:
        held.append(create(*arguments, **options))
        return held[-1]

    monkeypatch.setattr(h5py.Group, "create_dataset", create_and_hold)
    assert shard_bytes(rows, {}) == expected
    assert len(held) == len(DATASETS)


def test_nvidia_s_shards_are_good_data(tmp_path: Path) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(300))
    assert equal(read_all(path), make_rows(300))
    assert ShardFile(path).attributes is None


def test_the_messages_name_the_file_the_flag_and_the_remedy(tmp_path: Path) -> None:
    write_ours(tmp_path, [5])
    with pytest.raises(
        UserError,
        match=r"training_000.hdf5: rows are 24 tokens wide, but --max_seq_length is 512; .*pass --max_seq_length 24",
    ):
        opened(tmp_path, max_seq_length=512)
    with pytest.raises(UserError, match="--max_predictions_per_seq is 2; pass --max_predictions_per_seq 4"):
        opened(tmp_path, max_predictions_per_seq=2)
    with pytest.raises(UserError, match=r"no such folder; .*data.prepare"):
        opened(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no HDF5 file.*data.prepare"):
        opened(tmp_path / "empty")
    with pytest.raises(UserError, match="none with 'validation' in its name"):
        opened(tmp_path, split="validation")


def test_all_bad_files_are_told_at_once(tmp_path: Path) -> None:
    write_ours(tmp_path, [5, 5, 5])
    (tmp_path / "training_000.hdf5").write_text("no HDF5 at all")
    (tmp_path / "training_002.hdf5").write_bytes((tmp_path / "training_002.hdf5").read_bytes()[:1000])
    with pytest.raises(UserError) as caught:
        opened(tmp_path)
    assert "training_000.hdf5: is no HDF5 file" in str(caught.value)
    assert "training_002.hdf5: is damaged or incomplete" in str(caught.value)
    assert "training_001" not in str(caught.value)


def test_nvidia_s_test_files_serve_as_validation(tmp_path: Path) -> None:
    write_ours(tmp_path, [5], split="test")
    assert opened(tmp_path, split="validation").num_rows == 5


def soft_link(file: h5py.File) -> None:
    file["elsewhere"] = file["input_ids"][:]
    del file["input_ids"]
    file["input_ids"] = h5py.SoftLink("/elsewhere")


def external_link(file: h5py.File) -> None:
    del file["input_ids"]
    file["input_ids"] = h5py.ExternalLink("/etc/passwd", "/input_ids")


def virtual(file: h5py.File) -> None:
    del file["input_ids"]
    layout = h5py.VirtualLayout(shape=(50, 24), dtype="i4")
    layout[:] = h5py.VirtualSource("other.hdf5", "input_ids", shape=(50, 24))
    file.create_virtual_dataset("input_ids", layout)


def group(file: h5py.File) -> None:
    del file["input_ids"]
    file.create_group("input_ids")


def packed_twice(file: h5py.File) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((50, 24))
    creation.set_deflate(1)
    creation.set_deflate(1)
    del file["input_ids"]
    space = h5py.h5s.create_simple((50, 24))
    h5py.h5d.create(file.id, b"input_ids", h5py.h5t.STD_I32LE, space, creation).write(
        h5py.h5s.ALL, h5py.h5s.ALL, np.zeros((50, 24), np.int32)
    )


HOSTILE = {
    "soft link": (soft_link, "SoftLink"),
    "external link": (external_link, "ExternalLink"),
    "virtual": (virtual, "virtual dataset"),
    "group": (group, "is no dataset"),
    "external storage": (
        replaced("input_ids", shape=(50, 24), dtype="i4", external=[("/etc/passwd", 0, 4800)]), "other files"
    ),
    "missing": (lambda file: file.pop("input_mask"), "no dataset 'input_mask'"),
    "floats": (replaced("input_ids", data=np.zeros((50, 24), np.float32)), "not integers"),
    "objects": (replaced("input_ids", shape=(50, 24), dtype=h5py.string_dtype()), "not integers"),
    "an enumeration": (
        replaced("input_ids", data=np.zeros((50, 24), np.int32), dtype=h5py.enum_dtype({"a": 0, "b": 1}, "i4")),
        "names of numbers, not plain integers",
    ),
    "three dimensions": (replaced("input_ids", data=np.zeros((50, 24, 1), np.int32)), "shape"),
    "other rows": (replaced("input_mask", data=np.zeros((49, 24), np.int8)), "expected"),
    "a bomb": (replaced("input_ids", shape=(2**40, 24), dtype="i4", chunks=(1024, 24), compression="gzip"), "chunks"),
    "a contiguous bomb": (replaced("input_ids", shape=(2**30, 24), dtype="i4"), "declares"),
    "nothing stored": (replaced("input_ids", shape=(50, 24), dtype="i4", chunks=(50, 24)), "but stores 0"),
    "a packing without bounds": (
        replaced("input_ids", data=np.zeros((50, 24), np.int32), compression="lzf"),
        "packed with lzf, not once with gzip.*h5repack -f GZIP=1 OLD NEW",
    ),
    "packed twice": (packed_twice, "packed with deflate, deflate, not once with gzip"),
    "no rows": (replaced("input_ids", shape=(0, 24), dtype="i4"), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_structure_is_refused(tmp_path: Path, kind: str) -> None:
    change, message = HOSTILE[kind]
    path = write_with(tmp_path / "training_0.hdf5", change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


def test_rows_wider_than_any_model_reads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "training_0.hdf5"
    with h5py.File(path, "w") as file:
        for name, (letters, kind) in DATASETS.items():
            shape = tuple({"N": 2, "S": 9000, "P": 4}[letter] for letter in letters)
            file.create_dataset(name, data=np.zeros(shape, kind))
    with pytest.raises(UserError, match="declares rows of 9,000 tokens and 4 predictions, expected up to 8,192"):
        read_all(path)


def test_a_chunk_larger_than_memory_should_hold_is_refused(tmp_path: Path) -> None:
    change = replaced("input_ids", shape=(2**22, 24), dtype="i4", chunks=(2**22, 24), compression="gzip")
    with pytest.raises(UserError, match="chunks of"):
        read_all(write_with(tmp_path / "training_0.hdf5", change))


BAD_VALUES = {
    "ids beyond the vocabulary": ("input_ids", (3, 5), VOCAB_SIZE),
    "negative ids": ("input_ids", (3, 5), -1),
    "labels beyond the vocabulary": ("masked_lm_ids", (3, 0), VOCAB_SIZE),
    "positions beyond the row": ("masked_lm_positions", (3, 0), 24),
    "positions after the end": ("masked_lm_positions", (3, 3), 5),
    "a mask of 2": ("input_mask", (3, 1), 2),
    "a segment of 2": ("segment_ids", (3, 1), 2),
    "a label of 2": ("next_sentence_labels", (3,), 2),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_values_out_of_range_are_refused_with_the_rows(tmp_path: Path, kind: str) -> None:
    name, place, value = BAD_VALUES[kind]
    rows = make_rows(50)
    if kind == "positions after the end":
        rows.masked_lm_positions[3, 2] = 0
    getattr(rows, name)[place] = value
    path = write_nvidias(tmp_path / "training_0.hdf5", rows)
    with pytest.raises(UserError, match="rows 0–49"):
        read_all(path)


def test_a_prediction_in_the_padding_is_refused(tmp_path: Path) -> None:
    rows = make_rows(50)
    short = int(np.argmin(rows.input_mask.sum(axis=1)))
    rows.masked_lm_positions[short, 0] = 23
    with pytest.raises(UserError, match="padding"):
        read_all(write_nvidias(tmp_path / "training_0.hdf5", rows))


def test_the_manifest_finds_other_sizes_and_on_request_other_content(tmp_path: Path) -> None:
    (path,) = write_ours(tmp_path, [50])
    content = path.read_bytes()
    entry = {"name": path.name, "rows": 50, "bytes": len(content), "sha256": "0" * 64}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"files": [entry]}))
    opened(tmp_path)
    with pytest.raises(UserError, match="sha256"):
        opened(tmp_path, verify=True)
    path.write_bytes(content + b"x")
    with pytest.raises(UserError, match="the manifest says"):
        opened(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("[]")
    with pytest.raises(UserError, match="no manifest"):
        opened(tmp_path)


def test_the_manifest_finds_missing_files_and_strangers(tmp_path: Path) -> None:
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
    write_ours(tmp_path, [9], split="test")  # would serve as validation where there never was any
    with pytest.raises(UserError, match=r"validation_000.hdf5: is missing"):
        opened(tmp_path, split="validation")


def test_shards_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    for name, digest in (("a", "one"), ("b", "two")):
        write_ours(tmp_path / name, [5], tokenizer_digest=digest)
    write_nvidias(tmp_path / "c" / "training_0.hdf5", make_rows(5))
    options = {"split": "training", "max_seq_length": 24, "max_predictions_per_seq": 4}
    with pytest.raises(UserError, match=r"b/training_000.hdf5: was made with another tokenizer than .*a/training_000"):
        open_dataset([tmp_path / "a", tmp_path / "c", tmp_path / "b"], **options)  # type: ignore[arg-type]
    mixed = open_dataset([tmp_path / "c", tmp_path / "b"], **options)  # type: ignore[arg-type]
    assert mixed.tokenizer_digest == "two"
    check_tokenizer([mixed], "two")
    check_tokenizer([mixed], None)
    with pytest.raises(UserError, match="another tokenizer than the model JSON's bert_token_file"):
        check_tokenizer([mixed], "one")
    with pytest.raises(UserError, match="another tokenizer than"):
        check_tokenizer([mixed, opened(tmp_path / "a")], None)


def test_ranks_share_the_files_that_are_compared_with_their_digests(tmp_path: Path) -> None:
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


def test_validation_data_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    (path,) = write_ours(tmp_path, [50])
    (other,) = write_ours(tmp_path, [50], split="validation", first=50)
    check_apart([opened(tmp_path)], opened(tmp_path, split="validation"))
    other.unlink()
    other.symlink_to(path)
    with pytest.raises(UserError, match=r"validation_000.hdf5: is validation data, but .*training_000.hdf5"):
        check_apart([opened(tmp_path)], opened(tmp_path, split="validation"))
    other.unlink()
    other.write_bytes(path.read_bytes())
    digest = {"rows": 50, "bytes": path.stat().st_size, "sha256": "0" * 64}
    manifest = {"files": [{"name": name, **digest} for name in (path.name, other.name)]}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is the same file and is trained on"):
        check_apart([opened(tmp_path)], opened(tmp_path, split="validation"))


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    write_ours(tmp_path, [5])
    with pytest.raises(UserError, match="named twice"):
        open_dataset([tmp_path, tmp_path / "."], split="training", max_seq_length=24, max_predictions_per_seq=4)


def test_values_that_would_wrap_around_are_refused(tmp_path: Path) -> None:
    wide = make_rows(50).input_ids.astype(np.int64)
    wide[3, 1] += 2**32  # the same number in 32 bits
    path = write_with(tmp_path / "training_0.hdf5", replaced("input_ids", data=wide))
    with pytest.raises(UserError, match="input_ids outside"):
        read_all(path)


def test_two_names_of_one_dataset_are_refused(tmp_path: Path) -> None:
    def link(file: h5py.File) -> None:
        del file["segment_ids"]
        file["segment_ids"] = file["input_mask"]

    with pytest.raises(UserError, match="same bytes"):
        read_all(write_with(tmp_path / "training_0.hdf5", link))


def test_a_shard_that_vanishes_during_a_run_is_told(tmp_path: Path) -> None:
    (path,) = write_ours(tmp_path, [50])
    dataset = opened(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"training_000.hdf5: no such file; expected a shard; check the folder"):
        dataset.read(0, 0, 5)


def test_a_file_opened_again_is_checked_again_only_if_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_nvidias(tmp_path / f"training_{number}.hdf5", make_rows(50, 50 * number)) for number in range(2)]
    monkeypatch.setattr(shards, "_OPEN_FILES", 1)
    dataset = opened(tmp_path)
    checked: list[str] = []

    def look(part: h5py.Dataset, size: int) -> str | None:
        checked.append(part.file.filename)
        return hdf5_checks.reason_to_refuse(part, size)

    monkeypatch.setattr(reader, "reason_to_refuse", look)
    for number in (0, 1, 0, 1):
        assert equal(dataset.read(number, 0, 50), make_rows(50, 50 * number))
    assert checked == []
    os.utime(paths[0], (1, 1))  # as writing to it would, however coarse the clock of the file system
    assert len(dataset.read(0, 0, 5)) == 5
    assert checked == [str(paths[0])] * len(DATASETS)
    write_with(tmp_path / "other", packed_twice).replace(paths[1])
    with pytest.raises(UserError, match="packed with deflate, deflate"):
        dataset.read(1, 0, 5)
