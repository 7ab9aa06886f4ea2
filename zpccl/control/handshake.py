"""The handshake of a data connection: four fixed-size messages before the first frame.

    dialler                                 acceptor
      HELLO  run, from, to, nonce, index  ->   is it for me, of my run, from a neighbour?
             <-  ACCEPT nonce, proof           or REFUSE
      COMMIT proof                        ->   once the dialler has ACCEPT on all connections of the link
             <-  READY proof                   once the acceptor has COMMIT on all of them

All connections of a link carry the same link nonce. After READY both sides hand their descriptors to the data plane;
the first frame may follow at once, so neither side reads a byte more than a message has.

A proof is a keyed hash of the kind of the message, the whole HELLO (so: run, both peers, link and place in it) and the
acceptor's nonce. Its key is known to the two peers and to the master that gave it to them, so ACCEPT proves the
acceptor and COMMIT the dialler. Both sides put fresh random bytes into it, so a handshake that was captured convinces
nobody a second time; the kind is part of it, so no proof serves as another. In a run without a secret the key is
public: then the proofs only tell that both sides speak of the same connection.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

from zpccl import limits
from zpccl.errors import ProtocolViolation

MAGIC = b"zpL"
_HELLO = struct.Struct(">3sBB16s16s16s16sHH")
_SIGNAL = struct.Struct(">3sBB16s32s")
HELLO_BYTES = _HELLO.size
SIGNAL_BYTES = _SIGNAL.size
NONCE_BYTES = 16
PROOF_BYTES = 32
_PUBLIC_KEY = b"zpccl: this run has no secret".ljust(32, b".")


class HandshakeError(ProtocolViolation):
    """The other side of a data connection does not speak the handshake, or refused it."""


class AuthenticationError(HandshakeError):
    """The other side does not have the key of the link."""


class Signal(enum.IntEnum):
    """Kinds of messages. HELLO has a layout of its own."""

    HELLO = 0
    ACCEPT = 1
    COMMIT = 2
    READY = 3
    REFUSE = 4
    """The connection reached another peer, or a peer that does not want it."""


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The first message: which connection of which link this is."""

    run_id: bytes
    sender: bytes
    receiver: bytes
    nonce: bytes
    """16 random bytes that name this try to set up the link."""
    index: int
    count: int

    def encode(self) -> bytes:
        """The bytes of the message."""
        return _HELLO.pack(
            MAGIC,
            limits.PROTOCOL_VERSION,
            Signal.HELLO,
            self.run_id,
            self.sender,
            self.receiver,
            self.nonce,
            self.index,
            self.count,
        )

    @classmethod
    def decode(cls, data: bytes) -> LinkHello:
        """What the bytes say.

        Raises:
            HandshakeError: they are no such message.
        """
        if len(data) != HELLO_BYTES:
            raise HandshakeError(f"{len(data)} bytes where a hello has {HELLO_BYTES}")
        magic, version, kind, run_id, sender, receiver, nonce, index, count = _HELLO.unpack(data)
        _check(magic, version)
        if kind != Signal.HELLO or not 1 <= count <= limits.LINK_CONNECTIONS_MAX or index >= count:
            raise HandshakeError(f"a hello of kind {kind} for connection {index} of {count}")
        return cls(run_id, sender, receiver, nonce, index, count)


class Transcript:
    """One handshake as both sides see it: makes and checks proofs.

    Args:
        hello: its first message.
        nonce: NONCE_BYTES random bytes of the acceptor.
        key: of the link, 32 bytes; empty in a run without a secret.
    """

    def __init__(self, hello: LinkHello, nonce: bytes, key: bytes) -> None:
        assert len(nonce) == NONCE_BYTES
        self.nonce = nonce
        self._said = hello.encode() + nonce
        self._key = key or _PUBLIC_KEY

    def encode(self, signal: Signal) -> bytes:
        """The bytes of a message with its proof."""
        return _SIGNAL.pack(MAGIC, limits.PROTOCOL_VERSION, signal, self.nonce, self._proof(signal))

    def check(self, data: bytes, expected: Signal) -> None:
        """Checks that the bytes are the expected message, from a holder of the key.

        Raises:
            AuthenticationError: the proof is wrong.
            HandshakeError: they are another message, or none.
        """
        nonce, proof = _unpack(data, expected)
        if nonce != self.nonce or not hmac.compare_digest(proof, self._proof(expected)):
            raise AuthenticationError(f"{expected.name} without the key of this link")

    def _proof(self, signal: Signal) -> bytes:
        return hashlib.blake2b(bytes([signal]) + self._said, digest_size=PROOF_BYTES, key=self._key).digest()


def accepted(hello: LinkHello, data: bytes, key: bytes) -> Transcript:
    """The handshake that the answer to a hello belongs to.

    Raises:
        AuthenticationError: the answer is of somebody without the key.
        HandshakeError: it is no ACCEPT.
    """
    transcript = Transcript(hello, _unpack(data, Signal.ACCEPT)[0], key)
    transcript.check(data, Signal.ACCEPT)
    return transcript


def encode_refusal() -> bytes:
    """The bytes of a REFUSE. It proves nothing: whoever is refused may have no key."""
    return _SIGNAL.pack(MAGIC, limits.PROTOCOL_VERSION, Signal.REFUSE, bytes(NONCE_BYTES), bytes(PROOF_BYTES))


def _unpack(data: bytes, expected: Signal) -> tuple[bytes, bytes]:
    """Nonce and proof of a message."""
    if len(data) != SIGNAL_BYTES:
        raise HandshakeError("the connection was closed during the handshake")
    magic, version, kind, nonce, proof = _SIGNAL.unpack(data)
    _check(magic, version)
    if kind == Signal.REFUSE:
        raise HandshakeError("the other side refused: it is another peer, or does not expect this one")
    if kind != expected:
        raise HandshakeError(f"message {kind} where {expected.name} is due")
    return nonce, proof


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise HandshakeError("the other side does not speak zpccl")
    if version != limits.PROTOCOL_VERSION:
        raise HandshakeError(f"the other side speaks version {version}, this one {limits.PROTOCOL_VERSION}")
