"""The shell of the master: a ROUTER socket, a timer, a log.

One thread, the one in `run()`, owns the sockets and the machine. `stop()` and `reload()` may be called from any thread
and from a signal handler: they only write to a pipe, under a lock that keeps the pipe from being closed meanwhile.

Loss of a connection. libzmq's socket monitor tells which descriptor was closed, and each message tells which descriptor
it came from. Descriptors are used again by later connections, so each ACCEPTED begins a new generation of its
descriptor. Messages are taken from the socket first and the monitor is drained after that: whatever the monitor has to
say about the senders of these messages is then known. A connection's closing is told to the machine after its messages.

With a secret, libzmq admits only connections whose key the ZAP handler allows, and each message carries that key. A
connection whose key was taken from the allow list cannot be closed from here; its messages are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from dataclasses import replace

import zmq
from zmq.utils.monitor import parse_monitor_message

from zpccl import limits
from zpccl.control.addresses import format_address, parse_address
from zpccl.control.keys import MasterKeys, read_allowed
from zpccl.control.waiter import Waiter
from zpccl.control.zap import HandshakeWatch, RefusalLog, ZapHandler, identity_of, secure
from zpccl.errors import InvalidArgument, InvalidUsage
from zpccl.protocol.effects import Broadcast, MasterEffect
from zpccl.protocol.events import (
    ConnectionClosed,
    KeysRevoked,
    MalformedReceived,
    MasterEvent,
    PeerMessageReceived,
    Tick,
)
from zpccl.protocol.master import MasterMachine, MasterOptions
from zpccl.protocol.messages import Hello, Malformed, OtherVersion, decode_peer_message, encode

logger = logging.getLogger("zpccl.master")


class MasterLoop:
    """Runs a master.

    Args:
        listen: "host:port" to listen on; port 0 takes a free one.
        options: times of the master.
        heartbeat_timeout_ns: a host that is silent for so long is lost.
        keys: who may connect; None lets everybody in.
        recovery_grace: seconds that it waits for peers of an earlier master before it begins a new run; None: the
            default of `options`.
        straggler_timeout: seconds after which a peer is removed whose vote others wait for; None: as `options` say.

    Attributes:
        wakeup_descriptor: a byte written to it wakes the loop; for `signal.set_wakeup_fd`.

    Raises:
        InvalidArgument: the address is malformed or not of this host.
        InvalidUsage: the port is taken.
    """

    def __init__(
        self,
        listen: str,
        options: MasterOptions | None = None,
        heartbeat_timeout_ns: int = limits.HEARTBEAT_TIMEOUT_NS,
        keys: MasterKeys | None = None,
        recovery_grace: float | None = None,
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
        self.machine = MasterMachine(secrets.token_bytes(16), options=options)
        self.machine.gather(time.monotonic_ns())
        self._context = zmq.Context()
        self._wakeup, self.wakeup_descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipe_lock = threading.RLock()  # A signal handler may find its own thread in stop().
        self._is_ended = False
        self._is_stopping = False
        self._is_reloading = False
        self._zap: ZapHandler | None = None
        self._watch: HandshakeWatch | None = None
        self._generation: dict[int, int] = {}  # By descriptor; even while it is closed, odd while it is open.
        self._routing_id_of: dict[tuple[int, int], bytes] = {}  # By descriptor and generation.
        self._known: set[bytes] = set()  # Routing ids of open connections that have sent something.
        self._new_senders: list[tuple[bytes, int]] = []  # Routing id and descriptor of the messages just taken.
        self._unreachable: list[bytes] = []
        self._nameless_count = 0
        watched = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        try:
            if keys is not None:
                refusals = RefusalLog(logger)
                self._zap = ZapHandler(self._context, keys.allowed, refusals)
                self._watch = HandshakeWatch(refusals)
                watched |= HandshakeWatch.EVENTS
            self._socket = self._open_socket(host, port, heartbeat_timeout_ns)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._close_pipe()
            kind = InvalidUsage if error.errno == errno.EADDRINUSE else InvalidArgument
            raise kind(f"cannot listen on {listen}: {error.strerror}") from error
        self._monitor = self._socket.get_monitor_socket(watched)
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = format_address(host, int(endpoint.rpartition(":")[2]))
        """Where the master listens, "host:port"."""

    def _open_socket(self, host: str, port: int, heartbeat_timeout_ns: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, limits.LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, limits.CONTROL_QUEUE_MESSAGES_MAX)
        socket.setsockopt(zmq.RCVHWM, limits.CONTROL_RECEIVED_MESSAGES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, limits.CONNECT_TIMEOUT_NS // limits.MS)
        socket.setsockopt(zmq.BACKLOG, limits.LISTEN_BACKLOG)
        set_heartbeat(socket, heartbeat_timeout_ns)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        if self._keys is not None:
            secure(socket, self._keys)
        socket.bind(f"tcp://{'*' if host == '0.0.0.0' else format_address(host, port).rpartition(':')[0]}:{port}")
        return socket

    def run(self) -> None:
        """Serves until `stop()`."""
        try:
            with contextlib.closing(Waiter()) as waiter:
                waiter.register(self._socket)
                waiter.register(self._monitor)
                waiter.register(self._wakeup)
                if self._zap is not None:
                    waiter.register(self._zap.socket)
                while not self._is_stopping:
                    waiter.wait(poll_timeout_ms(self.machine.deadline_ns(), time.monotonic_ns()))
                    self._run_once(time.monotonic_ns())
        finally:
            self._close()

    def stop(self) -> None:
        """Makes `run()` return. Safe from any thread and from signal handlers."""
        self._is_stopping = True
        self._wake()

    def reload(self) -> None:
        """Reads the allow list again; peers that are on it no more are removed. Safe as `stop()` is."""
        self._is_reloading = True
        self._wake()

    def _wake(self) -> None:
        with self._pipe_lock:
            if not self._is_ended:
                with contextlib.suppress(BlockingIOError):  # Full: the loop will wake up.
                    os.write(self.wakeup_descriptor, b"\0")

    def _run_once(self, now_ns: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, limits.POLL_EVENTS_MAX)
        if self._is_reloading:
            self._is_reloading = False
            self._reload(now_ns)
        if self._zap is not None:
            self._zap.serve(now_ns)
        batch: list[MasterEvent] = []
        closed: list[bytes] = []
        while True:  # Until nothing closed after the messages were taken: what it said last may be "leave", and counts.
            batch += self._take_messages()
            closed_now = self._drain_monitor(now_ns)
            closed += closed_now
            if not closed_now:
                break
        for event in batch:
            self._handle(event, now_ns)
        for routing_id in closed:
            self._handle(ConnectionClosed(routing_id), now_ns)
        deadline_ns = self.machine.deadline_ns()
        if deadline_ns is not None and now_ns >= deadline_ns:
            self._handle(Tick(), now_ns)

    def _reload(self, now_ns: int) -> None:
        if self._zap is None or self._keys is None or self._keys.allow_file is None:
            return logger.warning("there is no allow list to read again")
        try:
            allowed = read_allowed(self._keys.allow_file)
        except InvalidArgument as error:
            return logger.error("the old allow list stays: %s", error.message)
        revoked = {key: name for key, name in self._zap.allowed.items() if key not in allowed}
        self._zap.allowed = allowed
        names = ", ".join(revoked.values()) or "none"
        logger.info("%d keys are allowed now; no longer: %s", len(allowed), names)
        self._handle(KeysRevoked(revoked), now_ns)

    def _handle(self, event: MasterEvent, now_ns: int) -> None:
        self._perform(self.machine.handle(event, now_ns))
        while self._unreachable:
            self._perform(self.machine.handle(ConnectionClosed(self._unreachable.pop()), now_ns))

    def _take_messages(self) -> list[MasterEvent]:
        batch: list[MasterEvent] = []
        size = 0
        for _ in range(limits.POLL_EVENTS_MAX):
            if size >= limits.CONTROL_BATCH_BYTES_MAX:
                break
            try:
                routing_id = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames = self._socket.recv_multipart(copy=False)
            descriptor = _descriptor_of(frames[-1])
            if descriptor is None:
                self._nameless_count += 1
                if self._nameless_count == 1:  # Whoever sends such bytes may send many.
                    logger.warning("messages of ZMTP 1.0, or bytes that look like them, are dropped")
                continue
            size += len(frames[-1].buffer)
            self._new_senders.append((routing_id, descriptor))
            identity = ""
            if self._zap is not None:
                identity = identity_of(frames[-1])
                if identity not in self._zap.allowed:
                    continue
            batch.append(self._event_of(routing_id, frames, identity))
        return batch

    def _event_of(self, routing_id: bytes, frames: list[zmq.Frame], identity: str) -> MasterEvent:
        if len(frames) != 1:
            return MalformedReceived(routing_id, f"{len(frames)} frames where one is expected")
        try:
            message = decode_peer_message(frames[0].bytes)
        except (Malformed, OtherVersion) as error:
            return MalformedReceived(routing_id, error.message)
        host = _host_of(frames[0]) if isinstance(message, Hello) else ""
        return PeerMessageReceived(routing_id, message, host, identity)

    def _drain_monitor(self, now_ns: int) -> list[bytes]:
        """Takes note of connections opened and closed; returns the closed ones that had sent something."""
        closed_descriptors: list[tuple[int, int]] = []
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if self._watch is not None:
                self._watch.take(event["event"], event["value"], now_ns)
            descriptor = event["value"]
            generation = self._generation.get(descriptor, 0)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._generation[descriptor] = generation + 1 + generation % 2
            elif event["event"] == zmq.EVENT_DISCONNECTED and generation % 2:
                self._generation[descriptor] = generation + 1
                closed_descriptors.append((descriptor, generation))
        for routing_id, descriptor in self._new_senders:
            if routing_id not in self._known:
                self._known.add(routing_id)
                generation = self._generation.get(descriptor, 0)
                if generation % 2 == 0:  # Closed already, after it had sent this.
                    generation -= 1
                    closed_descriptors.append((descriptor, generation))
                self._routing_id_of[descriptor, generation] = routing_id
        self._new_senders = []
        closed = []
        for key in dict.fromkeys(closed_descriptors):
            if key in self._routing_id_of:
                closed.append(self._routing_id_of.pop(key))
        self._known.difference_update(closed)
        return closed

    def _perform(self, effects: list[MasterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                data = encode(effect.message)
                for connection in effect.connections:
                    self._send(connection, data)  # type: ignore[arg-type]  # Connections are routing ids here.
            else:
                logger.log(effect.level, "%s", effect.text)

    def _send(self, routing_id: bytes, data: bytes) -> None:
        try:
            self._socket.send_multipart((routing_id, data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EAGAIN:
                logger.warning("a peer does not read its messages; it is dropped")
            self._unreachable.append(routing_id)

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=limits.LINGER_MS)
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        self._close_pipe()

    def _close_pipe(self) -> None:
        with self._pipe_lock:
            self._is_ended = True
            os.close(self._wakeup)
            os.close(self.wakeup_descriptor)


def set_heartbeat(socket: zmq.Socket[bytes], timeout_ns: int) -> None:
    """Makes libzmq close a connection from which nothing came for `timeout_ns`."""
    interval_ns = min(limits.HEARTBEAT_INTERVAL_NS, timeout_ns // 4)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, interval_ns // limits.MS))
    silence_ns = timeout_ns - interval_ns - limits.DISCONNECT_GRACE_NS
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, silence_ns // limits.MS))


def poll_timeout_ms(deadline_ns: int | None, now_ns: int) -> int | None:
    """How long to poll until a deadline, rounded up; None means for ever."""
    return None if deadline_ns is None else max(0, -((now_ns - deadline_ns) // limits.MS))


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """Of the connection that a frame came on; None of peers of ZMTP 1.0: to libzmq, all who do not say a greeting."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _host_of(frame: zmq.Frame) -> str:
    try:
        host = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
    return host.removeprefix("::ffff:")
