"""Options that the engine sets on its sockets."""

from __future__ import annotations

import fcntl
import socket

from zpccl import limits
from zpccl.engine.engine import Engine


def test_connections_within_a_host_are_not_paced() -> None:
    """A loopback connection does not use a pacing congestion control. It is non-blocking, and notices a cut."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with accepted, dialled.dup() as seen:
        engine = Engine()
        try:
            engine.open_link(bytes(16), [dialled.detach()])
            name = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
            assert name in (b"cubic", b"reno")
            assert fcntl.fcntl(seen, fcntl.F_GETFL) & socket.SOCK_NONBLOCK
            assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert seen.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, interval_s, count = (
                seen.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle_s + count * interval_s == limits.PATH_TIMEOUT_NS // limits.SECOND
            assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        finally:
            engine.close()


def test_stream_sockets_that_are_not_tcp_work_too() -> None:
    """The engine tries to set TCP options, but does not need them."""
    one, other = socket.socketpair()
    with other:
        engine = Engine()
        try:
            engine.open_link(bytes(16), [one.detach()])
        finally:
            engine.close()
