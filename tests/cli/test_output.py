"""The version that both commands print; and the commands when their output cannot be written."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zpccl import limits

COMMANDS = pytest.mark.parametrize(
    "arguments", [["doctor", "--master", "127.0.0.1:1"], ["keygen"]], ids=["doctor", "keygen"]
)


@COMMANDS
def test_nobody_reads_the_output(arguments: list[str]) -> None:
    """As in `zpccl doctor | head`: no traceback, and the status of a program that SIGPIPE ends."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = subprocess.run([sys.executable, "-m", "zpccl", *arguments], stdout=reader.stdin, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@COMMANDS
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "zpccl", *arguments], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and done.stderr.startswith(b"zpccl: ") and done.stderr.count(b"\n") == 1, done.stderr


@pytest.mark.parametrize("module", ["zpccl", "zpccl.cli.master"])
def test_the_version(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    expected = f"zpccl {importlib.metadata.version('zpccl')}, protocol version {limits.PROTOCOL_VERSION}\n"
    assert (done.returncode, done.stdout) == (0, expected)
