"""The handshake of data connections with an attacker in the middle: changed, cut, replayed or foreign bytes.

Nobody accepts anything except the exact bytes that the holder of the key made for this connection.
"""

from __future__ import annotations

import dataclasses

from fuzz.choices import Choices
from zpccl import limits
from zpccl.control.handshake import (
    HELLO_BYTES,
    MAC_BYTES,
    NONCE_BYTES,
    SIGNAL_BYTES,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    accepted,
    encode_refusal,
)
from zpccl.engine.ciphers import SHARE_BYTES

KEYS = (b"k" * 32, b"K" * 32, b"")
HELLO = LinkHello(b"r" * 16, b"a" * 16, b"b" * 16, b"n" * 16, 1, 4)
HELLOS = (
    HELLO,
    dataclasses.replace(HELLO, index=2),
    dataclasses.replace(HELLO, sender=HELLO.receiver, receiver=HELLO.sender),
    dataclasses.replace(HELLO, run_id=b"R" * 16),
    dataclasses.replace(HELLO, offers=0b1111, share=b"s" * SHARE_BYTES),
)
NONCES = (b"1" * NONCE_BYTES, b"2" * NONCE_BYTES)
SIGNALS = (Signal.ACCEPT, Signal.COMMIT, Signal.READY)
OVERHEARD = [
    Transcript(hello, nonce, key).encode(signal)
    for hello in HELLOS
    for nonce in NONCES
    for key in KEYS
    for signal in SIGNALS
] + [encode_refusal()]
"""Everything that such an attacker may have recorded elsewhere."""


def one_input(data: bytes) -> None:
    """S7. The first bytes choose the side and the message, the rest the changes to it."""
    choices = Choices(data)
    _check_hello(choices)
    hello, nonce, key, expected = HELLO, choices.one_of(NONCES), choices.one_of(KEYS), choices.one_of(SIGNALS)
    transcript = Transcript(hello, nonce, key)
    said = _distorted(choices, choices.one_of(OVERHEARD))
    is_genuine = said == transcript.encode(expected)
    try:
        if expected is Signal.ACCEPT:
            theirs = accepted(hello, said, key)
            is_genuine = theirs.encode(Signal.ACCEPT) == said and said in OVERHEARD
        else:
            transcript.check(said, expected)
    except HandshakeError:
        assert not is_genuine
    else:
        assert is_genuine


def _check_hello(choices: Choices) -> None:
    data = _distorted(choices, choices.one_of(HELLOS).encode(b""))
    try:
        hello = LinkHello.decode(data)
    except HandshakeError:
        assert data not in [hello.encode(b"") for hello in HELLOS]
        return
    assert hello.said() == data[:-MAC_BYTES] and len(data) == HELLO_BYTES
    assert 0 <= hello.index < hello.count <= limits.LINK_CONNECTIONS_MAX


def _distorted(choices: Choices, data: bytes) -> bytes:
    """Up to three changes: of a byte, a cut, a replacement, or recorded bytes appended."""
    for _ in range(choices.number(4)):
        kind, place = choices.number(5), choices.number(len(data) + 1)
        if kind == 0 and place < len(data):
            data = data[:place] + bytes([choices.number(256)]) + data[place + 1 :]
        elif kind == 1:
            data = data[:place]
        elif kind == 2:
            data = data[:place] + choices.one_of(OVERHEARD)[place:]
        elif kind == 3:
            data += choices.one_of(OVERHEARD)
        elif kind == 4:
            data = choices.take(SIGNAL_BYTES)
    return data


def seeds() -> list[bytes]:
    """Every message of every kind, whole, cut and changed."""
    heard = [
        bytes([0, 0, nonce, 0, signal, 0, index]) for nonce in (0, 1) for signal in range(3) for index in range(25)
    ]
    return [*heard, bytes([0, 1, 0, 9, 1, 0, 0, 0]), bytes([0, 0, 0, 0, 0, 2, 5, 7, 3, 4])]
