"""Quantised reduces with the kernels alone, composed as the ring and lanes of trees do, and their error bounds.

The bounds are those of docs/quantisation.md, block by block: the span of a block, the error that its numbers already
have, and the roundings of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from engine_mesh import storage, to_float64
from quantiser import Quantiser
from tree_lanes import Parents, family, parts, root_of, stars

from zpccl.engine.engine import TreeLane
from zpccl.types import DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

QUANTISERS = tuple(
    (algorithm, quantized)
    for algorithm in (QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE)
    for quantized in QuantizedDataType
)


def encode(quantiser: Quantiser, elements: np.ndarray) -> np.ndarray:
    """The bytes that travel."""
    wire = np.empty(quantiser.wire_bytes(elements.size), np.uint8)
    quantiser.quantise(wire, elements)
    return wire


def decode(quantiser: Quantiser, wire: np.ndarray, count: int) -> np.ndarray:
    """The elements that the receiver reads."""
    elements = np.empty(count, storage(quantiser.datatype))
    quantiser.dequantise(elements, wire)
    return elements


def ring(quantiser: Quantiser, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The result of the ring: chunk j goes from rank j to rank j - 1, and each adds its share to what it reads."""
    size = len(inputs)
    pieces = []
    for chunk, shares in enumerate(zip(*(np.array_split(x, size) for x in inputs), strict=True)):
        wire = encode(quantiser, shares[chunk])
        for hop in range(1, size):
            divisor = size if hop == size - 1 and quantiser.op is ReduceOp.AVG else 1
            quantiser.fold(wire, shares[(chunk + hop) % size], divisor)
        pieces.append(decode(quantiser, wire, shares[0].size))
    return np.concatenate(pieces)


def trees(quantiser: Quantiser, inputs: Sequence[np.ndarray], lanes: Sequence[TreeLane]) -> np.ndarray:
    """The result of lanes of trees: a parent reads its children's shares, reduces them with its own, and quantises."""

    def share(parents: Parents, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        ranks = family(parents, rank)
        if ranks == [rank]:
            return encode(quantiser, parts[rank])
        wire = np.empty(quantiser.wire_bytes(parts[rank].size), np.uint8)
        shares = [share(parents, parts, other) for other in ranks if other != rank]
        divisor = len(inputs) if quantiser.op is ReduceOp.AVG and rank == parents[rank] else 1
        quantiser.join(wire, shares, ranks.index(rank), parts[rank], divisor)
        return wire

    pieces = []
    for parents, parts_of_lane in parts(lanes, inputs):
        wire = share(parents, parts_of_lane, root_of(parents))
        pieces.append(decode(quantiser, wire, parts_of_lane[0].size))
    return np.concatenate(pieces)


def direct(quantiser: Quantiser, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The result of the direct exchange: rank j gets chunk j from all, adds in order of rank, and quantises once."""
    return trees(quantiser, inputs, stars(len(inputs), inputs[0].size))


_OPERATION: dict[ReduceOp, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


def exact(op: ReduceOp, inputs: Sequence[np.ndarray], datatype: DataType) -> np.ndarray:
    """The result in double precision."""
    total = to_float64(inputs[0], datatype)
    for x in inputs[1:]:
        total = _OPERATION[op](total, to_float64(x, datatype))
    return total / len(inputs) if op is ReduceOp.AVG else total


# --- Bounds -----------------------------------------------------------------------------------------------------------


def rounding(quantiser: Quantiser) -> float:
    """Epsilon of the arithmetic."""
    return 2.0**-52 if quantiser.datatype is DataType.DOUBLE else 2.0**-23


def storing(quantiser: Quantiser, magnitude: np.ndarray) -> np.ndarray:
    """Error of storing a number of at most `magnitude` in a 16-bit type: half a step, with denormals included."""
    if quantiser.datatype is DataType.FLOAT16:
        return magnitude * 2.0**-11 + 2.0**-25
    if quantiser.datatype is DataType.BFLOAT16:
        return magnitude * 2.0**-8 + 2.0**-134
    return np.zeros_like(magnitude)


def step_error(quantiser: Quantiser, values: np.ndarray, off: np.ndarray) -> np.ndarray:
    """Error, for each element, of quantising and reading numbers that differ from `values` by at most `off`."""
    starts = np.arange(0, values.size, quantiser.block_elements)
    low = np.minimum.reduceat(values - off, starts)
    high = np.maximum.reduceat(values + off, starts)
    largest = np.maximum(np.abs(low), np.abs(high))
    most = 2**quantiser.quantized_datatype.bits - 1
    if quantiser.algorithm is QuantizationAlgorithm.MIN_MAX:
        half_step = (high - low) / 2 / most
    elif quantiser.quantized_datatype in (QuantizedDataType.INT8, QuantizedDataType.INT4):
        half_step = largest / (most - 1)
    else:
        half_step = (np.maximum(high, 0) - np.minimum(low, 0)) / 2 / (most - 1)
    smallest = 2.0**-1074 if quantiser.datatype is DataType.DOUBLE else 2.0**-149
    error = half_step + 8 * rounding(quantiser) * largest + smallest
    return np.repeat(error, quantiser.block_elements)[: values.size]


def ring_bound(quantiser: Quantiser, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Bound of `ring`: each of the N partial results is quantised once, and has the error of the one before it."""
    size = len(inputs)
    pieces = []
    for chunk, shares in enumerate(zip(*(np.array_split(x, size) for x in inputs), strict=True)):
        partial = to_float64(shares[chunk], quantiser.datatype)
        off = step_error(quantiser, partial, np.zeros_like(partial))
        for hop in range(1, size):
            share = to_float64(shares[(chunk + hop) % size], quantiser.datatype)
            partial = _OPERATION[quantiser.op](partial, share)
            off = off + rounding(quantiser) * (np.abs(partial) + off)
            if hop == size - 1 and quantiser.op is ReduceOp.AVG:
                partial, off = partial / size, off / size + rounding(quantiser) * (np.abs(partial) + off)
            off = off + step_error(quantiser, partial, off)
        pieces.append(off + storing(quantiser, np.abs(partial) + off))
    return np.concatenate(pieces)


def trees_bound(quantiser: Quantiser, inputs: Sequence[np.ndarray], lanes: Sequence[TreeLane]) -> np.ndarray:
    """Bound of `trees`: each rank quantises once what it sends up, which has the errors of its children's shares. The
    result is quantised too."""

    def share(parents: Parents, parts: Sequence[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
        own = to_float64(parts[rank], quantiser.datatype), np.zeros(parts[rank].size)
        ranks = family(parents, rank)
        shares = [own if other == rank else share(parents, parts, other) for other in ranks]
        total, off = shares[0]
        for other, error in shares[1:]:
            total = _OPERATION[quantiser.op](total, other)
            off = off + error + rounding(quantiser) * (np.abs(total) + off + error)
        if quantiser.op is ReduceOp.AVG and rank == parents[rank]:
            total, off = total / len(inputs), off / len(inputs) + rounding(quantiser) * (np.abs(total) + off)
        return total, off + step_error(quantiser, total, off)

    pieces = []
    for parents, parts_of_lane in parts(lanes, inputs):
        total, off = share(parents, parts_of_lane, root_of(parents))
        pieces.append(off + storing(quantiser, np.abs(total) + off))
    return np.concatenate(pieces)


def direct_bound(quantiser: Quantiser, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Bound of `direct`: all shares except the owner's are quantised once, and then the result."""
    return trees_bound(quantiser, inputs, stars(len(inputs), inputs[0].size))
