"""Times all-reduces between two processes of this machine: plain, authenticated, and sealed with each cipher.

All kinds take turns, repetition by repetition, in one run, so that what disturbs the machine disturbs them alike. The
time of a repetition is that of the slower process; every result is checked. `ratio` is the speed beside plain.

  plain          a run without a secret
  authenticated  with a secret and encrypt=False: connections are authenticated, frames carry CRCs as without a secret
  the others     with a secret, frames sealed with this cipher; by itself zpccl takes the first that both sides have

`busbw_gbit` is the bus bandwidth, bytes / seconds in Gbit/s, one direction. `cpu_seconds` is user and system time of
one all-reduce, both processes together.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys

from bench_systems import System, ZpcclBench
from measuring import (
    Row,
    Worker,
    add_output_arguments,
    bus_bandwidth_gbit,
    call_all,
    close_all,
    connection_count,
    format_bytes,
    parse_bytes,
    positive,
    print_table,
    run_tool,
    say,
    spread,
    write_json,
)

import zpccl
from zpccl.control.keys import new_secret
from zpccl.dataplane.ciphers import Cipher, available

PEERS = 2
PLAIN, AUTHENTICATED = "plain", "authenticated"


class SealedBench(ZpcclBench):
    """An all-reduce, out of place, over links of one kind.

    Args:
        address: of the master.
        connections: to the other peer.
        secret: of the run, or None.
        kind: PLAIN, AUTHENTICATED or the name of a cipher.
        rank: tells what this process contributes.
    """

    def __init__(self, address: str, connections: int, secret: str | None, kind: str, rank: int) -> None:
        is_sealed = kind not in (PLAIN, AUTHENTICATED)
        super().__init__(address, connections, "out", rank, PEERS, secret=secret, encrypt=is_sealed)
        if is_sealed:
            self.peer.comm._ciphers = (Cipher[kind],)


def start_kind(stack: contextlib.ExitStack, name: str, connections: int) -> System:
    """A run of one kind: its master, here, and its two processes."""
    secret = None if name == PLAIN else new_secret()
    master = stack.enter_context(zpccl.MasterNode("127.0.0.1:0", secret=secret))
    arguments = master.address, connections, secret, name
    workers = [Worker(f"{name} {rank}", SealedBench, *arguments, rank) for rank in range(PEERS)]
    stack.callback(close_all, workers)
    call_all(workers, "join")
    return System(name, workers, connections)


def measure(kinds: list[System], size_bytes: int, connections: int, reps: int) -> list[Row]:
    """All repetitions of one size; a row for each kind."""
    for kind in kinds:
        kind.allocate(size_bytes, "float32", "none")
    for _ in range(reps):
        for kind in kinds:
            kind.repeat()
    plain = statistics.median(kinds[0].seconds)
    rows: list[Row] = []
    for kind in kinds:
        seconds = spread(kind.seconds, "seconds")
        rows.append(
            {
                "kind": kind.name,
                "bytes": size_bytes,
                "connections": connections,
                **seconds,
                "busbw_gbit": bus_bandwidth_gbit(PEERS, size_bytes, seconds["seconds_median"]),
                "ratio": plain / seconds["seconds_median"],
                "cpu_seconds": statistics.median(kind.cpu_seconds),
                "reps": reps,
            }
        )
        say("  ".join(cells_of(rows[-1])))
    return rows


COLUMNS = ["kind", "bytes", "conns", "median ms", "min ms", "max ms", "bus Gbit/s", "ratio", "CPU ms"]


def cells_of(row: Row) -> list[str]:
    """The row as text, in COLUMNS."""
    return [
        row["kind"],
        format_bytes(row["bytes"]),
        str(row["connections"]),
        *(f"{row[f'seconds_{name}'] * 1e3:.3f}" for name in ("median", "min", "max")),
        f"{row['busbw_gbit']:.2f}",
        f"{row['ratio']:.2f}",
        f"{row['cpu_seconds'] * 1e3:.1f}",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["1MiB", "64MiB", "256MiB"]
    parser.add_argument(
        "--bytes",
        type=parse_bytes,
        nargs="+",
        default=[parse_bytes(size) for size in sizes],
        help=f"of the tensor (default {' '.join(sizes)})",
    )
    parser.add_argument("--connections", type=connection_count, nargs="+", default=[4], help="of the link (default 4)")
    parser.add_argument("--reps", type=positive, default=7, help="repetitions (default 7)")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    if not available():
        parser.error("PyNaCl is not installed: pip install 'zpccl[secure]'")

    def play() -> int:
        rows: list[Row] = []
        for connections in options.connections:
            with contextlib.ExitStack() as stack:
                names = [PLAIN, AUTHENTICATED, *(cipher.name for cipher in available())]
                kinds = [start_kind(stack, name, connections) for name in names]
                for size_bytes in options.bytes:
                    rows += measure(kinds, size_bytes, connections, options.reps)
        write_json(options.json, rows)
        print_table("All-reduce of float32 between 2 peers", COLUMNS, [cells_of(row) for row in rows])
        return 0

    return run_tool(play)


if __name__ == "__main__":
    sys.exit(main())
