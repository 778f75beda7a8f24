"""Writes one shard: NVIDIA's layout, row-wise checksummed chunks, our attributes; whole or not at all."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from common.files import write_atomically
from data.shards.schema import ATTRIBUTE, DATASETS, FORMAT_VERSION, WORD_STARTS, Rows

CHUNK_ROWS = 256  # what the reader fetches at once; 256 rows of 128 tokens are about 240 kB
# Deflate is the one filter every HDF5 reader has, and the same bytes in give the same bytes out (h5py's lzf does not:
# its hash table starts uninitialised). Level 1: a quarter of the size for 8 µs a row; level 4 gains 3 % for 15 µs.
DEFLATE_LEVEL = 1


def write_shard(
    path: Path, rows: Rows, attributes: Mapping[str, Any], *, compression: int | None = DEFLATE_LEVEL
) -> bytes:
    """Write `rows` to `path` and return the bytes written: the same rows always give the same bytes."""
    content = shard_bytes(rows, attributes, compression=compression)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return content


def shard_bytes(rows: Rows, attributes: Mapping[str, Any], *, compression: int | None = DEFLATE_LEVEL) -> bytes:
    """The shard as a file image: a shard is bounded, its rows are in memory anyway, and an image can go anywhere."""
    buffer = io.BytesIO()
    # The v1.10 format carries a checksum on every piece of metadata, fletcher32 one on every chunk of data:
    # a flipped byte is an error when read, never other rows.
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        for name in DATASETS:
            _add_dataset(file, name, getattr(rows, name).astype(DATASETS[name][1], copy=False), compression)
        if rows.word_starts is not None:
            _add_dataset(file, WORD_STARTS, rows.word_starts, compression)
        described = {"format_version": FORMAT_VERSION, **attributes}
        # Bytes of a fixed length: they lie in the checksummed metadata, strings in a heap that has no checksum.
        file.attrs[ATTRIBUTE] = np.bytes_(json.dumps(described, sort_keys=True).encode())
    return buffer.getvalue()


def _add_dataset(file: h5py.File, name: str, values: np.ndarray, compression: int | None) -> None:
    rows = max(1, min(CHUNK_ROWS, len(values)))
    dataset = file.create_dataset(
        name,
        data=values,
        chunks=(rows, *values.shape[1:]),
        compression=compression,
        shuffle=compression is not None and values.itemsize > 1,
        fletcher32=True,
        track_times=False,
    )
    # Chunks get their places in the file when they are flushed. Left to the end of the object's life, that moment, and
    # so the bytes, would depend on when it is collected, which other threads can delay.
    dataset.flush()


def shard_name(split: str, index: int, total: int) -> str:
    """`training_0003_of_0012.hdf5`: the split is part of the name, which is how NVIDIA's tools tell them apart."""
    return f"{split}_{index:04d}_of_{total:04d}.hdf5"
