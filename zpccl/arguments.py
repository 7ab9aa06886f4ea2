"""Checks the arguments of collectives and makes calls of them: the spec to vote for, the memory, the result.

Every function raises InvalidArgument for an argument that cannot be used. An all-to-all raises PeerLost if it has rows
for more peers than there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy

from zpccl import limits
from zpccl.caller import checked_int, is_member
from zpccl.control.calls import PendingCall, part_of
from zpccl.engine.tensors import NO_MEMORY, TensorView, first_elements, is_on_gpu, local_tensor, new_tensor, view
from zpccl.errors import InvalidArgument, PeerLost
from zpccl.protocol.messages import CollectiveSpec
from zpccl.types import (
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
    no_quantization,
)

_NO_QUANTIZATION = no_quantization()


@dataclass(eq=False, kw_only=True)
class Collective(PendingCall):
    """A collective, and the result that the user gets."""

    def info(self, world_size: int | None = None) -> ReduceInfo:
        """Its statistics. `world_size`: number of members to report if it has not succeeded."""
        size = self.future.result() if world_size is None else world_size
        return ReduceInfo(size, self.tx_bytes, self.rx_bytes, self.algorithm)

    def result(self) -> Any:
        """`ReduceInfo`, unless a subclass returns more."""
        return self.info()


# --- All-reduce -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _AllReduce(Collective):
    tensor: Any

    def result(self) -> Any:
        """The tensor that receives the result."""
        return self.tensor


def all_reduce(
    send: Any,
    recv: Any,
    op: ReduceOp,
    tag: int,
    operand: ReduceOperandDescriptor | None,
    quantization: QuantizationOptions | None,
    algorithm: str,
    restore: bool = True,
    count: int | None = None,
) -> Collective:
    """An all-reduce. `count`: the number of elements in the user's descriptor."""
    options = _NO_QUANTIZATION if quantization is None else quantization
    if not isinstance(options, QuantizationOptions):
        raise InvalidArgument(f"quantization_options is a {type(options).__name__}, not QuantizationOptions")
    datatype = _datatype_of(operand)
    in_place = recv is send
    send, tensor = local_tensor(send), local_tensor(recv)
    source = view(send, "send", writable=in_place, datatype=datatype)
    if tensor is None:
        tensor, target = new_tensor(send, tuple(send.shape), source.datatype)
    else:
        target = source if in_place else view(tensor, "recv", writable=True, reads=False, like=source)
    if target.count != source.count:
        raise InvalidArgument(f"recv has {target.count} elements, send has {source.count}")
    if count is not None and count != source.count:
        raise InvalidArgument(f"the descriptor says {count!r} elements, send has {source.count}")
    if target.place != source.place and target.overlaps(source):
        raise InvalidArgument("send and recv share a part of their memory; pass the same tensor or separate ones")
    # Options that are not used must be neither compared between peers nor checked.
    if options.algorithm == QuantizationAlgorithm.NONE:
        options = _NO_QUANTIZATION
    else:
        _check_quantization(options, source.datatype)
    spec = _spec(CollectiveKind.ALL_REDUCE, tag, source, op, options=options, algorithm=Algorithm.parse(algorithm))
    return _AllReduce(spec=spec, send=source, recv=target, restore=_restore(restore), tensor=tensor)


def all_reduce_of(descriptor: ReduceOpDescriptor, algorithm: str) -> Collective:
    """The all-reduce of a descriptor."""
    if not isinstance(descriptor, ReduceOpDescriptor):
        raise InvalidArgument(f"expected a ReduceOpDescriptor, got a {type(descriptor).__name__}")
    reduce = descriptor.reduce_descriptor
    if not isinstance(reduce, ReduceDescriptor):
        raise InvalidArgument(f"reduce_descriptor is a {type(reduce).__name__}, not a ReduceDescriptor")
    return all_reduce(
        descriptor.send,
        descriptor.recv,
        reduce.op,
        reduce.tag,
        reduce.operand_descriptor,
        reduce.quantization_options,
        algorithm,
        count=reduce.count,
    )


def check_apart(calls: Iterable[Collective]) -> None:
    """Raises an error if a call writes memory that another one uses: they run at the same time."""
    spans = sorted(
        (*memory.place, memory.nbytes, is_written, index)
        for index, call in enumerate(calls)
        for memory, is_written in ((call.recv, True), (call.send, False))
        if memory.nbytes and (is_written or call.send.place != call.recv.place)
    )
    ends: dict[str, tuple[int, int]] = {}  # By device: of all memory so far, and of the memory that is written.
    for device, begin, size, is_written, index in spans:
        used, written = ends.get(device, (0, 0))
        if begin < (used if is_written else written):
            raise InvalidArgument(f"descriptor {index} and another one use the same memory, and one of them writes it")
        ends[device] = max(used, begin + size), max(written, begin + size * is_written)


def _check_quantization(options: QuantizationOptions, datatype: DataType) -> None:
    if not is_member(options.algorithm, QuantizationAlgorithm):
        raise InvalidArgument(f"{options.algorithm!r} is not a QuantizationAlgorithm")
    if not datatype.is_floating:
        raise InvalidArgument(f"only floating-point tensors can be quantised, not {datatype.name}")
    if options.quantized_datatype not in tuple(QuantizedDataType):
        names = ", ".join(QuantizedDataType.__members__)
        raise InvalidArgument(f"can quantise to {names} only, not {options.quantized_datatype!r}")
    checked_int(options.block_size, "block_size", 1, limits.QUANTIZATION_BLOCK_ELEMENTS_MAX)


# --- Broadcast and barrier ------------------------------------------------------------------------------------------


def broadcast(tensor: Any, is_root: bool, tag: int, restore: bool) -> Collective:
    """A broadcast."""
    if not isinstance(is_root, (bool, numpy.bool_)):
        raise InvalidArgument(f"is_root is {is_root!r}; say True on the peer whose tensor is sent, False on the others")
    memory = view(local_tensor(tensor), "tensor", writable=not is_root, reads=is_root)
    spec = _spec(CollectiveKind.BROADCAST, tag, memory, is_root=bool(is_root))
    return Collective(spec=spec, send=memory, recv=memory, restore=_restore(restore))


def barrier(tag: int) -> Collective:
    """A barrier."""
    return Collective(spec=_spec(CollectiveKind.BARRIER, tag, NO_MEMORY))


# --- Collectives whose result depends on who takes part -------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _SizedByPeers(Collective):
    """A collective whose result has a size that depends on the number of peers that take part.

    Args:
        like: the user's tensor that is sent.
        tensor: receives the result; None: a new tensor.
        world_size: members of the group now. A tensor that is too small for so many is refused at once.
    """

    like: Any
    tensor: Any
    world_size: int
    _is_ours: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.tensor is not None:
            self.recv = view(self.tensor, "recv", writable=True, reads=False, like=self.send)
            if self.recv.overlaps(self.send):
                raise InvalidArgument("send and recv share a part of their memory; pass separate tensors")
            self.recv_for(self.world_size, 0)
        elif is_on_gpu(self.like):
            # Page-locked memory takes long to allocate. Made here, it does not delay the peer's thread.
            self._make(self.elements(self.world_size, 0))

    def elements(self, world_size: int, place: int) -> int:
        """The number of elements of the result for one peer, by its place among all that take part."""
        raise NotImplementedError

    def recv_for(self, world_size: int, place: int) -> TensorView:
        """A new tensor, or the user's, if it is large enough."""
        needed = self.elements(world_size, place)
        if self.tensor is None or (self._is_ours and self.recv.count < needed):
            self._make(needed)
        elif self.recv.count < needed:
            raise InvalidArgument(f"recv has {self.recv.count} elements; among {world_size} peers {needed} are needed")
        return self.recv

    def _make(self, count: int) -> None:
        self.tensor, self.recv = new_tensor(self.like, (count,), self.send.datatype)
        self._is_ours = True

    def received_bytes(self) -> int:
        """Size of the result, which may be a part of the tensor."""
        return self.elements(len(self.peers), self.place) * self.send.datatype.itemsize

    def taken(self, *shape: int) -> Any:
        """The part of the tensor that holds the result."""
        return first_elements(self.tensor, self.elements(len(self.peers), self.place), shape)

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names and ids of all peers that take part."""
        return tuple(name for _, name in self.peers), tuple(peer_id.hex() for peer_id, _ in self.peers)


@dataclass(eq=False, kw_only=True)
class _AllGather(_SizedByPeers):
    def elements(self, world_size: int, place: int) -> int:
        """A row for each peer."""
        del place
        return self.send.count * world_size

    def result(self) -> GatherResult:
        """The rows."""
        rows = self.taken(len(self.peers), *self.like.shape)
        return GatherResult(rows, *self.names(), self.place, self.info())


@dataclass(eq=False, kw_only=True)
class _ReduceScatter(_SizedByPeers):
    def elements(self, world_size: int, place: int) -> int:
        """The part of this peer."""
        part = part_of(self.send.count, world_size, place)
        return int(part.stop - part.start)

    def result(self) -> ScatterResult:
        """The part."""
        part = part_of(self.send.count, len(self.peers), self.place)
        return ScatterResult(self.taken(part.stop - part.start), part, *self.names(), self.place, self.info())


@dataclass(eq=False, kw_only=True)
class _AllToAll(_SizedByPeers):
    _all: Any = field(default=None, init=False)
    """The rows of all peers for all peers, if they travel through others."""

    def __post_init__(self) -> None:
        self.check_rows(self.world_size)
        super().__post_init__()

    def check_rows(self, world_size: int) -> None:
        """Raises an error unless the tensor has one row per peer: PeerLost if it has more, else InvalidArgument."""
        shape = tuple(self.like.shape)
        if shape and shape[0] > world_size:
            raise PeerLost(f"send has rows for {shape[0]} peers, but the group has only {world_size}; make new rows")
        if shape[:1] != (world_size,):
            raise InvalidArgument(f"send has the shape {shape}; {world_size} peers need a row each")

    def elements(self, world_size: int, place: int) -> int:
        """A row from each peer."""
        del world_size, place
        return self.send.count

    def recv_for(self, world_size: int, place: int) -> TensorView:
        """A new tensor, or the user's. Raises PeerLost if there is a row for a lost peer."""
        self.check_rows(world_size)
        self._all = None
        return super().recv_for(world_size, place)

    def rows_for(self, world_size: int) -> TensorView:
        """New memory for the rows of all peers for all peers."""
        self._all = numpy.empty(world_size * self.send.nbytes, numpy.uint8)
        return TensorView(self._all, self._all.ctypes.data, world_size * self.send.count, self.send.datatype)

    def put(self) -> None:
        """Copies the rows for this peer out of the rows for all peers."""
        if self._all is not None:
            size = self.send.nbytes // len(self.peers)
            begin = self._all.ctypes.data + size * self.place
            for row in range(len(self.peers)):
                ctypes.memmove(self.recv.address + size * row, begin + self.send.nbytes * row, size)
            self._all = None
        super().put()

    def result(self) -> GatherResult:
        """The rows."""
        return GatherResult(self.taken(*self.like.shape), *self.names(), self.place, self.info())


def all_gather(send: Any, recv: Any, tag: int, world_size: int) -> Collective:
    """An all-gather among `world_size` members or, if some are lost, fewer."""
    send, recv = local_tensor(send), local_tensor(recv)
    memory = view(send, "send", writable=False)
    spec = _spec(CollectiveKind.ALL_GATHER, tag, memory)
    return _AllGather(spec=spec, send=memory, like=send, tensor=recv, world_size=world_size)


def all_to_all(send: Any, recv: Any, tag: int, world_size: int) -> Collective:
    """An all-to-all among `world_size` members."""
    send, recv = local_tensor(send), local_tensor(recv)
    memory = view(send, "send", writable=False)
    spec = _spec(CollectiveKind.ALL_TO_ALL, tag, memory, rows=send.shape[0] if len(send.shape) else 0)
    return _AllToAll(spec=spec, send=memory, like=send, tensor=recv, world_size=world_size)


def reduce_scatter(
    send: Any, recv: Any, op: ReduceOp, tag: int, operand: ReduceOperandDescriptor | None, world_size: int
) -> Collective:
    """A reduce-scatter among `world_size` members or, if some are lost, fewer."""
    send, recv = local_tensor(send), local_tensor(recv)
    memory = view(send, "send", writable=False, datatype=_datatype_of(operand))
    spec = _spec(CollectiveKind.REDUCE_SCATTER, tag, memory, op)
    return _ReduceScatter(spec=spec, send=memory, like=send, tensor=recv, world_size=world_size)


# --- Checks ---------------------------------------------------------------------------------------------------------


def _spec(
    kind: CollectiveKind,
    tag: int,
    memory: TensorView,
    op: ReduceOp = ReduceOp.SUM,
    *,
    is_root: bool = False,
    options: QuantizationOptions = _NO_QUANTIZATION,
    algorithm: Algorithm = Algorithm.AUTO,
    rows: int = 0,
) -> CollectiveSpec:
    if not is_member(op, ReduceOp):
        raise InvalidArgument(f"op {op!r} is not a zpccl.ReduceOp")
    if memory.count > limits.ELEMENTS_MAX:
        raise InvalidArgument(f"a tensor of {memory.count} elements is too large; at most {limits.ELEMENTS_MAX} fit")
    return CollectiveSpec(
        tag=checked_int(tag, "tag", 0, limits.TAG_MAX),
        count=memory.count,
        datatype=int(memory.datatype),
        op=int(op),
        quantization=int(options.algorithm),
        quantized_datatype=int(options.quantized_datatype),
        block_size=int(options.block_size),
        kind=int(kind),
        is_root=is_root,
        algorithm=int(algorithm),
        rows=rows,
    )


def _restore(restore: Any) -> bool:
    if not isinstance(restore, (bool, numpy.bool_)):
        raise InvalidArgument(f"restore is {restore!r}; say True or False")
    return bool(restore)


def _datatype_of(operand: ReduceOperandDescriptor | None) -> DataType | None:
    if not isinstance(operand, ReduceOperandDescriptor | None):
        raise InvalidArgument(f"operand_descriptor is a {type(operand).__name__}, not a ReduceOperandDescriptor")
    if operand is None or operand.datatype is None:
        return None
    if not is_member(operand.datatype, DataType):
        raise InvalidArgument(f"the datatype of operand_descriptor is {operand.datatype!r}, not a zpccl.DataType")
    return DataType(operand.datatype)
