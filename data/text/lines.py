"""Reads the lines of a byte range of a file, in parts of bounded size.

A file is cut into ranges that tasks read independently. Together they yield every document exactly once: a document
belongs to the range in which the blank line (or the title) before it starts, a record (a JSON line) to the range in
which it starts.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

MAX_LINE = 2**20  # bytes; a longer line is read in several parts
MAX_RECORD = 64 * 2**20  # bytes; a longer record is dropped
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LinePart(NamedTuple):
    """A line, or a part of a very long one."""

    content: bytes
    line_start: int  # position of its line in the stream
    end: int
    ends_line: bool
    is_blank: bool  # whether its line is nothing but white space up to here

    @property
    def is_blank_line(self) -> bool:
        return self.is_blank and self.ends_line


def read_line_parts(stream: IO[bytes], position: int) -> Iterator[LinePart]:
    """Read the stream from `position`, the start of a line. A long line is cut between characters."""
    line_start, is_blank = position, True
    held = b""  # the beginning of a character that continues in the next part
    while (read := stream.readline(MAX_LINE)) or held:
        if position > 0 and line_start == position and not held and read.endswith(b"\n"):  # a whole line, as most are
            position += len(read)
            yield LinePart(read, line_start, position, True, read.isspace())
            line_start = position
            continue
        content = held + read
        ends_line = content.endswith(b"\n")
        is_cut = len(read) == MAX_LINE and not ends_line
        held = _incomplete_character(content) if is_cut else b""
        content = content.removesuffix(held)
        if not content:
            continue
        end = position + len(content)
        if position == 0:
            content = content.removeprefix(_BYTE_ORDER_MARK)
        is_blank = is_blank and (not content or content.isspace())
        yield LinePart(content, line_start, end, ends_line, is_blank)
        position = end
        if ends_line:
            line_start, is_blank = position, True


def _incomplete_character(content: bytes) -> bytes:
    """Return the up to three bytes at the end that begin a UTF-8 character without completing it."""
    for size in range(1, min(3, len(content)) + 1):
        first = content[-size]
        if first < 0x80:
            break
        if first >= 0xC0:  # a leading byte; continuation bytes are smaller
            length = 2 + (first >= 0xE0) + (first >= 0xF0)
            return content[-size:] if size < length else b""
    return b""


def is_blank(part: LinePart) -> bool:
    return part.is_blank


def lines_of_range(
    stream: IO[bytes],
    start: int,
    stop: int | None,
    counts: Counter[str],
    separates: Callable[[LinePart], bool] = is_blank,
) -> Iterator[LinePart]:
    """Yield the lines of the documents that belong to [start, stop), and the lines that separate them.

    The last of these documents is read to its end, however far beyond `stop` that is. `separates`: whether a line, as
    far as it is read, stands between documents.
    """
    is_inside = start == 0
    line_start: int | None = None
    for part in _from_byte_before(stream, start):
        if is_inside:
            if part.line_start == line_start:
                counts["long_lines_cut"] += 1
            line_start = part.line_start
            yield part
            if stop is not None and part.line_start >= stop and part.ends_line and separates(part):
                return
            continue
        starts_here = part.line_start >= start
        if stop is not None and (
            part.line_start >= stop or (part.end > stop and not (starts_here and separates(part)))
        ):
            return
        is_inside = starts_here and part.ends_line and separates(part)


def records_of_range(stream: IO[bytes], start: int, stop: int | None, counts: Counter[str]) -> Iterator[bytes]:
    """Yield the whole lines that start in [start, stop), without blank ones and those beyond `MAX_RECORD`."""
    parts: list[bytes] = []
    size = 0
    for part in _from_byte_before(stream, start):
        if stop is not None and part.line_start >= stop:
            break
        if part.line_start >= start:
            size += len(part.content)
            parts = [*parts, part.content] if size <= MAX_RECORD else []
        elif stop is not None and part.end >= stop:
            break  # the rest of a line that started before the range
        if part.ends_line:
            yield from _record(parts, size, counts)
            parts, size = [], 0
    yield from _record(parts, size, counts)


def _record(parts: list[bytes], size: int, counts: Counter[str]) -> Iterator[bytes]:
    if size > MAX_RECORD:
        counts["records_too_long"] += 1
    elif (line := b"".join(parts)).strip():
        yield line


def _from_byte_before(stream: IO[bytes], start: int) -> Iterator[LinePart]:
    """Read from one byte before `start`: the first part is the end of the previous line, if only its line break."""
    if start > 0:
        stream.seek(start - 1)
    return read_line_parts(stream, max(0, start - 1))
