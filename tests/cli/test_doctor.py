"""What zpccl doctor finds about the addresses of a host. tests/e2e/test_doctor.py tests the whole command."""

from __future__ import annotations

import pytest

from zpccl.cli.doctor import _judge_addresses
from zpccl.cli.findings import Level
from zpccl.cli.main import main

ALONE = ("127.0.0.1:48149", "[::1]:48149")


@pytest.mark.parametrize(
    ("candidates", "master", "level"),
    [
        ((*ALONE, "192.0.2.5:48149"), "192.0.2.1:48148", Level.OK),
        (ALONE, "192.0.2.1:48148", Level.PROBLEM),
        (ALONE, "127.0.0.1:48148", Level.WARNING),
    ],
)
def test_a_host_that_has_only_itself(candidates: tuple[str, ...], master: str, level: Level) -> None:
    """That is enough for a run on one host."""
    found = _judge_addresses(candidates, (master,))
    assert found.level is level and "127.0.0.1:48149 (lo)" in found.text
    assert bool(found.fix) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ZPCCL_CONNECTIONS", "many", "ZPCCL_CONNECTIONS is 'many'; give a whole number"),
        ("ZPCCL_CONNECTIONS", "129", "ZPCCL_CONNECTIONS 129 is not an integer from 0 to 128"),
        ("ZPCCL_UPLOAD_LIMIT", "many", "ZPCCL_UPLOAD_LIMIT is 'many'; give a whole number"),
        ("ZPCCL_UPLOAD_LIMIT", "5", "ZPCCL_UPLOAD_LIMIT 5 is not a number of bytes a second"),
        ("ZPCCL_LOCAL_SOCKETS", "many", "ZPCCL_LOCAL_SOCKETS is 'many'"),
        ("ZPCCL_ENCRYPT", "yes", "ZPCCL_ENCRYPT is 'yes'; set it to 1 or 0"),
    ],
)
def test_a_variable_with_which_no_peer_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 2
    assert f"zpccl: {message}" in capsys.readouterr().err
