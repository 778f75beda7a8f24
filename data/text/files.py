"""Opens local files and URLs: decompressed, and as UTF-8."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from data.text.compression import is_damage, open_binary, open_generated
from data.text.encodings import likely_encoding, wide_encoding

_SAMPLE_BYTES = 2**16
_BUFFER_BYTES = 2**17
_HEAD_BYTES = 2**12  # from which the encoding is recognised


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
    encoding = wide_encoding(cast(io.BufferedReader, stream).peek(_HEAD_BYTES)[:_HEAD_BYTES])
    return stream if encoding is None else open_generated(stream, _recode(stream, encoding))


def is_wide(path: str) -> bool:
    """Whether it is in UTF-16 or UTF-32, which can only be converted from the beginning."""
    try:
        with open_source(path) as stream:
            return wide_encoding(stream.read(_HEAD_BYTES)) is not None
    except OSError:
        return False  # reading it reports the error


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
    return _read_head(path).decode(errors="ignore").removeprefix("\ufeff")


def guess_encoding(path: str) -> str | None:
    """Guess the encoding of a file that is not UTF-8, from its beginning; None if none is likely."""
    return likely_encoding(_read_head(path))


def _read_head(path: str) -> bytes:
    try:
        with open_text(path) as stream:
            return stream.read(_SAMPLE_BYTES)
    except Exception as error:
        if isinstance(error, OSError) or is_damage(error):
            return b""
        raise
