"""What the datasets of an HDF5 file must be before anything is read of them.

A file may come from anywhere, and the format can do much that rows of numbers never need: link to other files, declare
sizes without bytes behind them, load plugins. Whatever is not plain stored integers is refused. The old file format has
no checksum on its structure, so the structure is also held against itself: a flipped byte in it makes datasets or
chunks overlap, or leaves one out. What a chunk decodes to is asked when it is read, in `data.chunks`.
"""

import math
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py

from data.shards.chunks import can_decode, filter_names, filters_of, largest_stored

_HEAP = b"GCOL\x01\0\0\0"  # how a heap begins; its size follows, then its pieces
_HEAP_HEADER, _PIECE_HEADER = 16, 16  # bytes
_MAX_CHUNK_BYTES = 64 * 2**20  # one chunk is what one read must decode; NVIDIA's are below 1 MB

Extent = tuple[int, int]  # where stored bytes begin and end in the file


def reason_to_refuse(dataset: Any, file_size: int) -> str | None:
    """Why `dataset` is none of ours, in words that follow its name; None if it can be read."""
    if not isinstance(dataset, h5py.Dataset):
        return "is no dataset"
    if dataset.dtype.kind not in "iu" or dataset.dtype.itemsize > 8:
        return f"holds {dataset.dtype}, not integers"
    stored_type = dataset.id.get_type()
    if not isinstance(stored_type, h5py.h5t.TypeIntegerID):
        return "holds names of numbers, not plain integers"
    if stored_type.get_precision() != 8 * dataset.dtype.itemsize or stored_type.get_offset() != 0:
        return "holds integers that do not fill their bytes"
    if dataset.shape is None or dataset.ndim not in (1, 2):
        return f"has the shape {dataset.shape}, not one or two dimensions"
    if dataset.is_virtual:
        return "is a virtual dataset"
    if dataset.external:
        return "keeps its values in other files"
    if not can_decode(filters_of(dataset)):  # another filter may be a plugin, which is code, or unpack without bounds
        return (
            f"is packed with {filter_names(dataset)}, not once with gzip as NVIDIA's and ours are (pack it so with "
            f"`h5repack -f GZIP=1 OLD NEW`)"
        )
    return _reason_of_size(dataset, file_size)


def stored_extents(dataset: h5py.Dataset) -> list[Extent]:
    """Where the values of a dataset that was not refused lie in its file."""
    if dataset.chunks is None:
        start = dataset.id.get_offset()
        return [] if start is None else [(start, start + dataset.id.get_storage_size())]
    extents: list[Extent] = []
    dataset.id.chunk_iter(lambda chunk: extents.append((chunk.byte_offset, chunk.byte_offset + chunk.size)))
    return extents


def heaps_are_sound(path: Path) -> bool:
    """Whether the heaps of a file, where texts without a fixed length lie, can be walked.

    They have no checksum, and the library walks on the spot for ever where a piece claims to take no bytes. All heaps
    together get no more steps than the file has room for pieces: made to lie in one another, they would take hours.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        steps_left = len(content) // _PIECE_HEADER
        start = content.find(_HEAP)
        while start >= 0:
            steps = _steps_through(content, start, steps_left)
            if steps is None:
                return False
            steps_left -= steps
            start = content.find(_HEAP, start + 1)
    return True


def _steps_through(content: mmap.mmap, start: int, most: int) -> int | None:
    """How many pieces a heap has; None if it cannot be walked, or not in so many steps."""
    end = start + struct.unpack_from("<Q", content, start + 8)[0] if start + _HEAP_HEADER <= len(content) else 0
    place = start + _HEAP_HEADER
    steps = 0
    while place + _PIECE_HEADER <= end <= len(content):
        number, size = struct.unpack_from("<H6xQ", content, place)
        # The last piece, number 0, is what is free, its header included; others are followed by theirs, in eights.
        step = size if number == 0 else _PIECE_HEADER + -(-size // 8) * 8
        steps += 1
        if step < _PIECE_HEADER or steps > most:
            return None
        place += step
    return steps if place <= end <= len(content) else None


def overlap(extents: Iterable[Extent]) -> bool:
    """Whether two pieces share a byte: values that would be read twice, so one of them is not its own."""
    end = 0
    for start, stop in sorted(extents):
        if start < end:
            return True
        end = stop
    return False


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
    return _reason_of_chunks(dataset, declared_chunks, chunk_bytes, file_size)


def _reason_of_chunks(dataset: h5py.Dataset, declared: int, chunk_bytes: int, file_size: int) -> str | None:
    """Every chunk of the grid must be stored once, filtered and inside the file: a missing one would read as zeros.

    About 2.5 µs a chunk, and 1 µs more in `stored_extents`.
    """
    steps, sizes = dataset.chunks, dataset.shape  # asked once: each is a call of the library
    stored: set[tuple[int, ...]] = set()
    is_sound = True
    limit = largest_stored(chunk_bytes)

    def look(chunk: Any) -> None:
        nonlocal is_sound
        stored.add(chunk.chunk_offset)
        is_sound &= chunk.filter_mask == 0 and chunk.size <= limit and chunk.byte_offset + chunk.size <= file_size
        is_sound &= all(
            offset % step == 0 and offset < size
            for offset, step, size in zip(chunk.chunk_offset, steps, sizes, strict=True)
        )

    dataset.id.chunk_iter(look)
    if len(stored) != declared:
        return f"declares {declared:,} chunks but stores {len(stored):,}"
    return None if is_sound else "has chunks out of place or larger than they can be"
