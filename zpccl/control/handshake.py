"""The handshake of a data connection: four messages of known sizes before the first frame.

    dialler                                 acceptor
      HELLO  run, from, to, nonce, index,
             ciphers, share, MAC          ->   checks that it is addressed to this peer, of its run, from a neighbour
             <-  ACCEPT nonce, cipher,         or REFUSE, or DISAGREE: no common cipher
                        share, proof, padding
     COMMIT proof, padding               ->   once the dialler has ACCEPT on all connections of the link
             <-  READY proof                   once the acceptor has COMMIT on all of them

All connections of a link carry the same link nonce. A connection that replaces a lost one carries the nonce of the open
link, the index of the lost connection, and a generation above 0; its handshake is independent of other connections, and
READY is sent once the acceptor's data plane has taken it. After READY both sides hand their descriptors to the data
plane. The first frame may follow at once, so neither side reads beyond the end of a message.

Some paths lose all large packets (their MTU is small, and who says so is filtered). Such a path would carry the
handshake, and no frame. So padding follows ACCEPT and COMMIT, and no link comes up there. It is sent on the first
connection of a new link, as the others take the same path, and on each one that is added to a link later.

The MAC of HELLO is a keyed hash of the rest of it. A HELLO may have been captured, so its MAC proves nothing to the
acceptor; but without the key a dialler cannot make it do a key exchange. A proof is a keyed hash of the kind of the
message, the whole HELLO (run, both peers, link, index) and the acceptor's nonce, cipher and share. Only the two
peers and the master that issued it know its key, so ACCEPT authenticates the acceptor and COMMIT the dialler. Both
sides contribute fresh random bytes, so a captured handshake cannot be replayed; the kind of the message is included,
so no proof can be used as another. In a run without a secret the key is public: MAC and proofs then only confirm that
both sides mean the same connection.

The dialler offers ciphers, and the acceptor takes the best one that it supports. The proofs cover both, so an attacker
on the path cannot force a downgrade. The keys of the frames, one per direction and connection, are derived from the key
of the link, the transcript, and the shared secret of two ephemeral X25519 shares (forward secrecy): whoever learns the
key of the link or the secret of the run later cannot decrypt captured traffic.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

from zpccl import limits
from zpccl.engine.ciphers import SHARE_BYTES, Cipher, CipherKeys, key_bytes, shared_secret
from zpccl.errors import ProtocolViolation

MAGIC = b"zpL"
_HELLO = struct.Struct(">3sBB16s16s16s16sHHB32sI")
_SIGNAL = struct.Struct(">3sBB16sB32s32s")
MAC_BYTES = 16
HELLO_BYTES = _HELLO.size + MAC_BYTES
SIGNAL_BYTES = _SIGNAL.size
NONCE_BYTES = 16
PROOF_BYTES = 32
NO_SHARE = bytes(SHARE_BYTES)
_PADDING = bytes(limits.LINK_PADDING_BYTES)
_PUBLIC_KEY = b"zpccl: this run has no secret".ljust(32, b".")


class HandshakeError(ProtocolViolation):
    """The other side of a data connection does not speak the handshake, or refused it."""


class AuthenticationError(HandshakeError):
    """The other side does not have the key of the link."""


class Signal(enum.IntEnum):
    """Kinds of messages. HELLO has its own layout."""

    HELLO = 0
    ACCEPT = 1
    COMMIT = 2
    READY = 3
    REFUSE = 4
    """The connection reached another peer, or a peer that does not expect it."""
    DISAGREE = 5
    """No common cipher: one side requires encryption, and the other does not support it or has it switched off."""


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The first message: identifies the connection and its link."""

    run_id: bytes
    sender: bytes
    receiver: bytes
    nonce: bytes
    """16 random bytes that identify this attempt to set up the link."""
    index: int
    count: int
    """Number of connections of the link; LINK_CONNECTIONS_MAX for a replacement of a lost connection."""
    offers: int = 1 << Cipher.PLAIN
    """Bit n stands for cipher n; unknown bits are ignored, for future ciphers."""
    share: bytes = NO_SHARE
    """Public X25519 key of the sender, for this link only."""
    generation: int = 0
    """0: part of a new link. Greater: replaces a lost connection; grows with every dial for that index."""

    @property
    def padding(self) -> bytes:
        """What follows ACCEPT and COMMIT."""
        return b"" if self.index and not self.generation else _PADDING

    @property
    def ciphers(self) -> list[Cipher]:
        """The offered ciphers that are known here."""
        return [cipher for cipher in Cipher if self.offers >> cipher & 1]

    def encode(self, key: bytes) -> bytes:
        """Encodes the message, with a MAC made with the key of the link."""
        said = self.said()
        return said + _mac(said, key)

    def said(self) -> bytes:
        """The message without its MAC."""
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
        """Decodes a HELLO.

        Raises:
            HandshakeError: the bytes are not a valid HELLO.
        """
        if len(data) != HELLO_BYTES:
            raise HandshakeError(f"a hello of {len(data)} bytes, not {HELLO_BYTES}")
        magic, version, kind, *rest = _HELLO.unpack_from(data)
        _check(magic, version)
        index, count = rest[4:6]
        if kind != Signal.HELLO or not 1 <= count <= limits.LINK_CONNECTIONS_MAX or index >= count:
            raise HandshakeError(f"a hello of kind {kind} for connection {index} of {count}")
        return cls(*rest)


def check_hello(data: bytes, key: bytes) -> None:
    """Checks the MAC of a HELLO.

    Raises:
        AuthenticationError: it was not made with the key of the link.
    """
    if not hmac.compare_digest(data[-MAC_BYTES:], _mac(data[:-MAC_BYTES], key)):
        raise AuthenticationError("HELLO without the key of this link")


def _mac(said: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(said, digest_size=MAC_BYTES, key=key or _PUBLIC_KEY, person=b"zpccl link hello").digest()


class Transcript:
    """The transcript of a handshake, equal on both sides: makes and checks proofs.

    Args:
        hello: its first message.
        nonce: NONCE_BYTES random bytes of the acceptor.
        key: key of the link, 32 bytes; empty in a run without a secret.
        cipher: the acceptor's choice.
        share: ephemeral public X25519 key of the acceptor, for this connection only.
    """

    def __init__(
        self, hello: LinkHello, nonce: bytes, key: bytes, cipher: Cipher = Cipher.PLAIN, share: bytes = NO_SHARE
    ) -> None:
        assert len(nonce) == NONCE_BYTES and len(share) == SHARE_BYTES
        self.nonce = nonce
        self.cipher = cipher
        self._share = share
        self.hello = hello
        self._said = hello.said() + nonce + bytes([cipher]) + share
        self._key = key or _PUBLIC_KEY

    def encode(self, signal: Signal) -> bytes:
        """Encodes a message with its proof."""
        return _SIGNAL.pack(
            MAGIC, limits.PROTOCOL_VERSION, signal, self.nonce, self.cipher, self._share, self._proof(signal)
        )

    def derive_keys(self, private: bytes, *, is_dialler: bool) -> CipherKeys | None:
        """Derives the cipher keys of this side; None for a plain connection. Call it after check() has succeeded.

        Args:
            private: the private X25519 key that belongs to the share this side has sent.
            is_dialler: which side this is.

        Raises:
            HandshakeError: the other side's share is invalid.
        """
        if self.cipher is Cipher.PLAIN:
            return None
        try:
            secret = shared_secret(private, self._share if is_dialler else self.hello.share)
        except ValueError as error:
            raise HandshakeError(f"the other side's share is invalid: {error}") from None
        root = hashlib.blake2b(self._said + secret, key=self._key, person=b"zpccl seal root").digest()
        dialler, acceptor = (
            hashlib.blake2b(side, digest_size=key_bytes(self.cipher), key=root, person=b"zpccl seal key").digest()
            for side in (b"dialler", b"acceptor")
        )
        return CipherKeys(self.cipher, dialler, acceptor) if is_dialler else CipherKeys(self.cipher, acceptor, dialler)

    def check(self, data: bytes, expected: Signal) -> None:
        """Checks that `data` is the expected message with a valid proof.

        Raises:
            AuthenticationError: the proof is wrong.
            HandshakeError: another message, or malformed.
        """
        nonce, cipher, share, proof = _unpack(data, expected)
        is_same = (nonce, cipher, share) == (self.nonce, self.cipher, self._share)
        if not is_same or not hmac.compare_digest(proof, self._proof(expected)):
            raise AuthenticationError(f"{expected.name} without the key of this link")

    def _proof(self, signal: Signal) -> bytes:
        return hashlib.blake2b(bytes([signal]) + self._said, digest_size=PROOF_BYTES, key=self._key).digest()


def accepted(hello: LinkHello, data: bytes, key: bytes) -> Transcript:
    """Checks the answer to a HELLO and returns the transcript.

    Raises:
        AuthenticationError: its proof is wrong.
        HandshakeError: it is not an ACCEPT, or chooses a cipher that was not offered.
    """
    nonce, cipher, share, _ = _unpack(data, Signal.ACCEPT)
    if cipher not in hello.ciphers:
        raise HandshakeError(f"the other side chose cipher {cipher}, which was not offered")
    transcript = Transcript(hello, nonce, key, Cipher(cipher), share)
    transcript.check(data, Signal.ACCEPT)
    return transcript


def is_hello(data: bytes) -> bool:
    """True if a message that begins with `data` is a HELLO: the other side has also dialled this connection."""
    return data[: len(MAGIC)] == MAGIC and data[len(MAGIC) + 1] == Signal.HELLO


def encode_refusal(signal: Signal = Signal.REFUSE) -> bytes:
    """Encodes a REFUSE or DISAGREE. It has no proof, because the refused side may have no key."""
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
        raise HandshakeError("one side encrypts and the other does not (encrypt=)")
    if kind != expected:
        raise HandshakeError(f"message {kind} instead of {expected.name}")
    return nonce, cipher, share, proof


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise HandshakeError("the other side does not speak zpccl")
    if version != limits.PROTOCOL_VERSION:
        raise HandshakeError(f"the other side speaks version {version}, this one {limits.PROTOCOL_VERSION}")
