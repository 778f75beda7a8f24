"""Opens compressed files as streams, and distinguishes damaged files from errors of the system."""

import bz2
import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

import zstandard

DAMAGED = "files_cut_short"  # the count of truncated or malformed files
COMPRESSIONS = {".gz", ".bz2", ".zst", ".zstd"}
# `zstd --long=31` declares a window of 2 GB. The library refuses windows above 128 MB unless this is raised.
_MAX_WINDOW = 2**31
_INPUT_BYTES = 2**10  # 4 compressed bytes can expand to 128 kB, so one call yields at most 32 MB


def open_binary(stream: IO[bytes], name: str) -> IO[bytes]:
    """Return `stream`, decompressed if `name` ends in .gz, .bz2, .zst or .zstd (in any case)."""
    name = name.lower()
    if name.endswith((".gz", ".tgz")):
        return cast(IO[bytes], gzip.open(stream, "rb"))
    if name.endswith((".bz2", ".tbz2")):
        return cast(IO[bytes], bz2.open(stream, "rb"))
    if name.endswith((".zst", ".zstd")):
        return open_generated(stream, _decompress_frames(stream))
    return stream


def is_damage(error: BaseException) -> bool:
    """Whether an error means that a file is truncated or malformed, as opposed to a failure of the system.

    bz2 and pyarrow raise a plain OSError without an errno for a malformed file; errors of the system or the network
    have an errno or a subclass. pyarrow is optional, so its own error is recognised by name. The column names of a
    damaged table may not be valid UTF-8.
    """
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile | zstandard.ZstdError | UnicodeDecodeError):
        return True
    if isinstance(error, zipfile.BadZipFile | tarfile.TarError):
        return True
    return type(error).__name__ == "ArrowInvalid" or (type(error) is OSError and error.errno is None)


def open_generated(stream: IO[bytes], contents: Iterator[bytes]) -> IO[bytes]:
    """Return `contents`, which a generator makes of `stream`, as a stream."""
    return io.BufferedReader(_GeneratedStream(stream, contents), 2**17)


class _GeneratedStream(io.RawIOBase):
    def __init__(self, stream: IO[bytes], contents: Iterator[bytes]) -> None:
        self._stream = stream
        self._contents = contents
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
