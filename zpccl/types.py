"""Enums, descriptors and infos: the plain values of the public API.

Names and arguments are those of PCCL's Python package. numpy and torch are imported only for a conversion, so that
importing this module is cheap.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from dataclasses import dataclass, field
from typing import Any

from zpccl.errors import InvalidArgument
from zpccl.limits import QUANTIZATION_BLOCK_ELEMENTS


class ReduceOp(enum.IntEnum):
    """How elements are reduced.

    Integers wrap around in SUM and PROD; 64-bit integers also in AVG, which is SUM divided by the number of peers. AVG
    of narrower integers and of 16-bit floats does not overflow if only the sum would. AVG of integers is rounded
    toward zero. MAX and MIN give NaN where any input is NaN. docs/algorithms.md says where floats are rounded.
    """

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class CollectiveKind(enum.IntEnum):
    """The kind of a collective. The values, except BARRIER, are those of the C engine's `enum zp_kind`."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BARRIER = 5
    """Moves no data: it completes when all members have called it."""

    @property
    def has_one_result(self) -> bool:
        """True if all peers get the same result, so that their digests can be compared."""
        return self not in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


class Attribute(enum.IntEnum):
    """Attributes of `Communicator.get_attribute`."""

    GLOBAL_WORLD_SIZE = 0
    """Members of the run, all groups together."""
    LOCAL_WORLD_SIZE = 1
    """Members of the caller's peer group."""
    NUM_DISTINCT_PEER_GROUPS = 2
    LARGEST_PEER_GROUP_WORLD_SIZE = 3


class SharedStateSyncStrategy(enum.IntEnum):
    """A peer's role in `Communicator.sync_shared_state`."""

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
        """Size of one element in bytes."""
        return _ITEM_BYTES[self]

    @property
    def is_floating(self) -> bool:
        """True for FLOAT16, BFLOAT16, FLOAT and DOUBLE."""
        return self >= DataType.FLOAT16

    def to_numpy_dtype(self) -> Any:
        """The numpy dtype of this type.

        Raises:
            InvalidArgument: for BFLOAT16, which numpy does not have. Collectives accept arrays of ml_dtypes' bfloat16,
                and uint16 arrays with an explicit operand descriptor.
        """
        import numpy as np

        if self is DataType.BFLOAT16:
            raise InvalidArgument("numpy has no bfloat16; use torch, ml_dtypes, or uint16 with an operand descriptor")
        return np.dtype(_NAMES[self])

    def to_torch_dtype(self) -> Any:
        """The torch dtype of this type."""
        import torch

        return getattr(torch, _NAMES[self])

    @classmethod
    def from_numpy_dtype(cls, dtype: Any) -> DataType:
        """The type of a numpy dtype (or anything that `numpy.dtype` accepts).

        Raises:
            InvalidArgument: the dtype has no counterpart, or is not in native byte order.
        """
        import numpy as np

        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # numpy knows no such dtype.
            dtype = np.dtype(dtype)
            found = _of_numpy(dtype)
            if found is not None:
                return found
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


# By value.
_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_ITEM_BYTES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8)
_FROM_NAME = {name: DataType(value) for value, name in enumerate(_NAMES)}


@functools.lru_cache(maxsize=2 * len(_NAMES))
def _of_numpy(dtype: Any) -> DataType | None:
    """The type of a numpy dtype, or None. Cached, since numpy builds the name anew each time, which is slow."""
    return _FROM_NAME.get(dtype.name) if dtype.isnative else None


class DeviceType(enum.IntEnum):
    """The device of a tensor."""

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
        except (KeyError, TypeError):
            raise InvalidArgument(f"device type {device_type!r} is not supported; use cpu or cuda") from None


class DistributionHint(enum.IntEnum):
    """How the elements of a tensor are distributed. A hint: results do not depend on it."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(enum.IntEnum):
    """How the elements of a tensor are compressed on the wire."""

    NONE = 0
    MIN_MAX = 1
    """Each block is mapped from [its minimum, its maximum] to [0, 255] (4 bits: [0, 15]), rounded to nearest."""
    ZERO_POINT_SCALE = 2
    """Each block is stored as scale * (code - zero_point) with an integer zero point, so that 0 stays 0 exactly. Signed
    types are symmetric: their zero point is 0, and the largest magnitude of the block is 127 or 7."""


class QuantizedDataType(enum.IntEnum):
    """Type of a quantised element on the wire. UINT8 and INT8 have the values that they have in `DataType`."""

    UINT8 = 0
    INT8 = 1
    UINT4 = 12
    INT4 = 13

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 4 if self in (QuantizedDataType.UINT4, QuantizedDataType.INT4) else 8


class Algorithm(enum.IntEnum):
    """The algorithm of a collective."""

    AUTO = 0
    """One of the others: the master chooses by the size, the number of peers and their paths."""
    RING = 1
    """A ring: each peer communicates with its two neighbours only. 2 (N - 1) hops, and N roundings of a quantised
    tensor."""
    DIRECT = 2
    """A direct exchange: each peer sends every other peer the chunk that the other one owns, and gets it back reduced.
    Two hops, and two roundings of a quantised tensor, for any number of peers. Needs a working path between all
    pairs."""
    ONE_SHOT = 3
    """A one-shot exchange: each peer sends every other peer the whole tensor, and reduces all of them. One hop. AUTO
    chooses it for small tensors that are not quantised. Needs a working path between all pairs."""
    TREES = 4
    """Trees that follow the network, each for a share of the tensor: the sum goes up to the root and the result comes
    down. AUTO chooses them if paths are uneven. They need working paths between neighbours in the trees only, so other
    collectives use them too, in one direction, if the working paths allow no ring."""

    @classmethod
    def parse(cls, name: str) -> Algorithm:
        """Parses "auto", "ring" or "direct".

        Raises:
            InvalidArgument: another name.
        """
        try:
            return {"auto": cls.AUTO, "ring": cls.RING, "direct": cls.DIRECT}[name]
        except (KeyError, TypeError):
            raise InvalidArgument(f"algorithm {name!r} is not one of 'auto', 'ring' and 'direct'") from None


class DigestKind(enum.IntEnum):
    """How the contents of shared state are compared."""

    BLAKE3 = 0
    """Cryptographic: nobody can construct other contents with the same digest."""
    XXH3 = 1
    """XXH3-128, at the speed of memory. Detects accidental differences only, so it is for peers that trust each
    other."""

    @classmethod
    def parse(cls, name: str | DigestKind) -> DigestKind:
        """Parses "blake3" or "xxh3"; returns a DigestKind unchanged.

        Raises:
            InvalidArgument: another name.
        """
        if isinstance(name, cls):
            return name
        for kind in cls:
            if name == kind.name.lower():
                return kind
        raise InvalidArgument(f"digest {name!r} is neither 'blake3' nor 'xxh3'")


@dataclass
class ReduceOperandDescriptor:
    """Type and distribution of the elements of a tensor."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass
class QuantizationOptions:
    """How a tensor is quantised on the wire.

    Error bounds, and the treatment of NaN, infinities and other special values: docs/quantisation.md.

    Args:
        quantized_datatype: UINT8, INT8, UINT4 or INT4.
        algorithm: NONE, MIN_MAX or ZERO_POINT_SCALE.
        block_size: elements that share one scale, 1 to 4096.
    """

    quantized_datatype: DataType | QuantizedDataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX
    block_size: int = QUANTIZATION_BLOCK_ELEMENTS


def no_quantization() -> QuantizationOptions:
    """Options for elements that travel as they are."""
    return QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.NONE)


@dataclass
class ReduceDescriptor:
    """An all-reduce: `count` elements, reduced with `op`, identified on all peers by `tag`."""

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions = field(default_factory=no_quantization)


@dataclass
class ReduceOpDescriptor:
    """A `ReduceDescriptor` with its two tensors, for `Communicator.all_reduce_multiple_with_retry`."""

    send: Any
    recv: Any
    reduce_descriptor: ReduceDescriptor

    @classmethod
    def from_torch(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Makes one from torch tensors or numpy arrays. `send` and `recv` may be the same."""
        return cls(send, recv, reduce_descriptor)

    from_numpy = from_torch


@dataclass(frozen=True)
class ReduceInfo:
    """Statistics of a collective.

    Attributes:
        local_world_size: number of peers that took part.
        tx_bytes: bytes that this peer sent, headers included.
        rx_bytes: bytes that this peer received, headers included.
        algorithm: RING, DIRECT, ONE_SHOT or TREES, as planned; for several tensors, the algorithm of the last one.
    """

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    algorithm: Algorithm = Algorithm.RING


@dataclass(frozen=True)
class GatherResult:
    """The result of `Communicator.all_gather` or `all_to_all`. Rows are in order of peer ids.

    Attributes:
        tensor: one row per peer; its shape is `(len(peers), *send.shape)`, or `send.shape` for an all-to-all.
        peers: the peers' names, by row.
        peer_ids: the peers' unique ids, by row.
        row: index of this peer's row.
        info: statistics.
    """

    tensor: Any
    peers: tuple[str, ...]
    peer_ids: tuple[str, ...]
    row: int
    info: ReduceInfo


@dataclass(frozen=True)
class ScatterResult:
    """The result of `Communicator.reduce_scatter`. Parts are in order of peer ids, as the rows of an all-gather.

    Attributes:
        tensor: this peer's part of the result, one-dimensional; may be empty if there are more peers than elements.
        part: the slice of the flattened tensor that this peer's part covers.
        peers: the peers' names, by part.
        peer_ids: the peers' unique ids, by part.
        index: index of this peer's part.
        info: statistics.
    """

    tensor: Any
    part: slice
    peers: tuple[str, ...]
    peer_ids: tuple[str, ...]
    index: int
    info: ReduceInfo


@dataclass(frozen=True)
class SharedStateSyncInfo:
    """Statistics of a sync: bytes that this peer sent and received on the wire."""

    tx_bytes: int
    rx_bytes: int
