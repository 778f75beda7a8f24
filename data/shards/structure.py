"""Checks the structure of an HDF5 file before any value is read.

A file may come from anywhere, and HDF5 can do much that rows of numbers never need: link to other files, declare sizes
without stored bytes, load plugins. Anything but plain stored integers is refused. The old file format has no checksum
on its metadata, so the metadata is checked for consistency: a flipped byte in it makes datasets or chunks overlap, or
leaves one out. `data.shards.chunks` checks the content of the chunks when they are read.
"""

import math
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data.shards.chunks import CHECKSUM_BYTES, DEFLATE, FLETCHER32, SHUFFLE, ChunkTable, filters_of

_FILTER_ORDER = (SHUFFLE, DEFLATE, FLETCHER32)  # the order in which a writer applies them; each is optional
_MAX_CHUNK_BYTES = 64 * 2**20  # decoded; one read decodes at least one chunk, and NVIDIA's chunks are below 1 MB
_HEAP = b"GCOL\x01\0\0\0"  # the first bytes of a global heap; its size follows, then its objects
_HEAP_HEADER, _OBJECT_HEADER = 16, 16  # bytes


class RefusedDataset(ValueError):
    """The message says why, as the rest of a sentence that begins with the dataset's name."""


def check_dataset(dataset: Any, file_size: int) -> ChunkTable:
    """Return where the values of `dataset` are stored; raise RefusedDataset if it is not a plain array of integers.

    A dataset without chunks counts as one.
    """
    if not isinstance(dataset, h5py.Dataset):
        raise RefusedDataset("is not a dataset")
    if dataset.dtype.kind not in "iu" or dataset.dtype.itemsize > 8:
        raise RefusedDataset(f"has the type {dataset.dtype}, expected integers")
    stored_type = dataset.id.get_type()
    if not isinstance(stored_type, h5py.h5t.TypeIntegerID):
        raise RefusedDataset("is an enumeration, expected plain integers")
    if stored_type.get_precision() != 8 * dataset.dtype.itemsize or stored_type.get_offset() != 0:
        raise RefusedDataset("has integers that do not fill their bytes")
    if dataset.shape is None or dataset.ndim not in (1, 2):
        raise RefusedDataset(f"has the shape {dataset.shape}, expected one or two dimensions")
    if dataset.is_virtual:
        raise RefusedDataset("is a virtual dataset")
    if dataset.external:
        raise RefusedDataset("stores its values in other files")
    filters = filters_of(dataset)
    if filters != tuple(known for known in _FILTER_ORDER if known in filters):
        # Another filter may be a plugin, which is code, or decompress without bounds.
        raise RefusedDataset(
            f"uses the filters {_filter_names(dataset)}, expected gzip at most once, as in NVIDIA's shards and ours "
            f"(convert it with `h5repack -f GZIP=1 OLD NEW`)"
        )
    return _check_storage(dataset, filters, file_size)


def _filter_names(dataset: h5py.Dataset) -> str:
    """Names of the filters for messages, or their numbers where the file has no names."""
    creation = dataset.id.get_create_plist()
    found = [creation.get_filter(i) for i in range(creation.get_nfilters())]
    return ", ".join(ascii(name.decode(errors="replace"))[1:-1] or str(number) for number, *_, name in found)


def _check_storage(dataset: h5py.Dataset, filters: tuple[int, ...], file_size: int) -> ChunkTable:
    """Every value must be stored: a declared size without bytes would read as any number of zeros."""
    stored = dataset.id.get_storage_size()
    if stored > file_size:
        raise RefusedDataset(f"declares {stored:,} stored bytes in a file of {file_size:,}")
    if dataset.chunks is None:
        declared = dataset.size * dataset.dtype.itemsize
        if stored != declared:
            raise RefusedDataset(f"declares {declared:,} bytes but stores {stored:,}")
        start = dataset.id.get_offset()
        places = [] if start is None else [(start, stored)]
        return ChunkTable(*np.array(places, np.uint64).reshape(-1, 2).T)
    chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if chunk_bytes > _MAX_CHUNK_BYTES:
        raise RefusedDataset(f"has chunks of {chunk_bytes:,} bytes, expected at most {_MAX_CHUNK_BYTES:,}")
    smallest = largest = chunk_bytes + CHECKSUM_BYTES * (FLETCHER32 in filters)
    if DEFLATE in filters:  # which turns 8 bits into 9 at worst
        smallest, largest = 1, chunk_bytes + chunk_bytes // 8 + 64
    return _check_chunks(dataset, smallest, largest, file_size)


def _check_chunks(dataset: h5py.Dataset, smallest: int, largest: int, file_size: int) -> ChunkTable:
    """Every chunk of the grid must be stored once, filtered, inside the file. About 2 µs per chunk."""
    steps, sizes = dataset.chunks, dataset.shape
    declared = math.prod(math.ceil(size / step) for size, step in zip(sizes, steps, strict=True))
    if declared > file_size:  # a chunk takes at least a byte; checked first because it is cheaper than counting
        raise RefusedDataset(f"declares {declared:,} chunks in a file of {file_size:,} bytes")
    found: list[Any] = []
    dataset.id.chunk_iter(found.append)
    num_different = len({chunk.chunk_offset for chunk in found})
    if num_different != declared:
        raise RefusedDataset(f"declares {declared:,} chunks but stores {num_different:,}")
    is_valid = len(found) == declared and all(
        chunk.filter_mask == 0 and smallest <= chunk.size <= largest and chunk.byte_offset + chunk.size <= file_size
        for chunk in found
    )
    offsets = np.array([chunk.chunk_offset for chunk in found], np.uint64).reshape(-1, len(sizes))
    is_in_grid = (offsets % np.array(steps, np.uint64) == 0) & (offsets < np.array(sizes, np.uint64))
    if not is_valid or not is_in_grid.all():
        raise RefusedDataset("has chunks at a wrong offset or of an impossible size")
    order = np.lexsort(offsets.T[::-1])
    kind = np.uint32 if file_size < 2**32 else np.uint64  # a dataset keeps these tables of its files in memory
    starts = np.array([chunk.byte_offset for chunk in found], kind)
    return ChunkTable(starts[order], np.array([chunk.size for chunk in found], np.uint32)[order])


def have_overlap(tables: Iterable[ChunkTable]) -> bool:
    """Whether two of the chunks share a byte."""
    starts = np.concatenate([table.starts.astype(np.uint64) for table in tables])
    ends = starts + np.concatenate([table.sizes.astype(np.uint64) for table in tables])
    order = np.argsort(starts)
    return bool((starts[order][1:] < ends[order][:-1]).any())


def has_valid_heaps(path: Path) -> bool:
    """Whether the global heaps of a file, which store strings of variable length, can be walked.

    They have no checksum, and the library loops forever at an object that declares a size of 0. The walk over all heaps
    takes at most as many steps as the file has room for objects: heaps nested in each other would take hours.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        steps_left = len(content) // _OBJECT_HEADER
        start = content.find(_HEAP)
        while start >= 0:
            steps = _count_heap_objects(content, start, steps_left)
            if steps is None:
                return False
            steps_left -= steps
            start = content.find(_HEAP, start + 1)
    return True


def _count_heap_objects(content: mmap.mmap, start: int, limit: int) -> int | None:
    """Number of objects in the heap at `start`; None if it cannot be walked within `limit` steps."""
    end = start + struct.unpack_from("<Q", content, start + 8)[0] if start + _HEAP_HEADER <= len(content) else 0
    position = start + _HEAP_HEADER
    steps = 0
    while position + _OBJECT_HEADER <= end <= len(content):
        number, size = struct.unpack_from("<H6xQ", content, position)
        # Object 0 is the free space at the end; its size includes the header. Others are padded to 8 bytes.
        step = size if number == 0 else _OBJECT_HEADER + -(-size // 8) * 8
        steps += 1
        if step < _OBJECT_HEADER or steps > limit:
            return None
        position += step
    return steps if position <= end <= len(content) else None
