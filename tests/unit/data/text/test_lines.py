"""Lines in parts of bounded size, and ranges that read no more than they need."""

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text import lines
from data.text.lines import MAX_LINE, records_of_range

ROOT = Path(__file__).parents[4]


class Counted(io.BytesIO):
    """Counts the bytes read, and the most read at once."""

    total = largest = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(-1 if size is None else size)
        self.total += len(line)
        self.largest = max(self.largest, len(line))
        return line


def lines_of_range(stream: io.BytesIO, start: int, stop: int | None, counts: Counter[str]) -> list[bytes]:
    return [part.content for part in lines.lines_of_range(stream, start, stop, counts)]


def ranges(size: int, step: int) -> list[tuple[int, int | None]]:
    return [(start, start + step if start + step < size else None) for start in range(0, max(1, size), step)]


def test_a_range_in_which_no_line_starts_reads_nothing_beyond_it() -> None:
    stream = Counted(b"word " * 4_000_000)
    assert lines_of_range(stream, 3_000_000, 7_000_000, Counter()) == []
    assert stream.total <= 4_000_001 + MAX_LINE
    assert stream.largest <= MAX_LINE


def test_a_document_larger_than_a_range_is_read_by_the_range_in_which_it_begins() -> None:
    line = b"a sentence.\n"
    content = line * 400_000 + b"\n" + line * 1_600_000 + b"\n" + line
    found = [lines_of_range(io.BytesIO(content), *part, Counter()) for part in ranges(len(content), 4_000_000)]
    assert [len(part) for part in found] == [400_001, 1_600_001, 0, 0, 0, 0, 1]
    stream = Counted(content)
    assert lines_of_range(stream, 8_000_000, 12_000_000, Counter()) == []
    assert stream.total <= 4_000_001 + MAX_LINE


@settings(max_examples=300)
@given(st.text(alphabet="aé漢 \n", max_size=80), st.integers(1, 20), st.sampled_from([1, 3, 100]))
def test_ranges_yield_every_line_and_record_once(text: str, size: int, longest: int) -> None:
    """Whatever lines are read in parts: a part of white space ends a document only if it is the whole line."""
    before, lines.MAX_LINE = lines.MAX_LINE, longest
    try:
        content = text.encode()
        assert b"".join(lines_of_range(io.BytesIO(content), 0, None, Counter())) == content
        for read in (lines_of_range, records_of_range):
            expected = list(read(io.BytesIO(content), 0, None, Counter()))
            found = [list(read(io.BytesIO(content), *part, Counter())) for part in ranges(len(content), size)]
            assert [line for part in found for line in part] == expected
    finally:
        lines.MAX_LINE = before


@settings(max_examples=300)
@given(st.text(alphabet="aé漢 \n", max_size=80), st.integers(1, 20), st.sampled_from([1, 3, 100]))
def test_a_range_begins_after_a_blank_line(text: str, size: int, longest: int) -> None:
    before, lines.MAX_LINE = lines.MAX_LINE, longest
    try:
        content = text.encode() + b"\n"
        for start, stop in ranges(len(content), size)[1:]:
            found = list(lines.lines_of_range(io.BytesIO(content), start, stop, Counter()))
            if found:
                line_before = content[: found[0].line_start].splitlines(keepends=True)[-1]
                assert line_before.endswith(b"\n")
                assert not line_before.strip()
                assert start <= found[0].line_start - len(line_before) < (stop or len(content))
    finally:
        lines.MAX_LINE = before


BLOCKS = [b"\n", b"a sentence.\n", b"a sentence.\n" * 300, b"x" * 30_000, b" " * 30_000, b"word " * 10_000 + b"\n"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(BLOCKS), max_size=12))
def test_all_ranges_together_read_a_file_a_bounded_number_of_times(blocks: list[bytes]) -> None:
    """Once to find where documents begin and once for the lines; once more for a line that is mostly white space."""
    before, lines.MAX_LINE = lines.MAX_LINE, 100
    try:
        content = b"".join(blocks)
        parts = ranges(len(content), 1000)
        total = 0
        for part in parts:
            stream = Counted(content)
            lines_of_range(stream, *part, Counter())
            total += stream.total
        assert total <= 3 * len(content) + 3 * 100 * len(parts)
    finally:
        lines.MAX_LINE = before


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 7, 100])
def test_a_long_line_is_cut_between_characters(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", longest)
    text = "aé漢𝄞 漢字漢字\n\nаб𝄞𝄞b\n漢"
    found = list(lines.read_line_parts(io.BytesIO(b"\xef\xbb\xbf" + text.encode()), 0))
    assert "".join(part.content.decode() for part in found) == text
    assert [part.end for part in found if part.ends_line] == [27, 28, 42]
    counts: Counter[str] = Counter()
    cut = lines_of_range(io.BytesIO(text.encode()), 0, None, counts)
    assert counts["long_lines_cut"] == len(cut) - 4
    junk = b"\x80\x80\x80\x80\xf0\xff\xe6\xbc\n\xf0\x9d"  # is yielded unchanged, wherever it is cut
    assert b"".join(lines_of_range(io.BytesIO(junk), 0, None, Counter())) == junk


def test_a_byte_order_mark_is_dropped() -> None:
    assert lines_of_range(io.BytesIO(b"\xef\xbb\xbfa\nb"), 0, None, Counter()) == [b"a\n", b"b"]
    assert list(records_of_range(io.BytesIO(b"\xef\xbb\xbf{}\n"), 0, None, Counter())) == [b"{}\n"]


def test_a_record_beyond_the_limit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_RECORD", 10)
    counts: Counter[str] = Counter()
    stream = io.BytesIO(b"short\n" + b"x" * 11 + b"\nalso\n" + b"y" * 20)
    assert list(records_of_range(stream, 0, None, counts)) == [b"short\n", b"also\n"]
    assert counts["records_too_long"] == 2


LONG_LINE = """
import sys
from collections import Counter
from common.memory import peak_resident_mib
from data.text.sources import find_sources
from data.text.documents import read_documents
sources = find_sources([sys.argv[1]], "sentences")
before, counts = peak_resident_mib(), Counter()
words = 0
for source in sources:
    for document in read_documents(source, counts, language="en", text_field="text"):
        words += sum(sentence.count(" ") + 1 for sentence in document.sentences)
print(len(sources), words, counts["long_lines_cut"], round(peak_resident_mib() - before))
"""


def test_a_line_of_a_hundred_megabytes_takes_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as stream:
        for _ in range(100):
            stream.write(b"word" * 5 + b" " + b"word " * 209_711)
        stream.write(b"\n\nThe end.\n")
    command = [sys.executable, "-c", LONG_LINE, str(tmp_path / "a.txt")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    sources, words, cut, mebibytes = map(int, found.split())
    assert sources == 26
    assert words >= 100 * 209_711
    assert cut >= 99
    assert mebibytes < 40
