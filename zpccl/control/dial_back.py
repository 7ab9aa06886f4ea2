"""A master dials back, so that a host learns whether one of its ports is open from outside.

    host                                    master
    CheckRequest(port, token)        ->     notes the address that this connection comes from
                                     <-     CheckAnswer(that address, whether it dials, its clock)
                                     <-     dials that address, at this port
    accepts; first half of the token ->
                                     <-     second half of the token

The master reports the result of the dial to nobody: only a program that listens at the port learns that it is open. So
strangers cannot use the master to scan ports, neither of other hosts nor of hosts that share an address with them. The
master sends nothing to a program that has not sent half of the token first. It dials each address at most once in
DIAL_BACK_INTERVAL, and DIAL_BACKS_MAX addresses at the same time.

The thread of the master's loop owns all sockets. Their epoll has one descriptor, readable when there is work.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
from dataclasses import dataclass

from zpccl import limits

TOKEN_HALF_BYTES = 8


@dataclass(slots=True)
class _Dial:
    """A dial that is in progress, or was a moment ago.

    Attributes:
        connection: None once the dial is over.
        until_ns: when the dial times out; once it is over, when its address may be dialled again.
    """

    host: str
    token: bytes
    begun_ns: int
    connection: socket.socket | None
    until_ns: int


class DialBacks:
    """The dials of a master."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._dials: dict[str, _Dial] = {}  # By address.

    def fileno(self) -> int:
        """The descriptor that is readable when `serve` has something to do."""
        return self._epoll.fileno()

    def deadline_ns(self) -> int | None:
        """When `serve` is due even if the descriptor is not readable; None: never."""
        return min((dial.until_ns for dial in self._dials.values() if dial.connection is not None), default=None)

    def dial(self, host: str, port: int, token: bytes, now_ns: int) -> bool:
        """Dials a port of the host that asks for it. False: not now, or the address cannot be dialled."""
        self._forget_old(now_ns)
        if not host or port == 0 or host in self._dials or len(self._dials) >= limits.DIAL_BACKS_MAX:
            return False
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except (OSError, ValueError):  # ValueError: not an IP address, as for a Unix-domain socket.
            return False
        status = connection.connect_ex((host, port))
        if status not in (0, errno.EINPROGRESS):
            connection.close()
            return False
        self._epoll.register(connection, select.EPOLLIN)
        self._dials[host] = _Dial(host, token, now_ns, connection, now_ns + limits.DIAL_BACK_TIMEOUT_NS)
        return True

    def serve(self, now_ns: int) -> None:
        """Answers hosts that have sent their half of the token; ends the dials whose time is up."""
        ready = {descriptor for descriptor, _ in self._epoll.poll(0)} if self._dials else set()
        for dial in list(self._dials.values()):
            if dial.connection is None:
                continue
            if dial.connection.fileno() in ready:
                self._answer(dial, dial.connection)
            if dial.connection.fileno() in ready or now_ns >= dial.until_ns:
                self._end(dial)
        self._forget_old(now_ns)

    @staticmethod
    def _answer(dial: _Dial, connection: socket.socket) -> None:
        """Sends the second half of the token if the first one came whole: a host of ours sends it in one piece."""
        with contextlib.suppress(OSError):  # Refused, or closed.
            if connection.recv(TOKEN_HALF_BYTES) == dial.token[:TOKEN_HALF_BYTES]:
                connection.send(dial.token[TOKEN_HALF_BYTES:], socket.MSG_NOSIGNAL)

    def _end(self, dial: _Dial) -> None:
        assert dial.connection is not None
        self._epoll.unregister(dial.connection)
        dial.connection.close()
        dial.connection, dial.until_ns = None, dial.begun_ns + limits.DIAL_BACK_INTERVAL_NS

    def _forget_old(self, now_ns: int) -> None:
        for dial in [dial for dial in self._dials.values() if dial.connection is None and now_ns >= dial.until_ns]:
            del self._dials[dial.host]

    def close(self) -> None:
        """Ends all dials."""
        for dial in self._dials.values():
            if dial.connection is not None:
                self._end(dial)
        self._dials.clear()
        self._epoll.close()
