"""The version that both commands print; and the commands when their output cannot be written."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zpccl import limits
from zpccl.cli.output import NonBlockingHandler

COMMANDS = pytest.mark.parametrize(
    "arguments", [["doctor", "--master", "127.0.0.1:1"], ["keygen"]], ids=["doctor", "keygen"]
)


@COMMANDS
def test_nobody_reads_the_output(arguments: list[str]) -> None:
    """As in `zpccl doctor | head`: no traceback, and the status of a program that SIGPIPE ends."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = subprocess.run(
            [sys.executable, "-m", "zpccl.cli.main", *arguments], stdout=reader.stdin, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@COMMANDS
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "zpccl.cli.main", *arguments], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and done.stderr.startswith(b"zpccl: ") and done.stderr.count(b"\n") == 1, done.stderr


@pytest.mark.parametrize("module", ["zpccl.cli.main", "zpccl.cli.master"])
def test_the_version(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    expected = f"zpccl {importlib.metadata.version('zpccl')}, protocol version {limits.PROTOCOL_VERSION}\n"
    assert (done.returncode, done.stdout) == (0, expected)


def test_a_log_that_nobody_reads() -> None:
    """Lines are left out while there is no room, and counted once there is."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as lines, open(writer, "wb", buffering=0) as log:
        handler = NonBlockingHandler(writer)

        def emit(text: str) -> None:
            handler.emit(logging.LogRecord("zpccl", logging.INFO, "", 0, text, (), None))

        count = 0
        while select.select([], [log], [], 0)[1]:
            emit("x" * 999)
            count += 1
        for _ in range(3):
            emit("left out")
        read = b""
        while read.count(b"\n") < count:
            read += lines.read(1 << 20)
        assert read == (b"x" * 999 + b"\n") * count
        emit("read")
        emit("again")
        assert lines.read(1 << 20) == b"3 lines were left out here: nobody read them\nread\nagain\n"


def test_a_log_whose_reader_has_ended() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0):
        NonBlockingHandler(writer).emit(logging.LogRecord("zpccl", logging.INFO, "", 0, "text", (), None))
