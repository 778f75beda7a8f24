"""Loops over the rows of a matrix, compiled by numba: dropout, GELU, and cross entropy; and what other loops call.

They hold no lock of Python's, so several threads compute parts of the same work. N rows, H their width.
"""

from typing import Any

import numpy as np
from numba import types

from nvidia.cpu.compiled import Array, Number, compiled, helper, masks_type, matrix, summing, vector

LOG2_E = np.float32(1.4426950408889634)
_SMALLEST = np.float32(-64)  # exponents below which a probability is 0, so that no product meets denormal numbers
_ROUNDING = np.float32(1.5 * 2**23)  # a number to which it is added is rounded, and is in the sum's lowest bits
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_blocks = types.Tuple([types.intp] * 3)  # of rows: the first, one past the last, and the rows of each


@helper
def _mix(z: Number) -> Number:
    """A bijection of 64 bits whose results for neighbouring numbers are independent: SplitMix64's."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@helper
def draw(words: Array, seed: Number, row: int, first: int, stop: int) -> None:
    """Random bits of a row for the elements from `first`, a multiple of 4, to `stop`: 16 for each."""
    start = _mix(seed + np.uint64(row))
    for number in range((stop - first + 3) // 4):
        words[number] = _mix(start + np.uint64(first // 4 + number) * _GOLDEN)


@helper
def _rows_of(first: int, stop: int, each: int, x: Array) -> tuple[int, int]:
    return first * each, min(stop * each, len(x))


@compiled(*[matrix] * 3, _blocks, masks_type, types.float32, types.boolean, types.uint64[::1])
def drop(
    x: Array, residual: Array, out: Array, blocks: Any, masks: Any, scale: Number, is_sum: bool, words: Array
) -> None:
    """out = scale · dropout(x), plus the residual if `is_sum`; all [N, H]. `words`: room for the bits of a row."""
    seed, threshold, kept = masks
    bits, factor = words.view(np.uint16), kept * scale
    first, stop = _rows_of(*blocks, x)
    for row in range(first, stop):
        draw(words, seed, row, 0, x.shape[1])
        for column in range(x.shape[1]):
            value = x[row, column] * (factor if bits[column] >= threshold else np.float32(0))  # NaN remains NaN
            out[row, column] = value + residual[row, column] if is_sum else value


@helper
def exp2(x: Number) -> Number:
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


@helper
def _ordered(bits: Number) -> Number:
    """The bits of a float ↔ a whole number, in the same order."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@helper
def highest_of(row: Array) -> Number:
    """The maximum, found among whole numbers: because of NaN, vector instructions do not compute that of floats."""
    numbers, highest = row.view(np.int32), np.int32(-(1 << 31))
    for index in range(len(numbers)):
        highest = max(highest, _ordered(numbers[index]))
    return np.int32(_ordered(highest)).view(np.float32)


@summing
def exponentials(row: Array, highest: Number, scale: Number) -> Number:
    """x → 2^(scale · (x - highest)): 1 for the highest, however large the numbers are; returns their sum."""
    total = np.float32(0)
    for index in range(len(row)):
        row[index] = exp2((row[index] - highest) * scale)
        total += row[index]
    return total


@helper
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
    return below, np.float32(0.3989422804014327) * exp2(x * x * (-half * LOG2_E))


@compiled(matrix, vector, matrix, _blocks, types.boolean)
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


@compiled(matrix, vector, *[matrix] * 3, _blocks, types.boolean)
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


@compiled(matrix, types.int64[::1], vector, types.int64[::1], _blocks, types.intp)
def cross_entropy(scores: Array, labels: Array, losses: Array, correct: Array, blocks: Any, num_tokens: int) -> None:
    """Write the loss of each row and whether its first maximum is at its label; scores → gradients of the losses.

    The columns from `num_tokens` on are padding.
    """
    first, stop = _rows_of(*blocks, scores)
    for row in range(first, stop):
        label, tokens = labels[row], scores[row, :num_tokens]
        at_label = tokens[label]
        highest = highest_of(tokens)
        correct[row] = at_label == highest and not np.any(tokens[:label] == highest)
        total = exponentials(tokens, highest, LOG2_E)
        losses[row] = np.log(total) + (highest - at_label)
        tokens *= np.float32(1) / total
        tokens[label] -= np.float32(1)
        scores[row, num_tokens:] = 0
