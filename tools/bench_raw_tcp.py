"""TCP sockets that move bytes and do nothing else: what the benchmarks of zpccl compare with.

One thread, poll, non-blocking sockets with TCP_NODELAY and, within a host, the congestion control that zpccl takes
there: Cubic, or Reno where that is not allowed. An object is of one thread.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable, Mapping, Sequence

CONNECT_TIMEOUT_S = 30.0
SHARE_BYTES_MIN = 64 * 1024
"""Less than this goes over one socket: to wake more of them would cost more than it brings."""


def _choose_congestion_control(connection: socket.socket) -> None:
    if connection.getsockname()[0] != connection.getpeername()[0]:
        return
    for name in (b"cubic", b"reno"):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            continue
        return


class _Lane:
    """One socket's share of an exchange."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.out: list[memoryview] = []
        self.into: list[memoryview] = []

    def events(self) -> int:
        """What to poll for."""
        return (select.POLLOUT if self.out else 0) | (select.POLLIN if self.into else 0)

    def send(self) -> None:
        """Sends what the socket takes."""
        try:
            sent = self.connection.send(self.out[0])
        except BlockingIOError:
            return
        self.out[0] = self.out[0][sent:]
        if not self.out[0]:
            self.out.pop(0)

    def receive(self) -> None:
        """Receives what has come.

        Raises:
            ConnectionError: the other side closed the connection.
        """
        try:
            received = self.connection.recv_into(self.into[0])
        except BlockingIOError:
            return
        if received == 0:
            raise ConnectionError("the neighbour closed the connection")
        self.into[0] = self.into[0][received:]
        if not self.into[0]:
            self.into.pop(0)


def _share_out(lanes: Sequence[_Lane], data: memoryview, times: int = 1) -> int:
    """Gives each of the lanes a part to send; returns how many of them have one."""
    count = min(len(lanes), max(1, len(data) // SHARE_BYTES_MIN))
    for index, piece in enumerate(_parts(data, count)):
        lanes[index].out = [piece] * times
    return count


def _share_in(lanes: Sequence[_Lane], memory: memoryview, count: int, times: int = 1) -> None:
    """Gives each of the first `count` lanes the place of a part to receive."""
    for index, piece in enumerate(_parts(memory, count)):
        lanes[index].into = [piece] * times


def _parts(data: memoryview, count: int) -> list[memoryview]:
    bounds = [len(data) * i // count for i in range(count + 1)]
    return [data[bounds[index] : bounds[index + 1]] for index in range(count)]


def _move(lanes: Iterable[_Lane]) -> None:
    """Sends and receives until no lane has anything left to do."""
    by_descriptor = {lane.connection.fileno(): lane for lane in lanes}
    poller = select.poll()
    masks = {fd: lane.events() for fd, lane in by_descriptor.items() if lane.events()}
    for fd, mask in masks.items():
        poller.register(fd, mask)
    for lane in by_descriptor.values():
        if lane.out:
            lane.send()
    while masks:
        for fd, event in poller.poll():
            lane = by_descriptor[fd]
            if event & select.POLLOUT and lane.out:
                lane.send()
            if event & ~select.POLLOUT and lane.into:
                lane.receive()
            mask = lane.events()
            if mask == masks[fd]:
                continue
            if mask:
                poller.modify(fd, mask)
                masks[fd] = mask
            else:
                poller.unregister(fd)
                del masks[fd]


def _prepare(connection: socket.socket) -> _Lane:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _choose_congestion_control(connection)
    return _Lane(connection)


class RawTcpRing:
    """The sockets of one process to its two neighbours in the ring; with two processes, the same sockets both ways.

    Args:
        rank: place in the ring.
        peers: processes in the ring, 2 or more.
        connections: sockets to each neighbour.
        host: the address to listen at.
    """

    def __init__(self, rank: int, peers: int, connections: int, host: str = "127.0.0.1") -> None:
        self.rank, self.peers, self.connections = rank, peers, connections
        self._listener = socket.create_server((host, 0), backlog=connections)
        self._next: list[_Lane] = []
        self._previous: list[_Lane] = []
        self._lanes: dict[int, _Lane] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Where this process listens."""
        host, port = self._listener.getsockname()
        return host, port

    def connect(self, next_address: tuple[str, int]) -> None:
        """Connects to the next process and accepts the previous one; all processes must call it."""
        if self.peers > 2 or self.rank == 0:
            for index in range(self.connections):
                connection = socket.create_connection(next_address, CONNECT_TIMEOUT_S)
                connection.sendall(bytes([index]))
                self._next.append(_Lane(connection))
        if self.peers > 2 or self.rank == 1:
            self._listener.settimeout(CONNECT_TIMEOUT_S)
            accepted: dict[int, _Lane] = {}
            while len(accepted) < self.connections:
                connection, _ = self._listener.accept()
                connection.settimeout(CONNECT_TIMEOUT_S)
                accepted[connection.recv(1)[0]] = _Lane(connection)
            self._previous = [accepted[index] for index in range(self.connections)]
        self._next = self._next or self._previous
        self._previous = self._previous or self._next
        for lane in {*self._next, *self._previous}:
            lane.connection.setblocking(False)
            lane.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _choose_congestion_control(lane.connection)
            self._lanes[lane.connection.fileno()] = lane

    def exchange(self, out: memoryview, into: memoryview, times: int) -> None:
        """Sends `out` to the next process, `times` over, while it receives as much from the previous one to `into`.

        Args:
            out: bytes, as long as `into`.
            into: bytes.
            times: how often, without a pause.
        """
        count = _share_out(self._next, out, times)
        _share_in(self._previous, into, count, times)
        _move(self._lanes.values())

    def close(self) -> None:
        """Closes all sockets."""
        self._listener.close()
        for lane in self._lanes.values():
            lane.connection.close()


class RawTcpCopy:
    """The sockets of one process that copies bytes to others, or gets copies of them.

    Args:
        number: of this process, below 256.
        connections: sockets between a sender and a receiver.
        host: the address to listen at.
    """

    def __init__(self, number: int, connections: int, host: str = "127.0.0.1") -> None:
        self.number, self.connections = number, connections
        self._listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        self._lanes: dict[int, list[_Lane]] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Where this process listens."""
        host, port = self._listener.getsockname()
        return host, port

    def connect(self, receivers: Mapping[int, tuple[str, int]]) -> None:
        """Connects a sender to its receivers: addresses by number."""
        for number, address in receivers.items():
            self._lanes[number] = []
            for index in range(self.connections):
                connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
                connection.sendall(bytes([self.number, index]))
                self._lanes[number].append(_prepare(connection))

    def accept(self, senders: Iterable[int]) -> None:
        """Waits until all senders of these numbers have connected to this receiver."""
        missing = {(number, index) for number in senders for index in range(self.connections)}
        accepted: dict[tuple[int, int], _Lane] = {}
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        while missing:
            connection, _ = self._listener.accept()
            connection.settimeout(CONNECT_TIMEOUT_S)
            number, index = connection.recv(2, socket.MSG_WAITALL)
            missing.remove((number, index))
            accepted[number, index] = _prepare(connection)
        for number, index in sorted(accepted):
            self._lanes.setdefault(number, []).append(accepted[number, index])

    def send(self, pieces: Mapping[int, memoryview], connections: int) -> None:
        """Sends bytes to receivers, by number, over the first `connections` sockets to each."""
        for number, piece in pieces.items():
            _share_out(self._lanes[number][:connections], piece)
        _move(lane for lanes in self._lanes.values() for lane in lanes)

    def receive(self, pieces: Mapping[int, memoryview], connections: int) -> None:
        """Receives into memory what senders send, by number; the other side of `send`."""
        for number, piece in pieces.items():
            lanes = self._lanes[number][:connections]
            _share_in(lanes, piece, min(len(lanes), max(1, len(piece) // SHARE_BYTES_MIN)))
        _move(lane for lanes in self._lanes.values() for lane in lanes)

    def close(self) -> None:
        """Closes all sockets."""
        self._listener.close()
        for lanes in self._lanes.values():
            for lane in lanes:
                lane.connection.close()
