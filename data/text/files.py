"""Opens local files and URLs, decompressed and as UTF-8; extracts archives; tells damage from errors of the system."""

import bz2
import codecs
import gzip
import io
import re
import shutil
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import fsspec
import zstandard

from common.errors import UserError
from common.stores import is_url
from data.text.encodings import likely_encoding, wide_encoding

DAMAGED = "files_cut_short"  # the count of truncated or malformed files
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.zst")
COMPRESSIONS = {".gz", ".bz2", ".zst", ".zstd"}
# `zstd --long=31` declares a window of 2 GB. The library refuses windows above 128 MB unless this is raised.
_MAX_WINDOW = 2**31
_INPUT_BYTES = 2**10  # 4 compressed bytes can expand to 128 kB, so one call yields at most 32 MB
_SAMPLE_BYTES = 2**16
_BUFFER_BYTES = 2**17
_HEAD_BYTES = 2**12  # from which the encoding is recognised
_UNSAFE = re.compile(r"[^\w.-]+")
_MAX_NAME = 100  # characters
_COPY_BYTES = 2**20
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, zipfile.BadZipFile, tarfile.TarError)


def is_damage(error: BaseException) -> bool:
    """Whether an error means that a file is truncated or malformed, as opposed to a failure of the system.

    bz2 and pyarrow raise a plain OSError without an errno for a malformed file; errors of the system or the network
    have an errno or a subclass. pyarrow is optional, so its own error is recognised by name. The column names of a
    damaged table may not be valid UTF-8.
    """
    if isinstance(error, (*_DAMAGE, UnicodeDecodeError)) or type(error).__name__ == "ArrowInvalid":
        return True
    return type(error) is OSError and error.errno is None


def is_unreadable(error: BaseException) -> bool:
    """Whether the task that reads the file will count or report the error, so that others can leave it alone."""
    return isinstance(error, OSError) or is_damage(error)


def open_source(path: str) -> IO[bytes]:
    """Open a local file or a URL, decompressed if its name ends in .gz, .bz2, .zst or .zstd (in any case)."""
    stream: IO[bytes] = fsspec.open(path, "rb").open() if is_url(path) else Path(path).open("rb")  # noqa: SIM115
    if isinstance(stream, fsspec.spec.AbstractBufferedFile):  # its `readline` is slow and takes no limit
        stream = io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER_BYTES)
    name = path.lower()
    if name.endswith((".gz", ".tgz")):
        return cast(IO[bytes], gzip.open(stream, "rb"))
    if name.endswith((".bz2", ".tbz2")):
        return cast(IO[bytes], bz2.open(stream, "rb"))
    return _as_stream(stream, _decompress_frames(stream)) if name.endswith((".zst", ".zstd")) else stream


def open_text(path: str) -> IO[bytes]:
    """Open a file as UTF-8: UTF-16 and UTF-32 are converted; in anything else, bytes that are not UTF-8 remain."""
    stream = open_source(path)
    if not hasattr(stream, "peek"):
        stream = io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER_BYTES)
    encoding = wide_encoding(cast(io.BufferedReader, stream).peek(_HEAD_BYTES)[:_HEAD_BYTES])
    if encoding is None:
        return stream
    texts = codecs.iterdecode(iter(partial(stream.read, _BUFFER_BYTES), b""), encoding, errors="replace")
    return _as_stream(stream, (text.encode() for text in texts))


class _GeneratedStream(io.RawIOBase):
    def __init__(self, stream: IO[bytes], contents: Iterator[bytes]) -> None:
        self._stream, self._contents = stream, contents
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._unread:
            content = next(self._contents, None)
            if content is None:
                return 0
            self._unread = memoryview(content)
        size = min(len(buffer), len(self._unread))
        buffer[:size] = self._unread[:size]
        self._unread = self._unread[size:]
        return size


def _as_stream(stream: IO[bytes], contents: Iterator[bytes]) -> IO[bytes]:
    """Return `contents`, which a generator makes of `stream`, as a stream."""
    return io.BufferedReader(_GeneratedStream(stream, contents), _BUFFER_BYTES)


def _decompress_frames(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of all frames. A truncated last frame raises; zstandard's own reader hides it."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    frame = None
    while packed := stream.read(_INPUT_BYTES):
        while packed:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last zstd frame is truncated")


def is_wide(path: str) -> bool:
    """Whether it is in UTF-16 or UTF-32, which can only be converted from the beginning."""
    try:
        with open_source(path) as stream:
            return wide_encoding(stream.read(_HEAD_BYTES)) is not None
    except OSError:
        return False  # reading it reports the error


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
        if is_unreadable(error):
            return b""
        raise


def is_archive(path: str) -> bool:
    return path.lower().endswith(ARCHIVES)


def extract(path: str, folder: Path, counts: Counter[str]) -> list[tuple[str, str]]:
    """Extract the files that are not hidden; return (extracted file, name in the archive) in the archive's order.

    Of a damaged archive, the files before the damage are extracted, and `counts` notes it.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
    folder.mkdir(parents=True)
    extracted: list[tuple[str, str]] = []
    try:
        with open_source(path) as stream:
            members = _zip_members(stream, path) if path.lower().endswith(".zip") else _tar_members(stream)
            for name, content in members:
                if any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts):
                    continue
                target = folder / f"{len(extracted):06d}-{_UNSAFE.sub('_', PurePosixPath(name).name)[-_MAX_NAME:]}"
                extracted.append((str(target), name))
                with target.open("wb") as output:
                    shutil.copyfileobj(content, output, _COPY_BYTES)
    except Exception as error:
        if not is_damage(error):
            raise
        counts[DAMAGED] += 1
    return extracted


def _zip_members(stream: IO[bytes], path: str) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                raise UserError(
                    f"{path}: {info.filename} is encrypted; expected an archive without a password; extract it, and "
                    f"give the folder as --input"
                )
            with archive.open(info) as content:
                yield info.filename, content


def _tar_members(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for info in archive:
            content = archive.extractfile(info) if info.isfile() else None  # no links: they could point anywhere
            if content is not None:
                yield info.name, content
