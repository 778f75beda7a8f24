"""Reading: streams are unpacked into parts, documents are cleaned into pieces of text; what was read as what."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.console import console
from common.words import counted
from data.preparation.duplicates import DocumentHash, sign
from data.preparation.work_folder import Job, WorkFolder
from data.text.documents import check_text_fields, read_documents, unpack
from data.text.files import DAMAGED, extract, guess_encoding
from data.text.sentences import has_words
from data.text.sources import Source, describe_formats, find_extracted
from data.text.tables import count_shards

PIECE_BYTES = 2 * 2**20
_SAMPLE_SENTENCES = 3  # of the first document of a file, for the report
_MAX_SAMPLE = 160  # characters
_MAX_FILES = 1000  # in the report


def count_files(_: Job, source: Source) -> int:
    """Return the number of files of a dataset by name. The result is kept, so that a resumed run cuts it the same."""
    return count_shards(source.path)


def extract_archive(job: Job, number: int, source: Source) -> dict[str, Any]:
    """Extract the files of an archive into the work folder; return [file, name in the archive] in order."""
    counts: Counter[str] = Counter()
    files = extract(source.path, job.folder.root / "raw" / f"archive-{number:06d}", counts)
    return {"files": files, "counts": counts, "damaged": [source.path] if counts[DAMAGED] else []}


def unpack_stream(job: Job, number: int, source: Source, part_bytes: int) -> dict[str, Any]:
    """Cut a stream, which one worker must read from the start, into parts that many workers can clean."""
    counts: Counter[str] = Counter()
    parts: list[str] = []
    found = unpack(source, counts, job.settings.text_field)
    for content, may_end in found:
        parts.append(str(job.folder.root / "raw" / f"{number:06d}-{len(parts):06d}"))
        with Path(parts[-1]).open("wb") as stream:
            size = stream.write(content)
            while not (may_end and size >= part_bytes) and (following := next(found, None)) is not None:
                size, may_end = size + stream.write(following[0]), following[1]
    damaged = [source.path] if counts[DAMAGED] else []
    encodings = {source.path: guess_encoding(source.path)} if _num_bad_utf8(counts) else {}
    return {"parts": parts, "counts": counts, "damaged": damaged, "encodings": encodings}


def read_sources(job: Job, number: int, sources: Sequence[Source]) -> dict[str, Any]:
    """Clean the documents of some sources into pieces, without those that are too short.

    A document is too short if it, or the first part of a very long one, has too few words.
    """
    settings = job.settings
    counts: Counter[str] = Counter()
    damaged: list[str] = []
    samples: dict[str, str] = {}
    encodings: dict[str, str | None] = {}  # of files that are not UTF-8
    writer = _PieceWriter(job.folder, f"{number:06d}")
    is_kept = False
    for source in sources:
        num_damaged, num_bad = counts[DAMAGED], _num_bad_utf8(counts)
        for document in read_documents(source, counts, language=settings.language, text_field=settings.text_field):
            text = "\n".join(document.sentences) + "\n"
            if not document.is_continuation:
                is_kept = has_words(text, settings.min_document_words)
                counts["documents"] += 1
                if source.start == 0:
                    samples.setdefault(source.path, " ".join(document.sentences[:_SAMPLE_SENTENCES])[:_MAX_SAMPLE])
                counts["documents_too_short"] += not is_kept
            if is_kept:
                counts["sentences"] += len(document.sentences)
                writer.add(text, document.is_continuation)
        if counts[DAMAGED] > num_damaged:
            damaged.append(source.path)
        if _num_bad_utf8(counts) > num_bad and source.format != "parquet":
            encodings[source.path] = guess_encoding(source.path)
    found = {"counts": counts, "damaged": damaged, "samples": samples, "encodings": encodings}
    return {"task": writer.task, "pieces": writer.finish(), **found}


def _num_bad_utf8(counts: Counter[str]) -> int:
    return counts["lines_with_bad_utf8"] + counts["records_with_bad_utf8"]


class _PieceWriter:
    """Writes the documents of one task to pieces and hashes them. A very long document spans several pieces."""

    def __init__(self, folder: WorkFolder, task: str) -> None:
        self.task = task
        self._folder = folder
        self._pieces: list[tuple[str, int, int]] = []  # name, number of the first document, number of documents
        self._hashes = array("Q")  # of the documents that are complete; the current one has the next number
        self._hash: DocumentHash | None = None  # of the current document
        self._texts: list[str] = []  # of the current piece
        self._size = 0  # characters of these
        self._first = 0  # number of the first document of the current piece

    def add(self, text: str, is_continuation: bool) -> None:
        if not is_continuation or self._hash is None:
            self._end_document()
            self._hash = DocumentHash()
        self._hash.update(text)
        if not self._texts:
            self._first = len(self._hashes)
        self._texts.append(text if is_continuation or not self._texts else f"\n{text}")
        self._size += len(text)
        if self._size >= PIECE_BYTES:
            self._end_piece()

    def finish(self) -> list[tuple[str, int, int]]:
        """Save the hashes, and return the pieces."""
        if self._texts:
            self._end_piece()
        self._end_document()
        self._folder.save_array("hashes", self.task, np.array(self._hashes, dtype=np.uint64))
        return self._pieces

    def _end_document(self) -> None:
        if self._hash is not None:
            self._hashes.append(self._hash.result())
        self._hash = None

    def _end_piece(self) -> None:
        name = f"{self.task}-{len(self._pieces):06d}"
        self._folder.text_path(name).write_text("".join(self._texts), encoding="utf-8")
        self._pieces.append((name, self._first, len(self._hashes) + 1 - self._first))
        self._texts, self._size = [], 0


def sign_documents(job: Job, piece: str) -> int:
    """Save a MinHash signature for every document of a piece."""
    texts = job.folder.texts(piece)
    job.folder.save_array("signatures", piece, np.stack([sign(text) for text in texts]))
    return len(texts)


class InputFiles:
    """Collects what is read as what."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._names: dict[str, str] = {}  # of extracted files
        self._samples: dict[str, str] = {}
        self._encodings: dict[str, str] = {}  # of files that are not UTF-8, as far as they can be guessed

    def name(self, path: str) -> str:
        """Return the path as the user knows it: of an extracted file, its archive and its name there."""
        return self._names.get(path, path)

    def add(
        self, sources: Sequence[Source], extracted: Mapping[Source, dict[str, Any]], layout: str, text_field: str
    ) -> None:
        """Add the sources, each archive replaced by its files."""
        found: list[Source] = []
        for archive, result in extracted.items():
            self._names |= {path: f"{archive.path}/{name}" for path, name in result["files"]}
            found += find_extracted(archive.path, [path for path, _ in result["files"]], layout)
        if extracted:
            console.say(f"{counted(len(extracted), 'archive')}: {describe_formats(found)}")
        check_text_fields(found, text_field, self._names)
        self.sources += [source for source in sources if source not in extracted] + found

    def add_samples(self, read: Sequence[dict[str, Any]], parts_of: Mapping[Source, Sequence[str]]) -> None:
        """Add how each file begins, and its encoding. `parts_of`: the files into which streams were unpacked."""
        sources = {part: source.path for source, parts in parts_of.items() for part in parts}
        for result in read:
            self._samples |= result.get("samples", {})
            for path, encoding in result["encodings"].items():
                if encoding is not None:
                    self._encodings.setdefault(sources.get(path, path), encoding)
        for source, parts in parts_of.items():
            if parts and source.path not in self._samples:
                self._samples[source.path] = self._samples.get(parts[0], "")

    def describe(self) -> list[dict[str, str]]:
        """Return the first files: path, format and sample."""
        formats = {source.path: source.format for source in self.sources}
        for path, encoding in self._encodings.items():
            formats[path] += f", but it is not UTF-8 ({encoding}?)"
        return [
            {"file": self.name(path), "read_as": formats[path], "sample": self._samples.get(path, "")}
            for path in list(formats)[:_MAX_FILES]
        ]

    def describe_encodings(self) -> str:
        """Name the files that are not UTF-8, their likely encoding, and the remedy; "" if there are none."""
        if not self._encodings:
            return ""
        path, encoding = min(self._encodings.items())
        others = len(self._encodings) - 1
        files = self.name(path) + (f" and {counted(others, 'other file')}" if others else "")
        return (
            f"{files}: not UTF-8 but probably {encoding}; bytes that are not UTF-8 are dropped, and with them letters; "
            f"convert with `iconv -f {encoding} -t utf-8 OLD > NEW`, and give the new files as --input"
        )
