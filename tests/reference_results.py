"""What the result of a reduce must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from engine_mesh import FLOATING, Case, to_float64
from quantised_reduces import direct, ring, trees
from quantiser import Quantiser

from zpccl.types import Algorithm, DataType, QuantizationAlgorithm, ReduceOp


def check_result(case: Case, inputs: Sequence[np.ndarray], result: np.ndarray) -> None:
    """`result` is right: for floats within the bound of the arithmetic, for all else exactly. Quantised results have
    the bits that the kernels give, whose bounds test_quantiser.py checks."""
    if case.quantization is not QuantizationAlgorithm.NONE:
        assert result.tobytes() == _quantised_reference(case, inputs).tobytes(), case
        return
    if case.datatype not in FLOATING:
        np.testing.assert_array_equal(result, _integer_reference(case, inputs))
        return
    values = np.stack([to_float64(x, case.datatype) for x in inputs])
    expected = _real_reference(case.op, values)
    error = np.abs(to_float64(result, case.datatype) - expected)
    bound = _rounding_bound(case, values, expected)
    assert np.all(error <= bound), f"{case}: off by {np.max(error)}, allowed is {np.max(bound)}"


def _quantised_reference(case: Case, inputs: Sequence[np.ndarray]) -> np.ndarray:
    quantiser = Quantiser(case.datatype, case.quantization, case.quantized, case.block_elements, case.op)
    if case.lanes:
        return trees(quantiser, inputs, case.lanes)
    return (ring if case.algorithm is Algorithm.RING else direct)(quantiser, inputs)


def _integer_reference(case: Case, inputs: Sequence[np.ndarray]) -> np.ndarray:
    stacked = np.stack(inputs)
    if case.op is ReduceOp.MAX:
        return stacked.max(axis=0)
    if case.op is ReduceOp.MIN:
        return stacked.min(axis=0)
    function = np.multiply if case.op is ReduceOp.PROD else np.add
    if case.op is not ReduceOp.AVG:
        return function.reduce(stacked, axis=0, dtype=stacked.dtype)
    wide = stacked.dtype if stacked.dtype.itemsize == 8 else np.dtype(np.int64)  # Only 64-bit sums wrap.
    total, size = np.add.reduce(stacked, axis=0, dtype=wide), wide.type(len(inputs))
    mean = (total - np.fmod(total, size)) // size  # fmod has the sign of the dividend, so this truncates
    return mean.astype(stacked.dtype)


def _real_reference(op: ReduceOp, values: np.ndarray) -> np.ndarray:
    if op is ReduceOp.MAX:
        return values.max(axis=0)
    if op is ReduceOp.MIN:
        return values.min(axis=0)
    if op is ReduceOp.PROD:
        return values.prod(axis=0)
    return values.sum(axis=0) / (len(values) if op is ReduceOp.AVG else 1)


def _unit(datatype: DataType) -> float:
    """Largest relative error of one rounding."""
    return {DataType.FLOAT16: 2**-11, DataType.BFLOAT16: 2**-8, DataType.FLOAT: 2**-24, DataType.DOUBLE: 2**-53}[
        datatype
    ]


def _rounding_bound(case: Case, values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Each of the N-1 hops rounds a partial result once. For sums that is at most the sum of magnitudes, grown by the
    roundings so far. AVG rounds once more (at most: 16-bit types do not). The reference itself is in double."""
    if case.op in (ReduceOp.MAX, ReduceOp.MIN):
        return np.zeros_like(expected)
    hops, unit = len(values) - 1, _unit(case.datatype)
    growth = (1 + unit) ** (hops + 1)
    reference_error = len(values) * 2**-53
    if case.op is ReduceOp.PROD:
        return ((1 + unit) ** hops - 1 + reference_error) * np.abs(expected) * (1 + 2**-20)
    magnitudes = np.abs(values).sum(axis=0)
    bound = (hops * unit * growth + reference_error) * magnitudes
    if case.op is ReduceOp.AVG:
        # A quotient of a 16-bit type is rounded twice, first to float.
        bound = bound / len(values) + (unit + 2**-24) * np.abs(expected) + bound * unit
        bound += 2**-25 if case.datatype is DataType.FLOAT16 else 0
    return bound
