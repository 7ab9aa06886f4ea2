"""Times all-reduces of zpccl between processes of this machine, compared with torch's Gloo and with TCP alone.

The systems take turns, repetition by repetition, in one run, so that disturbances of the machine affect all of them.
Before each repetition all processes are ready and wait. Its time is that of the slowest process, and its result is
checked. Small all-reduces are repeated within one repetition, and the mean time counts.

  zpccl    all processes call `all_reduce`, SUM, out of place (--place: in place, with or without restore). Several
           values of --algorithm, --encryption, --sockets or --tensors take turns as systems of their own.
           `authenticated` is a run with a secret whose frames are not encrypted, `encrypted` one with the cipher that
           zpccl chooses
  gloo     torch.distributed.all_reduce, in place (its only mode), one TCP connection per pair; if torch is installed
  raw_tcp  no reduction, no protocol: each process sends 2(N-1)/N times the tensor to its ring neighbour while it
           receives as much from the other one, from and to warm memory, over --connections sockets; one thread, poll,
           non-blocking sockets with TCP_NODELAY and the congestion control that zpccl uses within a host; two
           processes use the same sockets both ways, as zpccl does. It uses fewer sockets below 64 KiB per socket.
           There are no data dependencies, so it is an upper bound for an all-reduce over the same sockets.

With --batch all times are for that number of tensors together: zpccl reduces --concurrent of them at a time by
`all_reduce_multiple_with_retry`, Gloo begins all of them at once, raw TCP moves them in one piece.

`busbw_gbit` is the bus bandwidth, 2(N-1)/N x bytes / seconds in Gbit/s, one direction. `cpu_seconds` is user and system
time of one all-reduce, summed over all processes including zpccl's master; `cpu_seconds_per_gib` is that per GiB of
tensor. `of_plain`, `of_raw_tcp` and `of_gloo` are the speed relative to zpccl without encryption and of numpy, or to
that system, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Sequence

import numpy as np
from common import Row, Rows, add, bus_bandwidth_gbit, positive, say
from workers import LOOPBACK

from benchmarks.scenario import Column, Scenario, plain, times
from benchmarks.systems import (
    ALGORITHMS,
    ENCRYPTIONS,
    PLACES,
    SYSTEMS,
    TENSORS,
    System,
    add_systems,
    check_encryption,
    check_quantize,
    check_systems,
    check_tensors,
    speeds_beside,
    start_system,
    take_turns,
)

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", [2, 4], "processes")
    add(parser, "--bytes", ["4KiB", "1MiB", "64MiB", "256MiB"])
    add(parser, "--connections", [4])
    add(parser, "--dtype", "float32")
    add(parser, "--quantize", ["none"])
    add(parser, "--reps", 7)
    add_systems(parser, SYSTEMS)
    add(parser, "--algorithm", ["auto"], "of zpccl", choices=ALGORITHMS)
    add(parser, "--encryption", ["plain"], "of zpccl", choices=ENCRYPTIONS)
    text = "of zpccl: local ones, as by itself within a host, or TCP"
    add(parser, "--sockets", ["local"], text, choices=("local", "tcp"))
    add(parser, "--tensors", ["numpy"], "of zpccl; `cuda` counts the copies from and to the GPU", choices=TENSORS)
    add(parser, "--place", "out", "where zpccl puts the result", choices=PLACES)
    add(parser, "--batch", 1, "tensors of the size in each repetition", type=positive)
    add(parser, "--concurrent", 4, "tensors of a batch that zpccl reduces at a time", type=positive)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.batch > 1 and options.place == "in_no_restore":
        parser.error("--batch: batches of zpccl restore")
    check_systems(parser, options, SYSTEMS)
    if options.encryption != ["plain"]:
        check_encryption(parser)
    check_quantize(parser, options)
    check_tensors(parser, options)
    item_bytes = np.dtype(options.dtype).itemsize
    if any(size % item_bytes for size in options.bytes):
        parser.error(f"--bytes: not a multiple of the {item_bytes} bytes of an element")


def start_systems(
    stack: contextlib.ExitStack, options: argparse.Namespace, peers: int, connections: int
) -> list[System]:
    """Starts the requested systems. The label names each setting that differs from a user's defaults."""
    systems = []
    how = {"place": options.place, "concurrent": options.concurrent}
    for name in options.systems:
        if name != "zpccl":
            systems.append(stack.enter_context(start_system(LOOPBACK, name, peers, connections)))
            continue
        for way in itertools.product(options.algorithm, options.encryption, options.sockets, options.tensors):
            label = " ".join(["zpccl", *(what for what in way if what not in ("auto", "plain", "local", "numpy"))])
            ways = {**dict(zip(("algorithm", "encryption", "sockets", "tensors"), way, strict=True)), **how}
            systems.append(stack.enter_context(start_system(LOOPBACK, name, peers, connections, label=label, **ways)))
    return systems


def measure_size(
    systems: Sequence[System], options: argparse.Namespace, peers: int, size_bytes: int, quantize: str
) -> list[Row]:
    """All repetitions of one size; one row per system. Only zpccl quantises."""
    systems = [system for system in systems if quantize == "none" or system.name.startswith("zpccl")]
    take_turns(systems, options.reps, size_bytes, options.dtype, quantize, options.batch)
    rows: list[Row] = []
    for system in systems:
        row: Row = {
            "system": system.name,
            "peers": peers,
            "bytes": size_bytes,
            "batch": options.batch,
            "connections": system.connections,
            "dtype": options.dtype,
            "quantize": quantize,
            **system.times(),
            "place": options.place if system.name.startswith("zpccl") else "in" if system.name == "gloo" else "out",
            "reps": options.reps,
            "iterations": system.iterations,
        }
        reduced_bytes = size_bytes * options.batch
        row["busbw_gbit"] = bus_bandwidth_gbit(peers, reduced_bytes, row["seconds_median"])
        row["cpu_seconds_per_gib"] = row["cpu_seconds"] / (reduced_bytes / GIB)
        rows.append(row)
    for key, other in (("plain", "zpccl"), ("raw_tcp", "raw_tcp"), ("gloo", "gloo")):
        for row, speed in zip(rows, speeds_beside(rows, other), strict=True):
            row[f"of_{key}"] = speed
    return rows


def measure(options: argparse.Namespace) -> Rows:
    for peers in options.peers:
        for connections in options.connections:
            with contextlib.ExitStack() as stack:
                say(f"{peers} peers, {connections} connections")
                systems = start_systems(stack, options, peers, connections)
                for quantize in options.quantize:
                    for size_bytes in options.bytes:
                        yield from measure_size(systems, options, peers, size_bytes, quantize)


COLUMNS = [
    *plain("system", "peers", "bytes"),
    Column("conns", "connections"),
    Column("quantize", "quantize"),
    *times("seconds"),
    Column("bus Gbit/s", "busbw_gbit", ".2f"),
    Column("CPU s/GiB", "cpu_seconds_per_gib", ".3f"),
    Column("of plain", "of_plain", ".2f"),
    Column("of raw TCP", "of_raw_tcp", ".2f"),
    Column("of Gloo", "of_gloo", ".2f"),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, "All-reduce of {options.dtype}", COLUMNS, check)
