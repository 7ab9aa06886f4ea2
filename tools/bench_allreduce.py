"""Times all-reduces of zpccl between processes of this machine, beside torch's Gloo and beside TCP alone.

The systems take turns, repetition by repetition, in one run, so that what disturbs the machine disturbs them alike.
Before each repetition all processes are ready and wait; its time is that of the slowest process; its result is checked.
Small all-reduces are done several times in a row within one repetition, and their time is the mean of these.

  zpccl    all processes call `all_reduce`, SUM, out of place (--place: in place, with or without restore)
  gloo     torch.distributed.all_reduce, in place (it has no other), one TCP connection a pair; where torch is there
  raw_tcp  no reducing, no protocol: each process sends 2(N-1)/N times the tensor to its ring neighbour while it
           receives as much from the other one, from and to warm memory, over --connections sockets; one thread, poll,
           non-blocking sockets with TCP_NODELAY and the congestion control that zpccl takes within a host; two
           processes use the same sockets both ways, as zpccl does. Less than 64 KiB a socket goes over fewer of them.
           It waits for nobody's data, so no all-reduce over TCP that is made like it can be faster.

With --batch all times are of so many tensors together, --concurrent at a time.

`busbw_gbit` is the bus bandwidth, 2(N-1)/N x bytes / seconds in Gbit/s, one direction. `cpu_seconds` is user and system
time of one all-reduce, all processes together, zpccl's master included; `cpu_seconds_per_gib` is that for a GiB of
tensor. `of_raw_tcp` and `of_gloo` are the speed beside that system in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
from collections.abc import Sequence

import numpy as np
from bench_systems import ALGORITHMS, PLACES, SYSTEMS, System, start_systems
from common import (
    DTYPES,
    QUANTIZATIONS,
    Row,
    add_output_arguments,
    bus_bandwidth_gbit,
    connection_count,
    format_bytes,
    parse_bytes,
    peer_count,
    positive,
    print_table,
    run_tool,
    say,
    spread,
    write_json,
)


def measure(
    systems: Sequence[System], options: argparse.Namespace, peers: int, size_bytes: int, quantize: str
) -> list[Row]:
    """All repetitions of one size; a row for each system. Only zpccl quantises."""
    systems = [system for system in systems if quantize == "none" or system.name.startswith("zpccl")]
    for system in systems:
        system.allocate(size_bytes, options.dtype, quantize)
    for _ in range(options.reps):
        for system in systems:
            system.repeat()
    rows: list[Row] = []
    for system in systems:
        seconds = spread(system.seconds, "seconds")
        rows.append(
            {
                "system": system.name,
                "peers": peers,
                "bytes": size_bytes,
                "batch": options.batch,
                "connections": system.connections,
                "dtype": options.dtype,
                "quantize": quantize,
                **seconds,
                "busbw_gbit": bus_bandwidth_gbit(peers, size_bytes * options.batch, seconds["seconds_median"]),
                "cpu_seconds": statistics.median(system.cpu_seconds),
                "place": options.place if system.name.startswith("zpccl") else "in" if system.name == "gloo" else "out",
                "pinned": options.pin,
                "reps": options.reps,
                "iterations": system.iterations,
            }
        )
    medians = {row["system"]: row["seconds_median"] for row in rows}
    for row in rows:
        row["cpu_seconds_per_gib"] = row["cpu_seconds"] / (size_bytes * options.batch / GIB)
        for other in ("raw_tcp", "gloo"):
            row[f"of_{other}"] = medians[other] / row["seconds_median"] if other in medians else None
        say("  ".join(cells_of(row)))
    return rows


GIB = 2**30
COLUMNS = ["system", "peers", "bytes", "conns", "quantize", "median ms", "min ms", "max ms", "bus Gbit/s", "CPU s/GiB"]
COLUMNS += ["of raw TCP", "of Gloo"]


def cells_of(row: Row) -> list[str]:
    """The row as text, in COLUMNS."""
    return [
        row["system"],
        str(row["peers"]),
        format_bytes(row["bytes"]),
        str(row["connections"]),
        row["quantize"],
        *(f"{row[f'seconds_{name}'] * 1e3:.3f}" for name in ("median", "min", "max")),
        f"{row['busbw_gbit']:.2f}",
        f"{row['cpu_seconds_per_gib']:.3f}",
        *("" if row[key] is None else f"{row[key]:.2f}" for key in ("of_raw_tcp", "of_gloo")),
    ]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["4KiB", "1MiB", "64MiB", "256MiB"]
    parser.add_argument("--peers", type=peer_count, nargs="+", default=[2, 4], help="processes (default 2 4)")
    parser.add_argument(
        "--bytes",
        type=parse_bytes,
        nargs="+",
        default=[parse_bytes(size) for size in sizes],
        help=f"of the tensor (default {' '.join(sizes)})",
    )
    parser.add_argument(
        "--connections", type=connection_count, nargs="+", default=[4], help="TCP connections a pair (default 4)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensor (default float32)")
    parser.add_argument(
        "--quantize", choices=tuple(QUANTIZATIONS), nargs="+", default=["none"], help="of zpccl (default none)"
    )
    parser.add_argument("--reps", type=positive, default=7, help="repetitions (default 7)")
    parser.add_argument(
        "--systems", choices=SYSTEMS, nargs="+", default=None, help="what to measure (default all that can be had)"
    )
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        nargs="+",
        default=["auto"],
        help="of zpccl; several take turns as systems of their own (default auto)",
    )
    parser.add_argument("--place", choices=PLACES, default="out", help="where zpccl puts the result (default out)")
    parser.add_argument(
        "--batch",
        type=positive,
        default=1,
        help="tensors of the size in one all_reduce_multiple_with_retry; zpccl only (default 1: all_reduce)",
    )
    parser.add_argument(
        "--concurrent", type=positive, default=4, help="tensors of a batch that are reduced at a time (default 4)"
    )
    parser.add_argument(
        "--pin", action="store_true", help="keep each process on one CPU: less noise, but small all-reduces suffer"
    )
    add_output_arguments(parser)
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Completes the options, or ends the program with what is wrong."""
    has_torch = importlib.util.find_spec("torch") is not None
    if options.batch > 1:
        if options.systems not in (None, ["zpccl"]) or options.place == "in_no_restore":
            parser.error("--batch: only zpccl has batches, and they restore")
        options.systems = ["zpccl"]
    if options.systems is None:
        options.systems = [system for system in SYSTEMS if has_torch or system != "gloo"]
        if not has_torch:
            say("torch is not installed: no gloo (`make test-torch` installs it)")
    elif "gloo" in options.systems and not has_torch:
        parser.error("--systems gloo needs torch, which `make test-torch` installs")
    if options.quantize != ["none"] and not options.dtype.startswith("float"):
        parser.error(f"--quantize: only floating-point tensors can be quantised, not {options.dtype}")
    item_bytes = np.dtype(options.dtype).itemsize
    if any(size % item_bytes for size in options.bytes):
        parser.error(f"--bytes: not a multiple of the {item_bytes} bytes of an element")


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    check_options(parser, options)

    def play() -> int:
        rows: list[Row] = []
        for peers in options.peers:
            for connections in options.connections:
                with contextlib.ExitStack() as stack:
                    say(f"{peers} peers, {connections} connections")
                    systems = start_systems(stack, options, peers, connections)
                    for quantize in options.quantize:
                        for size_bytes in options.bytes:
                            rows += measure(systems, options, peers, size_bytes, quantize)
        write_json(options.json, rows)
        print_table(f"All-reduce of {options.dtype}", COLUMNS, [cells_of(r) for r in rows])
        return 0

    return run_tool(play)


if __name__ == "__main__":
    sys.exit(main())
