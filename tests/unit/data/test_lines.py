"""Lines in bounded pieces, and ranges that read no more than they need."""

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import lines
from data.lines import LONGEST_LINE, lines_of_range, records_of_range

ROOT = Path(__file__).parents[3]


class Counted(io.BytesIO):
    """Knows how many bytes were read, and the most that were asked for at once."""

    total = largest = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(-1 if size is None else size)
        self.total += len(line)
        self.largest = max(self.largest, len(line))
        return line


@pytest.mark.parametrize("text", [b"a sentence.\n" * 2_000_000, b"word " * 4_000_000])
def test_a_range_in_which_no_document_begins_reads_nothing_beyond_it(text: bytes) -> None:
    stream = Counted(text)
    assert list(lines_of_range(stream, 3_000_000, 7_000_000, Counter())) == []
    assert stream.total <= 4_000_001 + LONGEST_LINE
    assert stream.largest <= LONGEST_LINE


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab \n", max_size=80), st.integers(1, 20), st.sampled_from([1, 3, 100]))
def test_ranges_of_lines_and_of_records_lose_nothing(text: str, size: int, longest: int) -> None:
    """Whatever is cut into pieces: white space alone, in one line, is no end of a document unless it is the line."""
    before, lines.LONGEST_LINE = lines.LONGEST_LINE, longest
    try:
        content = text.encode()
        whole = b"".join(lines_of_range(io.BytesIO(content), 0, None, Counter()))
        assert whole == content
        for read in (lines_of_range, records_of_range):
            expected = list(read(io.BytesIO(content), 0, None, Counter()))
            starts = range(0, max(1, len(content)), size)
            stops = [start + size if start + size < len(content) else None for start in starts]
            found = [
                list(read(io.BytesIO(content), start, stop, Counter()))
                for start, stop in zip(starts, stops, strict=True)
            ]
            assert [line for part in found for line in part] == expected
    finally:
        lines.LONGEST_LINE = before


def test_a_byte_order_mark_is_no_text() -> None:
    assert list(lines_of_range(io.BytesIO(b"\xef\xbb\xbfa\nb"), 0, None, Counter())) == [b"a\n", b"b"]
    assert list(records_of_range(io.BytesIO(b"\xef\xbb\xbf{}\n"), 0, None, Counter())) == [b"{}\n"]


def test_a_record_beyond_the_limit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_RECORD", 10)
    counts: Counter[str] = Counter()
    stream = io.BytesIO(b"short\n" + b"x" * 11 + b"\nalso\n" + b"y" * 20)
    assert list(records_of_range(stream, 0, None, counts)) == [b"short\n", b"also\n"]
    assert counts["records_too_long"] == 2


LONG_LINE = """
import sys
from collections import Counter
from common.memory import peak_resident_mib
from data.sources import find_sources
from data.text import read_documents
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
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    sources, words, cut, mebibytes = map(int, found.split())
    assert sources == 26
    assert words >= 100 * 209_711
    assert cut >= 99
    assert mebibytes < 40
