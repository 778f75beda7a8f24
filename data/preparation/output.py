"""The output folder of a preparation, local or a URL: files written atomically, and the manifest of shards."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from common.console import console
from common.errors import Problems, UserError
from common.files import write_atomically
from common.words import counted
from data.preparation.settings import Settings
from data.shards.schema import FORMAT_VERSION, MANIFEST_NAME, SUFFIXES


def open_output(root: str) -> DirFileSystem:
    """Return a file system whose names are relative to `root`, a local folder or a URL."""
    try:
        system, path = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"--output_dir {root}: cannot be written ({error}); install the file system's package for fsspec"
        ) from error
    return DirFileSystem(path, system)


def write_file(output: DirFileSystem, name: str, content: str | bytes) -> None:
    """Write a file atomically."""
    folder, slash, file = name.rpartition("/")
    output.makedirs(folder, exist_ok=True)
    if isinstance(output.fs, LocalFileSystem):
        write_atomically(Path(output.path) / name, content)
        return
    temporary = f"{folder}{slash}.{file}.tmp"
    output.pipe_file(temporary, content.encode() if isinstance(content, str) else content)
    output.mv(temporary, name)


def file_sizes(output: DirFileSystem, length: int) -> dict[str, int]:
    """Return name → bytes of the files for a length, including hidden ones; nothing if there is no folder."""
    found = output.ls(str(length), detail=True) if output.isdir(str(length)) else []
    sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in found if entry["type"] == "file"}
    return dict(sorted(sizes.items()))


def check_complete(output: DirFileSystem, root: str, fingerprint: str, settings: Settings) -> bool:
    """Return whether this preparation is complete; warn of changed shards, refuse the output of another preparation."""
    complete = []
    for length in settings.max_seq_lengths:
        found, listed = _read_manifest(output, root, length)
        if found is not None and found != fingerprint:
            raise UserError(
                f"{root}/{length}: holds shards made from other input or with other settings; expected none, or those "
                f"of the same command; give another --output_dir, or pass --overwrite to replace them"
            )
        sizes = _shard_sizes(output, length)
        if found is not None and listed != sizes:
            changed = sorted(name for name, _ in listed.items() ^ sizes.items())
            console.warn(f"{root}/{length}: {changed[0]} is not as {MANIFEST_NAME} lists it; preparing it again")
        complete.append(found is not None and listed == sizes)
    return all(complete)


def refuse_to_replace(output: DirFileSystem, root: str, settings: Settings) -> None:
    """Raise UserError if there are shards that no manifest lists: they may be the only copy."""
    problems = Problems()
    for length in settings.max_seq_lengths:
        _, listed = _read_manifest(output, root, length)
        foreign = [name for name in _shard_sizes(output, length) if name not in listed]
        if foreign:
            problems.add(
                f"{root}/{length}: holds {counted(len(foreign), 'HDF5 file')} that this preparation did not make, such "
                f"as {foreign[0]}; expected none; give another --output_dir, or pass --overwrite to replace them"
            )
    problems.raise_if_any()


def clear_output(output: DirFileSystem, settings: Settings, *, is_resumed: bool) -> None:
    """Remove partly written files and, unless the preparation is resumed, old shards and manifests."""
    for length in settings.max_seq_lengths:
        for name in file_sizes(output, length):
            if name.endswith(".tmp") or (not is_resumed and name.endswith((*SUFFIXES, MANIFEST_NAME))):
                output.rm_file(f"{length}/{name}")


def write_manifest(
    output: DirFileSystem, length: int, shards: Sequence[dict[str, Any]], settings: Settings, fingerprint: str
) -> None:
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "settings": asdict(settings),
        "files": [{key: shard[key] for key in ("name", "split", "rows", "bytes", "sha256")} for shard in shards],
    }
    write_file(output, f"{length}/{MANIFEST_NAME}", json.dumps(manifest, indent=2) + "\n")


def _shard_sizes(output: DirFileSystem, length: int) -> dict[str, int]:
    return {name: size for name, size in file_sizes(output, length).items() if name.endswith(SUFFIXES)}


def _read_manifest(output: DirFileSystem, root: str, length: int) -> tuple[str | None, dict[str, int]]:
    """Return the fingerprint of the preparation and the sizes of its shards; (None, {}) if there is no manifest."""
    name = f"{length}/{MANIFEST_NAME}"
    if not output.isfile(name):
        return None, {}
    try:
        manifest = json.loads(output.cat_file(name))
        return str(manifest["fingerprint"]), {file["name"]: file["bytes"] for file in manifest["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{root}/{name}: is not a manifest of shards ({error}); expected one written by this command; give another "
            f"--output_dir, or pass --overwrite to prepare them again"
        ) from error
