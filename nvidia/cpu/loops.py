"""Loops that numba compiles for this processor: dropout, GELU, softmax and cross entropy, and attention.

They hold no lock of Python's, so several threads compute parts of the same work. This file is imported where a loop is
needed first: it loads the loops, or compiles them, and turns off the threads of scipy's BLAS. numba keeps the compiled
loops on disk and notices changes in this file only: a compiled function must not call one of another file.

N rows, H their width; U queries, A heads, D head size; a tile has R queries and K keys of one sequence and head.
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


_vector, _matrix_type, _packed = types.float32[::1], types.float32[:, ::1], types.float32[:, :, ::1]
_strided = types.float32[:, :, :]  # of a larger tensor; only for products, because loops over it are slow
_scratch = types.Tuple([_matrix_type, types.uint64[::1], types.int32[::1]])
_masks = types.Tuple([types.uint64, types.uint16, types.float32])
_blocks = types.Tuple([types.intp] * 3)  # of rows: the first, one past the last, and the rows of each


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


@_helper
def _rows_of(first: int, stop: int, each: int, x: Array) -> tuple[int, int]:
    return first * each, min(stop * each, len(x))


@_compiled(*[_matrix_type] * 3, _blocks, _masks, types.float32, types.boolean, _scratch)
def drop(
    x: Array, residual: Array, out: Array, blocks: Any, masks: Any, scale: Number, is_sum: bool, scratch: Any
) -> None:
    """out = scale · dropout(x), plus the residual if `is_sum`; all [N, H]."""
    seed, threshold, kept = masks
    words = scratch[1]
    bits, factor = words.view(np.uint16), kept * scale
    first, stop = _rows_of(*blocks, x)
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


@_helper
def _ordered(bits: Number) -> Number:
    """The bits of a float ↔ a whole number, in the same order."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_helper
def _highest(row: Array) -> Number:
    """The maximum, found among whole numbers: because of NaN, vector instructions do not compute that of floats."""
    numbers, highest = row.view(np.int32), np.int32(-(1 << 31))
    for index in range(len(numbers)):
        highest = max(highest, _ordered(numbers[index]))
    return np.int32(_ordered(highest)).view(np.float32)


@_summing
def _exponentials(row: Array, highest: Number, scale: Number) -> Number:
    """x → 2^(scale · (x - highest)): 1 for the highest, however large the numbers are; returns their sum."""
    total = np.float32(0)
    for index in range(len(row)):
        row[index] = _exp2((row[index] - highest) * scale)
        total += row[index]
    return total


@_helper
def _normal(x: Number) -> tuple[Number, Number]:
    """The normal distribution at x: the integral up to there, and the density."""
    limit = np.float32(3.832506856900711)  # of z = x/√2: beyond it erf is 1
    z = min(max(x * np.float32(0.7071067811865476), -limit), limit)
    square = z * z
    p = np.float32(-2.72614225801306e-10) * square + np.float32(2.77068142495902e-08)
    p = p * square + np.float32(-2.10102402082508e-06)
    p = p * square + np.float32(-5.69250639462346e-05)
    p = p * square + np.float32(-7.34990630326855e-04)
    p = p * square + np.float32(-2.95459980854025e-03)
    p = p * square + np.float32(-1.60960333262415e-02)
    q = np.float32(-1.45660718464996e-05) * square + np.float32(-2.13374055278905e-04)
    q = q * square + np.float32(-1.68282697438203e-03)
    q = q * square + np.float32(-7.37332916720468e-03)
    q = q * square + np.float32(-1.42647390514189e-02)
    half = np.float32(0.5)
    below = half + half * (z * p / q)
    below = np.float32(0) if z == -limit else np.float32(1) if z == limit else below
    return below, np.float32(0.3989422804014327) * _exp2(x * x * (-half * _LOG2_E))


@_compiled(_matrix_type, _vector, _matrix_type, _blocks, types.boolean)
def gelu(x: Array, bias: Array, out: Array, blocks: Any, is_gated: bool) -> None:
    """out [N, H] = gelu(x + bias) of x [N, H]; if `is_gated`, of x [N, 2H], whose second half it is multiplied by."""
    first, stop = _rows_of(*blocks, x)
    width = out.shape[1]
    for row in range(first, stop):
        for column in range(width):
            value = x[row, column] + bias[column]
            out[row, column] = value * _normal(value)[0]
        if is_gated:
            for column in range(width):
                out[row, column] *= x[row, width + column] + bias[width + column]


@_compiled(_matrix_type, _vector, *[_matrix_type] * 3, _blocks, types.boolean)
def gelu_backward(
    x: Array, bias: Array, gradient: Array, of_x: Array, of_bias: Array, blocks: Any, is_gated: bool
) -> None:
    """Write the gradient of x, and that of the bias as one sum for each block of rows."""
    width = gradient.shape[1]
    for block in range(blocks[0], blocks[1]):
        first, stop = _rows_of(block, block + 1, blocks[2], x)
        sums = of_bias[block]
        for row in range(first, stop):
            for column in range(width):
                value = x[row, column] + bias[column]
                below, density = _normal(value)
                slope = gradient[row, column] * (below + value * density)
                if is_gated:
                    slope *= x[row, width + column] + bias[width + column]
                    of_gate = gradient[row, column] * (value * below)
                    of_x[row, width + column] = of_gate
                    sums[width + column] += of_gate
                of_x[row, column] = slope
                sums[column] += slope


@_compiled(_matrix_type, types.int64[::1], _vector, types.int64[::1], _blocks, types.intp)
def cross_entropy(scores: Array, labels: Array, losses: Array, correct: Array, blocks: Any, num_tokens: int) -> None:
    """Write the loss of each row and whether its first maximum is at its label; scores → gradients of the losses.

    The columns from `num_tokens` on are padding.
    """
    first, stop = _rows_of(*blocks, scores)
    for row in range(first, stop):
        label, tokens = labels[row], scores[row, :num_tokens]
        at_label = tokens[label]
        highest = _highest(tokens)
        correct[row] = at_label == highest and not np.any(tokens[:label] == highest)
        total = _exponentials(tokens, highest, _LOG2_E)
        losses[row] = np.log(total) + (highest - at_label)
        tokens *= np.float32(1) / total
        tokens[label] -= np.float32(1)
        scores[row, num_tokens:] = 0


@_summing
def _dot(a: Array, b: Array) -> Number:
    total = np.float32(0)
    for index in range(len(a)):
        total += a[index] * b[index]
    return total


@_helper
def _drop_row(row: Array, bits: Array, masks: Any) -> None:
    _, threshold, kept = masks
    for key in range(len(row)):
        row[key] = row[key] * kept if bits[key] >= threshold else np.float32(0)


@_helper
def _row_gradient(
    scores: Array, gradients: Array, scale: Number, softmax: Array, mean: Number, bits: Array, masks: Any
) -> None:
    """Scores → probabilities after dropout; their gradients → those of the scores before scaling with `scale`.

    `softmax`: as `attend` has written it. Without dropout no bits are below the threshold, whatever they are.
    """
    _, threshold, kept = masks
    highest, factor, of_score = softmax[0], softmax[1], scale / _LOG2_E
    for key in range(len(scores)):
        probability = _exp2((scores[key] - highest) * scale) * factor
        mask = kept if bits[key] >= threshold else np.float32(0)
        scores[key] = probability * mask
        gradients[key] = probability * (gradients[key] * mask - mean) * of_score


@_helper
def _multiply(
    sizes: Array, out: Any, shape: Any, is_added: bool, a: Any, is_a_turned: bool, b: Any, is_b_turned: bool
) -> None:
    """out = a·b, or += if `is_added`. A matrix is (address, step from row to row); `shape`: rows and columns of `out`,
    and the number of summands. Fortran, which stores columns, sees all of them transposed."""
    sizes[0], sizes[1], sizes[2] = shape[1], shape[0], shape[2]
    sizes[3], sizes[4], sizes[5] = b[1], a[1], out[1]
    size, letters, factors = sizes.ctypes.data, _LETTERS.ctypes.data, _FACTORS.ctypes.data
    _sgemm(
        letters + is_b_turned, letters + is_a_turned, size, size + 4, size + 8,
        factors + 4, b[0], size + 12, a[0], size + 16, factors + 4 * is_added, out[0], size + 20,
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


_division = types.Tuple([types.intp] * 5)
_batch = types.Tuple([types.int64[::1], types.int64[:, ::1]])


@_compiled(*[_strided] * 3, *[_packed] * 2, _batch, _division, _masks, _scratch)
def attend(
    queries: Array, keys: Array, values: Array, context: Array, softmaxes: Array,
    batch: Any, division: Any, masks: Any, scratch: Any,
) -> None:  # fmt: skip
    """Write the context [U, A, D] and, for the gradients, the highest score and 1/sum of each softmax [A, U, 2].

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
            used, asked, known = (
                (scores.ctypes.data, num_keys),
                _matrix(queries, begin, head),
                _matrix(keys, start, head),
            )
            _multiply(sizes, used, (num_queries, num_keys, size), False, asked, False, known, True)
            for query in range(begin, end):
                row = scores[query - begin]
                left, right = _seen(rows[query] - sequence[0], reach, low, high)
                row[:left], row[right:] = 0, 0
                highest = _highest(row[left:right])
                factor = np.float32(1) / _exponentials(row[left:right], highest, scale)
                row *= factor
                softmaxes[head, query, 0], softmaxes[head, query, 1] = highest, factor
                if masks[1] > 0:
                    _draw(words, masks[0], head * len(queries) + query, low, high)
                    _drop_row(row, bits, masks)
            out, read = _matrix(context, begin, head), _matrix(values, start, head)
            _multiply(sizes, out, (num_queries, size, num_keys), False, used, False, read, False)


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
            asked, known = _matrix(queries, begin, head), _matrix(keys, start, head)
            given, read = _matrix(gradient, begin, head), _matrix(values, start, head)
            _multiply(sizes, used, (num_queries, num_keys, size), False, asked, False, known, True)
            _multiply(sizes, turned, (num_queries, num_keys, size), False, given, False, read, True)
            for query in range(begin, end):
                row, of_row = scores[query - begin], of_scores[query - begin]
                left, right = _seen(rows[query] - sequence[0], reach, low, high)
                row[:left], row[right:], of_row[:left], of_row[right:] = 0, 0, 0, 0
                mean = _dot(context[query, head], gradient[query, head])  # of the gradients of its probabilities
                if masks[1] > 0:
                    _draw(words, masks[0], head * len(queries) + query, low, high)
                _row_gradient(
                    row[left:right], of_row[left:right], scale, softmaxes[head, query], mean, bits[left:], masks
                )
            is_added = is_divided or tile > 0
            of_q, of_k = _matrix(of_queries, begin, head), _matrix(of_keys, start, head)
            of_v, of_tokens = _matrix(of_values, start, head), (num_keys, size, num_queries)
            _multiply(sizes, of_v, of_tokens, is_added, used, True, given, False)
            _multiply(sizes, of_q, (num_queries, size, num_keys), False, turned, False, known, False)
            _multiply(sizes, of_k, of_tokens, is_added, turned, True, asked, False)
