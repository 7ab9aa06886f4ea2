"""Contents of the tensors of all-reduces: a pattern whose exact sum is known, so that every result can be checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from common import QUANTIZATIONS, Array

import zpccl

PERIOD_ELEMENTS = 97
"""Period of the pattern; a prime, so that chunks and frames begin with different elements."""
PIECE_ELEMENTS = PERIOD_ELEMENTS * 10_000
"""Number of elements written or compared per step."""


def pattern(numbers: Sequence[int], dtype: str) -> Array:
    """One period of the sum of these peers' contributions, exact in every dtype for small sums.

    Peer n contributes n + 0, n + 1, ..., n + 96, repeated; n is taken modulo 8, to be exact in float16, too.
    """
    steps = np.arange(PERIOD_ELEMENTS, dtype=np.int64)
    total = sum((steps + number % 8 for number in numbers), np.zeros_like(steps))
    return total.astype(dtype)


def fill_with(array: Array, period: Array) -> None:
    """Repeats `period` over `array`."""
    for piece, wanted in _pieces(array, period):
        piece[:] = wanted


def worst_error(array: Array, period: Array) -> float:
    """The largest difference between `array` and the repeated `period`; 0.0 if they are equal."""
    worst = 0.0
    for piece, wanted in _pieces(array, period):
        if piece.tobytes() != wanted.tobytes():
            difference = float(np.abs(piece.astype(np.float64) - wanted.astype(np.float64)).max())
            worst = max(worst, difference if difference > 0 else math.inf)
    return worst


def error_bound(peers: int, quantize: str) -> float:
    """The largest error that a quantised all-reduce of `pattern` may have.

    The partial sum of k peers spans at most k times the span of one. It is quantised to 255 or 15 steps (one less for a
    type with a code for 0), with an error below one step; the errors of all partial sums add up.
    """
    if quantize == "none":
        return 0.0
    largest = PERIOD_ELEMENTS - 1 + 7
    steps = (1 << zpccl.QuantizedDataType(QUANTIZATIONS[quantize].quantized_datatype).bits) - 1
    return sum(k * largest / steps for k in range(1, peers + 1))


def _pieces(array: Array, period: Array) -> Iterator[tuple[Array, Array]]:
    block = np.resize(period, min(PIECE_ELEMENTS, array.size))
    for begin in range(0, array.size, PIECE_ELEMENTS):
        piece = array[begin : begin + PIECE_ELEMENTS]
        yield piece, block[: piece.size]
