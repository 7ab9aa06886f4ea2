"""Plain TCP transfers, as a baseline for zpccl.

One thread, poll, non-blocking sockets with TCP_NODELAY and, within a host, the congestion control that zpccl uses
there: CUBIC, or Reno if that is not permitted. An object belongs to one thread.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable, Mapping, Sequence

CONNECT_TIMEOUT_S = 30.0
SHARE_BYTES_MIN = 64 * 1024
"""Minimum per socket: with less, waking more sockets costs more than it gains."""


class _Lane:
    """One socket's share of a transfer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.out: list[memoryview] = []
        self.into: list[memoryview] = []
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _choose_congestion_control(connection)

    def events(self) -> int:
        """The poll events that it waits for."""
        return (select.POLLOUT if self.out else 0) | (select.POLLIN if self.into else 0)

    def send(self) -> None:
        """Sends as much as the socket takes."""
        try:
            sent = self.connection.send(self.out[0])
        except BlockingIOError:
            return
        self.out[0] = self.out[0][sent:]
        if not self.out[0]:
            self.out.pop(0)

    def receive(self) -> None:
        """Receives as much as has arrived.

        Raises:
            ConnectionError: the other side closed the connection.
        """
        try:
            received = self.connection.recv_into(self.into[0])
        except BlockingIOError:
            return
        if received == 0:
            raise ConnectionError("the other process closed the connection")
        self.into[0] = self.into[0][received:]
        if not self.into[0]:
            self.into.pop(0)


class RawTcp:
    """The sockets of one process to others; between two processes they are used in both directions.

    Args:
        number: of this process, below 256.
        connections: sockets between two processes, below 256.
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

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connects to other processes, by number. They must `accept` this one."""
        for number, address in addresses.items():
            self._lanes[number] = []
            for index in range(self.connections):
                connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
                connection.sendall(bytes([self.number, index]))
                self._lanes[number].append(_Lane(connection))

    def accept(self, numbers: Iterable[int]) -> None:
        """Waits until the processes with these numbers have connected."""
        missing = {(number, index) for number in numbers for index in range(self.connections)}
        accepted: dict[tuple[int, int], _Lane] = {}
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        while missing:
            connection, _ = self._listener.accept()
            connection.settimeout(CONNECT_TIMEOUT_S)
            number, index = connection.recv(2, socket.MSG_WAITALL)
            missing.remove((number, index))
            accepted[number, index] = _Lane(connection)
        for number, index in sorted(accepted):
            self._lanes.setdefault(number, []).append(accepted[number, index])

    def connect_ring(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Connects to the next process of a ring and accepts the previous one; with two processes the first
        connects."""
        following, previous = self._neighbours(len(addresses))
        if following != previous or self.number == 0:
            self.connect({following: addresses[following]})
        if following != previous or self.number == 1:
            self.accept([previous])

    def exchange(self, peers: int, out: memoryview, into: memoryview, times: int) -> None:
        """Sends to the next process of a ring, `times` times, while receiving as much from the previous one."""
        following, previous = self._neighbours(peers)
        self.move({following: out}, {previous: into}, times=times)

    def move(self, out: Mapping[int, memoryview], into: Mapping[int, memoryview], times: int = 1) -> None:
        """Sends bytes to other processes while receiving theirs.

        Args:
            out: the bytes to send, by number of the receiver.
            into: buffers for the received bytes, by number of the sender.
            times: number of repetitions, without a pause.
        """
        for number, data in out.items():
            for lane, piece in self._shares(number, data):
                lane.out = [piece] * times if piece else []
        for number, memory in into.items():
            for lane, piece in self._shares(number, memory):
                lane.into = [piece] * times if piece else []
        _move(lane for lanes in self._lanes.values() for lane in lanes)

    def close(self) -> None:
        """Closes all sockets."""
        self._listener.close()
        for lanes in self._lanes.values():
            for lane in lanes:
                lane.connection.close()

    def _neighbours(self, peers: int) -> tuple[int, int]:
        return (self.number + 1) % peers, (self.number - 1) % peers

    def _shares(self, number: int, data: memoryview) -> Iterable[tuple[_Lane, memoryview]]:
        """Splits data among the lanes to another process; uses fewer lanes for little data."""
        lanes = self._lanes[number]
        count = min(len(lanes), max(1, len(data) // SHARE_BYTES_MIN))
        bounds = [len(data) * index // count for index in range(count + 1)]
        return zip(lanes[:count], (data[bounds[i] : bounds[i + 1]] for i in range(count)), strict=True)


def _choose_congestion_control(connection: socket.socket) -> None:
    if connection.getsockname()[0] != connection.getpeername()[0]:
        return
    for name in (b"cubic", b"reno"):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            continue
        return


def _move(lanes: Iterable[_Lane]) -> None:
    """Sends and receives until all lanes are done."""
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
