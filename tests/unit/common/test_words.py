"""Numbers as messages show them."""

from common.words import counted, format_count, format_seconds


def test_counts() -> None:
    assert [format_count(n) for n in (12, 1234, 5.6e6, 7.8e9, 1e12)] == ["12", "1.2 k", "5.6 M", "7.8 G", "1.0 T"]
    assert (counted(1, "file"), counted(1200, "file")) == ("1 file", "1,200 files")


def test_seconds() -> None:
    assert (format_seconds(307), format_seconds(3907)) == ("5:07", "1:05:07")
