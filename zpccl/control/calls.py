"""The memory of a collective, and the plan that the engine gets for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zpccl.engine.engine import ReducePlan
from zpccl.engine.tensors import TensorView
from zpccl.protocol.effects import StartReduce
from zpccl.protocol.messages import CollectiveSpec
from zpccl.protocol.rings import owners_of
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp


@dataclass
class Buffers:
    """The memory of a collective, and how it is combined.

    Attributes:
        recv: receives the result. Where its size depends on who takes part, a function: it is called in the peer's
            thread with the number of peers and this one's place among them, in order of ids, and may raise PCCLError.
    """

    spec: CollectiveSpec
    send: TensorView
    recv: TensorView | Callable[[int, int], TensorView]
    restore: bool

    def plan(self, start: StartReduce, own_id: bytes) -> ReducePlan:
        """What the engine of the peer `own_id` does in an attempt.

        Raises:
            PCCLError: there is no room for the result.
        """
        spec, order, owners = self.spec, start.order, owners_of(start.order)
        rank, kind = order.index(own_id), CollectiveKind(self.spec.kind)
        recv = self.recv if isinstance(self.recv, TensorView) else self.recv(len(order), owners.index(rank))
        if kind is CollectiveKind.ALL_REDUCE:
            owners = ()
        elif kind is CollectiveKind.BROADCAST:
            owners = (0,)  # The ring begins with the root.
        return ReducePlan(
            attempt_id=start.attempt_id,
            datatype=DataType(spec.datatype),
            op=ReduceOp(spec.op),
            quantization=QuantizationAlgorithm(spec.quantization),
            quantized_datatype=QuantizedDataType(spec.quantized_datatype),
            block_elements=spec.block_elements,
            rank=rank,
            peers=order,
            count=spec.count,
            input_address=self.send.address,
            output_address=recv.address,
            frame_bytes=start.frame_bytes,
            restore=self.restore,
            kind=kind,
            owners=owners,
            algorithm=Algorithm(start.algorithm),
        )
