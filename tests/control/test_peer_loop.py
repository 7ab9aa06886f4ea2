"""The shell of a peer: what it makes of a handshake with the master that failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

import zpccl
from zpccl import limits
from zpccl.control.peer_loop import PeerLoop
from zpccl.protocol import events
from zpccl.protocol.peer import State

EARLY_NS = limits.REGISTRATION_TIMEOUT_NS  # So much is left of the time for the handshake.
LATE_NS = limits.REGISTRATION_TIMEOUT_NS - limits.CONNECT_TIMEOUT_NS


@pytest.fixture
def loop() -> Iterator[PeerLoop]:
    """Of a peer that connects; its thread is not started, so the test takes its place."""
    loop = zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1")._make_loop()
    loop._machine.state = State.CONNECTING
    yield loop
    loop._machine.state = State.NEW
    loop.close()


def test_who_closes_at_once_is_asked_why(loop: PeerLoop) -> None:
    assert loop._on_handshake_failed(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, EARLY_NS, 0) == []
    assert loop._is_asking, "the answer ends the try"


def test_who_fails_late_is_not_asked_and_the_try_counts(loop: PeerLoop) -> None:
    """L1: libzmq says nothing more of it, so nothing else would end connect()."""
    (event,) = loop._on_handshake_failed(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, LATE_NS, 0)
    assert isinstance(event, events.ConnectionFailed) and not loop._is_asking
    assert loop._deadline_ns() == limits.RECONNECT_INTERVAL_MAX_NS, "and it connects again"


def test_where_libzmq_tries_again_it_says_so_itself(loop: PeerLoop) -> None:
    assert loop._on_handshake_failed(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, LATE_NS, 0) == []
    assert not loop._is_asking and loop._deadline_ns() is None


def test_a_key_that_is_not_allowed(loop: PeerLoop) -> None:
    (event,) = loop._on_handshake_failed(zmq.EVENT_HANDSHAKE_FAILED_AUTH, EARLY_NS, 0)
    assert isinstance(event, events.AuthenticationRefused) and "allow list" in event.reason
    assert not loop._is_asking
