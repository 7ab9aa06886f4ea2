"""Checks of a host that need no master."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from zpccl import limits
from zpccl.cli import host_checks
from zpccl.cli.findings import Level
from zpccl.control.encryption import ciphers_to_offer
from zpccl.errors import InvalidArgument


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_checks, "SETTINGS", tmp_path)
    for name, value in {
        "ipv4/tcp_rmem": "4096\t131072\t6291456",
        "ipv4/tcp_wmem": "4096\t16384\t4194304",
        "core/rmem_max": "212992",
        "ipv4/tcp_congestion_control": "cubic",
        "ipv4/tcp_available_congestion_control": "reno cubic",
        "ipv4/tcp_allowed_congestion_control": "reno cubic",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    return tmp_path


def test_the_defaults_of_linux_are_good(settings: Path) -> None:
    received, sent = host_checks.check_buffers()
    assert received.level is sent.level is Level.OK
    assert "4096 131072 6291456" in received.text and "212992" in received.text and "wmem_max" not in sent.text


def test_small_buffers(settings: Path) -> None:
    (settings / "ipv4/tcp_wmem").write_text("4096 16384 1000000")
    _, sent = host_checks.check_buffers()
    assert sent.level is Level.WARNING and "80 Mbit/s" in sent.text
    assert sent.fix == "sysctl -w net.ipv4.tcp_wmem='4096 16384 4194304'"


def test_a_system_without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "SETTINGS", tmp_path / "none")
    assert [found.level for found in host_checks.check_buffers()] == [Level.WARNING, Level.WARNING]


class Refusing(socket.socket):
    """A socket of a kernel that does not let this process choose the congestion control."""

    def setsockopt(self, *arguments: object) -> None:
        raise PermissionError


@pytest.mark.parametrize(
    ("available", "commands"),
    [
        ("reno cubic", ["modprobe tcp_bbr", "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"]),
        ("reno cubic bbr", ["sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"]),
    ],
)
def test_no_bbr(settings: Path, monkeypatch: pytest.MonkeyPatch, available: str, commands: list[str]) -> None:
    (settings / "ipv4/tcp_available_congestion_control").write_text(available)
    monkeypatch.setattr(socket, "socket", Refusing)
    found = host_checks.check_congestion_control()
    assert found.level is Level.WARNING and found.text.startswith("cubic") and found.fix.splitlines() == commands


def test_bbr(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Willing(socket.socket):
        def setsockopt(self, *arguments: object) -> None:
            assert arguments[2] == b"bbr"

    monkeypatch.setattr(socket, "socket", Willing)
    assert host_checks.check_congestion_control().level is Level.OK


@pytest.mark.parametrize(
    ("soft", "hard", "level", "fix"),
    [
        (1024, 1 << 20, Level.WARNING, f"ulimit -n {limits.OPEN_FILES_COUNT}"),
        (1024, 1024, Level.WARNING, f"ulimit -n {limits.OPEN_FILES_COUNT}    # as root"),
        (1024, resource.RLIM_INFINITY, Level.WARNING, f"ulimit -n {limits.OPEN_FILES_COUNT}"),
        (limits.OPEN_FILES_COUNT, 1 << 20, Level.OK, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Level.OK, ""),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, level: Level, fix: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = host_checks.check_open_files()
    assert (found.level, found.fix) == (level, fix)
    assert soft != 1024 or ("14 far peers" in found.text and "57 with 16 each" in found.text)


def test_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZPCCL_ENCRYPT", raising=False)
    assert host_checks.check_encryption(False).level is Level.WARNING
    assert "keygen" in host_checks.check_encryption(False).fix
    assert ciphers_to_offer(None, has_secret=True)[0].name in host_checks.check_encryption(True).text
    monkeypatch.setenv("ZPCCL_ENCRYPT", "0")
    assert "unencrypted" in host_checks.check_encryption(True).text

    def lacking(encrypt: object, *, has_secret: bool) -> None:
        raise InvalidArgument("no PyNaCl")

    monkeypatch.setattr(host_checks, "ciphers_to_offer", lacking)
    monkeypatch.setattr(host_checks, "available", lambda: ())
    found = host_checks.check_encryption(True)
    assert found.level is Level.PROBLEM and found.fix == "pip install 'zpccl[secure]'"


@pytest.mark.parametrize(("value", "has_secret"), [("1", False), ("yes", False), ("yes", True)])
def test_encryption_with_which_no_peer_starts(monkeypatch: pytest.MonkeyPatch, value: str, has_secret: bool) -> None:
    monkeypatch.setenv("ZPCCL_ENCRYPT", value)
    found = host_checks.check_encryption(has_secret)
    assert found.level is Level.PROBLEM and "ZPCCL_ENCRYPT" in found.text and "unset ZPCCL_ENCRYPT" in found.fix
