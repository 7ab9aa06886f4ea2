"""Output of the commands: their version, a log that never waits, and output that nobody reads any more."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
from typing import IO, Any

import zpccl
from zpccl import limits


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds the option --version, which prints the release, and the protocol version that all of a run must share."""
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print release and protocol version")


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"zpccl {zpccl.__version__}, protocol version {limits.PROTOCOL_VERSION}")
        parser.exit()


def discard(file: IO[Any]) -> None:
    """From now on discards the file's output, also what waits in its buffer, which Python would write at its exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())


class NonBlockingHandler(logging.Handler):
    """Writes log lines to a descriptor, and leaves lines out while it takes none: a pipe that nobody reads, a terminal
    after Ctrl-S. Otherwise the thread that logs would stand still until somebody reads.

    Args:
        descriptor: open for writing, and not closed before the handler.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, and before it how many were left out."""
        try:
            line = f"{self.format(record)}\n"
            if self._left_out and not self._write(f"{self._left_out} lines were left out here: nobody read them\n"):
                self._left_out += 1
                return
            self._left_out = 0 if self._write(line) else 1
        except Exception:  # noqa: BLE001 - as all handlers do
            self.handleError(record)

    def _write(self, line: str) -> bool:
        data = line.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # The other end is closed.
            while data and self._room.poll(0):
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]  # A ready pipe has room for so much.
        return not data
