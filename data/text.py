"""Reads documents out of a source as lists of sentences, and survives whatever else is in the file."""

from collections import Counter
from collections.abc import Iterator
from typing import IO

from data.sources import Source

LONGEST_LINE = 2**20  # bytes; longer lines are cut, so that memory stays bounded
LARGEST_DOCUMENT = 2**20  # characters; a larger one is cut between sentences


def read_documents(source: Source, counts: Counter[str]) -> Iterator[list[str]]:
    """Documents of one sentence a line with blank lines between them. `counts` collects what was met on the way."""
    with open(source.path, "rb") as stream:  # noqa: PTH123
        document: list[str] = []
        size = 0
        for line in _lines_of_range(stream, source, counts):
            sentence = _clean(line, counts)
            if sentence:
                document.append(sentence)
                size += len(sentence)
            if document and (not sentence or size > LARGEST_DOCUMENT):
                yield document
                document, size = [], 0
        if document:
            yield document


def _lines_of_range(stream: IO[bytes], source: Source, counts: Counter[str]) -> Iterator[bytes]:
    """The lines of the documents that begin in the source's range.

    A document begins after a blank line. A range starts after the first blank line at or after its start and ends
    with the first blank line at or after its stop, so neighbouring ranges share nothing and lose nothing.
    """
    position = source.start
    if source.start > 0:
        stream.seek(source.start - 1)
        position += len(stream.readline()) - 1
        while True:
            line = stream.readline(LONGEST_LINE)
            position += len(line)
            if not line:
                return
            if not line.strip():
                break
    while line := stream.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            counts["long_lines_cut"] += 1
        is_blank = not line.strip()
        yield line
        if is_blank and source.stop is not None and position >= source.stop:
            return
        position += len(line)


def _clean(line: bytes, counts: Counter[str]) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        counts["lines_with_bad_utf8"] += 1
        text = line.decode(errors="replace").replace("\ufffd", "")
    return " ".join(text.split())
