"""zpccl-master as users start it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zpccl
from e2e.harness import HANG_SECONDS

pytestmark = pytest.mark.e2e

COMMAND = [str(Path(sys.executable).with_name("zpccl-master"))]


@contextlib.contextmanager
def master(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def ends(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = child.communicate(timeout=HANG_SECONDS)
    return child.returncode, output, errors


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_says_where_it_listens_and_stops_cleanly(number: int) -> None:
    with master("--bind", "127.0.0.1:0") as child:
        found = re.fullmatch(r"zpccl-master listens on (127\.0\.0\.1:\d+)\n", line_of(child))
        assert found and not found[1].endswith(":0")
        with zpccl.Communicator(found[1]) as comm:
            assert comm.world_size == 1
            child.send_signal(number)
            child.send_signal(number)  # While it ends,
            assert child.stderr is not None
            while not (line := child.stderr.readline()).endswith("stopped\n"):
                assert line and "Traceback" not in line
            while child.poll() is None:  # and while it exits, however often.
                child.send_signal(number)
            status, output, errors = ends(child)
        assert (status, output) == (0, "")
        assert "Traceback" not in errors and "WARNING" not in errors


def test_ctrl_c_before_it_listens(tmp_path: Path) -> None:
    """No traceback; the status of a program that SIGINT ends."""
    pipe = tmp_path / "secret"
    os.mkfifo(pipe, 0o600)
    with master("--bind", "127.0.0.1:0", "--secret-file", str(pipe)) as child, pipe.open("w"):  # It has opened it, too.
        child.send_signal(signal.SIGINT)
        assert ends(child) == (128 + signal.SIGINT, "", "zpccl-master: interrupted\n")


def test_serves_though_its_output_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        child = subprocess.Popen([*COMMAND, "--bind", "127.0.0.1:0"], stdout=full, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        assert "cannot write to the standard output: No space left on device" in child.stderr.readline()
        child.terminate()
        status, _, errors = ends(child)
    finally:
        child.kill()
        child.communicate()
    assert status == 0 and "Traceback" not in errors


def test_serves_though_nobody_reads_its_log() -> None:
    """L1: its thread does not wait for room in a pipe."""
    with master("--bind", "127.0.0.1:0", "--log-level", "debug") as child:
        assert child.stderr is not None
        fcntl.fcntl(child.stderr, fcntl.F_SETPIPE_SZ, 4096)
        address = line_of(child).split()[-1]
        for _ in range(40):  # Each leaves more than 100 bytes in the log.
            with zpccl.Communicator(address, name="x" * 100) as comm:
                assert comm.world_size == 1
        os.read(child.stderr.fileno(), 4096)
        with zpccl.Communicator(address):
            pass
        assert "lines were left out here" in child.stderr.readline()


def test_help() -> None:
    with master("--help") as child:
        status, output, errors = ends(child)
    assert (status, errors) == (0, "")
    assert all(word in output for word in ("--bind", "--log-level", "--heartbeat-timeout", "0.0.0.0:48148"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bind", "nonsense"], "nonsense"),
        (["--bind", "127.0.0.1:99999"], "99999"),
        (["--bind", "192.0.2.77:0"], "192.0.2.77:0: this host has no such address"),  # RFC 5737: nobody's address.
        (["--bind", "no.such.host.invalid:0"], "no.such.host.invalid:0: no address or interface of this host has"),
        (["--bind", ""], "host:port"),
        (["--log-level", "loud"], "loud"),
        (["--heartbeat-timeout", "0"], "--heartbeat-timeout"),
        (["--heartbeat-timeout", "nan"], "--heartbeat-timeout"),
        (["--heartbeat-timeout", "x"], "--heartbeat-timeout"),
        (["--recovery-grace", "86401"], "--recovery-grace must be between 0 and 86400 seconds"),  # As of a MasterNode.
        (["--straggler-timeout", "0.5"], "--straggler-timeout"),
        (["--straggler-timeout", "nan"], "--straggler-timeout"),
        (["surplus"], "surplus"),
    ],
)
def test_bad_arguments_are_said_in_a_line(arguments: list[str], text: str) -> None:
    with master(*arguments) as child:
        status, output, errors = ends(child)
    assert (status, output) == (2, "")
    assert text in errors.splitlines()[-1] and "Traceback" not in errors


@pytest.mark.parametrize(("name", "value"), [("ZPCCL_SECRET", "s"), ("ZPCCL_LOG_LEVEL", "loud")])
def test_a_bad_environment_is_said_in_a_line(name: str, value: str) -> None:
    with master("--bind", "127.0.0.1:0", **{name: value}) as child:
        status, _, errors = ends(child)
    assert status == 2
    assert name in errors.splitlines()[-1] and "Traceback" not in errors


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with master("--bind", address) as child:
            status, output, errors = ends(child)
    assert (status, output) == (2, "")
    assert errors == f"zpccl-master: cannot listen on {address}: the port is in use; does another master run there?\n"


@pytest.mark.parametrize(("bind", "warns"), [("0.0.0.0:0", True), ("[::1]:0", False), ("localhost:0", False)])
def test_warns_beyond_loopback(bind: str, warns: bool) -> None:
    with master("--bind", bind) as child:
        address = line_of(child).split()[-1]
        assert address.rpartition(":")[0] == bind.rpartition(":")[0]
        with zpccl.Communicator(address.replace("0.0.0.0", "127.0.0.1")) as comm:
            assert comm.world_size == 1
        child.terminate()
        status, _, errors = ends(child)
    assert status == 0 and ("secret" in errors) is warns
