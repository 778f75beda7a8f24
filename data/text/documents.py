"""Reads documents out of a source as lists of sentences, and survives whatever else is in the file."""

import errno
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import sentencex

from common.errors import SYSTEM_REMEDIES, UserError
from data.text.compression import is_damage
from data.text.lines import extent_of_range, lines_of_extent, pieces, records_of_range
from data.text.sources import Source, open_source
from data.text.tables import named_records, parquet_values, saved_records
from data.text.wikitext import Article, articles, plain_text

LARGEST_DOCUMENT = 2**20  # characters; a larger one is cut between sentences
BROKEN = "files_cut_short"  # the count of files that are damaged or end too early
_MAX_SENTENCE = 600  # characters, about as many tokens as a row of 128 holds: what is longer would be cut off there
_MAX_JUNK = 0.1  # share of bytes that are no text, from which a line is dropped

_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+")
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_NO_CONTROLS = dict.fromkeys([*range(9), *range(14, 32), 127])


class Document(NamedTuple):
    """The sentences of a document, or of one part of a very large one."""

    sentences: list[str]
    goes_on: bool = False  # whether it is a further part of the document before it
    ends: bool = True  # whether no further part can follow


def read_documents(source: Source, counts: Counter[str], *, language: str, text_field: str) -> Iterator[Document]:
    """All documents of a source. `counts` collects what was met on the way."""
    try:
        if source.format == "sentences":
            documents = _from_lines(source, counts, None)
        elif source.format == "paragraphs":
            documents = _from_lines(source, counts, language)
        elif source.format == "running":
            documents = _running_text(source, counts, language)
        else:
            texts = _TEXTS[source.format](source, counts, text_field)
            documents = (Document(split_text(text, language)) for text in texts)
        for document in documents:
            yield from _bounded(document, counts)
    except Exception as error:
        _count_damage(error, source, counts)


def _count_damage(error: Exception, source: Source, counts: Counter[str]) -> None:
    """A broken file still has what came before; the report says so. What the system refuses is an error."""
    if is_damage(error):
        counts[BROKEN] += 1
    elif isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
        raise UserError(
            f"{source.path}: cannot be read ({error.strerror}); expected a file that this user may read; give this "
            f"user the right to, or leave it out of --input"
        ) from error
    elif isinstance(error, OSError):
        remedy = SYSTEM_REMEDIES.get(error.errno or 0, "see that it can be read")
        raise UserError(
            f"{source.path}: cannot be read ({error.strerror or error}); {remedy}, and run the same command again: it "
            f"goes on where it was"
        ) from error
    else:
        raise error


class Unpacked(NamedTuple):
    content: bytes
    may_end: bool  # whether what follows it can be read by itself


def unpack(source: Source, counts: Counter[str], text_field: str = "text") -> Iterator[Unpacked]:
    """What a stream holds, uncleaned: reading it is sequential, cleaning is most of the work.

    The articles of a dump and the texts of a dataset as JSON lines; lines of text or of JSON as they are. Running text
    is one document, so it is never read in parts by themselves.
    """
    try:
        if source.is_named:
            assert source.stop is not None, "a dataset by name is cut into its files first"
            for record in named_records(source.path, source.start, source.stop, text_field):
                text = record.get(text_field)
                content = json.dumps({text_field: text if isinstance(text, str) else None})
                yield Unpacked(content.encode() + b"\n", True)
            return
        with open_source(source.path) as stream:
            if source.format == "wiki":
                for article in articles(stream, counts):
                    yield Unpacked(json.dumps(article).encode() + b"\n", True)
                return
            for piece in pieces(stream, 0):
                is_last = source.format == "jsonl" or (piece.is_blank and source.format != "running")
                yield Unpacked(piece.content, piece.ends_line and is_last)
    except Exception as error:
        _count_damage(error, source, counts)


def split_text(text: str, language: str) -> list[str]:
    """Sentences of running text; a line break ends a sentence."""
    return [sentence for line in text.split("\n") for sentence in split_sentences(line, language)]


def split_sentences(text: str, language: str) -> list[str]:
    """Sentences of one paragraph, blanks made single.

    sentencex (Wikimedia's splitter): 56 MB/s here, against 15 for blingfire, 0.7 for syntok and 0.1 for pysbd, and it
    alone kept `"Was it good?" she asked.` together.
    """
    text = " ".join(text.split())
    if not text:
        return []
    found = [sentence.strip() for sentence in sentencex.segment(language, text)]
    return [piece for sentence in found if sentence for piece in _cut_long(sentence)]


def _cut_long(sentence: str) -> Iterator[str]:
    """Where the splitter found no end, as after a bracket that is not closed: after full stops, then between words."""
    if len(sentence) <= _MAX_SENTENCE:
        yield sentence
        return
    for part in _SENTENCE_END.split(sentence):
        yield from _cut_between_words(part)


def _cut_between_words(sentence: str) -> Iterator[str]:
    while len(sentence) > _MAX_SENTENCE:
        end = sentence.rfind(" ", 1, _MAX_SENTENCE)
        end = end if end > 0 else _MAX_SENTENCE
        yield sentence[:end]
        sentence = sentence[end:].lstrip()
    if sentence:
        yield sentence


def _bounded(document: Document, counts: Counter[str]) -> Iterator[Document]:
    """The document, in parts where it is very large."""
    goes_on = document.goes_on
    if not document.sentences:
        counts["empty_documents"] += not goes_on
        return
    counts["documents_cut"] += goes_on
    part: list[str] = []
    size = 0
    for sentence in document.sentences:
        if size > LARGEST_DOCUMENT:
            yield Document(part, goes_on, ends=False)
            counts["documents_cut"] += 1
            part, size, goes_on = [], 0, True
        part.append(sentence)
        size += len(sentence)
    yield Document(part, goes_on, document.ends)


def _from_lines(source: Source, counts: Counter[str], language: str | None) -> Iterator[Document]:
    """Blank lines between documents; a line is a sentence, or a paragraph to split where a language is given."""
    document: list[str] = []
    size = 0
    with open_source(source.path) as stream:
        extent = extent_of_range(stream, source.start, source.stop)
        goes_on = extent.goes_on
        for line in lines_of_extent(stream, extent, counts):
            text = clean_line(line, counts)
            is_end = not text and not line.strip()
            if document and (is_end or (text and size > LARGEST_DOCUMENT)):
                yield Document(document, goes_on, ends=is_end)
                document, size, goes_on = [], 0, True
            goes_on = goes_on and not is_end
            if text:
                if language:
                    document.extend(split_sentences(text, language))
                else:
                    document.extend(_cut_long(text))
                size += len(text)
    if document:
        yield Document(document, goes_on, ends=extent.end is None)


def clean_line(line: bytes, counts: Counter[str]) -> str:
    """The line's text with single blanks; "" where it is not text."""
    if line.isascii():
        text = line.decode().rstrip("\n")
        if text.isprintable() and "  " not in text and not text.startswith(" ") and not text.endswith(" "):
            return text
    controls = len(_CONTROL.findall(line)) if _CONTROL.search(line) else 0
    try:
        text = line.decode()
        bad = controls
    except UnicodeDecodeError:
        counts["lines_with_bad_utf8"] += 1
        text = line.decode(errors="ignore")
        bad = controls + len(line) - len(text.encode())
    if bad > _MAX_JUNK * len(line):
        counts["binary_lines_dropped"] += 1
        return ""
    if controls:
        text = text.translate(_NO_CONTROLS)
    return " ".join(text.split())


def _running_text(source: Source, counts: Counter[str], language: str) -> Iterator[Document]:
    """A file as one document: lines are joined into paragraphs, which blank lines end. Handed on in bounded parts."""
    sentences: list[str] = []
    lines: list[str] = []
    size = 0
    goes_on = source.start > 0
    with open_source(source.path) as stream:
        extent = extent_of_range(stream, source.start, source.stop)
        for line in lines_of_extent(stream, extent, counts):
            text = clean_line(line, counts)
            if text:
                lines.append(text)
                size += len(text)
            if lines and (not line.strip() or size > LARGEST_DOCUMENT):
                sentences += split_sentences(" ".join(lines), language)
                lines = []
            if size > LARGEST_DOCUMENT:
                yield Document(sentences, goes_on, ends=False)
                sentences, size, goes_on = [], 0, True
    sentences += split_sentences(" ".join(lines), language)
    if sentences:
        yield Document(sentences, goes_on, ends=extent.end is None)


def _json_lines(source: Source, counts: Counter[str], text_field: str) -> Iterator[str]:
    with open_source(source.path) as stream:
        for line in records_of_range(stream, source.start, source.stop, counts):
            yield from _text_of(_parsed(line, counts), text_field, counts)


def _parsed(line: bytes, counts: Counter[str]) -> object:
    try:
        return json.loads(_decoded(line, counts))
    except (ValueError, RecursionError):
        counts["bad_json_lines"] += 1
        return None


def _decoded(content: bytes, counts: Counter[str]) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        counts["records_with_bad_utf8"] += 1
        return content.decode(errors="ignore")


def _text_of(record: object, text_field: str, counts: Counter[str]) -> Iterator[str]:
    text = record.get(text_field) if isinstance(record, dict) else None
    if isinstance(text, str):
        yield text.encode(errors="ignore").decode()  # JSON may hold half of a surrogate pair
    elif record is not None:
        counts["records_without_text"] += 1


def _wiki(source: Source, counts: Counter[str], _: str) -> Iterator[str]:
    with open_source(source.path) as stream:
        yield from map(plain_text, articles(stream, counts))


def _wikitext(source: Source, counts: Counter[str], _: str) -> Iterator[str]:
    """A part of a dump, as `unpack` wrote it."""
    with open_source(source.path) as stream:
        for line in stream:
            text, media = json.loads(line)
            yield plain_text(Article(text, tuple(media)))


def _parquet(source: Source, counts: Counter[str], text_field: str) -> Iterator[str]:
    with open_source(source.path) as stream:
        for value in parquet_values(stream, source.path, source.start, source.stop, text_field):
            text = _decoded(value, counts) if isinstance(value, bytes) else value
            yield from _text_of({text_field: text}, text_field, counts)


def _hugging_face(source: Source, counts: Counter[str], text_field: str) -> Iterator[str]:
    """A dataset that was saved to disk; one by name has been unpacked to JSON lines."""
    for record in saved_records(source.path, source.start, source.stop, text_field):
        yield from _text_of(record, text_field, counts)


_TEXTS = {
    "jsonl": _json_lines,
    "wiki": _wiki,
    "wikitext": _wikitext,
    "parquet": _parquet,
    "hf": _hugging_face,
}
