"""Link brokers against each other, and against hand-made sockets that have no key."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import socket
import threading
from collections.abc import Iterator

import pytest
from e2e.harness import until

from zpccl.control.addresses import format_address, listen_on_first_free, parse_address
from zpccl.control.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    SIGNAL_BYTES,
    LinkHello,
    Signal,
    Transcript,
    accepted,
)
from zpccl.control.links import LinkBroker
from zpccl.engine.ciphers import SHARE_BYTES, Cipher, CipherKeys, available, public_share
from zpccl.protocol.messages import Neighbour

WAIT_S = 30
RUN = b"r" * 16
ALICE, BOB = b"a" * 16, b"b" * 16
KEY = b"k" * 32
COUNT = 2


class Side:
    """A broker and what it says."""

    def __init__(self, peer_id: bytes, *ciphers: Cipher) -> None:
        self.peer_id = peer_id
        self.links: queue.Queue[tuple[bytes, list[socket.socket], list[CipherKeys] | None]] = queue.Queue()
        self.failures: queue.Queue[tuple[bytes, str]] = queue.Queue()
        self.broker = LinkBroker(
            peer_id,
            listen_on_first_free("127.0.0.1", range(1)),
            COUNT,
            None,
            lambda link: self.links.put((link.peer_id, link.sockets, link.cipher_keys)),
            lambda *failure: self.failures.put(failure),
            requires_keys=True,
            ciphers=ciphers or (*available(), Cipher.PLAIN),
        )
        self.broker.set_run(RUN)
        self.address = self.broker.addresses[0]

    def meet(self, peer_id: bytes, *addresses: str, dial: bool = False, key: bytes = KEY) -> None:
        self.broker.open(Neighbour(peer_id, "other", addresses, dial, key))

    def close(self) -> None:
        self.broker.close()
        while not self.links.empty():
            for connection in self.links.get()[1]:
                connection.close()


@pytest.fixture
def alice() -> Iterator[Side]:
    side = Side(ALICE)
    yield side
    side.close()


@pytest.fixture
def bob() -> Iterator[Side]:
    side = Side(BOB)
    yield side
    side.close()


def raw(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), WAIT_S)


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "closed"
        data += piece
    return data


def is_dropped(connection: socket.socket) -> bool:
    """Waits for the other side to close, which must say nothing more."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def close_all(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        connection.close()


class Recorder:
    """Stands between a dialler and an acceptor, and keeps what the dialler says on each connection."""

    def __init__(self, target: str, count: int = COUNT) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname())
        self.said: list[bytes] = []
        self._threads = [threading.Thread(target=self._relay) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _relay(self) -> None:
        incoming, _ = self._listener.accept()
        with incoming, raw(self._target) as outgoing:
            hello = read(incoming, HELLO_BYTES)
            outgoing.sendall(hello)
            incoming.sendall(read(outgoing, SIGNAL_BYTES))
            commit = read(incoming, SIGNAL_BYTES)
            outgoing.sendall(commit)
            self.said.append(hello + commit)
            incoming.sendall(read(outgoing, SIGNAL_BYTES))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()


def test_holders_of_the_key_of_the_pair_are_linked(alice: Side, bob: Side) -> None:
    bob.meet(ALICE)
    alice.meet(BOB, bob.address, dial=True)
    (_, ours, _), (sender, theirs, _) = alice.links.get(timeout=WAIT_S), bob.links.get(timeout=WAIT_S)
    assert sender == ALICE and len(ours) == len(theirs) == COUNT
    for index in range(COUNT):
        ours[index].send(bytes([index]))
        theirs[index].settimeout(WAIT_S)
        assert theirs[index].recv(10) == bytes([index]), "nothing of the handshake is left, and the order is the same"
    close_all(ours + theirs)


def test_another_key_is_refused_by_the_dialler(alice: Side, bob: Side) -> None:
    """The acceptor's proof comes first, so it is the dialler who finds out."""
    bob.meet(ALICE, key=b"x" * 32)
    alice.meet(BOB, bob.address, dial=True)
    peer_id, reason = alice.failures.get(timeout=WAIT_S)
    assert peer_id == BOB and "ACCEPT without the key" in reason
    assert alice.links.empty() and bob.links.empty()


def test_an_impostor_at_one_address_does_not_hide_the_peer(alice: Side, bob: Side) -> None:
    """S7, L2: who answers first without the key is passed over."""
    bob.meet(ALICE)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                hello = LinkHello.decode(read(connection, HELLO_BYTES))
                connection.sendall(Transcript(hello, bytes(NONCE_BYTES), b"x" * 32).encode(Signal.ACCEPT))
                is_dropped(connection)

        thread = threading.Thread(target=pretend)
        thread.start()
        alice.meet(BOB, format_address(*listener.getsockname()), bob.address, dial=True)
        close_all(alice.links.get(timeout=WAIT_S)[1])
        thread.join(WAIT_S)


def test_no_link_without_a_key_where_the_run_has_a_secret(alice: Side, bob: Side) -> None:
    """It fails closed, on both sides."""
    for side, dial in ((alice, True), (bob, False)):
        side.meet(b"?" * 16, alice.address, dial=dial, key=b"")
        assert "no key" in side.failures.get(timeout=WAIT_S)[1]


def test_a_captured_handshake_is_refused(alice: Side, bob: Side, caplog: pytest.LogCaptureFixture) -> None:
    """S7: also while the link that it was captured from stands no more, with its nonce and its places free again."""
    recorder = Recorder(bob.address)
    bob.meet(ALICE)
    alice.meet(BOB, recorder.address, dial=True)
    close_all(alice.links.get(timeout=WAIT_S)[1] + bob.links.get(timeout=WAIT_S)[1])
    recorder.join()
    assert len(recorder.said) == COUNT
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING, "zpccl"):
        connections = [stack.enter_context(raw(bob.address)) for _ in recorder.said]
        for connection, said in zip(connections, recorder.said, strict=True):
            connection.sendall(said)
        for connection in connections:
            assert read(connection, SIGNAL_BYTES)[4] == Signal.ACCEPT, "it gets so far, and no further"
            assert is_dropped(connection)
    bob.close()
    assert bob.links.empty()
    assert caplog.text.count("COMMIT without the key of this link") == COUNT


def test_a_stranger_with_the_id_of_a_neighbour_is_refused(bob: Side, caplog: pytest.LogCaptureFixture) -> None:
    """S7: knowing run and ids is not enough, nor is sending the acceptor's own proof back."""
    bob.meet(ALICE)
    hello = LinkHello(RUN, ALICE, BOB, b"n" * 16, 0, 1)
    with raw(bob.address) as one, raw(bob.address) as other, caplog.at_level(logging.WARNING, "zpccl"):
        for connection in (one, other):
            connection.sendall(hello.encode())
        accept = read(one, SIGNAL_BYTES)
        one.sendall(accept[:4] + bytes([Signal.COMMIT]) + accept[5:])
        nonce = read(other, SIGNAL_BYTES)[5 : 5 + NONCE_BYTES]
        other.sendall(Transcript(hello, nonce, b"").encode(Signal.COMMIT))
        assert is_dropped(one) and is_dropped(other)
    bob.close()
    assert bob.links.empty()
    assert caplog.text.count("COMMIT without the key of this link") == 2


def test_who_is_a_neighbour_no_more_gets_no_link(alice: Side, bob: Side) -> None:
    """S7: a peer that was removed between HELLO and COMMIT has the right key, and yet is refused."""
    bob.meet(ALICE)
    hello = LinkHello(RUN, ALICE, BOB, b"n" * 16, 0, 1)
    with raw(bob.address) as connection:
        connection.sendall(hello.encode())
        transcript = accepted(hello, read(connection, SIGNAL_BYTES), KEY)
        bob.broker.close_link(ALICE)
        bob.meet(b"c" * 16, key=b"")  # Its failure is told after that.
        bob.failures.get(timeout=WAIT_S)
        connection.sendall(transcript.encode(Signal.COMMIT))
        assert is_dropped(connection)
    bob.close()
    assert bob.links.empty()


# --- Ciphers ----------------------------------------------------------------------------------------------------------

BEST = max(available())
POLICIES = {"must": tuple(available()), "may": (*available(), Cipher.PLAIN), "must not": (Cipher.PLAIN,)}


@contextlib.contextmanager
def two(dialler: tuple[Cipher, ...], acceptor: tuple[Cipher, ...]) -> Iterator[tuple[Side, Side]]:
    """Alice and Bob with what they offer; she dials him."""
    with contextlib.ExitStack() as stack:
        sides = Side(ALICE, *dialler), Side(BOB, *acceptor)
        for side in sides:
            stack.callback(side.close)
        sides[1].meet(ALICE)
        sides[0].meet(BOB, sides[1].address, dial=True)
        yield sides


@pytest.mark.parametrize("cipher", available())
@pytest.mark.parametrize("narrow_side", [0, 1])
def test_both_ends_have_the_same_keys_and_no_key_serves_twice(cipher: Cipher, narrow_side: int) -> None:
    narrow, wide = (cipher, Cipher.PLAIN), POLICIES["may"]
    with two(*((narrow, wide) if narrow_side == 0 else (wide, narrow))) as (alice, bob):
        (_, ours, hers), (_, theirs, his) = alice.links.get(timeout=WAIT_S), bob.links.get(timeout=WAIT_S)
        close_all(ours + theirs)
    assert hers is not None and his is not None
    assert [(keys.cipher, keys.tx_key, keys.rx_key) for keys in hers] == [(cipher, s.rx_key, s.tx_key) for s in his]
    assert len({key for keys in hers for key in (keys.tx_key, keys.rx_key)}) == 2 * COUNT


@pytest.mark.parametrize("ours", POLICIES)
@pytest.mark.parametrize("theirs", POLICIES)
def test_what_two_policies_come_to(ours: str, theirs: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zpccl"), two(POLICIES[ours], POLICIES[theirs]) as (alice, bob):
        if {ours, theirs} == {"must", "must not"}:
            assert "insists on encryption" in alice.failures.get(timeout=WAIT_S)[1]
            bob.close()
            assert bob.links.empty() and "no cipher is offered that this side has" in caplog.text
            return
        ends = [side.links.get(timeout=WAIT_S) for side in (alice, bob)]
        for _, sockets, cipher_keys in ends:
            close_all(sockets)
            assert (cipher_keys is None) == ("must not" in (ours, theirs))
        assert caplog.text.count("is not encrypted") == [ours, theirs].count("may") * ("must not" in (ours, theirs))


class Meddler(Recorder):
    """Changes the byte of a HELLO that has the offers."""

    def _relay(self) -> None:
        incoming, _ = self._listener.accept()
        with incoming, raw(self._target) as outgoing:
            hello = LinkHello.decode(read(incoming, HELLO_BYTES))
            outgoing.sendall(dataclasses.replace(hello, offers=1 << Cipher.PLAIN).encode())
            incoming.sendall(read(outgoing, SIGNAL_BYTES))
            assert is_dropped(incoming)


def test_nobody_on_the_path_talks_two_sides_out_of_encryption(alice: Side, bob: Side) -> None:
    """S7: the offers are part of what is proved."""
    meddler = Meddler(bob.address, 1)
    bob.meet(ALICE)
    alice.meet(BOB, meddler.address, dial=True)
    assert "ACCEPT without the key" in alice.failures.get(timeout=WAIT_S)[1]
    meddler.join()
    assert alice.links.empty() and bob.links.empty()


@pytest.mark.parametrize("share", [bytes(32), b"\x01" + bytes(31)])
def test_a_share_of_which_anybody_knows_the_outcome_is_refused(bob: Side, share: bytes) -> None:
    """A point of low order. Only a holder of the key gets so far."""
    bob.meet(ALICE)
    hello = LinkHello(RUN, ALICE, BOB, b"n" * 16, 0, 1, offers=1 << BEST, share=share)
    with raw(bob.address) as connection:
        connection.sendall(hello.encode())
        transcript = accepted(hello, read(connection, SIGNAL_BYTES), KEY)
        connection.sendall(transcript.encode(Signal.COMMIT))
        assert is_dropped(connection)
    bob.close()
    assert bob.links.empty()


def test_connections_of_a_link_are_of_one_cipher(bob: Side) -> None:
    bob.meet(ALICE)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw(bob.address)) for _ in range(COUNT)]
        for index, connection in enumerate(connections):
            share = public_share(b"p" * SHARE_BYTES)
            offers = 1 << (BEST if index else Cipher.PLAIN)
            hello = LinkHello(RUN, ALICE, BOB, b"n" * 16, index, COUNT, offers=offers, share=share)
            connection.sendall(hello.encode())
            transcript = accepted(hello, read(connection, SIGNAL_BYTES), KEY)
            connection.sendall(transcript.encode(Signal.COMMIT))
            if index == 0:  # Bob knows of it before he hears of the other.
                until(lambda: bob.broker._incoming)
        assert is_dropped(connections[1])
    bob.close()
    assert bob.links.empty()
