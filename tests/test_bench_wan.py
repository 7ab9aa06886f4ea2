"""The benchmark of all-reduces over wide-area networks: its arithmetic, its plot, and a small run of all of it."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
import pytest
from benches import rows_of
from benchmarks import wan
from e2e.harness import until
from wan.settings import PathSettings

CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def test_all_paths_are_alike_but_those_to_the_master() -> None:
    settings = wan.settings_of(wan.Cell(100, 0.001, 4), argparse.Namespace(peers=3, rate=500.0))
    assert settings.host_count == 4
    assert settings.paths[0, 2] == settings.paths[2, 1] == PathSettings(delay_ms=50, rate_mbit=500, loss=0.001)
    assert settings.paths[0, 3] == settings.paths[3, 0] == PathSettings(delay_ms=50)


class Line:
    """Replaces a system. It has a fixed latency and this many bytes per second; one all-reduce may stall."""

    def __init__(self, latency_s: float, bytes_per_second: float, stall: int | None = None) -> None:
        self.latency_s, self.bytes_per_second = latency_s, bytes_per_second
        self.stall = stall  # The number of the all-reduce that takes 10 s more.
        self.count = 0

    def once(self, _: Any, size_bytes: int) -> float:
        stall_s = 10 if self.count == self.stall else 0
        self.count += 1
        return self.latency_s + size_bytes / self.bytes_per_second + stall_s


@pytest.mark.parametrize(
    ("line", "mib"),
    [
        (Line(0.3, 1e9), 596),  # The amount that the path carries in the time.
        (Line(0.3, 2e7), 596),  # Slower, but an eighth fits into the time.
        (Line(0.3, 1e7), 74),
        (Line(0.3, 2e7, stall=0), 596),  # One slow probe does not make a slow system.
        (Line(0.3, 2e7, stall=1), 596),
    ],
)
def test_the_tensor_is_what_the_path_carries_or_an_eighth(
    monkeypatch: pytest.MonkeyPatch, line: Line, mib: int
) -> None:
    monkeypatch.setattr(wan, "once", line.once)
    system: Any = None
    assert wan.choose_bytes(system, argparse.Namespace(peers=2, rate=1000.0, seconds=5.0)) == mib * 2**20


def row(system: str, rtt_ms: float, loss: float, connections: int, mbit: float) -> dict[str, Any]:
    return {
        "system": system,
        "rtt_ms": rtt_ms,
        "loss": loss,
        "rate_mbit": 100.0,
        "connections": connections,
        "mbit": mbit,
    }


@pytest.mark.slow
def test_rows_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("zpccl", rtt, loss, count, 50) for rtt in (10, 100) for loss in (0, 0.01) for count in (1, 4)]
    plot = tmp_path / "plot.png"
    wan.draw([*rows, row("gloo", 10, 0, 1, 20)], plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["1", "101%", "-1%", "much"])
def test_refuses_what_is_no_loss(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no share"):
        wan.share(text)


SMALL = ["--rtt", "2", "--loss", "0", "--rate", "200", "--connections", "2", "--seconds", "0.1", "--reps", "1"]


@pytest.mark.slow
@pytest.mark.e2e
def test_it_measures_systems_side_by_side() -> None:
    pytest.importorskip("nacl")
    systems = ["zpccl", "raw_tcp", "encrypted"]
    rows = rows_of("wan", *SMALL, "--peers", "3", "--systems", *systems)
    assert [(row["system"], row["connections"], row["peers"]) for row in rows] == [(name, 2, 3) for name in systems]
    for found in rows:
        assert found["bytes"] >= 2**20
        assert 0 < found["share"] < 2  # With so little data a burst counts much.
        assert found["latency_s"] >= 0.002 or found["system"] == "raw_tcp"
        assert found["buckets_s"] >= found["latency_s"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("congestion", ["bbr", "reno"])
def test_the_own_choice_far_away_is_bbr_where_the_kernel_has_it(congestion: str) -> None:
    """Root may choose it for its own sockets, whatever the hosts use."""
    known = CONGESTION_CONTROLS.read_text(encoding="ascii").split()
    if congestion not in known:
        pytest.skip(f"the kernel has no {congestion}")
    count = 16 if "bbr" in known else 64
    options = ["--rtt", "50", "--loss", "0", "--rate", "200", "--connections", "0", "--seconds", "0.1", "--reps", "1"]
    (found,) = rows_of("wan", *options, "--systems", "zpccl", "raw_tcp", "--congestion", congestion)
    assert (found["own_choice"], found["connections"]) == (True, count)


@pytest.mark.e2e
@pytest.mark.torch
def test_gloo_is_measured_beside() -> None:
    pytest.importorskip("torch")
    rows = rows_of("wan", *SMALL, "--systems", "gloo")
    assert [(row["system"], row["connections"]) for row in rows] == [("gloo", 1)]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_it_takes_everything_down(number: signal.Signals) -> None:
    """Ctrl-C, a supervisor, or the loss of its terminal."""
    command = ["env", "--default-signal=HUP", sys.executable, bench.__file__, "wan", *SMALL, "--systems", "zpccl"]
    command += ["--reps", "100000"]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        if "cannot make network namespaces" in first:
            pytest.skip(first)
        until(lambda: len(descendants(process.pid)) >= 4, "the emulator, a master and two peers")
        children = descendants(process.pid)
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in said
    assert ("interrupted" in said) == (number == signal.SIGINT)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the end of them")


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def test_wrong_arguments_are_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["wan", "--rtt", "soon"])
    assert "'soon' is not a number above 0" in capsys.readouterr().err
