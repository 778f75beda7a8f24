"""Lines of a stream in bounded pieces, and the lines that belong to a range of its bytes."""

from collections import Counter
from collections.abc import Iterator
from typing import IO, NamedTuple

LONGEST_LINE = 2**20  # bytes; a longer line is read in pieces, so that memory stays bounded
LONGEST_RECORD = 64 * 2**20  # bytes of a line that must be whole; a longer one is dropped
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """A line, or a part of a very long one."""

    content: bytes
    line_start: int  # where in the stream its line begins
    end: int
    ends_line: bool
    is_blank: bool  # whether its line has been nothing but white space so far


def pieces(stream: IO[bytes], position: int) -> Iterator[Piece]:
    """The stream from `position`, where a line begins, piece by piece."""
    start, is_blank = position, True
    while content := stream.readline(LONGEST_LINE):
        end = position + len(content)
        if position == 0:
            content = content.removeprefix(_BYTE_ORDER_MARK)
        is_blank = is_blank and not content.strip()
        ends_line = content.endswith(b"\n")
        yield Piece(content, start, end, ends_line, is_blank)
        position = end
        if ends_line:
            start, is_blank = position, True


def lines_of_range(stream: IO[bytes], start: int, stop: int | None, counts: Counter[str]) -> Iterator[bytes]:
    """The lines of the documents that begin in [start, stop), very long ones in pieces.

    A document begins after a blank line. A range starts after the first blank line at or after its start and ends
    with the first blank line at or after its stop, so neighbouring ranges share nothing and lose nothing. Where no
    document begins in a range, nothing beyond it is read.
    """
    found = _from_byte_before(stream, start)
    if start > 0 and not _skip_to_document(found, start, stop):
        return
    for piece in found:
        if not piece.ends_line and len(piece.content) == LONGEST_LINE:
            counts["long_lines_cut"] += 1
        yield piece.content
        if stop is not None and piece.ends_line and piece.is_blank and piece.line_start >= stop:
            return


def records_of_range(stream: IO[bytes], start: int, stop: int | None, counts: Counter[str]) -> Iterator[bytes]:
    """The whole lines that begin in [start, stop); blank ones and those beyond `LONGEST_RECORD` left out."""
    parts: list[bytes] = []
    size = 0
    for piece in _from_byte_before(stream, start):
        if stop is not None and piece.line_start >= stop:
            break
        if piece.line_start >= start:
            size += len(piece.content)
            parts = [*parts, piece.content] if size <= LONGEST_RECORD else []
        elif stop is not None and piece.end >= stop:
            break  # the rest of a line that began before the range
        if piece.ends_line:
            yield from _record(parts, size, counts)
            parts, size = [], 0
    yield from _record(parts, size, counts)


def _record(parts: list[bytes], size: int, counts: Counter[str]) -> Iterator[bytes]:
    if size > LONGEST_RECORD:
        counts["records_too_long"] += 1
    elif (line := b"".join(parts)).strip():
        yield line


def _from_byte_before(stream: IO[bytes], start: int) -> Iterator[Piece]:
    """From one byte before `start`: the first piece is the end of the line before, even where that is its \\n alone."""
    if start > 0:
        stream.seek(start - 1)
    return pieces(stream, max(0, start - 1))


def _skip_to_document(found: Iterator[Piece], start: int, stop: int | None) -> bool:
    """Go past the first blank line at or after `start`; whether there is one before `stop`."""
    for piece in found:
        may_be_blank = piece.line_start >= start and piece.is_blank
        if may_be_blank and piece.ends_line:
            return stop is None or piece.line_start < stop
        if stop is not None and piece.end >= stop and not may_be_blank:
            return False
    return False
