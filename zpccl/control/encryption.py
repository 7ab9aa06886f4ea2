"""Chooses the ciphers for data links from the user's option, the secret of the run, and the installed packages."""

from __future__ import annotations

from zpccl.control.switches import read_switch
from zpccl.engine.ciphers import Cipher, available
from zpccl.errors import InvalidArgument

_NEEDS_PYNACL = "encryption of data needs PyNaCl: pip install 'zpccl[secure]'"


def ciphers_to_offer(encrypt: bool | None, *, has_secret: bool) -> tuple[Cipher, ...]:
    """The ciphers that this peer offers for its links, best first.

    Args:
        encrypt: True: encrypted links only. False: no encrypted links. None: as ZPCCL_ENCRYPT says, 1 or 0; if that is
            not set, True with a secret.
        has_secret: without a secret there are no keys, and nothing is encrypted.

    Raises:
        InvalidArgument: encryption is required, but there is no PyNaCl, or no secret; or the option is not a bool.
    """
    encrypt, source = read_switch(encrypt, "encrypt")
    if encrypt and not has_secret:
        raise InvalidArgument(f"{source} asks for encryption, which needs a secret; set ZPCCL_SECRET or secret=")
    if encrypt is False or not has_secret:
        return (Cipher.PLAIN,)
    if not available():
        reason = f"{source} asks for it" if encrypt else "this run has a secret; encrypt=False leaves data unencrypted"
        raise InvalidArgument(f"{_NEEDS_PYNACL} ({reason})")
    return tuple(available())
