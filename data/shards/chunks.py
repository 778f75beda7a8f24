"""Decodes the chunks of an HDF5 dataset here, each to the size that it declares and no further.

HDF5 itself unpacks a chunk to whatever size its bytes stand for, which may be a thousand times its own, and does not
ask whether that is a chunk's size: more would be a bomb, less or more would shear the rows.
"""

import math
import zlib
from collections.abc import Iterator
from itertools import product

import h5py
import numpy as np

SHUFFLE, DEFLATE, FLETCHER32 = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32
_ORDER = (SHUFFLE, DEFLATE, FLETCHER32)  # in which a writer applies them; each may be missing
_CHECKSUM_BYTES = 4
_KEPT_BYTES = 16 * 2**20  # of a dataset's decoded rows: what a block of NVIDIA's awkward chunks touches
_WEIGHTS = np.arange(2**16, 0, -1, dtype=np.float64)  # so few that sums of 16-bit words times these are exact


class DamagedChunk(ValueError):
    """A chunk that does not hold what it declares."""


def filters_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    creation = dataset.id.get_create_plist()
    return tuple(creation.get_filter(i)[0] for i in range(creation.get_nfilters()))


def filter_names(dataset: h5py.Dataset) -> str:
    """For messages: the names that the file gives, or the numbers where it gives none."""
    creation = dataset.id.get_create_plist()
    found = [creation.get_filter(i) for i in range(creation.get_nfilters())]
    return ", ".join(ascii(name.decode(errors="replace"))[1:-1] or str(number) for number, *_, name in found)


def can_decode(filters: tuple[int, ...]) -> bool:
    """Whether these are gzip, byte shuffling and checksums, in their usual order."""
    return filters == tuple(known for known in _ORDER if known in filters)


def largest_stored(chunk_bytes: int) -> int:
    """What a chunk can take in a file, whatever is in it: no packer makes 8 bits more than 9."""
    return chunk_bytes + chunk_bytes // 8 + 64


class ContiguousRows:
    """The rows of a dataset that lies in one piece, which the library reads as they are stored."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._dataset[start:stop]

    def forget(self) -> None:
        """Nothing is kept."""


class ChunkedRows:
    """The rows of a chunked dataset. A chunk is looked up by its place: one that is not found is an error, not zeros.

    The last row of chunks is kept decoded, so whoever reads a few rows at a time decodes nothing twice; `forget` it
    when turning elsewhere.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._filters = filters_of(dataset)
        self._height: int = dataset.chunks[0]
        self._chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
        row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
        self._is_kept = self._height * row_bytes <= _KEPT_BYTES
        self._kept: tuple[int, np.ndarray] | None = None  # the number of a row of chunks, and its values

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), not to be written to."""
        if start == stop:  # may be past the last chunk
            return np.empty((0, *self._dataset.shape[1:]), self._dataset.dtype)
        parts = [self._part(number, start, stop) for number in range(start // self._height, -(-stop // self._height))]
        if len(parts) > 1:
            return np.concatenate(parts)
        return parts[0].copy() if stop - start < self._height else parts[0]  # a view would hold all of the chunk

    def forget(self) -> None:
        self._kept = None

    def _part(self, number: int, start: int, stop: int) -> np.ndarray:
        """Those of the rows that lie in a row of chunks."""
        first = number * self._height
        low, high = max(start - first, 0), min(stop - first, self._height)
        if not self._is_kept:
            return self._decoded(number, low, high)
        kept = self._kept
        if kept is None or kept[0] != number:
            kept = self._kept = number, self._decoded(number, 0, min(self._height, self._dataset.shape[0] - first))
        return kept[1][low:high]

    def _decoded(self, number: int, low: int, high: int) -> np.ndarray:
        dataset = self._dataset
        chunks = self._chunks_of(number)
        if dataset.chunks[1:] == dataset.shape[1:]:
            return next(chunks)[1][low:high]
        values = np.empty((high - low, *dataset.shape[1:]), dataset.dtype)
        for place, chunk in chunks:
            values[:, place[1] : place[1] + chunk.shape[1]] = chunk[low:high, : dataset.shape[1] - place[1]]
        values.flags.writeable = False
        return values

    def _chunks_of(self, number: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        dataset = self._dataset
        columns = [range(0, size, step) for size, step in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)]
        for place in product([number * self._height], *columns):
            mask, content = dataset.id.read_direct_chunk(place)
            if mask:
                raise DamagedChunk("a chunk was stored without its filters")
            decoded = decode_chunk(content, self._filters, self._chunk_bytes, dataset.dtype.itemsize)
            yield place, np.frombuffer(decoded, dataset.dtype).reshape(dataset.chunks)


def decode_chunk(content: bytes, filters: tuple[int, ...], size: int, item_bytes: int) -> bytes:
    """The `size` bytes that a chunk stands for, its filters undone; an error where it stands for anything else."""
    if FLETCHER32 in filters:
        content, stored = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if int.from_bytes(stored, "little") != fletcher32(content):
            raise DamagedChunk("a chunk's checksum is not that of its bytes")
    if DEFLATE in filters:
        content = _inflate(content, size)
    if len(content) != size:
        raise DamagedChunk(f"a chunk has {len(content):,} bytes where {size:,} are declared")
    if SHUFFLE in filters and item_bytes > 1:
        return _unshuffled(content, item_bytes)
    return content


def _unshuffled(content: bytes, item_bytes: int) -> bytes:
    """All first bytes of the numbers, then all second ones, …, put together again; a plane at a time is fastest."""
    planes = np.frombuffer(content, np.uint8).reshape(item_bytes, -1)
    items = np.empty(planes.shape[::-1], np.uint8)
    for number, plane in enumerate(planes):
        items[:, number] = plane
    return items.tobytes()


def _inflate(content: bytes, size: int) -> bytes:
    decoder = zlib.decompressobj()
    try:
        unpacked = decoder.decompress(content, size + 1)  # one more tells that there is more
    except zlib.error as error:
        raise DamagedChunk(f"a chunk cannot be unpacked: {error}") from error
    if len(unpacked) > size:
        raise DamagedChunk(f"a chunk unpacks to more than the {size:,} bytes that are declared")
    if not decoder.eof:
        raise DamagedChunk("a chunk breaks off")
    return unpacked


def fletcher32(content: bytes) -> int:
    """HDF5's checksum: sums of big-endian 16-bit words, and of these sums, in arithmetic of 65535."""
    padded = content + b"\0" if len(content) % 2 else content
    words = np.frombuffer(padded, ">u2").astype(np.float64)
    low = high = 0
    for start in range(0, len(words), len(_WEIGHTS)):
        part = words[start : start + len(_WEIGHTS)]
        high += len(part) * low + int(part @ _WEIGHTS[-len(part) :])
        low += int(part.sum())
    return _folded(high) << 16 | _folded(low)


def _folded(total: int) -> int:
    """The remainder, as adding up carries gives it: 65535 instead of 0 where there was anything to add."""
    return (total - 1) % 0xFFFF + 1 if total else 0
