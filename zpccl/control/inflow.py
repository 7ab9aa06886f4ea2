"""Bounds the memory that each connection costs the master, because libzmq does not.

A ROUTER socket buffers received messages and message parts until they are taken: the receive
high-water mark counts whole messages only, and does not work with heartbeats (docs/adr/0015); MAXMSGSIZE bounds one
part; an empty part takes 2 bytes on the wire and 64 in memory. The send queue is bounded by a number of messages of any
size. A silent connection is kept forever.

So this module asks the kernel (TCP_INFO) how many bytes a connection has received, and how many its other end has
acknowledged. Bytes received minus the bytes of messages taken from the socket are buffered by libzmq, or were
heartbeats. Bytes sent and not acknowledged are queued. The bound of a connection depends on its standing: a stranger
may send little more than a Hello, and only for a while. A connection that exceeds its bound is shut down. An honest
peer reconnects then, as after any broken connection, and loses nothing.

All connections are checked at an interval that grows with their number, so that checking takes at most 4% of a CPU.
There is no event to wait for: libzmq signals whole messages only, and epoll does not report what libzmq has read.

How much libzmq still holds of closed connections is unknown, because the kernel no longer counts for them. So if too
many unregistered connections have closed since the socket was last found empty, the kernel drops all packets to the
listening port until the socket is found empty again: no connection is made, and hosts try again a second later. Open
connections are served.

Heartbeats are never delivered, and would add up to more than any bound within a day. Bytes that had arrived when the
socket was last found empty cannot belong to a message that begins later. So once another message has come after that,
those bytes that no message covers were heartbeats, up to the greatest possible number of heartbeats. A peer that has
nothing to say sends an empty message now and then; otherwise its heartbeats alone would reach a bound in the end.

Ownership. libzmq owns the descriptors and closes them at any time; the next file may then get the same number. So every
change is made on a duplicate whose kernel socket cookie was compared. The descriptor number of that duplicate is
reserved: if none were free, nobody could shut connections down, and they would keep all descriptors forever. Only the
thread of the master's loop uses this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zpccl import limits
from zpccl.control.addresses import other_end
from zpccl.control.descriptors import share_of_descriptors
from zpccl.control.forks import closed_in_children
from zpccl.observe.logs import RefusalLog
from zpccl.protocol.membership import Standing

_TCP_INFO_BYTES = 136
_COUNTS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received (linux/tcp.h)
_COUNTS_OFFSET = 120
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_COOKIE = 26, 27, 57
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
"""A packet filter (linux/filter.h) of one instruction, "return 0": it drops every packet."""
_CURVE_MESSAGE_BYTES = 33
"""Name, nonce, authenticator and flags around a part (rfc.zeromq.org/spec/26)."""
_OUTSIDERS = (Standing.STRANGER, Standing.PENDING)
_UNREGISTERED = (Standing.STRANGER, Standing.EXPECTED)
_HELD_BYTES_MAX = {
    Standing.STRANGER: limits.STRANGER_BYTES_MAX,
    Standing.EXPECTED: limits.MEMBER_BYTES_MAX,
    Standing.PENDING: limits.PENDING_BYTES_MAX,
    Standing.MEMBER: limits.MEMBER_BYTES_MAX,
}


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection, from its acceptance to its end."""

    descriptor: int
    cookie: bytes
    address: str
    accepted_ns: int
    since_ns: int
    """When it was accepted, or when it lost its registration."""
    routing_id: bytes | None = None
    standing: Standing = Standing.STRANGER
    received: int = 0
    delivered: int = 0
    """Bytes of messages taken from the socket, framing included."""
    heartbeats: int = 0
    """Bytes received that certainly belong to no message."""
    stranger_base: int = 0
    """Value of `received` when it became a stranger."""
    mark: int = 0
    """Value of `received` at a time after which the socket was found empty `mark_drains` times."""
    mark_drains: int = 0
    has_spoken: bool = False
    """A message has come since the mark."""
    sent: int = 0
    acknowledged: int = 0
    is_cut: bool = False

    @property
    def held(self) -> int:
        """Bytes that count against its bound."""
        if self.standing is Standing.STRANGER:
            return self.received - self.stranger_base
        return max(0, self.received - self.delivered - self.heartbeats)

    @property
    def unsent_bytes_max(self) -> int:
        """Bound on the bytes that are queued to it."""
        return limits.MEMBER_UNSENT_BYTES_MAX if self.standing is Standing.MEMBER else limits.OUTSIDER_UNSENT_BYTES_MAX


class Inflow:
    """Tracks the connections of a master and shuts down those that exceed their bounds.

    Args:
        port: the master's port; other sockets are ignored.
        is_secure: connections use CURVE, which adds framing.
        standing_of: maps a routing id to the standing of its connection.
        refusals: logs connections that are shut down.
        duplicates: duplicates the descriptors of connections.
    """

    def __init__(
        self,
        port: int,
        is_secure: bool,
        standing_of: Callable[[bytes], Standing],
        refusals: RefusalLog,
        duplicates: Duplicates,
    ) -> None:
        self._port = port
        self._message_bytes = _CURVE_MESSAGE_BYTES if is_secure else 0
        self._standing_of = standing_of
        self._refusals = refusals
        self._duplicates = duplicates
        self._connections: dict[int, _Connection] = {}  # Open ones, by descriptor.
        self._by_routing_id: dict[bytes, _Connection] = {}
        self._cut_ids: set[bytes] = set()  # Routing ids of connections shut down; libzmq may still hold messages.
        self._unregistered: dict[_Connection, None] = {}  # In order of `since_ns`.
        self._drains = 0
        self._closed_count = 0  # Unregistered ones that have closed since the socket was last found empty.
        self._listener: tuple[int, bytes] | None = None  # Descriptor and cookie.
        self.is_holding_back = False
        """The kernel makes no connections to the port."""
        self._due_ns = 0
        self._strangers_max = min(limits.STRANGERS_MAX, share_of_descriptors(2))

    def deadline_ns(self) -> int | None:
        """Time of the next `look`; None while there are no connections and the port is not held back."""
        return self._due_ns if self._connections or self.is_holding_back else None

    def wire_bytes(self, size: int) -> int:
        """Size on the wire of a message part of `size` bytes."""
        size += self._message_bytes
        return size + (2 if size < 256 else 9)

    # --- Reports of the loop ----------------------------------------------------------------------------------------

    def listening(self, descriptor: int) -> None:
        """This is the listening socket of the port."""
        with contextlib.suppress(OSError), self._duplicates.of(descriptor) as listener:
            self._listener = descriptor, listener.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)

    def opened(self, descriptor: int, now_ns: int) -> None:
        """A connection was accepted. It may have closed since, and its descriptor may belong to another file."""
        self._remove(descriptor)
        with contextlib.suppress(OSError), self._duplicates.of(descriptor) as connection:
            if connection.family == socket.AF_UNIX or connection.getsockname()[1] != self._port:
                return
            cookie = connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
            opened = _Connection(descriptor, cookie, other_end(connection), now_ns, now_ns)
            self._connections[descriptor] = opened
            self._unregistered[opened] = None

    def closed(self, descriptor: int) -> None:
        """A connection has ended."""
        connection = self._connections.get(descriptor)
        if connection is None or connection in self._unregistered or connection.is_cut:
            self._closed_count += 1
            if self._closed_count > limits.CLOSED_STRANGERS_MAX and not self.is_holding_back:
                self._hold_back(True)
        self._remove(descriptor)

    def _remove(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            self._unregistered.pop(connection, None)
            if connection.routing_id is not None:
                self._by_routing_id.pop(connection.routing_id, None)

    def named(self, descriptor: int, routing_id: bytes) -> None:
        """The first message of an open connection has come, with this routing id."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            if connection.routing_id is not None:  # That of an earlier connection with this descriptor.
                self._by_routing_id.pop(connection.routing_id, None)
            connection.routing_id = routing_id
            self._by_routing_id[routing_id] = connection
            if connection.is_cut:
                self._cut_ids.add(routing_id)

    def delivered(self, routing_id: bytes, wire_bytes: int) -> None:
        """A message was taken from the socket."""
        connection = self._by_routing_id.get(routing_id)
        if connection is not None:
            connection.delivered += wire_bytes
            if self._drains > connection.mark_drains:
                connection.has_spoken = True

    def drained(self) -> None:
        """The socket was found empty."""
        self._drains += 1
        self._cut_ids.intersection_update(self._by_routing_id)
        self._closed_count = 0
        if self.is_holding_back:
            self._hold_back(False)

    def forget(self, routing_id: bytes) -> None:
        """From now on, messages that libzmq may still hold of a closed connection are treated like a stranger's."""
        self._cut_ids.discard(routing_id)

    def is_cut(self, routing_id: bytes) -> bool:
        """True for a connection that was shut down, while libzmq may still hold its messages."""
        return routing_id in self._cut_ids

    def may_send(self, routing_id: bytes, wire_bytes: int) -> bool:
        """Accounts for a message to be sent. False: too much is queued, and the connection is shut down."""
        connection = self._by_routing_id.get(routing_id)
        if connection is None:
            return True
        connection.sent += wire_bytes
        if connection.sent - connection.acknowledged <= connection.unsent_bytes_max:
            return True
        self._measure(connection)
        return connection.sent - connection.acknowledged <= connection.unsent_bytes_max

    def cut(self, routing_id: bytes, reason: str, now_ns: int) -> None:
        """Shuts a connection down."""
        connection = self._by_routing_id.get(routing_id)
        if connection is not None:
            self._cut(connection, reason, now_ns)

    # --- Checks -----------------------------------------------------------------------------------------------------

    def look(self, now_ns: int) -> None:
        """If it is time, checks all connections and shuts down those beyond their bounds. Called in each loop turn."""
        if now_ns < self._due_ns or not (self._connections or self.is_holding_back):
            return
        self._due_ns = now_ns + limits.INFLOW_INTERVAL_NS
        self._due_ns += len(self._connections) * limits.INFLOW_INTERVAL_PER_CONNECTION_NS
        total = outsiders = 0
        for connection in self._connections.values():
            if connection.is_cut:
                continue
            before = connection.received
            self._measure(connection)
            if connection.received != before:
                self._look_at(connection, now_ns)
            total += connection.held
            if connection.standing in _OUTSIDERS:
                outsiders += connection.held
        if outsiders > limits.OUTSIDERS_BYTES_MAX:
            self._bound_sum(_OUTSIDERS, limits.OUTSIDERS_BYTES_MAX, now_ns)
        if total > limits.CONNECTIONS_BYTES_MAX:
            self._bound_sum(tuple(Standing), limits.CONNECTIONS_BYTES_MAX, now_ns)
        self._bound_strangers(now_ns)

    def _look_at(self, connection: _Connection, now_ns: int) -> None:
        """Checks a connection that has received bytes since the last check."""
        self._judge(connection, now_ns)
        if connection.has_spoken:
            seconds = (now_ns - connection.accepted_ns) / limits.SECOND
            possible = limits.HANDSHAKE_BYTES_MAX + int(seconds * limits.HEARTBEAT_BYTES_PER_SECOND_MAX)
            certain = min(connection.mark - connection.delivered, possible)
            connection.heartbeats = max(connection.heartbeats, certain)
        connection.mark, connection.mark_drains, connection.has_spoken = connection.received, self._drains, False
        if connection.held > _HELD_BYTES_MAX[connection.standing]:
            what = "a stranger" if connection.standing is Standing.STRANGER else f"a {connection.standing.value}"
            reason = f"it has sent {connection.held} bytes that belong to no complete message, too many for {what}"
            self._cut(connection, reason, now_ns)

    def _judge(self, connection: _Connection, now_ns: int) -> None:
        """Updates the standing of a connection."""
        was, routing_id = connection.standing, connection.routing_id
        standing = Standing.STRANGER if routing_id is None else self._standing_of(routing_id)
        connection.standing = standing
        if standing not in _UNREGISTERED:
            self._unregistered.pop(connection, None)
        elif connection not in self._unregistered:
            connection.since_ns = now_ns
            self._unregistered[connection] = None
        if standing is Standing.STRANGER and was is not standing:
            connection.stranger_base = connection.received

    def _bound_sum(self, standings: tuple[Standing, ...], bytes_max: int, now_ns: int) -> None:
        found = [c for c in self._connections.values() if c.standing in standings and not c.is_cut]
        total = sum(connection.held for connection in found)
        for connection in sorted(found, key=lambda connection: connection.held, reverse=True):
            if total <= bytes_max:
                break
            reason = f"it has sent the most of {total} bytes that belong to no complete message"
            self._cut(connection, reason, now_ns)
            total -= connection.held

    def _bound_strangers(self, now_ns: int) -> None:
        """Shuts down strangers after STRANGER_TIMEOUT, peers that are to report later, and the oldest of too many."""
        for connection in list(self._unregistered):
            is_late = now_ns - connection.since_ns >= limits.STRANGER_TIMEOUT_NS
            if not is_late and len(self._unregistered) <= self._strangers_max:
                break
            self._judge(connection, now_ns)
            if connection not in self._unregistered:
                continue
            may_wait = now_ns - connection.accepted_ns < limits.EXPECTED_TIMEOUT_NS
            if is_late and may_wait and connection.standing is Standing.EXPECTED:
                connection.since_ns = now_ns
                self._unregistered[connection] = self._unregistered.pop(connection)  # Behind all others.
                continue
            reason = "it has not registered" if is_late else "too many connections have not registered"
            self._cut(connection, reason, now_ns)

    def _hold_back(self, is_holding_back: bool) -> None:
        """Makes the kernel drop all packets to the listening port, or accept them again."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError), self._duplicates.of(*self._listener) as listener:
            if is_holding_back:
                program = struct.pack("HP", 1, ctypes.addressof(_DROP))
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            else:
                listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self.is_holding_back = is_holding_back

    @staticmethod
    def _measure(connection: _Connection) -> None:
        """Reads the counts from the kernel; leaves them if the descriptor is not a TCP socket by now."""
        with contextlib.suppress(OSError, struct.error):
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection.descriptor)
            try:
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            finally:
                borrowed.detach()
            connection.acknowledged, connection.received = _COUNTS.unpack_from(info, _COUNTS_OFFSET)
            connection.sent = max(connection.sent, connection.acknowledged)  # Heartbeats are acknowledged, too.

    def _cut(self, connection: _Connection, reason: str, now_ns: int) -> None:
        if connection.is_cut:
            return
        connection.is_cut = True  # libzmq will report its end.
        self._unregistered.pop(connection, None)
        if connection.routing_id is not None:
            self._cut_ids.add(connection.routing_id)
        with contextlib.suppress(OSError), self._duplicates.of(connection.descriptor, connection.cookie) as pinned:
            pinned.shutdown(socket.SHUT_RDWR)
            self._refusals.add(f"{connection.address}: {reason}", now_ns)


class Duplicates:
    """Duplicates descriptors, one at a time, to a reserved number. So it works even when no other number is free."""

    def __init__(self) -> None:
        self._nothing = socket.socket()
        try:
            self._reserved = closed_in_children(self._nothing.dup())
        except BaseException:
            self._nothing.close()
            raise

    @contextlib.contextmanager
    def of(self, descriptor: int, cookie: bytes | None = None) -> Iterator[socket.socket]:
        """A duplicate of a descriptor as a socket, which stays valid if libzmq closes the original.

        Raises:
            OSError: the descriptor is closed, or not a socket, or not the one with this cookie.
        """
        reserved = self._reserved.fileno()
        os.dup2(descriptor, reserved, inheritable=False)
        try:
            found = socket.socket(fileno=reserved)
            try:
                if cookie is not None and found.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8) != cookie:
                    raise OSError(errno.ESTALE, "the descriptor belongs to another socket now")
                yield found
            finally:
                found.detach()
        finally:
            os.dup2(self._nothing.fileno(), reserved, inheritable=False)

    def close(self) -> None:
        """Gives the reserved number back."""
        self._reserved.close()
        self._nothing.close()
