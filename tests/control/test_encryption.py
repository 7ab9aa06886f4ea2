"""Whether data is encrypted, for every setting on every machine."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import nacl._sodium
import pytest

import zpccl
from zpccl.control import encryption
from zpccl.control.encryption import ciphers_to_offer
from zpccl.control.keys import new_secret
from zpccl.engine import ciphers
from zpccl.engine.ciphers import Cipher
from zpccl.errors import InvalidArgument

ALL = (Cipher.AEGIS_128L, Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZPCCL_ENCRYPT", raising=False)
    has(monkeypatch, *ALL)


def has(monkeypatch: pytest.MonkeyPatch, *available: Cipher) -> None:
    monkeypatch.setattr(encryption, "available", lambda: dict.fromkeys(available))


@pytest.mark.parametrize("encrypt", [None, True])
def test_with_a_secret_nothing_less_is_offered(encrypt: bool | None) -> None:
    assert ciphers_to_offer(encrypt, has_secret=True) == ALL


@pytest.mark.parametrize("encrypt", [None, False])
def test_without_a_secret_nothing_is(encrypt: bool | None) -> None:
    assert ciphers_to_offer(encrypt, has_secret=False) == (Cipher.PLAIN,)


def test_a_secret_needs_pynacl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if nobody wants encryption. The error names the package to install, and the way to do without it."""
    has(monkeypatch)
    with pytest.raises(InvalidArgument, match=r"zpccl\[secure\].*encrypt=False"):
        zpccl.Communicator("127.0.0.1:1", secret=new_secret())
    assert ciphers_to_offer(False, has_secret=True) == (Cipher.PLAIN,)
    assert ciphers_to_offer(None, has_secret=False) == (Cipher.PLAIN,)


def test_insisting_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="needs a secret"):
        ciphers_to_offer(True, has_secret=False)
    has(monkeypatch)
    with pytest.raises(InvalidArgument, match="needs PyNaCl"):
        ciphers_to_offer(True, has_secret=True)


@pytest.mark.parametrize(("text", "encrypt"), [("1", True), ("true", True), ("0", False), ("False", False), ("", None)])
def test_the_environment_decides_where_nothing_is_said(
    text: str, encrypt: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ciphers_to_offer(encrypt, has_secret=True)
    monkeypatch.setenv("ZPCCL_ENCRYPT", text)
    assert ciphers_to_offer(None, has_secret=True) == wanted
    assert ciphers_to_offer(False, has_secret=True) == (Cipher.PLAIN,)


@pytest.mark.parametrize("wrong", ["yes please", "2"])
def test_wrong_words(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_ENCRYPT", wrong)
    with pytest.raises(InvalidArgument, match="ZPCCL_ENCRYPT"):
        ciphers_to_offer(None, has_secret=True)


@pytest.mark.parametrize("wrong", [1, "1", "aegis"])
def test_wrong_arguments(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="encrypt="):
        ciphers_to_offer(wrong, has_secret=True)


# --- What a machine has -----------------------------------------------------------------------------------------------


def test_without_pynacl_there_are_no_ciphers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nacl._sodium", None)
    assert ciphers.available.__wrapped__() == {}


@pytest.mark.parametrize("has_functions", [True, False], ids=["a CPU without AES", "PyNaCl 1.5"])
def test_without_aes_the_cipher_that_needs_none_is_offered(
    monkeypatch: pytest.MonkeyPatch, has_functions: bool
) -> None:
    sodium = nacl._sodium.lib

    class Lib:
        def __getattr__(self, name: str) -> Any:
            if name == "crypto_aead_aes256gcm_is_available" and has_functions:
                return lambda: 0
            if not has_functions and ("aes256gcm" in name or "aegis" in name):
                raise AttributeError(name)
            return getattr(sodium, name)

    ffi = SimpleNamespace(addressof=lambda lib, name: name, cast=lambda kind, name: 1)
    with monkeypatch.context() as patch:
        patch.setattr(nacl, "_sodium", SimpleNamespace(lib=Lib(), ffi=ffi))
        patch.setitem(sys.modules, "nacl._sodium", nacl._sodium)
        assert list(ciphers.available.__wrapped__()) == [Cipher.CHACHA20_POLY1305]


def test_sizes_are_those_of_the_specifications() -> None:
    sizes = {
        Cipher.CHACHA20_POLY1305: (32, 12, 16),
        Cipher.AES_256_GCM: (32, 12, 16),
        Cipher.AEGIS_128L: (16, 16, 32),
    }
    found = ciphers.available()
    assert Cipher.CHACHA20_POLY1305 in found
    for cipher, aead in found.items():
        assert (aead.key_bytes, aead.nonce_bytes, aead.tag_bytes) == sizes[cipher]
        assert aead.encrypt_address and aead.decrypt_address
