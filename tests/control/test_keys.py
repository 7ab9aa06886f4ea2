"""Secrets, keys and allow lists: which are accepted from where, and that no secret is shown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from zpccl import limits
from zpccl.control import keys
from zpccl.control.keys import master_keys, new_private_key, new_secret, peer_keys, public_key_of, read_allowed
from zpccl.errors import InvalidArgument


def test_one_secret_gives_both_sides_matching_keys() -> None:
    secret = new_secret()
    master, peer = master_keys(secret), peer_keys(secret)
    assert master is not None and peer is not None
    assert peer.master_public == master.public == zmq.curve_public(master.private)
    assert peer.public == zmq.curve_public(peer.private)
    assert list(master.allowed) == [keys.public_text(zmq.utils.z85.decode(peer.public))]
    assert len({master.private, peer.private, zmq.utils.z85.encode(master.link_seed)}) == 3
    again = master_keys(f"  {secret}\n")
    assert again is not None and again == master, "the same after a restart"
    other = master_keys(new_secret())
    assert other is not None and other.public != master.public and other.link_seed != master.link_seed


def test_own_keys_match_too(tmp_path: Path) -> None:
    private, theirs = new_private_key(), new_private_key()
    allow = tmp_path / "allow"
    allow.write_text(f"# partners\n\n{public_key_of(theirs)}  alice  # since spring\n")
    master, peer = master_keys(private, allow_file=allow), peer_keys(theirs, public_key_of(private))
    assert master is not None and peer is not None
    assert peer.master_public == master.public and master.public_text == public_key_of(private)
    assert master.allowed == {public_key_of(theirs): "alice"} and master.allow_file == allow


def test_without_a_secret_there_are_no_keys() -> None:
    assert master_keys() is None and peer_keys() is None


@pytest.mark.parametrize("make", [new_secret, new_private_key])
def test_typos_are_told_and_not_repeated(make: Callable[[], str]) -> None:
    text = make()
    for place in (4, 20, len(text) - 1):
        wrong = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(InvalidArgument, match="mistyped") as caught:
            master_keys(wrong)
        assert text[5:15] not in str(caught.value)
    for wrong in (text[:-1], text + "A", text[:-4], text.replace("_", "_ ", 1), text[:10] + "ä" + text[11:]):
        with pytest.raises(InvalidArgument, match="mistyped"):
            peer_keys(wrong)


@pytest.mark.parametrize("wrong", ["hello", "zps", "ZPS_abc", public_key_of(new_private_key())], ids=range(4))
def test_what_is_no_secret_is_refused_unsaid(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match="secret=") as caught:
        peer_keys(wrong)
    assert wrong not in str(caught.value).replace("zps_...", "")


@pytest.mark.parametrize("wrong", ["", "  ", 5, b"zps_"])
def test_an_empty_secret_is_a_mistake(wrong: Any) -> None:
    """Otherwise `ZPCCL_SECRET=$(cat wrong/path)` would silently let everybody in."""
    with pytest.raises(InvalidArgument, match="secret="):
        master_keys(wrong)


def test_where_secrets_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = new_secret(), new_secret(), new_secret()
    file = tmp_path / "secret"
    file.write_text(first + "\n")
    file.chmod(0o600)
    assert master_keys(secret_file=file) == master_keys(first)
    monkeypatch.setenv("ZPCCL_SECRET_FILE", str(file))
    assert master_keys() == master_keys(first)
    monkeypatch.setenv("ZPCCL_SECRET", second)
    assert peer_keys() == peer_keys(second)
    assert peer_keys(third) != peer_keys(second)
    assert master_keys(secret_file=file) == master_keys(first)
    monkeypatch.setenv("ZPCCL_SECRET", "")
    with pytest.raises(InvalidArgument, match="ZPCCL_SECRET is empty"):
        peer_keys()
    monkeypatch.delenv("ZPCCL_SECRET")
    monkeypatch.setenv("ZPCCL_SECRET_FILE", "")
    with pytest.raises(InvalidArgument, match="ZPCCL_SECRET_FILE is empty"):
        peer_keys()
    with pytest.raises(InvalidArgument, match="not both"):
        master_keys(first, secret_file=file)
    with pytest.raises(InvalidArgument, match="nowhere"):
        master_keys(secret_file=tmp_path / "nowhere")


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "secret"
    secret = new_secret()
    file.write_text(secret)
    for mode, is_warned in [(0o600, False), (0o644, True), (0o640, True)]:
        file.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zpccl"):
            master_keys(secret_file=file)
        assert ("chmod 600" in caplog.text) == is_warned
        assert secret not in caplog.text


def test_a_credential_of_systemd_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its access list lets only the service read it; the mask of that list takes the place of the group's rights."""
    file = tmp_path / "run.secret"
    file.write_text(new_secret())
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    for mode, is_warned in [(0o400, False), (0o440, False), (0o444, True)]:
        file.chmod(mode)
        caplog.clear()
        master_keys(secret_file=file)
        assert ("chmod 600" in caplog.text) == is_warned


def test_no_folder_of_credentials_is_not_the_working_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.secret").write_text(new_secret())
    (tmp_path / "run.secret").chmod(0o440)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "")
    master_keys(secret_file="run.secret")
    assert "chmod 600" in caplog.text


def test_a_list_that_others_can_write_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "allow"
    file.write_text(f"{public_key_of(new_private_key())} alice")
    for mode, is_warned in [(0o600, False), (0o644, False), (0o664, True), (0o646, True)]:
        file.chmod(mode)
        caplog.clear()
        read_allowed(file)
        assert ("chmod 644" in caplog.text) == is_warned


def test_what_does_not_go_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow = tmp_path / "allow"
    allow.write_text("")
    secret, private = new_secret(), new_private_key()
    public = public_key_of(private)
    for arguments in [(secret, None, allow), (private, None, None), (None, None, allow)]:
        with pytest.raises(InvalidArgument, match="allow list"):
            master_keys(*arguments)
    for own, other in [(secret, public), (private, None), (None, public)]:
        with pytest.raises(InvalidArgument, match=r"master_key=|ZPCCL_MASTER_KEY"):
            peer_keys(own, other)
    with pytest.raises(InvalidArgument, match="master_key= must be a public key"):
        peer_keys(private, private)
    monkeypatch.setenv("ZPCCL_MASTER_KEY", public)
    assert peer_keys(private) == peer_keys(private, public)


def test_secrets_do_not_show() -> None:
    secret = new_secret()
    master, peer = master_keys(secret), peer_keys(secret)
    assert master is not None and peer is not None
    for private in (master.private, master.link_seed, peer.private):
        for text in (repr(master), repr(peer)):
            assert repr(private)[2:-1] not in text


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["alice"], "line 1"),
        (["{0}"], "line 1 .* is not a public key and a name"),
        (["{0} alice bob"], "line 1"),
        (["{0} al/ice"], "name"),
        (["{0} alice", "", "{0} bob"], "line 3"),
        (["{0} alice", "{1} alice"], "line 2"),
        (["{private} alice"], "line 1.* must be a public key"),
        (["# {0} alice", ""], "allow has no key"),
    ],
)
def test_allow_lists_that_are_wrong(tmp_path: Path, lines: list[str], reason: str) -> None:
    private = new_private_key()
    public = [public_key_of(new_private_key()) for _ in range(2)]
    file = tmp_path / "allow"
    file.write_text("\n".join(line.format(*public, private=private) for line in lines))
    with pytest.raises(InvalidArgument, match=reason) as caught:
        read_allowed(file)
    assert private not in str(caught.value)


def test_allow_lists_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ALLOWED_KEYS_MAX", 2)
    file = tmp_path / "allow"
    file.write_text("".join(f"{public_key_of(new_private_key())} peer{i}\n" for i in range(3)))
    with pytest.raises(InvalidArgument, match="at most 2"):
        read_allowed(file)
    with pytest.raises(InvalidArgument, match="nowhere"):
        read_allowed(tmp_path / "nowhere")
