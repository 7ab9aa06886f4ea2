"""Secrets and keys: their text form, their sources, and the keys derived from them.

Two ways to authenticate peers:

    one secret   `zps_...`, held by the master and all peers. Both sides derive the CURVE keys of both sides from it.
    own keys     each party has its own private key `zpk_...`. The master has a list of the public keys `zpp_...` that
                 it admits; peers know the public key of the master.

Each text ends in a checksum, so that a typo can be distinguished from a wrong secret. Every derived key has its own
context, so that it reveals nothing about another. The text of a secret is never part of an error, a log line or a repr.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from blake3 import blake3
from zmq.utils import z85

from zpccl import limits
from zpccl.errors import InvalidArgument

logger = logging.getLogger("zpccl.keys")

SECRET, PRIVATE, PUBLIC = "zps", "zpk", "zpp"
_WHAT = {SECRET: "a secret (zps_...)", PRIVATE: "a private key (zpk_...)", PUBLIC: "a public key (zpp_...)"}
_KEY_BYTES = 32
_CHECKSUM_BYTES = 4
_NAME = re.compile(r"[\w.@:-]{1,128}\Z", re.ASCII)


@dataclass(frozen=True)
class PeerKeys:
    """The CURVE keys of a peer and the public key that it expects of the master, as Z85 text."""

    public: bytes
    private: bytes = field(repr=False)
    master_public: bytes

    @property
    def identity(self) -> str:
        """The text of the public key, by which the master identifies this peer's connections."""
        return public_text(z85.decode(self.public))


@dataclass(frozen=True)
class MasterKeys:
    """The keys of a master.

    Attributes:
        public, private: its CURVE keys, as Z85 text.
        link_seed: seed of the keys of data connections; the same after a restart.
        allowed: name of each admitted peer, by the text of its public key.
        allow_file: the file that `allowed` was read from, or None.
    """

    public: bytes
    private: bytes = field(repr=False)
    link_seed: bytes = field(repr=False)
    allowed: Mapping[str, str]
    allow_file: Path | None = None

    @property
    def public_text(self) -> str:
        """The text of the public key, for peers with their own keys."""
        return public_text(z85.decode(self.public))


# --- Text -----------------------------------------------------------------------------------------------------------


def new_secret() -> str:
    """The text of a new secret."""
    return _text(SECRET, secrets.token_bytes(_KEY_BYTES))


def new_private_key() -> str:
    """The text of a new private key."""
    return _text(PRIVATE, secrets.token_bytes(_KEY_BYTES))


def public_key_of(private_key: str) -> str:
    """The text of the public key that belongs to a private one.

    Raises:
        InvalidArgument: the text is no private key.
    """
    public, _ = _own_pair(_value(private_key, (PRIVATE,), "the key")[1])
    return public_text(z85.decode(public))


def public_text(public: bytes) -> str:
    """The text of a CURVE public key of 32 bytes."""
    return _text(PUBLIC, public)


def checked_name(name: str) -> str:
    """Checks the name of a key: letters, digits and "._@:-".

    Raises:
        InvalidArgument: it has other characters, or is too long or empty.
    """
    if _NAME.match(name) is None:
        raise InvalidArgument(f'{name!r} is not a valid key name: use 1 to 128 letters, digits and any of "._@:-"')
    return name


def _checksum(kind: str, value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_CHECKSUM_BYTES, person=f"zpccl {kind}".encode()).digest()


def _text(kind: str, value: bytes) -> str:
    return f"{kind}_{base64.urlsafe_b64encode(value + _checksum(kind, value)).decode()}"


def _value(text: str, kinds: tuple[str, ...], source: str) -> tuple[str, bytes]:
    """Parses a text: its kind and bytes. Errors do not contain the text, which may be a secret."""
    expected = " or ".join(_WHAT[kind] for kind in kinds)
    kind, _, body = text.strip().partition("_")
    if kind not in kinds:
        found = f"is {_WHAT[kind]}" if kind in _WHAT else "is something else"
        raise InvalidArgument(f"{source} must be {expected}, but {found}; make one with `zpccl keygen`")
    try:
        data = base64.b64decode(body.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        data = b""
    value = data[:_KEY_BYTES]
    if len(data) != _KEY_BYTES + _CHECKSUM_BYTES or data[_KEY_BYTES:] != _checksum(kind, value):
        raise InvalidArgument(f"{source} is mistyped or cut off: its checksum is wrong")
    return kind, value


# --- Where they come from -------------------------------------------------------------------------------------------


def find_secret(secret: object, secret_file: str | os.PathLike[str] | None = None) -> tuple[str, str] | None:
    """The text of the secret and its source: the keyword, the file, ZPCCL_SECRET or ZPCCL_SECRET_FILE; or None.

    Raises:
        InvalidArgument: the file cannot be read, or the value is empty, which is treated as a mistake.
    """
    if secret is not None and secret_file is not None:
        raise InvalidArgument("give a secret or a file with one, not both")
    if secret is not None:
        if not isinstance(secret, str):
            raise InvalidArgument(f"secret= is a {type(secret).__name__}, not a text")
        found = (secret, "secret=")
    elif secret_file is not None:
        found = (_read(Path(secret_file)), f"what {secret_file} holds")
    elif "ZPCCL_SECRET" in os.environ:
        found = (os.environ["ZPCCL_SECRET"], "ZPCCL_SECRET")
    elif "ZPCCL_SECRET_FILE" in os.environ:
        path = os.environ["ZPCCL_SECRET_FILE"]
        found = (_read(Path(path)), f"what {path} of ZPCCL_SECRET_FILE holds") if path else ("", "ZPCCL_SECRET_FILE")
    else:
        return None
    if not found[0].strip():
        raise InvalidArgument(f"{found[1]} is empty; leave it out to run without a secret")
    return found


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & _rights_of_others(path):
                logger.warning("%s can be read by other users of this host; chmod 600 it", path)
            return file.read(limits.SECRET_FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def _rights_of_others(path: Path) -> int:
    """The mode bits that let other users read a file."""
    # systemd protects the credentials of a service by an access list, whose mask looks like a right of the group.
    is_credential = path.parent == Path(os.environ.get("CREDENTIALS_DIRECTORY") or os.devnull)
    return stat.S_IROTH if is_credential else stat.S_IRGRP | stat.S_IROTH


def read_allowed(path: Path) -> dict[str, str]:
    """Reads an allow list: one line per peer with its public key and name; # begins a comment.

    Raises:
        InvalidArgument: the file cannot be read, a line is wrong, or there is no key: an empty file is mostly one that
            is being written, and would remove all peers.
    """
    allowed: dict[str, str] = {}
    try:
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            logger.warning("other users of this host can write to %s, and so let anybody in; chmod 644 it", path)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"line {number} of {path}"
        if len(words) != 2:
            raise InvalidArgument(f"{place} is not a public key and a name")
        key = _text(PUBLIC, _value(words[0], (PUBLIC,), f"the key in {place}")[1])
        if key in allowed or words[1] in allowed.values():
            raise InvalidArgument(f"{place} has a key or a name that an earlier line has")
        allowed[key] = checked_name(words[1])
    if not allowed:
        raise InvalidArgument(f"{path} has no key, so no peer could join")
    if len(allowed) > limits.ALLOWED_KEYS_MAX:
        raise InvalidArgument(f"{path} has {len(allowed)} keys; at most {limits.ALLOWED_KEYS_MAX} are allowed")
    return allowed


# --- What is derived ------------------------------------------------------------------------------------------------


def master_keys(
    secret: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    allow_file: str | os.PathLike[str] | None = None,
) -> MasterKeys | None:
    """The keys of a master, or None if it has no secret.

    Raises:
        InvalidArgument: the secret or the allow list is malformed, or they do not match.
    """
    found = find_secret(secret, secret_file)
    if found is None:
        if allow_file is not None:
            raise InvalidArgument("an allow list needs a private key of the master: `zpccl keygen --peer master`")
        return None
    kind, value = _value(found[0], (SECRET, PRIVATE), found[1])
    link_seed = _derive("data connections", value)
    if kind == SECRET:
        if allow_file is not None:
            raise InvalidArgument(f"{found[1]} is shared by all peers, so an allow list needs a private key instead")
        peer_public, _ = _pair(_derive("CURVE key of the peers", value))
        public, private = _pair(_derive("CURVE key of the master", value))
        return MasterKeys(public, private, link_seed, {public_text(z85.decode(peer_public)): "a holder of the secret"})
    if allow_file is None:
        raise InvalidArgument(f"{found[1]} is a private key; name the keys of the peers in an allow list (--allow)")
    path = Path(allow_file)
    return MasterKeys(*_own_pair(value), link_seed, read_allowed(path), path)


def peer_keys(secret: str | None = None, master_key: str | None = None) -> PeerKeys | None:
    """The keys of a peer, or None if it has no secret.

    Args:
        secret: a secret or a private key; ZPCCL_SECRET or the file of ZPCCL_SECRET_FILE if left out.
        master_key: the public key of the master, if the peer has a private key; ZPCCL_MASTER_KEY if left out.

    Raises:
        InvalidArgument: a text is malformed, or the two do not match.
    """
    found = find_secret(secret)
    source = "master_key=" if master_key is not None else "ZPCCL_MASTER_KEY"
    master_key = os.environ.get("ZPCCL_MASTER_KEY") if master_key is None else str(master_key)
    if found is None:
        if master_key is not None:
            raise InvalidArgument(f"{source} is set, but this peer has no private key; set ZPCCL_SECRET to it")
        return None
    kind, value = _value(found[0], (SECRET, PRIVATE), found[1])
    if kind == SECRET:
        if master_key is not None:
            raise InvalidArgument(f"{source} is set, but {found[1]} is a secret shared with the master; give only one")
        master_public, _ = _pair(_derive("CURVE key of the master", value))
        return PeerKeys(*_pair(_derive("CURVE key of the peers", value)), master_public)
    if master_key is None:
        raise InvalidArgument(f"{found[1]} is a private key; set ZPCCL_MASTER_KEY to the public key of the master")
    return PeerKeys(*_own_pair(value), z85.encode(_value(master_key, (PUBLIC,), source)[1]))


def _derive(context: str, value: bytes) -> bytes:
    return blake3(value, derive_key_context=f"zpccl 2026 {context}").digest()


def _own_pair(value: bytes) -> tuple[bytes, bytes]:
    return _pair(_derive("CURVE key of its holder", value))


def _pair(private: bytes) -> tuple[bytes, bytes]:
    """Public and private CURVE key as Z85 text, from 32 private bytes."""
    text = z85.encode(private)
    return zmq.curve_public(text), text
