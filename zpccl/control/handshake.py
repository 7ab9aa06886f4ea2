"""The handshake of a data connection: four fixed-size messages before the first frame.

    dialler                                 acceptor
      HELLO  run, from, to, nonce, index,
             ciphers, share               ->   is it for me, of my run, from a neighbour?
             <-  ACCEPT nonce, cipher,         or REFUSE, or DISAGREE: no cipher suits both
                        share, proof
      COMMIT proof                        ->   once the dialler has ACCEPT on all connections of the link
             <-  READY proof                   once the acceptor has COMMIT on all of them

All connections of a link carry the same link nonce. One that comes in place of one that an open link lost carries the
nonce of that link too, its place in it, and a generation above 0; it stands alone, and READY goes out when the
acceptor's data plane has taken it. After READY both sides hand their descriptors to the data plane; the first frame may
follow at once, so neither side reads a byte more than a message has.

A proof is a keyed hash of the kind of the message, the whole HELLO (so: run, both peers, link and place in it) and what
the acceptor said: its nonce, the cipher and its share. Its key is known to the two peers and to the master that gave it
to them, so ACCEPT proves the acceptor and COMMIT the dialler. Both sides put fresh random bytes into it, so a handshake
that was captured convinces nobody a second time; the kind is part of it, so no proof serves as another. In a run
without a secret the key is public: then the proofs only tell that both sides speak of the same connection.

The dialler offers ciphers, the acceptor takes the best that it has too; both are proved, so nobody on the path can
bring about a worse one. The keys of the frames, one for each direction of each connection, are made of the key of the
link, of all that was said, and of what the two fresh X25519 shares give: who gets the key of the link, or the secret,
later than that cannot open what was captured.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

from zpccl import limits
from zpccl.engine.ciphers import SHARE_BYTES, Cipher, Seal, key_bytes, shared_secret
from zpccl.errors import ProtocolViolation

MAGIC = b"zpL"
_HELLO = struct.Struct(">3sBB16s16s16s16sHHB32sI")
_SIGNAL = struct.Struct(">3sBB16sB32s32s")
HELLO_BYTES = _HELLO.size
SIGNAL_BYTES = _SIGNAL.size
NONCE_BYTES = 16
PROOF_BYTES = 32
NO_SHARE = bytes(SHARE_BYTES)
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
    DISAGREE = 5
    """One side insists on encryption, and the other has no cipher that it has too, or is told not to encrypt."""


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
    """Connections that make up the link; LINK_CONNECTIONS_MAX where one comes in place of a lost one."""
    offers: int = 1 << Cipher.PLAIN
    """Bit n stands for cipher n; those that are not known here stand for ciphers of the future."""
    share: bytes = NO_SHARE
    """Public X25519 key of the sender, for this link only."""
    generation: int = 0
    """0: of a new link. Greater: of an open one; each dial to this place of the link has a greater one."""

    @property
    def ciphers(self) -> list[Cipher]:
        """What is offered and known here."""
        return [cipher for cipher in Cipher if self.offers >> cipher & 1]

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
            self.offers,
            self.share,
            self.generation,
        )

    @classmethod
    def decode(cls, data: bytes) -> LinkHello:
        """What the bytes say.

        Raises:
            HandshakeError: they are no such message.
        """
        if len(data) != HELLO_BYTES:
            raise HandshakeError(f"{len(data)} bytes where a hello has {HELLO_BYTES}")
        magic, version, kind, *rest = _HELLO.unpack(data)
        _check(magic, version)
        index, count = rest[4:6]
        if kind != Signal.HELLO or not 1 <= count <= limits.LINK_CONNECTIONS_MAX or index >= count:
            raise HandshakeError(f"a hello of kind {kind} for connection {index} of {count}")
        return cls(*rest)


class Transcript:
    """One handshake as both sides see it: makes and checks proofs.

    Args:
        hello: its first message.
        nonce: NONCE_BYTES random bytes of the acceptor.
        key: of the link, 32 bytes; empty in a run without a secret.
        cipher: what the acceptor chose.
        share: public X25519 key of the acceptor, for this connection only.
    """

    def __init__(
        self, hello: LinkHello, nonce: bytes, key: bytes, cipher: Cipher = Cipher.PLAIN, share: bytes = NO_SHARE
    ) -> None:
        assert len(nonce) == NONCE_BYTES and len(share) == SHARE_BYTES
        self.nonce = nonce
        self.cipher = cipher
        self._share = share
        self._hello = hello
        self._said = hello.encode() + nonce + bytes([cipher]) + share
        self._key = key or _PUBLIC_KEY

    def encode(self, signal: Signal) -> bytes:
        """The bytes of a message with its proof."""
        return _SIGNAL.pack(
            MAGIC, limits.PROTOCOL_VERSION, signal, self.nonce, self.cipher, self._share, self._proof(signal)
        )

    def seal(self, private: bytes, *, is_dialler: bool) -> Seal | None:
        """How this side seals the connection; None if it does not. Only once the other side has proved itself.

        Args:
            private: own X25519 key, of the share that this side has told.
            is_dialler: which side this is.

        Raises:
            HandshakeError: the other side's share is none.
        """
        if self.cipher is Cipher.PLAIN:
            return None
        try:
            secret = shared_secret(private, self._share if is_dialler else self._hello.share)
        except ValueError as error:
            raise HandshakeError(f"the other side's share gives no key: {error}") from None
        root = hashlib.blake2b(self._said + secret, key=self._key, person=b"zpccl seal root").digest()
        dialler, acceptor = (
            hashlib.blake2b(side, digest_size=key_bytes(self.cipher), key=root, person=b"zpccl seal key").digest()
            for side in (b"dialler", b"acceptor")
        )
        return Seal(self.cipher, dialler, acceptor) if is_dialler else Seal(self.cipher, acceptor, dialler)

    def check(self, data: bytes, expected: Signal) -> None:
        """Checks that the bytes are the expected message, from a holder of the key.

        Raises:
            AuthenticationError: the proof is wrong.
            HandshakeError: they are another message, or none.
        """
        nonce, cipher, share, proof = _unpack(data, expected)
        is_same = (nonce, cipher, share) == (self.nonce, self.cipher, self._share)
        if not is_same or not hmac.compare_digest(proof, self._proof(expected)):
            raise AuthenticationError(f"{expected.name} without the key of this link")

    def _proof(self, signal: Signal) -> bytes:
        return hashlib.blake2b(bytes([signal]) + self._said, digest_size=PROOF_BYTES, key=self._key).digest()


def accepted(hello: LinkHello, data: bytes, key: bytes) -> Transcript:
    """The handshake that the answer to a hello belongs to.

    Raises:
        AuthenticationError: the answer is of somebody without the key.
        HandshakeError: it is no ACCEPT, or chooses what was not offered.
    """
    nonce, cipher, share, _ = _unpack(data, Signal.ACCEPT)
    if cipher not in hello.ciphers:
        raise HandshakeError(f"the other side chose cipher {cipher}, which was not offered")
    transcript = Transcript(hello, nonce, key, Cipher(cipher), share)
    transcript.check(data, Signal.ACCEPT)
    return transcript


def encode_refusal(signal: Signal = Signal.REFUSE) -> bytes:
    """The bytes of a REFUSE or DISAGREE. It proves nothing: whoever is refused may have no key."""
    rest = bytes(NONCE_BYTES), Cipher.PLAIN, NO_SHARE, bytes(PROOF_BYTES)
    return _SIGNAL.pack(MAGIC, limits.PROTOCOL_VERSION, signal, *rest)


def _unpack(data: bytes, expected: Signal) -> tuple[bytes, int, bytes, bytes]:
    """Nonce, cipher, share and proof of a message."""
    if len(data) != SIGNAL_BYTES:
        raise HandshakeError("the connection was closed during the handshake")
    magic, version, kind, nonce, cipher, share, proof = _SIGNAL.unpack(data)
    _check(magic, version)
    if kind == Signal.REFUSE:
        raise HandshakeError("the other side refused: it is another peer, or does not expect this one")
    if kind == Signal.DISAGREE:
        raise HandshakeError("one side insists on encryption and the other does not encrypt (encrypt=, or no PyNaCl)")
    if kind != expected:
        raise HandshakeError(f"message {kind} where {expected.name} is due")
    return nonce, cipher, share, proof


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise HandshakeError("the other side does not speak zpccl")
    if version != limits.PROTOCOL_VERSION:
        raise HandshakeError(f"the other side speaks version {version}, this one {limits.PROTOCOL_VERSION}")
