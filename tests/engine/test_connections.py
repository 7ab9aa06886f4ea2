"""Connections of a link that come and go, seen from Python. test_retransmit.c tests their frames."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from engine_mesh import Mesh, lose_connection, peer_id, raises_errno, socket_pair, wait_events

from zpccl.engine.engine import ConnectionLost

COUNT = 3


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with closing(Mesh(2, connections=COUNT, copies=True)) as made:
        yield made


def open_counts(mesh: Mesh) -> list[int]:
    return [engine.link_state(peer_id(1 - rank)).open_count for rank, engine in enumerate(mesh.engines)]


def test_a_lost_connection_is_told_and_replaced(mesh: Mesh) -> None:
    for rank, event in enumerate(lose_connection(mesh, 1)):
        assert (event.peer, event.link_id) == (peer_id(1 - rank), mesh.link_ids[rank, 1 - rank])
        assert (event.index, event.generation) == (1, 0) and event.status < 0
    assert open_counts(mesh) == [COUNT - 1] * 2
    near, far = socket_pair()
    mesh.engines[1].add_connection(peer_id(0), mesh.link_ids[1, 0], 1, 4, far.detach(), b"first")
    assert near.recv(5, socket.MSG_WAITALL) == b"first"
    mesh.copies[0, 1][1].close()
    mesh.copies[0, 1][1] = near.dup()
    mesh.engines[0].add_connection(peer_id(1), mesh.link_ids[0, 1], 1, 4, near.detach())
    assert open_counts(mesh) == [COUNT] * 2
    assert [event.generation for event in lose_connection(mesh, 1)] == [4, 4]
    states = [engine.link_state(peer_id(1 - rank)) for rank, engine in enumerate(mesh.engines)]
    assert [state.lost_count for state in states] == [2, 2]
    assert [state.generations for state in states] == [[0, 4, 0]] * 2


def test_what_is_not_taken_stays_the_callers(mesh: Mesh) -> None:
    lose_connection(mesh, 0)
    (near, far), link_id = socket_pair(), mesh.link_ids[1, 0]
    bad = [
        (errno.ENOTCONN, (peer_id(7), link_id, 0, 1, far.fileno())),
        (errno.ENOTCONN, (peer_id(0), link_id + 1, 0, 1, far.fileno())),
        (errno.EBUSY, (peer_id(0), link_id, 1, 1, far.fileno())),
        (errno.ESTALE, (peer_id(0), link_id, 0, 0, far.fileno())),
        (errno.EINVAL, (peer_id(0), link_id, COUNT, 1, far.fileno())),
        (errno.EINVAL, (peer_id(0), link_id, 0, 1, far.fileno(), bytes(2000))),
    ]
    for number, arguments in bad:
        with raises_errno(number):
            mesh.engines[1].add_connection(*arguments)  # type: ignore[arg-type]
    far.sendall(b"mine")
    assert near.recv(10) == b"mine", "nothing was sent before, and nothing is closed"
    near.close()
    far.close()


def test_one_that_only_one_end_has_is_settled_too(mesh: Mesh) -> None:
    """The dialler may never come to add it. Then the place is free again, with the next generation."""
    lose_connection(mesh, 2)
    near, far = socket_pair()
    mesh.engines[1].add_connection(peer_id(0), mesh.link_ids[1, 0], 2, 1, far.detach())
    near.close()
    (event,) = wait_events(mesh.engines[1], 1)
    assert isinstance(event, ConnectionLost) and (event.index, event.generation) == (2, 1)
    near, far = socket_pair()
    with raises_errno(errno.ESTALE):
        mesh.engines[0].add_connection(peer_id(1), mesh.link_ids[0, 1], 2, 1, near.fileno())
    mesh.engines[1].add_connection(peer_id(0), mesh.link_ids[1, 0], 2, 2, far.detach())
    mesh.engines[0].add_connection(peer_id(1), mesh.link_ids[0, 1], 2, 2, near.detach())
    assert open_counts(mesh) == [COUNT] * 2
