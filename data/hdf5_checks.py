"""What the datasets of an HDF5 file must be before anything is read of them.

A file may come from anywhere, and the format can do much that rows of numbers never need: link to other files, declare
sizes without bytes behind them, load plugins. Whatever is not plain stored integers is refused. The old file format has
no checksum on its structure, so the structure is also held against itself: a flipped byte in it makes datasets or
chunks overlap, leaves one out, or gives a chunk a size that it does not decode to.
"""

import math
import zlib
from collections.abc import Iterable
from itertools import product
from typing import Any

import h5py

# Filters that HDF5 or h5py itself carries. Anything else would load a plugin, which is code.
_KNOWN_FILTERS = {
    h5py.h5z.FILTER_DEFLATE,
    h5py.h5z.FILTER_SHUFFLE,
    h5py.h5z.FILTER_FLETCHER32,
    h5py.h5z.FILTER_LZF,
    h5py.h5z.FILTER_SZIP,
}
_MAX_CHUNK_BYTES = 64 * 2**20  # one chunk is what one read must decode; NVIDIA's are below 1 MB

Extent = tuple[int, int]  # where stored bytes begin and end in the file


def reason_to_refuse(dataset: Any, file_size: int) -> str | None:
    """Why `dataset` is none of ours, in words that follow its name; None if it can be read."""
    if not isinstance(dataset, h5py.Dataset):
        return "is no dataset"
    if dataset.dtype.kind not in "iu" or dataset.dtype.itemsize > 8:
        return f"holds {dataset.dtype}, not integers"
    stored_type = dataset.id.get_type()
    if stored_type.get_precision() != 8 * dataset.dtype.itemsize or stored_type.get_offset() != 0:
        return "holds integers that do not fill their bytes"
    if dataset.shape is None or dataset.ndim not in (1, 2):
        return f"has the shape {dataset.shape}, not one or two dimensions"
    if dataset.is_virtual:
        return "is a virtual dataset"
    if dataset.external:
        return "keeps its values in other files"
    unknown = set(_filters(dataset)) - _KNOWN_FILTERS
    if unknown:
        return f"needs the filter {min(unknown)}, which is not HDF5's own"
    return _reason_of_size(dataset, file_size)


def stored_extents(dataset: h5py.Dataset) -> list[Extent]:
    """Where the values of a dataset that was not refused lie in its file."""
    if dataset.chunks is None:
        start = dataset.id.get_offset()
        return [] if start is None else [(start, start + dataset.id.get_storage_size())]
    extents: list[Extent] = []
    dataset.id.chunk_iter(lambda chunk: extents.append((chunk.byte_offset, chunk.byte_offset + chunk.size)))
    return extents


def find_chunks(dataset: h5py.Dataset, start: int, stop: int) -> None:
    """Raise the library's error where a chunk of rows [start, stop) cannot be looked up by its place.

    A damaged index can list a chunk and still not find it, and what is not found would read as zeros. Asked where no
    checksum guards the index; costs a twentieth of decoding the chunks.
    """
    if dataset.chunks is None or h5py.h5z.FILTER_FLETCHER32 in _filters(dataset):
        return
    first = start // dataset.chunks[0] * dataset.chunks[0]
    columns = [range(0, size, step) for size, step in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)]
    for place in product(range(first, stop, dataset.chunks[0]), *columns):
        dataset.id.read_direct_chunk(place)


def overlap(extents: Iterable[Extent]) -> bool:
    """Whether two pieces share a byte: values that would be read twice, so one of them is not its own."""
    end = 0
    for start, stop in sorted(extents):
        if start < end:
            return True
        end = stop
    return False


def _filters(dataset: h5py.Dataset) -> list[int]:
    creation = dataset.id.get_create_plist()
    return [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]


def _reason_of_size(dataset: h5py.Dataset, file_size: int) -> str | None:
    """Every value must be stored: a declared size without bytes behind it would read as endless zeros."""
    stored = dataset.id.get_storage_size()
    if stored > file_size:
        return f"claims {stored:,} stored bytes in a file of {file_size:,}"
    if dataset.chunks is None:
        declared = dataset.size * dataset.dtype.itemsize
        return None if stored == declared else f"declares {declared:,} bytes but stores {stored:,}"
    chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if chunk_bytes > _MAX_CHUNK_BYTES:
        return f"has chunks of {chunk_bytes:,} bytes (at most {_MAX_CHUNK_BYTES:,})"
    declared_chunks = math.prod(
        math.ceil(size / chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)
    )
    if declared_chunks > file_size:  # a chunk takes at least a byte; cheaper than counting
        return f"declares {declared_chunks:,} chunks in a file of {file_size:,} bytes"
    return _reason_of_chunks(dataset, declared_chunks, file_size) or _reason_of_content(dataset, chunk_bytes)


def _reason_of_chunks(dataset: h5py.Dataset, declared: int, file_size: int) -> str | None:
    """Every chunk of the grid must be stored once, filtered and inside the file: a missing one would read as zeros.

    About 1 µs a chunk.
    """
    stored: set[tuple[int, ...]] = set()
    is_sound = True

    def look(chunk: Any) -> None:
        nonlocal is_sound
        stored.add(chunk.chunk_offset)
        is_sound &= chunk.filter_mask == 0 and chunk.byte_offset + chunk.size <= file_size
        is_sound &= all(
            offset % step == 0 and offset < size
            for offset, step, size in zip(chunk.chunk_offset, dataset.chunks, dataset.shape, strict=True)
        )

    dataset.id.chunk_iter(look)
    if len(stored) != declared:
        return f"declares {declared:,} chunks but stores {len(stored):,}"
    return None if is_sound else "has chunks out of place"


def _reason_of_content(dataset: h5py.Dataset, chunk_bytes: int) -> str | None:
    """The first chunk must decode to a chunk's size: HDF5 does not ask, and other sizes would shear all rows.

    Asked of plain and of deflated chunks, which are what files without checksums have.
    """
    filters = _filters(dataset)
    if filters not in ([], [h5py.h5z.FILTER_DEFLATE], [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]):
        return None
    _, content = dataset.id.read_direct_chunk((0,) * dataset.ndim)
    size = len(content)
    if filters:
        decoder = zlib.decompressobj()
        try:
            size = len(decoder.decompress(content, chunk_bytes + 1))
        except zlib.error as error:
            return f"has a chunk that cannot be unpacked ({error})"
    return None if size == chunk_bytes else f"has a chunk of {size:,} bytes where {chunk_bytes:,} are declared"
