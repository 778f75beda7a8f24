"""Reads a shard that is hostile until checked: its structure when opened, its values with every block read."""

import json
import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from common.errors import UserError
from data.shards.chunks import ChunkedRows, ContiguousRows
from data.shards.hdf5_checks import heaps_are_sound, overlap, reason_to_refuse, stored_extents
from data.shards.schema import ATTRIBUTE, DATASETS, FORMAT_VERSION, MAX_ROW_LENGTH, WORD_STARTS, Rows

PREPARE_COMMAND = "python -m data.prepare"
REMEDY = f"prepare it anew with `{PREPARE_COMMAND}`, or copy it again from where it came"

_MAX_BLOCK_ROWS = 16384
_MIN_BLOCK_ROWS = 128
_MAX_ATTRIBUTE_BYTES = 2**20


Identity = tuple[int, ...]  # of a file: another where it was replaced or written to


class ShardFile:
    """One open, structurally sound shard."""

    def __init__(self, path: Path, *, checked: Identity | None = None) -> None:
        """`checked`: which file was found sound here before; where it is still the one, what takes long is left out."""
        self.path = path
        self._file = _open(path)
        try:
            self.identity = _identity(self._file)
            self._is_checked = self.identity == checked
            self._datasets = {name: self._checked_dataset(name) for name in DATASETS}
            self.num_rows, self.max_seq_length, self.max_predictions_per_seq = _checked_shapes(path, self._datasets)
            self.attributes = _checked_attributes(path, self._file, self._is_checked)
            self._word_starts = self._checked_word_starts()
            if not self._is_checked:
                self._check_extents()
            self._rows = {name: _rows_of(dataset) for name, dataset in self._datasets.items()}
            self._starts = None if self._word_starts is None else _rows_of(self._word_starts)
        except Exception as error:  # a damaged file makes the library raise whatever it likes
            self.close()
            raise error if isinstance(error, UserError) else _damaged(path, error) from error

    def close(self) -> None:
        self._file.close()

    def forget(self) -> None:
        """Drop the rows that are kept decoded: at most 16 MB a dataset. They are decoded again when asked for."""
        for rows in [*self._rows.values(), *([] if self._starts is None else [self._starts])]:
            rows.forget()

    @property
    def block_rows(self) -> int:
        """The rows to fetch at once so that no chunk is decoded twice, within bounds that keep memory small."""
        chunked = [dataset.chunks[0] for dataset in self._datasets.values() if dataset.chunks and dataset.ndim == 2]
        return min(_MAX_BLOCK_ROWS, max([_MIN_BLOCK_ROWS, *chunked]))

    def read(self, start: int, stop: int, *, vocab_size: int | None = None) -> Rows:
        """Rows [start, stop), their values checked; ids must lie below `vocab_size` where it is known."""
        try:
            fields = [rows.read(start, stop) for rows in self._rows.values()]
            starts = None if self._starts is None else self._starts.read(start, stop)
        except Exception as error:  # a damaged file makes the library raise whatever it likes
            raise _damaged(self.path, error) from error
        problem = find_bad_values(Rows.of(fields), vocab_size)  # as stored: a wider type could wrap around
        if problem:
            raise UserError(f"{self.path}: rows {start}–{stop - 1} {problem}; {REMEDY}")
        kinds = [kind for _, kind in DATASETS.values()]
        return Rows.of([array.astype(kind, copy=False) for array, kind in zip(fields, kinds, strict=True)], starts)

    def _checked_dataset(self, name: str) -> h5py.Dataset:
        return self._file[name] if self._is_checked else _checked_dataset(self.path, self._file, name)

    def _check_extents(self) -> None:
        """No two datasets, and no two chunks, may lie on the same bytes."""
        parts = [*self._datasets.values(), *([] if self._word_starts is None else [self._word_starts])]
        if overlap(extent for part in parts for extent in stored_extents(part)):
            raise UserError(f"{self.path}: is damaged: two of its pieces lie on the same bytes; {REMEDY}")

    def _checked_word_starts(self) -> h5py.Dataset | None:
        if WORD_STARTS not in self._file:
            return None
        dataset = self._checked_dataset(WORD_STARTS)
        expected = (self.num_rows, math.ceil(self.max_seq_length / 8))
        if dataset.shape != expected or dataset.dtype != np.uint8:
            raise UserError(
                f"{self.path}: {WORD_STARTS} is {dataset.dtype} {dataset.shape}, not uint8 {expected}; {REMEDY}"
            )
        return dataset


def _rows_of(dataset: h5py.Dataset) -> ChunkedRows | ContiguousRows:
    return ChunkedRows(dataset) if dataset.chunks else ContiguousRows(dataset)


def find_bad_values(rows: Rows, vocab_size: int | None) -> str | None:
    """What is wrong with the values of `rows`, or None. One pass over each field: about 1 µs a row of 128 tokens."""
    width = rows.input_ids.shape[1]
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    ranges: list[tuple[str, np.ndarray, int]] = [
        ("input_ids", rows.input_ids, limit),
        ("masked_lm_ids", rows.masked_lm_ids, limit),
        ("masked_lm_positions", rows.masked_lm_positions, width),
        ("input_mask", rows.input_mask, 2),
        ("segment_ids", rows.segment_ids, 2),
        ("next_sentence_labels", rows.next_sentence_labels, 2),
    ]
    for name, values, bound in ranges:
        if values.size and (values.min() < 0 or values.max() >= bound):
            hint = " of the tokenizer; name the one that made them" if bound == vocab_size else ""
            return f"have {name} outside 0…{bound - 1}{hint} (found {values.min()}…{values.max()})"
    positions = rows.masked_lm_positions
    if (positions[:, 1:] * (positions[:, :-1] == 0)).any():
        return "have masked_lm_positions after the 0 that ends them"
    row_index, column = np.nonzero(positions)
    if not rows.input_mask[row_index, positions[row_index, column]].all():
        return "have masked_lm_positions in the padding"
    return None


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; expected a shard; check the folder, or prepare it with `{PREPARE_COMMAND}`"
        )
    try:
        # No lock: shards are read-only for many ranks, and network file systems often refuse locks.
        return h5py.File(path, "r", locking=False)
    except Exception as error:  # a damaged file makes the library raise whatever it likes
        with path.open("rb") as stream:
            is_hdf5 = stream.read(8) == b"\x89HDF\r\n\x1a\n"
        if is_hdf5:
            raise _damaged(path, error) from error
        raise UserError(
            f"{path}: is no HDF5 file ({path.stat().st_size:,} bytes); expected a shard, as docs/data_format.md "
            f"describes it; remove it from the folder, or {REMEDY}"
        ) from error


def _identity(file: h5py.File) -> Identity:
    """Of the very file that is open, whatever its path has come to name meanwhile."""
    found = os.fstat(file.id.get_vfd_handle())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _checked_dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    link = file.get(name, getlink=True)
    if link is None:
        found = ", ".join(sorted(file)[:12]) or "nothing"
        raise UserError(
            f"{path}: has no dataset {name!r} (it has {found}); shards need {', '.join(DATASETS)}; {REMEDY}"
        )
    if not isinstance(link, h5py.HardLink):
        raise UserError(
            f"{path}: {name!r} is a {type(link).__name__} to somewhere else, which is refused; expected a dataset in "
            f"the file itself; {REMEDY}"
        )
    dataset = file[name]
    reason = reason_to_refuse(dataset, path.stat().st_size)
    if reason:
        raise UserError(f"{path}: {name!r} {reason}, which is refused; {REMEDY}")
    return dataset


def _checked_shapes(path: Path, datasets: dict[str, h5py.Dataset]) -> tuple[int, int, int]:
    for name, (letters, _) in DATASETS.items():
        if datasets[name].ndim != len(letters):
            raise UserError(
                f"{path}: {name!r} has the shape {datasets[name].shape}, not [{', '.join(letters)}]; {REMEDY}"
            )
    sizes = {
        "N": datasets["input_ids"].shape[0],
        "S": datasets["input_ids"].shape[1],
        "P": datasets["masked_lm_positions"].shape[1],
    }
    for name, (letters, _) in DATASETS.items():
        expected = tuple(sizes[letter] for letter in letters)
        if datasets[name].shape != expected:
            raise UserError(f"{path}: {name!r} has the shape {datasets[name].shape}, expected {expected}; {REMEDY}")
    if sizes["S"] > MAX_ROW_LENGTH or sizes["P"] > MAX_ROW_LENGTH:
        raise UserError(
            f"{path}: declares rows of {sizes['S']:,} tokens and {sizes['P']:,} predictions, expected up to "
            f"{MAX_ROW_LENGTH:,}; {REMEDY}"
        )
    if 0 in sizes.values():
        raise UserError(f"{path}: has {sizes['N']} rows of {sizes['S']} tokens and {sizes['P']} predictions; {REMEDY}")
    return sizes["N"], sizes["S"], sizes["P"]


def _checked_attributes(path: Path, file: h5py.File, is_checked: bool) -> dict[str, Any] | None:
    """Our own attributes, or None for a shard made elsewhere, which is good data too."""
    if ATTRIBUTE not in file.attrs:
        return None
    if file.attrs.get_id(ATTRIBUTE).get_storage_size() > _MAX_ATTRIBUTE_BYTES:
        raise UserError(f"{path}: its attribute {ATTRIBUTE!r} is too large; {REMEDY}")
    is_in_heap = file.attrs.get_id(ATTRIBUTE).dtype.kind == "O"
    if is_in_heap and not is_checked and not heaps_are_sound(path):
        raise UserError(f"{path}: is damaged: its attribute {ATTRIBUTE!r} cannot be found; {REMEDY}")
    value = file.attrs[ATTRIBUTE]
    try:
        attributes = json.loads(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: its attribute {ATTRIBUTE!r} is no JSON; {REMEDY}") from error
    if not isinstance(attributes, dict) or not isinstance(attributes.get("format_version"), int):
        raise UserError(f"{path}: its attribute {ATTRIBUTE!r} has no format_version; {REMEDY}")
    if attributes["format_version"] > FORMAT_VERSION:
        found = attributes["format_version"]
        raise UserError(
            f"{path}: has format version {found}, this program reads up to {FORMAT_VERSION}; update the program"
        )
    return attributes


def _damaged(path: Path, error: Exception) -> UserError:
    detail = str(error).split("\n")[0].strip("'\"")
    return UserError(f"{path}: is damaged or incomplete ({detail}); expected a whole HDF5 file; {REMEDY}")
