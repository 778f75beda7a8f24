"""Reads Parquet files and Hugging Face datasets, and cuts them for many workers."""

import importlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from common.errors import UserError
from data.text.files import is_unreadable

HF_PREFIX = "hf:"
_ROWS_AT_ONCE = 256  # of a Parquet file
# Each reader of a part decodes the row group from its beginning, at a hundredth of the cost of cleaning the text.
_MAX_PARTS_OF_GROUP = 16
_BUFFER_BYTES = 2**20  # read at once from a column of a row group, which may have gigabytes


TablePart = tuple[int, int, int]  # rows [start, stop) of a table, and their estimated bytes


def optional_import(module: str, purpose: str) -> Any:
    """Import a package that only some users need; a missing one is a UserError with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(f"{purpose} needs the package {package!r}; `pip install -r requirements-extras.txt`") from error


def cut_parquet(stream: IO[bytes], range_bytes: int) -> list[TablePart]:
    """Cut the rows into runs of about `range_bytes`: small row groups together, large ones in parts."""
    metadata = optional_import("pyarrow.parquet", "reading Parquet").ParquetFile(stream).metadata
    ranges: list[TablePart] = []
    first = row = size = 0  # of the current run: its first row, the row after it, its bytes
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for number, group in enumerate(groups, start=1):
        is_large = group.total_byte_size > range_bytes
        if size and is_large:
            ranges.append((first, row, size))
            first, size = row, 0
        row, size = row + group.num_rows, size + group.total_byte_size
        if size >= range_bytes or number == len(groups):
            parts = min(_MAX_PARTS_OF_GROUP, -(-size // range_bytes)) if is_large else 1
            ranges += _cut_evenly(first, row, size, parts)
            first, size = row, 0
    return ranges


def _cut_evenly(start: int, stop: int, size: int, parts: int) -> list[TablePart]:
    """Return `parts` non-empty ranges, or one per row if there are fewer rows."""
    parts = max(1, min(parts, stop - start))
    bounds = [start + (stop - start) * number // parts for number in range(parts + 1)]
    return [(low, high, size // parts) for low, high in pairwise(bounds) if low < high]


def parquet_values(stream: IO[bytes], name: str, start: int, stop: int | None, text_field: str) -> Iterator[Any]:
    """Yield the column's values: text as bytes, since Parquet does not guarantee valid UTF-8."""
    arrow = optional_import("pyarrow", f"reading {name}")
    file = optional_import("pyarrow.parquet", f"reading {name}").ParquetFile(stream, buffer_size=_BUFFER_BYTES)
    _check_column(name, text_field, file.schema_arrow.names)
    groups, row = _groups_of(file.metadata, start, stop)
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups, columns=[text_field]):
        low = max(0, start - row)
        high = len(batch) if stop is None else min(len(batch), stop - row)
        row += len(batch)
        if low < high:
            yield from _as_bytes(batch.column(0)[low:high], arrow).to_pylist()
        if stop is not None and row >= stop:
            return


def _as_bytes(column: Any, arrow: Any) -> Any:
    """Convert text of any Arrow type to bytes; leave other values alone."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view)
    return column.cast(arrow.large_binary()) if any(test(column.type) for test in is_text) else column


def _groups_of(metadata: Any, start: int, stop: int | None) -> tuple[list[int], int]:
    """Return the row groups that contain rows [start, stop), and the first row of these groups."""
    groups: list[int] = []
    first = row = 0
    for number in range(metadata.num_row_groups):
        end = row + metadata.row_group(number).num_rows
        if end > start and (stop is None or row < stop):
            first = first if groups else row
            groups.append(number)
        row = end
    return groups, first


def cut_saved(path: str, range_bytes: int) -> list[TablePart]:
    """Cut the rows of a saved dataset, with all its splits one after the other."""
    ranges: list[TablePart] = []
    first = 0
    for split in _saved_splits(path):
        size = int(split.data.nbytes)
        ranges += _cut_evenly(first, first + len(split), size, -(-size // range_bytes))
        first += len(split)
    return ranges


def saved_records(path: str, start: int, stop: int | None, text_field: str) -> Iterator[Any]:
    """Yield rows [start, stop) of a saved dataset, with the one column `text_field`."""
    first = 0
    for split in _saved_splits(path):
        _check_column(path, text_field, split.column_names)
        low = max(0, start - first)
        high = len(split) if stop is None else min(len(split), stop - first)
        if low < high:
            yield from split.select_columns(text_field).select(range(low, high))
        first += len(split)


def _saved_splits(path: str) -> list[Any]:
    """Load the splits that have rows: `datasets` saves an empty one without a file, and then cannot load it."""
    datasets = optional_import("datasets", f"reading {path}")
    try:
        folders = [Path(path)]
        if not (folders[0] / "state.json").is_file():
            splits = json.loads((folders[0] / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            folders = [Path(path) / split for split in splits]
        return [datasets.load_from_disk(str(folder)) for folder in folders if _has_files(folder)]
    except Exception as error:  # `datasets` and its dependencies each raise their own
        if is_unreadable(error):
            raise
        raise UserError(
            f"{path}: cannot be loaded ({_reason(error)}); expected a dataset written by save_to_disk(); save it "
            f"again, or leave it out of --input"
        ) from error


def _has_files(folder: Path) -> bool:
    return bool(json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"])


def count_shards(given: str) -> int:
    """Return the number of files of a dataset by name, which can be read in parallel."""
    return int(_load_by_name(given).num_shards)


def named_records(given: str, start: int, stop: int, text_field: str) -> Iterator[Any]:
    """Stream the records of the files [start, stop) of a dataset by name."""
    dataset = _load_by_name(given)
    _check_column(given, text_field, dataset.column_names)
    for index in range(start, stop):
        yield from dataset.shard(num_shards=dataset.num_shards, index=index)


def _load_by_name(given: str) -> Any:
    """Load `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME/CONFIG:SPLIT`."""
    datasets = optional_import("datasets", f"reading {given}")
    name, _, split = given.removeprefix(HF_PREFIX).partition(":")
    owner, _, rest = name.partition("/")
    repository, _, config = rest.partition("/")
    name = f"{owner}/{repository}" if repository else owner
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the hub, the network and the dataset's own files each raise their own
        raise UserError(
            f"{given}: cannot be loaded ({_reason(error)}); expected a dataset of the Hugging Face hub; check the "
            f"name and the connection, or save it with save_to_disk() on a machine that has one, and give that folder"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).split("\n")[0]


def _check_column(name: str, text_field: str, found: Sequence[str] | None) -> None:
    """Refuse a table without the column. `found` is None if a streamed dataset does not know its columns."""
    if found and text_field not in found:
        raise UserError(f"{name}: has no column {text_field!r} (it has {', '.join(found)}); pass --text_field")
