"""Helpers of the engine tests: engines linked over loopback TCP, and a hand-made peer."""

from __future__ import annotations

import errno
import functools
import itertools
import math
import operator
import select
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest

from zpccl import limits
from zpccl.engine.ciphers import Cipher, CipherKeys, available
from zpccl.engine.engine import (
    ConnectionLost,
    Engine,
    EngineError,
    EngineEvent,
    LinkLost,
    ReduceDone,
    ReducePlan,
    TreeLane,
)
from zpccl.types import Algorithm, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

KeyT = TypeVar("KeyT", bound=Hashable)
MeshT = TypeVar("MeshT", bound="Mesh")

WAIT_S = 60.0
"""No wait of these tests takes long; after this time it has failed."""

FLOATING = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)


def peer_id(rank: int) -> bytes:
    return bytes([rank + 1]) * 16


def socket_pair(buffer_bytes: int = 0, near_host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over loopback. The far one has the address 127.0.0.1."""
    with socket.socket() as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        near = socket.socket()
        near.bind((near_host, 0))
        if buffer_bytes:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def until(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        select.select([], [], [], 0.001)


def send(engine: Engine, peer: bytes, channel_id: int, body: bytes | memoryview) -> None:
    """Queues a message, for which there must be room."""
    assert engine.post_message(peer, channel_id, b"", body, limits.DATA_MESSAGES_QUEUED_BYTES_MAX)


def wait_events(engine: Engine, count: int) -> list[EngineEvent]:
    """The next `count` events."""
    events: list[EngineEvent] = []
    while len(events) < count:
        assert select.select([engine.fileno()], [], [], WAIT_S)[0], f"no event came after {events}"
        events += engine.poll()
    assert len(events) == count, [type(event).__name__ for event in events]
    return events


def wait_done(engine: Engine) -> ReduceDone:
    """The end of an attempt, which must be the next event."""
    (event,) = wait_events(engine, 1)
    assert isinstance(event, ReduceDone), event
    return event


def wait_failure(engine: Engine) -> tuple[ReduceDone, LinkLost]:
    """The failure of the one running attempt, and the loss of its link."""
    events = wait_events(engine, 2)
    (done,) = (event for event in events if isinstance(event, ReduceDone))
    (lost,) = (event for event in events if isinstance(event, LinkLost))
    return done, lost


@contextmanager
def raises_errno(expected: int) -> Iterator[None]:
    with pytest.raises(EngineError) as error:
        yield
    assert error.value.errno == expected


def cipher_ends(cipher: Cipher, number: int = 0) -> tuple[CipherKeys, CipherKeys]:
    """The cipher keys of the two ends of a connection. Each number has different keys."""
    size = available()[cipher].key_bytes
    one, other = (bytes([2 * number + side]) * size for side in (0, 1))
    return CipherKeys(cipher, one, other), CipherKeys(cipher, other, one)


class Mesh:
    """Engines, all linked with all or as in `pairs`, and the ids of their attempts. They use all connections, as
    between hosts. With `copies` of the sockets, connections can be lost. `settings` are arguments of the engines."""

    near_host = "127.0.0.1"

    def __init__(
        self,
        size: int,
        *,
        connections: int = 2,
        pairs: Iterable[tuple[int, int]] | None = None,
        cipher: Cipher | None = None,
        copies: bool = False,
        **settings: Any,
    ) -> None:
        self.size = size
        self.engines = [Engine(**{"threads": 1, "local_senders_max": 0, **settings}) for _ in range(size)]
        self.link_ids: dict[tuple[int, int], int] = {}
        self.copies: dict[tuple[int, int], list[socket.socket]] = {}
        self.last_id = 0
        for a, b in itertools.combinations(range(size), 2) if pairs is None else pairs:
            ends = [socket_pair(near_host=self.near_host) for _ in range(connections)]
            if copies:
                self.copies[a, b] = [near.dup() for near, _ in ends]
            self.link(a, b, ends, cipher)

    def link(self, a: int, b: int, ends: Sequence[tuple[socket.socket, socket.socket]], cipher: Cipher | None) -> None:
        for side, (here, there) in enumerate([(a, b), (b, a)]):
            fds = [pair[side].detach() for pair in ends]
            keys = [cipher_ends(cipher, number)[side] for number in range(len(ends))] if cipher is not None else None
            self.link_ids[here, there] = self.engines[here].open_link(peer_id(there), fds, keys)

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def received_bytes(self, rank: int) -> int:
        peers = [there for here, there in self.link_ids if here == rank]
        return sum(sum(self.engines[rank].link_state(peer_id(peer)).rx_bytes) for peer in peers)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for copy in itertools.chain(*self.copies.values()):
            copy.close()


class Hosts(Mesh):
    """Engines that treat each other as other hosts."""

    near_host = "127.0.0.2"


def lose_connection(mesh: Mesh, index: int) -> list[ConnectionLost]:
    """Ends a connection of ranks 0 and 1. Returns the reports of both, which must be their next events."""
    mesh.copies[0, 1][index].shutdown(socket.SHUT_RDWR)
    events = [event for engine in mesh.engines for event in wait_events(engine, 1)]
    assert all(isinstance(event, ConnectionLost) for event in events)
    return events  # type: ignore[return-value]


@dataclass(frozen=True)
class Case:
    """The parameters of one reduce, without its buffers."""

    datatype: DataType = DataType.FLOAT
    op: ReduceOp = ReduceOp.SUM
    quantization: QuantizationAlgorithm = QuantizationAlgorithm.NONE
    block_elements: int = 64
    frame_bytes: int = 4096
    in_place: bool = False
    restore: bool = True
    algorithm: Algorithm = Algorithm.RING
    quantized: QuantizedDataType = QuantizedDataType.UINT8
    lanes: tuple[TreeLane, ...] = ()
    pace_us: int = 0


@contextmanager
def open_until_the_end(meshes: dict[KeyT, MeshT]) -> Iterator[dict[KeyT, MeshT]]:
    """Closes all meshes at the end."""
    with ExitStack() as stack:
        for mesh in meshes.values():
            stack.callback(mesh.close)
        yield meshes


def make_plan(case: Case, attempt_id: int, rank: int, size: int, source: np.ndarray, target: np.ndarray) -> ReducePlan:
    return ReducePlan(
        attempt_id=attempt_id,
        datatype=case.datatype,
        op=case.op,
        quantization=case.quantization,
        block_elements=case.block_elements,
        rank=rank,
        peers=tuple(peer_id(other) for other in range(size)),
        count=source.size,
        input_address=source.ctypes.data,
        output_address=target.ctypes.data,
        frame_bytes=case.frame_bytes,
        restore=case.restore,
        algorithm=case.algorithm,
        quantized_datatype=case.quantized,
        lanes=case.lanes,
        pace_us=case.pace_us,
    )


def storage(datatype: DataType) -> np.dtype:
    """The numpy dtype that holds the bits: numpy has no bfloat16."""
    return np.dtype(np.uint16) if datatype is DataType.BFLOAT16 else np.dtype(datatype.to_numpy_dtype())


def unaligned(array: np.ndarray, offset: int = 1) -> np.ndarray:
    """A copy at an address that is `offset` bytes off."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = (-raw.ctypes.data) % 64 + offset
    copy = np.frombuffer(raw, array.dtype, array.size, start)
    copy[:] = array
    return copy


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of finite float32 values rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float64(values: np.ndarray, datatype: DataType) -> np.ndarray:
    if datatype is DataType.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def random_inputs(rng: np.random.Generator, case: Case, count: int, size: int) -> list[np.ndarray]:
    """One input for each peer. Integers of all bits; floats whose products neither overflow nor vanish."""
    if case.datatype not in FLOATING:
        info = np.iinfo(storage(case.datatype))
        return [rng.integers(info.min, info.max, count, info.dtype, endpoint=True) for _ in range(size)]
    values = [rng.uniform(0.5, 1.5, count) * rng.choice([-1, 1], count) for _ in range(size)]
    if case.datatype is DataType.BFLOAT16:
        return [to_bfloat16(v) for v in values]
    return [v.astype(storage(case.datatype)) for v in values]


def run(mesh: Mesh, case: Case, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Reduces on all engines. Checks that digests, bits and byte counts agree, and that inputs do not change."""
    attempt_id = mesh.next_id()
    sources = [unaligned(x, rank % 3) for rank, x in enumerate(inputs)]
    targets = [x if case.in_place else unaligned(np.zeros_like(x), rank % 2) for rank, x in enumerate(sources)]
    for rank, engine in enumerate(mesh.engines):
        engine.start_reduce(make_plan(case, attempt_id, rank, mesh.size, sources[rank], targets[rank]))
    done = [wait_done(engine) for engine in mesh.engines]
    for engine in mesh.engines:
        engine.end_reduce(attempt_id, commit=True)
    assert all(event.status == 0 and event.attempt_id == attempt_id for event in done), done
    assert len({event.digest for event in done}) == 1
    assert sum(event.tx_bytes for event in done) == sum(event.rx_bytes for event in done) > 0
    for rank in range(mesh.size):
        assert targets[rank].tobytes() == targets[0].tobytes(), f"{case}: rank {rank} differs"
        if not case.in_place:
            assert sources[rank].tobytes() == inputs[rank].tobytes()
    return targets


# --- A peer made by hand ----------------------------------------------------------------------------------------------

HEADER = struct.Struct(">4sBBHQIIQI")
REDUCE_SCATTER, ALL_GATHER, MESSAGE, OPENED, STARTED = 1, 2, 3, 6, 7


def _mix(x: int) -> int:
    """The output function of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


_GENERATED = [_mix((i + 1) * 0x9E3779B97F4A7C15 % 2**64) for i in range(128 + 512)]
_KEYS, _FACTORS = np.array(_GENERATED[:128], np.uint64), _GENERATED[128:]


def _reduce(polynomial: int) -> int:
    """Modulo x^64 + x^4 + x^3 + x + 1."""
    while polynomial >> 64:
        polynomial ^= (2**64 + 0x1B) << polynomial.bit_length() - 65
    return polynomial


def _products(a: np.ndarray, b: np.ndarray) -> int:
    """The sum of the carry-less products of elements of `a` and of `b`."""
    bits = b[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    columns = np.bitwise_xor.reduce(a[:, None] * bits, axis=0)
    return functools.reduce(operator.xor, (int(column) << bit for bit, column in enumerate(columns)))


def checksum(data: bytes) -> int:
    """The checksum of native/checksum.c, computed in another way."""
    total = 0
    for block, start in enumerate(range(0, len(data), 1024)):
        part = data[start : start + 1024]
        words = np.frombuffer(part + bytes(-len(part) % 16), np.uint64)
        words = words ^ _KEYS[: words.size]
        factor = np.array([_FACTORS[block % 512]], np.uint64)
        total = _reduce(_products(np.array([total], np.uint64), factor) ^ _products(words[::2], words[1::2]))
    return _mix(total ^ len(data))


def wire_checksum(data: bytes) -> int:
    """The half of the checksum that headers contain."""
    return checksum(data) % 2**32


@dataclass(frozen=True)
class Frame:
    """A frame as it is on the wire. Fields that are `None` get their right values."""

    kind: int
    id: int
    chunk: int
    offset: int
    body: bytes
    lane: int = 0
    length: int | None = None
    body_checksum: int | None = None
    header_checksum: int | None = None
    magic: bytes = b"ZPF2"

    def encode(self) -> bytes:
        length = len(self.body) if self.length is None else self.length
        body_checksum = wire_checksum(self.body) if self.body_checksum is None else self.body_checksum
        fields = (self.magic, self.kind, self.lane, 0, self.id, self.chunk, length, self.offset, body_checksum)
        header = HEADER.pack(*fields)
        header_checksum = wire_checksum(header) if self.header_checksum is None else self.header_checksum
        return header + struct.pack(">I", header_checksum) + self.body


def read_exactly(end: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = end.recv(min(count - len(data), 1 << 20))
        assert piece, "the engine closed the connection"
        data += piece
    return bytes(data)


def receive_frame(end: socket.socket) -> Frame:
    """The next frame that is not an announcement, with both of its checksums verified."""
    header = read_exactly(end, HEADER.size + 4)
    magic, kind, lane, reserved, id_, chunk, length, offset, body_checksum = HEADER.unpack(header[:-4])
    assert (magic, reserved) == (b"ZPF2", 0)
    assert struct.unpack(">I", header[-4:])[0] == wire_checksum(header[:-4])
    body = read_exactly(end, length)
    assert wire_checksum(body) == body_checksum
    frame = Frame(kind, id_, chunk, offset, body, lane=lane)
    return receive_frame(end) if kind in (OPENED, STARTED) else frame


def check_hostile_frames(
    engine: Engine, case: Case, count: int, size: int, sender: int, end: socket.socket, frames: Sequence[Frame]
) -> None:
    """S2, S4: rank 0 of `size` gets frames at `end` from rank `sender`, which break a rule.

    The attempt ends and names the sender, whose link is lost. Its abort restores the buffer, of `count` elements, and
    nothing outside the buffer is written.
    """
    guarded = np.full(3 * count, 7, np.float32)
    buffer = guarded[count : 2 * count]
    buffer[:] = np.arange(count)
    before = guarded.tobytes()
    engine.start_reduce(make_plan(case, 1, 0, size, buffer, buffer))
    end.sendall(b"".join(frame.encode() for frame in frames))
    done, lost = wait_failure(engine)
    assert (done.status, done.fault, lost.peer) == (-errno.EPROTO, peer_id(sender), peer_id(sender))
    engine.end_reduce(1, commit=False)
    assert guarded.tobytes() == before


class Three:
    """An engine at rank 0 of three, and plain sockets in place of the others."""

    def __init__(self, *, stall_timeout_ms: int = 10_000, buffer_bytes: int = 0) -> None:
        self.engine = Engine(stall_timeout_ms=stall_timeout_ms, local_senders_max=0)
        self.ends: dict[int, socket.socket] = {}
        for rank in (1, 2):
            near, far = socket_pair(buffer_bytes)
            far.settimeout(WAIT_S)
            self.engine.open_link(peer_id(rank), [near.detach()])
            self.ends[rank] = far

    def close(self) -> None:
        self.engine.close()
        for end in self.ends.values():
            end.close()


class HandMadePeer:
    """An engine at rank 0 of a ring of two, and plain sockets in place of rank 1."""

    def __init__(
        self,
        *,
        connections: int = 1,
        buffer_bytes: int = 0,
        stall_timeout_ms: int = 10_000,
        messages_queued_bytes_max: int = limits.DATA_MESSAGES_QUEUED_BYTES_MAX,
    ) -> None:
        self.engine = Engine(
            stall_timeout_ms=stall_timeout_ms,
            local_senders_max=0,
            message_bytes_max=min(messages_queued_bytes_max, limits.DATA_MESSAGE_BYTES_MAX),
            messages_queued_bytes_max=messages_queued_bytes_max,
        )
        pairs = [socket_pair(buffer_bytes) for _ in range(connections)]
        self.sockets = [far for _, far in pairs]
        for far in self.sockets:
            far.settimeout(WAIT_S)
        self.link_id = self.engine.open_link(peer_id(1), [near.detach() for near, _ in pairs])
        self._lent: list[np.ndarray] = []  # The engine writes to them while attempts run.

    @property
    def socket(self) -> socket.socket:
        return self.sockets[0]

    def start(self, case: Case, attempt_id: int, source: np.ndarray, target: np.ndarray) -> None:
        self._lent += [source, target]
        self.engine.start_reduce(make_plan(case, attempt_id, 0, 2, source, target))

    def send(self, frame: Frame) -> None:
        self.socket.sendall(frame.encode())

    def read_exactly(self, count: int) -> bytes:
        return read_exactly(self.socket, count)

    def receive(self) -> Frame:
        return receive_frame(self.socket)

    def received_bytes(self) -> int:
        return sum(self.engine.link_state(peer_id(1)).rx_bytes)

    def sent_bytes(self) -> int:
        return sum(self.engine.link_state(peer_id(1)).tx_bytes)

    def reduce(self, case: Case, attempt_id: int, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Plays rank 1 of a whole unquantised float32 SUM, with `theirs` as its input. Returns the engine's result."""
        target = np.zeros_like(mine)
        self.start(case, attempt_id, mine, target)
        half = math.ceil(mine.size / 2)
        step = case.frame_bytes // mine.itemsize
        for offset in range(0, mine.size - half, step):
            body = theirs[half:][offset : offset + step]
            self.send(Frame(REDUCE_SCATTER, attempt_id, 1, offset, body.tobytes()))
        frames = math.ceil(half / step) + math.ceil((mine.size - half) / step)
        while frames:
            frame = self.receive()
            if frame.id < attempt_id:  # It was half written when its attempt ended.
                continue
            frames -= 1
            if frame.kind == REDUCE_SCATTER:
                share = np.frombuffer(frame.body, mine.dtype)
                total = share + theirs[frame.offset : frame.offset + share.size]
                self.send(Frame(ALL_GATHER, attempt_id, 0, frame.offset, total.tobytes()))
        done = wait_done(self.engine)
        assert done.status == 0
        self.engine.end_reduce(attempt_id, commit=True)
        return target

    def close(self) -> None:
        self.engine.close()
        for far in self.sockets:
            far.close()
