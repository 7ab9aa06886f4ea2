"""Peer ids that are bound to a key: half of an id is random, the other half a hash of that half and the public key.

The master can check from a message alone whether the peer id in it belongs to the key of the connection. The check
needs no stored state, so it also works after a restart of the master.
"""

from __future__ import annotations

import hashlib

SALT_BYTES = 8
_TAG_BYTES = 8


def make_peer_id(identity: str, salt: bytes) -> bytes:
    """A peer id of 16 bytes for the holder of a key.

    Args:
        identity: text of the public key, "" in a run without a secret.
        salt: SALT_BYTES random bytes.
    """
    assert len(salt) == SALT_BYTES
    tag = hashlib.blake2b(salt + identity.encode(), digest_size=_TAG_BYTES, person=b"zpccl peer id")
    return salt + tag.digest()


def is_peer_id_of(peer_id: bytes, identity: str) -> bool:
    """True if the peer id was made for this key. Always true in a run without keys."""
    return not identity or make_peer_id(identity, peer_id[:SALT_BYTES]) == peer_id
