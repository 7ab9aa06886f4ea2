"""Waits for ZeroMQ sockets and plain descriptors with one system call.

`zmq.Poller` passes all sockets to libzmq at each wait, and libzmq queries the events of each, twice. A Waiter keeps the
descriptors in an epoll instead. The descriptor of a ZeroMQ socket is edge-triggered: it signals a change of state, not
the presence of messages. Any call on the socket, even a send, may consume that signal, and a socket whose events were
never queried signals nothing. So each socket is queried before the thread sleeps. A caller that does not drain a socket
gets it again from the next `wait`.

A waiter belongs to one thread, as its sockets do.
"""

from __future__ import annotations

import select
from typing import Any, TypeAlias

import zmq

from zpccl import limits

Source: TypeAlias = "zmq.Socket[bytes] | int"

_POLLIN = int(zmq.POLLIN)  # An int: arithmetic with pyzmq's enum takes longer than querying the socket.


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """True if the socket is open and a message waits. Cheaper than the exception of a `recv` that finds none."""
    return not socket.closed and bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


class Waiter:
    """The set of sources that a loop waits for. It does not own them; close it before them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, Source] = {}
        self._sockets: list[zmq.Socket[bytes]] = []

    def register(self, source: Source) -> None:
        """Adds a socket or descriptor: `wait` returns when it is readable."""
        descriptor = source if isinstance(source, int) else int(source.getsockopt(zmq.FD))
        self._epoll.register(descriptor, select.EPOLLIN)
        self._sources[descriptor] = source
        if not isinstance(source, int):
            self._sockets.append(source)

    def unregister(self, source: Source) -> None:
        """Removes a source; required before it is closed."""
        descriptor = source if isinstance(source, int) else int(source.getsockopt(zmq.FD))
        self._sockets = [socket for socket in self._sockets if socket is not source]
        del self._sources[descriptor]
        self._epoll.unregister(descriptor)

    def wait(self, timeout_ms: int | None) -> set[Any]:
        """Waits until a source is readable, at most `timeout_ms`; None: no timeout.

        Returns:
            The sources that may be readable: all readable ones, and ZeroMQ sockets whose state has changed.
        """
        ready: set[Any] = {socket for socket in self._sockets if is_readable(socket)}
        timeout_s = 0.0 if ready else None if timeout_ms is None else timeout_ms * limits.MS / limits.SECOND
        ready.update(self._sources[descriptor] for descriptor, _ in self._epoll.poll(timeout_s))
        return ready

    def close(self) -> None:
        """Removes all sources."""
        self._epoll.close()
