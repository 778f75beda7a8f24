"""Reads rows of one HDF5 dataset; decompresses deflated chunks up to the size they declare and no further.

HDF5 decompresses a chunk to any size and does not compare it with the declared one: reading a deflate bomb of 306 kB
with h5py took 300 MB and raised no error. The other accepted filters do not expand, so HDF5 reads those datasets.
Where chunks are stored is known from the checks of a file, so they are read without HDF5, neighbours in one call.
"""

import math
import os
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

import h5py
import numpy as np

SHUFFLE, DEFLATE, FLETCHER32 = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32
CHECKSUM_BYTES = 4  # that Fletcher-32 appends to a chunk


class ChunkTable(NamedTuple):
    """Where the chunks of a dataset are stored, ordered by their rows, then by their columns; none of them overlap."""

    starts: np.ndarray  # [chunks] bytes from the beginning of the file
    sizes: np.ndarray  # [chunks] bytes as stored


class DamagedChunk(ValueError):
    """A chunk does not decode to what its dataset declares."""


def filters_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Ids of the dataset's filters in the order in which a writer applies them."""
    creation = dataset.id.get_create_plist()
    return tuple(creation.get_filter(i)[0] for i in range(creation.get_nfilters()))


class StoredRows:
    """How the rows of a dataset are stored that passed the checks of `data.shards.structure`; 1 or 2 dimensions."""

    def __init__(self, dataset: h5py.Dataset, table: ChunkTable | None) -> None:
        """With a `table`, deflated rows are read from the file itself, and `dataset` is not kept."""
        self._filters = filters_of(dataset)
        self._dtype, self._num_dims, self._row_shape = dataset.dtype, dataset.ndim, dataset.shape[1:]
        self._width = math.prod(self._row_shape)
        if dataset.chunks is not None:
            self._chunk_shape = dataset.chunks[0], math.prod(dataset.chunks[1:])
            self._chunk_bytes = math.prod(self._chunk_shape) * self._dtype.itemsize
        self._is_shuffled = SHUFFLE in self._filters and self._dtype.itemsize > 1
        self.table = table if DEFLATE in self._filters else None
        self._dataset = dataset if self.table is None else None

    def read(self, stream: IO[bytes], start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the open file in a new array. Decodes every chunk that holds one of them."""
        if start >= stop:
            return np.empty((0, *self._row_shape), self._dtype)
        if self._dataset is not None and DEFLATE not in self._filters:
            return self._dataset[start:stop]
        height, chunk_width = self._chunk_shape
        first, end, num_columns = start // height, -(-stop // height), -(-self._width // chunk_width)
        if self._dataset is not None:
            stored = list(self._look_up_chunks(self._dataset, first, end))
        else:
            stored = self._read_chunks(stream, first * num_columns, end * num_columns)
        # Fletcher-32 is not compared: the deflated bytes end with a checksum of their own.
        stop_at = -CHECKSUM_BYTES if FLETCHER32 in self._filters else None
        content = b"".join(_inflate(chunk[:stop_at], self._chunk_bytes) for chunk in stored)
        if self._is_shuffled:
            items = _unshuffle(content, (end - first) * num_columns, self._dtype.itemsize)
        else:
            items = np.frombuffer(content, np.uint8)
        chunks = items.reshape(-1).view(self._dtype).reshape(end - first, num_columns, height, chunk_width)
        rows = chunks.swapaxes(1, 2).reshape((end - first) * height, -1)  # a copy only if a row has several chunks
        values = rows[start - first * height : stop - first * height, : self._width]
        is_whole = values.size == items.size // self._dtype.itemsize and items.flags.writeable
        return (values if is_whole else np.array(values)).reshape(-1, *self._row_shape)

    def _read_chunks(self, stream: IO[bytes], first: int, end: int) -> list[memoryview]:
        """The stored bytes of the chunks [first, end) of the table."""
        assert self.table is not None
        starts, sizes = self.table.starts[first:end].tolist(), self.table.sizes[first:end].tolist()
        places = list(zip(starts, sizes, strict=True))
        begin = min(starts)
        span = max(start + size for start, size in places) - begin
        if span > 2 * sum(sizes):
            return [_read_bytes(stream, start, size) for start, size in places]
        content = _read_bytes(stream, begin, span)
        return [content[start - begin : start - begin + size] for start, size in places]

    def _look_up_chunks(self, dataset: h5py.Dataset, first: int, end: int) -> Iterator[memoryview]:
        """The stored bytes of the chunks of the rows of chunks [first, end), found by HDF5."""
        height, chunk_width = self._chunk_shape
        for row in range(first * height, end * height, height):
            for column in range(0, self._width, chunk_width):
                # By its offset: HDF5 raises an error if the chunk is missing, where a slice would read zeros.
                mask, content = dataset.id.read_direct_chunk((row, column)[: self._num_dims])
                if mask:
                    raise DamagedChunk("a chunk was stored without its filters")
                yield memoryview(content)


def _read_bytes(stream: IO[bytes], start: int, size: int) -> memoryview:
    content = os.pread(stream.fileno(), size, start)
    while len(content) < size:
        more = os.pread(stream.fileno(), size - len(content), start + len(content))
        if not more:
            raise DamagedChunk(f"a chunk ends {size - len(content):,} bytes after the end of the file")
        content += more
    return memoryview(content)


def _inflate(content: memoryview, size: int) -> bytes:
    """Decompress to exactly `size` bytes; zlib compares them with the stream's Adler-32 checksum."""
    decoder = zlib.decompressobj()
    try:
        decoded = decoder.decompress(content, size + 1)  # one byte more shows that the stream is longer
    except zlib.error as error:
        raise DamagedChunk(f"a chunk cannot be decompressed: {error}") from error
    if len(decoded) > size:
        raise DamagedChunk(f"a chunk decompresses to more than its declared size of {size:,} bytes")
    if not decoder.eof:
        raise DamagedChunk("a compressed chunk is truncated")
    if len(decoded) != size:
        raise DamagedChunk(f"a chunk decompresses to {len(decoded):,} bytes, expected {size:,}")
    return decoded


def _unshuffle(content: bytes, num_chunks: int, item_bytes: int) -> np.ndarray:
    """Undo byte shuffling: each chunk has the first bytes of all items, then the second bytes, …

    One plane at a time is fastest.
    """
    planes = np.frombuffer(content, np.uint8).reshape(num_chunks, item_bytes, -1)
    items = np.empty((num_chunks, planes.shape[2], item_bytes), np.uint8)
    for number in range(item_bytes):
        items[:, :, number] = planes[:, number]
    return items
