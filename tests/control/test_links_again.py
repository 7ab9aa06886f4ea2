"""Connections that replace lost ones: who may dial them, when, and how often they are tried."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest
from brokers import RUN, Broker, Recorder, shake_hands
from e2e.harness import HANG_SECONDS
from e2e.strangers import raw

from zpccl import limits
from zpccl.control import links
from zpccl.control.handshake import HELLO_BYTES, HandshakeError, LinkHello

COUNT = 3


@pytest.fixture
def pair() -> Iterator[tuple[Broker, Broker]]:
    """The first broker has dialled a link to the second."""
    with Broker("one", COUNT) as one, Broker("other", COUNT) as other:
        one.dial(other)
        one.link()
        other.link()
        yield one, other


def test_the_acceptor_has_it_first(pair: tuple[Broker, Broker]) -> None:
    """The dialler gets it after the acceptor's data plane has sent the end of the handshake."""
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


def test_it_is_dialled_until_it_is_taken(pair: tuple[Broker, Broker]) -> None:
    """Each try has its own generation, above those of earlier connections and earlier tries."""
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


def test_a_place_that_was_never_used_is_not_dialled_for_ever(
    pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end may have no descriptors for it."""
    monkeypatch.setattr(links, "_RETRY_S", 0.01)
    monkeypatch.setattr(links, "_RETRY_MAX_S", 0.05)
    one, other = pair
    one.broker.redial(other.peer_id, 1, 70, -1)
    tries = 0
    with contextlib.suppress(queue.Empty):
        while tries < 10:
            other.added.get(timeout=1).connection.close()
            tries += 1
    assert 2 <= tries < 10


def test_a_place_that_was_never_used_is_dialled_once(pair: tuple[Broker, Broker]) -> None:
    """The end that asks again may not have taken the present connection yet: its place would stay taken."""
    one, other = pair
    one.broker.redial(other.peer_id, 1, 70, -1)
    theirs = other.connection()
    theirs.connection.sendall(theirs.ready)
    one.connection()
    one.broker.redial(other.peer_id, 1, 70, -1)
    with pytest.raises(queue.Empty):
        other.added.get(timeout=3 * limits.LINK_RETRY_INTERVAL_NS / limits.SECOND)


def test_only_the_dialler_of_the_link_dials_again(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    other.broker.redial(one.peer_id, 1, 0, 0)
    one.broker.redial(other.peer_id, 2, 1, 0)  # This broker has no such link.
    one.broker.redial(other.peer_id, 1, 2, 0)
    assert other.connection().index == 2
    assert one.added.empty() and other.added.empty()


def added(sender: Broker, receiver: Broker, nonce: bytes) -> bool:
    """True if a hand-made handshake of an added connection succeeds."""
    hello = LinkHello(RUN, sender.peer_id, receiver.peer_id, nonce, 1, limits.LINK_CONNECTIONS_MAX, generation=5)
    with raw(receiver.address) as connection:
        shake_hands(connection, hello)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b"", "nothing is said before the data plane has taken it"
    return not receiver.added.empty()


def test_a_connection_of_no_open_link_is_refused(pair: tuple[Broker, Broker]) -> None:
    """S4: it is of another link, of one that the receiver itself dialled, or of a lost one."""
    one, other = pair
    for broker in pair:
        broker.broker.lose_link(other.peer_id if broker is one else one.peer_id, 1)
    recorder = Recorder(other.address, COUNT)
    one.dial(other, recorder.address)
    one.link()
    other.link()
    recorder.join()
    nonce = LinkHello.decode(recorder.said[0][:HELLO_BYTES]).nonce
    assert not added(one, other, b"?" * 16)
    assert not added(other, one, nonce)
    other.broker.lose_link(one.peer_id, 2)
    assert not added(one, other, nonce)


def test_a_link_that_is_lost_is_not_dialled_into(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    one.broker.redial(other.peer_id, 1, 0, 0)
    other.connection().connection.close()
    one.broker.lose_link(other.peer_id, 1)
    one.meet(other, dial=True)
    one.link()
    other.link()
    one.broker.redial(other.peer_id, 1, 1, 0)
    one.broker.redial(other.peer_id, 2, 2, 0)
    while (new := other.connection()).number == 1:  # A try that was still on its way.
        assert new.index == 0
    assert (new.number, new.index) == (2, 2)


@pytest.mark.parametrize("ends", ["link", "broker"])
def test_a_dial_that_fails_as_it_is_cancelled_is_the_last(
    pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """L1: a dead peer refuses connections at the moment when its link is lost, and close() waits for all dials.

    Up to Python 3.11 `asyncio.wait_for` then raises the failure, and loses the cancellation.
    """
    one, other = pair
    broker, failed = one.broker, threading.Event()
    dials = 0

    async def fail(*_: object) -> None:
        nonlocal dials
        dials += 1
        for task in [dial for link in broker._links.values() for dial in link.dials.values()]:
            broker._loop.call_soon(task.cancel if ends == "broker" else lambda: broker._lose_link(other.peer_id, 1))
        if ends == "broker":
            broker._stop.set()
        failed.set()
        raise HandshakeError("refused")

    monkeypatch.setattr(broker._dialler, "dial_one_more", fail)
    broker.redial(other.peer_id, 1, 0, 0)
    assert failed.wait(HANG_SECONDS)
    if ends == "broker":
        broker._thread.join(5)
        assert not broker._thread.is_alive()
    else:
        is_over = threading.Event()
        broker._call(broker._loop.call_later, 3 * limits.LINK_RETRY_INTERVAL_NS / limits.SECOND, is_over.set)
        assert is_over.wait(HANG_SECONDS)
        assert dials == 1
