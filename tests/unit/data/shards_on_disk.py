"""Small shards for tests; the content of a row identifies it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data.shards.dataset import PretrainingDataset, open_dataset
from data.shards.reader import ShardFile
from data.shards.schema import DATASETS, Rows
from data.shards.writer import shard_bytes

VOCAB_SIZE = 5000
SPECIAL_IDS = (0, 1, 2, 3, 4)
PAD, UNK, CLS, SEP, MASK = SPECIAL_IDS


def make_rows(count: int, first: int = 0, width: int = 24, predictions: int = 4, seed: int = 0) -> Rows:
    """Rows of two segments with random lengths and masks; token 1 of row k is 5 + (first + k)."""
    rng = np.random.default_rng([seed, first])
    ids = rng.integers(5, VOCAB_SIZE, (count, width)).astype(np.int32)
    ids[:, 1] = 5 + first + np.arange(count)
    lengths = rng.integers(8, width + 1, count)
    splits = rng.integers(3, lengths - 2)
    column = np.arange(width)
    input_mask = (column < lengths[:, None]).astype(np.int8)
    segments = ((column > splits[:, None]) & (input_mask == 1)).astype(np.int8)
    ids[:, 0] = CLS
    ids[np.arange(count), splits] = SEP
    ids[np.arange(count), lengths - 1] = SEP
    ids[input_mask == 0] = PAD
    positions = np.zeros((count, predictions), dtype=np.int32)
    labels = np.zeros((count, predictions), dtype=np.int32)
    for k in range(count):
        able = [c for c in range(2, lengths[k] - 1) if c != splits[k]]
        chosen = np.sort(rng.choice(able, size=min(predictions - 1, len(able)), replace=False))
        positions[k, : len(chosen)] = chosen
        labels[k, : len(chosen)] = ids[k, chosen]
        ids[k, chosen] = MASK
    return Rows(ids, input_mask, segments, positions, labels, rng.integers(0, 2, count).astype(np.int8))


def write_ours(
    folder: Path, sizes: list[int], split: str = "training", first: int = 0, **attributes: object
) -> list[Path]:
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{split}_{number:03d}.hdf5"
        write_shard(path, make_rows(size, first), attributes)
        first += size
        paths.append(path)
    return paths


def write_shard(path: Path, rows: Rows, attributes: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shard_bytes(rows, attributes))


def write_nvidias(path: Path, rows: Rows) -> Path:
    """Write a shard like NVIDIA's tool: gzip, automatic chunks, the old file format, no attributes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, (_, kind) in DATASETS.items():
            file.create_dataset(name, data=getattr(rows, name), dtype=kind, compression="gzip")
    return path


def write_with(path: Path, change: Callable[[h5py.File], None]) -> Path:
    write_nvidias(path, make_rows(50))
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def replaced(name: str, **options: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


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


def opened(*folders: Path, **options: object) -> PretrainingDataset:
    chosen = {"split": "training", "max_seq_length": 24, "max_predictions_per_seq": 4, **options}
    return open_dataset(folders, **chosen)  # type: ignore[arg-type]


def read_all(path: Path, vocab_size: int | None = VOCAB_SIZE) -> Rows:
    file = ShardFile(path)
    try:
        return file.read(0, file.layout.num_rows, vocab_size=vocab_size)
    finally:
        file.close()


def equal(a: Rows, b: Rows) -> bool:
    """Whether all arrays are equal, `word_starts` included."""
    return a.arrays.keys() == b.arrays.keys() and all(np.array_equal(a.arrays[k], b.arrays[k]) for k in a.arrays)
