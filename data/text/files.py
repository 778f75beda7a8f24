"""Opens local files and URLs: decompressed, and as UTF-8."""

import codecs
import io
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from data.text.compression import is_damage, open_binary, open_generated

_SAMPLE_BYTES = 2**16
_BUFFER_BYTES = 2**17
_HEAD_BYTES = 2**12  # from which the encoding is recognised
_MIN_HEAD = 8
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_MIN_CONTROL_SHARE = 0.02  # of bytes; a text in Chinese, whose bytes vary most, has more than 5 %
_MIN_PLAUSIBLE_SHARE = 0.95  # of characters
_COMMON = " \n,.\u3001\u3002\uff0c"  # characters that are frequent only in the right order of bytes
# The longer marks first: that of UTF-32 begins with that of UTF-16.
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def is_url(path: str) -> bool:
    return "://" in path


def open_source(path: str) -> IO[bytes]:
    """Open the uncompressed content of a local file or a URL."""
    if not is_url(path):
        return open_binary(Path(path).open("rb"), path)
    stream = fsspec.open(path, "rb").open()
    if isinstance(stream, fsspec.spec.AbstractBufferedFile):  # its `readline` is slow and takes no limit
        stream = io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER_BYTES)
    return open_binary(stream, path)


def open_text(path: str) -> IO[bytes]:
    """Open a file as UTF-8: UTF-16 and UTF-32 are converted; in anything else, bytes that are not UTF-8 remain."""
    stream = open_source(path)
    if not hasattr(stream, "peek"):
        stream = io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER_BYTES)
    encoding = _wide_encoding(cast(io.BufferedReader, stream).peek(_HEAD_BYTES)[:_HEAD_BYTES])
    return stream if encoding is None else open_generated(stream, _recode(stream, encoding))


def is_wide(path: str) -> bool:
    """Whether it is in UTF-16 or UTF-32, which can only be converted from the beginning."""
    try:
        with open_source(path) as stream:
            return _wide_encoding(stream.read(_HEAD_BYTES)) is not None
    except OSError:
        return False  # reading it reports the error


def _wide_encoding(head: bytes) -> str | None:
    """Recognise UTF-16 and UTF-32 by their mark, and UTF-16 without one by its bytes."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if len(head) < _MIN_HEAD:
        return None
    zeros = [head[first::2].count(0) / len(head[first::2]) for first in (0, 1)]  # shares of even and odd bytes
    for low, high, encoding in ((zeros[0], zeros[1], "utf-16-le"), (zeros[1], zeros[0], "utf-16-be")):
        if low < 0.05 and high > 0.4:  # mostly Latin text
            return encoding
    return _find_wide_script(head)


def _find_wide_script(head: bytes) -> str | None:
    """UTF-16 of any script: half of its bytes, or many of them, are control characters, which no other text has."""
    if len(_CONTROL.findall(head)) < _MIN_CONTROL_SHARE * len(head):
        return None
    texts = {encoding: _decode_head(head, encoding) for encoding in ("utf-16-le", "utf-16-be")}
    encoding = max(texts, key=lambda name: sum(texts[name].count(mark) for mark in _COMMON))
    text = texts[encoding]
    num_plausible = sum(char in "\t\n\r" or unicodedata.category(char)[0] in "LMNPSZ" for char in text)
    return encoding if text and num_plausible >= _MIN_PLAUSIBLE_SHARE * len(text) else None


def _decode_head(head: bytes, encoding: str) -> str:
    """The text, whose last character may be incomplete; "" where it is not in this encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return ""


def _recode(stream: IO[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while content := stream.read(_BUFFER_BYTES):
        yield decoder.decode(content).encode()
    yield decoder.decode(b"", final=True).encode()


def url_info(path: str) -> dict[str, Any]:
    system, name = fsspec.core.url_to_fs(path)
    return system.info(name)


def can_seek(path: str) -> bool:
    """Try it: a streamed HTTP file claims that it can. If a file cannot be opened, reading it reports why."""
    try:
        with open_source(path) as stream:
            stream.seek(1)
    except (OSError, ValueError):
        return False
    return True


def read_sample(path: str) -> str:
    """Return the beginning of a file as text; nothing if it is damaged, which reading will count or report."""
    try:
        with open_text(path) as stream:
            return stream.read(_SAMPLE_BYTES).decode(errors="ignore").removeprefix("\ufeff")
    except Exception as error:
        if isinstance(error, OSError) or is_damage(error):
            return ""
        raise
