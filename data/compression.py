"""Compressed files as streams of their content, told by their names."""

import bz2
import gzip
import importlib
import io
from typing import IO, Any, cast

from common.errors import UserError

COMPRESSIONS = {".gz", ".bz2", ".zst", ".zstd"}


def open_binary(stream: IO[bytes], name: str) -> IO[bytes]:
    """`stream` itself, or what is inside when the name ends in .gz, .bz2, .zst or .zstd."""
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(stream, "rb"))
    if name.endswith(".bz2"):
        return cast(IO[bytes], bz2.open(stream, "rb"))
    if name.endswith((".zst", ".zstd")):
        decompressor = optional_import("zstandard", f"reading {name}").ZstdDecompressor()
        return io.BufferedReader(decompressor.stream_reader(stream, read_across_frames=True))
    return stream


def optional_import(module: str, purpose: str) -> Any:
    """A package that only some users need; its absence is told with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(f"{purpose} needs the package {package!r}; `pip install -r requirements-extras.txt`") from error
