"""A store for tests: shards with their manifest below a URL in memory, whose reads can be counted and broken."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import fsspec

from common.stores import Store
from data.shards.cache import ShardCache
from data.shards.mirror import Mirror
from data.shards.schema import MANIFEST_NAME
from data.shards.writer import shard_bytes
from tests.unit.data.shards_on_disk import make_rows


def make_shards(sizes: Sequence[int], split: str = "training", first: int = 0) -> dict[str, tuple[int, bytes]]:
    """Name → number of rows and content."""
    found = {}
    for number, size in enumerate(sizes):
        content = shard_bytes(make_rows(size, first), {"masked": True})
        found[f"{split}_{number:03d}.hdf5"] = (size, content)
        first += size
    return found


def manifest_of(shards: dict[str, tuple[int, bytes]]) -> bytes:
    files = [
        {"name": name, "rows": rows, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, (rows, content) in shards.items()
    ]
    return json.dumps({"files": files}).encode()


def put(url: str, shards: dict[str, tuple[int, bytes]]) -> None:
    system, root = fsspec.core.url_to_fs(url)
    system.makedirs(root, exist_ok=True)
    for name, (_, content) in shards.items():
        system.pipe_file(f"{root}/{name}", content)
    system.pipe_file(f"{root}/{MANIFEST_NAME}", manifest_of(shards))


def write_folder(folder: Path, shards: dict[str, tuple[int, bytes]]) -> Path:
    put(f"file://{folder}", shards)
    return folder


def mirror(cache: ShardCache, url: str, folder: str = "24") -> Path:
    """The local folder that stands for a folder of the store."""
    made = Mirror(Store(url, "--data_path_prefix"), cache)
    assert made.add_shards(folder)
    return made.folder / folder
