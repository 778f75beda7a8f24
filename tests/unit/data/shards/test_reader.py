"""A shard is untrusted: its structure and its values are checked."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from common.errors import UserError
from data.shards.reader import ShardFile
from data.shards.schema import DATASETS
from tests.unit.data.shards_on_disk import (
    VOCAB_SIZE,
    equal,
    make_rows,
    packed_twice,
    read_all,
    replaced,
    write_nvidias,
    write_with,
)


def test_nvidia_shards_are_valid(tmp_path: Path) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(300))
    assert equal(read_all(path), make_rows(300))
    assert ShardFile(path).layout.attributes is None


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


HOSTILE = {
    "soft link": (soft_link, "SoftLink"),
    "external link": (external_link, "ExternalLink"),
    "virtual": (virtual, "virtual dataset"),
    "group": (group, "is not a dataset"),
    "external storage": (
        replaced("input_ids", shape=(50, 24), dtype="i4", external=[("/etc/passwd", 0, 4800)]), "other files"
    ),
    "missing": (lambda file: file.pop("input_mask"), "no dataset 'input_mask'"),
    "floats": (replaced("input_ids", data=np.zeros((50, 24), np.float32)), "expected integers"),
    "objects": (replaced("input_ids", shape=(50, 24), dtype=h5py.string_dtype()), "expected integers"),
    "an enumeration": (
        replaced("input_ids", data=np.zeros((50, 24), np.int32), dtype=h5py.enum_dtype({"a": 0, "b": 1}, "i4")),
        "is an enumeration, expected plain integers",
    ),
    "three dimensions": (replaced("input_ids", data=np.zeros((50, 24, 1), np.int32)), "shape"),
    "other rows": (replaced("input_mask", data=np.zeros((49, 24), np.int8)), "expected"),
    "a bomb": (replaced("input_ids", shape=(2**40, 24), dtype="i4", chunks=(1024, 24), compression="gzip"), "chunks"),
    "a contiguous bomb": (replaced("input_ids", shape=(2**30, 24), dtype="i4"), "declares"),
    "nothing stored": (replaced("input_ids", shape=(50, 24), dtype="i4", chunks=(50, 24)), "but stores 0"),
    "a filter without bounds": (
        replaced("input_ids", data=np.zeros((50, 24), np.int32), compression="lzf"),
        "uses the filters lzf, expected gzip at most once.*h5repack -f GZIP=1 OLD NEW",
    ),
    "deflated twice": (packed_twice, "uses the filters deflate, deflate, expected gzip at most once"),
    "no rows": (replaced("input_ids", shape=(0, 24), dtype="i4"), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_structure_is_refused(tmp_path: Path, kind: str) -> None:
    change, message = HOSTILE[kind]
    path = write_with(tmp_path / "training_0.hdf5", change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


def test_too_long_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "training_0.hdf5"
    with h5py.File(path, "w") as file:
        for name, (letters, kind) in DATASETS.items():
            shape = tuple({"N": 2, "S": 9000, "P": 4}[letter] for letter in letters)
            file.create_dataset(name, data=np.zeros(shape, kind))
    with pytest.raises(UserError, match="found 9,000 tokens and 4 predictions, expected up to 8,192"):
        read_all(path)


def test_a_too_large_chunk_is_refused(tmp_path: Path) -> None:
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
def test_values_out_of_range_are_refused(tmp_path: Path, kind: str) -> None:
    name, index, value = BAD_VALUES[kind]
    rows = make_rows(50)
    if kind == "positions after the end":
        rows.masked_lm_positions[3, 2] = 0
    getattr(rows, name)[index] = value
    path = write_nvidias(tmp_path / "training_0.hdf5", rows)
    with pytest.raises(UserError, match="rows 0–49"):
        read_all(path)


def test_a_prediction_in_the_padding_is_refused(tmp_path: Path) -> None:
    rows = make_rows(50)
    short = int(np.argmin(rows.input_mask.sum(axis=1)))
    rows.masked_lm_positions[short, 0] = 23
    with pytest.raises(UserError, match="padding"):
        read_all(write_nvidias(tmp_path / "training_0.hdf5", rows))


def test_values_that_would_wrap_around_are_refused(tmp_path: Path) -> None:
    wide = make_rows(50).input_ids.astype(np.int64)
    wide[3, 1] += 2**32  # the same value in 32 bits
    path = write_with(tmp_path / "training_0.hdf5", replaced("input_ids", data=wide))
    with pytest.raises(UserError, match="input_ids outside"):
        read_all(path)


def test_two_names_of_one_dataset_are_refused(tmp_path: Path) -> None:
    def link(file: h5py.File) -> None:
        del file["segment_ids"]
        file["segment_ids"] = file["input_mask"]

    with pytest.raises(UserError, match="same bytes"):
        read_all(write_with(tmp_path / "training_0.hdf5", link))
