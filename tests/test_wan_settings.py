"""Settings of wide-area networks (tools/wan/settings.py), and their form for the emulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from common import WorkerFailed
from networks import NetworkUnavailable
from wan import emulated
from wan.emulated import request_of
from wan.settings import PathSettings, Settings, SettingsError, queue_bytes


def test_a_line_sets_what_it_names_and_leaves_the_rest() -> None:
    settings = Settings(3).with_lines(
        ["# three sites", "", "link * * delay_ms=50  # all", "path 2 0 loss=0.1% loss_run=3", "link 0 1 rate_mbit=1k"]
    )
    assert settings.paths[0, 1] == settings.paths[1, 0] == PathSettings(delay_ms=50, rate_mbit=1000)
    assert settings.paths[2, 0] == PathSettings(delay_ms=50, loss=0.001, loss_run=3)
    assert settings.paths[0, 2] == PathSettings(delay_ms=50)
    assert (0, 0) not in settings.paths and len(settings.paths) == 6
    again = settings.with_line("link 0 1 cut=1")
    assert again.paths[1, 0].cut is True and settings.paths[1, 0].cut is False
    assert again.with_line("path * * cut=0") == settings


def test_hosts_and_timing_have_lines_too() -> None:
    settings = Settings(2).with_lines(["host 1 egress_mbit=500 down=1", "host * ingress_mbit=9", "timing burst_us=100"])
    assert (settings.hosts[1].egress_mbit, settings.hosts[1].down) == (500, True)
    assert [host.ingress_mbit for host in settings.hosts.values()] == [9, 9]
    assert (settings.timing.burst_us, settings.timing.coalesce_us) == (100, 100)


def test_its_own_lines_say_all_of_it() -> None:
    settings = Settings(3).with_lines(
        [
            "link 0 2 jitter_ms=2.5 rate_mbit=12.5 queue_bytes=3M cut=1",
            "path 0 1 loss=0.123456789 queue_bytes=1234567",
            "host 1 down=1",
            "timing memory_bytes=1G",
        ]
    )
    assert "path 0 1 delay_ms=0 jitter_ms=0 " in "\n".join(settings.lines())
    assert Settings(3).with_lines(settings.lines()) == settings


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("route 0 1 delay_ms=1", "'route' is none of"),
        ("link 0 3 delay_ms=1", "'3' is no host"),
        ("link 0", "'nothing' is no host"),
        ("path 1 1 delay_ms=1", "to itself"),
        ("link 0 1 delay=1", "'delay=1' is not key=value"),
        ("link 0 1 delay_ms", "'delay_ms' is not key=value"),
        ("link 0 1 delay_ms=soon", "no number"),
        ("link 0 1 delay_ms=-1", "at least 0"),
        ("link 0 1 loss=101%", "at most 1"),
        ("link 0 1 loss=nan", "at least 0"),
        ("link 0 1 rate_mbit=inf", "at least 0"),
        ("link 0 1 loss_run=0", "at least 1"),
        ("host -1 down=1", "'-1' is no host"),
    ],
)
def test_wrong_lines_are_refused_by_number(line: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"^line 2: .*{problem}"):
        Settings(3).with_lines(["", line])


def test_a_queue_holds_what_is_said_or_a_tenth_of_a_second() -> None:
    assert queue_bytes(0, rate_mbit=1000) == 12_500_000
    assert queue_bytes(0, rate_mbit=1) == 128_000
    assert queue_bytes(5000, rate_mbit=1) == 5000


def test_the_emulator_is_told_everything_in_ns_bits_and_bytes() -> None:
    settings = Settings(2).with_lines(
        ["path 0 1 delay_ms=0.5 jitter_ms=0.25 rate_mbit=10 loss=1% loss_run=2 cut=1", "host 1 ingress_mbit=1 down=1"]
    )
    assert request_of(settings).splitlines() == [
        "timing 250000 100000 4000000000",
        "path 0 1 500000 250000 20000000 10000000 0.01 2.0 128000 1",
        "path 1 0 0 0 20000000 0 0.0 1.0 128000 0",
        "host 0 0 128000 0 128000 0",
        "host 1 0 128000 1000000 128000 1",
    ]


@pytest.mark.parametrize("content", [None, b"\xff", b"link 0 9"])
def test_the_command_says_what_is_wrong_with_its_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "wan.conf"
    if content is not None:
        path.write_bytes(content)
    command = [sys.executable, str(Path(emulated.__file__).parent), "2", str(path)]
    ended = subprocess.run(command, text=True, capture_output=True, check=False)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1 and str(path) in ended.stderr


def test_a_compiler_that_fails_leaves_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are skipped if no network can be created, but not if the source is wrong."""
    monkeypatch.setattr(emulated, "_PROGRAM", tmp_path / "build" / "emulator")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(WorkerFailed, match=r"cannot compile the emulator: .*false exits with 1"):
        emulated.build_emulator()
    (tmp_path / "file").touch()
    monkeypatch.setattr(emulated, "_PROGRAM", tmp_path / "file" / "emulator")
    with pytest.raises(NetworkUnavailable, match="cannot compile the emulator"):
        emulated.build_emulator()
