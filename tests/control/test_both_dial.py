"""Links for which both ends dial: both ends keep the same set of connections, whichever end is quicker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from brokers import RUN, Broker, brokers, say_hello, shake_hands
from e2e.harness import HANG_SECONDS, until
from e2e.strangers import raw, read, reset_when_closed

from zpccl import limits
from zpccl.control.addresses import listen_on_first_free
from zpccl.control.handshake import HELLO_BYTES, NONCE_BYTES, SIGNAL_BYTES, LinkHello, Signal, Transcript
from zpccl.engine.ciphers import Cipher, available
from zpccl.errors import InvalidUsage
from zpccl.protocol.messages import Neighbour

ROUNDS = 40


class Far:
    """A peer whose part of the handshake a test plays by hand: a broker dials it, and it dials the broker."""

    def __init__(self, name: str) -> None:
        self.peer_id = name.encode().ljust(16, b".")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(HANG_SECONDS)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def be_dialled(self, broker: Broker, *, dial: bool = True) -> None:
        broker.broker.open(Neighbour(self.peer_id, "far", (self.address,), dial))

    def accept(self) -> tuple[socket.socket, Transcript]:
        """Accepts a connection and its HELLO."""
        connection, _ = self.listener.accept()
        connection.settimeout(HANG_SECONDS)
        hello = LinkHello.decode(read(connection, HELLO_BYTES))
        transcript = Transcript(hello, b"n" * NONCE_BYTES, b"")
        connection.sendall(transcript.encode(Signal.ACCEPT) + hello.padding)
        return connection, transcript

    def hello(self, broker: Broker, nonce: bytes = b"own") -> LinkHello:
        return LinkHello(RUN, self.peer_id, broker.peer_id, nonce.ljust(16, b"."), 0, 1)


@contextlib.contextmanager
def far(name: str) -> Iterator[Far]:
    peer = Far(name)
    with peer.listener:
        yield peer


@contextlib.contextmanager
def committed(broker: Broker, peer: Far) -> Iterator[tuple[socket.socket, Transcript]]:
    """A connection that a broker has dialled and committed."""
    peer.be_dialled(broker)
    connection, transcript = peer.accept()
    with connection:
        transcript.check(read(connection, SIGNAL_BYTES), Signal.COMMIT)
        read(connection, len(transcript.hello.padding))
        yield connection, transcript


def end_of(connection: socket.socket) -> bytes:
    """The bytes before the end of a connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1024):
            data += piece
    return data


@pytest.mark.parametrize(
    "how", [{}, {"local": True}, {"ciphers": (Cipher.PLAIN,)}, {"ciphers": tuple(available())}], ids=str
)
def test_both_dial_at_the_same_time_and_agree(how: dict[str, Any]) -> None:
    """L2: each end gets one link, of the same connections, whichever end dialled them."""
    for number in range(ROUNDS):
        with brokers("one", "other", connections=1 + number % 5, **how) as (one, other):
            together = threading.Barrier(2)
            key = b"k" * 32 if "ciphers" in how else b""

            def meet(broker: Broker, whom: Broker, together: threading.Barrier = together, key: bytes = key) -> None:
                together.wait()
                broker.meet(whom, dial=True, key=key)

            with ThreadPoolExecutor(2) as executor:
                list(executor.map(meet, (one, other), (other, one)))
            ours, theirs = one.link().sockets, other.link().sockets
            assert len(ours) == len(theirs) == 1 + number % 5
            for index, (here, there) in enumerate(zip(ours, theirs, strict=True)):
                here.setblocking(True)
                here.sendall(bytes([index]))
                there.settimeout(HANG_SECONDS)
                assert there.recv(10) == bytes([index])
            for broker in (one, other):
                assert broker.has_no_link() and broker.failures.empty()


def test_the_end_that_cannot_be_dialled_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: a peer behind NAT registered first. So the other one dials first, in vain."""
    with brokers("one", "other") as (one, other):
        other.meet(one, "127.0.0.1:1", dial=True)
        one.meet(other)
        assert len(one.link().sockets) == len(other.link().sockets) == 3
        assert other.failure() == "127.0.0.1:1: refused"


def test_the_second_end_does_not_dial_while_the_first_is_at_it() -> None:
    with far("a") as a, brokers("b") as (b,):
        a.be_dialled(b, dial=False)
        with raw(b.address) as connection:
            transcript = say_hello(connection, a.hello(b))
            a.listener.settimeout(2 * limits.DIAL_HEAD_START_NS / limits.SECOND)
            with pytest.raises(TimeoutError):
                a.listener.accept()
            connection.sendall(transcript.encode(Signal.COMMIT) + transcript.hello.padding)
            assert len(b.link().sockets) == 1


def test_the_greater_id_takes_what_it_has_committed() -> None:
    """The other end's connections wait, and are closed when READY has arrived."""
    with (
        far("a") as a,
        brokers("b", connections=1) as (b,),
        raw(b.address) as late,
        committed(b, a) as (connection, transcript),
    ):
        shake_hands(late, a.hello(b))
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.recv(1)
        connection.sendall(transcript.encode(Signal.READY))
        assert b.link().sockets[0].getpeername() == connection.getsockname()
        late.settimeout(HANG_SECONDS)
        assert end_of(late) == b"" and b.has_no_link()


def test_the_greater_id_takes_the_others_connections_if_its_own_fail() -> None:
    with far("a") as a, brokers("b", connections=1) as (b,), raw(b.address) as second:
        with committed(b, a):
            shake_hands(second, a.hello(b))
        assert b.link().sockets[0].getpeername() == second.getsockname()
        assert "closed" in b.failure()


def test_the_greater_id_gives_its_own_dial_up_if_it_has_not_committed() -> None:
    """It sends no COMMIT after READY."""
    with far("a") as a, brokers("b", connections=2) as (b,), raw(b.address) as first:
        a.be_dialled(b)
        connection, _ = a.accept()
        with connection:
            shake_hands(first, a.hello(b))
            assert b.link().sockets[0].getpeername() == first.getsockname()
            assert end_of(connection) == b"" and b.failures.empty()


def test_the_smaller_id_takes_what_the_other_commits() -> None:
    """It does so even if its own connections are committed and the other end has not answered."""
    with (
        far("z") as z,
        brokers("b", connections=1) as (b,),
        raw(b.address) as first,
        committed(b, z) as (connection, _),
    ):
        shake_hands(first, z.hello(b))
        assert b.link().sockets[0].getpeername() == first.getsockname()
        assert end_of(connection) == b"" and b.has_no_link() and b.failures.empty()


def test_a_link_that_is_there_is_not_dialled() -> None:
    """The other end's link may be complete while the order to dial is on its way."""
    with brokers("one", "other", connections=1) as (one, other):
        one.dial(other)
        one.link(), other.link()
        other.meet(one, dial=True)
        assert one.has_no_link() and other.has_no_link()


# --- Connections that both ends open ----------------------------------------------------------------------------------


def opened_together(peer: Far, broker: Broker) -> tuple[socket.socket, Transcript]:
    """The connection that a broker dials from its own port, with its HELLO. The test does not answer others."""
    broker.broker.open(Neighbour(peer.peer_id, "far", ("127.0.0.1:1", peer.address), dial=True))
    others = []
    while True:
        connection, address = peer.listener.accept()
        connection.settimeout(HANG_SECONDS)
        if f"127.0.0.1:{address[1]}" == broker.address:
            break
        others.append(connection)
    for other in others:
        other.close()
    hello = LinkHello.decode(read(connection, HELLO_BYTES))
    assert hello.count == 1
    return connection, Transcript(hello, b"n" * NONCE_BYTES, b"")


def test_of_two_hellos_that_of_the_greater_id_counts() -> None:
    with far("a") as a, brokers("b", connections=4) as (b,):
        connection, transcript = opened_together(a, b)
        with connection:
            connection.sendall(a.hello(b).encode(b"") + transcript.encode(Signal.ACCEPT) + transcript.hello.padding)
            transcript.check(read(connection, SIGNAL_BYTES), Signal.COMMIT)
            read(connection, len(transcript.hello.padding))
            connection.sendall(transcript.encode(Signal.READY))
            assert [one.getpeername() for one in b.link().sockets] == [connection.getsockname()]
            assert b.has_no_link() and b.failures.empty()


def test_the_smaller_id_accepts_what_it_has_dialled() -> None:
    with far("z") as z, brokers("b", connections=4) as (b,):
        connection, _ = opened_together(z, b)
        with connection:
            shake_hands(connection, z.hello(b))
            assert [one.getpeername() for one in b.link().sockets] == [connection.getsockname()]
            assert b.has_no_link() and b.failures.empty()


def test_a_connection_from_the_own_port_may_be_accepted_as_any_other() -> None:
    """The other end's SYN came late, and its listener accepted our connection."""
    with far("z") as z, brokers("b", connections=4) as (b,):
        connection, transcript = opened_together(z, b)
        with connection:
            connection.sendall(transcript.encode(Signal.ACCEPT) + transcript.hello.padding)
            transcript.check(read(connection, SIGNAL_BYTES), Signal.COMMIT)
            read(connection, len(transcript.hello.padding))
            connection.sendall(transcript.encode(Signal.READY))
            assert len(b.link().sockets) == 1


def test_a_peer_that_dials_itself_notices() -> None:
    """The address of another peer may lead to this host itself."""
    with brokers("a", "b") as (a, b):
        for broker in (a, b):
            broker.broker.open(Neighbour(b"c" * 16, "c", ("127.0.0.1:1", broker.address), dial=True))
            assert "refused" in broker.failure()
        a.dial(b)
        a.link(), b.link()


def test_the_port_is_not_shared_with_another_peer() -> None:
    with far("z") as z, brokers("b") as (b,):
        connection, _ = opened_together(z, b)
        port = int(b.address.rpartition(":")[2])
        with connection, pytest.raises(InvalidUsage, match="no free port"):
            listen_on_first_free("127.0.0.1", range(port, port + 1))


def test_a_connection_that_is_reset_before_it_is_adopted_is_closed() -> None:
    with brokers("b") as (b,), socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        reset_when_closed(far)
        far.close()
        until(lambda: near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0, "the reset")
        adopted = asyncio.run_coroutine_threadsafe(b.broker._adopt(near, b""), b.broker._loop)
        with pytest.raises(OSError, match="not connected"):
            adopted.result(HANG_SECONDS)
        assert near.fileno() == -1
