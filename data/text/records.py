"""Reads records, which have named fields: JSON Lines, JSON arrays, CSV and TSV."""

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, Any

from common.errors import UserError
from common.words import counted
from data.text.lines import MAX_RECORD, records_of_range

Record = dict[str, Any] | None  # None: a value without fields
RECORD_FORMATS = ("jsonl", "json", "csv", "tsv")
_CHUNK = 2**16  # characters of a JSON array that are parsed at once
_RECORDS_CHECKED = 1000  # of a file, to find out which fields it has
_NAMES_SHOWN = 12
_SEPARATORS = ",;\t|"
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}", re.ASCII)
_BAD_BYTE = re.compile("[\udc80-\udcff]")
_BETWEEN = re.compile(r"[ \t\r\n,\[\]]*")  # the values of a JSON array
_TABLE_SUFFIX = re.compile(r"\.[ct]sv(\.\w+)?$", re.IGNORECASE)
_NO_TEXT_IN_FIELDS = "none of these is text; give records with a field of text, in JSON Lines, a JSON array, CSV or TSV"
_MIN_TABLE_ROWS = 3  # besides the names, of a table in a file with another suffix


def read_records(
    stream: IO[bytes], name: str, kind: str, counts: Counter[str], start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the records of a file. Only JSON Lines can be read from within, since elsewhere a line is not a record."""
    if kind == "jsonl":
        return _json_lines(stream, start, stop, counts)
    if kind == "json":
        return _json_values(stream, name, counts)
    return _table_rows(stream, kind, counts)


def check_text_field(stream: IO[bytes], name: str, kind: str, text_field: str) -> None:
    """Refuse a file if none of its first records has the field; name the fields that they have."""
    seen: dict[str, int] = {}  # field → characters of text in it
    num_records = 0
    for record in islice(read_records(stream, name, kind, Counter()), _RECORDS_CHECKED):
        if record is None:
            continue
        if text_field in record:
            return
        num_records += 1
        for field, value in record.items():
            seen[field] = seen.get(field, 0) + (len(value) if isinstance(value, str) else 0)
    if seen:
        raise UserError(_missing_field(name, kind, text_field, num_records, seen))


def _missing_field(name: str, kind: str, text_field: str, num_records: int, seen: dict[str, int]) -> str:
    listed = [repr(field[:60]) for field in seen][:_NAMES_SHOWN]
    fields = ", ".join(listed) + (f" and {len(seen) - _NAMES_SHOWN} more" if len(seen) > _NAMES_SHOWN else "")
    longest = max(seen, key=lambda field: seen[field])
    remedy = f"pass --text_field {longest!r}" if seen[longest] else _NO_TEXT_IN_FIELDS
    if kind in ("csv", "tsv"):
        if not _TABLE_SUFFIX.search(name):  # it was recognised by its content
            remedy += ", or --layout sentences if it is not a table"
        return f"{name}: has no column {text_field!r}; its first line names {fields}; {remedy}"
    unit = "line" if kind == "jsonl" else "record"
    first = "the first " if num_records >= _RECORDS_CHECKED else ""
    verb = "it has" if num_records == 1 else "they have"
    return f"{name}: no field {text_field!r} in {first}{counted(num_records, unit)}; {verb} {fields}; {remedy}"


def json_kind(sample: str) -> str:
    """Return `jsonl`, or `json` if the sample begins an array of records or an object of several lines."""
    first, line_break, _ = sample.lstrip().partition("\n")
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        begins = first.startswith("[") or (first.startswith("{") and line_break)
        return "json" if begins else "jsonl"
    return "json" if isinstance(value, list) and any(isinstance(item, dict) for item in value) else "jsonl"


def looks_like_json(sample: str) -> bool:
    """Whether a file whose suffix names no format has records: its first line is a JSON object, or an array begins."""
    first = sample.lstrip().partition("\n")[0]
    if re.match(r"\[\s*\{", sample.lstrip()):
        return True
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def table_kind(sample: str) -> str | None:
    """Return `tsv` or `csv` for a file whose suffix names no format and whose first line names its columns.

    None for text: names are single words, and every row has as many fields as there are names.
    """
    lines = sample.splitlines()[:-1]  # the last one may be cut off
    for separator in _SEPARATORS:
        names = lines[0].split(separator) if lines else []
        if len(names) < 2 or len(set(names)) < len(names) or not all(map(_COLUMN_NAME.fullmatch, names)):
            continue
        has_quotes = separator != "\t" or _dialect(lines, "tsv")[1]
        try:
            rows = list(_split_rows(lines, separator, has_quotes))[1:]
        except csv.Error:  # a quote that is never closed
            continue
        if len(rows) >= _MIN_TABLE_ROWS and all(len(row) == len(names) for row in rows[:-1]):
            return "tsv" if separator == "\t" else "csv"
    return None


def decode(content: bytes, counts: Counter[str]) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        counts["records_with_bad_utf8"] += 1
        return content.decode(errors="ignore")


def _json_lines(stream: IO[bytes], start: int, stop: int | None, counts: Counter[str]) -> Iterator[Record]:
    for line in records_of_range(stream, start, stop, counts):
        try:
            record = json.loads(decode(line, counts))
        except (ValueError, RecursionError):
            counts["bad_json_lines"] += 1
        else:
            yield record if isinstance(record, dict) else None


def _json_values(stream: IO[bytes], name: str, counts: Counter[str]) -> Iterator[Record]:
    """Yield the elements of an array, or objects one after the other, with one of them in memory at a time."""
    parse = json.JSONDecoder().raw_decode
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")  # to count; removed with surrogates
    text, position, is_end = "", 0, False
    while True:
        start = position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]  # it matches everywhere
        try:
            value, position = parse(text, position)
        except (ValueError, RecursionError) as error:
            rest = text[position:]
            if is_end and not rest:
                return
            if is_end or len(rest) > MAX_RECORD:
                raise EOFError(f"{name}: is not valid JSON") from error  # what came before it is used
            read = stream.read(max(_CHUNK, len(rest)))  # twice as much each time, so that the time stays linear
            is_end = not read
            text, position = rest + decoder.decode(read, final=is_end), 0
        else:
            counts["records_with_bad_utf8"] += _BAD_BYTE.search(text, start, position) is not None
            yield value if isinstance(value, dict) else None


def _table_rows(stream: IO[bytes], kind: str, counts: Counter[str]) -> Iterator[Record]:
    """Yield the rows of CSV or TSV by the names of the first line."""
    csv.field_size_limit(MAX_RECORD)
    lines = (decode(line, counts) for line in records_of_range(stream, 0, None, counts))
    sample = list(islice(lines, 100))
    if not sample:
        return
    separator, has_quotes = _dialect(sample, kind)
    rows = _split_rows(chain(sample, lines), separator, has_quotes)
    try:
        names = [name.strip() for name in next(rows)]
        for row in rows:
            counts["rows_of_another_width"] += len(row) != len(names)
            values = row if has_quotes else map(_unquote, row)
            yield dict(zip(names, values, strict=False))
    except csv.Error as error:
        raise EOFError(str(error)) from error  # what came before it is used


def _split_rows(lines: Iterable[str], separator: str, has_quotes: bool) -> Iterator[list[str]]:
    return csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE)


def _dialect(sample: Sequence[str], kind: str) -> tuple[str, bool]:
    """Return the separator, found in the first line, and whether the rows have quotes.

    Quotes in a TSV are text, if its lines are rows without regard to them.
    """
    if kind == "csv":
        return max(_SEPARATORS, key=sample[0].count), True
    return "\t", len({line.count("\t") for line in sample}) > 1


def _unquote(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return value[1:-1].replace('""', '"') if is_quoted else value
