"""The quantisation kernels of the C data plane without an engine, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zpccl.engine._native import ffi, lib

from zpccl import limits
from zpccl.engine.engine import check_rc
from zpccl.types import DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


def instruction_set() -> str:
    """The instruction set of the kernels on this CPU: "avx512", "avx2" or "baseline"."""
    name: bytes = ffi.string(lib.zp_isa())
    return name.decode("ascii")


@dataclass(frozen=True)
class Quantiser:
    """The quantisation of frames.

    Buffers are contiguous and need not be aligned; wire and elements do not overlap. All methods raise EngineError:
    EINVAL if an argument is out of range, ENOTSUP if the CPU lacks the instruction set.

    Args:
        datatype: of the elements, floating.
        algorithm: MIN_MAX or ZERO_POINT_SCALE.
        quantized_datatype: type of the elements on the wire.
        block_elements: elements that share one scale.
        op: the operation of `fold` and `join`.
        instruction_set: one of INSTRUCTION_SETS that this CPU has; all give the same bits. None: the widest.
    """

    datatype: DataType
    algorithm: QuantizationAlgorithm
    quantized_datatype: QuantizedDataType = QuantizedDataType.UINT8
    block_elements: int = limits.QUANTIZATION_BLOCK_ELEMENTS
    op: ReduceOp = ReduceOp.SUM
    instruction_set: str | None = None

    def wire_bytes(self, count: int) -> int:
        """Bytes of `count` elements on the wire."""
        return check_rc(lib.zp_quantised_bytes(self._native(), count), "zp_quantised_bytes")

    def quantise(self, wire: Any, elements: Any) -> None:
        """Quantises `elements` to `wire`."""
        self._call("zp_quantise", wire, elements)

    def fold(self, wire: Any, local: Any, divisor: int = 1) -> None:
        """Reduces in place: wire = quantise((dequantise(wire) op local) / divisor)."""
        self._call("zp_quantise_fold", wire, local, divisor=divisor)

    def join(self, wire: Any, shares: Sequence[Any], rank: int, local: Any, divisor: int = 1) -> None:
        """Reduces the shares of all peers in order of rank, divides by `divisor` and quantises to `wire`. `shares` are
        those of all ranks but `rank`, quantised; that of `rank` is `local`, not quantised."""
        pieces = [ffi.from_buffer("uint8_t[]", share) for share in shares]
        count = len(ffi.from_buffer(local)) // self.datatype.itemsize
        if min(map(len, pieces)) < self.wire_bytes(count):
            raise ValueError(f"a share is too short for {count} elements on the wire")
        self._call("zp_quantise_join", wire, local, pieces, len(pieces) + 1, rank, divisor=divisor)

    def dequantise(self, elements: Any, wire: Any) -> None:
        """Dequantises `wire` to `elements`."""
        self._call("zp_dequantise", wire, elements)

    def _native(self) -> Any:
        return ffi.new(
            "zp_quantiser *",
            {
                "algorithm": int(self.algorithm),
                "quantized": int(self.quantized_datatype),
                "dtype": int(self.datatype),
                "op": int(self.op),
                "block_elements": self.block_elements,
            },
        )

    def _call(self, function: str, wire: Any, elements: Any, *more: Any, divisor: int | None = None) -> None:
        writes_wire = function != "zp_dequantise"
        codes = ffi.from_buffer("uint8_t[]", wire, require_writable=writes_wire)
        values = ffi.from_buffer(elements, require_writable=not writes_wire)
        count = len(values) // self.datatype.itemsize
        if len(codes) < self.wire_bytes(count):
            raise ValueError(f"{len(codes)} bytes are too few for {count} elements on the wire")
        isa = INSTRUCTION_SETS.index(self.instruction_set or instruction_set())
        first, second = (codes, values) if writes_wire else (values, codes)
        last = () if divisor is None else (divisor,)
        check_rc(getattr(lib, function)(self._native(), isa, first, *more, second, count, *last), function)
