"""The Python interface of the C engine; in the package the only user of `ffi` and `lib`.

Threads: each event queue is polled by one thread at a time; any thread may call everything else. All calls release the
GIL. `close` may come at any moment, also in a signal handler that has interrupted a call: the engine stops then, and
later calls raise. Its memory is freed once no call uses it. The engine does not survive a fork: its threads stay in the
parent, and every call in the child raises.

Memory: `start_reduce` takes addresses, not objects. The caller keeps the tensors alive, and does not touch them, until
`end_reduce` has returned.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zpccl import limits
from zpccl.engine import ciphers
from zpccl.engine.living import Living
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

try:
    from zpccl.engine._native import ffi, lib
except ModuleNotFoundError as error:
    raise ImportError(
        f"zpccl was imported from {os.path.dirname(os.path.dirname(__file__))}, where its C extension is not compiled. "
        "If this is a checkout, start Python in another folder (what `pip install .` installs is elsewhere), or "
        "compile the extension in place: pip install --editable ."
    ) from error

PEER_ID_BYTES: int = lib.ZP_PEER_ID_BYTES
FREE_CHANNEL: int = lib.ZP_FREE_CHANNEL
"""Channels from this id on may be opened in any order, and belong to no attempt."""
DIGEST_CHANNEL = 2**64 - 1
"""The free channel on which participants of a collective send each other the digests of their results."""
PROBE_CHANNEL = 2**64 - 2**16
"""The first of the free channels for meaningless messages. Each peer sends on that of its rank, and opens no other."""
_NOBODY = bytes(PEER_ID_BYTES)
_UNKNOWN_US = 2**32 - 1


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


def check_shared_memory() -> None:
    """Raises OSError if links within this host could not share memory: a sandbox or a limit forbids a step."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        check_rc(lib.zp_shared_memory_check(one.fileno()), "zp_shared_memory_check")


@dataclass(frozen=True)
class TreeLane:
    """A part of the tensor and its tree: the part is reduced up the tree to the root, and the result goes down it.

    Args:
        elements: number of elements of the part; 0 is legal, and then nobody needs a link for it.
        parents: the parent of each rank; the only root is its own parent.
    """

    elements: int
    parents: tuple[int, ...]


@dataclass(frozen=True)
class ReducePlan:
    """One attempt at a collective.

    Args:
        attempt_id: larger than that of every earlier attempt and channel of this engine.
        datatype: datatype of the elements.
        op: how elements are combined; without meaning if nothing is reduced.
        quantization: NONE, or for all-reduces of floating datatypes how frames are quantised.
        block_elements: number of elements that share one scale; used only with quantisation.
        rank: this peer's index in `peers`.
        peers: ids of all participants, 2 or more, in the same order on all peers: that of the ring.
        count: number of elements of the input, 1 or more; for an all-to-all `world_size` rows of equal length.
        input_address: address of `count` contiguous elements.
        output_address: for an all-reduce, `count` contiguous elements, equal to `input_address` (in place) or without
            overlap. Broadcast: equal to `input_address`. All-gather: `world_size * count` elements. Reduce-scatter:
            this peer's part; the first `count % world_size` parts are one element longer. All-to-all: `count` elements,
            without overlap; row i comes from rank i.
        frame_bytes: tensor bytes of one frame.
        restore: in place, keep the old bytes so that `end_reduce(commit=False)` can put them back.
        algorithm: RING; for an all-reduce, and with lanes, also DIRECT; for an all-to-all only DIRECT.
        quantized_datatype: datatype of quantised elements in frames; used only with quantisation.
        kind: the collective; the engine does not do a BARRIER.
        owners: the rank that owns each row (all-gather) or part (reduce-scatter), or the rank of the root (broadcast).
            Empty for an all-reduce, and for an all-to-all, whose row j goes to rank j.
        lanes: for DIRECT, except an all-to-all: lanes that cover the whole tensor, in order. Empty: in an all-reduce
            each rank is the root of all others, for an equal part. In an all-gather each row is a lane, in a
            reduce-scatter each part, with its owner as root; in a broadcast all lanes have the root of the broadcast.
            In an AVG of integers narrower than 64 bits the root is the parent of all others.
        digest_channel: channel on which all other peers get the digest of the result, once it is there: attempt,
            `call` and digest, 64 bits each, big-endian. 0: nobody gets it.
        call: a number that is sent with the digest.
        pace_us: with lanes, the frames to each peer are sent in equal steps over this time, and not earlier, such that
            all lanes progress evenly. 0: as fast as possible.
    """

    attempt_id: int
    datatype: DataType
    op: ReduceOp
    quantization: QuantizationAlgorithm
    block_elements: int
    rank: int
    peers: tuple[bytes, ...]
    count: int
    input_address: int
    output_address: int
    frame_bytes: int = limits.FRAME_BYTES_DEFAULT
    restore: bool = True
    algorithm: Algorithm = Algorithm.RING
    quantized_datatype: QuantizedDataType = QuantizedDataType.UINT8
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE
    owners: tuple[int, ...] = ()
    lanes: tuple[TreeLane, ...] = ()
    digest_channel: int = 0
    call: int = 0
    pace_us: int = 0


@dataclass(frozen=True)
class ReduceDone:
    """An attempt is complete on this peer, or failed.

    Attributes:
        attempt_id: id of the attempt.
        status: 0, or a negative errno.
        digest: 64 bits; equal on all peers if their results are equal, and except for collisions only then. 0 for a
            reduce-scatter and an all-to-all, where each result is on one peer only.
        tx_bytes: bytes sent, headers included.
        rx_bytes: bytes received, headers included.
        fault: id of the peer that made it fail, or None if none is known.
        has_told: the digest was sent to the other peers.
    """

    attempt_id: int
    status: int
    digest: int
    tx_bytes: int
    rx_bytes: int
    fault: bytes | None
    has_told: bool = False


@dataclass(frozen=True)
class LinkLost:
    """A link is gone, though this side did not close it.

    Attributes:
        peer: id of its other end.
        link_id: what `open_link` returned.
        status: a negative errno.
    """

    peer: bytes
    link_id: int
    status: int


@dataclass(frozen=True)
class ConnectionLost:
    """One of several connections of a link is gone; frames that it had not delivered go over the others.

    Attributes:
        peer: id of its other end.
        link_id: what `open_link` returned.
        index: its place in the link, which `add_connection` may fill again.
        generation: generation of the lost connection.
        status: a negative errno.
    """

    peer: bytes
    link_id: int
    index: int
    generation: int
    status: int


@dataclass(frozen=True)
class LinkStats:
    """State and counters of a link.

    Attributes:
        link_id: what `open_link` returned.
        open_count: number of connections that are open now.
        senders: number of connections that take frames.
        lost_count: number of connections that were lost while others were left.
        message_bytes: charged for messages that are queued, being sent, or sent and not acknowledged by the other end.
        tx_bytes: bytes sent in each place of the link, headers included.
        rx_bytes: bytes received in each place.
        generations: generation of the current or last connection in each place.
    """

    link_id: int
    open_count: int
    senders: int
    lost_count: int
    message_bytes: int
    tx_bytes: list[int]
    rx_bytes: list[int]
    generations: list[int]


@dataclass(frozen=True)
class LinkFlow:
    """TCP's counters of a link since its connections were opened, by connection.

    Attributes:
        link_id: what `open_link` returned.
        round_trip_us: the minimum of the recent round-trip times; None: not known.
        queued_us: by how much the slowest connection's round trip exceeds that now: the time in the path's queues.
        acked_bytes: bytes acknowledged by the other end; 0 if no connection is open.
        busy_us: time in which there were bytes to send, or bytes not acknowledged.
        is_limited: recently the path was the limit, and not the supply of bytes to send.
    """

    link_id: int
    round_trip_us: int | None
    queued_us: int
    acked_bytes: list[int]
    busy_us: list[int]
    is_limited: list[bool]


class Body:
    """The bytes of a message, in memory of the engine, until they are released. Until then they count against the
    bound on received messages of the engine. Any thread may use it. Dropping the object releases them.

    Args:
        engine: the engine that owns the memory.
        event: event of the message; its bytes are moved here.
    """

    __slots__ = ("_engine", "_native", "_size")

    def __init__(self, engine: Engine, event: Any) -> None:
        self._engine, self._size = engine, event.body_bytes
        self._native, event.body = event.body, ffi.NULL  # Python handles signals before or after both.

    def __len__(self) -> int:
        return int(self._size)

    def held(self) -> AbstractContextManager[Any]:
        """A `with` block that uses this keeps the bytes, even if the engine is closed meanwhile.

        Raises:
            EngineError: ESHUTDOWN, the engine is closed.
        """
        return self._engine._handle.use()  # type: ignore[no-any-return]

    def view(self) -> memoryview:
        """The bytes, valid while they are `held`. Use it in a `with` block."""
        return memoryview(ffi.buffer(self._native, self._size)).toreadonly()

    def release(self) -> None:
        """Gives the memory back, once. The bytes must not be held."""
        native, self._native = self._native, ffi.NULL
        if native:
            # If the engine is closed, the memory was freed with it.
            with contextlib.suppress(EngineError), self._engine._handle.use() as engine:
                lib.zp_message_release(engine[0], native)

    def read(self) -> bytes:
        """Returns a copy of the bytes, and releases them."""
        try:
            with self.held(), self.view() as view:
                return bytes(view)
        finally:
            self.release()

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self.release()


@dataclass(frozen=True)
class MessageReceived:
    """A message came on an open channel. The receiver must release its body."""

    peer: bytes
    channel_id: int
    body: Body = field(repr=False)


@dataclass(frozen=True)
class Writable:
    """A link's message queue that `post_message` found full has space again. The event does not name the link."""

    channel_id: int


EngineEvent: TypeAlias = ReduceDone | LinkLost | ConnectionLost | MessageReceived | Writable

_open_engines: Living[Engine] = Living()


class _Handle:
    """The C engine. It belongs to the process that opened it.

    Closing stops it, and frees it unless `with` blocks use it; then the last one does. `close` waits for no block:
    a signal handler that waits until the engine is closed may have interrupted it.

    The engine is freed with the memory that holds its address, of which each user has a view. A view is given back
    wherever Ctrl-C comes; a counter would not be, as Python handles signals before the first line of `__exit__`.

    Args:
        address: a `zp_engine **` whose destructor is `zp_engine_release`.
    """

    def __init__(self, address: Any) -> None:
        self._pid = os.getpid()
        self._address = ffi.buffer(address)  # None: the engine is stopped.
        self._is_closed = False

    def use(self) -> Any:
        """For a `with` block, which gets an array with the C engine as its only element."""
        if os.getpid() != self._pid:
            raise EngineError(errno.ECHILD, "the engine belongs to the parent process; make a new one after fork")
        address = None if self._is_closed else self._address
        if address is None:
            raise EngineError(errno.ESHUTDOWN, "the engine is closed")
        return ffi.from_buffer("zp_engine *[1]", address)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        address = self._address
        if address is not None:
            with ffi.from_buffer("zp_engine *[1]", address) as engine:
                lib.zp_engine_stop(engine[0])  # Also waits while another thread stops it. No handler runs meanwhile.
        self._address = None  # If Ctrl-C came sooner, the next close() does this.


class Engine:
    """The data plane of one process: links to peers, collectives and messages over them.

    Args:
        threads: number of I/O threads; None: depends on the CPUs that this process may use.
        stall_timeout_ms: an attempt that completes no frame for this long fails with ETIMEDOUT (native/attempt.c); a
            link on which a message makes no progress for this long is lost.
        path_timeout_ms: a link whose other end acknowledges nothing for this long is lost; 0: never. If a peer only
            receives, the kernel counts in whole seconds.
        message_bytes_max: longest message to send and to receive.
        messages_queued_bytes_max: bound on the bytes of messages received and not yet released, of which each link may
            always have an equal share; also the bound on the bytes of messages queued for each link.
        local_senders_max: number of connections of a link within this host that send at a time; 0: all.

    Raises:
        EngineError: an argument is out of range, or the system lacks threads, descriptors or memory.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        stall_timeout_ms: int = limits.STALL_TIMEOUT_NS // limits.MS,
        path_timeout_ms: int = limits.PATH_TIMEOUT_NS // limits.MS,
        message_bytes_max: int = limits.DATA_MESSAGE_BYTES_MAX,
        messages_queued_bytes_max: int = limits.DATA_MESSAGES_QUEUED_BYTES_MAX,
        local_senders_max: int = limits.LOCAL_SENDERS_MAX,
    ) -> None:
        config = ffi.new(
            "zp_engine_config *",
            {
                "thread_count": default_threads(len(os.sched_getaffinity(0))) if threads is None else threads,
                "stall_timeout_ms": stall_timeout_ms,
                "path_timeout_ms": path_timeout_ms,
                "message_bytes_max": message_bytes_max,
                "messages_queued_bytes_max": messages_queued_bytes_max,
                "local_senders_max": local_senders_max,
                "shared_memory": True,
            },
        )
        address = ffi.gc(ffi.new("zp_engine **"), lib.zp_engine_release)  # First: Ctrl-C may come at any moment.
        check_rc(lib.zp_engine_open(config, address), "zp_engine_open")
        self._handle = _Handle(address)
        self._fd: int = lib.zp_engine_fd(address[0])
        _open_engines.add(self)

    def close(self) -> None:
        """Ends all attempts as `end_reduce(commit=False)` does, and closes all links.

        Waits while another thread closes the engine. Calls in progress, which it does not wait for, fail or find
        nothing. The engine is freed with the last of them. Closing twice is legal. In a forked child it does nothing,
        because the engine belongs to the parent.
        """
        self._handle.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def fileno(self) -> int:
        """The descriptor that is readable while events wait. The engine owns it."""
        return self._fd

    def poll(self, events_max: int = 64, channel_id: int | None = None) -> list[EngineEvent]:
        """Takes waiting events, at most `events_max`; never blocks. Events that are left keep `fileno` readable.

        Args:
            events_max: the most events to take.
            channel_id: take the events of this channel, which has a mailbox; None: all other events.
        """
        events: list[EngineEvent] = []
        event = ffi.new("zp_event *")
        poll, queue = (lib.zp_engine_poll, ()) if channel_id is None else (lib.zp_channel_poll, (channel_id,))
        with self._handle.use() as engine:
            try:
                while len(events) < events_max and check_rc(poll(engine[0], *queue, event), "zp_engine_poll"):
                    events.append(self._take(event))
            except BaseException:  # Ctrl-C came, perhaps before the message had its `Body`.
                lib.zp_message_release(engine[0], event.body)
                for each in events:  # A kept traceback would keep them alive.
                    if isinstance(each, MessageReceived):
                        each.body.release()
                raise
        return events

    def _take(self, event: Any) -> EngineEvent:
        peer = bytes(ffi.buffer(event.peer))
        if event.kind == lib.ZP_EVENT_REDUCE_DONE:
            fault = None if peer == _NOBODY else peer
            facts = event.id, event.status, event.digest, event.tx_bytes, event.rx_bytes
            return ReduceDone(*facts, fault, bool(event.told))
        if event.kind == lib.ZP_EVENT_LINK_LOST:
            return LinkLost(peer, event.id, event.status)
        if event.kind == lib.ZP_EVENT_CONNECTION_LOST:
            return ConnectionLost(peer, event.id, event.connection, event.generation, event.status)
        if event.kind == lib.ZP_EVENT_WRITABLE:
            return Writable(event.id)
        return MessageReceived(peer, event.id, Body(self, event))

    # --- Links --------------------------------------------------------------------------------------------------------

    def open_link(
        self,
        peer: bytes,
        fds: Sequence[int],
        cipher_keys: Sequence[ciphers.CipherKeys] | None = None,
        places: int = 0,
    ) -> int:
        """Gives the engine the connected stream sockets `fds` to `peer`; the engine owns them from then on.

        Args:
            peer: id of the other end.
            fds: the sockets.
            cipher_keys: cipher and keys of each socket; None: they are not encrypted.
            places: the most connections of the link; `add_connection` may add them up to this number.

        Returns:
            The id of the link.

        Raises:
            EngineError: EEXIST if there is a link to this peer, EINVAL for no or too many sockets, and errors of the
                system. Then the sockets still belong to the caller.
        """
        link_id = ffi.new("uint64_t *")
        count = max(places, len(fds))
        native = ffi.NULL if cipher_keys is None else _cipher_keys(cipher_keys, count)
        if cipher_keys is not None and len(cipher_keys) != len(fds):
            raise ValueError(f"{len(fds)} sockets and {len(cipher_keys)} cipher keys")
        sockets = [*fds, *[-1] * (count - len(fds))]
        with self._handle.use() as engine:
            check_rc(lib.zp_link_open(engine[0], _peer(peer), sockets, native, count, link_id), "zp_link_open")
        return int(link_id[0])

    def add_connection(
        self,
        peer: bytes,
        link_id: int,
        index: int,
        generation: int,
        fd: int,
        first: bytes = b"",
        keys: ciphers.CipherKeys | None = None,
    ) -> None:
        """Gives the engine a connected stream socket for a free place of an open link; the engine owns it from then on.

        Args:
            peer: id of the other end.
            link_id: what `open_link` returned.
            index: place in the link, the same at both ends: that of a `ConnectionLost`, or one never used.
            generation: the same at both ends, and greater than any earlier one in this place.
            fd: descriptor of the socket.
            first: bytes sent before the first frame, if the engine takes the connection. The accepting end must take it
                before the dialling end may add it: these bytes can tell the dialling end so.
            keys: its cipher and keys; None if and only if the link is not encrypted.

        Raises:
            EngineError: ENOTCONN, there is no such link; EBUSY, that index is open or not retransmitted; ESTALE, the
                generation is not greater; EEXIST, EINVAL, and errors of the system. Then the socket still belongs to
                the caller.
        """
        native = ffi.NULL if keys is None else _cipher_keys([keys], 1)
        with self._handle.use() as engine:
            rc = lib.zp_link_add(engine[0], _peer(peer), link_id, index, generation, fd, native, first, len(first))
            check_rc(rc, "zp_link_add")

    def close_link(self, peer: bytes) -> bool:
        """Closes the link to `peer`; attempts that use it fail. False if there was none."""
        with self._handle.use() as engine:
            rc = lib.zp_link_close(engine[0], _peer(peer))
        return rc != -errno.ENOTCONN and check_rc(rc, "zp_link_close") == 0

    def link_state(self, peer: bytes) -> LinkStats:
        """State and counters of the link to `peer`.

        Raises:
            EngineError: ENOTCONN, there is no link.
        """
        stats = ffi.new("zp_link_stats *")
        with self._handle.use() as engine:
            check_rc(lib.zp_link_get_stats(engine[0], _peer(peer), stats), "zp_link_get_stats")
        count = stats.connection_count
        return LinkStats(
            link_id=stats.link,
            open_count=stats.open_count,
            senders=stats.senders,
            lost_count=stats.lost_count,
            message_bytes=stats.message_bytes,
            tx_bytes=list(stats.tx_bytes)[:count],
            rx_bytes=list(stats.rx_bytes)[:count],
            generations=list(stats.generation)[:count],
        )

    def link_flow(self, peer: bytes) -> LinkFlow:
        """TCP's counters of the link to `peer`. All are zero for a link within this host: its path is not measured.

        Raises:
            EngineError: ENOTCONN, there is no link.
        """
        flow = ffi.new("zp_link_flow *")
        with self._handle.use() as engine:
            check_rc(lib.zp_link_get_flow(engine[0], _peer(peer), flow), "zp_link_get_flow")
        count = flow.connection_count
        return LinkFlow(
            link_id=flow.link,
            round_trip_us=flow.round_trip_us if flow.round_trip_us < _UNKNOWN_US else None,
            queued_us=flow.queued_us,
            acked_bytes=list(flow.acked_bytes)[:count],
            busy_us=list(flow.busy_us)[:count],
            is_limited=[bool(limited) for limited in list(flow.limited)[:count]],
        )

    def set_senders(self, peer: bytes, senders: int) -> None:
        """From now on only the first `senders` open connections of the link to `peer` take frames.

        Raises:
            EngineError: ENOTCONN, there is no link; EINVAL, less than one.
        """
        with self._handle.use() as engine:
            check_rc(lib.zp_link_set_senders(engine[0], _peer(peer), senders), "zp_link_set_senders")

    def is_local(self, peer: bytes) -> bool:
        """True if the addresses of the link to `peer` show that it is on this host; False without a link."""
        stats = ffi.new("zp_link_stats *")
        with contextlib.suppress(EngineError), self._handle.use() as engine:
            lib.zp_link_get_stats(engine[0], _peer(peer), stats)
        return bool(stats.local)

    # --- Reduces ------------------------------------------------------------------------------------------------------

    def start_reduce(self, plan: ReducePlan) -> None:
        """Starts an attempt at a collective. A `ReduceDone` follows unless `end_reduce` comes first.

        Raises:
            EngineError: ENOTCONN if a link that it needs is missing, EINVAL, EEXIST, ENOMEM. Then there is nothing to
                end.
            ValueError: the number of ranks of a tree is not the number of peers.
        """
        sizes = {len(lane.parents) for lane in plan.lanes}
        if not sizes <= {len(plan.peers)}:
            raise ValueError(f"the trees of {len(plan.peers)} peers have {sorted(sizes)} ranks")
        peers = ffi.new("uint8_t[]", b"".join(_peer(peer) for peer in plan.peers))
        owners = ffi.new("uint32_t[]", plan.owners) if plan.owners else ffi.NULL
        trees = [ffi.new("uint32_t[]", lane.parents) for lane in plan.lanes]  # Kept alive until the call has returned.
        parts = [(lane.elements, tree) for lane, tree in zip(plan.lanes, trees, strict=True)]
        lanes = ffi.new("zp_lane[]", parts) if parts else ffi.NULL
        native = ffi.new(
            "zp_reduce_plan *",
            {
                "attempt": plan.attempt_id,
                "kind": int(plan.kind),
                "dtype": int(plan.datatype),
                "op": int(plan.op),
                "quantization": int(plan.quantization),
                "quantized": int(plan.quantized_datatype),
                "block_elements": plan.block_elements,
                "algorithm": int(plan.algorithm),
                "world_size": len(plan.peers),
                "rank": plan.rank,
                "frame_bytes": plan.frame_bytes,
                "count": plan.count,
                "peers": peers,
                "owners": owners,
                "lanes": lanes,
                "lane_count": len(parts),
                "input": ffi.cast("void *", plan.input_address),
                "output": ffi.cast("void *", plan.output_address),
                "restore": plan.restore,
                "digest_channel": plan.digest_channel,
                "call": plan.call,
                "pace_us": plan.pace_us,
            },
        )
        with self._handle.use() as engine:
            check_rc(lib.zp_reduce_start(engine[0], native), "zp_reduce_start")

    def withhold_digest(self, attempt_id: int) -> bool:
        """From now on the digest of an attempt is not sent. True if it was sent before, and its `ReduceDone` waits."""
        with self._handle.use() as engine:
            return bool(lib.zp_reduce_withhold(engine[0], attempt_id))

    def end_reduce(self, attempt_id: int, *, commit: bool) -> None:
        """Ends an attempt, whether it is running, done or never started; then its memory is the caller's again.

        Args:
            attempt_id: id of the attempt.
            commit: keep the result, legal only after `ReduceDone` with status 0. Otherwise an in-place buffer gets its
                old contents back (if the plan had `restore`), and the output of an out-of-place reduce is undefined.

        Raises:
            EngineError: EINVAL, there is no result to commit.
        """
        with self._handle.use() as engine:
            check_rc(lib.zp_reduce_end(engine[0], attempt_id, commit), "zp_reduce_end")

    def hold_stalls(self, hold: bool) -> None:
        """While held, no attempt stalls; after that each has the whole timeout again. Links are watched as always."""
        with self._handle.use() as engine:
            lib.zp_stalls_hold(engine[0], hold)

    # --- Messages -----------------------------------------------------------------------------------------------------

    def open_channel(self, channel_id: int, fileno: int = -1) -> None:
        """From now on messages on `channel_id` are delivered, and may be posted.

        Args:
            channel_id: id of the channel.
            fileno: eventfd of the mailbox that takes its events; -1: `poll` takes them.

        Raises:
            EngineError: EEXIST, it is open.
        """
        with self._handle.use() as engine:
            check_rc(lib.zp_channel_open(engine[0], channel_id, fileno), "zp_channel_open")

    def close_channel(self, channel_id: int) -> None:
        """From now on messages on `channel_id` are dropped, also those that wait to be taken, or to be sent."""
        with self._handle.use() as engine:
            check_rc(lib.zp_channel_close(engine[0], channel_id), "zp_channel_close")

    def post_message(
        self,
        peer: bytes,
        channel_id: int,
        head: bytes | bytearray | memoryview,
        body: bytes | bytearray | memoryview,
        queue_bytes_max: int,
    ) -> bool:
        """Queues a copy of `head` and `body` as one message for `peer`, without waiting.

        Args:
            peer: id of the receiver.
            channel_id: id of the channel.
            head: the first bytes.
            body: the rest, from anywhere in memory.
            queue_bytes_max: bound on the bytes that the peer has not acknowledged, this message included. A single
                message may always pass.

        Returns:
            False if there is no room. A `Writable` follows once half of the bound is free, or sooner.

        Raises:
            EngineError: ECANCELED, the channel is not open here; ENOTCONN, there is no link; EMSGSIZE, the message is
                longer than allowed; ENOMEM.
        """
        first, rest = ffi.from_buffer(head), ffi.from_buffer(body)
        with self._handle.use() as engine:
            rc = lib.zp_message_post(
                engine[0], _peer(peer), channel_id, first, len(first), rest, len(rest), queue_bytes_max
            )
        return rc != -errno.EAGAIN and check_rc(rc, "zp_message_post") == 0


def default_threads(cpus: int) -> int:
    """Number of I/O threads of an engine whose process may use `cpus` CPUs."""
    return max(1, min(cpus // limits.ENGINE_THREAD_CPUS, limits.ENGINE_THREADS_DEFAULT_MAX))


def _peer(peer: bytes) -> bytes:
    if len(peer) != PEER_ID_BYTES:
        raise ValueError(f"a peer id has {PEER_ID_BYTES} bytes, not {len(peer)}")
    return peer


def _cipher_keys(cipher_keys: Sequence[ciphers.CipherKeys], count: int) -> Any:
    """An array of `count` zp_aead; those beyond `cipher_keys` are empty."""
    native = ffi.new("zp_aead[]", count)
    for target, keys in zip(native, cipher_keys, strict=False):
        aead = ciphers.available()[keys.cipher]
        if {len(keys.tx_key), len(keys.rx_key)} != {aead.key_bytes}:
            raise ValueError(f"a key of {keys.cipher.name} has {aead.key_bytes} bytes")
        target.encrypt = ffi.cast("zp_encrypt", aead.encrypt_address)
        target.decrypt = ffi.cast("zp_decrypt", aead.decrypt_address)
        target.key_bytes, target.nonce_bytes, target.tag_bytes = aead.key_bytes, aead.nonce_bytes, aead.tag_bytes
        target.tx_key[0 : aead.key_bytes] = keys.tx_key
        target.rx_key[0 : aead.key_bytes] = keys.rx_key
    return native


@atexit.register
def _close_all() -> None:
    """Closes all engines before the interpreter ends and frees tensors: no I/O thread may still use them then."""
    for engine in _open_engines.all():
        engine.close()
