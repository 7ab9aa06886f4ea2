"""Link brokers of one process, and what strangers do to them."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator

import pytest
from e2e.harness import HANG_SECONDS, until

from zpccl import limits
from zpccl.control.addresses import listen_on_first_free, parse_address
from zpccl.control.handshake import SIGNAL_BYTES, LinkHello, Signal, accepted
from zpccl.control.links import LinkBroker
from zpccl.protocol.messages import Neighbour

RUN = b"r" * 16


class Broker:
    """A broker that keeps what it reports."""

    def __init__(self, name: str, connections: int) -> None:
        self.peer_id = name.encode().ljust(16, b".")
        self.links: queue.SimpleQueue[tuple[bytes, list[socket.socket]]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[tuple[bytes, str]] = queue.SimpleQueue()
        self.broker = LinkBroker(
            self.peer_id,
            listen_on_first_free("127.0.0.1", range(1)),
            connections,
            None,
            lambda link: self.links.put((link.peer_id, link.sockets)),
            lambda peer, reason: self.failures.put((peer, reason)),
        )
        self.broker.set_run(RUN)

    def neighbour(self, *, dial: bool, addresses: tuple[str, ...] | None = None) -> Neighbour:
        return Neighbour(self.peer_id, "name", self.broker.addresses if addresses is None else addresses, dial)

    def close(self) -> None:
        self.broker.close()
        while not self.links.empty():
            for connection in self.links.get()[1]:
                connection.close()


@pytest.fixture
def pair() -> Iterator[tuple[Broker, Broker]]:
    one, other = Broker("one", 3), Broker("other", 5)
    yield one, other
    one.close()
    other.close()


def talk(link: list[socket.socket], other: list[socket.socket]) -> None:
    """Each connection is the same at both ends."""
    assert len(link) == len(other)
    for index, connection in enumerate(link):
        connection.setblocking(True)
        connection.sendall(bytes([index]))
    for index, connection in enumerate(other):
        connection.settimeout(HANG_SECONDS)
        assert connection.recv(1) == bytes([index])
    for connection in [*link, *other]:
        connection.close()


@pytest.mark.parametrize("dialler_first", [True, False])
def test_a_link_has_the_connections_that_the_dialler_wants(pair: tuple[Broker, Broker], dialler_first: bool) -> None:
    """Either side may hear of the other first."""
    one, other = pair
    opens = [(one, other.neighbour(dial=True)), (other, one.neighbour(dial=False))]
    for broker, neighbour in opens if dialler_first else reversed(opens):
        broker.broker.open(neighbour)
    (their_id, theirs), (our_id, ours) = (b.links.get(timeout=HANG_SECONDS) for b in pair)
    assert (their_id, our_id) == (other.peer_id, one.peer_id) and len(ours) == 3
    talk(theirs, ours)


@pytest.mark.parametrize(
    ("round_trip_ms", "name", "count"), [(0, "cubic", 4), (100, "cubic", 64), (0, "bbr", 4), (100, "bbr", 16)]
)
def test_the_dialler_chooses_by_round_trip_and_congestion_control(
    monkeypatch: pytest.MonkeyPatch, round_trip_ms: int, name: str, count: int
) -> None:
    """Both ends get the same number, where the dialler's user named none; what the acceptor's named is not asked."""
    monkeypatch.setattr("zpccl.control.links.round_trip_ns", lambda _: round_trip_ms * limits.MS)
    monkeypatch.setattr("zpccl.control.links.congestion_control", lambda _: name)
    one, other = Broker("one", 0), Broker("other", 5)
    try:
        other.broker.open(one.neighbour(dial=False))
        one.broker.open(other.neighbour(dial=True))
        theirs, ours = (broker.links.get(timeout=HANG_SECONDS)[1] for broker in (one, other))
        assert len(theirs) == count
        talk(theirs, ours)
    finally:
        one.close()
        other.close()


def test_the_right_address_is_found_among_wrong_ones(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    other.broker.open(one.neighbour(dial=False))
    wrong = ("127.0.0.1:1", "nonsense", "a..b:5", "no.such.host.invalid:5", *one.broker.addresses)
    one.broker.open(other.neighbour(dial=True, addresses=(*wrong, *other.broker.addresses)))
    talk(one.links.get(timeout=HANG_SECONDS)[1], other.links.get(timeout=HANG_SECONDS)[1])


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1:1",), ("nonsense", "a..b:5")])
def test_a_dial_that_fails_is_reported_and_may_be_repeated(
    pair: tuple[Broker, Broker], addresses: tuple[str, ...]
) -> None:
    one, other = pair
    for _ in range(2):
        one.broker.open(other.neighbour(dial=True, addresses=addresses))
        peer_id, reason = one.failures.get(timeout=HANG_SECONDS)
        assert peer_id == other.peer_id and reason
    assert one.links.empty()


def test_another_run_is_refused(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    other.broker.set_run(b"x" * 16)
    other.broker.open(one.neighbour(dial=False))
    one.broker.open(other.neighbour(dial=True))
    assert "refused" in one.failures.get(timeout=HANG_SECONDS)[1]


def test_a_link_of_which_one_connection_breaks_is_none(pair: tuple[Broker, Broker]) -> None:
    """Its others are closed too, and the next try works."""
    one, other = pair
    other.broker.open(one.neighbour(dial=False))
    address = parse_address(other.broker.addresses[0])
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address, HANG_SECONDS)) for _ in range(2)]
        for index, connection in enumerate(connections):
            hello = LinkHello(RUN, one.peer_id, other.peer_id, b"n" * 16, index, 3)
            connection.sendall(hello.encode())
            transcript = accepted(hello, connection.recv(SIGNAL_BYTES, socket.MSG_WAITALL), b"")
            connection.sendall(transcript.encode(Signal.COMMIT))
        connections[0].close()
    one.broker.open(other.neighbour(dial=True))
    talk(one.links.get(timeout=HANG_SECONDS)[1], other.links.get(timeout=HANG_SECONDS)[1])
    assert other.links.empty()


def test_closing_in_the_middle_leaks_nothing(pair: tuple[Broker, Broker]) -> None:
    """Warnings about sockets that were not closed are errors here."""
    for _ in range(20):
        one, other = Broker("a", 8), Broker("b", 8)
        other.broker.open(one.neighbour(dial=False))
        one.broker.open(other.neighbour(dial=True))
        one.broker.close_link(other.peer_id)
        one.broker.open(other.neighbour(dial=True))
        one.close()
        other.close()


def test_a_link_that_is_not_wanted_any_more_is_not_dialled(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one.broker.open(other.neighbour(dial=True, addresses=(f"127.0.0.1:{silent.getsockname()[1]}",)))
        connection, _ = silent.accept()
        with connection:
            one.broker.close_link(other.peer_id)
            connection.settimeout(HANG_SECONDS)
            until(lambda: not connection.recv(4096), "the end of the connection")
    assert one.failures.empty() and one.links.empty()
