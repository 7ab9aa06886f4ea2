"""Connections of a link that come and go, seen from Python. test_retransmit.c tests their frames."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from engine_mesh import peer_id, socket_pair, wait_events

from zpccl.engine.engine import ConnectionLost, Engine, EngineError

COUNT = 3


class Pair:
    """Two engines and copies of the sockets between them."""

    def __init__(self) -> None:
        self.engines = [Engine(), Engine()]
        sockets = [socket_pair() for _ in range(COUNT)]
        self.copies = [near.dup() for near, _ in sockets]
        self.links = [
            engine.open_link(peer_id(1 - rank), [pair[rank].detach() for pair in sockets])
            for rank, engine in enumerate(self.engines)
        ]

    def lose(self, index: int) -> list[ConnectionLost]:
        """Ends a connection. Returns the reports of both engines."""
        self.copies[index].shutdown(socket.SHUT_RDWR)
        events = [event for engine in self.engines for event in wait_events(engine, 1)]
        assert all(isinstance(event, ConnectionLost) for event in events)
        return events  # type: ignore[return-value]

    def open_counts(self) -> list[int]:
        return [engine.link_state(peer_id(1 - rank)).open_count for rank, engine in enumerate(self.engines)]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for copy in self.copies:
            copy.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        yield made


def test_a_lost_connection_is_told_and_replaced(pair: Pair) -> None:
    for rank, event in enumerate(pair.lose(1)):
        assert (event.peer, event.link_id) == (peer_id(1 - rank), pair.links[rank])
        assert (event.index, event.generation) == (1, 0) and event.status < 0
    assert pair.open_counts() == [COUNT - 1] * 2
    near, far = socket_pair()
    pair.engines[1].add_connection(peer_id(0), pair.links[1], 1, 4, far.detach(), b"first")
    assert near.recv(5, socket.MSG_WAITALL) == b"first"
    pair.copies[1].close()
    pair.copies[1] = near.dup()
    pair.engines[0].add_connection(peer_id(1), pair.links[0], 1, 4, near.detach())
    assert pair.open_counts() == [COUNT] * 2
    assert [event.generation for event in pair.lose(1)] == [4, 4]
    states = [engine.link_state(peer_id(1 - rank)) for rank, engine in enumerate(pair.engines)]
    assert [state.lost_count for state in states] == [2, 2]
    assert [state.generations for state in states] == [[0, 4, 0]] * 2


def test_what_is_not_taken_stays_the_callers(pair: Pair) -> None:
    pair.lose(0)
    near, far = socket_pair()
    bad = [
        (errno.ENOTCONN, (peer_id(7), pair.links[1], 0, 1, far.fileno())),
        (errno.ENOTCONN, (peer_id(0), pair.links[1] + 1, 0, 1, far.fileno())),
        (errno.EBUSY, (peer_id(0), pair.links[1], 1, 1, far.fileno())),
        (errno.ESTALE, (peer_id(0), pair.links[1], 0, 0, far.fileno())),
        (errno.EINVAL, (peer_id(0), pair.links[1], COUNT, 1, far.fileno())),
        (errno.EINVAL, (peer_id(0), pair.links[1], 0, 1, far.fileno(), bytes(2000))),
    ]
    for number, arguments in bad:
        with pytest.raises(EngineError) as error:
            pair.engines[1].add_connection(*arguments)  # type: ignore[arg-type]
        assert error.value.errno == number, arguments
    far.sendall(b"mine")
    assert near.recv(10) == b"mine", "nothing was sent before, and nothing is closed"
    near.close()
    far.close()


def test_one_that_only_one_end_has_is_settled_too(pair: Pair) -> None:
    """The dialler may never come to add it. Then the place is free again, with the next generation."""
    pair.lose(2)
    near, far = socket_pair()
    pair.engines[1].add_connection(peer_id(0), pair.links[1], 2, 1, far.detach())
    near.close()
    (event,) = wait_events(pair.engines[1], 1)
    assert isinstance(event, ConnectionLost) and (event.index, event.generation) == (2, 1)
    near, far = socket_pair()
    with pytest.raises(EngineError) as error:
        pair.engines[0].add_connection(peer_id(1), pair.links[0], 2, 1, near.fileno())
    assert error.value.errno == errno.ESTALE
    pair.engines[1].add_connection(peer_id(0), pair.links[1], 2, 2, far.detach())
    pair.engines[0].add_connection(peer_id(1), pair.links[0], 2, 2, near.detach())
    assert pair.open_counts() == [COUNT] * 2
