"""Matrix products by OpenBLAS, which numpy's packages contain, on the memory and the threads of torch.

OpenBLAS takes any strides with a unit stride in one of two dimensions, and needs no time for a shape it has not seen.
Its own threads are off, because they would compete with those of torch, among which a product is divided (team.py).
"""

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from nvidia.cpu import team

_NUMPYS = "numpy.libs"  # the folder of the OpenBLAS in numpy's packages; scipy's have another
_MIN_DIVIDED = 1 << 24  # multiplications of a product from which on dividing it saves more than it costs, 0.1 ms
_STEP = 16  # rows or columns that OpenBLAS computes together


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a · b for fp32 matrices [M, K] and [K, N], or as many pairs [P, …]; written to `out` if given."""
    target = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    arrays = _array(a), _array(b), target.numpy()
    _library()  # the first call turns its own threads off
    if target.numel() * a.shape[-1] < _MIN_DIVIDED or not team.is_available():
        _multiply(*arrays)
    else:
        team.run([partial(_multiply, *part) for part in _divide(*arrays, torch.get_num_threads())])
    return target


def _multiply(a: Any, b: Any, out: Any) -> None:
    with np.errstate(all="ignore"):  # a NaN is for whoever reads the loss to report
        np.matmul(a, b, out=out)


def _divide(a: Any, b: Any, out: Any, parts: int) -> Iterator[tuple[Any, Any, Any]]:
    """Pairs by their number; a single product into the grid whose parts read the fewest rows and columns."""
    if out.ndim == 3:
        for pairs in _slices(len(out), parts, 1):
            yield a[pairs], b[pairs], out[pairs]
        return
    height, width = out.shape
    grids = [(count, parts // count) for count in range(1, parts + 1) if parts % count == 0]
    down, across = min(grids, key=lambda grid: height / grid[0] + width / grid[1])
    for rows in _slices(height, down, _STEP):
        for columns in _slices(width, across, _STEP):
            yield a[rows], b[:, columns], out[rows, columns]


def _slices(size: int, parts: int, step: int) -> Iterator[slice]:
    each = max(1, math.ceil(size / parts / step)) * step
    return (slice(start, start + each) for start in range(0, size, each))


def _array(matrices: Tensor) -> Any:
    """An array that numpy gives to OpenBLAS as it is; others it would multiply itself, slowly."""
    rows, columns = matrices.stride()[-2:]
    num_rows, num_columns = matrices.shape[-2:]
    is_usable = (columns == 1 and rows >= num_columns) or (rows == 1 and columns >= num_rows)
    matrices = matrices if is_usable else matrices.contiguous()
    return (matrices.detach() if matrices.requires_grad else matrices).numpy()


def kernels() -> str | None:
    """The kind of processor that OpenBLAS computes for, such as `SkylakeX`; None if it must not be used."""
    library = _library()
    if library is None or (torch.get_num_threads() > 1 and not team.is_available()):
        return None
    return str(library.info()["architecture"])


def is_available() -> bool:
    """Whether numpy has OpenBLAS."""
    return _library() is not None


@cache
def _library() -> Any:
    """numpy's OpenBLAS, limited to one thread; None if numpy has another library."""
    if "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:
        return None
    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    library = max(found, key=lambda library: _NUMPYS in library.filepath, default=None)
    if library is not None:
        library.set_num_threads(1)
    return library
