"""The ciphers for encrypted connections, and the exchange of fresh keys, from PyNaCl where it is installed.

PyNaCl is the extra `secure`. The engine's C threads call its libsodium by the addresses of its functions, so no frame
passes through Python. Only ciphers that this CPU does well are offered: without instructions for AES, AEGIS-128L and
AES-256-GCM are slow or missing; ChaCha20-Poly1305 is quick enough on any CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType

SHARE_BYTES = 32
"""Length of an X25519 public key; each end sends one."""


class Cipher(IntEnum):
    """The cipher of a connection's frames, by its number on the wire; the greater, the better."""

    PLAIN = 0
    """Not encrypted."""
    CHACHA20_POLY1305 = 1
    """RFC 8439. About 1.5 GB/s a core."""
    AES_256_GCM = 2
    """NIST SP 800-38D. About 4.5 GB/s a core."""
    AEGIS_128L = 3
    """draft-irtf-cfrg-aegis-aead, with a tag of 32 bytes. About 15 GB/s a core."""


_NAMES = {
    Cipher.CHACHA20_POLY1305: "crypto_aead_chacha20poly1305_ietf",
    Cipher.AES_256_GCM: "crypto_aead_aes256gcm",
    Cipher.AEGIS_128L: "crypto_aead_aegis128l",
}
_NEED_AES = (Cipher.AES_256_GCM, Cipher.AEGIS_128L)


@dataclass(frozen=True)
class Aead:
    """One cipher for the C engine: addresses of its two functions, and sizes in bytes."""

    encrypt_address: int
    decrypt_address: int
    key_bytes: int
    nonce_bytes: int
    tag_bytes: int


@dataclass(frozen=True)
class CipherKeys:
    """A cipher and the keys of the two directions of one connection; no other connection may use these keys."""

    cipher: Cipher
    tx_key: bytes = field(repr=False)
    rx_key: bytes = field(repr=False)


def _sodium() -> ModuleType | None:
    try:
        import nacl._sodium as sodium
    except ImportError:
        return None
    return sodium if sodium.lib.sodium_init() >= 0 else None


@functools.cache
def available() -> dict[Cipher, Aead]:
    """The ciphers to offer, best first; none without PyNaCl. PyNaCl before 1.6 has ChaCha20-Poly1305 alone."""
    sodium = _sodium()
    if sodium is None:
        return {}
    is_available = getattr(sodium.lib, "crypto_aead_aes256gcm_is_available", None)
    has_aes = is_available is not None and bool(is_available())
    found: dict[Cipher, Aead] = {}
    for cipher in sorted(_NAMES, reverse=True):
        name = _NAMES[cipher]
        if (has_aes or cipher not in _NEED_AES) and hasattr(sodium.lib, f"{name}_encrypt"):
            addresses = [_address(sodium, f"{name}_{what}") for what in ("encrypt", "decrypt")]
            sizes = [getattr(sodium.lib, f"{name}_{what}")() for what in ("keybytes", "npubbytes", "abytes")]
            found[cipher] = Aead(*addresses, *sizes)
    return found


def _address(sodium: ModuleType, name: str) -> int:
    return int(sodium.ffi.cast("uintptr_t", sodium.ffi.addressof(sodium.lib, name)))


def key_bytes(cipher: Cipher) -> int:
    """Length of a key in bytes, for a cipher that is available here."""
    return available()[cipher].key_bytes


def best_of(offers: Sequence[Cipher], others: Sequence[Cipher]) -> Cipher | None:
    """The best cipher that both sides offer, or None."""
    return max(set(offers) & set(others), default=None)


# --- Fresh keys, X25519 (RFC 7748) ------------------------------------------------------------------------------------


def public_share(private: bytes) -> bytes:
    """The public share for a private key of SHARE_BYTES random bytes."""
    from nacl.bindings import crypto_scalarmult_base

    return bytes(crypto_scalarmult_base(private))


def shared_secret(private: bytes, share: bytes) -> bytes:
    """The secret that only the holders of the two private keys can compute.

    Raises:
        ValueError: the other side's share gives everybody the same secret, so it was not made by the rules.
    """
    from nacl.bindings import crypto_scalarmult
    from nacl.exceptions import CryptoError

    try:
        return bytes(crypto_scalarmult(private, share))
    except CryptoError:
        raise ValueError("it is a point of low order") from None
