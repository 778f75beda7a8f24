"""Turns files, folders, globs, URLs and datasets into sources; cuts large files for many workers."""

import glob
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import fsspec

from common.console import console
from common.errors import Problems, UserError
from common.stores import is_url
from common.words import counted
from data.shards.schema import SUFFIXES
from data.text.files import (
    COMPRESSIONS,
    can_seek,
    is_archive,
    is_unreadable,
    is_wide,
    open_source,
    read_sample,
    url_info,
)
from data.text.html_pages import is_html
from data.text.layouts import layout_of
from data.text.records import json_kind, looks_like_json, table_kind
from data.text.tables import HF_PREFIX, cut_parquet, cut_saved

RANGE_BYTES = 4 * 2**20  # of a plain file; where it is cut depends on the file alone, not on the number of workers
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".xml": "wiki",
    ".parquet": "parquet",
}
# Files that are found in folders of text, and would only give junk. Named as --input, they are refused.
_NOT_TEXT = set(
    """.pdf .ps .djvu .doc .docx .odt .rtf .epub .mobi .xls .xlsx .ods .ppt .pptx .png .jpg .jpeg .gif .webp .tif .tiff
    .bmp .ico .svg .mp3 .mp4 .wav .ogg .flac .avi .mkv .mov .webm .exe .so .dll .o .class .jar .whl .pyc .bin .pkl
    .pickle .npy .npz .pt .pth .safetensors .onnx .arrow .feather .orc .avro .tfrecord .db .sqlite .sqlite3 .mdb .7z
    .rar .xz .lz4 .iso .ttf .otf .woff .woff2 .css .js""".split()
)
_BEGINNINGS = {"%PDF-": "a PDF", "{\\rtf": "RTF", "PK\x03\x04": "a zip archive"}
_IN_ONE_STREAM = ("json", "csv", "tsv")  # a line of it may be inside a record
_UNPACKED = {"wiki": "wikitext", **dict.fromkeys(("hf", "json", "csv", "tsv"), "jsonl")}
_MAX_NAMED = 5  # files in a message
_MAX_IN_PACK = 1000  # sources read by one task
_EXPANSION = 4  # estimated ratio of a compressed file's content to its size
# The fields by which a file system reports that a file has changed; each has some of these.
_VERSIONS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "md5Hash", "crc32c", "created")


class Source(NamedTuple):
    """A file, or a part of it: a range of its bytes, of a table's rows, or of a dataset's files."""

    path: str
    format: str  # a layout, jsonl, json, csv, tsv, html, wiki, wikitext (a part of a wiki), parquet, hf or archive
    start: int = 0
    stop: int | None = None  # None = to the end
    size: int | None = None  # estimated bytes of text; None = unknown

    @property
    def is_stream(self) -> bool:
        """Whether one worker must read it from the start, while many can clean its content."""
        if self.format == "wiki" or self.is_named:
            return True
        is_compressed = PurePosixPath(self.path).suffix.lower() in COMPRESSIONS
        is_large = self.size is not None and self.size >= RANGE_BYTES
        is_cut_later = is_compressed and self.format in ("sentences", "paragraphs", "articles", "jsonl")
        return is_large and (is_cut_later or self.format in _IN_ONE_STREAM)

    @property
    def unpacked_format(self) -> str:
        """The format of the parts into which a stream is unpacked."""
        return _UNPACKED.get(self.format, self.format)

    @property
    def is_named(self) -> bool:
        """Whether it is a dataset by name, which is streamed from the hub."""
        return self.path.startswith(HF_PREFIX)


def find_sources(inputs: Sequence[str], layout: str = "auto", leave_out: Sequence[str] = ()) -> list[Source]:
    """Return the sources ordered by path, then by position, without files below the folders `leave_out`."""
    problems = Problems()
    paths: set[str] = set()
    for given in inputs:
        found = [path for path in _expand(given) if not _is_below(path, leave_out)]
        if not found:
            is_missing = not is_url(given) and not glob.has_magic(given) and not Path(given).exists()
            what = "no file found there (hidden files and this command's own output are not read)"
            what = "no such file or folder" if is_missing else what
            problems.add(f"--input {given}: {what}; give files, folders, globs or URLs of text, or hf:NAME")
        paths.update(_without_other_kinds(given, found, problems))
    problems.raise_if_any()
    return [source for path in sorted(paths) for source in _cut(path, layout)]


def find_extracted(archive: str, files: Sequence[str], layout: str) -> list[Source]:
    """Return the sources of the files that were extracted from an archive, in its order."""
    problems = Problems()
    found = _without_other_kinds(archive, files, problems)
    problems.raise_if_any()
    nested = [path for path in found if is_archive(path)]
    if nested:
        # Extracted files are numbered.
        names = ", ".join(PurePosixPath(path).name.partition("-")[2] for path in nested[:_MAX_NAMED])
        what = f"{archive}: an archive inside an archive is not opened ({counted(len(nested), 'archive')}: {names})"
        if len(nested) == len(found):
            raise UserError(f"{what}; expected files with text; extract the outer archive, and give the folder")
        console.warn(f"{what}; extract the outer archive, and give the folder")
    return [source for path in found if path not in nested for source in _cut(path, layout)]


def _without_other_kinds(given: str, paths: Sequence[str], problems: Problems) -> list[str]:
    """Leave out files that are not text, with a warning; if there are no others, they are a problem."""
    found = [path for path in paths if PurePosixPath(path).suffix.lower() not in _NOT_TEXT]
    others = sorted(set(paths) - set(found))
    if others and not found:
        problems.add(
            f"--input {given}: {PurePosixPath(others[0]).name} is not a text file; expected text, HTML, JSON, CSV, "
            f"TSV, Parquet, a wiki dump or an archive of these; convert it to text, and give the result"
        )
    elif others:
        name = PurePosixPath(others[0]).name
        console.warn(f"--input {given}: {counted(len(others), 'file')} skipped as not text, such as {name}")
    return found


def pack_sources(sources: Sequence[Source]) -> Iterator[tuple[Source, ...]]:
    """Group small neighbours, so that a million small files do not become a million tasks."""
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
    return Counter(kind for _, kind in sorted({(source.path, source.format) for source in sources}))


def describe_formats(sources: Sequence[Source]) -> str:
    num_files = len({source.path for source in sources})
    formats = ", ".join(f"{kind} ({count:,})" for kind, count in count_formats(sources).items())
    return f"{counted(num_files, 'file')}, read as {formats}"


def describe_sources(sources: Sequence[Source]) -> list[Any]:
    """Describe the input so that a changed file changes the description. Of a dataset by name, only the name counts."""
    described: list[Any] = []
    for path in sorted({source.path for source in sources}):
        if path.startswith(HF_PREFIX):
            described.append([path])
        elif is_url(path):
            found = url_info(path)
            described.append([path, found.get("size"), {key: str(found[key]) for key in _VERSIONS if key in found}])
        elif Path(path).is_dir():  # a saved dataset, whose state holds a fingerprint of its content
            states = sorted(Path(path).rglob("state.json"))
            described.append([path, *(hashlib.sha256(state.read_bytes()).hexdigest() for state in states)])
        else:
            status = Path(path).stat()
            described.append([path, status.st_size, status.st_mtime_ns])
    return described


def _expand(given: str) -> list[str]:
    if given.startswith(HF_PREFIX):
        return [given]
    if is_url(given):
        return _expand_url(given)
    if glob.has_magic(given):
        matches = map(Path, glob.iglob(given, recursive=True))  # noqa: PTH207 (a pattern may be absolute)
        return [str(path) for path in matches if path.is_file()]
    path = Path(given)
    if path.is_dir() and not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [str(file) for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    return [str(path)] if path.is_file() or path.is_dir() else []  # a folder here is a dataset that was saved


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


def _is_hidden(relative: PurePath) -> bool:
    """Whether the file or one of its folders is hidden: .git, .work, a partly written file."""
    return any(part.startswith(".") for part in relative.parts)


def _is_below(path: str, folders: Sequence[str]) -> bool:
    if is_url(path) or path.startswith(HF_PREFIX):
        return any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
    absolute = Path(path).absolute()
    return any(not is_url(folder) and absolute.is_relative_to(Path(folder).absolute()) for folder in folders)


def _cut(path: str, layout: str) -> list[Source]:
    if path.startswith(HF_PREFIX):
        return [Source(path, "hf")]  # only the hub knows how many files it has
    if not is_url(path) and Path(path).is_dir():
        return _cut_table(path, "hf")
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    inner = (["", *suffixes[:-1]] if is_compressed else ["", *suffixes])[-1]
    if inner in SUFFIXES:
        raise UserError(
            f"--input {path}: is named like an HDF5 shard, which is the output of data.prepare; expected text; give "
            f"the text that it was made from, or a pattern that leaves it out"
        )
    found = "archive" if is_archive(path) else _format(path, inner, layout)
    if found == "parquet":
        return _cut_table(path, "parquet")
    size = url_info(path).get("size") if is_url(path) else Path(path).stat().st_size
    if is_compressed or size is None:
        return [Source(path, found, size=size and size * _EXPANSION)]
    # Running text is a single document.
    is_whole = found in ("archive", "wiki", "html", "running", *_IN_ONE_STREAM) or size <= RANGE_BYTES or is_wide(path)
    if is_whole or (is_url(path) and not can_seek(path)):
        return [Source(path, found, size=size)]
    bounds = [*range(0, size, RANGE_BYTES), size]
    return [
        Source(path, found, start, None if stop == size else stop, stop - start) for start, stop in pairwise(bounds)
    ]


def _format(path: str, suffix: str, layout: str) -> str:
    """Return the format by the suffix, else by the beginning of the file."""
    found = _FORMATS.get(suffix)
    if found == "jsonl":
        return json_kind(read_sample(path))
    if found is not None and found != "wiki":
        return found
    sample = read_sample(path)
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if sample.startswith(beginning)), None)
    if found == "wiki" and sample and "<mediawiki" not in sample:
        kind = "XML, but not a dump of a wiki (<mediawiki>)"
    if is_html(sample):
        return "html"
    if kind is not None:
        raise UserError(
            f"--input {path}: is {kind}; expected text, HTML, JSON, CSV, TSV, Parquet or a wiki dump; convert it to "
            f"text, or give a pattern that leaves it out"
        )
    if found is None and layout == "auto":
        return json_kind(sample) if looks_like_json(sample) else table_kind(sample) or layout_of(sample)
    return found or layout


def _cut_table(path: str, found: str) -> list[Source]:
    """Cut a table into runs of rows of about `RANGE_BYTES`; a damaged one stays whole, and reading counts it."""
    try:
        if found == "hf":
            ranges = cut_saved(path, RANGE_BYTES)
        else:
            with open_source(path) as stream:
                ranges = cut_parquet(stream, RANGE_BYTES)
    except Exception as error:
        if not is_unreadable(error):
            raise
        ranges = []
    return [Source(path, found, *rows) for rows in ranges] or [Source(path, found)]
