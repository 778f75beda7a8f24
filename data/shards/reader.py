"""Reads one shard, which is untrusted: checks its structure when it is opened and its values with every read."""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from common.errors import UserError
from data.shards.chunks import ChunkTable, StoredRows
from data.shards.schema import ATTRIBUTE, DATASETS, FORMAT_VERSION, MAX_ROW_LENGTH, WORD_STARTS, Rows
from data.shards.structure import RefusedDataset, check_dataset, has_valid_heaps, have_overlap

PREPARE_COMMAND = "python -m data.prepare"
REMEDY = f"Prepare it again with `{PREPARE_COMMAND}`, or copy it again from its source."

MAX_BLOCK_ROWS = 16384
_MIN_BLOCK_ROWS = 128
_UNITED_ROWS = 256  # of a block that has several units
_MAX_ATTRIBUTE_BYTES = 2**20

Identity = tuple[int, ...]  # of a file; changes when the file is replaced or written to


@dataclass(frozen=True)
class ShardLayout:
    """What the checks of a shard found. With tables, its rows can be read without HDF5 as long as it is the same."""

    identity: Identity
    num_rows: int
    max_seq_length: int
    max_predictions_per_seq: int
    attributes: dict[str, Any] | None  # None: made by another tool
    unit_rows: int
    block_rows: int
    columns: dict[str, StoredRows] | None  # by dataset; None: not every dataset has a table, or it was dropped

    @property
    def is_masked(self) -> bool:
        return self.attributes is None or bool(self.attributes.get("masked", True))

    @property
    def tokenizer_digest(self) -> str | None:
        found = (self.attributes or {}).get("tokenizer_digest")
        return None if found is None else str(found)

    @property
    def table_bytes(self) -> int:
        tables = [rows.table for rows in (self.columns or {}).values()]
        return sum(part.nbytes for table in tables if table is not None for part in table)

    def without_tables(self) -> "ShardLayout":
        return replace(self, columns=None)


class ShardFile:
    """One open shard whose structure is valid."""

    def __init__(self, path: Path, *, known: ShardLayout | None = None, lock: IO[str] | None = None) -> None:
        """`known`: the layout of a file that passed the checks earlier; if it is the same file, skip the slow ones.

        `lock` is closed with the file.
        """
        self.path, self._lock = path, lock
        self._file: h5py.File | None = None
        if known is not None and known.columns is not None and (stream := _open_unchanged(path, known.identity)):
            self._stream, self.layout, self._columns = stream, known, known.columns
            return
        self._file = _open(path)
        handle = self._file.id.get_vfd_handle()
        self._stream = os.fdopen(os.dup(handle), "rb", buffering=0)  # the same file, whatever is at its path now
        try:
            self.layout = self._check(known)
        except Exception as error:  # HDF5 raises many types of errors on a damaged file
            self.close()
            raise error if isinstance(error, UserError) else _damaged(path, error) from error
        if self.layout.columns is not None:
            self._file.close()  # takes 2.5 MB

    def _check(self, known: ShardLayout | None) -> ShardLayout:
        assert self._file is not None
        identity = _identity(self._stream)
        self._is_checked = known is not None and known.identity == identity
        self._tables: dict[str, ChunkTable] = {}
        names = [*DATASETS, *([WORD_STARTS] if WORD_STARTS in self._file else [])]
        datasets = {name: self._open_dataset(self._file, name) for name in names}
        sizes = _check_shapes(self.path, datasets)
        attributes = _read_attributes(self.path, self._file, self._is_checked)
        unit_rows, block_rows = _choose_rows(datasets, may_have_units=attributes is not None)
        if not self._is_checked and have_overlap(self._tables.values()):
            raise UserError(f"{self.path}: is damaged (two datasets or chunks share the same bytes). {REMEDY}")
        tables = {} if self._file.userblock_size else self._tables  # their offsets begin after the user block
        self._columns = {name: StoredRows(dataset, tables.get(name)) for name, dataset in datasets.items()}
        has_tables = all(rows.table is not None for rows in self._columns.values())
        columns = self._columns if has_tables else None
        return ShardLayout(identity, *sizes, attributes, unit_rows, block_rows, columns)

    def close(self) -> None:
        self._stream.close()
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.close()

    def read(self, start: int, stop: int, *, vocab_size: int | None = None, with_words: bool = True) -> Rows:
        """Rows [start, stop) with checked values; token ids must be below `vocab_size` where it is given.

        `with_words`: with word starts, if the shard has them.
        """
        try:
            arrays = {
                name: rows.read(self._stream, start, stop)
                for name, rows in self._columns.items()
                if with_words or name != WORD_STARTS
            }
        except Exception as error:  # HDF5 raises many types of errors on a damaged file
            raise _damaged(self.path, error) from error
        problem = find_bad_values(Rows(**arrays), vocab_size)  # as stored: a wider type could wrap around
        if problem:
            raise UserError(f"{self.path}: rows {start}–{stop - 1} have {problem}. {REMEDY}")
        arrays |= {name: arrays[name].astype(kind, copy=False) for name, (_, kind) in DATASETS.items()}
        return Rows(**arrays)

    def _open_dataset(self, file: h5py.File, name: str) -> h5py.Dataset:
        if self._is_checked:
            return file[name]
        link = file.get(name, getlink=True)
        if link is None:
            found = ", ".join(sorted(file)[:12]) or "nothing"
            raise UserError(
                f"{self.path}: has no dataset {name!r} (found {found}; expected {', '.join(DATASETS)}). {REMEDY}"
            )
        if not isinstance(link, h5py.HardLink):
            raise UserError(
                f"{self.path}: {name!r} is a {type(link).__name__}, which is refused (expected a dataset in the file "
                f"itself). {REMEDY}"
            )
        dataset = file[name]
        try:
            self._tables[name] = check_dataset(dataset, os.fstat(self._stream.fileno()).st_size)
        except RefusedDataset as error:
            raise UserError(f"{self.path}: {name!r} {error}, which is refused. {REMEDY}") from error
        return dataset


def _choose_rows(datasets: dict[str, h5py.Dataset], may_have_units: bool) -> tuple[int, int]:
    """Rows of a unit, which are decoded together if these are a part of a block, else 0; and rows of a block.

    A block is read at once, so that no chunk is decoded twice, within bounds that limit memory.
    """
    height, *others = {dataset.chunks[0] if dataset.chunks else 0 for dataset in datasets.values()}
    if may_have_units and not others and 0 < height < min(_MIN_BLOCK_ROWS, len(datasets["input_ids"])):
        return height, _UNITED_ROWS // height * height
    heights = [dataset.chunks[0] for dataset in datasets.values() if dataset.chunks and dataset.ndim == 2]
    return 0, min(MAX_BLOCK_ROWS, max([_MIN_BLOCK_ROWS, *heights]))


def layout_like(layout: ShardLayout, num_rows: int) -> ShardLayout:
    """The layout of a shard of `num_rows` that was not checked, by that of a larger one that was written alike."""
    expected = replace(layout, identity=(), num_rows=num_rows, columns=None)
    if layout.unit_rows and layout.unit_rows < min(_MIN_BLOCK_ROWS, num_rows):
        return expected
    block_rows = 0 if layout.unit_rows else min(layout.block_rows, num_rows)
    return replace(expected, unit_rows=0, block_rows=max(_MIN_BLOCK_ROWS, block_rows))


def find_bad_values(rows: Rows, vocab_size: int | None) -> str | None:
    """Describe the first invalid value of `rows`; None if there is none. About 1 µs per row of 128 tokens."""
    width = rows.input_ids.shape[1]
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    bounds = {"input_ids": limit, "masked_lm_ids": limit, "masked_lm_positions": width}
    bounds |= dict.fromkeys(("input_mask", "segment_ids", "next_sentence_labels"), 2)
    for name, bound in bounds.items():
        values = getattr(rows, name)
        if values.size and (values.min() < 0 or values.max() >= bound):
            hint = "; expected the tokenizer that made the shard" if bound == vocab_size else ""
            return f"{name} outside 0…{bound - 1} (found {values.min()}…{values.max()}{hint})"
    positions = rows.masked_lm_positions
    if (positions[:, 1:] * (positions[:, :-1] == 0)).any():
        return "masked_lm_positions after the 0 that ends them"
    row_index, column = np.nonzero(positions)
    if not rows.input_mask[row_index, positions[row_index, column]].all():
        return "masked_lm_positions in the padding"
    return None


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        raise UserError(
            f"{path}: no such file (expected a shard). Check the folder, or prepare it with `{PREPARE_COMMAND}`."
        )
    try:
        # No lock: many ranks read the same shards, and network file systems often refuse locks. No chunk cache: a
        # block is read once, and the default takes 8 MB per dataset of every open file.
        return h5py.File(path, "r", locking=False, rdcc_nbytes=0)
    except Exception as error:  # HDF5 raises many types of errors on a damaged file
        with path.open("rb") as stream:
            is_hdf5 = stream.read(8) == b"\x89HDF\r\n\x1a\n"
        if is_hdf5:
            raise _damaged(path, error) from error
        raise UserError(
            f"{path}: is not an HDF5 file (found {path.stat().st_size:,} bytes, expected a shard as described in "
            f"docs/data_format.md). Remove it from the folder. {REMEDY}"
        ) from error


def _open_unchanged(path: Path, identity: Identity) -> IO[bytes] | None:
    """The file at `path` if it has this identity, else None."""
    try:
        stream = path.open("rb", buffering=0)
    except OSError:  # reported by _open
        return None
    if _identity(stream) == identity:
        return stream
    stream.close()
    return None


def _identity(stream: IO[bytes]) -> Identity:
    """Identity of the open file, even if another file has taken its path since."""
    found = os.fstat(stream.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_shapes(path: Path, datasets: dict[str, h5py.Dataset]) -> tuple[int, int, int]:
    """Return (N, S, P), which all datasets must agree on."""
    num_rows, width = datasets["input_ids"].shape[0], datasets["input_ids"].shape[-1]
    num_predictions = datasets["masked_lm_positions"].shape[-1]
    sizes = {"N": num_rows, "S": width, "P": num_predictions, "W": math.ceil(width / 8)}
    for name, dataset in datasets.items():
        letters, kind = (DATASETS[name][0], dataset.dtype) if name in DATASETS else ("NW", np.dtype(np.uint8))
        expected = tuple(sizes[letter] for letter in letters)
        if dataset.shape != expected or dataset.dtype != kind:
            raise UserError(
                f"{path}: {name!r} has a wrong type or shape (found {dataset.dtype} {dataset.shape}, expected {kind} "
                f"{expected}). {REMEDY}"
            )
    if width > MAX_ROW_LENGTH or num_predictions > MAX_ROW_LENGTH:
        raise UserError(
            f"{path}: rows are too long (found {width:,} tokens and {num_predictions:,} predictions, expected up to "
            f"{MAX_ROW_LENGTH:,}). {REMEDY}"
        )
    if 0 in sizes.values():
        raise UserError(
            f"{path}: is empty (found {num_rows} rows of {width} tokens and {num_predictions} predictions). {REMEDY}"
        )
    return num_rows, width, num_predictions


def _read_attributes(path: Path, file: h5py.File, is_checked: bool) -> dict[str, Any] | None:
    """Our attributes; None for a shard that another tool made, which is valid too."""
    if ATTRIBUTE not in file.attrs:
        return None
    attribute = file.attrs.get_id(ATTRIBUTE)
    if attribute.get_storage_size() > _MAX_ATTRIBUTE_BYTES:
        raise UserError(f"{path}: its attribute {ATTRIBUTE!r} is larger than {_MAX_ATTRIBUTE_BYTES:,} bytes. {REMEDY}")
    is_in_heap = attribute.dtype.kind == "O"
    if is_in_heap and not is_checked and not has_valid_heaps(path):
        raise UserError(f"{path}: is damaged (its attribute {ATTRIBUTE!r} cannot be read). {REMEDY}")
    value = file.attrs[ATTRIBUTE]
    try:
        attributes = json.loads(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: its attribute {ATTRIBUTE!r} is not valid JSON. {REMEDY}") from error
    if not isinstance(attributes, dict) or not isinstance(attributes.get("format_version"), int):
        raise UserError(f"{path}: its attribute {ATTRIBUTE!r} has no format_version. {REMEDY}")
    if attributes["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"{path}: its format is too new (found version {attributes['format_version']}, expected up to "
            f"{FORMAT_VERSION}). Update this program."
        )
    return attributes


def _damaged(path: Path, error: Exception) -> UserError:
    detail = str(error).split("\n")[0].strip("'\"")
    return UserError(f"{path}: is damaged or incomplete ({detail}; expected a complete HDF5 file). {REMEDY}")
