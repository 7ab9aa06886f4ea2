"""Measures quantisation: how fast the kernels are, and how large the errors of a quantised all-reduce.

Everything runs in this process; `allreduce --quantize` measures all-reduces over the network.

  kernels  GB of tensor per second and core, of one call over a tensor larger than the caches: quantise, dequantise, and
           the fold of the ring (dequantise, add the local share, quantise), for each instruction set of this CPU; best
           repetition, by CPU time; compared with memcpy of the same tensor
  blocks   by block size: bytes on the wire, error and speed, for normally distributed numbers
  reduces  error of a SUM by the ring and by the direct exchange, computed with the kernels as the engine does (the
  tests
           compare them bit by bit), with the worst-case bound. Normally distributed numbers: `own`, each peer has
           different ones; `same`, peer n contributes n + 1 times the same numbers

Errors are for float32: the largest, and the root mean square (rms); the range is that of the exact result.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from common import QUANTIZATIONS, Array, Row, Rows, add, positive
from quantiser import INSTRUCTION_SETS, Quantiser, instruction_set

import zpccl
from benchmarks.scenario import Column, Scenario, Table

PARTS = ("kernels", "blocks", "reduces")
FORMATS = tuple(name for name in QUANTIZATIONS if name != "none")
DATATYPES = {
    "float32": zpccl.DataType.FLOAT,
    "float64": zpccl.DataType.DOUBLE,
    "float16": zpccl.DataType.FLOAT16,
    "bfloat16": zpccl.DataType.BFLOAT16,
}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
KERNEL_BYTES = 64 * 2**20
ERROR_ELEMENTS = 2**20


def quantiser_of(name: str, datatype: zpccl.DataType = zpccl.DataType.FLOAT, isa: str | None = None) -> Quantiser:
    """The quantiser with a name of QUANTIZATIONS."""
    options = QUANTIZATIONS[name]
    quantized = zpccl.QuantizedDataType(options.quantized_datatype)
    return Quantiser(datatype, options.algorithm, quantized, options.block_size, instruction_set=isa)


def normal(count: int, seed: int = 0) -> Array:
    """Normally distributed numbers, the same in every run."""
    return np.random.default_rng(seed).standard_normal(count, np.float32)


# --- Speed ------------------------------------------------------------------------------------------------------------


def rate(function: Callable[[], object], size_bytes: int, reps: int) -> float:
    """GB/s of the fastest repetition."""
    best = float("inf")
    for _ in range(reps):
        began = time.thread_time()
        function()
        best = min(best, time.thread_time() - began)
    return size_bytes / best / 1e9


def rates(quantiser: Quantiser, tensor: Array, reps: int) -> dict[str, float]:
    """GB/s of each kernel. `tensor` holds the bits of elements, and is not modified."""
    count = tensor.nbytes // quantiser.datatype.itemsize
    wire, back = np.zeros(quantiser.wire_bytes(count), np.uint8), np.zeros_like(tensor)
    return {
        "quantise": rate(lambda: quantiser.quantise(wire, tensor), tensor.nbytes, reps),
        "fold": rate(lambda: quantiser.fold(wire, tensor), tensor.nbytes, reps),
        "dequantise": rate(lambda: quantiser.dequantise(back, wire), tensor.nbytes, reps),
    }


def elements_of(datatype: zpccl.DataType, size_bytes: int) -> Array:
    """Normally distributed elements; BFLOAT16 as their bits."""
    values = np.resize(normal(ERROR_ELEMENTS), size_bytes // datatype.itemsize)
    if datatype is zpccl.DataType.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(datatype.to_numpy_dtype())


def measure_kernels(reps: int) -> Rows:
    """All instruction sets with float32, all types with the widest instruction set."""
    copy, plain = np.zeros(KERNEL_BYTES, np.uint8), elements_of(zpccl.DataType.FLOAT, KERNEL_BYTES).view(np.uint8)
    gbps = rate(lambda: np.copyto(copy, plain), KERNEL_BYTES, reps)
    yield {"part": "kernels", "dtype": "float32", "isa": "", "format": "memcpy", "dequantise": gbps}
    for name, datatype in DATATYPES.items():
        tensor = elements_of(datatype, KERNEL_BYTES)
        isas = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(instruction_set()) + 1]
        for isa in isas if datatype is zpccl.DataType.FLOAT else isas[-1:]:
            for form in FORMATS:
                found = rates(quantiser_of(form, datatype, isa), tensor, reps)
                yield {"part": "kernels", "dtype": name, "isa": isa, "format": form, **found}


# --- Errors -----------------------------------------------------------------------------------------------------------


def through(quantiser: Quantiser, elements: Array) -> Array:
    """The elements after quantising and dequantising."""
    wire, back = np.empty(quantiser.wire_bytes(elements.size), np.uint8), np.empty_like(elements)
    quantiser.quantise(wire, elements)
    quantiser.dequantise(back, wire)
    return back


def errors(result: Array, exact: Array) -> dict[str, float]:
    """Largest and rms error, and the range of the exact result."""
    off = result.astype(np.float64) - exact
    return {
        "worst": float(np.abs(off).max()),
        "rms": float(np.sqrt(np.mean(off**2))),
        "range": float(exact.max() - exact.min()),
    }


def ring(quantiser: Quantiser, inputs: Sequence[Array]) -> Array:
    """A SUM by the ring: chunk j starts at rank j, and each following rank folds in its share."""
    size = len(inputs)
    chunks = []
    for chunk, shares in enumerate(zip(*(np.array_split(x, size) for x in inputs), strict=True)):
        wire, back = np.empty(quantiser.wire_bytes(shares[0].size), np.uint8), np.empty_like(shares[0])
        quantiser.quantise(wire, np.ascontiguousarray(shares[chunk]))
        for hop in range(1, size):
            quantiser.fold(wire, np.ascontiguousarray(shares[(chunk + hop) % size]))
        quantiser.dequantise(back, wire)
        chunks.append(back)
    return np.concatenate(chunks)


def direct(quantiser: Quantiser, inputs: Sequence[Array]) -> Array:
    """A SUM by the direct exchange: rank j receives chunk j from all others, adds in order of rank, quantises the
    sum."""
    size = len(inputs)
    chunks = []
    for owner, shares in enumerate(zip(*(np.array_split(x, size) for x in inputs), strict=True)):
        wire = [np.empty(quantiser.wire_bytes(shares[0].size), np.uint8) for _ in range(size)]
        for rank in range(size):
            quantiser.quantise(wire[rank], np.ascontiguousarray(shares[rank]))
        others = [wire[rank] for rank in range(size) if rank != owner]
        quantiser.join(wire[owner], others, owner, np.ascontiguousarray(shares[owner]))
        back = np.empty_like(shares[0])
        quantiser.dequantise(back, wire[owner])
        chunks.append(back)
    return np.concatenate(chunks)


def block_span(quantiser: Quantiser, values: Array) -> float:
    """The largest span of the levels of a block: its range, extended to 0 if 0 has a code; for symmetric codes twice
    its largest magnitude."""
    starts = np.arange(0, values.size, quantiser.block_elements)
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    if quantiser.algorithm is zpccl.QuantizationAlgorithm.ZERO_POINT_SCALE:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        if quantiser.quantized_datatype in (zpccl.QuantizedDataType.INT8, zpccl.QuantizedDataType.INT4):
            high = np.maximum(high, -low)
            low = -high
    return float((high - low).max())


def bounds(quantiser: Quantiser, spans: Sequence[float]) -> tuple[float, float]:
    """Bounds of the error of ring and direct exchange, if the blocks of peer n span spans[n]: docs/quantisation.md
    derives them. Floating-point roundings are neglected: they are below a thousandth."""
    has_zero = quantiser.algorithm is zpccl.QuantizationAlgorithm.ZERO_POINT_SCALE
    levels = (1 << quantiser.quantized_datatype.bits) - 1 - has_zero
    by_ring = partial = 0.0
    for span in sorted(spans, reverse=True):  # The worst order of the ring.
        partial += span
        by_ring += (partial + 2 * by_ring) / levels / 2
    shares = (partial - min(spans)) / levels / 2  # The owner's own share is exact.
    return by_ring, shares + (partial + 2 * shares) / levels / 2


def measure_blocks(reps: int) -> Rows:
    """Size, error and speed by block size."""
    values, tensor = normal(ERROR_ELEMENTS), elements_of(zpccl.DataType.FLOAT, KERNEL_BYTES)
    for form in FORMATS:
        for block in BLOCK_SIZES:
            quantiser = replace(quantiser_of(form), block_elements=block)
            bits = 8 * quantiser.wire_bytes(values.size) / values.size
            row: Row = {"part": "blocks", "format": form, "block": block, "bits": bits}
            yield {**row, **errors(through(quantiser, values), values), **rates(quantiser, tensor, reps)}


def contributions(data: str, size: int) -> list[Array]:
    """The inputs of the peers."""
    if data == "own":
        return [normal(ERROR_ELEMENTS, rank) for rank in range(size)]
    return [normal(ERROR_ELEMENTS) * np.float32(rank + 1) for rank in range(size)]


def measure_reduces(peers: Sequence[int]) -> Rows:
    """Compares ring and direct exchange."""
    for data, size in itertools.product(("own", "same"), peers):
        inputs = contributions(data, size)
        exact: Array = np.add.reduce(inputs, axis=0, dtype=np.float64)
        for form in FORMATS:
            quantiser = quantiser_of(form)
            row: Row = {"part": "reduces", "data": data, "format": form, "peers": size}
            row["ring bound"], row["direct bound"] = bounds(quantiser, [block_span(quantiser, x) for x in inputs])
            for name, function in (("ring", ring), ("direct", direct)):
                found = errors(function(quantiser, inputs), exact)
                row.update({f"{name} {key}": found[key] for key in ("worst", "rms")}, range=found["range"])
            yield row


# --- The scenario -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--parts", list(PARTS), "what to measure", choices=PARTS)
    add(parser, "--peers", [2, 4, 8, 16], "of the reduces", type=positive)
    add(parser, "--reps", 7, "repetitions of each kernel")


def measure(options: argparse.Namespace) -> Rows:
    if "kernels" in options.parts:
        yield from measure_kernels(options.reps)
    if "blocks" in options.parts:
        yield from measure_blocks(options.reps)
    if "reduces" in options.parts:
        yield from measure_reduces(options.peers)


def columns(*names: str) -> list[Column]:
    """Columns with few significant digits."""
    forms = {"range": ".3g", "bits": ".3g", **dict.fromkeys(SPEEDS, ".1f")}
    return [Column(name, name, ".3g" if name.endswith(ERRORS) else forms.get(name, "")) for name in names]


SPEEDS = ("quantise", "fold", "dequantise")
ERRORS = ("worst", "rms", "bound")
REDUCES = [f"{way} {error}" for way in ("ring", "direct") for error in ERRORS]
TABLES = [
    Table("Kernels, GB of tensor a second and core", columns("dtype", "isa", "format", *SPEEDS), "kernels"),
    Table(
        "Block sizes: bits an element on the wire, error, GB/s",
        columns("format", "block", "bits", "worst", "rms", *SPEEDS),
        "blocks",
    ),
    Table("Error of a SUM", columns("data", "format", "peers", "range", *REDUCES), "reduces"),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, TABLES)
