"""Lines of a stream in bounded pieces, and which of them belong to a range of its bytes."""

from collections import Counter
from collections.abc import Iterator
from typing import IO, NamedTuple

MAX_LINE = 2**20  # bytes; a longer line is read in pieces, so that memory stays bounded
MAX_RECORD = 64 * 2**20  # bytes of a line that must be whole; a longer one is dropped
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """A line, or a part of a very long one."""

    content: bytes
    line_start: int  # where in the stream its line begins
    end: int
    ends_line: bool
    is_blank: bool  # whether its line has been nothing but white space so far


def pieces(stream: IO[bytes], position: int) -> Iterator[Piece]:
    """The stream from `position`, where a line begins, piece by piece. A long line is cut between characters."""
    start, is_blank = position, True
    held = b""  # the beginning of a character, for the next piece
    while (read := stream.readline(MAX_LINE)) or held:
        content = held + read
        ends_line = content.endswith(b"\n")
        is_cut = len(read) == MAX_LINE and not ends_line
        held = _begun_character(content) if is_cut else b""
        content = content.removesuffix(held)
        if not content:
            continue
        end = position + len(content)
        if position == 0:
            content = content.removeprefix(_BYTE_ORDER_MARK)
        is_blank = is_blank and not content.strip()
        yield Piece(content, start, end, ends_line, is_blank)
        position = end
        if ends_line:
            start, is_blank = position, True


def _begun_character(content: bytes) -> bytes:
    """The bytes at the end, three at most, that are the beginning of a character in UTF-8."""
    for size in range(1, min(3, len(content)) + 1):
        first = content[-size]
        if first < 0x80:
            break
        if first >= 0xC0:  # all further bytes of a character are less
            length = 2 + (first >= 0xE0) + (first >= 0xF0)
            return content[-size:] if size < length else b""
    return b""


class Extent(NamedTuple):
    """Where the lines of a range of bytes lie."""

    begin: int
    end: int | None  # None = the end of the file
    goes_on: bool  # whether they begin in the midst of a document


def extent_of_range(stream: IO[bytes], start: int, stop: int | None) -> Extent:
    """Which lines belong to [start, stop), in a file that is cut into ranges of this size; `stop` None: the last one.

    A range begins after the first blank line that starts in it, which is where a document begins; where there is none,
    after the first line that lies in it, amid a document; else nowhere. The file's last range, which may be small,
    never begins amid a document. A range ends where the next one begins that begins at all, so ranges share nothing and
    lose nothing. Finding both reads no more than the range itself and up to the end of the one in which the next
    begins. The stream is left at the begin.
    """
    if start == 0 and stop is None:
        return Extent(0, None, False)  # a whole file, which may be a stream that cannot seek
    own = _begin_in(stream, start, stop) if start > 0 else _Begin(0, False)
    if own is None:
        return Extent(start, start, False)
    following = None
    while stop is not None and following is None and _has_byte(stream, stop):
        start, stop = stop, stop + (stop - start)
        following = _begin_in(stream, start, stop)
    stream.seek(own.position)
    return Extent(own.position, following.position if following else None, own.goes_on)


def lines_of_extent(stream: IO[bytes], extent: Extent, counts: Counter[str]) -> Iterator[bytes]:
    """The lines of a stream that stands at their begin, very long ones in pieces."""
    if extent.begin == extent.end:
        return
    line_start: int | None = None
    for piece in pieces(stream, extent.begin):
        if piece.line_start == line_start:
            counts["long_lines_cut"] += 1
        line_start = piece.line_start
        yield piece.content
        if piece.end == extent.end:
            return


def records_of_range(stream: IO[bytes], start: int, stop: int | None, counts: Counter[str]) -> Iterator[bytes]:
    """The whole lines that begin in [start, stop); blank ones and those beyond `MAX_RECORD` left out."""
    parts: list[bytes] = []
    size = 0
    for piece in _from_byte_before(stream, start):
        if stop is not None and piece.line_start >= stop:
            break
        if piece.line_start >= start:
            size += len(piece.content)
            parts = [*parts, piece.content] if size <= MAX_RECORD else []
        elif stop is not None and piece.end >= stop:
            break  # the rest of a line that began before the range
        if piece.ends_line:
            yield from _record(parts, size, counts)
            parts, size = [], 0
    yield from _record(parts, size, counts)


def _record(parts: list[bytes], size: int, counts: Counter[str]) -> Iterator[bytes]:
    if size > MAX_RECORD:
        counts["records_too_long"] += 1
    elif (line := b"".join(parts)).strip():
        yield line


def _from_byte_before(stream: IO[bytes], start: int) -> Iterator[Piece]:
    """From one byte before `start`: the first piece is the end of the line before, even where that is its \\n alone."""
    if start > 0:
        stream.seek(start - 1)
    return pieces(stream, max(0, start - 1))


class _Begin(NamedTuple):
    position: int
    goes_on: bool


def _begin_in(stream: IO[bytes], start: int, stop: int | None) -> _Begin | None:
    """Where the range [start, stop) begins, if it does."""
    first_end: int | None = None  # of the first line that lies in the range
    for piece in _from_byte_before(stream, start):
        may_be_blank = piece.line_start >= start and piece.is_blank
        if stop is not None and (piece.line_start >= stop or (piece.end > stop and not may_be_blank)):
            return None if first_end is None else _Begin(first_end, True)
        if may_be_blank and piece.ends_line:
            return _Begin(piece.end, False)
        if first_end is None and piece.line_start >= start and piece.ends_line:
            first_end = piece.end
    return None


def _has_byte(stream: IO[bytes], position: int) -> bool:
    stream.seek(position)
    return bool(stream.read(1))
