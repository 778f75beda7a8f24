"""Shards are written reproducibly and read back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data.shards import writer
from data.shards.schema import DATASETS
from data.shards.writer import _add_dataset, deflate_chunks, shard_bytes
from tests.unit.data.shards_on_disk import equal, make_rows, read_all


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


def test_a_shard_is_written_while_another_thread_writes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, others = shard_bytes(make_rows(9), {}), []

    def write_another(*arguments: Any) -> Iterator[bytes]:
        monkeypatch.undo()
        others.append(shard_bytes(make_rows(9), {}))
        return deflate_chunks(*arguments)

    monkeypatch.setattr(writer, "deflate_chunks", write_another)
    assert shard_bytes(make_rows(9), {}) == expected
    assert others == [expected]


@pytest.mark.parametrize("largest", [1, 200, 30_000, 100_000, 2**31 - 1, -5])
@pytest.mark.parametrize("shape", [(70, 20), (64, 200), (1, 3), (33,)])
def test_stock_hdf5_decodes_the_chunks(shape: tuple[int, ...], largest: int) -> None:
    """One to four planes, stored or coded, negative values, and a last chunk that is not full."""
    low, high = min(0, largest), max(1, largest)
    values = np.random.default_rng(0).integers(low, high, shape, dtype=np.int32, endpoint=True)
    narrow = values.astype(np.int8)
    with h5py.File("any", "w", driver="core", backing_store=False) as file:
        _add_dataset(file, "wide", values, 1)
        _add_dataset(file, "narrow", narrow, 1)
        assert np.array_equal(file["wide"][...], values)
        assert np.array_equal(file["narrow"][...], narrow)
