"""The handshake of data connections as bytes: who can make which proof."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.control.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    SIGNAL_BYTES,
    AuthenticationError,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    accepted,
    encode_refusal,
)

KEY = b"k" * 32
HELLO = LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, 1, 4)
NONCE = bytes(range(NONCE_BYTES))


def test_both_sides_convince_each_other() -> None:
    acceptor = Transcript(LinkHello.decode(HELLO.encode()), NONCE, KEY)
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
]


@pytest.mark.parametrize("other", OTHER_HELLOS)
def test_a_proof_is_good_for_one_connection_only(other: LinkHello) -> None:
    """S7: bound to the run, both peers, the link and the place in it."""
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


def test_a_refusal_says_so() -> None:
    with pytest.raises(HandshakeError, match="refused"):
        accepted(HELLO, encode_refusal(), KEY)
    assert len(encode_refusal()) == SIGNAL_BYTES


@given(st.binary(max_size=2 * SIGNAL_BYTES))
def test_any_bytes_in_place_of_a_signal(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        accepted(HELLO, data, KEY)


@given(st.integers(0, SIGNAL_BYTES - 1), st.integers(1, 255))
def test_no_byte_of_a_signal_can_be_changed(place: int, difference: int) -> None:
    data = bytearray(Transcript(HELLO, NONCE, KEY).encode(Signal.COMMIT))
    data[place] ^= difference
    with pytest.raises(HandshakeError):
        Transcript(HELLO, NONCE, KEY).check(bytes(data), Signal.COMMIT)


@given(st.binary(min_size=HELLO_BYTES - 5, max_size=HELLO_BYTES - 5).map(HELLO.encode()[:5].__add__) | st.binary())
def test_any_bytes_in_place_of_a_hello(data: bytes) -> None:
    try:
        hello = LinkHello.decode(data)
    except HandshakeError:
        return
    assert hello.encode() == data and hello.count <= limits.LINK_CONNECTIONS_MAX
