"""Times all-reduces between two processes of this machine: plain, authenticated, and encrypted with each cipher.

All kinds take turns, repetition by repetition, in one run, so that disturbances of the machine affect all of them. The
time of a repetition is that of the slower process; every result is checked. `ratio` is the speed relative to plain.

  plain          a run without a secret
  authenticated  with a secret and encrypt=False: connections are authenticated, frames carry CRCs as without a secret
  the others     with a secret, connections encrypted with this cipher; by default zpccl uses the first common one

`busbw_gbit` is the bus bandwidth, bytes / seconds in Gbit/s, one direction. `cpu_seconds` is user and system time of
one all-reduce, summed over both processes and the master.
"""

from __future__ import annotations

import argparse
import contextlib

from common import Row, Rows, add, bus_bandwidth_gbit
from workers import LOOPBACK

from benchmarks.scenario import BYTES, Column, Scenario, Table, times
from benchmarks.systems import System, speeds_beside, start_system, take_turns
from zpccl.control.keys import new_secret
from zpccl.engine.ciphers import available

PEERS = 2
PLAIN, AUTHENTICATED = "plain", "authenticated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [PLAIN, AUTHENTICATED, *(cipher.name for cipher in available())]
    add(parser, "--kinds", names, "what to compare", choices=names)
    add(parser, "--bytes", ["1MiB", "64MiB", "256MiB"])
    add(parser, "--connections", [4])
    add(parser, "--reps", 7)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not available():
        parser.error("PyNaCl is not installed: pip install 'zpccl[secure]'")


def start_kind(kind: str, connections: int) -> contextlib.AbstractContextManager[System]:
    """Starts the processes of one kind."""
    secret = None if kind == PLAIN else new_secret()
    is_encrypted = kind not in (PLAIN, AUTHENTICATED)
    cipher = kind if is_encrypted else ""
    return start_system(
        LOOPBACK, "zpccl", PEERS, connections, label=kind, secret=secret, encrypt=is_encrypted, cipher=cipher
    )


def measure(options: argparse.Namespace) -> Rows:
    for connections in options.connections:
        with contextlib.ExitStack() as stack:
            systems = [stack.enter_context(start_kind(kind, connections)) for kind in options.kinds]
            for size_bytes in options.bytes:
                take_turns(systems, options.reps, size_bytes, "float32", "none")
                rows: list[Row] = []
                for system in systems:
                    row = {"system": system.name, "bytes": size_bytes, "connections": connections, **system.times()}
                    row["busbw_gbit"] = bus_bandwidth_gbit(PEERS, size_bytes, row["seconds_median"])
                    rows.append(row | {"reps": options.reps})
                for row, ratio in zip(rows, speeds_beside(rows, PLAIN), strict=True):
                    yield row | {"ratio": ratio}


COLUMNS = [
    Column("kind", "system"),
    Column("bytes", "bytes", BYTES),
    Column("conns", "connections"),
    *times("seconds"),
    Column("bus Gbit/s", "busbw_gbit", ".2f"),
    Column("ratio", "ratio", ".2f"),
    Column("CPU ms", "cpu_seconds", ".1f", 1e3),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, [Table("All-reduce of float32 between 2 peers", COLUMNS)], check)
