"""Chooses the ciphers for data links from the user's option, the secret of the run, and the installed packages."""

from __future__ import annotations

import os
import warnings

from zpccl.engine.ciphers import Cipher, available
from zpccl.errors import InvalidArgument

_NEEDS_PYNACL = "encryption of data needs PyNaCl: pip install 'zpccl[secure]'"
_WORDS = {"1": True, "true": True, "0": False, "false": False, "": None}


def ciphers_to_offer(encrypt: bool | None, *, has_secret: bool) -> tuple[Cipher, ...]:
    """The ciphers that this peer offers for its links, best first.

    Args:
        encrypt: True: encrypted links only. False: no encrypted links. None: encrypted if both sides can, unless
            ZPCCL_ENCRYPT is set to 1 or 0.
        has_secret: without a secret there are no keys, and nothing is encrypted.

    Raises:
        InvalidArgument: encryption is required, but there is no secret or no PyNaCl; or the option is not a bool.
    """
    source = "encrypt="
    if encrypt is None and "ZPCCL_ENCRYPT" in os.environ:
        source = "ZPCCL_ENCRYPT"
        text = os.environ[source].lower()
        if text not in _WORDS:
            raise InvalidArgument(f"ZPCCL_ENCRYPT is {text!r}; set it to 1 or 0")
        encrypt = _WORDS[text]
    if not (encrypt is None or isinstance(encrypt, bool)):
        raise InvalidArgument(f"encrypt={encrypt!r} is not True, False or None")
    if encrypt and not has_secret:
        raise InvalidArgument(f"{source} asks for encryption, which needs a secret; set ZPCCL_SECRET or secret=")
    if encrypt and not available():
        raise InvalidArgument(f"{source} asks for encryption, but {_NEEDS_PYNACL}")
    if encrypt is False or not has_secret:
        return (Cipher.PLAIN,)
    if not available():
        text = f"this run has a secret, but its data travels unencrypted: {_NEEDS_PYNACL}; or say encrypt=False"
        warnings.warn(text, RuntimeWarning, stacklevel=4)  # At the user's call of Communicator.
    return tuple(available()) if encrypt else (*available(), Cipher.PLAIN)
