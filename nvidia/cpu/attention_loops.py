"""Loops of attention, compiled by numba: each head of a sequence from its queries, keys and values to its context.

U queries, A heads, D head size; a tile has R queries and K keys of one sequence and head. Importing this file turns off
the threads of scipy's BLAS, which computes the products.
"""

from typing import Any

import llvmlite.binding
import numpy as np
import scipy.linalg  # noqa: F401  (loads its BLAS)
from numba import types
from numba.extending import get_cython_function_address
from threadpoolctl import ThreadpoolController

from nvidia.cpu.compiled import Array, Number, compiled, helper, masks_type, matrix, packed, strided, summing
from nvidia.cpu.loops import LOG2_E, draw, exp2, exponentials, highest_of

# Loops run on torch's threads, with which those of scipy's BLAS would compete for the cores.
_blas = [
    found for found in ThreadpoolController().select(user_api="blas").lib_controllers if found.prefix != "libmkl_rt"
]
for _library in [found for found in _blas if "scipy.libs" in found.filepath] or _blas:
    _library.set_num_threads(1)
_SGEMM = "bert_pretraining_sgemm"
llvmlite.binding.add_symbol(_SGEMM, get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))
_sgemm: Any = types.ExternalFunction(_SGEMM, types.void(*[types.intp] * 13))  # it takes the address of each argument
_LETTERS = np.frombuffer(b"NT", dtype=np.uint8)  # as it is, transposed
_FACTORS = np.array([0, 1], dtype=np.float32)


_scratch = types.Tuple([matrix, types.uint64[::1], types.int32[::1]])
_division = types.Tuple([types.intp] * 5)
_batch = types.Tuple([types.int64[::1], types.int64[:, ::1]])


def make_scratch(num_scores: int, width: int) -> tuple[Array, Array, Array]:
    """What one thread needs: two tiles of scores, random bits for a row of `width` elements, and a product's sizes."""
    return np.empty((2, num_scores), np.float32), np.empty(-(-width // 4), np.uint64), np.empty(6, np.int32)


@summing
def _dot(a: Array, b: Array) -> Number:
    total = np.float32(0)
    for index in range(len(a)):
        total += a[index] * b[index]
    return total


@helper
def _drop_row(row: Array, bits: Array, masks: Any) -> None:
    _, threshold, kept = masks
    for key in range(len(row)):
        row[key] *= kept if bits[key] >= threshold else np.float32(0)


@helper
def _row_gradient(
    scores: Array, gradients: Array, scale: Number, softmax: Array, mean: Number, bits: Array, masks: Any
) -> None:
    """Scores → probabilities after dropout; their gradients → those of the scores before scaling with `scale`.

    `softmax`: as `attend` has written it. Without dropout no bits are below the threshold, whatever they are.
    """
    _, threshold, kept = masks
    highest, factor, of_score = softmax[0], softmax[1], scale / LOG2_E
    for key in range(len(scores)):
        probability = exp2((scores[key] - highest) * scale) * factor
        mask = kept if bits[key] >= threshold else np.float32(0)
        scores[key] = probability * mask
        gradients[key] = probability * (gradients[key] * mask - mean) * of_score


@helper
def _multiply(
    sizes: Array, out: Any, shape: Any, is_added: bool, a: Any, is_a_transposed: bool, b: Any, is_b_transposed: bool
) -> None:
    """out = a·b, or += if `is_added`. A matrix is (address, step from row to row); `shape`: rows and columns of `out`,
    and the number of summands. Fortran, which stores columns, sees all of them transposed."""
    sizes[0], sizes[1], sizes[2] = shape[1], shape[0], shape[2]
    sizes[3], sizes[4], sizes[5] = b[1], a[1], out[1]
    size, letters, factors = sizes.ctypes.data, _LETTERS.ctypes.data, _FACTORS.ctypes.data
    _sgemm(
        letters + is_b_transposed, letters + is_a_transposed, size, size + 4, size + 8,
        factors + 4, b[0], size + 12, a[0], size + 16, factors + 4 * is_added, out[0], size + 20,
    )  # fmt: skip


@helper
def _matrix(packed: Array, row: int, head: int) -> tuple[int, int]:
    """The rows of a head from `row` on, as `_multiply` takes them. The stride of a single row may be any number."""
    step = max(packed.strides[0] // 4, packed.shape[2])
    return packed.ctypes.data + row * packed.strides[0] + head * packed.strides[1], step


@helper
def _num_tiles(sequence: Array, reach: int, tile_scores: int, min_rows: int) -> int:
    """Tiles of a sequence: of about `tile_scores`, but of `min_rows` queries at least, and of these with a window."""
    length, queries = sequence[1], sequence[3]
    return -(-queries // (min_rows if reach < length - 1 else max(min_rows, tile_scores // length)))


@helper
def _tile(rows: Array, sequence: Array, number: int, count: int, reach: int) -> tuple[int, int, int, int]:
    """The queries of a tile (first, one past the last), and the keys that they see, from a multiple of 4 on."""
    start, length, queries, num_queries = sequence
    first, stop = queries + num_queries * number // count, queries + num_queries * (number + 1) // count
    return first, stop, max(0, rows[first] - start - reach) & ~3, min(length, rows[stop - 1] - start + reach + 1)


@helper
def _seen(position: int, reach: int, first: int, stop: int) -> tuple[int, int]:
    """Which of the keys from `first` to `stop` the query at this position sees, counted from `first`."""
    return max(0, position - reach - first), min(stop, position + reach + 1) - first


@compiled(*[strided] * 3, *[packed] * 2, _batch, _division, masks_type, _scratch)
def attend(
    queries: Array, keys: Array, values: Array, context: Array, softmaxes: Array,
    batch: Any, division: Any, masks: Any, scratch: Any,
) -> None:  # fmt: skip
    """Write the context [U, A, D] and, for the gradients, the highest score and 1/sum of each softmax [A, U, 2].

    batch: the packed position of each query [U], and for each sequence its first token, number of tokens, first query
    and number of queries. division: the pairs of sequence and head to compute (first, stop), how far a query sees,
    scores of a tile, and the minimum number of queries of a tile. masks: seed, threshold and scale of dropout.
    """
    rows, sequences = batch
    first, stop, reach, tile_scores, min_rows = division
    buffers, words, sizes = scratch
    bits, heads, size = words.view(np.uint16), queries.shape[1], queries.shape[2]
    scale = LOG2_E / np.sqrt(np.float32(size))
    for pair in range(first, stop):
        sequence, head = sequences[pair // heads], pair % heads
        count = _num_tiles(sequence, reach, tile_scores, min_rows)
        for tile in range(count):
            begin, end, low, high = _tile(rows, sequence, tile, count, reach)
            num_queries, num_keys, start = end - begin, high - low, sequence[0] + low
            scores = buffers[0, : num_queries * num_keys].reshape((num_queries, num_keys))
            score_rows = (scores.ctypes.data, num_keys)
            q_rows, k_rows = _matrix(queries, begin, head), _matrix(keys, start, head)
            _multiply(sizes, score_rows, (num_queries, num_keys, size), False, q_rows, False, k_rows, True)
            for query in range(begin, end):
                row = scores[query - begin]
                left, right = _seen(rows[query] - sequence[0], reach, low, high)
                row[:left], row[right:] = 0, 0
                highest = highest_of(row[left:right])
                factor = np.float32(1) / exponentials(row[left:right], highest, scale)
                row *= factor
                softmaxes[head, query, 0], softmaxes[head, query, 1] = highest, factor
                if masks[1] > 0:
                    draw(words, masks[0], head * len(queries) + query, low, high)
                    _drop_row(row, bits, masks)
            out, v_rows = _matrix(context, begin, head), _matrix(values, start, head)
            _multiply(sizes, out, (num_queries, size, num_keys), False, score_rows, False, v_rows, False)


@compiled(*[strided] * 3, *[packed] * 3, *[strided] * 3, _batch, _division, masks_type, _scratch)
def attend_backward(
    queries: Array, keys: Array, values: Array, context: Array, gradient: Array, softmaxes: Array,
    of_queries: Array, of_keys: Array, of_values: Array,
    batch: Any, division: Any, masks: Any, scratch: Any,
) -> None:  # fmt: skip
    """Write the gradients of queries, keys and values, gradient_rows that of the context; see `attend`."""
    rows, sequences = batch
    first, stop, reach, tile_scores, min_rows = division
    buffers, words, sizes = scratch
    bits, heads, size = words.view(np.uint16), queries.shape[1], queries.shape[2]
    scale = LOG2_E / np.sqrt(np.float32(size))
    for pair in range(first, stop):
        sequence, head = sequences[pair // heads], pair % heads
        count = _num_tiles(sequence, reach, tile_scores, min_rows)
        is_divided = reach < sequence[1] - 1 or count == 0  # tiles share some keys, or none has them
        if is_divided:
            of_keys[sequence[0] : sequence[0] + sequence[1], head] = 0
            of_values[sequence[0] : sequence[0] + sequence[1], head] = 0
        for tile in range(count):
            begin, end, low, high = _tile(rows, sequence, tile, count, reach)
            num_queries, num_keys, start = end - begin, high - low, sequence[0] + low
            scores = buffers[0, : num_queries * num_keys].reshape((num_queries, num_keys))
            of_scores = buffers[1, : num_queries * num_keys].reshape((num_queries, num_keys))
            score_rows, of_score_rows = (scores.ctypes.data, num_keys), (of_scores.ctypes.data, num_keys)
            q_rows, k_rows = _matrix(queries, begin, head), _matrix(keys, start, head)
            gradient_rows, v_rows = _matrix(gradient, begin, head), _matrix(values, start, head)
            _multiply(sizes, score_rows, (num_queries, num_keys, size), False, q_rows, False, k_rows, True)
            _multiply(sizes, of_score_rows, (num_queries, num_keys, size), False, gradient_rows, False, v_rows, True)
            for query in range(begin, end):
                row, of_row = scores[query - begin], of_scores[query - begin]
                left, right = _seen(rows[query] - sequence[0], reach, low, high)
                row[:left], row[right:], of_row[:left], of_row[right:] = 0, 0, 0, 0
                mean = _dot(context[query, head], gradient[query, head])  # of the gradients of its probabilities
                if masks[1] > 0:
                    draw(words, masks[0], head * len(queries) + query, low, high)
                _row_gradient(
                    row[left:right], of_row[left:right], scale, softmaxes[head, query], mean, bits[left:], masks
                )
            is_added = is_divided or tile > 0
            of_q, of_k = _matrix(of_queries, begin, head), _matrix(of_keys, start, head)
            of_v, of_tokens = _matrix(of_values, start, head), (num_keys, size, num_queries)
            _multiply(sizes, of_v, of_tokens, is_added, score_rows, True, gradient_rows, False)
            _multiply(sizes, of_q, (num_queries, size, num_keys), False, of_score_rows, False, k_rows, False)
            _multiply(sizes, of_k, of_tokens, is_added, of_score_rows, True, q_rows, False)
