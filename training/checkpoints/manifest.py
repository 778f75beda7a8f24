"""A checkpoint's manifest: the size and digest of every file, and how a checkpoint differs from it."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.files import file_digest, flush_folder, write_atomically
from training.checkpoints.paths import MANIFEST, MODEL_FILE, RANK_FILE, STATE
from training.checkpoints.state import read_state

APPEARING_SECONDS = 10.0  # that a network file system may take to show one machine what another has written


def write_manifest(folder: Path, written: Sequence[tuple[int, str, int]] = ()) -> None:
    """List every file of `folder` with size and digest, and flush them to disk.

    `written`: rank, name and size of files that ranks have written and that rank 0 must see. Raises FileNotFoundError
    if one does not appear there with its size.
    """
    await_files(folder, written)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_digest(path)}
    flush_folder(folder)
    write_atomically(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=2) + "\n")


def await_files(folder: Path, written: Sequence[tuple[int, str, int]]) -> None:
    deadline = time.monotonic() + APPEARING_SECONDS
    for rank, name, size in written:
        path = folder / name
        while (found := path.stat().st_size if path.exists() else None) != size:
            if time.monotonic() > deadline:
                seen = "is missing" if found is None else f"has {found} bytes"
                raise FileNotFoundError(
                    f"rank {rank} wrote {size} bytes to {name}, but on rank 0 it {seen}; --output_dir must be on a "
                    f"file system that all machines share"
                )
            time.sleep(0.2)


def find_damage(folder: Path) -> str | None:
    """Why a checkpoint is not valid, or None if it is."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size} bytes, but {MANIFEST} lists {expected['size']}"
            if file_digest(path) != expected["sha256"]:
                return f"{name} does not match its checksum in {MANIFEST}"
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was never completed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be used ({error})"
    missing = _find_missing(folder, list(files))
    return None if missing is None else f"{missing} is missing in the folder and in {MANIFEST}"


def _find_missing(folder: Path, files: Sequence[str]) -> str | None:
    """The first file that a checkpoint of its ZeRO stage and number of ranks needs but whose manifest does not list."""
    if STATE not in files:
        return STATE
    try:
        state = read_state(folder)
    except UserError:
        return None  # whoever reads it next reports what is wrong
    if state.zero_stage < 3 and MODEL_FILE not in files:
        return MODEL_FILE
    found = {(match[2], int(match[1])) for name in files if (match := RANK_FILE.fullmatch(name))}
    kinds = {0: [], 3: ["optim", "model"]}.get(state.zero_stage, ["optim"])
    needed = [(kind, rank) for rank in range(min(state.world_size, len(files) + 1)) for kind in kinds]
    owners = {"optim": "the optimizer's", "model": "the model's"}
    return next((f"{owners[kind]} file of rank {rank}" for kind, rank in needed if (kind, rank) not in found), None)


def size_in(folder: Path) -> int:
    """Size in bytes of a valid checkpoint, from its manifest."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return sum(int(entry["size"]) for entry in files.values())
