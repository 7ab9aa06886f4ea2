"""Checks what users give to collectives, and makes of it what a peer needs: the spec to vote for, and the memory.

Where the result depends on who takes part, its memory is made, or the given memory checked, when the plan has come: the
peer's loop then calls `Buffers.recv` with the number of peers and this one's place among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zpccl import limits
from zpccl.caller import is_int
from zpccl.control.buffers import Buffers
from zpccl.control.peer_loop import PendingCall
from zpccl.engine.tensors import NO_MEMORY, TensorView, empty_like, first_elements, new_tensor, view
from zpccl.errors import InvalidArgument, InvalidUsage
from zpccl.protocol.messages import CollectiveSpec
from zpccl.types import (
    NO_QUANTIZATION,
    Algorithm,
    CollectiveKind,
    DataType,
    GatherResult,
    QuantizationAlgorithm,
    QuantizationOptions,
    QuantizedDataType,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    ScatterResult,
)


@dataclass(frozen=True)
class Prepared:
    """A collective whose arguments are right.

    Attributes:
        buffers: its spec and memory.
        result: makes what the user gets of the call that has succeeded, and of what it cost.
    """

    buffers: Buffers
    result: Callable[[PendingCall, ReduceInfo], Any]


def part_of(count: int, world_size: int, index: int) -> slice:
    """The elements of one part of a reduce-scatter: the first `count % world_size` parts are one longer."""
    short, long_count = divmod(count, world_size)
    start = index * short + min(index, long_count)
    return slice(start, start + short + (index < long_count))


class AllReduce:
    """An all-reduce as the user asked for it."""

    def __init__(
        self,
        send: Any,
        recv: Any,
        op: ReduceOp,
        tag: int,
        operand: ReduceOperandDescriptor | None,
        quantization: QuantizationOptions | None,
        restore: bool = True,
        count: int | None = None,
        algorithm: str = "auto",
    ) -> None:
        self.send, self.recv, self.op, self.tag = send, recv, op, tag
        self.operand, self.quantization = operand, quantization or NO_QUANTIZATION
        self.restore, self.count, self.algorithm = restore, count, algorithm

    @classmethod
    def of(cls, descriptor: ReduceOpDescriptor, algorithm: str) -> AllReduce:
        """The one of a descriptor."""
        reduce: ReduceDescriptor = descriptor.reduce_descriptor
        return cls(
            descriptor.send,
            descriptor.recv,
            reduce.op,
            reduce.tag,
            reduce.operand_descriptor,
            reduce.quantization_options,
            count=reduce.count,
            algorithm=algorithm,
        )

    def prepare(self) -> Prepared:
        """The checked memory and arguments; the result is the tensor that receives it.

        Raises:
            InvalidArgument: a tensor or an argument cannot be used.
        """
        if not isinstance(self.quantization, QuantizationOptions):
            raise InvalidArgument(f"quantization_options is a {type(self.quantization).__name__}")
        datatype = _datatype_of(self.operand)
        result = empty_like(self.send) if self.recv is None else self.recv
        in_place = result is self.send
        send = view(self.send, "send", writable=in_place, datatype=datatype)
        recv = send if in_place else view(result, "recv", writable=True, datatype=datatype or send.datatype)
        if recv.count != send.count:
            raise InvalidArgument(f"recv has {recv.count} elements, send has {send.count}")
        if self.count is not None and self.count != send.count:
            raise InvalidArgument(f"the descriptor says {self.count} elements, send has {send.count}")
        if recv.address != send.address and recv.overlaps(send):
            raise InvalidArgument("send and recv share a part of their memory; pass the same tensor or separate ones")
        _check_tag(self.tag)
        _check_op(self.op)
        self._check_quantization(send)
        # What is not used must be neither compared between peers nor checked.
        options = self.quantization if self.quantization.algorithm != QuantizationAlgorithm.NONE else NO_QUANTIZATION
        spec = CollectiveSpec(
            tag=int(self.tag),
            count=send.count,
            datatype=int(send.datatype),
            op=int(self.op),
            quantization=int(options.algorithm),
            quantized_datatype=int(options.quantized_datatype),
            block_elements=int(options.block_size),
            algorithm=int(Algorithm.parse(self.algorithm)),
        )
        return Prepared(Buffers(spec, send, recv, self.restore), lambda call, info: result)

    def _check_quantization(self, send: TensorView) -> None:
        options = self.quantization
        if options.algorithm == QuantizationAlgorithm.NONE:
            return
        if options.algorithm not in tuple(QuantizationAlgorithm):
            raise InvalidArgument(f"{options.algorithm!r} is not a QuantizationAlgorithm")
        if not send.datatype.is_floating:
            raise InvalidArgument(f"only floating-point tensors can be quantised, not {send.datatype.name}")
        if options.quantized_datatype not in tuple(QuantizedDataType):
            names = ", ".join(QuantizedDataType.__members__)
            raise InvalidArgument(f"can quantise to {names} only, not {options.quantized_datatype!r}")
        if not is_int(options.block_size) or not 1 <= options.block_size <= limits.QUANTIZATION_BLOCK_ELEMENTS_MAX:
            raise InvalidArgument(f"block_size {options.block_size!r} is not within the bounds")


def broadcast(tensor: Any, is_root: bool, tag: int, restore: bool) -> Prepared:
    """Of a broadcast; the result is `ReduceInfo`."""
    if not isinstance(is_root, bool):
        raise InvalidArgument(f"is_root is {is_root!r}; say True on the peer whose tensor is sent, False on the others")
    memory = view(tensor, "tensor", writable=not is_root)
    spec = _spec(CollectiveKind.BROADCAST, tag, memory, is_root=is_root)
    return Prepared(Buffers(spec, memory, memory, restore), lambda call, info: info)


def all_gather(send: Any, recv: Any, tag: int, world_size: int) -> Prepared:
    """Of an all-gather among `world_size` members or, if some are lost, fewer; the result is `GatherResult`."""
    memory = view(send, "send", writable=False)
    spec = _spec(CollectiveKind.ALL_GATHER, tag, memory)
    into = _Into(send, memory, recv, lambda world_size, _: memory.count * world_size)
    into.check(world_size, 0)

    def result(call: PendingCall, info: ReduceInfo) -> GatherResult:
        row, peers = _place_of(call), call.peers
        tensor = first_elements(into.tensor, memory.count * len(peers), (len(peers), *send.shape))
        return GatherResult(tensor, *_names_of(peers), row, info)

    return Prepared(Buffers(spec, memory, into.take, restore=True), result)


def reduce_scatter(
    send: Any, recv: Any, op: ReduceOp, tag: int, operand: ReduceOperandDescriptor | None, world_size: int
) -> Prepared:
    """Of a reduce-scatter among `world_size` members or, if some are lost, fewer; the result is `ScatterResult`."""
    memory = view(send, "send", writable=False, datatype=_datatype_of(operand))
    _check_op(op)
    spec = _spec(CollectiveKind.REDUCE_SCATTER, tag, memory, op=op)

    def part_count(world_size: int, index: int) -> int:
        part = part_of(memory.count, world_size, index)
        return int(part.stop - part.start)

    into = _Into(send, memory, recv, part_count)
    into.check(world_size, 0)

    def result(call: PendingCall, info: ReduceInfo) -> ScatterResult:
        index, peers = _place_of(call), call.peers
        part = part_of(memory.count, len(peers), index)
        tensor = first_elements(into.tensor, part.stop - part.start, (part.stop - part.start,))
        return ScatterResult(tensor, part, *_names_of(peers), index, info)

    return Prepared(Buffers(spec, memory, into.take, restore=True), result)


def barrier(tag: int) -> Prepared:
    """Of a barrier; the result is `ReduceInfo`."""
    _check_tag(tag)
    spec = CollectiveSpec(int(tag), 1, int(DataType.UINT8), 0, 0, 0, 1, int(CollectiveKind.BARRIER))
    return Prepared(Buffers(spec, NO_MEMORY, NO_MEMORY, restore=False), lambda call, info: info)


class _Into:
    """What receives the result of a collective that needs more or less room with the peers that take part.

    Args:
        send: the user's tensor; one that is made is like it.
        memory: its memory.
        recv: the user's, or None: then one is made.
        elements: how many are needed with so many peers, at that place among them.

    Attributes:
        tensor: the user's, or the one that was made.
    """

    def __init__(self, send: Any, memory: TensorView, recv: Any, elements: Callable[[int, int], int]) -> None:
        self._send, self._memory, self._elements = send, memory, elements
        self.tensor = recv
        self._given: TensorView | None = None
        if recv is not None:
            self._given = view(recv, "recv", writable=True, datatype=memory.datatype)
            if self._given.overlaps(memory):
                raise InvalidArgument("send and recv share a part of their memory; pass separate tensors")

    def check(self, world_size: int, place: int) -> None:
        """Raises InvalidArgument if the user's tensor is too small."""
        needed = self._elements(world_size, place)
        if self._given is not None and self._given.count < needed:
            raise InvalidArgument(
                f"recv has {self._given.count} elements; among {world_size} peers {needed} are needed"
            )

    def take(self, world_size: int, place: int) -> TensorView:
        """The memory, once it is known who takes part.

        Raises:
            InvalidArgument: the user's tensor is too small.
        """
        self.check(world_size, place)
        if self._given is not None:
            return self._given
        self.tensor, memory = new_tensor(self._send, self._elements(world_size, place), self._memory.datatype)
        return memory


def _place_of(call: PendingCall) -> int:
    if not call.future.done() or call.future.exception() is not None:
        raise InvalidUsage("there is no result; wait() for it, and look whether it succeeded")
    return call.place


def _names_of(peers: tuple[tuple[bytes, str], ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(name for _, name in peers), tuple(peer_id.hex() for peer_id, _ in peers)


def _spec(
    kind: CollectiveKind, tag: int, memory: TensorView, *, op: ReduceOp = ReduceOp.SUM, is_root: bool = False
) -> CollectiveSpec:
    """The spec of a collective that is not quantised."""
    _check_tag(tag)
    options = NO_QUANTIZATION
    return CollectiveSpec(
        tag=int(tag),
        count=memory.count,
        datatype=int(memory.datatype),
        op=int(op),
        quantization=int(options.algorithm),
        quantized_datatype=int(options.quantized_datatype),
        block_elements=int(options.block_size),
        kind=int(kind),
        is_root=is_root,
    )


def _datatype_of(operand: ReduceOperandDescriptor | None) -> DataType | None:
    if not isinstance(operand, ReduceOperandDescriptor | None):
        raise InvalidArgument(f"operand_descriptor is a {type(operand).__name__}")
    return operand.datatype if operand is not None else None


def _check_tag(tag: Any) -> None:
    if not is_int(tag) or not 0 <= tag <= limits.TAG_MAX:
        raise InvalidArgument(f"tag {tag!r} is not an integer from 0 to {limits.TAG_MAX}")


def _check_op(op: Any) -> None:
    if op not in tuple(ReduceOp):
        raise InvalidArgument(f"op {op!r} is not a ReduceOp")
