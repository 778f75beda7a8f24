"""What to read: files, folders, globs, URLs and datasets become sources; a large file is cut for many workers."""

import glob
import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, NamedTuple, cast

import fsspec

from common.errors import Problems, UserError
from data.shards.schema import SUFFIXES
from data.text.compression import COMPRESSIONS, is_damage, open_binary
from data.text.layouts import layout_of
from data.text.tables import HF_PREFIX, TablePart, cut_parquet, cut_saved

RANGE_BYTES = 4 * 2**20  # of a plain file; the cut depends on the file alone, never on the number of workers
LAYOUTS = ("auto", "sentences", "paragraphs", "running")
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".xml": "wiki", ".parquet": "parquet"}
_SAMPLE_BYTES = 2**16
_BUFFER_BYTES = 2**17
_MAX_IN_PACK = 1000  # sources read by one task
_UNPACKED = 4  # about so many times a compressed file's size is what it holds
# By what a file system tells that a file has changed; each has some of these.
_VERSIONS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "md5Hash", "crc32c", "created")


class Source(NamedTuple):
    """A file, or a part of it: what begins in a range of its bytes, of a table's rows, or of a dataset's files."""

    path: str
    format: str  # sentences, paragraphs, running, jsonl, wiki, wikitext, parquet or hf
    start: int = 0
    stop: int | None = None  # None = to the end
    size: int | None = None  # about how many bytes of text it holds; None = not known

    @property
    def is_compressed(self) -> bool:
        return PurePosixPath(self.path).suffix.lower() in COMPRESSIONS

    @property
    def is_stream(self) -> bool:
        """Whether one worker must read it from the start, though many could clean what it holds."""
        is_large = self.size is not None and self.size >= RANGE_BYTES
        return (
            self.format == "wiki"
            or self.is_named
            or (self.is_compressed and is_large and self.format in ("sentences", "paragraphs", "running", "jsonl"))
        )

    @property
    def is_named(self) -> bool:
        """Whether it is a dataset by name, which is streamed from the hub."""
        return self.path.startswith(HF_PREFIX)


def find_sources(inputs: Sequence[str], layout: str = "auto", leave_out: Sequence[str] = ()) -> list[Source]:
    """Sources in a fixed order: by path, then by position. Files below `leave_out` are none."""
    problems = Problems()
    paths: set[str] = set()
    for given in inputs:
        found = [path for path in _expand(given) if not _is_below(path, leave_out)]
        if not found:
            problems.add(f"--input {given}: no file found; give files, folders, globs or URLs of text, or hf:NAME")
        paths.update(found)
    problems.raise_if_any()
    return [source for path in sorted(paths) for source in _cut(path, layout)]


def pack_sources(sources: Sequence[Source]) -> Iterator[tuple[Source, ...]]:
    """Neighbours that are small together, so that a million small files do not make a million tasks."""
    pack: list[Source] = []
    size = 0
    for source in sources:
        own = RANGE_BYTES if source.size is None else source.size
        if pack and (size + own > RANGE_BYTES or len(pack) == _MAX_IN_PACK):
            yield tuple(pack)
            pack, size = [], 0
        pack.append(source)
        size += own
    if pack:
        yield tuple(pack)


def count_formats(sources: Sequence[Source]) -> Counter[str]:
    """How many files are read as what."""
    return Counter(kind for _, kind in sorted({(source.path, source.format) for source in sources}))


def describe_sources(sources: Sequence[Source]) -> list[Any]:
    """The input as found: a changed file is another input. Of a dataset by name only the name is known."""
    described: list[Any] = []
    for path in sorted({source.path for source in sources}):
        if path.startswith(HF_PREFIX):
            described.append([path])
        elif is_url(path):
            described.append([path, *_describe_url(path)])
        elif Path(path).is_dir():
            described.append([path, *(_state_digest(state) for state in sorted(Path(path).rglob("state.json")))])
        else:
            found = Path(path).stat()
            described.append([path, found.st_size, found.st_mtime_ns])
    return described


def _describe_url(path: str) -> list[Any]:
    system, name = fsspec.core.url_to_fs(path)
    found = system.info(name)
    return [found.get("size"), {key: str(found[key]) for key in _VERSIONS if key in found}]


def _state_digest(path: Path) -> str:
    """Of a saved dataset's state, which holds a fingerprint of its content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_url(path: str) -> bool:
    return "://" in path


def open_source(path: str) -> IO[bytes]:
    """The uncompressed bytes of a local file or a URL."""
    return open_binary(_open_url(path) if is_url(path) else Path(path).open("rb"), path)


def _open_url(path: str) -> IO[bytes]:
    stream = fsspec.open(path, "rb").open()
    if isinstance(stream, fsspec.spec.AbstractBufferedFile):  # its `readline` takes no limit and is slow
        return io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER_BYTES)
    return stream


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
        return [str(file) for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    return [str(path)] if path.is_file() else []


def _expand_url(given: str) -> list[str]:
    try:
        system, path = fsspec.core.url_to_fs(given)
        if glob.has_magic(path):
            names = [name for name in system.glob(path) if system.isfile(name)]
        else:
            names = [name for name in system.find(path) if not _is_hidden(PurePosixPath(name.removeprefix(path)[1:]))]
        return [system.unstrip_protocol(name) for name in sorted(names)]
    except (ImportError, ValueError, OSError) as error:
        raise UserError(
            f"--input {given}: cannot be read ({error}); install the file system's package for fsspec"
        ) from error


def _is_hidden(below: PurePath) -> bool:
    """Whether it, or a folder on the way to it, is hidden: .git, .work, a half-written file."""
    return any(part.startswith(".") for part in below.parts)


def _is_below(path: str, folders: Sequence[str]) -> bool:
    if is_url(path) or path.startswith(HF_PREFIX):
        return any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
    place = Path(path).absolute()
    return any(not is_url(folder) and place.is_relative_to(Path(folder).absolute()) for folder in folders)


def _is_saved_dataset(path: Path) -> bool:
    """A folder that `datasets.save_to_disk` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _cut(path: str, layout: str) -> list[Source]:
    if path.startswith(HF_PREFIX):
        return [Source(path, "hf")]  # of how many files it is, only the hub knows
    if not is_url(path) and Path(path).is_dir():
        return _cut_table(path, "hf")
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    inner = suffixes[:-1] if is_compressed else suffixes
    if inner and inner[-1] in SUFFIXES:
        raise UserError(
            f"--input {path}: is named as an HDF5 shard, which is what data.prepare writes; expected text; give the "
            f"text that it was made of, or a pattern that leaves it out"
        )
    found = _FORMATS.get(inner[-1]) if inner else None
    if found is None:
        found = layout if layout != "auto" else detect_layout(path)
    if found == "parquet":
        return _cut_table(path, "parquet")
    size = _size_of(path)
    if is_compressed or size is None or found == "wiki":
        return [Source(path, found, size=size * _UNPACKED if is_compressed and size is not None else size)]
    if size > RANGE_BYTES and is_url(path) and not _can_seek(path):
        return [Source(path, found, size=size)]
    return cut_ranges(path, found, size)


def cut_ranges(path: str, found: str, size: int) -> list[Source]:
    """Ranges of a plain file of lines; how they are read is in `data.lines`."""
    bounds = [*range(0, max(1, size), RANGE_BYTES), size]
    return [
        Source(path, found, start, None if stop == size else stop, stop - start) for start, stop in pairwise(bounds)
    ]


def cut_part(path: str, found: str) -> list[Source]:
    """A part of a stream that was unpacked: one source, or ranges where a document larger than a range is in it."""
    size = Path(path).stat().st_size
    if found in ("sentences", "paragraphs", "running") and size >= 2 * RANGE_BYTES:
        return cut_ranges(path, found, size)
    return [Source(path, found)]


def _size_of(path: str) -> int | None:
    """None where a file system does not tell it."""
    if not is_url(path):
        return Path(path).stat().st_size
    system, name = fsspec.core.url_to_fs(path)
    return system.info(name).get("size")


def _can_seek(path: str) -> bool:
    """Tried, not asked: a streamed HTTP file says that it can. Of one that cannot be opened, reading will tell."""
    try:
        with open_source(path) as stream:
            stream.seek(1)
    except (OSError, ValueError):
        return False
    return True


def _cut_table(path: str, found: str) -> list[Source]:
    """Rows in runs of about a range's bytes; what cannot be understood is left for reading to count."""
    try:
        ranges = _ranges_of(path, found)
    except Exception as error:
        if isinstance(error, OSError) or is_damage(error):
            return [Source(path, found)]
        raise
    return [Source(path, found, *rows) for rows in ranges] or [Source(path, found)]


def _ranges_of(path: str, found: str) -> list[TablePart]:
    if found == "hf":
        return cut_saved(path, RANGE_BYTES)
    with open_source(path) as stream:
        return cut_parquet(stream, RANGE_BYTES)


def detect_layout(path: str) -> str:
    """How a text file is laid out, from its beginning."""
    try:
        with open_source(path) as stream:
            sample = stream.read(_SAMPLE_BYTES).decode(errors="ignore")
    except Exception as error:
        if isinstance(error, OSError) or is_damage(error):
            return "sentences"  # reading it will count or tell what is wrong
        raise
    return layout_of(sample)
