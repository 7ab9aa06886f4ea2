"""Which peer ids a key may use: half of an id is random, the other half a hash of that and of the key.

So the master can tell from a message alone whether its id belongs to the key of its connection. It remembers nothing
for that, and a restarted master needs to be told nothing.
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
    """True if a peer id is one of this key's. Without keys any id is as good as another."""
    return not identity or make_peer_id(identity, peer_id[:SALT_BYTES]) == peer_id
