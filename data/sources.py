"""What to read: files, folders, globs, URLs and datasets become sources; a large file is cut for many workers."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import fsspec

from common.errors import Problems, UserError
from data.compression import COMPRESSIONS, is_damage, open_binary

RANGE_BYTES = 4 * 2**20  # of a plain file; the cut depends on the file alone, never on the number of workers
HF_PREFIX = "hf:"
LAYOUTS = ("auto", "sentences", "paragraphs", "running")
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".xml": "wiki", ".parquet": "parquet"}
_SAMPLE_BYTES = 2**16
_SENTENCE_INSIDE = re.compile(r"[.!?][\"')\]]*\s+[\"'(]?[A-Z]")
_LINE_END = re.compile(r"[.!?:;…。！？][\"')\]”’]*$")


class Source(NamedTuple):
    """A file, or the documents of it that begin in a range of bytes."""

    path: str
    format: str  # sentences, paragraphs, running, jsonl, wiki, parquet or hf
    start: int = 0
    stop: int | None = None  # None = to the end


def find_sources(inputs: Sequence[str], layout: str = "auto") -> list[Source]:
    """Sources in a fixed order: by path, then by position."""
    problems = Problems()
    paths: set[str] = set()
    for given in inputs:
        found = _expand(given)
        if not found:
            problems.add(f"--input {given}: no file found; give files, folders, globs or URLs of text, or hf:NAME")
        paths.update(found)
    problems.raise_if_any()
    return [source for path in sorted(paths) for source in _cut(path, layout)]


def describe_sources(sources: Sequence[Source]) -> list[Any]:
    """The input as found: a changed file is another input."""
    described: list[Any] = []
    for path in sorted({source.path for source in sources}):
        if is_url(path) or path.startswith(HF_PREFIX) or Path(path).is_dir():
            described.append([path])
        else:
            described.append([path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns])
    return described


def is_url(path: str) -> bool:
    return "://" in path


def open_source(path: str) -> IO[bytes]:
    """The uncompressed bytes of a local file or a URL."""
    return open_binary(fsspec.open(path, "rb").open() if is_url(path) else Path(path).open("rb"), path)


def _expand(given: str) -> list[str]:
    if given.startswith(HF_PREFIX):
        return [given]
    if is_url(given):
        return _expand_url(given)
    if glob.has_magic(given):
        matches = map(Path, glob.iglob(given, recursive=True))  # noqa: PTH207 (a pattern may be absolute)
        return [str(path) for path in matches if path.is_file()]
    path = Path(given)
    if path.is_dir():
        if _is_saved_dataset(path):
            return [str(path)]
        return [str(file) for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return [str(path)] if path.is_file() else []


def _expand_url(given: str) -> list[str]:
    try:
        system, path = fsspec.core.url_to_fs(given)
        names = system.glob(path) if glob.has_magic(path) else system.find(path)
        return [system.unstrip_protocol(name) for name in sorted(names) if not PurePosixPath(name).name.startswith(".")]
    except (ImportError, ValueError, OSError) as error:
        raise UserError(
            f"--input {given}: cannot be read ({error}); install the file system's package for fsspec"
        ) from error


def _is_saved_dataset(path: Path) -> bool:
    """A folder that `datasets.save_to_disk` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _cut(path: str, layout: str) -> list[Source]:
    if path.startswith(HF_PREFIX) or (not is_url(path) and Path(path).is_dir()):
        return [Source(path, "hf")]
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    inner = suffixes[:-1] if is_compressed else suffixes
    found = _FORMATS.get(inner[-1]) if inner else None
    if found is not None:
        return [Source(path, found)]
    found = layout if layout != "auto" else detect_layout(path)
    if is_compressed or is_url(path) or found == "running":
        return [Source(path, found)]
    size = Path(path).stat().st_size
    starts = range(0, max(1, size), RANGE_BYTES)
    return [
        Source(path, found, start, None if start + RANGE_BYTES >= size else start + RANGE_BYTES) for start in starts
    ]


def detect_layout(path: str) -> str:
    """How a text file is laid out, from its beginning.

    sentences   one sentence a line, a blank line between documents
    paragraphs  one paragraph a line, a blank line between documents
    running     lines broken anywhere, a blank line between paragraphs; the file is one document
    """
    try:
        with open_source(path) as stream:
            sample = stream.read(_SAMPLE_BYTES).decode(errors="ignore")
    except Exception as error:
        if isinstance(error, OSError) or is_damage(error):
            return "sentences"  # reading it will count or tell what is wrong
        raise
    lines = [line.strip() for line in sample.split("\n") if line.strip()]
    if not lines:
        return "sentences"
    closed = sum(1 for line in lines if _LINE_END.search(line)) / len(lines)
    several = sum(1 for line in lines if _SENTENCE_INSIDE.search(line)) / len(lines)
    if closed < 0.5:
        return "running"
    return "paragraphs" if several > 0.3 else "sentences"
