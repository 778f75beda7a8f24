"""Finds the shards of a folder, compares them with its manifest, and opens and describes each of them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.errors import Problems, UserError
from common.files import file_digest
from data.shards.cache import RemoteFile, ShardCache
from data.shards.reader import MAX_BLOCK_ROWS, PREPARE_COMMAND, REMEDY, ShardFile, ShardLayout, layout_like
from data.shards.schema import MANIFEST_NAME, SPLITS, SUFFIXES, Split


class ManifestEntry(NamedTuple):
    """What the manifest says about one shard."""

    num_rows: int
    num_bytes: int
    sha256: str


def split_of(path: Path) -> Split | None:
    """The split of a file: the first of SPLITS that its name contains, so no file is in two splits."""
    return next((split for split in SPLITS if split in path.name), None)


def list_shards(folder: Path) -> list[Path]:
    """The HDF5 files directly in `folder`, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))


def find_shards(folder: Path, split: Split) -> list[Path]:
    """The shards of one split directly in `folder`, sorted by name; UserError if there are none.

    NVIDIA's tools know only `training` and `test`: without `validation` files, the `test` files serve as validation.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder (expected one with shards). Check --data_path_prefix and the model JSON's "
            f"data.mixed_seq_datasets, or prepare data with `{PREPARE_COMMAND} --output_dir …`."
        )
    files = list_shards(folder)
    found = [path for path in files if split_of(path) == split]
    if not found and split == "validation":
        found = [path for path in files if split_of(path) == "test"]
    if not found:
        content = f"{len(files)} HDF5 files, but none" if files else "no HDF5 file"
        hint = " and a larger --validation_share" if split == "validation" and files else ""
        raise UserError(
            f"{folder}: has {content} with {split!r} in its name. Prepare data with "
            f"`{PREPARE_COMMAND} --output_dir …`{hint}, or use another folder in the model JSON."
        )
    return found


def read_manifest(folder: Path) -> dict[str, ManifestEntry]:
    """The entries of a folder's manifest by file name; empty if there is no manifest."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text())["files"]
        found = {str(entry["name"]): ManifestEntry(entry["rows"], entry["bytes"], entry["sha256"]) for entry in files}
        for name, entry in found.items():
            if type(entry.num_rows) is not int or type(entry.num_bytes) is not int:
                raise ValueError(f"rows and bytes of {name} are not integers")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is not a manifest of shards ({error}; expected one that `{PREPARE_COMMAND}` wrote). {REMEDY}"
        ) from error


def check_complete(
    folder: Path, split: Split, paths: Sequence[Path], manifest: dict[str, ManifestEntry], problems: Problems
) -> None:
    """Report files of a split that the manifest lists and that are missing, and files that it does not list."""
    names = {path.name for path in paths}
    for name in manifest:
        if split_of(Path(name)) == split and name not in names:
            problems.add(f"{folder / name}: is missing, but {MANIFEST_NAME} lists it. {REMEDY}")
    for path in paths:
        if manifest and path.name not in manifest:
            problems.add(
                f"{path}: is not listed in the {MANIFEST_NAME} beside it, so it comes from another preparation. Move "
                f"it to another folder."
            )


@dataclass(frozen=True)
class ShardInfo:
    """What is known about a shard without keeping it open."""

    path: Path
    folder: int  # index of its folder among the dataset's folders
    digest: str  # the manifest's sha256; without a manifest, a digest of name, size and number of rows
    layout: ShardLayout  # of the file; without an identity, what a file is expected to have that has not been fetched
    remote: RemoteFile | None = None  # where it is fetched from; then `path` is where it would be


def open_fetched(cache: ShardCache, remote: RemoteFile, known: ShardLayout | None = None) -> ShardFile:
    locked = cache.open(remote)
    try:
        return ShardFile(locked.path, known=known, lock=locked.lock)
    except BaseException:
        locked.lock.close()
        raise


def open_shard(path: Path, cache: ShardCache | None) -> ShardFile:
    """The shard at `path`, fetched if that is in a mirror."""
    if cache is None or not cache.is_mirrored(path):
        return ShardFile(path)
    entry = read_manifest(path.parent)[path.name]
    return open_fetched(cache, cache.remote_of(path, entry.num_bytes, entry.sha256))


def describe_fetched(
    cache: ShardCache, paths: Sequence[Path], folder: int, manifest: dict[str, ManifestEntry], shape: tuple[int, int]
) -> list[ShardInfo]:
    """The shards of a mirrored folder, all written by one preparation."""
    entries = [manifest[path.name] for path in paths]
    remotes = [cache.remote_of(path, entry.num_bytes, entry.sha256) for path, entry in zip(paths, entries, strict=True)]
    # The first one that is large enough to show how chunks are cut, or the largest.
    chosen = max(range(len(paths)), key=lambda index: min(entries[index].num_rows, MAX_BLOCK_ROWS))
    locked = cache.open(remotes[chosen])
    with locked.lock:
        layout = check_shard(locked.path, folder, entries[chosen], shape, verify=False).layout
    expected = [layout_like(layout, entry.num_rows) for entry in entries]
    expected[chosen] = layout
    columns = zip(paths, entries, expected, remotes, strict=True)
    return [ShardInfo(path, folder, entry.sha256, layout, remote) for path, entry, layout, remote in columns]


def check_like(found: ShardLayout, info: ShardInfo) -> None:
    """Refuse a fetched shard that is not as another one of its folder led to expect."""
    for name in ("block_rows", "unit_rows", "max_seq_length", "is_masked", "tokenizer_digest"):
        if getattr(found, name) != getattr(info.layout, name):
            assert info.remote is not None
            raise UserError(
                f"{info.remote.url}: was written differently from the other shards of its folder ({name} is "
                f"{getattr(found, name)}, expected {getattr(info.layout, name)}). {REMEDY}"
            )


def check_shard(
    path: Path, folder: int, entry: ManifestEntry | None, shape: tuple[int, int], verify: bool
) -> ShardInfo:
    """Open a shard once and compare it with its manifest entry and the requested `shape` (S, P)."""
    size = path.stat().st_size if path.is_file() else 0  # ShardFile reports a path that is not a file
    if entry is not None and entry.num_bytes != size:
        raise UserError(
            f"{path}: its size differs from the manifest's (found {size:,} bytes, expected "
            f"{entry.num_bytes:,}). {REMEDY}"
        )
    if entry is not None and verify and file_digest(path) != entry.sha256:
        raise UserError(f"{path}: its content does not match the manifest's sha256. {REMEDY}")
    file = ShardFile(path)
    file.close()
    found = file.layout
    width, num_predictions = shape
    if found.max_seq_length != width:
        raise UserError(
            f"{path}: rows are {found.max_seq_length} tokens wide, but --max_seq_length is {width}. Prepare data for "
            f"{width} with `{PREPARE_COMMAND} --max_seq_length {width} …`, or pass "
            f"--max_seq_length {found.max_seq_length}."
        )
    if found.max_predictions_per_seq > num_predictions:
        raise UserError(
            f"{path}: rows have up to {found.max_predictions_per_seq} predictions, but --max_predictions_per_seq is "
            f"{num_predictions}. Pass --max_predictions_per_seq {found.max_predictions_per_seq}."
        )
    if entry is not None and entry.num_rows != found.num_rows:
        raise UserError(
            f"{path}: its number of rows differs from the manifest's (found {found.num_rows:,}, expected "
            f"{entry.num_rows:,}). {REMEDY}"
        )
    digest = entry.sha256 if entry else hashlib.sha256(f"{path.name}:{size}:{found.num_rows}".encode()).hexdigest()
    return ShardInfo(path, folder, str(digest), found)
