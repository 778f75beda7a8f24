"""Numbers and tables as people read them."""

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """`1 file`, `1,200 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_count(number: float) -> str:
    """1234567 → 1.2 M"""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """`5:07` or `1:05:07`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def aligned_table(rows: Sequence[Sequence[str]], others: str = "<") -> list[str]:
    """Lines with columns as wide as their widest cell: the first aligned to the left, `others` to "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<", *others * (len(widths) - 1)]
    return ["  ".join(map("{:{}{}}".format, row, aligns, widths)).rstrip() for row in rows]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]
