"""Parquet files and Hugging Face datasets: where to cut them for many workers, and the records of a part."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.errors import UserError
from data.text.compression import is_damage, optional_import

HF_PREFIX = "hf:"
_ROWS_AT_ONCE = 256  # of a Parquet file
# A row group is decoded from its beginning by each who reads a part of it, at a hundredth of what cleaning costs.
_MAX_PARTS_OF_GROUP = 16
_BUFFER_BYTES = 2**20  # read at once of a row group's column, which may be gigabytes


class TablePart(NamedTuple):
    """Rows [start, stop) of a table."""

    start: int
    stop: int
    size: int  # about how many bytes


def cut_parquet(stream: IO[bytes], range_bytes: int) -> list[TablePart]:
    """Rows in runs of about `range_bytes`: small row groups together, large ones in parts."""
    metadata = optional_import("pyarrow.parquet", "reading Parquet").ParquetFile(stream).metadata
    ranges: list[TablePart] = []
    first = row = size = 0  # of the run at hand: its first row, the row after it, its bytes
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for number, group in enumerate(groups, start=1):
        is_large = group.total_byte_size > range_bytes
        if size and is_large:
            ranges.append(TablePart(first, row, size))
            first, size = row, 0
        row, size = row + group.num_rows, size + group.total_byte_size
        if size >= range_bytes or number == len(groups):
            parts = min(_MAX_PARTS_OF_GROUP, -(-size // range_bytes)) if is_large else 1
            ranges += cut_evenly(first, row, size, parts)
            first, size = row, 0
    return ranges


def cut_evenly(start: int, stop: int, size: int, parts: int) -> list[TablePart]:
    """As many ranges as there are parts, or rows; none of no rows."""
    parts = max(1, min(parts, stop - start))
    bounds = [start + (stop - start) * number // parts for number in range(parts + 1)]
    return [TablePart(low, high, size // parts) for low, high in pairwise(bounds) if low < high]


def parquet_values(stream: IO[bytes], name: str, start: int, stop: int | None, text_field: str) -> Iterator[Any]:
    """The column's values in some rows: bytes where they are text, which Parquet does not promise to be UTF-8."""
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
    """Text of any of Arrow's types as bytes; what is no text as it is."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view)
    return column.cast(arrow.large_binary()) if any(test(column.type) for test in is_text) else column


def _groups_of(metadata: Any, start: int, stop: int | None) -> tuple[list[int], int]:
    """The row groups that rows [start, stop) lie in, and the first row of these."""
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
    """The rows of a dataset that was saved to disk, all its splits one after the other."""
    ranges: list[TablePart] = []
    first = 0
    for part in _saved_parts(path):
        size = int(part.data.nbytes)
        ranges += cut_evenly(first, first + len(part), size, -(-size // range_bytes))
        first += len(part)
    return ranges


def saved_records(path: str, start: int, stop: int | None, text_field: str) -> Iterator[Any]:
    first = 0
    for part in _saved_parts(path):
        _check_column(path, text_field, part.column_names)
        low = max(0, start - first)
        high = len(part) if stop is None else min(len(part), stop - first)
        if low < high:
            yield from part.select_columns(text_field).select(range(low, high))
        first += len(part)


def _saved_parts(path: str) -> list[Any]:
    """Its splits that have rows: `datasets` saves one that has none without a file, and then cannot load it."""
    datasets = optional_import("datasets", f"reading {path}")
    try:
        folders = [Path(path)]
        if not (folders[0] / "state.json").is_file():
            splits = json.loads((folders[0] / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            folders = [Path(path) / split for split in splits]
        return [datasets.load_from_disk(str(folder)) for folder in folders if _has_files(folder)]
    except Exception as error:  # `datasets` and what it is made of each raise their own
        if isinstance(error, OSError) or is_damage(error):
            raise
        raise UserError(
            f"{path}: cannot be loaded ({_reason(error)}); expected a dataset that save_to_disk() wrote; save it anew, "
            f"or leave it out of --input"
        ) from error


def _has_files(folder: Path) -> bool:
    return bool(json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"])


def count_shards(given: str) -> int:
    """Of how many files a dataset by name is, which can be read side by side."""
    return int(_load_by_name(given).num_shards)


def named_records(given: str, start: int, stop: int, text_field: str) -> Iterator[Any]:
    """What some of the files of a dataset by name hold, streamed."""
    dataset = _load_by_name(given)
    _check_column(given, text_field, dataset.column_names)
    for index in range(start, stop):
        yield from dataset.shard(num_shards=dataset.num_shards, index=index)


def _load_by_name(given: str) -> Any:
    """`hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME/CONFIG:SPLIT`."""
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
            f"name and the connection, or save it with save_to_disk() where there is one, and give that folder"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).split("\n")[0]


def _check_column(name: str, text_field: str, found: Sequence[str] | None) -> None:
    """`found` None: a dataset that is streamed may not know its columns."""
    if found and text_field not in found:
        raise UserError(f"{name}: has no column {text_field!r} (it has {', '.join(found)}); pass --text_field")
