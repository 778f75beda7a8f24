"""Matrix products by OpenBLAS, which numpy's packages contain, on the memory of torch's tensors.

OpenBLAS takes any strides with a unit stride in one of two dimensions, and needs no time for a shape it has not seen.
"""

import os
from functools import cache
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

# How often an idle thread of GNU OpenMP looks for work before it sleeps.
SPIN_COUNT = "GOMP_SPINCOUNT"
MAX_SPINS = 1000  # some µs

_NUMPYS = "numpy.libs"  # the folder of the OpenBLAS in numpy's packages; scipy's have another


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a · b for fp32 matrices [M, K] and [K, N], or as many pairs [P, …]; written to `out` if given."""
    target = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    with np.errstate(all="ignore"):  # a NaN is for whoever reads the loss to report
        np.matmul(_array(a), _array(b), out=target.numpy())
    return target


def add_batched(out: Tensor, a: Tensor, b: Tensor, scale: float, is_added: bool) -> Tensor:
    """out = scale · a · b, or += if `is_added`, for pairs of matrices [P, …] of which one is small."""
    if scale != 1.0:
        a, b = (a * scale, b) if a.numel() <= b.numel() else (a, b * scale)
    return out.add_(multiply(a, b)) if is_added else multiply(a, b, out)


def _array(matrices: Tensor) -> Any:
    """An array that numpy gives to OpenBLAS as it is; others it would multiply itself, slowly."""
    rows, columns = matrices.stride()[-2:]
    num_rows, num_columns = matrices.shape[-2:]
    is_usable = (columns == 1 and rows >= num_columns) or (rows == 1 and columns >= num_rows)
    return (matrices if is_usable else matrices.contiguous()).detach().numpy()


def kernels() -> str | None:
    """The kind of processor that OpenBLAS computes for, such as `SkylakeX`; None if it must not be used.

    It has threads of its own. With several, threads of torch that wait for work must leave them the cores. By default
    they keep them for milliseconds, which makes a step several times as slow; the user can limit that for GNU's OpenMP.
    It is no default, because a small model, whose operations are short, is faster with threads that stay awake.
    """
    library = _library()
    if library is None:
        return None
    spins = os.environ.get(SPIN_COUNT, "")
    sleeps = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" or (spins.isdigit() and int(spins) <= MAX_SPINS)
    if torch.get_num_threads() == 1 or (sleeps and _is_gnu()):
        return str(library.info()["architecture"])
    return None


def set_num_threads(number: int) -> None:
    """Threads that exist already keep their mode for denormal numbers; new ones take that of the calling thread."""
    library = _library()
    if library is not None:
        library.set_num_threads(number)


def is_available() -> bool:
    """Whether numpy has OpenBLAS."""
    return _library() is not None


def get_num_threads() -> int:
    library = _library()
    return 1 if library is None else int(library.get_num_threads())


@cache
def _library() -> Any:
    """numpy's OpenBLAS; None if numpy has another library."""
    if "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:
        return None
    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    return max(found, key=lambda library: _NUMPYS in library.filepath, default=None)


@cache
def _is_gnu() -> bool:
    found = ThreadpoolController().select(user_api="openmp").lib_controllers
    return all(library.prefix == "libgomp" for library in found)
