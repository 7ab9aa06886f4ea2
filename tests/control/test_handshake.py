"""The handshake of a data connection: its messages as bytes, and which key can make which proof."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.control.handshake import (
    HELLO_BYTES,
    MAC_BYTES,
    NO_SHARE,
    NONCE_BYTES,
    SIGNAL_BYTES,
    AuthenticationError,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    accepted,
    check_hello,
    encode_refusal,
)
from zpccl.engine.ciphers import Cipher, available, public_share

BEST = max(available())

KEY = b"k" * 32
HELLO = LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, 1, 4)
NONCE = bytes(range(NONCE_BYTES))
TRANSCRIPT = Transcript(LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, 0, 1), b"N" * 16, b"")
ID = st.binary(min_size=16, max_size=16)


@given(ID, ID, ID, ID, st.integers(1, limits.LINK_CONNECTIONS_MAX), st.data())
def test_a_hello_comes_back_as_it_went(
    run: bytes, one: bytes, other: bytes, nonce: bytes, count: int, data: st.DataObject
) -> None:
    hello = LinkHello(run, one, other, nonce, data.draw(st.integers(0, count - 1)), count)
    assert len(hello.encode(KEY)) == HELLO_BYTES and LinkHello.decode(hello.encode(KEY)) == hello


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (5, 4), (0, limits.LINK_CONNECTIONS_MAX + 1)])
def test_connections_beyond_the_bounds(index: int, count: int) -> None:
    with pytest.raises(HandshakeError, match="connection"):
        LinkHello.decode(LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, index, count).encode(KEY))


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("expected", [Signal.ACCEPT, Signal.COMMIT, Signal.READY])
def test_signals(signal: Signal, expected: Signal) -> None:
    text = {Signal.REFUSE: "refused", Signal.DISAGREE: "one side encrypts"}.get(signal)
    data = encode_refusal(signal) if text else TRANSCRIPT.encode(signal)
    assert len(data) == SIGNAL_BYTES
    if signal is expected:
        TRANSCRIPT.check(data, expected)
    else:
        with pytest.raises(HandshakeError, match=text or "instead of"):
            TRANSCRIPT.check(data, expected)


@pytest.mark.parametrize(("index", "generation", "is_padded"), [(0, 0, True), (1, 0, False), (1, 1, True)])
def test_large_packets_pass_before_a_link_is_up(index: int, generation: int, is_padded: bool) -> None:
    hello = LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, index, 4, generation=generation)
    assert len(hello.padding) == (limits.LINK_PADDING_BYTES if is_padded else 0)


def test_signals_of_others() -> None:
    data = TRANSCRIPT.encode(Signal.READY)
    for other, text in [
        (data[:-1], "closed"),
        (b"ssh" + data[3:], "speak"),
        (data[:3] + b"\x63" + data[4:], "version 99"),
    ]:
        with pytest.raises(HandshakeError, match=text):
            TRANSCRIPT.check(other, Signal.READY)


# --- Proofs and keys --------------------------------------------------------------------------------------------------


@given(st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_no_byte_of_a_hello_can_be_changed(place: int, difference: int) -> None:
    """S7: not by an attacker without the key, either."""
    data = bytearray(HELLO.encode(KEY))
    check_hello(bytes(data), KEY)
    data[place] ^= difference
    for wrong, key in ((bytes(data), KEY), (HELLO.encode(b""), KEY), (HELLO.encode(KEY), b"")):
        with pytest.raises(AuthenticationError, match="HELLO"):
            check_hello(wrong, key)


def test_both_sides_convince_each_other() -> None:
    acceptor = Transcript(LinkHello.decode(HELLO.encode(KEY)), NONCE, KEY)
    dialler = accepted(HELLO, acceptor.encode(Signal.ACCEPT), KEY)
    acceptor.check(dialler.encode(Signal.COMMIT), Signal.COMMIT)
    dialler.check(acceptor.encode(Signal.READY), Signal.READY)
    assert len(acceptor.encode(Signal.READY)) == SIGNAL_BYTES


def test_a_run_without_a_secret_takes_the_same_path() -> None:
    acceptor = Transcript(HELLO, NONCE, b"")
    accepted(HELLO, acceptor.encode(Signal.ACCEPT), b"")
    with pytest.raises(AuthenticationError):
        accepted(HELLO, acceptor.encode(Signal.ACCEPT), KEY)
    with pytest.raises(AuthenticationError):
        Transcript(HELLO, NONCE, KEY).check(acceptor.encode(Signal.COMMIT), Signal.COMMIT)


OTHER_HELLOS = [
    dataclasses.replace(HELLO, run_id=b"x" * 16),
    dataclasses.replace(HELLO, sender=b"x" * 16),
    dataclasses.replace(HELLO, receiver=b"x" * 16),
    dataclasses.replace(HELLO, sender=HELLO.receiver, receiver=HELLO.sender),
    dataclasses.replace(HELLO, nonce=b"x" * 16),
    dataclasses.replace(HELLO, index=2),
    dataclasses.replace(HELLO, count=5),
    dataclasses.replace(HELLO, offers=3),
    dataclasses.replace(HELLO, share=b"x" * 32),
]


@pytest.mark.parametrize("other", OTHER_HELLOS)
def test_a_proof_is_good_for_one_connection_only(other: LinkHello) -> None:
    """S7: a proof is bound to the run, both peers, the link and the connection's number in it."""
    with pytest.raises(AuthenticationError):
        accepted(other, Transcript(HELLO, NONCE, KEY).encode(Signal.ACCEPT), KEY)
    with pytest.raises(AuthenticationError):
        Transcript(other, NONCE, KEY).check(Transcript(HELLO, NONCE, KEY).encode(Signal.COMMIT), Signal.COMMIT)


def test_a_captured_commit_does_not_fit_another_nonce() -> None:
    captured = Transcript(HELLO, NONCE, KEY).encode(Signal.COMMIT)
    fresh = Transcript(HELLO, b"f" * NONCE_BYTES, KEY)
    with pytest.raises(AuthenticationError):
        fresh.check(captured, Signal.COMMIT)
    with_fresh_nonce = captured[:5] + fresh.nonce + captured[5 + NONCE_BYTES :]
    with pytest.raises(AuthenticationError):
        fresh.check(with_fresh_nonce, Signal.COMMIT)


def test_no_proof_serves_as_another() -> None:
    transcript = Transcript(HELLO, NONCE, KEY)
    kinds = (Signal.ACCEPT, Signal.COMMIT, Signal.READY)
    for made in kinds:
        for wanted in kinds:
            data = transcript.encode(made)
            relabelled = data[:4] + bytes([wanted]) + data[5:]
            if made is wanted:
                transcript.check(relabelled, wanted)
            else:
                with pytest.raises(AuthenticationError):
                    transcript.check(relabelled, wanted)
                with pytest.raises(HandshakeError):
                    transcript.check(data, wanted)


@given(st.binary(max_size=2 * SIGNAL_BYTES))
def test_any_bytes_in_place_of_a_signal(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        accepted(HELLO, data, KEY)


@pytest.mark.parametrize("other", OTHER_HELLOS)
def test_keys_are_of_one_connection_only(other: LinkHello) -> None:
    """They also depend on the two fresh shares, the nonce and the key of the link."""
    hello = dataclasses.replace(HELLO, offers=1 << BEST, share=public_share(b"d" * 32))
    if other.share == NO_SHARE:
        other = dataclasses.replace(other, share=hello.share)
    cipher_keys = [
        Transcript(what, nonce, key, BEST, public_share(private)).derive_keys(private, is_dialler=False)
        for what, nonce, key, private in [
            (hello, NONCE, KEY, b"a" * 32),
            (other, NONCE, KEY, b"a" * 32),
            (hello, b"f" * NONCE_BYTES, KEY, b"a" * 32),
            (hello, NONCE, b"K" * 32, b"a" * 32),
            (hello, NONCE, KEY, b"b" * 32),
        ]
    ]
    keys = [key for one in cipher_keys if one is not None for key in (one.tx_key, one.rx_key)]
    assert len(set(keys)) == len(keys) == 10


def test_both_sides_derive_the_same_keys() -> None:
    hello = dataclasses.replace(HELLO, offers=1 << BEST | 1 << Cipher.PLAIN, share=public_share(b"d" * 32))
    acceptor = Transcript(hello, NONCE, KEY, BEST, public_share(b"a" * 32))
    dialler = accepted(hello, acceptor.encode(Signal.ACCEPT), KEY)
    ours, theirs = dialler.derive_keys(b"d" * 32, is_dialler=True), acceptor.derive_keys(b"a" * 32, is_dialler=False)
    assert ours is not None and theirs is not None
    assert (ours.cipher, ours.tx_key, ours.rx_key) == (BEST, theirs.rx_key, theirs.tx_key)
    assert Transcript(hello, NONCE, KEY).derive_keys(b"", is_dialler=True) is None
    assert "key" not in repr(ours)


def test_a_cipher_that_was_not_offered_is_refused() -> None:
    """This includes a cipher that this version does not know."""
    hello = dataclasses.replace(HELLO, offers=1 << Cipher.PLAIN | 1 << 7)
    said = bytearray(Transcript(hello, NONCE, KEY, BEST).encode(Signal.ACCEPT))
    for cipher in (BEST, 7, 255):
        said[5 + NONCE_BYTES] = cipher
        with pytest.raises(HandshakeError, match="not offered"):
            accepted(hello, bytes(said), KEY)
    assert hello.ciphers == [Cipher.PLAIN]


@given(st.integers(0, SIGNAL_BYTES - 1), st.integers(1, 255))
def test_no_byte_of_a_signal_can_be_changed(place: int, difference: int) -> None:
    data = bytearray(Transcript(HELLO, NONCE, KEY).encode(Signal.COMMIT))
    data[place] ^= difference
    with pytest.raises(HandshakeError):
        Transcript(HELLO, NONCE, KEY).check(bytes(data), Signal.COMMIT)


@given(st.binary(min_size=HELLO_BYTES - 5, max_size=HELLO_BYTES - 5).map(HELLO.said()[:5].__add__) | st.binary())
def test_any_bytes_in_place_of_a_hello(data: bytes) -> None:
    try:
        hello = LinkHello.decode(data)
    except HandshakeError:
        return
    assert hello.said() == data[:-MAC_BYTES] and hello.count <= limits.LINK_CONNECTIONS_MAX
