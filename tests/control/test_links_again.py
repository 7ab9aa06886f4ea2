"""Connections that take the place of lost ones: who may dial them, where, and how often it is tried."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator

import pytest
from e2e.harness import HANG_SECONDS

from zpccl import limits
from zpccl.control.addresses import listen_on_first_free, parse_address
from zpccl.control.handshake import SIGNAL_BYTES, LinkHello, Signal, accepted
from zpccl.control.links import LinkBroker, NewConnection, NewLink
from zpccl.protocol.messages import Neighbour

RUN = b"r" * 16
COUNT = 3


class Side:
    """A broker and what it hands over."""

    def __init__(self, name: str) -> None:
        self.peer_id = name.encode().ljust(16, b".")
        self.links: queue.SimpleQueue[NewLink] = queue.SimpleQueue()
        self.added: queue.SimpleQueue[NewConnection] = queue.SimpleQueue()
        self.broker = LinkBroker(
            self.peer_id,
            listen_on_first_free("127.0.0.1", range(1)),
            COUNT,
            None,
            self.links.put,
            lambda peer, reason: None,
            on_connection=self.added.put,
        )
        self.broker.set_run(RUN)
        self.sockets: list[socket.socket] = []

    def neighbour(self, *, dial: bool) -> Neighbour:
        return Neighbour(self.peer_id, "name", self.broker.addresses, dial)

    def link(self) -> NewLink:
        """Waits for a link."""
        link = self.links.get(timeout=HANG_SECONDS)
        self.sockets += link.sockets
        return link

    def connection(self) -> NewConnection:
        """Waits for an added connection."""
        new = self.added.get(timeout=HANG_SECONDS)
        self.sockets.append(new.connection)
        return new

    def close(self) -> None:
        self.broker.close()
        while not self.added.empty():
            self.added.get().connection.close()
        for connection in self.sockets:
            connection.close()


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    """The first has dialled a link to the second."""
    one, other = Side("one"), Side("other")
    other.broker.open(one.neighbour(dial=False))
    one.broker.open(other.neighbour(dial=True))
    one.link()
    other.link()
    yield one, other
    one.close()
    other.close()


def test_the_acceptor_has_it_first(pair: tuple[Side, Side]) -> None:
    """The dialler gets it once the acceptor's data plane has sent the end of the handshake."""
    one, other = pair
    one.broker.redial(other.peer_id, 1, 2, 0)
    theirs = other.connection()
    assert (theirs.peer_id, theirs.number, theirs.index, theirs.generation) == (one.peer_id, 1, 2, 1)
    assert one.added.empty()
    theirs.connection.sendall(theirs.ready + b"x")
    ours = one.connection()
    assert (ours.peer_id, ours.number, ours.index, ours.generation) == (other.peer_id, 1, 2, 1)
    assert ours.ready == b""
    ours.connection.settimeout(HANG_SECONDS)
    assert ours.connection.recv(10) == b"x", "nothing of the handshake is left"


def test_it_is_dialled_until_it_is_taken(pair: tuple[Side, Side]) -> None:
    """Each try has a generation of its own, above what was there and what was tried."""
    one, other = pair
    one.broker.redial(other.peer_id, 1, 0, 7)
    for generation in (8, 9):
        theirs = other.connection()
        assert theirs.generation == generation
        theirs.connection.close()
    theirs = other.connection()
    theirs.connection.sendall(theirs.ready)
    assert one.connection().generation == theirs.generation == 10
    one.broker.redial(other.peer_id, 1, 0, 9)
    assert other.connection().generation == 11


def test_only_the_dialler_of_the_link_dials_again(pair: tuple[Side, Side]) -> None:
    one, other = pair
    other.broker.redial(one.peer_id, 1, 0, 0)
    one.broker.redial(other.peer_id, 2, 1, 0)  # A link that it has not.
    one.broker.redial(other.peer_id, 1, 2, 0)
    assert other.connection().index == 2
    assert one.added.empty() and other.added.empty()


def added(pair: tuple[Side, Side], nonce: bytes, dialler: int) -> bool:
    """Whether a hand-made handshake of an added connection gets through."""
    sender, receiver = pair[dialler], pair[1 - dialler]
    hello = LinkHello(RUN, sender.peer_id, receiver.peer_id, nonce, 1, limits.LINK_CONNECTIONS_MAX, generation=5)
    with socket.create_connection(parse_address(receiver.broker.addresses[0]), HANG_SECONDS) as connection:
        connection.sendall(hello.encode())
        transcript = accepted(hello, connection.recv(SIGNAL_BYTES, socket.MSG_WAITALL), b"")
        connection.sendall(transcript.encode(Signal.COMMIT))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b"", "nothing is said before the data plane has taken it"
    return not receiver.added.empty()


def test_a_connection_of_no_open_link_is_refused(pair: tuple[Side, Side]) -> None:
    """S4: another link's, that of a link that the receiver dialled itself, and one of a link that was lost."""
    assert not added(pair, b"?" * 16, 0)
    assert not added(pair, pair[0].broker._links[pair[1].peer_id].nonce, 1)
    nonce = pair[1].broker._links[pair[0].peer_id].nonce
    pair[1].broker.lose_link(pair[0].peer_id, 1)
    assert not added(pair, nonce, 0)


def test_a_link_that_is_lost_is_not_dialled_into(pair: tuple[Side, Side]) -> None:
    one, other = pair
    one.broker.redial(other.peer_id, 1, 0, 0)
    other.connection().connection.close()
    one.broker.lose_link(other.peer_id, 1)
    one.broker.open(other.neighbour(dial=True))
    one.link()
    other.link()
    one.broker.redial(other.peer_id, 1, 1, 0)
    one.broker.redial(other.peer_id, 2, 2, 0)
    while (new := other.connection()).number == 1:  # A try that was on its way.
        assert new.index == 0
    assert (new.number, new.index) == (2, 2)
