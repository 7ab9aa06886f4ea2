"""A ring of TCP sockets that moves bytes both ways at once: what bench_allreduce.py compares with.

One thread, poll, non-blocking sockets with TCP_NODELAY and else the system's defaults. An object is of one thread.
"""

from __future__ import annotations

import select
import socket

CONNECT_TIMEOUT_S = 30.0
SHARE_BYTES_MIN = 64 * 1024
"""Less than this goes over one socket: to wake more of them would cost more than it brings."""


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


class RawTcpRing:
    """The sockets of one process to its two neighbours in the ring; with two processes, the same sockets both ways.

    Args:
        rank: place in the ring.
        peers: processes in the ring, 2 or more.
        connections: sockets to each neighbour.
    """

    def __init__(self, rank: int, peers: int, connections: int) -> None:
        self.rank, self.peers, self.connections = rank, peers, connections
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=connections)
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
            self._lanes[lane.connection.fileno()] = lane

    def exchange(self, out: memoryview, into: memoryview, times: int) -> None:
        """Sends `out` to the next process, `times` over, while it receives as much from the previous one to `into`.

        Args:
            out: bytes, as long as `into`.
            into: bytes.
            times: how often, without a pause.
        """
        count = min(self.connections, max(1, len(out) // SHARE_BYTES_MIN))
        bounds = [len(out) * i // count for i in range(count + 1)]
        for index in range(count):
            piece = slice(bounds[index], bounds[index + 1])
            self._next[index].out = [out[piece] for _ in range(times)]
            self._previous[index].into = [into[piece] for _ in range(times)]
        poller = select.poll()
        masks = {fd: lane.events() for fd, lane in self._lanes.items() if lane.events()}
        for fd, mask in masks.items():
            poller.register(fd, mask)
        for lane in self._next[:count]:
            lane.send()
        while masks:
            for fd, event in poller.poll():
                lane = self._lanes[fd]
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

    def close(self) -> None:
        """Closes all sockets."""
        self._listener.close()
        for lane in self._lanes.values():
            lane.connection.close()
