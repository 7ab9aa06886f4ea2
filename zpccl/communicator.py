"""The public API: one `Communicator` a process and peer group.

A communicator may be used from several threads. Blocking calls release the GIL while they wait, and Ctrl-C ends them:
the call is withdrawn from the run first, so that no thread touches the caller's memory after it.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from zpccl import limits
from zpccl.control.addresses import advertised_address, listen_on_first_free, parse_listen, parse_masters
from zpccl.control.keys import peer_keys
from zpccl.control.peer_loop import Buffers, Outcome, PeerLoop, PendingCall
from zpccl.dataplane.tensors import TensorView, empty_like, view
from zpccl.dataplane.transfer import StateTransfer
from zpccl.errors import InvalidArgument, InvalidUsage, PCCLError, PeerLost, Result, TooFewPeers
from zpccl.protocol import events
from zpccl.protocol.identity import SALT_BYTES, make_peer_id
from zpccl.protocol.messages import CollectiveSpec, StateEntry, TopologyKind
from zpccl.protocol.peer import PeerOptions, State
from zpccl.shared_state import SharedState
from zpccl.types import (
    NO_QUANTIZATION,
    Attribute,
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _leave_at_exit() -> None:
    """Programs that end without close() leave gracefully too."""
    for communicator in list(_open_communicators):
        communicator.close()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _public(function: _Function) -> _Function:
    """Names the public function in the errors that leave it."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except PCCLError as error:
            error.function = error.function or function.__qualname__
            raise

    return wrapper  # type: ignore[return-value]


class AsyncReduceHandle:
    """A collective in flight, from `Communicator.all_reduce_async`.

    Attributes:
        result: the tensor that receives the result. Valid once `wait` has told of success.
    """

    def __init__(self, communicator: Communicator, loop: PeerLoop, call: PendingCall, result: Any) -> None:
        self._communicator = communicator
        self._loop = loop
        self._call = call
        self.result = result

    @_public
    def wait(self, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome. May be called again, and from any thread.

        Args:
            timeout: seconds after which the collective is given up.

        Returns:
            Whether it succeeded, its `Result` as an int, and what it cost. Never raises for a failed reduce.

        Raises:
            InvalidArgument: the timeout is not a number of seconds.
            InvalidUsage: in a child process made by fork.
        """
        timeout = _seconds(timeout, "timeout")
        self._communicator._check_process()
        try:
            with self._communicator._giving_up(self._loop, [self._call]):
                outcome = self._communicator._outcome(self._loop, self._call, timeout)
        except PCCLError as error:
            return False, int(error.result), ReduceInfo(self._communicator.world_size, *self._costs())
        return True, int(Result.SUCCESS), ReduceInfo(outcome.value, outcome.tx_bytes, outcome.rx_bytes)

    def exception(self) -> PCCLError | None:
        """The error of a collective that failed, after `wait`; None if it succeeded or still runs."""
        error = self._call.future.exception() if self._call.future.done() else None
        return error if isinstance(error, PCCLError) else None

    def _costs(self) -> tuple[int, int]:
        return self._call.tx_bytes, self._call.rx_bytes


class Communicator:
    """Takes part in a run.

    Args:
        address: of the master, "host:port"; ZPCCL_MASTER if left out. Several, "a:48148,b:48148", name standbys: the
            first leads; when it is gone, a quorum of the members moves to another. The same list for all peers.
        peer_group: peers of one group reduce and share state among themselves; 0 to 2**32 - 1.
        p2p_connection_pool_size: TCP connections to each other peer; 0 means the default. Same as `connections`.
        connections: TCP connections to each other peer, 1 to 64 (ZPCCL_CONNECTIONS).
        advertise: "host" or "host:port" where others reach this peer, beside its interfaces (ZPCCL_ADVERTISE).
        listen: "host:port" or "host:first-last" to listen on for other peers (ZPCCL_LISTEN).
        name: what this peer is called in logs and errors; "hostname:pid" if left out (ZPCCL_NAME).
        heartbeat_timeout: seconds after which a silent master is taken to be away.
        master_timeout: seconds that calls wait for a master that is away.
        secret: text from `zpccl keygen`: the secret of the run, or this peer's private key (ZPCCL_SECRET, or the file
            that ZPCCL_SECRET_FILE names). Without one, so must be the master.
        master_key: public key of the master, where `secret` is a private key (ZPCCL_MASTER_KEY).

    Raises:
        InvalidArgument: an argument that can never be right.
    """

    @_public
    def __init__(
        self,
        address: str | None = None,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        connections: int | None = None,
        advertise: str | None = None,
        listen: str | None = None,
        name: str | None = None,
        heartbeat_timeout: float = limits.HEARTBEAT_TIMEOUT_NS / limits.SECOND,
        master_timeout: float = limits.MASTER_TIMEOUT_NS / limits.SECOND,
        secret: str | None = None,
        master_key: str | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._loop: PeerLoop | None = None
        self._is_closed = False
        self._pid = os.getpid()
        self._keys = peer_keys(secret, master_key)
        text = address or os.environ.get("ZPCCL_MASTER") or f"127.0.0.1:{limits.MASTER_PORT}"
        self._masters = parse_masters(text)
        if not _is_int(peer_group) or not 0 <= peer_group <= limits.PEER_GROUP_MAX:
            raise InvalidArgument(f"peer_group {peer_group!r} is not an integer from 0 to {limits.PEER_GROUP_MAX}")
        self._group = int(peer_group)
        count = (
            connections
            or p2p_connection_pool_size
            or _environment_int("ZPCCL_CONNECTIONS")
            or limits.LINK_CONNECTIONS_DEFAULT
        )
        if not _is_int(count) or not 1 <= count <= limits.LINK_CONNECTIONS_MAX:
            raise InvalidArgument(f"connections {count!r} is not an integer from 1 to {limits.LINK_CONNECTIONS_MAX}")
        self._connections = int(count)
        self._advertise = advertise or os.environ.get("ZPCCL_ADVERTISE")
        if self._advertise:
            advertised_address(self._advertise, limits.PEER_PORT_FIRST)
        self._listen = parse_listen(listen or os.environ.get("ZPCCL_LISTEN"))
        name = name or os.environ.get("ZPCCL_NAME") or f"{socket.gethostname()}:{os.getpid()}"
        if not isinstance(name, str):
            raise InvalidArgument(f"name {name!r} is not a text")
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        self._name = name[: limits.NAME_CHARS_MAX].encode(errors="replace").decode()  # No lone surrogates.
        self._heartbeat_timeout_ns = _nanoseconds(
            heartbeat_timeout, "heartbeat_timeout", limits.HEARTBEAT_TIMEOUT_MIN_NS
        )
        self._master_timeout_ns = _nanoseconds(master_timeout, "master_timeout")

    def __enter__(self) -> Communicator:
        """Connects, unless that is done already."""
        if self._loop is None:
            self.connect()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leaves the run."""
        self.close()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and os.getpid() == self._pid:
            loop.close()

    # --- Taking part ------------------------------------------------------------------------------------------------

    @_public
    def connect(self, n_attempts: int = 5) -> None:
        """Registers with the master and waits until the members admit this peer.

        The first peer of a run is admitted at once; later ones when all members call `update_topology`.

        Args:
            n_attempts: tries to reach the master, with growing pauses.

        Raises:
            MasterUnreachable: nobody answers there as a master of this version.
            AuthenticationFailed: the secret or key is not that of the run, or only one side has one.
            PeerUnreachable: no data connection to a member could be made.
            InvalidUsage: connected already, or closed.
        """
        if not _is_int(n_attempts) or n_attempts < 1:
            raise InvalidArgument(f"n_attempts {n_attempts!r} is not a positive integer")
        with self._lock:
            self._check_process()
            if self._is_closed:
                raise InvalidUsage("the communicator is closed; make a new one")
            if self._loop is not None:
                if self._loop.view.state is not State.CLOSED:
                    raise InvalidUsage("connected already")
                self._loop.close()  # Waits for its end, so that its port is free.
            loop = self._loop = self._make_loop()
            _open_communicators.add(self)
            call = PendingCall(Future())
        with self._giving_up(loop, [call]):
            loop.start(call, n_attempts)
            self._outcome(loop, call)

    def _make_loop(self) -> PeerLoop:
        identity = self._keys.identity if self._keys is not None else ""
        peer_id, token = make_peer_id(identity, secrets.token_bytes(SALT_BYTES)), secrets.token_bytes(16)

        def options(addresses: tuple[str, ...]) -> PeerOptions:
            return PeerOptions(
                peer_id=peer_id,
                token=token,
                name=self._name,
                group=self._group,
                addresses=addresses,
                masters=self._masters,
                master_timeout_ns=self._master_timeout_ns,
            )

        return PeerLoop(
            options,
            tuple(f"tcp://{address}" for address in self._masters),
            listen_on_first_free(*self._listen),
            self._connections,
            self._advertise,
            self._heartbeat_timeout_ns,
            self._keys,
        )

    @_public
    def close(self) -> None:
        """Leaves the run: the others go on without this peer at once. Calls in flight fail. May be called twice."""
        if self._pid != os.getpid():
            return  # The run is the parent's.
        with self._lock:
            loop, self._is_closed = self._loop, True
        if loop is not None:
            loop.close()

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members of this peer's group, in ring order."""
        return tuple(name for _, _, name in self._group_members())

    @property
    def rank(self) -> int:
        """This peer's place in the ring of its group; -1 if it is not a member."""
        own = self._loop.options.peer_id if self._loop is not None else b""
        return next((rank for rank, member in enumerate(self._group_members()) if member[0] == own), -1)

    @property
    def world_size(self) -> int:
        """Members of this peer's group."""
        return len(self._group_members())

    @property
    def epoch(self) -> int:
        """Number of the member list; it grows at every admission and every loss."""
        return self._loop.view.epoch if self._loop is not None else 0

    @property
    def group(self) -> int:
        """This peer's group."""
        return self._group

    def _group_members(self) -> list[tuple[bytes, int, str]]:
        members = self._loop.view.members if self._loop is not None else ()
        return [member for member in members if member[1] == self._group]

    @_public
    def get_attribute(self, attribute: Attribute) -> int:
        """A number about the run, as of the latest member list.

        Raises:
            InvalidUsage: not connected.
            InvalidArgument: no such attribute.
        """
        members = self._admitted().view.members
        sizes: dict[int, int] = {}
        for _, group, _ in members:
            sizes[group] = sizes.get(group, 0) + 1
        if attribute == Attribute.GLOBAL_WORLD_SIZE:
            return len(members)
        if attribute == Attribute.LOCAL_WORLD_SIZE:
            return sizes.get(self._group, 0)
        if attribute == Attribute.NUM_DISTINCT_PEER_GROUPS:
            return len(sizes)
        if attribute == Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
            return max(sizes.values(), default=0)
        raise InvalidArgument(f"{attribute!r} is not an Attribute")

    # --- Topology ---------------------------------------------------------------------------------------------------

    @_public
    def update_topology(self) -> None:
        """Admits pending peers. All members of all groups must call it.

        Raises:
            UpdateTopologyFailed: it can be tried again.
            PendingAsyncOps: collectives are in flight.
            InvalidUsage: not connected, or other peers made other calls.
        """
        self._vote(TopologyKind.UPDATE)

    @_public
    def are_peers_pending(self) -> bool:
        """True if peers wait to be admitted. All members of all groups must call it; all get the same answer.

        Collectives may be in flight meanwhile.

        Raises:
            InvalidUsage: not connected, or other peers made other calls.
        """
        return bool(self._vote(TopologyKind.PENDING))

    @_public
    def optimize_topology(self) -> None:
        """Improves the order of the ring. All members of all groups must call it.

        This version takes part in the consensus and keeps the order of admission: it measures nothing yet.

        Raises:
            TopologyOptimizationFailed: it can be tried again.
            PendingAsyncOps: collectives are in flight.
            InvalidUsage: not connected, or other peers made other calls.
        """
        self._vote(TopologyKind.OPTIMIZE)

    def _vote(self, kind: TopologyKind) -> int:
        loop, call = self._connected(), PendingCall(Future())
        with self._giving_up(loop, [call]):
            loop.call(lambda ids: events.TopologyCalled(ids[0], kind), [call])
            return self._outcome(loop, call).value

    # --- Shared state -----------------------------------------------------------------------------------------------

    @_public
    def sync_shared_state(
        self,
        state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    ) -> SharedStateSyncInfo:
        """Makes the state equal on all members of the group, bit for bit. All of them must call it.

        The contents that most peers hold at the revision of the sync win; who differs or is behind receives, and its
        `state.revision` is set. A sync that fails changes no tensor and no revision.

        Args:
            state: its tensors are read, and written where they differ.
            strategy: ENFORCE_POPULAR, RECEIVE_ONLY or SEND_ONLY.

        Raises:
            TooFewPeers: alone in the group.
            InvalidArgument: other peers have other keys, dtypes or sizes.
            InvalidUsage: the revision is ahead of the run's, SEND_ONLY peers differ, not connected.
            NoSharedState: nobody can send.
            PeerLost: a peer was lost meanwhile; call again.
        """
        loop = self._admitted()
        if not isinstance(state, SharedState):
            raise InvalidArgument(f"state is a {type(state).__name__}, not a SharedState")
        if strategy not in tuple(SharedStateSyncStrategy):
            raise InvalidArgument(f"{strategy!r} is not a SharedStateSyncStrategy")
        infos = {info.name: info for info in state.tensor_infos}
        tensors = {name: infos[name].view() for name in sorted(infos)}
        if len(self._group_members()) <= 1:
            raise TooFewPeers("this peer is alone in its group; there is nobody to share state with")
        transfer = StateTransfer(tensors, loop.send_state, loop.report_fetch)
        entries = tuple(
            StateEntry(
                name, tensor.datatype, tensor.count, infos[name].allow_content_inequality, transfer.digests[name]
            )
            for name, tensor in tensors.items()
        )
        call = PendingCall(Future(), transfer=transfer)
        try:
            with self._giving_up(loop, [call]):
                loop.call(lambda ids: events.SyncCalled(ids[0], strategy, state.revision, entries), [call])
                transfer.run()
                state.revision = self._outcome(loop, call).value
        except KeyboardInterrupt:
            if transfer.is_written:  # The interrupt came too late: the others count this peer in.
                state.revision = call.future.result().value
            raise
        return SharedStateSyncInfo(transfer.tx_bytes, transfer.rx_bytes)

    # --- Collectives ------------------------------------------------------------------------------------------------

    @_public
    def all_reduce(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        timeout: float | None = None,
        restore: bool = True,
    ) -> Any:
        """Combines the tensors of all members of the group. All of them must call it with the same `tag`.

        If it fails, `send` is as it was before the call, bit for bit, in place too. The contents of a separate `recv`
        are undefined after a failure.

        Args:
            send: contiguous numpy array or torch CPU tensor of any shape.
            recv: receives the result: a tensor of as many elements of the same dtype, `send` itself for in place, or
                None for a new tensor, which is then returned.
            op: how elements are combined.
            tag: tells collectives apart that run at the same time.
            operand_descriptor: what the elements are; taken from the tensor if left out.
            quantization_options: how to make floating-point tensors smaller on the wire.
            timeout: seconds after which the call is given up.
            restore: False leaves a failed in-place buffer undefined, for speed.

        Returns:
            `ReduceInfo`; the new tensor if `recv` is None.

        Raises:
            PeerLost: a peer was lost; call again.
            TooFewPeers: alone in the group.
            CollectiveMismatch: peers gave different arguments.
            OperationTimeout: `timeout` ran out.
            InvalidArgument, InvalidUsage: see the text.
        """
        timeout = _seconds(timeout, "timeout")
        loop = self._connected()
        collective = _Collective(send, recv, op, tag, operand_descriptor, quantization_options, restore)
        buffers, result = collective.prepare()
        call = PendingCall(Future(), buffers=buffers)
        with self._giving_up(loop, [call]):
            _begin(loop, [call])
            outcome = self._outcome(loop, call, timeout)
        return result if recv is None else ReduceInfo(outcome.value, outcome.tx_bytes, outcome.rx_bytes)

    @_public
    def all_reduce_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        restore: bool = True,
    ) -> AsyncReduceHandle:
        """Like `all_reduce`, but returns at once. Many may be in flight, each with its own tag.

        The tensors must stay untouched until `wait` of the handle has returned. May be called from any thread.

        Raises:
            TooFewPeers: alone in the group.
            InvalidArgument, InvalidUsage: see the text.
        """
        loop = self._admitted()
        if len(self._group_members()) <= 1:
            raise TooFewPeers("this peer is alone in its group; wait for others")
        collective = _Collective(send, recv, op, tag, operand_descriptor, quantization_options, restore)
        buffers, result = collective.prepare()
        call = PendingCall(Future(), buffers=buffers)
        with self._giving_up(loop, [call]):
            _begin(loop, [call])
            return AsyncReduceHandle(self, loop, call, result)

    @_public
    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Reduces several tensors and tries again what failed, until all have succeeded. All members must call it.

        Args:
            descriptors: what to reduce; tags must differ.
            max_in_flight: collectives that run at the same time. Tensors of less than 64 KiB do not count: voting for
                each takes longer than reducing it, so all members vote for many of them at once.

        Returns:
            World size of the last, and bytes of all together.

        Raises:
            TooFewPeers: the group is down to one.
            CollectiveMismatch, InvalidArgument, InvalidUsage: see the text.
        """
        if not _is_int(max_in_flight) or max_in_flight < 1:
            raise InvalidArgument(f"max_in_flight {max_in_flight!r} is not a positive integer")
        tags = [descriptor.reduce_descriptor.tag for descriptor in descriptors]
        if len(set(tags)) < len(tags):
            raise InvalidArgument("descriptors must have different tags")
        loop = self._connected()
        prepared = [_Collective.of(descriptor).prepare()[0] for descriptor in descriptors]
        world_size = self.world_size
        tx_bytes = rx_bytes = 0
        for window in _windows(prepared, max_in_flight):
            waiting = window
            while waiting:
                calls = [PendingCall(Future(), buffers=buffers) for buffers in waiting]
                with self._giving_up(loop, calls):
                    _begin(loop, calls)
                    for call in calls:  # An error of one must not leave the memory of another in use.
                        _wait(call.future, None)
                waiting = []
                for call in calls:
                    try:
                        outcome = call.future.result()
                    except PeerLost:
                        assert call.buffers is not None
                        waiting.append(call.buffers)
                    else:
                        world_size = outcome.value
                        tx_bytes += outcome.tx_bytes
                        rx_bytes += outcome.rx_bytes
        return ReduceInfo(world_size, tx_bytes, rx_bytes)

    # --- Waiting ----------------------------------------------------------------------------------------------------

    def _connected(self) -> PeerLoop:
        self._check_process()
        if self._is_closed:
            raise InvalidUsage("the communicator is closed")
        if self._loop is None:
            raise InvalidUsage("not connected; call connect() first")
        return self._loop

    def _admitted(self) -> PeerLoop:
        loop = self._connected()
        if loop.view.state is State.MEMBER:
            return loop
        raise copy.copy(loop.error) if loop.error is not None else InvalidUsage("connect() has not returned yet")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidUsage("the communicator belongs to the parent process; make a new one after fork")

    def _outcome(self, loop: PeerLoop, call: PendingCall, timeout: float | None = None) -> Outcome:
        """Waits for the answer of a call. A call whose time is up is withdrawn first, and its answer awaited."""
        if not _wait(call.future, timeout):
            self._give_up(loop, [call], timed_out=True)
        error = call.future.exception()
        if error is not None:
            # An error of the loop goes to many calls, and raising writes to it: everyone gets a copy.
            raise copy.copy(error)
        return call.future.result()

    @contextlib.contextmanager
    def _giving_up(self, loop: PeerLoop, calls: Sequence[PendingCall]) -> Iterator[None]:
        """Ctrl-C in the block, at whatever point, withdraws the calls and waits until their memory is the caller's."""
        try:
            yield
        except KeyboardInterrupt:
            try:
                self._give_up(loop, calls, timed_out=False)
            except KeyboardInterrupt:  # The user is in a hurry.
                loop.close()
            raise

    def _give_up(self, loop: PeerLoop, calls: Sequence[PendingCall], *, timed_out: bool) -> None:
        """Withdraws calls and waits until the memory is the caller's again: for the master, or else by leaving."""
        for call in calls:
            loop.withdraw(call, timed_out=timed_out)
        if futures.wait([call.future for call in calls], limits.WITHDRAW_TIMEOUT_NS / limits.SECOND).not_done:
            loop.close()


def _wait(future: Future[Outcome], timeout: float | None) -> bool:
    """True once the future is done; False when the time is up. Wakes at times, for signals."""
    deadline = None if timeout is None else time.monotonic() + timeout
    interval = limits.SIGNAL_CHECK_INTERVAL_NS / limits.SECOND
    while not future.done():
        left = interval if deadline is None else min(interval, deadline - time.monotonic())
        if left <= 0:
            return False
        futures.wait([future], left)
    return True


def _begin(loop: PeerLoop, calls: list[PendingCall]) -> None:
    def make_event(call_ids: list[int]) -> events.ReduceCalled:
        specs = [call.buffers.spec for call in calls if call.buffers is not None]
        return events.ReduceCalled(tuple(zip(call_ids, specs, strict=True)))

    loop.call(make_event, calls)


def _windows(prepared: Sequence[Buffers], max_in_flight: int) -> Iterator[list[Buffers]]:
    """Splits collectives, in order, into those to begin together: the same on all members, whose arguments are.

    A window leaves half of the calls that a peer may have to the user's other threads.
    """
    window: list[Buffers] = []
    large_count = 0
    for buffers in prepared:
        is_large = buffers.send.nbytes >= limits.SMALL_TENSOR_BYTES
        if (is_large and large_count == max_in_flight) or len(window) == limits.CALLS_IN_FLIGHT_MAX // 2:
            yield window
            window, large_count = [], 0
        window.append(buffers)
        large_count += is_large
    if window:
        yield window


class _Collective:
    """One collective as the user asked for it."""

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
    ) -> None:
        self.send, self.recv, self.op, self.tag = send, recv, op, tag
        self.operand, self.quantization = operand, quantization or NO_QUANTIZATION
        self.restore, self.count = restore, count

    @classmethod
    def of(cls, descriptor: ReduceOpDescriptor) -> _Collective:
        """The collective of a descriptor."""
        reduce: ReduceDescriptor = descriptor.reduce_descriptor
        return cls(
            descriptor.send,
            descriptor.recv,
            reduce.op,
            reduce.tag,
            reduce.operand_descriptor,
            reduce.quantization_options,
            count=reduce.count,
        )

    def prepare(self) -> tuple[Buffers, Any]:
        """The checked memory and arguments, and the tensor that receives the result.

        Raises:
            InvalidArgument: a tensor or an argument cannot be used.
        """
        if not isinstance(self.operand, ReduceOperandDescriptor | None):
            raise InvalidArgument(f"operand_descriptor is a {type(self.operand).__name__}")
        if not isinstance(self.quantization, QuantizationOptions):
            raise InvalidArgument(f"quantization_options is a {type(self.quantization).__name__}")
        datatype = self.operand.datatype if self.operand is not None else None
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
        if not _is_int(self.tag) or not 0 <= self.tag <= limits.TAG_MAX:
            raise InvalidArgument(f"tag {self.tag!r} is not an integer from 0 to {limits.TAG_MAX}")
        if self.op not in tuple(ReduceOp):
            raise InvalidArgument(f"op {self.op!r} is not a ReduceOp")
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
        )
        return Buffers(spec, send, recv, self.restore), result

    def _check_quantization(self, send: TensorView) -> None:
        options = self.quantization
        if options.algorithm == QuantizationAlgorithm.NONE:
            return
        if options.algorithm not in tuple(QuantizationAlgorithm):
            raise InvalidArgument(f"{options.algorithm!r} is not a QuantizationAlgorithm")
        if not send.datatype.is_floating:
            raise InvalidArgument(f"only floating-point tensors can be quantised, not {send.datatype.name}")
        if options.quantized_datatype != DataType.UINT8:
            raise InvalidArgument(f"can quantise to UINT8 only, not {options.quantized_datatype!r}")
        if not _is_int(options.block_size) or not 1 <= options.block_size <= limits.QUANTIZATION_BLOCK_ELEMENTS_MAX:
            raise InvalidArgument(f"block_size {options.block_size!r} is not within the bounds")


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _seconds(seconds: Any, name: str) -> float | None:
    """A checked `timeout=`: a number that a lock can wait for, or None."""
    if seconds is None:
        return None
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise InvalidArgument(f"{name} {seconds!r} is not a number of seconds, 0 or more; None waits without end")
    return min(float(seconds), threading.TIMEOUT_MAX)


def _nanoseconds(seconds: Any, name: str, at_least_ns: int = limits.MS) -> int:
    if not isinstance(seconds, (int, float)) or not at_least_ns / limits.SECOND <= seconds <= 86_400:
        bound = at_least_ns / limits.SECOND
        raise InvalidArgument(f"{name} {seconds!r} is not a number of seconds from {bound:g} to 86,400")
    return int(seconds * limits.SECOND)


def _environment_int(name: str) -> int:
    text = os.environ.get(name, "0")
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgument(f"{name} is {text!r}, not a number")
    return int(text)
