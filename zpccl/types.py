"""Enums, descriptors and infos: the plain values of the public API.

Names and arguments are those of PCCL's Python package. numpy and torch are looked up only when a conversion is asked
for, so that importing this module costs nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from zpccl.errors import InvalidArgument
from zpccl.limits import QUANTIZATION_BLOCK_ELEMENTS


class ReduceOp(enum.IntEnum):
    """How elements are combined.

    Integers wrap around. AVG of integers is SUM divided by the number of peers, rounded toward zero. MAX and MIN give
    NaN where any input is NaN.
    """

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class CollectiveKind(enum.IntEnum):
    """What a collective does. The first four are the C engine's `enum zp_kind`."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BARRIER = 4
    """Moves no data: it is done when all have called it."""


class Attribute(enum.IntEnum):
    """What `Communicator.get_attribute` can tell."""

    GLOBAL_WORLD_SIZE = 0
    """Members of the run, all groups together."""
    LOCAL_WORLD_SIZE = 1
    """Members of the caller's peer group."""
    NUM_DISTINCT_PEER_GROUPS = 2
    LARGEST_PEER_GROUP_WORLD_SIZE = 3


class SharedStateSyncStrategy(enum.IntEnum):
    """What a peer wants from `Communicator.sync_shared_state`."""

    ENFORCE_POPULAR = 0
    """The contents that most peers hold win."""
    RECEIVE_ONLY = 1
    """Never sends, never elected."""
    SEND_ONLY = 2
    """Never receives; its contents win."""


class DataType(enum.IntEnum):
    """Element type of a tensor."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """True for FLOAT16, BFLOAT16, FLOAT and DOUBLE."""
        return self >= DataType.FLOAT16

    def to_numpy_dtype(self) -> Any:
        """The numpy dtype of this type.

        Raises:
            InvalidArgument: for BFLOAT16, which numpy does not have. Arrays of ml_dtypes' bfloat16, or uint16 arrays
                with an explicit operand descriptor, are accepted in its place.
        """
        import numpy as np

        if self is DataType.BFLOAT16:
            raise InvalidArgument("numpy has no bfloat16; use torch, ml_dtypes, or uint16 with an operand descriptor")
        return np.dtype(_NUMPY_NAME[self])

    def to_torch_dtype(self) -> Any:
        """The torch dtype of this type."""
        import torch

        return getattr(torch, _TORCH_NAME[self])

    @classmethod
    def from_numpy_dtype(cls, dtype: Any) -> DataType:
        """The type of a numpy dtype (or anything that `numpy.dtype` accepts).

        Raises:
            InvalidArgument: the dtype has no counterpart, or is not in native byte order.
        """
        import numpy as np

        dtype = np.dtype(dtype)
        if dtype.isnative and dtype.name in _FROM_NAME:
            return _FROM_NAME[dtype.name]
        raise InvalidArgument(f"dtype {dtype} is not supported; supported are {', '.join(_FROM_NAME)} in native order")

    @classmethod
    def from_torch_dtype(cls, dtype: Any) -> DataType:
        """The type of a torch dtype.

        Raises:
            InvalidArgument: the dtype has no counterpart.
        """
        name = str(dtype).removeprefix("torch.")
        if name in _FROM_NAME:
            return _FROM_NAME[name]
        raise InvalidArgument(f"dtype {dtype} is not supported; supported are {', '.join(_FROM_NAME)}")


_NUMPY_NAME = {
    DataType.UINT8: "uint8",
    DataType.INT8: "int8",
    DataType.UINT16: "uint16",
    DataType.INT16: "int16",
    DataType.UINT32: "uint32",
    DataType.INT32: "int32",
    DataType.UINT64: "uint64",
    DataType.INT64: "int64",
    DataType.FLOAT16: "float16",
    DataType.BFLOAT16: "bfloat16",
    DataType.FLOAT: "float32",
    DataType.DOUBLE: "float64",
}
_TORCH_NAME = _NUMPY_NAME
_FROM_NAME = {name: datatype for datatype, name in _NUMPY_NAME.items()}
_ITEMSIZE = {
    DataType.UINT8: 1,
    DataType.INT8: 1,
    DataType.UINT16: 2,
    DataType.INT16: 2,
    DataType.UINT32: 4,
    DataType.INT32: 4,
    DataType.UINT64: 8,
    DataType.INT64: 8,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.FLOAT: 4,
    DataType.DOUBLE: 8,
}


class DeviceType(enum.IntEnum):
    """Where a tensor lives."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, device_type: str) -> DeviceType:
        """The type of `tensor.device.type`.

        Raises:
            InvalidArgument: neither "cpu" nor "cuda".
        """
        try:
            return {"cpu": cls.CPU, "cuda": cls.CUDA}[device_type]
        except KeyError:
            raise InvalidArgument(f"device type {device_type!r} is not supported; use cpu or cuda") from None


class DistributionHint(enum.IntEnum):
    """How the elements of a tensor are distributed. A hint: results never depend on it being right."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(enum.IntEnum):
    """How a tensor is made smaller on the wire."""

    NONE = 0
    MIN_MAX = 1
    """Each block is mapped from [its minimum, its maximum] to [0, 255], of 4 bits to [0, 15], rounded to nearest."""
    ZERO_POINT_SCALE = 2
    """Each block is stored as scale * (code - zero_point) with an integer zero point, so that 0 stays 0 exactly. Signed
    types are symmetric: their zero point is 0, and the largest magnitude of the block is 127 or 7."""


class QuantizedDataType(enum.IntEnum):
    """What the elements of a quantised tensor travel as. Those that are element types, too, have their numbers."""

    UINT8 = 0
    INT8 = 1
    UINT4 = 12
    INT4 = 13

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 4 if self in (QuantizedDataType.UINT4, QuantizedDataType.INT4) else 8


class Algorithm(enum.IntEnum):
    """How the frames of a reduce travel."""

    AUTO = 0
    """One of the others, as the plan finds best for the size, the number of peers and their paths."""
    RING = 1
    """Around a ring: each peer talks to its two neighbours only. 2 (N - 1) hops and as many roundings of what is
    quantised."""
    DIRECT = 2
    """Each peer sends every other one the part that this one owns, and gets its result: two hops and two roundings,
    whatever the number of peers. It takes a working path between every two peers."""

    @classmethod
    def parse(cls, name: str) -> Algorithm:
        """Of "auto", "ring" or "direct".

        Raises:
            InvalidArgument: none of these.
        """
        try:
            return {"auto": cls.AUTO, "ring": cls.RING, "direct": cls.DIRECT}[name]
        except (KeyError, TypeError):
            raise InvalidArgument(f"algorithm {name!r} is not one of 'auto', 'ring' and 'direct'") from None


class DigestKind(enum.IntEnum):
    """How the contents of shared state are compared."""

    BLAKE3 = 0
    """Cryptographic: nobody can make other contents of the same digest."""
    XXH3 = 1
    """XXH3-128, at the speed of memory. It finds accidents, not intent: for peers that trust each other."""

    @classmethod
    def parse(cls, name: str | DigestKind) -> DigestKind:
        """Of "blake3" or "xxh3", or a kind itself.

        Raises:
            InvalidArgument: none of these.
        """
        if isinstance(name, cls):
            return name
        for kind in cls:
            if name == kind.name.lower():
                return kind
        raise InvalidArgument(f"digest {name!r} is neither 'blake3' nor 'xxh3'")


@dataclass(frozen=True)
class ReduceOperandDescriptor:
    """What the elements of a tensor are."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(frozen=True)
class QuantizationOptions:
    """How a tensor is quantised on the wire.

    Errors, and what becomes of NaN, infinities and other extremes: docs/quantisation.md.

    Args:
        quantized_datatype: UINT8, INT8, UINT4 or INT4.
        algorithm: NONE, MIN_MAX or ZERO_POINT_SCALE.
        block_size: elements that share one scale, 1 to 4096.
    """

    quantized_datatype: DataType | QuantizedDataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX
    block_size: int = QUANTIZATION_BLOCK_ELEMENTS


NO_QUANTIZATION = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.NONE)


@dataclass(frozen=True)
class ReduceDescriptor:
    """What a collective does: `count` elements, combined by `op`, known to all peers by `tag`."""

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions = field(default=NO_QUANTIZATION)


@dataclass(frozen=True)
class ReduceOpDescriptor:
    """A `ReduceDescriptor` with its two tensors, for `Communicator.all_reduce_multiple_with_retry`."""

    send: Any
    recv: Any
    reduce_descriptor: ReduceDescriptor

    @classmethod
    def from_torch(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Of torch tensors. `send` and `recv` may be the same."""
        return cls(send, recv, reduce_descriptor)

    @classmethod
    def from_numpy(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Of numpy arrays. `send` and `recv` may be the same."""
        return cls(send, recv, reduce_descriptor)


@dataclass(frozen=True)
class ReduceInfo:
    """What a collective cost.

    Attributes:
        local_world_size: peers that took part.
        tx_bytes: bytes that this peer sent, headers included.
        rx_bytes: bytes that this peer received, headers included.
        algorithm: RING or DIRECT, as the plan had it; of several tensors that of the last.
    """

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    algorithm: Algorithm = Algorithm.RING


@dataclass(frozen=True)
class GatherResult:
    """What `Communicator.all_gather` brings. Rows are in order of peer ids, the same on all peers.

    Attributes:
        tensor: of shape `(len(peers), *send.shape)`: one row a peer.
        peers: the name of each row's peer.
        peer_ids: its id, which no other has.
        row: this peer's own.
        info: what it cost.
    """

    tensor: Any
    peers: tuple[str, ...]
    peer_ids: tuple[str, ...]
    row: int
    info: ReduceInfo


@dataclass(frozen=True)
class ScatterResult:
    """What `Communicator.reduce_scatter` brings. Parts are in order of peer ids, as the rows of an all-gather.

    Attributes:
        tensor: this peer's part of the result, in one dimension; without elements if there are more peers than these.
        part: which elements of the flattened tensor these are.
        peers: the name of each part's peer.
        peer_ids: its id, which no other has.
        index: which of the parts this is.
        info: what it cost.
    """

    tensor: Any
    part: slice
    peers: tuple[str, ...]
    peer_ids: tuple[str, ...]
    index: int
    info: ReduceInfo


@dataclass(frozen=True)
class SharedStateSyncInfo:
    """What a sync moved: bytes that this peer sent and received, as they were on the wire."""

    tx_bytes: int
    rx_bytes: int
