"""The content of a shard's file: NVIDIA's layout, row-wise chunks with checksums, our attributes."""

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import h5py
import numpy as np

from data.shards.deflate import deflate_chunks
from data.shards.schema import ATTRIBUTE, DATASETS, FORMAT_VERSION, WORD_STARTS, Rows

# Rows that are decoded together; eight such units are a block of the order of samples (data/stream/order.py). Smaller
# units let more ranks share a block without decoding it twice; 256 rows would save 6 % of the size and 2 µs per row.
CHUNK_ROWS = 32
# Every HDF5 reader supports deflate, and its output is reproducible (that of h5py's lzf is not: its hash table starts
# uninitialized). Level 1: a quarter of the size for 5 µs per row.
DEFLATE_LEVEL = 1


def shard_bytes(rows: Rows, attributes: Mapping[str, Any], *, compression: int | None = DEFLATE_LEVEL) -> bytes:
    """The content of the file: the same rows always give the same bytes. It fits in memory, as the rows do."""
    # The v1.10 format has checksums on all metadata, and every chunk has one, fletcher32 or that of deflate: a flipped
    # byte is an error when read, never other rows. The file is only in memory; its name is not part of the content, but
    # HDF5 refuses two open files of one name, and another thread (of a Dask worker) may write a shard meanwhile.
    with h5py.File(uuid4().hex, "w", driver="core", backing_store=False, libver=("v110", "v110")) as file:
        for name in DATASETS:
            _add_dataset(file, name, getattr(rows, name).astype(DATASETS[name][1], copy=False), compression)
        if rows.word_starts is not None:
            _add_dataset(file, WORD_STARTS, rows.word_starts, compression)
        described = {"format_version": FORMAT_VERSION, **attributes}
        # Bytes of a fixed length, which are part of the checksummed metadata; strings are in a heap without checksum.
        file.attrs[ATTRIBUTE] = np.bytes_(json.dumps(described, sort_keys=True).encode())
        file.flush()
        return file.id.get_file_image()


def _add_dataset(file: h5py.File, name: str, values: np.ndarray, compression: int | None) -> None:
    rows = max(1, min(CHUNK_ROWS, len(values)))
    dataset = file.create_dataset(
        name,
        values.shape,
        values.dtype,
        chunks=(rows, *values.shape[1:]),
        compression=compression,
        shuffle=compression is not None and values.itemsize > 1,
        fletcher32=compression is None,
        track_times=False,
    )
    if compression is None:
        dataset[...] = values
        # Chunks get their offsets when they are flushed. Without this call that happens when the object is collected,
        # which other threads can delay, so the bytes would not be reproducible.
        dataset.flush()
        return
    beginning = (0,) * (values.ndim - 1)
    for number, chunk in enumerate(deflate_chunks(values, rows, compression)):
        dataset.id.write_direct_chunk((number * rows, *beginning), chunk)


def shard_name(split: str, index: int, total: int) -> str:
    """`training_0003_of_0012.hdf5`: NVIDIA's tools also find the split of a file by its name."""
    return f"{split}_{index:04d}_of_{total:04d}.hdf5"
