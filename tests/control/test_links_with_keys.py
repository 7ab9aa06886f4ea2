"""Link brokers against each other, and against hand-made sockets without a key."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from brokers import RUN, Broker, Recorder, say_hello, shake_hands
from e2e.harness import HANG_SECONDS
from e2e.strangers import raw, read

from zpccl.control.addresses import format_address
from zpccl.control.handshake import HELLO_BYTES, MAC_BYTES, NONCE_BYTES, SIGNAL_BYTES, LinkHello, Signal, Transcript
from zpccl.engine.ciphers import SHARE_BYTES, Cipher, available, public_share

KEY = b"k" * 32
COUNT = 2
POLICIES = {"encrypts": tuple(available()), "does not": (Cipher.PLAIN,)}
ANY = (*available(), Cipher.PLAIN)
BEST = max(available())


@contextlib.contextmanager
def two(dialler: tuple[Cipher, ...], acceptor: tuple[Cipher, ...]) -> Iterator[tuple[Broker, Broker]]:
    """Alice and Bob, and the ciphers that each offers."""
    with Broker("alice", COUNT, dialler) as alice, Broker("bob", COUNT, acceptor) as bob:
        yield alice, bob


@pytest.fixture
def pair() -> Iterator[tuple[Broker, Broker]]:
    """Alice and Bob."""
    with two(ANY, ANY) as pair:
        yield pair


def link(alice: Broker, bob: Broker, *addresses: str, key: bytes = KEY) -> None:
    """Alice dials Bob."""
    bob.meet(alice, key=key)
    alice.meet(bob, *addresses, dial=True, key=KEY)


def hello_of(alice: Broker, bob: Broker, index: int = 0, **changes: object) -> LinkHello:
    """The HELLO that Alice would send to Bob on one of COUNT connections."""
    hello = LinkHello(RUN, alice.peer_id, bob.peer_id, b"n" * 16, index, COUNT)
    return dataclasses.replace(hello, **changes)  # type: ignore[arg-type]


def is_dropped(connection: socket.socket) -> bool:
    """Waits for the other side to close without sending anything more."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_another_key_is_refused_by_the_acceptor(pair: tuple[Broker, Broker], caplog: pytest.LogCaptureFixture) -> None:
    """S7: it does so before it answers anything."""
    alice, bob = pair
    with caplog.at_level(logging.WARNING, "zpccl"):
        link(alice, bob, key=b"x" * 32)
        assert "closed the connection" in alice.failure()
    assert "HELLO without the key of this link" in caplog.text
    assert alice.has_no_link() and bob.has_no_link()


def test_an_impostor_at_one_address_does_not_hide_the_peer(pair: tuple[Broker, Broker]) -> None:
    """S7, L2: if the first address to answer lacks the key, the broker goes on to the next."""
    alice, bob = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                hello = LinkHello.decode(read(connection, HELLO_BYTES))
                connection.sendall(Transcript(hello, bytes(NONCE_BYTES), b"x" * 32).encode(Signal.ACCEPT))
                is_dropped(connection)

        thread = threading.Thread(target=pretend)
        thread.start()
        link(alice, bob, format_address(*listener.getsockname()), bob.address)
        assert alice.link().peer_id == bob.peer_id
        thread.join(HANG_SECONDS)


def test_no_link_without_a_key_where_the_run_has_a_secret(pair: tuple[Broker, Broker]) -> None:
    """Both sides fail closed."""
    alice, bob = pair
    alice.dial(bob)
    assert "no key" in alice.failure() and "no key" in bob.failure()


def test_a_captured_handshake_is_refused(pair: tuple[Broker, Broker], caplog: pytest.LogCaptureFixture) -> None:
    """S7: this holds even if the captured link is gone, and its nonce and places are free again."""
    alice, bob = pair
    recorder = Recorder(bob.address, COUNT)
    link(alice, bob, recorder.address)
    for connection in (*alice.link().sockets, *bob.link().sockets):
        connection.close()
    recorder.join()
    assert len(recorder.said) == COUNT
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING, "zpccl"):
        connections = [stack.enter_context(raw(bob.address)) for _ in recorder.said]
        for connection, said in zip(connections, recorder.said, strict=True):
            connection.sendall(said)
        for connection, said in zip(connections, recorder.said, strict=True):
            assert read(connection, SIGNAL_BYTES)[4] == Signal.ACCEPT, "it gets so far, and no further"
            read(connection, len(LinkHello.decode(said[:HELLO_BYTES]).padding))
            assert is_dropped(connection)
    assert bob.has_no_link()
    assert caplog.text.count("COMMIT without the key of this link") == COUNT


def test_a_captured_hello_that_is_repeated_does_not_keep_an_end_from_dialling(
    pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7, L2: Bob, who dials second, cannot tell such a connection from one of Alice, whose dials do not reach him."""
    monkeypatch.setattr("zpccl.control.links._TIMEOUT_S", 1.0)
    alice, bob = pair
    captured = hello_of(alice, bob).encode(KEY)
    has_link = threading.Event()

    def repeat() -> None:
        with contextlib.ExitStack() as stack:
            while not has_link.is_set():
                stack.enter_context(raw(bob.address)).sendall(captured)
                has_link.wait(0.2)

    stranger = threading.Thread(target=repeat)
    stranger.start()
    try:
        alice.meet(bob, "127.0.0.1:9", dial=True, key=KEY)
        bob.meet(alice, key=KEY)
        assert bob.link().peer_id == alice.peer_id
    finally:
        has_link.set()
        stranger.join()


def test_a_stranger_with_the_id_of_a_neighbour_is_refused(
    pair: tuple[Broker, Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """S7: the ids of run and peer are not enough, nor is a captured HELLO with the acceptor's proof or another one."""
    alice, bob = pair
    bob.meet(alice, key=KEY)
    hello = hello_of(alice, bob)
    with raw(bob.address) as connection, caplog.at_level(logging.WARNING, "zpccl"):
        connection.sendall(hello.encode(b""))
        assert is_dropped(connection)
    assert caplog.text.count("HELLO without the key of this link") == 1
    with raw(bob.address) as one, raw(bob.address) as other, caplog.at_level(logging.WARNING, "zpccl"):
        for connection in (one, other):
            connection.sendall(hello.encode(KEY))
        accept = read(one, SIGNAL_BYTES)
        read(one, len(hello.padding))
        one.sendall(accept[:4] + bytes([Signal.COMMIT]) + accept[5:])
        nonce = read(other, SIGNAL_BYTES)[5 : 5 + NONCE_BYTES]
        read(other, len(hello.padding))
        other.sendall(Transcript(hello, nonce, b"").encode(Signal.COMMIT))
        assert is_dropped(one) and is_dropped(other)
    assert bob.has_no_link()
    assert caplog.text.count("COMMIT without the key of this link") == 2


def test_a_peer_that_was_removed_gets_no_link(pair: tuple[Broker, Broker]) -> None:
    """S7: the removal comes between HELLO and COMMIT; the peer has the right key."""
    alice, bob = pair
    bob.meet(alice, key=KEY)
    with raw(bob.address) as connection:
        transcript = say_hello(connection, hello_of(alice, bob), KEY)
        bob.broker.close_link(alice.peer_id)
        bob.meet(bob)  # Bob reports this failure after that.
        bob.failure()
        connection.sendall(transcript.encode(Signal.COMMIT) + transcript.hello.padding)
        assert is_dropped(connection)
    assert bob.has_no_link()


# --- Ciphers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cipher", available())
@pytest.mark.parametrize("narrow_side", [0, 1])
def test_both_ends_have_the_same_keys_and_no_key_serves_twice(cipher: Cipher, narrow_side: int) -> None:
    narrow, wide = (cipher, Cipher.PLAIN), ANY
    with two(*((narrow, wide) if narrow_side == 0 else (wide, narrow))) as (alice, bob):
        link(alice, bob)
        hers, his = alice.link().cipher_keys, bob.link().cipher_keys
    assert hers is not None and his is not None
    assert [(keys.cipher, keys.tx_key, keys.rx_key) for keys in hers] == [(cipher, s.rx_key, s.tx_key) for s in his]
    assert len({key for keys in hers for key in (keys.tx_key, keys.rx_key)}) == 2 * COUNT


@pytest.mark.parametrize("ours", POLICIES)
@pytest.mark.parametrize("theirs", POLICIES)
def test_what_two_policies_come_to(ours: str, theirs: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zpccl"), two(POLICIES[ours], POLICIES[theirs]) as (alice, bob):
        link(alice, bob)
        if ours != theirs:
            assert "one side encrypts" in alice.failure()
            assert bob.has_no_link() and "offers no cipher that this side accepts" in caplog.text
            return
        for side in (alice, bob):
            assert (side.link().cipher_keys is None) == (ours == "does not")


class Meddler(Recorder):
    """Changes the byte of a HELLO that contains the offers."""

    def relay(self) -> None:
        incoming, _ = self.listener.accept()
        with incoming, raw(self.target) as outgoing:
            data = read(incoming, HELLO_BYTES)
            hello = dataclasses.replace(LinkHello.decode(data), offers=1 << Cipher.PLAIN)
            outgoing.sendall(hello.said() + data[-MAC_BYTES:])
            assert is_dropped(outgoing)


def test_nobody_on_the_path_talks_two_sides_out_of_encryption(pair: tuple[Broker, Broker]) -> None:
    """S7: the proof includes the offers."""
    alice, bob = pair
    meddler = Meddler(bob.address, 1)
    link(alice, bob, meddler.address)
    assert "closed the connection" in alice.failure()
    meddler.join()
    assert alice.has_no_link() and bob.has_no_link()


@pytest.mark.parametrize("share", [bytes(32), b"\x01" + bytes(31)])
def test_a_share_of_which_anybody_knows_the_outcome_is_refused(pair: tuple[Broker, Broker], share: bytes) -> None:
    """A point of low order. Only a holder of the key reaches this step."""
    alice, bob = pair
    bob.meet(alice, key=KEY)
    with raw(bob.address) as connection:
        shake_hands(connection, hello_of(alice, bob, offers=1 << BEST, share=share), KEY)
        assert is_dropped(connection)
    assert bob.has_no_link()


def test_connections_of_a_link_are_of_one_cipher(pair: tuple[Broker, Broker]) -> None:
    alice, bob = pair
    bob.meet(alice, key=KEY)
    share = public_share(b"p" * SHARE_BYTES)
    with raw(bob.address) as plain, raw(bob.address) as encrypted:
        for index, connection in enumerate((plain, encrypted)):
            offers = 1 << (BEST if index else Cipher.PLAIN)
            shake_hands(connection, hello_of(alice, bob, index, offers=offers, share=share), KEY)
        (refused, *_), _, _ = select.select([plain, encrypted], [], [], HANG_SECONDS)  # The one that came second.
        assert is_dropped(refused)
    assert bob.has_no_link()
