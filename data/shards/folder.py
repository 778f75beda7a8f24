"""Finds the shards of a folder and compares them with the folder's manifest."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import Problems, UserError
from data.shards.reader import PREPARE_COMMAND, REMEDY
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
