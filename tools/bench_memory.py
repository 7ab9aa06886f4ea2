"""Measures what an all-reduce takes in memory beyond the caller's buffers, in each process.

Fresh processes for each row: they all-reduce something small (so that loading and first use do not count), allocate the
buffers and touch every page, reset the peak of their resident set size, and all-reduce. `extra_bytes` is the peak minus
what was resident before, of the process that took most; `kept_bytes` is what stays resident afterwards beyond that.
Memory of the kernel (socket buffers) is no part of a resident set.

  out             the result goes to a second buffer, which is the caller's and does not count
  in              the result replaces the input, which comes back if the call fails
  in_no_restore   the same with `restore=False`: a call that fails leaves the buffer undefined

gloo, where torch is installed, works in place only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import sys

from bench_systems import PLACES, System, start_gloo, start_zpccl
from measuring import (
    DTYPES,
    QUANTIZATIONS,
    Row,
    WorkerFailed,
    add_output_arguments,
    call_all,
    connection_count,
    format_bytes,
    parse_bytes,
    peer_count,
    print_table,
    run_tool,
    say,
    write_json,
)

WARM_UP_BYTES = 64 * 1024
COLUMNS = ["system", "peers", "bytes", "dtype", "quantize", "place", "extra MiB", "of the tensor", "kept MiB"]


def measure(system: System, options: argparse.Namespace, size_bytes: int, quantize: str, place: str) -> Row:
    """One all-reduce, watched.

    Raises:
        WorkerFailed: its result is wrong.
    """
    call_all(system.workers, "allocate", WARM_UP_BYTES, options.dtype, quantize)
    call_all(system.workers, "run", 1)
    call_all(system.workers, "allocate", size_bytes, options.dtype, quantize)
    call_all(system.workers, "begin_memory")
    call_all(system.workers, "run", 1)
    grown: list[tuple[int, int]] = call_all(system.workers, "grown_memory")
    problems = [problem for problem in call_all(system.workers, "check") if problem]
    if problems:
        raise WorkerFailed(f"{system.name}: {'; '.join(problems)}")
    extra_bytes = max(peak for peak, _ in grown)
    return {
        "system": system.name,
        "peers": options.peers,
        "bytes": size_bytes,
        "dtype": options.dtype,
        "quantize": quantize,
        "place": place,
        "extra_bytes": extra_bytes,
        "extra_bytes_min": min(peak for peak, _ in grown),
        "extra_fraction": extra_bytes / size_bytes,
        "kept_bytes": max(kept for _, kept in grown),
    }


def cells_of(row: Row) -> list[str]:
    """The row as text, in COLUMNS."""
    return [
        row["system"],
        str(row["peers"]),
        format_bytes(row["bytes"]),
        row["dtype"],
        row["quantize"],
        row["place"],
        f"{row['extra_bytes'] / 2**20:.2f}",
        f"{row['extra_fraction']:.1%}",
        f"{row['kept_bytes'] / 2**20:.2f}",
    ]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=peer_count, default=2, help="processes (default 2)")
    parser.add_argument(
        "--bytes", type=parse_bytes, nargs="+", default=[parse_bytes("256MiB")], help="of the tensor (default 256MiB)"
    )
    parser.add_argument("--connections", type=connection_count, default=4, help="TCP connections a pair (default 4)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensor (default float32)")
    parser.add_argument(
        "--quantize", choices=tuple(QUANTIZATIONS), nargs="+", default=["none"], help="of zpccl (default none)"
    )
    parser.add_argument("--places", choices=PLACES, nargs="+", default=list(PLACES), help="of zpccl (default all)")
    parser.add_argument(
        "--systems", choices=("zpccl", "gloo"), nargs="+", default=None, help="default all that can be had"
    )
    add_output_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.quantize != ["none"] and not options.dtype.startswith("float"):
        parser.error(f"--quantize: only floating-point tensors can be quantised, not {options.dtype}")
    has_torch = importlib.util.find_spec("torch") is not None
    systems = options.systems or (["zpccl", "gloo"] if has_torch else ["zpccl"])
    if "gloo" in systems and not has_torch:
        parser.error("--systems gloo needs torch, which `make test-torch` installs")

    def play() -> int:
        rows: list[Row] = []

        def add(start: contextlib.AbstractContextManager[System], size_bytes: int, quantize: str, place: str) -> None:
            with start as system:
                rows.append(measure(system, options, size_bytes, quantize, place))
            say("  ".join(cells_of(rows[-1])))

        for size_bytes in options.bytes:
            if "zpccl" in systems:
                for quantize, place in itertools.product(options.quantize, options.places):
                    add(start_zpccl(options.peers, options.connections, place), size_bytes, quantize, place)
            if "gloo" in systems:
                add(start_gloo(options.peers), size_bytes, "none", "in")
        write_json(options.json, rows)
        print_table("Memory of an all-reduce beyond the caller's buffers", COLUMNS, [cells_of(row) for row in rows])
        return 0

    return run_tool(play)


if __name__ == "__main__":
    sys.exit(main())
