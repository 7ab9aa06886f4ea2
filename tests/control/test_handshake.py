"""The messages of the handshake of a data connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.control.handshake import (
    HELLO_BYTES,
    SIGNAL_BYTES,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    encode_refusal,
)

TRANSCRIPT = Transcript(LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, 0, 1), b"N" * 16, b"")
ID = st.binary(min_size=16, max_size=16)


@given(ID, ID, ID, ID, st.integers(1, limits.LINK_CONNECTIONS_MAX), st.data())
def test_a_hello_comes_back_as_it_went(
    run: bytes, one: bytes, other: bytes, nonce: bytes, count: int, data: st.DataObject
) -> None:
    hello = LinkHello(run, one, other, nonce, data.draw(st.integers(0, count - 1)), count)
    assert len(hello.encode()) == HELLO_BYTES and LinkHello.decode(hello.encode()) == hello


@given(st.binary(max_size=2 * HELLO_BYTES))
def test_other_bytes_are_no_hello(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        LinkHello.decode(data)


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (5, 4), (0, limits.LINK_CONNECTIONS_MAX + 1)])
def test_connections_beyond_the_bounds(index: int, count: int) -> None:
    with pytest.raises(HandshakeError, match="connection"):
        LinkHello.decode(LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, index, count).encode())


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("expected", [Signal.ACCEPT, Signal.COMMIT, Signal.READY])
def test_signals(signal: Signal, expected: Signal) -> None:
    text = {Signal.REFUSE: "refused", Signal.DISAGREE: "insists on encryption"}.get(signal)
    data = encode_refusal(signal) if text else TRANSCRIPT.encode(signal)
    assert len(data) == SIGNAL_BYTES
    if signal is expected:
        TRANSCRIPT.check(data, expected)
    else:
        with pytest.raises(HandshakeError, match=text or "instead of"):
            TRANSCRIPT.check(data, expected)


def test_signals_of_others() -> None:
    data = TRANSCRIPT.encode(Signal.READY)
    for other, text in [
        (data[:-1], "closed"),
        (b"ssh" + data[3:], "speak"),
        (data[:3] + b"\x63" + data[4:], "version 99"),
    ]:
        with pytest.raises(HandshakeError, match=text):
            TRANSCRIPT.check(other, Signal.READY)
