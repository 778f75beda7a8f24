"""Compressed files as streams of their content, told by their names, and how their damage is told from other errors."""

import bz2
import gzip
import importlib
import io
import zlib
from typing import IO, Any, cast

from common.errors import UserError

COMPRESSIONS = {".gz", ".bz2", ".zst", ".zstd"}
# `zstd --long=31` declares windows of 2 GB, and takes that much memory; above 128 MB the library wants to be told.
_LARGEST_WINDOW = 2**31
_INPUT_BYTES = 2**16
_FED_AT_ONCE = 2**10  # of them; 4 bytes can stand for 128 kB, so this bounds what is unpacked at once to 32 MB


def open_binary(stream: IO[bytes], name: str) -> IO[bytes]:
    """`stream` itself, or what is inside when the name ends in .gz, .bz2, .zst or .zstd, in any case."""
    name = name.lower()
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(stream, "rb"))
    if name.endswith(".bz2"):
        return cast(IO[bytes], bz2.open(stream, "rb"))
    if name.endswith((".zst", ".zstd")):
        return io.BufferedReader(ZstdStream(stream, name), 2**17)
    return stream


def is_damage(error: BaseException) -> bool:
    """Whether an error means a file that ends too early or holds other bytes than its format, not one of the system.

    bz2 and pyarrow raise a plain OSError without a number; what the system or a network refuses has a number or a
    class of its own. zstandard and pyarrow are optional, so their own errors are known by name only. The names
    of a damaged table's columns may be no text.
    """
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile | UnicodeDecodeError):
        return True
    if type(error).__name__ in ("ZstdError", "ArrowInvalid"):
        return True
    return type(error) is OSError and error.errno is None


class ZstdStream(io.RawIOBase):
    """What all frames of a .zst file hold. A last frame that breaks off is an error; the library's reader hides it."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        library = optional_import("zstandard", f"reading {name}")
        self._decompressor = library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._stream = stream
        self._frame: Any = None  # the frame at hand; None between frames
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            if not self._packed:
                self._packed = self._stream.read(_INPUT_BYTES)
                if not self._packed:
                    if self._frame is not None:
                        raise EOFError("the last zstd frame breaks off")
                    return 0
            self._unpacked = memoryview(self._unpack_some())
        size = min(len(buffer), len(self._unpacked))
        buffer[:size] = self._unpacked[:size]
        self._unpacked = self._unpacked[size:]
        return size

    def _unpack_some(self) -> bytes:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        piece, self._packed = self._packed[:_FED_AT_ONCE], self._packed[_FED_AT_ONCE:]
        content = self._frame.decompress(piece)
        if self._frame.eof:
            self._packed = self._frame.unused_data + self._packed
            self._frame = None
        return content


def optional_import(module: str, purpose: str) -> Any:
    """A package that only some users need; its absence is told with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(f"{purpose} needs the package {package!r}; `pip install -r requirements-extras.txt`") from error
