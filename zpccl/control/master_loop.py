"""The shell of the master: a ROUTER socket, a timer, a log.

One thread, the one in `run()`, owns the sockets and the machine. `stop()`, `reload()` and `log_topology()` may be
called from any thread and from a signal handler: they only write to a pipe, under a lock that prevents the pipe from
being closed meanwhile.

Loss of a connection. libzmq's socket monitor reports which descriptor was closed, and each message has the descriptor
that it came from. Descriptors are reused by later connections, so each ACCEPTED event begins a new generation of its
descriptor. Messages are taken from the socket first, and the monitor is drained after that: by then it has reported
everything about the senders of these messages. The machine learns of the end of a connection after its last message,
unless more messages wait than one turn takes. A later connection may then have the descriptor that the remaining
messages of the closed one carry. So the closed one's routing id is kept until the socket is found empty, or
CLOSED_CONNECTIONS_MAX have closed after it.
If two connections have had the same descriptor, the numbers that libzmq gave them tell which is the earlier one. ZMTP
allows a client to name its connection itself. The messages of such a connection are dropped: it could pass for the
later one, and the other one for closed.
A connection that cannot be written to counts as closed after the messages of the next turn: it may have closed with a
Leave that has not been taken yet. Messages that libzmq still holds from a connection that was shut down are dropped,
since there may be many.

With a secret, libzmq admits only connections whose key the ZAP handler allows, and each message carries that key. A
connection whose key was removed from the allow list is not closed at once; its messages are dropped.

`Inflow` bounds the memory per connection; the loop reports to it everything that is opened, closed, taken and sent.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import zmq

from zpccl import limits
from zpccl.control.addresses import format_address, parse_address, plain_host
from zpccl.control.descriptors import check_descriptors
from zpccl.control.dial_back import DialBacks
from zpccl.control.forks import Descriptor, closed_in_children
from zpccl.control.inflow import Duplicates, Inflow
from zpccl.control.keys import MasterKeys, read_allowed
from zpccl.control.monitor import take_event
from zpccl.control.outgoing import Outgoing
from zpccl.control.waiter import Waiter, is_readable
from zpccl.control.zap import HandshakeWatch, ZapHandler, identity_of, secure
from zpccl.errors import InvalidArgument, InvalidUsage
from zpccl.observe.logs import BoundedLog, RefusalLog
from zpccl.observe.snapshot import Snapshot, Traffic, take_snapshot
from zpccl.protocol.effects import Broadcast, MasterEffect
from zpccl.protocol.events import (
    ConnectionClosed,
    KeysRevoked,
    MalformedReceived,
    MasterEvent,
    PeerMessageReceived,
    Tick,
)
from zpccl.protocol.master import MasterOptions, start_master
from zpccl.protocol.membership import Standing
from zpccl.protocol.messages import (
    Acknowledgement,
    CheckAnswer,
    CheckRequest,
    Hello,
    Leave,
    Malformed,
    MeasurementsRequest,
    OtherVersion,
    PeerMessage,
    Refusal,
    Refused,
    decode_peer_message,
    encode,
    is_compressed,
)
from zpccl.topology import Topology

logger = logging.getLogger("zpccl.master")

_WHY_NOT_BOUND = {
    errno.EADDRINUSE: "the port is in use; does another master run there?",
    errno.EADDRNOTAVAIL: "this host has no such address; 0.0.0.0 stands for all of its IPv4 addresses",
    errno.ENODEV: "no address or interface of this host has this name",
}
"""What libzmq's errors of a bind mean; the text of ENODEV is "No such device"."""
_OWN_ENDPOINT = "inproc://zpccl.master"
"""For our own first connection: libzmq numbers connections from a random number on, which this one shows."""
_ROUTING_ID_BYTES = 5
"""Routing id that libzmq makes: a zero byte, and the number of the connection."""
_ZERO_COPY_RECV = 10
"""From zmq.h; pyzmq has no name for it. Set to 0: otherwise each small message keeps a receive buffer of 8 KiB alive.
"""


class MasterLoop:
    """Runs a master.

    Args:
        listen: "host:port" to listen on; port 0 takes a free one.
        options: times of the master.
        heartbeat_timeout_ns: a host that is silent for this long is lost.
        keys: keys of the master and of the peers that may connect; None: anybody may.
        recovery_grace: seconds to wait for peers of an earlier master before a new run begins; None: the default of
            `options`.
        publish: called with a snapshot by the constructor, then in the thread of the loop soon after every change, at
            least METRICS_INTERVAL apart; it must not block.
        straggler_timeout: seconds after which a peer is removed if others wait for its vote; None: as in `options`.

    Attributes:
        wakeup_descriptor: a byte written to it wakes the loop; for `signal.set_wakeup_fd`.

    Raises:
        InvalidArgument: the address is malformed or does not belong to this host.
        InvalidUsage: the port is in use.
        InternalError: the system has not enough descriptors.
    """

    def __init__(
        self,
        listen: str,
        options: MasterOptions | None = None,
        heartbeat_timeout_ns: int = limits.HEARTBEAT_TIMEOUT_NS,
        keys: MasterKeys | None = None,
        recovery_grace: float | None = None,
        publish: Callable[[Snapshot], None] | None = None,
        straggler_timeout: float | None = None,
    ) -> None:
        host, port = parse_address(listen, what="listen address")
        self._keys = keys
        options = options or MasterOptions()
        if keys is not None:
            options = replace(options, link_seed=keys.link_seed)
        if recovery_grace is not None:
            options = replace(options, recovery_grace_ns=int(recovery_grace * limits.SECOND))
        if straggler_timeout is not None:
            options = replace(options, straggler_timeout_ns=int(straggler_timeout * limits.SECOND))
        self.machine = start_master(secrets.token_bytes(16), options, time.monotonic_ns())
        check_descriptors()
        with contextlib.ExitStack() as on_failure:  # Descriptors may run out nevertheless.
            self._dial_backs = DialBacks()
            on_failure.callback(self._dial_backs.close)
            self._duplicates = Duplicates()
            on_failure.callback(self._duplicates.close)
            self._context = zmq.Context()
            self._context.set(_ZERO_COPY_RECV, 0)
            self._wakeup, self.wakeup_descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            on_failure.pop_all()
        self._pipe_lock = threading.RLock()  # Reentrant: a signal handler may interrupt stop().
        self._is_ended = False
        self._is_stopping = False
        self._is_reloading = False
        self._is_asked = False
        self._zap: ZapHandler | None = None
        self._watch: HandshakeWatch | None = None
        self._descriptors: dict[int, Descriptor] = {}  # Of open connections and the listening socket; libzmq owns them.
        self._generation: dict[int, int] = {}  # By descriptor; even while it is closed, odd while it is open.
        self._routing_id_of: dict[tuple[int, int], bytes] = {}  # By descriptor and generation.
        self._known: set[bytes] = set()  # Routing ids of connections that have sent something: open ones, and `_gone`.
        self._gone: deque[bytes] = deque()  # Closed ones whose messages libzmq may still hold, oldest first.
        self._new_senders: list[tuple[bytes, int, int]] = []  # Routing id, descriptor, bytes of new messages.
        self._decoding_ns = 0  # How long compressed reports were decoded in this turn.
        self._sender: bytes | None = None  # Sender of the message that is being taken; None: there is none.
        self._parts: list[zmq.Frame] = []  # The first parts of that message.
        self._wire_bytes = 0
        self._outgoing: Outgoing[bytes, bytes | zmq.Frame] = Outgoing()  # By routing id.
        self._unreachable: dict[bytes, None] = {}  # Connections that could not be written to; the next turn ends them.
        self._accepted_count = 0
        self._unheard_count = 0
        self._traffic = Traffic()
        self._publish = publish
        self._published_ns: int | None = None
        self._is_published = False  # False: something has changed since the last snapshot.
        self._is_drained = False
        self._lines = BoundedLog(logger, "LOG_LINES_MAX")
        self._refusals = RefusalLog(logger)
        try:
            if keys is not None:
                self._zap = ZapHandler(self._context, keys.allowed, self._refusals)
                self._watch = HandshakeWatch(self._refusals, self._duplicates)
            self._socket = self._open_socket(host, port, heartbeat_timeout_ns)
            endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            listening_port = int(endpoint.rpartition(":")[2])
            self.address = format_address(host, listening_port)
            """The address on which the master listens, "host:port"."""
            is_secure = keys is not None
            self.inflow = Inflow(listening_port, is_secure, self.machine.standing, self._refusals, self._duplicates)
            self._drain_monitor(time.monotonic_ns())  # Reports the listening socket: children close it from now on.
            self._show(time.monotonic_ns())
        except BaseException as error:
            self._context.destroy(linger=0)
            self._dial_backs.close()
            self._duplicates.close()
            self._close_pipe()
            if not isinstance(error, zmq.ZMQError):
                raise
            kind = InvalidUsage if error.errno == errno.EADDRINUSE else InvalidArgument
            reason = _WHY_NOT_BOUND.get(error.errno or 0) or zmq.strerror(error.errno or 0)
            raise kind(f"cannot listen on {listen}: {reason}") from error

    def _open_socket(self, host: str, port: int, heartbeat_timeout_ns: int) -> zmq.Socket[bytes]:
        socket = open_router(self._context, heartbeat_timeout_ns)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        if self._keys is not None:
            secure(socket, self._keys)
        watched = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(watched | (HandshakeWatch.EVENTS if self._keys is not None else 0))
        self._own = self._context.socket(zmq.DEALER)
        socket.bind(_OWN_ENDPOINT)
        self._own.connect(_OWN_ENDPOINT)
        self._own.send(b"")
        self._first_number = _number_of(socket.recv_multipart()[0])
        socket.bind(f"tcp://{'*' if host == '0.0.0.0' else format_address(host, port).rpartition(':')[0]}:{port}")
        return socket

    def run(self) -> None:
        """Serves until `stop()`."""
        try:
            with contextlib.closing(Waiter()) as waiter:
                waiter.register(self._socket)
                waiter.register(self._monitor)
                waiter.register(self._wakeup)
                waiter.register(self._dial_backs.fileno())
                if self._zap is not None:
                    waiter.register(self._zap.socket)
                now_ns = time.monotonic_ns()
                while not self._is_stopping:
                    tick_ns = self.machine.deadline_ns()
                    waiter.wait(0 if self._unreachable else poll_timeout_ms(self._deadline_ns(tick_ns), now_ns))
                    woken_ns = time.monotonic_ns()
                    self._run_once(woken_ns, tick_ns)
                    self.inflow.look(woken_ns)
                    now_ns = time.monotonic_ns()
                    self._traffic.busy_ns += now_ns - woken_ns
                    self._is_published = False
                    self._show(now_ns)
        finally:
            self._close()

    def _deadline_ns(self, tick_ns: int | None) -> int | None:
        """Time at which the loop must run even without input; None: never. `tick_ns`: when the machine wants a Tick."""
        deadlines = [tick_ns, self._outgoing.deadline_ns, self.inflow.deadline_ns(), self._dial_backs.deadline_ns()]
        if self._publish is not None and not self._is_published and self._published_ns is not None:
            deadlines.append(self._published_ns + limits.METRICS_INTERVAL_NS)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _show(self, now_ns: int) -> None:
        """Publishes a snapshot if METRICS_INTERVAL has passed since the last one."""
        if self._publish is None:
            return
        if self._published_ns is not None and now_ns < self._published_ns + limits.METRICS_INTERVAL_NS:
            return
        self._published_ns, self._is_published = now_ns, True
        self._traffic.refused_connections = self._refusals.refused_count
        self._traffic.connections = sum(generation % 2 for generation in self._generation.values())
        self._publish(take_snapshot(self.machine, self._traffic, now_ns))

    def stop(self) -> None:
        """Makes `run()` return. Safe from any thread and from signal handlers."""
        self._is_stopping = True
        self._wake()

    def reload(self) -> None:
        """Reads the allow list again; peers that are no longer on it are removed. As safe as `stop()`."""
        self._is_reloading = True
        self._wake()

    def log_topology(self) -> None:
        """Writes what is known of the network to the log, at level INFO. As safe as `stop()`."""
        self._is_asked = True
        self._wake()

    def _wake(self) -> None:
        with self._pipe_lock:
            if not self._is_ended:
                with contextlib.suppress(BlockingIOError):  # The pipe is full: the loop wakes up anyway.
                    os.write(self.wakeup_descriptor, b"\0")

    def _run_once(self, now_ns: int, tick_ns: int | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, limits.POLL_EVENTS_MAX)
        if self._is_reloading:
            self._is_reloading = False
            self._reload(now_ns)
        if self._is_asked:
            self._is_asked = False
            logger.info("the network: %s", Topology.of(self.machine.measurements(now_ns)))
        if self._zap is not None:
            self._zap.serve(now_ns)
        self._dial_backs.serve(now_ns)
        batch: list[MasterEvent] = []
        closed: list[bytes] = []
        for _ in range(limits.DRAIN_TURNS_MAX):
            # Until no more connections close: the last message of a closed one may be Leave, which counts.
            batch += self._take_messages()
            closed_now = self._drain_monitor(now_ns)
            closed += closed_now
            if not closed_now:
                break
            self.inflow.look(time.monotonic_ns())  # Draining the rest may take many turns.
        if self._is_drained:
            self.inflow.drained()
            self._known.difference_update(self._gone)
            self._gone.clear()
        unreachable = list(self._unreachable)
        batch += map(ConnectionClosed, dict.fromkeys((*closed, *unreachable)))
        if tick_ns is not None and now_ns >= tick_ns:
            batch.append(Tick())
        for routing_id in closed:
            self._outgoing.drop(routing_id)
        if batch:
            self._handle(batch, now_ns)
        self._flush(now_ns)
        for routing_id in unreachable:
            del self._unreachable[routing_id]

    def _reload(self, now_ns: int) -> None:
        if self._zap is None or self._keys is None or self._keys.allow_file is None:
            return logger.warning("there is no allow list to reload")
        try:
            allowed = read_allowed(self._keys.allow_file)
        except InvalidArgument as error:
            return logger.error("the allow list was not reloaded, the old one stays in force: %s", error.message)
        revoked = {key: name for key, name in self._zap.allowed.items() if key not in allowed}
        self._zap.allowed = allowed
        names = ", ".join(revoked.values()) or "none"
        logger.info("%d keys are allowed now; no longer: %s", len(allowed), names)
        self._handle((KeysRevoked(revoked),), now_ns)

    def _handle(self, batch: Sequence[MasterEvent], now_ns: int) -> None:
        self._perform(self.machine.handle_all(batch, now_ns), now_ns)

    def _take_messages(self) -> list[MasterEvent]:
        batch: list[MasterEvent] = []
        size = long_answers = 0
        parts_left = iter(range(limits.PARTS_TAKEN_MAX))
        self._is_drained, self._decoding_ns = False, 0
        for _ in range(limits.POLL_EVENTS_MAX):
            if size >= limits.CONTROL_BATCH_BYTES_MAX or long_answers >= limits.LONG_ANSWERS_TAKEN_MAX:
                break
            if self._decoding_ns > limits.REPORTS_DECODING_NS:
                break
            if self._sender is None:
                if not is_readable(self._socket):
                    self._is_drained = True
                    break
                self._sender, self._wire_bytes = self._socket.recv(zmq.NOBLOCK), 0
            if not self._take_parts(parts_left):
                break
            routing_id, frames, wire_bytes = self._sender, self._parts, self._wire_bytes
            self._sender, self._parts = None, []
            size += wire_bytes
            if self.inflow.is_cut(routing_id):
                continue
            descriptor = _descriptor_of(frames[-1])
            if descriptor is None or not (routing_id in self._known or self._is_numbered(routing_id)):
                self._unheard_count += 1
                if self._unheard_count == 1:  # Logged once, because there may be many.
                    logger.warning("dropping messages of ZMTP 1.0 or from a connection that is not a peer's")
                continue
            self._traffic.messages_received += len(frames)
            self._traffic.received_bytes += wire_bytes
            self._new_senders.append((routing_id, descriptor, wire_bytes))
            identity = ""
            if self._zap is not None:
                identity = identity_of(frames[-1])
            for event in self._events_of(routing_id, frames, identity):
                if self._zap is not None and identity not in self._zap.allowed and not _is_farewell(event):
                    continue
                if isinstance(event, PeerMessageReceived) and isinstance(event.message, (Hello, MeasurementsRequest)):
                    long_answers += 1
                if isinstance(event, PeerMessageReceived) and isinstance(event.message, CheckRequest):
                    self._answer_check(routing_id, event.host, event.message)  # It does not concern the run.
                else:
                    batch.append(event)
        return batch

    def _is_numbered(self, routing_id: bytes) -> bool:
        """True if libzmq may have numbered this connection; False: the client has named it."""
        if len(routing_id) != _ROUTING_ID_BYTES or routing_id[0] != 0:
            return False
        number = (_number_of(routing_id) - self._first_number) % 2**32
        return number <= self._accepted_count + limits.CONNECTIONS_UNCOUNTED_MAX

    def _take_parts(self, parts_left: Iterator[int]) -> bool:
        """Takes parts of the message that has begun. False: it has more parts, which the next turn takes."""
        for _ in parts_left:
            frame = self._socket.recv(copy=False)
            self._wire_bytes += self.inflow.wire_bytes(len(frame.buffer))
            if len(self._parts) <= limits.MESSAGE_PARTS_MAX:  # All others are dropped.
                self._parts.append(frame)
            if not frame.more:
                return True
        return False

    def _answer_check(self, routing_id: bytes, host: str, request: CheckRequest) -> None:
        """Answers a host that asks to be checked."""
        now_ns = time.monotonic_ns()
        is_dialling = self._dial_backs.dial(host, request.port, request.token, now_ns)
        answer = CheckAnswer(host, is_dialling, time.time_ns() // limits.MS)
        self._outgoing.add(routing_id, encode(answer), now_ns, may_wait=False)

    def _events_of(self, routing_id: bytes, frames: Sequence[zmq.Frame], identity: str) -> Iterator[MasterEvent]:
        """The events of the messages that a peer sent together."""
        if len(frames) > limits.MESSAGE_PARTS_MAX:
            yield MalformedReceived(routing_id, f"more than {limits.MESSAGE_PARTS_MAX} messages at once")
            return
        for frame in frames:
            if not frame.buffer:
                continue  # It only tells that the bytes before it were heartbeats (control/inflow.py).
            data = frame.bytes
            if is_compressed(data) and not self._may_expand(routing_id):
                answer = Refused(Refusal.UNREGISTERED, "send a Hello first")
                self._outgoing.add(routing_id, encode(answer), time.monotonic_ns(), may_wait=False)
                continue
            try:
                message = self._decoded(data)
            except (Malformed, OtherVersion) as error:
                yield MalformedReceived(routing_id, error.message)
            else:
                if isinstance(message, Hello) and len(frames) > 1:
                    yield MalformedReceived(routing_id, "a Hello together with other messages")
                    continue
                host = _host_of(frame) if isinstance(message, (Hello, CheckRequest)) else ""
                yield PeerMessageReceived(routing_id, message, host, identity)

    def _may_expand(self, routing_id: bytes) -> bool:
        """True if a peer may send a compressed message now. To decode one may take a second, so it must be expected."""
        is_expected = self.machine.standing(routing_id) is Standing.EXPECTED
        return is_expected and self._decoding_ns <= limits.REPORTS_DECODING_NS

    def _decoded(self, data: bytes) -> PeerMessage:
        """Decodes a message, and adds up how long this takes for compressed ones."""
        if not is_compressed(data):
            return decode_peer_message(data)
        begun_ns = time.monotonic_ns()
        try:
            return decode_peer_message(data)
        finally:
            self._decoding_ns += time.monotonic_ns() - begun_ns

    def _drain_monitor(self, now_ns: int) -> list[bytes]:
        """Handles the monitor's events; returns the routing ids of closed connections that had sent something."""
        closed_descriptors: list[tuple[int, int]] = []
        while is_readable(self._monitor):
            kind, descriptor = take_event(self._monitor)
            if kind in (zmq.EVENT_LISTENING, zmq.EVENT_ACCEPTED):
                self._descriptors[descriptor] = closed_in_children(Descriptor(descriptor))
                if kind == zmq.EVENT_LISTENING:
                    self.inflow.listening(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._descriptors.pop(descriptor, None)
            if self._watch is not None:
                self._watch.take(kind, descriptor, now_ns)
            generation = self._generation.get(descriptor, 0)
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted_count += 1
                self._generation[descriptor] = generation + 1 + generation % 2
                self.inflow.opened(descriptor, now_ns)
            elif kind == zmq.EVENT_DISCONNECTED and generation % 2:
                self._generation[descriptor] = generation + 1
                self.inflow.closed(descriptor)
                closed_descriptors.append((descriptor, generation))
        closed = []
        for routing_id, descriptor, wire_bytes in self._new_senders:
            if routing_id not in self._known:
                self._known.add(routing_id)
                generation = self._generation.get(descriptor, 0)
                is_open = generation % 2 == 1
                if not is_open:  # The connection closed after it had sent this.
                    generation -= 1
                    closed_descriptors.append((descriptor, generation))
                # If there is another one, the earlier of the two closed, and its descriptor was reused, before its
                # first message was taken: libzmq does not deliver messages in the order of the numbers.
                other = self._routing_id_of.get((descriptor, generation))
                if other is not None:
                    closed.append(min(other, routing_id))
                if other is None or other < routing_id:
                    self._routing_id_of[descriptor, generation] = routing_id
                    if is_open:
                        self.inflow.named(descriptor, routing_id)
            self.inflow.delivered(routing_id, wire_bytes)
        self._new_senders = []
        for key in dict.fromkeys(closed_descriptors):
            if key in self._routing_id_of:
                closed.append(self._routing_id_of.pop(key))
        self._gone.extend(closed)
        while len(self._gone) > limits.CLOSED_CONNECTIONS_MAX:
            routing_id = self._gone.popleft()
            self._known.discard(routing_id)
            self.inflow.forget(routing_id)
        return closed

    def _perform(self, effects: list[MasterEffect], now_ns: int) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                data: bytes | zmq.Frame = encode(effect.message)
                if len(effect.connections) > 1:
                    data = zmq.Frame(data, copy=True)  # All send queues share one copy.
                for connection in effect.connections:
                    assert isinstance(connection, bytes)  # They are routing ids here.
                    self._outgoing.add(connection, data, now_ns, may_wait=effect.may_wait)
            else:
                lines = self._refusals if effect.of_stranger else self._lines
                lines.write(effect.level, effect.text, now_ns)

    def _flush(self, now_ns: int) -> None:
        for routing_id, parts in self._outgoing.take(now_ns):
            self._send(routing_id, parts, now_ns)

    def _send(self, routing_id: bytes, parts: Sequence[bytes | zmq.Frame], now_ns: int) -> None:
        if routing_id in self._unreachable:
            return
        sizes = list(map(len, parts))
        if not self.inflow.may_send(routing_id, sum(map(self.inflow.wire_bytes, sizes))):
            return self._give_up(routing_id, now_ns)
        try:
            self._socket.send_multipart((routing_id, *parts), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EAGAIN:
                return self._give_up(routing_id, now_ns)
            self._unreachable[routing_id] = None
        else:
            self._traffic.messages_sent += len(parts)
            self._traffic.sent_bytes += sum(sizes)

    def _give_up(self, routing_id: bytes, now_ns: int) -> None:
        """Treats a connection with a full send queue as closed; its queue is dropped with it."""
        self.inflow.cut(routing_id, "it does not read its messages", now_ns)
        self._unreachable[routing_id] = None

    def _close(self) -> None:
        if self._outgoing.deadline_ns is not None:
            self._flush(self._outgoing.deadline_ns)
        # The monitor is not disabled: that call holds the GIL and waits for libzmq's thread, which may wait for us to
        # read the monitor.
        self._monitor.close(linger=0)
        self._own.close(linger=0)
        self._socket.close(linger=limits.LINGER_MS)
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        self._dial_backs.close()
        self._duplicates.close()
        self._close_pipe()

    def _close_pipe(self) -> None:
        with self._pipe_lock:
            self._is_ended = True
            os.close(self._wakeup)
            os.close(self.wakeup_descriptor)


def open_router(context: zmq.Context[zmq.Socket[bytes]], heartbeat_timeout_ns: int) -> zmq.Socket[bytes]:
    """Makes the socket of a master with its limits set, not bound yet."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.LINGER, limits.LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, limits.CONTROL_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, limits.CONNECT_TIMEOUT_NS // limits.MS)
    socket.setsockopt(zmq.BACKLOG, limits.LISTEN_BACKLOG)
    set_heartbeat(socket, heartbeat_timeout_ns)
    return socket


def _number_of(routing_id: bytes) -> int:
    return int.from_bytes(routing_id[1:], "big")


def set_heartbeat(socket: zmq.Socket[bytes], timeout_ns: int) -> None:
    """Makes libzmq close connections that are silent for `timeout_ns`.

    Also removes the receive high-water mark: libzmq 4.3.5 aborts the process if a heartbeat is due on a connection that
    has ended, or sent something, while its receive queue was full (docs/adr/0015).
    """
    socket.setsockopt(zmq.RCVHWM, 0)
    interval_ns = min(limits.HEARTBEAT_INTERVAL_NS, timeout_ns // 4)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, interval_ns // limits.MS))
    silence_ns = timeout_ns - interval_ns - limits.DISCONNECT_GRACE_NS
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, silence_ns // limits.MS))


def poll_timeout_ms(deadline_ns: int | None, now_ns: int) -> int | None:
    """Poll timeout until a deadline, rounded up; None: no timeout."""
    return None if deadline_ns is None else max(0, -((now_ns - deadline_ns) // limits.MS))


def _is_farewell(event: MasterEvent) -> bool:
    """True for events that count even from a peer whose key was revoked: it leaves, or acknowledges a member list."""
    return isinstance(event, PeerMessageReceived) and isinstance(event.message, (Acknowledgement, Leave))


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The descriptor of a frame's connection. None for ZMTP 1.0, which libzmq assumes where a greeting is missing."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _host_of(frame: zmq.Frame) -> str:
    try:
        return plain_host(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""
