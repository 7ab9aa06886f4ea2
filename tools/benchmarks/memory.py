"""Measures the memory of an all-reduce beyond the caller's buffers, per process.

Each row uses new processes: they all-reduce a small tensor (so that loading and first use do not count), allocate the
buffers and touch every page, reset the peak of their resident set size, and all-reduce. `extra_bytes` is the peak minus
the resident size before, of the process with the largest difference; `kept_bytes` is the growth that remains
afterwards. Kernel memory (socket buffers) is not part of a resident set.

  out             the result goes to a second buffer of the caller, which does not count
  in              the result replaces the input, which is restored if the call fails
  in_no_restore   the same with `restore=False`: a failed call leaves the buffer undefined

Gloo, if torch is installed, works in place only.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from common import Row, Rows, add
from workers import LOOPBACK, call_all

from benchmarks.scenario import Column, Scenario, plain
from benchmarks.systems import PLACES, System, add_systems, check_systems, start_system

SYSTEMS = ("zpccl", "gloo")
CONNECTIONS = 4
WARM_UP_BYTES = 64 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", 2, "processes")
    add(parser, "--bytes", ["256MiB"])
    add(parser, "--quantize", ["none"])
    add(parser, "--places", list(PLACES), "of zpccl", choices=PLACES)
    add_systems(parser, SYSTEMS)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    check_systems(parser, options, SYSTEMS)


def measure(options: argparse.Namespace) -> Rows:
    for size_bytes, name in itertools.product(options.bytes, options.systems):
        is_ours = name == "zpccl"
        for quantize, place in itertools.product(options.quantize, options.places) if is_ours else [("none", "in")]:
            how: dict[str, Any] = {"place": place} if is_ours else {}
            with start_system(LOOPBACK, name, options.peers, CONNECTIONS, **how) as system:
                yield measure_once(system, size_bytes, quantize) | {"place": place}


def measure_once(system: System, size_bytes: int, quantize: str) -> Row:
    """One measured and checked all-reduce."""
    call_all(system.workers, "allocate", WARM_UP_BYTES, "float32", quantize)
    call_all(system.workers, "run", 1)
    call_all(system.workers, "allocate", size_bytes, "float32", quantize)
    call_all(system.workers, "begin_memory")
    call_all(system.workers, "run", 1)
    grown: list[tuple[int, int]] = call_all(system.workers, "grown_memory")
    system.check()
    extra_bytes = max(peak for peak, _ in grown)
    return {
        "system": system.name,
        "peers": len(system.workers),
        "bytes": size_bytes,
        "quantize": quantize,
        "extra_bytes": extra_bytes,
        "extra_fraction": extra_bytes / size_bytes,
        "kept_bytes": max(kept for _, kept in grown),
    }


COLUMNS = [
    *plain("system", "peers", "bytes", "quantize", "place"),
    Column("extra MiB", "extra_bytes", ".2f", 2**-20),
    Column("of the tensor", "extra_fraction", ".1%"),
    Column("kept MiB", "kept_bytes", ".2f", 2**-20),
]
TITLE = "Memory of an all-reduce beyond the caller's buffers"

SCENARIO = Scenario(__doc__, add_arguments, measure, TITLE, COLUMNS, check)
