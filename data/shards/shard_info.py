"""What is known about a shard that is not open: read from the file, or from the manifest before it is fetched."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import file_digest
from data.shards.cache import RemoteFile, ShardCache
from data.shards.folder import ManifestEntry, read_manifest
from data.shards.reader import MAX_BLOCK_ROWS, PREPARE_COMMAND, REMEDY, ShardFile, ShardLayout, layout_like


@dataclass(frozen=True)
class ShardInfo:
    """What is known about a shard without keeping it open."""

    path: Path
    folder: int  # index of its folder among the dataset's folders
    num_rows: int
    block_rows: int
    unit_rows: int  # rows that are decoded together, if fewer than a block; else 0
    max_seq_length: int
    attributes: dict[str, Any] | None  # None: made by another tool
    digest: str  # the manifest's sha256; without a manifest, a digest of name, size and number of rows
    layout: ShardLayout | None  # of the file that was checked; None if it has not been fetched
    remote: RemoteFile | None = None  # where it is fetched from; then `path` is where it would be

    @property
    def is_masked(self) -> bool:
        return self.attributes is None or bool(self.attributes.get("masked", True))

    @property
    def tokenizer_digest(self) -> str | None:
        found = None if self.attributes is None else self.attributes.get("tokenizer_digest")
        return None if found is None else str(found)


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
        checked = check_shard(locked.path, folder, entries[chosen], shape, verify=False)
    found = []
    for path, entry, remote in zip(paths, entries, remotes, strict=True):
        unit_rows, block_rows = layout_like(checked.unit_rows, checked.block_rows, entry.num_rows)
        found.append(
            replace(
                checked,
                path=path,
                num_rows=entry.num_rows,
                block_rows=block_rows,
                unit_rows=unit_rows,
                digest=entry.sha256,
                layout=checked.layout if remote is remotes[chosen] else None,
                remote=remote,
            )
        )
    return found


def check_like(layout: ShardLayout, info: ShardInfo) -> None:
    """Refuse a fetched shard that is not as another one of its folder led to expect."""
    found = replace(
        info,
        block_rows=layout.block_rows,
        unit_rows=layout.unit_rows,
        max_seq_length=layout.max_seq_length,
        attributes=layout.attributes,
    )
    alike = ("block_rows", "unit_rows", "max_seq_length", "is_masked", "tokenizer_digest")
    for name in alike:
        if getattr(found, name) != getattr(info, name):
            assert info.remote is not None
            raise UserError(
                f"{info.remote.url}: was written differently from the other shards of its folder ({name} is "
                f"{getattr(found, name)}, expected {getattr(info, name)}). {REMEDY}"
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
    return ShardInfo(
        path,
        folder,
        found.num_rows,
        found.block_rows,
        found.unit_rows,
        found.max_seq_length,
        found.attributes,
        str(digest),
        found,
    )
