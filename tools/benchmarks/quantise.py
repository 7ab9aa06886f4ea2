"""Measures the quantisation kernels alone, in this process, on a tensor larger than the caches.

`quantise`, `fold` (dequantise, add the local share, quantise: a hop of the ring) and `dequantise` are GB of tensor per
second of CPU time, best repetition: for float32 with each instruction set of this CPU, for other types with the widest.
The first row is memcpy. `bits` of an element are on the wire; `rms` is the error of quantising normally distributed
numbers once.

`allreduce --quantize` measures all-reduces over the network. docs/quantisation.md has bounds for their errors.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
from common import QUANTIZATIONS, Array, Row, Rows, add, whole
from quantiser import INSTRUCTION_SETS, Quantiser, instruction_set

import zpccl
from benchmarks.scenario import Column, Scenario

FORMATS = tuple(name for name in QUANTIZATIONS if name != "none")
DATATYPES = {
    "float32": zpccl.DataType.FLOAT,
    "float64": zpccl.DataType.DOUBLE,
    "float16": zpccl.DataType.FLOAT16,
    "bfloat16": zpccl.DataType.BFLOAT16,
}
TENSOR_BYTES = 64 * 2**20
ERROR_ELEMENTS = 2**20


def rate(function: Callable[[], object], reps: int) -> float:
    """GB/s of the fastest repetition."""
    best = float("inf")
    for _ in range(reps):
        began = time.thread_time()
        function()
        best = min(best, time.thread_time() - began)
    return TENSOR_BYTES / best / 1e9


def tensor_of(datatype: zpccl.DataType) -> Array:
    """Normally distributed elements; BFLOAT16 as their bits."""
    numbers = np.random.default_rng(0).standard_normal(ERROR_ELEMENTS, np.float32)
    values = np.resize(numbers, TENSOR_BYTES // datatype.itemsize)
    if datatype is zpccl.DataType.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(datatype.to_numpy_dtype())


def measure_kernels(quantiser: Quantiser, tensor: Array, reps: int) -> Row:
    """Size, error (where numpy has the type) and speed."""
    count = TENSOR_BYTES // quantiser.datatype.itemsize
    wire, back = np.zeros(quantiser.wire_bytes(count), np.uint8), np.zeros_like(tensor)
    quantiser.quantise(wire, tensor)
    quantiser.dequantise(back, wire)
    off = (back[:ERROR_ELEMENTS].astype(np.float64) - tensor[:ERROR_ELEMENTS]) if tensor.dtype.kind == "f" else None
    return {
        "bits": 8 * wire.nbytes / count,
        "rms": None if off is None else float(np.sqrt(np.mean(off**2))),
        "quantise": rate(lambda: quantiser.quantise(wire, tensor), reps),
        "fold": rate(lambda: quantiser.fold(wire, tensor), reps),
        "dequantise": rate(lambda: quantiser.dequantise(back, wire), reps),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--dtypes", list(DATATYPES), "of the tensor", choices=DATATYPES)
    add(parser, "--formats", list(FORMATS), "on the wire", choices=FORMATS)
    limits, text = zpccl.limits, "elements that share a scale"
    largest = limits.QUANTIZATION_BLOCK_ELEMENTS_MAX
    add(parser, "--blocks", [limits.QUANTIZATION_BLOCK_ELEMENTS], text, type=whole(1, largest))
    add(parser, "--reps", 7, "repetitions of each kernel")


def measure(options: argparse.Namespace) -> Rows:
    source, copy = np.ones(TENSOR_BYTES, np.uint8), np.zeros(TENSOR_BYTES, np.uint8)
    yield {"format": "memcpy", "dequantise": rate(lambda: np.copyto(copy, source), options.reps)}
    isas = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(instruction_set()) + 1]
    for name in options.dtypes:
        tensor = tensor_of(DATATYPES[name])
        for isa, form, block in itertools.product(
            isas if name == "float32" else isas[-1:], options.formats, options.blocks
        ):
            how = QUANTIZATIONS[form]
            quantized = zpccl.QuantizedDataType(how.quantized_datatype)
            quantiser = Quantiser(DATATYPES[name], how.algorithm, quantized, block, instruction_set=isa)
            row = {"dtype": name, "isa": isa, "format": form, "block": block}
            yield row | measure_kernels(quantiser, tensor, options.reps)


COLUMNS = [
    *(Column(name, name) for name in ("format", "dtype", "isa", "block")),
    *(Column(name, name, ".3g") for name in ("bits", "rms")),
    *(Column(name, name, ".1f") for name in ("quantise", "fold", "dequantise")),
]
TITLE = "Kernels of quantisation: GB of tensor a second and core"

SCENARIO = Scenario(__doc__, add_arguments, measure, TITLE, COLUMNS)
