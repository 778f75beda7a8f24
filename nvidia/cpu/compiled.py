"""How numba compiles loops for this processor, and where it keeps them.

A compiled function keeps what it calls, so the folder of what is kept depends on the source of all loops.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import llvmlite.binding
import numba
from numba import types

from common.console import console

Array = Any  # of numpy
Number = Any  # of a type of numpy's

_FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_CONFIG: Any = numba.config  # its attributes are set when it is imported

# A function that loops call. Without the argument it would inherit the flags of its first caller.
helper = numba.njit(**_FLAGS, fastmath=False)
# The same, with sums in the order of vector instructions.
summing = numba.njit(**_FLAGS, fastmath={"reassoc", "contract", "nsz"})

vector, matrix, packed = types.float32[::1], types.float32[:, ::1], types.float32[:, :, ::1]
strided = types.float32[:, :, :]  # a part of a larger tensor; only for products, because loops over it are slow
masks_type = types.Tuple([types.uint64, types.uint16, types.float32])


def compiled(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for these types now, or load what an earlier process has compiled."""

    def compile_loop(function: Callable[..., None]) -> Callable[..., None]:
        options, given = {**_FLAGS, "fastmath": False}, _CONFIG.CACHE_DIR
        for parent in (given or Path(__file__).parent / "__pycache__", "~/.cache/bert_pretraining"):
            try:
                folder = Path(parent, _digest()).expanduser()
                folder.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=folder):  # numba would use its own folder if it cannot write here
                    _CONFIG.CACHE_DIR = str(folder)
                return numba.njit(types.void(*arguments), cache=True, **options)(function)
            except (RuntimeError, OSError, EOFError):  # it cannot be written to, is full, or has a damaged file
                continue
            finally:
                _CONFIG.CACHE_DIR = given
        _warn()
        return numba.njit(types.void(*arguments), **options)(function)

    return compile_loop


@cache
def _warn() -> None:
    console.warn(
        "compiled loops cannot be kept, so each start takes 5 s longer: neither the project's folder nor ~/.cache can "
        "be written to; set NUMBA_CACHE_DIR to a folder that can"
    )


@cache
def _digest() -> str:
    """Of all that decides what is compiled: the source, numba, and the kind of processor."""
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    processor = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    return hashlib.sha256("\n".join([*sources, numba.__version__, *processor]).encode()).hexdigest()[:16]
