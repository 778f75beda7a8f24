"""Opens local files and URLs: decompressed, and as UTF-8."""

import io
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from data.text.compression import is_damage, open_binary

_SAMPLE_BYTES = 2**16
_BUFFER_BYTES = 2**17


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
        with open_source(path) as stream:
            return stream.read(_SAMPLE_BYTES).decode(errors="ignore").removeprefix("\ufeff")
    except Exception as error:
        if isinstance(error, OSError) or is_damage(error):
            return ""
        raise
