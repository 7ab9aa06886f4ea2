"""The C engine as Python sees it; the only user of `ffi` and `lib`.

Threads: `poll` is called by one thread at a time; everything else by any. All calls release the GIL. `close` may come
at any moment: it waits for the calls in progress, which it wakes, and later ones raise. The engine does not survive a
fork: its threads stay in the parent, and every call in the child raises.

Memory: `start_reduce` takes addresses, not objects. Whoever calls it keeps the tensors alive, and leaves them alone,
until `end_reduce` has returned.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zpccl import limits
from zpccl.dataplane._native import ffi, lib
from zpccl.types import DataType, QuantizationAlgorithm, ReduceOp

PEER_ID_BYTES: int = lib.ZP_PEER_ID_BYTES
_NOBODY = bytes(PEER_ID_BYTES)
_MS_MAX = 2**32 - 1


class EngineError(OSError):
    """A call of the engine failed. `errno` says why; the text names the call."""


def check_rc(rc: int, function: str) -> int:
    """Returns `rc`, the answer of the C function `function`.

    Raises:
        EngineError: it is negative, hence an errno.
    """
    if rc < 0:
        raise EngineError(-rc, f"{function}: {os.strerror(-rc)}")
    return rc


@dataclass(frozen=True)
class ReducePlan:
    """One ring all-reduce.

    Args:
        attempt_id: larger than that of every attempt and channel the engine was told of.
        datatype: of the elements.
        op: how they are combined.
        quantization: NONE, or for floating datatypes what the frames travel as.
        block_elements: elements that share one scale; used only with quantisation.
        rank: this peer's place in the ring.
        world_size: peers in the ring, 2 or more.
        next: id of the peer at rank + 1.
        previous: id of the peer at rank - 1.
        count: elements, 1 or more.
        input_address: of `count` contiguous elements.
        output_address: of `count` contiguous elements; equal to `input_address` (in place) or without overlap.
        frame_bytes: tensor bytes of one frame.
        restore: in place, keep the old bytes so that `end_reduce(commit=False)` can put them back.
    """

    attempt_id: int
    datatype: DataType
    op: ReduceOp
    quantization: QuantizationAlgorithm
    block_elements: int
    rank: int
    world_size: int
    next: bytes
    previous: bytes
    count: int
    input_address: int
    output_address: int
    frame_bytes: int = limits.FRAME_BYTES_DEFAULT
    restore: bool = True


@dataclass(frozen=True)
class ReduceDone:
    """An attempt is complete here, or failed.

    Attributes:
        attempt_id: which.
        status: 0, or a negative errno.
        digest: 64 bits; equal on all peers if, and but for collisions only if, their results are.
        tx_bytes: sent, headers included.
        rx_bytes: received, headers included.
        fault: id of the neighbour that it failed by, or None where none is known.
    """

    attempt_id: int
    status: int
    digest: int
    tx_bytes: int
    rx_bytes: int
    fault: bytes | None


@dataclass(frozen=True)
class LinkLost:
    """A link is gone, by no wish of ours.

    Attributes:
        peer: id of its other end.
        link_id: what `open_link` returned.
        status: a negative errno.
    """

    peer: bytes
    link_id: int
    status: int


@dataclass(frozen=True)
class MessageReceived:
    """A message came on an open channel."""

    peer: bytes
    channel_id: int
    body: bytes = field(repr=False)


EngineEvent: TypeAlias = ReduceDone | LinkLost | MessageReceived

_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """The data plane of one process: links to peers, all-reduces and messages over them.

    Args:
        threads: I/O threads.
        stall_timeout_ms: an attempt in which no byte moves for so long fails with ETIMEDOUT.
        path_timeout_ms: a link whose other end acknowledges nothing for so long is lost; 0: never. The system counts
            in seconds where a peer only receives.
        message_bytes_max: longest message to send and to receive.
        messages_queued_bytes_max: of messages received and not yet polled, and of those queued for each link.

    Raises:
        EngineError: an argument out of range, or the system has no threads, descriptors or memory to give.
    """

    def __init__(
        self,
        *,
        threads: int = limits.ENGINE_THREADS_DEFAULT,
        stall_timeout_ms: int = limits.STALL_TIMEOUT_NS // limits.MS,
        path_timeout_ms: int = limits.PATH_TIMEOUT_NS // limits.MS,
        message_bytes_max: int = limits.DATA_MESSAGE_BYTES_MAX,
        messages_queued_bytes_max: int = limits.DATA_MESSAGES_QUEUED_BYTES_MAX,
    ) -> None:
        config = ffi.new(
            "zp_engine_config *",
            {
                "thread_count": threads,
                "stall_timeout_ms": stall_timeout_ms,
                "path_timeout_ms": path_timeout_ms,
                "message_bytes_max": message_bytes_max,
                "messages_queued_bytes_max": messages_queued_bytes_max,
            },
        )
        result = ffi.new("zp_engine **")
        self._idle = threading.Condition()
        self._calls = 0
        self._closed = True
        self._pid = os.getpid()
        self._event = ffi.new("zp_event *")
        check_rc(lib.zp_engine_open(config, result), "zp_engine_open")
        self._engine = result[0]
        self._fd: int = lib.zp_engine_fd(self._engine)
        self._closed = False
        _open_engines.add(self)

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """The engine, which is not freed while the block runs."""
        if os.getpid() != self._pid:
            raise EngineError(errno.ECHILD, "the engine belongs to the parent process; make a new one after fork")
        with self._idle:
            if self._closed:
                raise EngineError(errno.ESHUTDOWN, "the engine is closed")
            self._calls += 1
        try:
            yield self._engine
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Ends all attempts as `end_reduce(commit=False)` does, closes all links and frees the engine.

        Waits for calls in progress on other threads, which return soon. Closing twice is legal; in a forked child it
        does nothing, for the engine is the parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            lib.zp_engine_shutdown(self._engine)
            self._idle.wait_for(lambda: self._calls == 0)
        lib.zp_engine_close(self._engine)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self.close()

    def fileno(self) -> int:
        """The eventfd that is readable while events wait. It belongs to the engine."""
        return self._fd

    def poll(self, events_max: int = 64) -> list[EngineEvent]:
        """Takes the events that wait, at most `events_max`; never blocks. What is left keeps `fileno` readable."""
        events: list[EngineEvent] = []
        with self._call() as engine:
            while len(events) < events_max and check_rc(lib.zp_engine_poll(engine, self._event), "zp_engine_poll"):
                events.append(self._take(engine, self._event))
        return events

    def _take(self, engine: Any, event: Any) -> EngineEvent:
        peer = bytes(ffi.buffer(event.peer))
        if event.kind == lib.ZP_EVENT_REDUCE_DONE:
            fault = None if peer == _NOBODY else peer
            return ReduceDone(event.id, event.status, event.digest, event.tx_bytes, event.rx_bytes, fault)
        if event.kind == lib.ZP_EVENT_LINK_LOST:
            return LinkLost(peer, event.id, event.status)
        try:
            return MessageReceived(peer, event.id, bytes(ffi.buffer(event.body, event.body_bytes)))
        finally:
            lib.zp_message_release(engine, event.body)

    # --- Links --------------------------------------------------------------------------------------------------------

    def open_link(self, peer: bytes, fds: Sequence[int]) -> int:
        """Gives the engine the connected stream sockets `fds` to `peer`, which it owns from then on.

        Returns:
            The id of the link.

        Raises:
            EngineError: EEXIST if there is a link to this peer, EINVAL for no or too many sockets, and what the system
                says of them. Then the sockets are still the caller's.
        """
        link_id = ffi.new("uint64_t *")
        with self._call() as engine:
            check_rc(lib.zp_link_open(engine, _peer(peer), list(fds), len(fds), link_id), "zp_link_open")
        return int(link_id[0])

    def close_link(self, peer: bytes) -> bool:
        """Closes the link to `peer`; attempts that use it fail. False if there was none."""
        with self._call() as engine:
            rc = lib.zp_link_close(engine, _peer(peer))
        return rc != -errno.ENOTCONN and check_rc(rc, "zp_link_close") == 0

    def link_stats(self, peer: bytes) -> tuple[list[int], list[int]]:
        """Bytes sent and bytes received by each connection of the link to `peer`, headers included.

        Raises:
            EngineError: ENOTCONN, there is no link.
        """
        stats = ffi.new("zp_link_stats *")
        with self._call() as engine:
            check_rc(lib.zp_link_get_stats(engine, _peer(peer), stats), "zp_link_get_stats")
        count = stats.connection_count
        return list(stats.tx_bytes)[:count], list(stats.rx_bytes)[:count]

    # --- Reduces ------------------------------------------------------------------------------------------------------

    def start_reduce(self, plan: ReducePlan) -> None:
        """Starts a ring all-reduce. A `ReduceDone` follows unless `end_reduce` comes first.

        Raises:
            EngineError: ENOTCONN without a link to a neighbour, EINVAL, EEXIST, ENOMEM. There is nothing to end then.
        """
        native = ffi.new(
            "zp_reduce_plan *",
            {
                "attempt": plan.attempt_id,
                "dtype": int(plan.datatype),
                "op": int(plan.op),
                "quantization": int(plan.quantization),
                "block_elements": plan.block_elements,
                "world_size": plan.world_size,
                "rank": plan.rank,
                "frame_bytes": plan.frame_bytes,
                "count": plan.count,
                "next": _peer(plan.next),
                "previous": _peer(plan.previous),
                "input": ffi.cast("void *", plan.input_address),
                "output": ffi.cast("void *", plan.output_address),
                "restore": plan.restore,
            },
        )
        with self._call() as engine:
            check_rc(lib.zp_reduce_start(engine, native), "zp_reduce_start")

    def end_reduce(self, attempt_id: int, *, commit: bool) -> None:
        """Ends an attempt, running, done or never started; then its memory is the caller's again.

        Args:
            attempt_id: which.
            commit: keep the result, legal only after `ReduceDone` with status 0. Otherwise an in-place buffer gets its
                old contents back (if the plan said `restore`), and the output of an out-of-place reduce is undefined.

        Raises:
            EngineError: EINVAL, there is no result to commit.
        """
        with self._call() as engine:
            check_rc(lib.zp_reduce_end(engine, attempt_id, commit), "zp_reduce_end")

    # --- Messages -----------------------------------------------------------------------------------------------------

    def open_channel(self, channel_id: int) -> None:
        """From now on messages on `channel_id` are delivered.

        Raises:
            EngineError: EEXIST, it is open.
        """
        with self._call() as engine:
            check_rc(lib.zp_channel_open(engine, channel_id), "zp_channel_open")

    def close_channel(self, channel_id: int) -> None:
        """From now on messages on `channel_id` are dropped, those that wait included."""
        with self._call() as engine:
            check_rc(lib.zp_channel_close(engine, channel_id), "zp_channel_close")

    def send_message(self, peer: bytes, channel_id: int, body: bytes | bytearray | memoryview, timeout_ms: int) -> None:
        """Queues a copy of `body` for `peer`, waiting up to `timeout_ms` for room.

        Raises:
            EngineError: ETIMEDOUT, no room in that time; ENOTCONN, no link; EMSGSIZE, longer than allowed.
        """
        data = ffi.from_buffer(body)
        with self._call() as engine:
            rc = lib.zp_message_send(engine, _peer(peer), channel_id, data, len(data), min(timeout_ms, _MS_MAX))
            check_rc(rc, "zp_message_send")


def _peer(peer: bytes) -> bytes:
    if len(peer) != PEER_ID_BYTES:
        raise ValueError(f"a peer id has {PEER_ID_BYTES} bytes, not {len(peer)}")
    return peer


@atexit.register
def _close_all() -> None:
    """The interpreter frees tensors when it ends; no I/O thread may still work on them then."""
    for engine in list(_open_engines):
        engine.close()


def instruction_set() -> str:
    """What the kernels use on this CPU: "avx512", "avx2" or "baseline"."""
    name: bytes = ffi.string(lib.zp_isa())
    return name.decode("ascii")
