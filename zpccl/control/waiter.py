"""Waits for ZeroMQ sockets and plain descriptors with one system call.

`zmq.Poller` hands everything to libzmq at each wait, which then asks every socket for its events, twice. Here the
kernel keeps the descriptors, in an epoll. The descriptor of a ZeroMQ socket tells of a change, not of messages, and
any call on the socket may take note of the change, sending among them; and a socket that nobody has asked yet tells of
none. So each is asked for messages before the thread sleeps. Whoever is told that a socket may be readable receives
until nothing is left, or is told again.

A waiter belongs to one thread, as its sockets do.
"""

from __future__ import annotations

import select
from typing import Any, TypeAlias

import zmq

from zpccl import limits

Source: TypeAlias = "zmq.Socket[bytes] | int"

_POLLIN = int(zmq.POLLIN)  # Arithmetic with pyzmq's own takes longer than asking the socket.


class Waiter:
    """What a loop waits for. Neither sockets nor descriptors become its own; close it before them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, Source] = {}
        self._sockets: list[zmq.Socket[bytes]] = []

    def register(self, source: Source) -> None:
        """From now on `wait` ends when the socket or descriptor is readable."""
        if isinstance(source, int):
            descriptor = source
        else:
            descriptor = int(source.getsockopt(zmq.FD))
            self._sockets.append(source)
        self._sources[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)

    def unregister(self, source: Source) -> None:
        """Forgets a source, before it is closed."""
        descriptor = source if isinstance(source, int) else int(source.getsockopt(zmq.FD))
        self._sockets = [socket for socket in self._sockets if socket is not source]
        del self._sources[descriptor]
        self._epoll.unregister(descriptor)

    def wait(self, timeout_ms: int | None) -> set[Any]:
        """Waits until a source is readable, for `timeout_ms` at most; None waits without end.

        Returns:
            The sources that may be readable: all that are, and sockets about which something is new.
        """
        ready: set[Any] = {socket for socket in self._sockets if int(socket.getsockopt(zmq.EVENTS)) & _POLLIN}
        timeout_s = 0.0 if ready else None if timeout_ms is None else timeout_ms * limits.MS / limits.SECOND
        ready.update(self._sources[descriptor] for descriptor, _ in self._epoll.poll(timeout_s))
        return ready

    def close(self) -> None:
        """Forgets all sources."""
        self._epoll.close()
