"""The content of a shard's file: NVIDIA's layout, row-wise chunks with checksums, our attributes.

Chunks are compressed in the format of HDF5's filters for byte shuffling and deflate, in half of their time. Shuffling
puts the first bytes of all integers of a chunk before their second bytes, and so on: a plane for each byte of an
integer. Token ids are smaller than 65,536, so their upper planes are zeros, whose compressed form is the same in every
chunk. The others rarely repeat: they get Huffman codes, and no search for matches. One compressor serves all chunks of
a dataset; every flush ends a chunk that can be decompressed by itself.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import h5py
import numpy as np

from data.shards.schema import ATTRIBUTE, DATASETS, FORMAT_VERSION, WORD_STARTS, Rows

# Rows that are decoded together; eight such units are a block of the order of samples (data/stream/order.py). Smaller
# units let more ranks share a block without decoding it twice; 256 rows would save 6 % of the size and 2 µs per row.
CHUNK_ROWS = 32
# Every HDF5 reader supports deflate, and its output is reproducible (that of h5py's lzf is not: its hash table starts
# uninitialized). Level 1: a quarter of the size for 5 µs per row.
DEFLATE_LEVEL = 1
_HEADER = b"\x78\x01"  # of a zlib stream: deflate with a window of 32 kB, the fastest level
_MEMORY_LEVEL = 6  # a code for 4095 bytes; with 8191 for both planes of 32 rows, shards would be 6 % larger
_MIN_CODED = 4096  # bytes; a code for fewer low bytes takes longer than reading and writing the few bytes that it saves
_ADLER_MODULUS = 65521


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


def deflate_chunks(values: np.ndarray, chunk_rows: int, level: int) -> Iterator[bytes]:
    """Yield the zlib streams of chunks of `chunk_rows` rows, the last one filled with rows of zeros.

    Integers of several bytes are shuffled.
    """
    planes, num_zeros = _shuffled(values, chunk_rows)
    size = planes.shape[2]
    num_stored = 1 if values.itemsize > 1 and size < _MIN_CODED else 0
    block = struct.pack("<BHH", 0, size, size ^ 0xFFFF) if num_stored else b""
    has_runs = planes.max() <= 1  # masks and segments
    strategy = zlib.Z_DEFAULT_STRATEGY if has_runs else zlib.Z_HUFFMAN_ONLY
    compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL, strategy)
    end = _deflated_zeros(num_zeros)
    for chunk in planes:
        stored = block + chunk[0].tobytes() if num_stored else b""
        coded = b""
        if num_stored < len(chunk):
            coded = compressor.compress(chunk[num_stored:]) + compressor.flush(zlib.Z_FULL_FLUSH)
        checksum = _adler_with_zeros(zlib.adler32(chunk), num_zeros)
        yield b"".join((_HEADER, stored, coded, end, checksum.to_bytes(4, "big")))


def _shuffled(values: np.ndarray, chunk_rows: int) -> tuple[np.ndarray, int]:
    """Return [chunks, planes, bytes of a plane] without the last planes that are zeros, and the bytes of these."""
    num_chunks = -(-len(values) // chunk_rows)
    missing = num_chunks * chunk_rows - len(values)
    if missing:
        values = np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
    used = values.itemsize if values.min() < 0 else max(1, -(-int(values.max()).bit_length() // 8))
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    items = little.reshape(num_chunks, -1, 1).view(np.uint8)  # [chunks, integers of a chunk, bytes of an integer]
    planes = np.ascontiguousarray(items[:, :, :used].transpose(0, 2, 1))
    return planes, (values.itemsize - used) * items.shape[1]


def _deflated_zeros(count: int) -> bytes:
    """Return the last blocks of a deflate stream."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return compressor.compress(bytes(count)) + compressor.flush()


def _adler_with_zeros(checksum: int, count: int) -> int:
    """Return the Adler-32 checksum of bytes that have this one, followed by `count` zeros."""
    low, high = checksum & 0xFFFF, checksum >> 16
    return (high + count * low) % _ADLER_MODULUS << 16 | low


def shard_name(split: str, index: int, total: int) -> str:
    """`training_0003_of_0012.hdf5`: NVIDIA's tools also find the split of a file by its name."""
    return f"{split}_{index:04d}_of_{total:04d}.hdf5"
