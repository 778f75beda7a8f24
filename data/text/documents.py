"""Reads the documents of a source as lists of sentences; counts whatever else is in the file."""

import errno
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from common.errors import SYSTEM_REMEDIES, UserError
from data.text.files import DAMAGED, is_damage, is_unreadable, open_source, open_text
from data.text.html_pages import html_text
from data.text.layouts import LAYOUTS, heading_level
from data.text.lines import MAX_RECORD, LinePart, is_blank, lines_of_range, read_line_parts
from data.text.records import RECORD_FORMATS, check_text_field, decode, read_records
from data.text.sentences import clean_line, cut_long, split_sentences, split_text
from data.text.sources import Source
from data.text.tables import named_records, parquet_values, saved_records
from data.text.wikitext import Article, plain_text, read_articles

_MAX_TITLE = 1000  # bytes of its line
_JOINED = re.compile(r" @([-,.])@ ")
MAX_DOCUMENT = 2**20  # characters; a longer document is yielded in several parts

Sentences = Iterator[list[str] | None]  # in order; None ends a document


class Document(NamedTuple):
    """The sentences of a document, or of a part of a very long one."""

    sentences: list[str]
    is_continuation: bool = False  # whether it continues the document yielded before it


def read_documents(source: Source, counts: Counter[str], *, language: str, text_field: str) -> Iterator[Document]:
    """Yield the documents of a source in order, long ones in parts. `counts` collects what was found on the way."""
    try:
        if source.format in LAYOUTS:
            yield from _documents(_sentences_of_text(source, counts, language), counts)
        else:
            yield from _documents(_sentences_of_records(source, counts, language, text_field), counts)
    except Exception as error:
        _count_damage(error, source, counts)


def _documents(sentences: Sentences, counts: Counter[str]) -> Iterator[Document]:
    part: list[str] = []
    size = 0
    is_continuation = False
    for found in chain(sentences, [None]):
        for sentence in found or ():
            if size > MAX_DOCUMENT:
                yield Document(part, is_continuation)
                counts["documents_cut"] += 1
                part, size, is_continuation = [], 0, True
            part.append(sentence)
            size += len(sentence)
        if found is None:
            if part:
                yield Document(part, is_continuation)
            part, size, is_continuation = [], 0, False


def _count_damage(error: Exception, source: Source, counts: Counter[str]) -> None:
    """Count a damaged file, whose readable beginning is used; raise any other error."""
    if is_damage(error):
        counts[DAMAGED] += 1
        return
    if not isinstance(error, OSError):
        raise error
    remedy = SYSTEM_REMEDIES.get(error.errno or 0, "make sure that it can be read")
    remedy += ", and run the same command again: it resumes where it stopped"
    if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
        remedy = "expected a file that this user may read; grant this user that right, or leave it out of --input"
    raise UserError(f"{source.path}: cannot be read ({error.strerror or error}); {remedy}") from error


def _sentences_of_text(source: Source, counts: Counter[str], language: str) -> Sentences:
    with open_text(source.path) as stream:
        separates = is_title if source.format == "articles" else is_blank
        lines = lines_of_range(stream, source.start, source.stop, counts, separates)
        if source.format in _READERS:
            yield from _READERS[source.format](lines, counts, language)
            return
        for line in lines:
            text = clean_line(line.content, counts)
            if text:
                yield split_sentences(text, language) if source.format == "paragraphs" else cut_long(text)
            elif line.is_blank_line:
                yield None


def is_title(line: LinePart) -> bool:
    """Whether the line is ` = Title = `, which begins an article; its text is not part of it."""
    is_whole = line.ends_line and line.end - line.line_start <= _MAX_TITLE
    return is_whole and b"=" in line.content and heading_level(line.content.decode(errors="ignore")) == 1


def _articles(lines: Iterator[LinePart], counts: Counter[str], language: str) -> Sentences:
    """Yield the sentences of each paragraph, without headings and the marks of WikiText's tokenizer (`4 @,@ 000`)."""
    for line in lines:
        if is_title(line):
            yield None
            continue
        text = clean_line(line.content, counts)
        if text and not heading_level(text):
            yield split_sentences(_JOINED.sub(r"\1", text), language)


def _running_text(lines: Iterator[LinePart], counts: Counter[str], language: str) -> Sentences:
    """Yield the sentences of each paragraph: its lines joined, up to a blank line."""
    paragraph: list[str] = []
    size = 0
    for line in lines:
        text = clean_line(line.content, counts)
        if text:
            paragraph.append(text)
            size += len(text)
        if line.is_blank_line or size > MAX_DOCUMENT:
            yield split_sentences(" ".join(paragraph), language)
            paragraph, size = [], 0
    yield split_sentences(" ".join(paragraph), language)


_READERS = {"articles": _articles, "running": _running_text}


def _sentences_of_records(source: Source, counts: Counter[str], language: str, text_field: str) -> Sentences:
    for text in _texts_of_records(source, counts, text_field):
        if isinstance(text, str):
            sentences = split_text(text.encode(errors="ignore").decode(), language)  # JSON allows lone surrogates
            counts["empty_documents"] += not sentences
            yield sentences
            yield None
        else:
            counts["records_without_text"] += 1


def _texts_of_records(source: Source, counts: Counter[str], text_field: str) -> Iterator[object]:
    """Yield the text field of each record; whatever is not a string there has no text."""
    if source.format == "hf":
        for record in saved_records(source.path, source.start, source.stop, text_field):
            yield record[text_field]
        return
    if source.format == "parquet":
        with open_source(source.path) as stream:
            for value in parquet_values(stream, source.path, source.start, source.stop, text_field):
                yield decode(value, counts) if isinstance(value, bytes) else value
        return
    with open_text(source.path) as stream:
        if source.format == "html":
            yield html_text(stream.read(MAX_RECORD))
        elif source.format == "wikitext":  # a part of a dump, written by `unpack`
            for line in stream:
                text, media = json.loads(line)
                yield plain_text(Article(text, tuple(media)))
        else:
            for record in read_records(stream, source.path, source.format, counts, source.start, source.stop):
                yield record and record.get(text_field)


def unpack(source: Source, counts: Counter[str], text_field: str = "text") -> Iterator[tuple[bytes, bool]]:
    """Yield the raw content of a stream, which only one process can read; cleaning it is most of the work.

    The articles of a dump and the records of a dataset, an array or a table become JSON lines; lines of text and
    of JSON stay as they are. With each content, whether a part that another task reads may end after it.
    """
    is_end = is_title if source.format == "articles" else is_blank
    try:
        if source.is_named:
            assert source.stop is not None, "a dataset by name is cut into its files first"
            records = named_records(source.path, source.start, source.stop, text_field)
            yield from ((_json_line(record, text_field), True) for record in records)
        elif source.format == "wiki":
            with open_source(source.path) as stream:
                yield from ((json.dumps(article).encode() + b"\n", True) for article in read_articles(stream, counts))
        else:
            with open_text(source.path) as stream:
                if source.format in RECORD_FORMATS and source.format != "jsonl":
                    for record in read_records(stream, source.path, source.format, counts):
                        yield _json_line(record or {}, text_field), True
                else:
                    for part in read_line_parts(stream, 0):
                        yield part.content, part.ends_line and (source.format == "jsonl" or is_end(part))
    except Exception as error:
        _count_damage(error, source, counts)


def _json_line(record: dict[str, Any], text_field: str) -> bytes:
    text = record.get(text_field)
    return json.dumps({text_field: text if isinstance(text, str) else None}).encode() + b"\n"


def check_text_fields(sources: Sequence[Source], text_field: str, names: Mapping[str, str] | None = None) -> None:
    """Refuse a file of records without the field, before hours of reading. `names`: of files, for the message."""
    for source in sources:
        if source.format in RECORD_FORMATS and source.start == 0:
            try:
                with open_text(source.path) as stream:
                    check_text_field(stream, (names or {}).get(source.path, source.path), source.format, text_field)
            except Exception as error:
                if not is_unreadable(error):
                    raise
