"""Output of the commands: their version, and output that nobody reads any more."""

from __future__ import annotations

import argparse
import os
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
