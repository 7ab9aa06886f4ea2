"""The handshake of a data connection: four fixed-size messages before the first frame.

    dialler                                 acceptor
      HELLO  run, from, to, nonce, index  ->   is it for me, of my run, from a neighbour?
             <-  ACCEPT or REFUSE
      COMMIT                              ->   once the dialler has ACCEPT on all connections of the link
             <-  READY                         once the acceptor has COMMIT on all of them

All connections of a link carry the same nonce. After READY both sides hand their descriptors to the data plane; the
first frame may follow at once, so neither side reads a byte more than a message has.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from zpccl import limits
from zpccl.errors import ProtocolViolation

MAGIC = b"zpL"
_HELLO = struct.Struct(">3sBB16s16s16s16sHH")
_SIGNAL = struct.Struct(">3sBB")
HELLO_BYTES = _HELLO.size
SIGNAL_BYTES = _SIGNAL.size


class HandshakeError(ProtocolViolation):
    """The other side of a data connection does not speak the handshake, or refused it."""


class Signal(enum.IntEnum):
    """The messages without content."""

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


def encode_signal(signal: Signal) -> bytes:
    """The bytes of a message without content."""
    return _SIGNAL.pack(MAGIC, limits.PROTOCOL_VERSION, signal)


def decode_signal(data: bytes, expected: Signal) -> None:
    """Checks that the bytes are the expected message.

    Raises:
        HandshakeError: they are another message, or none.
    """
    if len(data) != SIGNAL_BYTES:
        raise HandshakeError("the connection was closed during the handshake")
    magic, version, kind = _SIGNAL.unpack(data)
    _check(magic, version)
    if kind == Signal.REFUSE:
        raise HandshakeError("the other side refused: it is another peer, or does not expect this one")
    if kind != expected:
        raise HandshakeError(f"message {kind} where {expected.name} is due")


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise HandshakeError("the other side does not speak zpccl")
    if version != limits.PROTOCOL_VERSION:
        raise HandshakeError(f"the other side speaks version {version}, this one {limits.PROTOCOL_VERSION}")
