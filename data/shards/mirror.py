"""A local folder in the place of a URL: copies of small files, and links for shards, which the cache fetches."""

import os
import re
from collections.abc import Container
from pathlib import Path, PurePosixPath

from common.errors import UserError
from common.files import write_atomically
from common.stores import Store
from data.shards.cache import RemoteFile, ShardCache
from data.shards.folder import list_shards, read_manifest
from data.shards.reader import PREPARE_COMMAND, REMEDY
from data.shards.schema import MANIFEST_NAME, SUFFIXES

REPORT_NAME = "report.json"  # of the preparation, for the model card


class Mirror:
    """The folder that stands for `store`. Only the paths that were added exist below it."""

    def __init__(self, store: Store, cache: ShardCache) -> None:
        place = re.sub(r"[^A-Za-z0-9._/-]+", "_", store.url).strip("/")
        self.folder = cache.folder / "mirrors" / PurePosixPath(place.replace("..", "_"))
        self._store, self._cache = store, cache
        cache.add_mirror(self.folder, store)

    def add_file(self, name: str) -> bool:
        """Copy a small file; False if the store has none of this name."""
        local = self.folder / _plain(name)
        try:
            content = self._store.read(name)
        except FileNotFoundError:
            local.unlink(missing_ok=True)  # of an earlier run
            return False
        local.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(local, content)
        return True

    def add_shards(self, name: str) -> bool:
        """Make the folder `name` with a link for each shard that its manifest lists; False if it has no manifest."""
        folder = self.folder / _plain(name)
        if not self.add_file(f"{name}/{MANIFEST_NAME}"):
            _remove_links(folder, keep={})
            return False
        self.add_file(f"{name}/{REPORT_NAME}")
        listed = read_manifest(folder)
        self._cache.shards.mkdir(parents=True, exist_ok=True)
        for shard, entry in listed.items():
            is_plain = PurePosixPath(shard).name == shard and shard.endswith(SUFFIXES) and not shard.startswith(".")
            if not is_plain or entry.num_bytes < 0 or not re.fullmatch("[0-9a-f]{64}", str(entry.sha256)):
                raise UserError(
                    f"{self._store.url_of(name)}/{MANIFEST_NAME}: its entry {shard!r} is not that of a shard (expected "
                    f"a plain name, bytes and a sha256). {REMEDY}"
                )
            file = RemoteFile(self._store, f"{name}/{shard}", entry.num_bytes, entry.sha256)
            _link(folder / shard, self._cache.shards / file.local_name)
        _remove_links(folder, keep=listed)
        return True

    def refuse_missing(self, name: str) -> UserError:
        return UserError(
            f"{self._store.flag}: {self._store.url_of(name)}/{MANIFEST_NAME}: does not exist; expected the manifest "
            f"of the shards there, because a store need not list its files. Check the URL and the model JSON's "
            f"data.mixed_seq_datasets, or prepare data with `{PREPARE_COMMAND} --output_dir {self._store.url}`"
        )


def _plain(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{name}: cannot be relative to a URL; expected a folder below it. Correct the model JSON")
    return path


def _remove_links(folder: Path, keep: Container[str]) -> None:
    for path in list_shards(folder) if folder.is_dir() else ():
        if path.name not in keep:
            path.unlink(missing_ok=True)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
