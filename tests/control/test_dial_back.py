"""A master dials back (S7, B1): only the process that listens at a port learns that it is open."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Iterator

import pytest
from e2e.harness import HANG_SECONDS
from e2e.strangers import reset_when_closed
from interpreter import handling

from zpccl import limits
from zpccl.control.dial_back import TOKEN_HALF_BYTES, DialBacks

TOKEN = bytes(range(2 * TOKEN_HALF_BYTES))
HALF, REST = TOKEN[:TOKEN_HALF_BYTES], TOKEN[TOKEN_HALF_BYTES:]
HOST = "127.0.0.1"


@pytest.fixture
def dials() -> Iterator[DialBacks]:
    made = DialBacks()
    yield made
    made.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as made:
        made.settimeout(HANG_SECONDS)
        yield made


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def visit(dials: DialBacks, listener: socket.socket) -> Iterator[socket.socket]:
    """The connection that the master dials to this port."""
    assert dials.dial(HOST, port_of(listener), TOKEN, 0)
    visitor, _ = listener.accept()
    with visitor:
        visitor.settimeout(HANG_SECONDS)
        yield visitor


def serve_next(dials: DialBacks, now_ns: int = 0) -> None:
    """Serves after the next event."""
    assert select.select([dials.fileno()], [], [], HANG_SECONDS)[0], "nothing happens"
    dials.serve(now_ns)


def test_who_shows_half_of_the_token_gets_the_other(dials: DialBacks, listener: socket.socket) -> None:
    with visit(dials, listener) as visitor:
        visitor.sendall(HALF)
        serve_next(dials)
        assert visitor.recv(100) == REST
        assert visitor.recv(100) == b"", "it is closed"
    assert dials.deadline_ns() is None


def test_a_visitor_that_ends_too_soon_causes_no_signal(dials: DialBacks, listener: socket.socket) -> None:
    """Its half of the token is there, but its connection is reset. The default handler of SIGPIPE ends the program."""
    signals: list[int] = []
    with visit(dials, listener) as visitor:
        visitor.sendall(HALF)
        visitor.shutdown(socket.SHUT_WR)
        reset_when_closed(visitor)
    with handling(signal.SIGPIPE, lambda number, _: signals.append(number)):
        serve_next(dials)
    assert not signals


@pytest.mark.parametrize("said", [b"SSH-2.0-", b"", HALF[:-1], REST])
def test_other_programs_are_told_nothing(dials: DialBacks, listener: socket.socket, said: bytes) -> None:
    """S7: nobody can use the master to talk to other programs."""
    with visit(dials, listener) as visitor:
        visitor.sendall(said)
        visitor.shutdown(socket.SHUT_WR)
        serve_next(dials)
        assert visitor.recv(100) == b""


def test_who_says_nothing_is_left_in_time(dials: DialBacks, listener: socket.socket) -> None:
    """L1."""
    with visit(dials, listener) as visitor:
        assert dials.deadline_ns() == limits.DIAL_BACK_TIMEOUT_NS
        dials.serve(limits.DIAL_BACK_TIMEOUT_NS - 1)
        dials.serve(limits.DIAL_BACK_TIMEOUT_NS)
        assert visitor.recv(100) == b""
    assert dials.deadline_ns() is None


def test_an_address_is_dialled_once_in_a_while(dials: DialBacks, listener: socket.socket) -> None:
    """S7: a stranger cannot try one port after the other, whether or not it is refused."""
    with socket.create_server((HOST, 0)) as closed:
        port = port_of(closed)
    assert dials.dial(HOST, port, TOKEN, 0)
    assert not dials.dial(HOST, port_of(listener), TOKEN, 0), "one at a time"
    serve_next(dials)
    assert not dials.dial(HOST, port_of(listener), TOKEN, limits.DIAL_BACK_INTERVAL_NS - 1)
    assert dials.dial(HOST, port_of(listener), TOKEN, limits.DIAL_BACK_INTERVAL_NS)


def test_no_more_than_some_at_the_same_time(dials: DialBacks, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    monkeypatch.setattr(limits, "DIAL_BACKS_MAX", 2)
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = port_of(listener)
        assert dials.dial("127.0.0.1", port, TOKEN, 0) and dials.dial("127.0.0.2", port, TOKEN, 0)
        assert not dials.dial("127.0.0.3", port, TOKEN, 0)
        dials.serve(limits.DIAL_BACK_TIMEOUT_NS)
        assert dials.dial("127.0.0.3", port, TOKEN, limits.DIAL_BACK_TIMEOUT_NS)


@pytest.mark.parametrize(("host", "port"), [("", 1), (HOST, 0), ("a name", 1), ("224.0.0.1", 1)])
def test_what_cannot_be_dialled(dials: DialBacks, host: str, port: int) -> None:
    assert not dials.dial(host, port, TOKEN, 0)
