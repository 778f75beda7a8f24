"""Reads rows of one HDF5 dataset; decompresses deflated chunks up to the size they declare and no further.

HDF5 decompresses a chunk to any size and does not compare it with the declared one: reading a deflate bomb of 306 kB
with h5py took 300 MB and raised no error. The other accepted filters do not expand, so HDF5 reads those datasets.
"""

import math
import zlib

import h5py
import numpy as np

SHUFFLE, DEFLATE, FLETCHER32 = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32
CHECKSUM_BYTES = 4  # that Fletcher-32 appends to a chunk


class DamagedChunk(ValueError):
    """A chunk does not decode to what its dataset declares."""


def filters_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Ids of the dataset's filters in the order in which a writer applies them."""
    creation = dataset.id.get_create_plist()
    return tuple(creation.get_filter(i)[0] for i in range(creation.get_nfilters()))


class StoredRows:
    """The rows of one dataset that passed the checks of `data.shards.structure`; 1 or 2 dimensions."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._filters = filters_of(dataset)
        self._dtype, self._num_dims, self._row_shape = dataset.dtype, dataset.ndim, dataset.shape[1:]
        self._width = math.prod(self._row_shape)
        if dataset.chunks is not None:
            self._chunk_shape = dataset.chunks[0], math.prod(dataset.chunks[1:])
            self._chunk_bytes = math.prod(self._chunk_shape) * self._dtype.itemsize
        self._has_checksums = FLETCHER32 in self._filters
        self._is_shuffled = SHUFFLE in self._filters and self._dtype.itemsize > 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in a new array. Decodes every chunk that holds one of them."""
        if DEFLATE not in self._filters or start >= stop:
            return self._dataset[start:stop]
        height, chunk_width = self._chunk_shape
        firsts = range(start // height * height, stop, height)
        columns = range(0, self._width, chunk_width)
        content = b"".join(
            self._read_chunk((first, column)[: self._num_dims]) for first in firsts for column in columns
        )
        if self._is_shuffled:
            items = _unshuffle(content, len(firsts) * len(columns), self._dtype.itemsize)
        else:
            items = np.frombuffer(content, np.uint8)
        chunks = items.reshape(-1).view(self._dtype).reshape(len(firsts), len(columns), height, chunk_width)
        rows = chunks.swapaxes(1, 2).reshape(len(firsts) * height, -1)  # a copy only if a row has several chunks
        values = rows[start - firsts[0] : stop - firsts[0], : self._width]
        return np.array(values).reshape(-1, *self._row_shape)

    def _read_chunk(self, offset: tuple[int, ...]) -> bytes:
        """The inflated content of a chunk."""
        # Looked up by its offset: HDF5 raises an error if the chunk is missing, where a slice would read zeros.
        mask, content = self._dataset.id.read_direct_chunk(offset)
        if mask:
            raise DamagedChunk("a chunk was stored without its filters")
        if self._has_checksums:
            content = content[:-CHECKSUM_BYTES]  # not compared: the deflated bytes end with a checksum of their own
        return _inflate(content, self._chunk_bytes)


def _inflate(content: bytes, size: int) -> bytes:
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
