"""What to read: files, folders and globs become sources, cut so that many workers can read one large file."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import Problems

RANGE_BYTES = 4 * 2**20  # of a plain file; the cut depends on the file alone, never on the number of workers
_COMPRESSIONS = {".gz", ".bz2", ".zst", ".zstd"}
_TEXT_SUFFIXES = {".txt", ".text", ".md", ""}


class Source(NamedTuple):
    """A file, or the documents of it that begin in a range of bytes."""

    path: str
    start: int
    stop: int | None  # None = to the end


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """Sources in a fixed order: by path, then by position."""
    problems = Problems()
    paths: set[Path] = set()
    for given in inputs:
        found = _expand(given)
        if not found:
            problems.add(f"--input {given}: no file found; give files, folders or globs of text")
        paths.update(found)
    problems.raise_if_any()
    return [source for path in sorted(paths) for source in _cut(path)]


def _expand(given: str) -> list[Path]:
    if glob.has_magic(given):
        matches = map(Path, glob.iglob(given, recursive=True))  # noqa: PTH207 (a pattern may be absolute)
        return [path for path in matches if path.is_file()]
    path = Path(given)
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return [path] if path.is_file() else []


def _cut(path: Path) -> list[Source]:
    size = path.stat().st_size
    if path.suffix not in _TEXT_SUFFIXES or size <= RANGE_BYTES:
        return [Source(str(path), 0, None)]
    starts = range(0, size, RANGE_BYTES)
    return [Source(str(path), start, min(start + RANGE_BYTES, size)) for start in starts]
