"""Loops that numba compiles for this processor: random masks, dropout, and attention.

They hold no lock of Python's, so several threads compute parts of the same work. numba keeps what it has compiled on
disk and notices changes in this file only: a compiled function must not call one of another file.

U queries, A heads, D head size; a tile has R queries and K keys of one sequence and head.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import scipy.linalg  # noqa: F401  (loads its BLAS)
from numba import types
from numba.extending import get_cython_function_address
from threadpoolctl import ThreadpoolController

# Loops run on torch's threads, with which those of scipy's BLAS would compete for the cores. MKL notices them itself.
for _library in ThreadpoolController().select(user_api="blas").lib_controllers:
    if _library.internal_api != "mkl":
        _library.set_num_threads(1)
_SGEMM = "bert_pretraining_sgemm"
llvmlite.binding.add_symbol(_SGEMM, get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))
_sgemm: Any = types.ExternalFunction(_SGEMM, types.void(*[types.intp] * 13))  # it takes the address of each argument
_LETTERS = np.frombuffer(b"NT", dtype=np.uint8)  # as it is, transposed
_FACTORS = np.array([0, 1], dtype=np.float32)

_LOG2_E = np.float32(1.4426950408889634)
_SMALLEST = np.float32(-64)  # exponents below which a probability is 0, so that no product meets denormal numbers
_ROUNDING = np.float32(1.5 * 2**23)  # a number to which it is added is rounded, and is in the sum's lowest bits
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_flags: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_helper = numba.njit(**_flags, fastmath=False)  # said explicitly, or a function has the flags of its first caller
_summing = numba.njit(**_flags, fastmath={"reassoc", "contract", "nsz"})  # sums in the order of vector instructions
Array = Any  # of numpy
Number = Any  # of a type of numpy's


def _compiled(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for these types now, or load what an earlier process has compiled."""

    def compile_loop(function: Callable[..., None]) -> Callable[..., None]:
        options = {**_flags, "fastmath": False}
        try:
            return numba.njit(types.void(*arguments), cache=True, **options)(function)
        except RuntimeError:  # there is no folder for it that can be written to
            return numba.njit(types.void(*arguments), **options)(function)

    return compile_loop


_matrix_type, _packed = types.float32[:, ::1], types.float32[:, :, ::1]
_strided = types.float32[:, :, :]  # of a larger tensor; only for products, because loops over it are slow
_scratch = types.Tuple([_matrix_type, types.uint64[::1], types.int32[::1]])
_masks = types.Tuple([types.uint64, types.uint16, types.float32])


def make_scratch(num_scores: int, width: int) -> tuple[Array, Array, Array]:
    """What one thread needs: two tiles of scores, random bits for a row of `width` elements, and a product's sizes."""
    return np.empty((2, num_scores), np.float32), np.empty(-(-width // 4), np.uint64), np.empty(6, np.int32)


@_helper
def _mix(z: Number) -> Number:
    """A bijection of 64 bits whose results for neighbouring numbers are independent: SplitMix64's."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_helper
def _draw(words: Array, seed: Number, row: int, first: int, stop: int) -> None:
    """Random bits of a row for the elements from `first`, a multiple of 4, to `stop`: 16 for each."""
    start = _mix(seed + np.uint64(row))
    for number in range((stop - first + 3) // 4):
        words[number] = _mix(start + np.uint64(first // 4 + number) * _GOLDEN)


@_compiled(*[_matrix_type] * 3, types.intp, types.intp, _masks, types.float32, types.boolean, _scratch)
def drop(
    x: Array, residual: Array, out: Array, first: int, stop: int, masks: Any, scale: Number, is_sum: bool, scratch: Any
) -> None:
    """out = scale · dropout(x), plus the residual if `is_sum`, for some rows of [N, H]."""
    seed, threshold, kept = masks
    words = scratch[1]
    bits, factor = words.view(np.uint16), kept * scale
    for row in range(first, stop):
        _draw(words, seed, row, 0, x.shape[1])
        for column in range(x.shape[1]):
            value = x[row, column] * factor if bits[column] >= threshold else np.float32(0)
            out[row, column] = value + residual[row, column] if is_sum else value


@_helper
def _exp2(x: Number) -> Number:
    """2ˣ for x up to about 0; 0 for x below `_SMALLEST`. NaN remains NaN."""
    shifted = np.float32(x + _ROUNDING)
    f = x - (shifted - _ROUNDING)  # from -1/2 to 1/2
    p = np.float32(1.535336188e-4) * f + np.float32(1.339887440e-3)
    p = p * f + np.float32(9.618437357e-3)
    p = p * f + np.float32(5.550332471e-2)
    p = p * f + np.float32(2.402264791e-1)
    p = p * f + np.float32(6.931472028e-1)
    p = p * f + np.float32(1)
    power = np.int32((np.float32(shifted).view(np.int32) << 23) + (127 << 23)).view(np.float32)
    return np.float32(0) if x < _SMALLEST else p * power


@_summing
def _dot(a: Array, b: Array) -> Number:
    total = np.float32(0)
    for index in range(len(a)):
        total += a[index] * b[index]
    return total


@_summing
def _softmax_row(scores: Array, scale: Number) -> tuple[Number, Number]:
    """Scores → probabilities in proportion to 2^(scale · score); returns the maximum, and what makes their sum 1."""
    highest = np.float32(-np.inf)
    for key in range(len(scores)):
        highest = max(highest, scores[key])
    total = np.float32(0)
    for key in range(len(scores)):
        scores[key] = _exp2((scores[key] - highest) * scale)  # 1 for the maximum, however large scores are
        total += scores[key]
    factor = np.float32(1) / total
    for key in range(len(scores)):
        scores[key] *= factor
    return highest, factor


@_helper
def _drop_row(row: Array, bits: Array, masks: Any) -> None:
    _, threshold, kept = masks
    for key in range(len(row)):
        row[key] = row[key] * kept if bits[key] >= threshold else np.float32(0)


@_helper
def _row_gradient(scores: Array, gradients: Array, scale: Number, softmax: Array, mean: Number) -> None:
    """Scores → probabilities; gradients of probabilities → gradients of scores before scaling with `scale`. `softmax`
    is what `_softmax_row` has returned."""
    highest, factor, of_score = softmax[0], softmax[1], scale / _LOG2_E
    for key in range(len(scores)):
        probability = _exp2((scores[key] - highest) * scale) * factor
        scores[key] = probability
        gradients[key] = probability * (gradients[key] - mean) * of_score


@_helper
def _row_gradient_with_dropout(
    scores: Array, gradients: Array, scale: Number, softmax: Array, mean: Number, bits: Array, masks: Any
) -> None:
    """The same; the probabilities that remain in `scores` have been dropped and scaled."""
    _, threshold, kept = masks
    highest, factor, of_score = softmax[0], softmax[1], scale / _LOG2_E
    for key in range(len(scores)):
        probability = _exp2((scores[key] - highest) * scale) * factor
        mask = kept if bits[key] >= threshold else np.float32(0)
        scores[key] = probability * mask
        gradients[key] = probability * (gradients[key] * mask - mean) * of_score


@_helper
def _multiply(sizes: Array, out: Any, is_added: bool, a: Any, is_a_turned: bool, b: Any, is_b_turned: bool) -> None:
    """out = a·b, or += if `is_added`. Each matrix is (address, step from row to row), `out` with its shape and the
    number of summands: Fortran, which stores columns, sees all of them transposed."""
    address, step, rows, columns, summands = out
    sizes[0], sizes[1], sizes[2] = columns, rows, summands
    sizes[3], sizes[4], sizes[5] = b[1], a[1], step
    size = sizes.ctypes.data
    letters, factors = _LETTERS.ctypes.data, _FACTORS.ctypes.data
    _sgemm(
        letters + is_b_turned, letters + is_a_turned, size, size + 4, size + 8,
        factors + 4, b[0], size + 12, a[0], size + 16, factors + 4 * is_added, address, size + 20,
    )  # fmt: skip


@_helper
def _matrix(packed: Array, row: int, head: int) -> tuple[int, int]:
    """The rows of a head from `row` on, as `_multiply` takes them."""
    return packed.ctypes.data + row * packed.strides[0] + head * packed.strides[1], packed.strides[0] // 4


@_helper
def _num_tiles(sequence: Array, reach: int, tile_scores: int, min_rows: int) -> int:
    """Tiles of a sequence: of about `tile_scores`, but of `min_rows` queries at least; less than a window's reach."""
    length, queries = sequence[1], sequence[3]
    rows = max(min_rows, tile_scores // length)
    if reach < length - 1:
        rows = min(rows, max(min_rows, reach))
    return -(-queries // rows)


@_helper
def _keys(rows: Array, sequence: Array, first: int, stop: int, reach: int) -> tuple[int, int]:
    """The keys that some queries see, from a multiple of 4 on."""
    start, length = sequence[0], sequence[1]
    return max(0, rows[first] - start - reach) & ~3, min(length, rows[stop - 1] - start + reach + 1)


@_helper
def _seen(place: int, reach: int, first: int, stop: int) -> tuple[int, int]:
    """Which of the keys from `first` to `stop` the query at this place sees, counted from `first`."""
    return max(0, place - reach - first), min(stop, place + reach + 1) - first


_division = types.Tuple([types.intp, types.intp, types.intp, types.intp, types.intp])
_batch = types.Tuple([types.int64[::1], types.int64[:, ::1]])


@_compiled(*[_strided] * 3, *[_packed] * 2, _batch, _division, _masks, _scratch)
def attend(
    queries: Array, keys: Array, values: Array, context: Array, softmaxes: Array,
    batch: Any, division: Any, masks: Any, scratch: Any,
) -> None:  # fmt: skip
    """Write the context [U, A, D] and, for the gradients, what `_softmax_row` returns [A, U, 2].

    batch: the packed position of each query [U], and for each sequence its first token, number of tokens, first query
    and number of queries. division: the pairs of sequence and head to compute (first, stop), how far a query sees,
    scores of a tile, and the least queries of a tile. masks: seed, threshold and scale of dropout.
    """
    rows, sequences = batch
    first, stop, reach, tile_scores, min_rows = division
    buffers, words, sizes = scratch
    bits, heads, size = words.view(np.uint16), queries.shape[1], queries.shape[2]
    scale = _LOG2_E / np.sqrt(np.float32(size))
    for pair in range(first, stop):
        sequence, head = sequences[pair // heads], pair % heads
        count = _num_tiles(sequence, reach, tile_scores, min_rows)
        for tile in range(count):
            begin = sequence[2] + sequence[3] * tile // count
            end = sequence[2] + sequence[3] * (tile + 1) // count
            low, high = _keys(rows, sequence, begin, end, reach)
            num_queries, num_keys, start = end - begin, high - low, sequence[0] + low
            scores = buffers[0, : num_queries * num_keys].reshape((num_queries, num_keys))
            of_scores = (scores.ctypes.data, num_keys)
            _multiply(sizes, (*of_scores, num_queries, num_keys, size), False,
                      _matrix(queries, begin, head), False, _matrix(keys, start, head), True)  # fmt: skip
            for query in range(begin, end):
                row = scores[query - begin]
                left, right = _seen(rows[query] - sequence[0], reach, low, high)
                row[:left], row[right:] = 0, 0
                softmaxes[head, query, 0], softmaxes[head, query, 1] = _softmax_row(row[left:right], scale)
                if masks[1] > 0:
                    _draw(words, masks[0], head * len(queries) + query, low, high)
                    _drop_row(row, bits, masks)
            _multiply(sizes, (*_matrix(context, begin, head), num_queries, size, num_keys), False,
                      of_scores, False, _matrix(values, start, head), False)  # fmt: skip


@_compiled(*[_strided] * 3, *[_packed] * 3, *[_strided] * 3, _batch, _division, _masks, _scratch)
def attend_backward(
    queries: Array, keys: Array, values: Array, context: Array, gradient: Array, softmaxes: Array,
    of_queries: Array, of_keys: Array, of_values: Array,
    batch: Any, division: Any, masks: Any, scratch: Any,
) -> None:  # fmt: skip
    """Write the gradients of queries, keys and values, given that of the context; see `attend`."""
    rows, sequences = batch
    first, stop, reach, tile_scores, min_rows = division
    buffers, words, sizes = scratch
    bits, heads, size = words.view(np.uint16), queries.shape[1], queries.shape[2]
    scale = _LOG2_E / np.sqrt(np.float32(size))
    for pair in range(first, stop):
        sequence, head = sequences[pair // heads], pair % heads
        count = _num_tiles(sequence, reach, tile_scores, min_rows)
        is_divided = reach < sequence[1] - 1 or count == 0  # tiles share some keys, or none has them
        if is_divided:
            of_keys[sequence[0] : sequence[0] + sequence[1], head] = 0
            of_values[sequence[0] : sequence[0] + sequence[1], head] = 0
        for tile in range(count):
            begin = sequence[2] + sequence[3] * tile // count
            end = sequence[2] + sequence[3] * (tile + 1) // count
            low, high = _keys(rows, sequence, begin, end, reach)
            num_queries, num_keys, start = end - begin, high - low, sequence[0] + low
            scores = buffers[0, : num_queries * num_keys].reshape((num_queries, num_keys))
            of_scores = buffers[1, : num_queries * num_keys].reshape((num_queries, num_keys))
            used, turned = (scores.ctypes.data, num_keys), (of_scores.ctypes.data, num_keys)
            asked, given = _matrix(queries, begin, head), _matrix(gradient, begin, head)
            _multiply(sizes, (*used, num_queries, num_keys, size), False,
                      asked, False, _matrix(keys, start, head), True)  # fmt: skip
            _multiply(sizes, (*turned, num_queries, num_keys, size), False,
                      given, False, _matrix(values, start, head), True)  # fmt: skip
            for query in range(begin, end):
                row, of_row = scores[query - begin], of_scores[query - begin]
                left, right = _seen(rows[query] - sequence[0], reach, low, high)
                row[:left], row[right:], of_row[:left], of_row[right:] = 0, 0, 0, 0
                mean = _dot(context[query, head], gradient[query, head])  # of the gradients of its probabilities
                if masks[1] > 0:
                    _draw(words, masks[0], head * len(queries) + query, low, high)
                    _row_gradient_with_dropout(
                        row[left:right], of_row[left:right], scale, softmaxes[head, query], mean, bits[left:], masks
                    )
                else:
                    _row_gradient(row[left:right], of_row[left:right], scale, softmaxes[head, query], mean)
            is_added = is_divided or tile > 0
            _multiply(sizes, (*_matrix(of_values, start, head), num_keys, size, num_queries), is_added,
                      used, True, given, False)  # fmt: skip
            _multiply(sizes, (*_matrix(of_queries, begin, head), num_queries, size, num_keys), False,
                      turned, False, _matrix(keys, start, head), False)  # fmt: skip
            _multiply(sizes, (*_matrix(of_keys, start, head), num_keys, size, num_queries), is_added,
                      turned, True, asked, False)  # fmt: skip
