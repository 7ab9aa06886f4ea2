"""Times all-reduces over uneven networks, call after call, beside the least time that the network allows.

Each peer, and the master, is on its own host in an emulated wide-area network (the package `wan`). The master's paths
have the delay only. The networks:

  uplinks  four hosts with up- and downlinks of 100, 400, 400 and 800 Mbit/s, round trip 20 ms
  paths    four hosts: two paths of 1,000 Mbit/s, two of 300 and two of 50, of which no host has two alike;
           round trips 10, 40 and 100 ms
  fat      two hosts, 1,000 Mbit/s, round trip 100 ms, 0.1 % of the segments lost
  regions  eight hosts in three regions: uplinks of 20 to 50 Mbit/s, downlinks of twice that; paths of 30 Mbit/s and
           4 ms within a region, 4 to 8 Mbit/s and 40 to 90 ms between two. So slow that two cores carry it all

`--fall` cuts the rate of one path (of a host, in `uplinks`) to a tenth, and makes as many calls again; their median
leaves out the first two. `bound_s` is the time in which the bytes cross the network if every path and every host is
used as well as possible (the fractional packing of spanning trees, a linear program), including headers and without
delays. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common import Row, Rows, add, positive, whole
from wan.emulated import CONGESTION_CONTROLS, EmulatedNetwork
from wan.settings import Settings
from workers import Hosts, call_all

from benchmarks.plan_bounds import moving_seconds_min
from benchmarks.scenario import Column, Scenario, plain
from benchmarks.systems import ALGORITHMS, start_system
from benchmarks.wan import what_the_emulator_says
from zpccl import limits
from zpccl.protocol import network as zpccl_network

PAYLOAD = 0.965
"""Fraction of a rate that TCP's payload gets."""
FALL_CALLS = 2
"""Number of calls in which plans may adapt to a path whose rate has fallen."""


@dataclass(frozen=True)
class Network:
    """An uneven network.

    Attributes:
        peers: number of hosts, without the master's.
        lines: settings of the network.
        fall: settings that change with `--fall`.
    """

    peers: int
    lines: Sequence[str]
    fall: Sequence[str]


def bound_seconds(settings: Settings, peers: int, size_bytes: int) -> float:
    """The least time of an all-reduce of peers on the first hosts."""

    def rate(*mbit: float) -> int | None:
        limited = [each for each in mbit if each]
        return int(min(limited) * PAYLOAD * 125_000) if limited else None

    paths, hosts, everyone = settings.paths, settings.hosts, range(peers)
    network = zpccl_network.Network(
        tuple(
            tuple(None if i == j else rate(paths[i, j].rate_mbit, paths[j, i].rate_mbit) for j in everyone)
            for i in everyone
        ),
        ((None,) * peers,) * peers,
        tuple(rate(hosts[i].egress_mbit, hosts[i].ingress_mbit) for i in everyone),
    )
    model = zpccl_network.Model(network, zpccl_network.Tensor(size_bytes), zpccl_network.Speeds())
    return moving_seconds_min(model, zpccl_network.Speeds())


def in_regions() -> list[str]:
    """Lines of eight hosts in three regions."""
    region = (0, 0, 0, 1, 1, 1, 2, 2)
    between = {(0, 0): (30, 2), (0, 1): (8, 20), (1, 2): (6, 30), (0, 2): (4, 45)}
    lines = []
    for one, other in itertools.combinations(range(8), 2):
        rate, delay_ms = between[(0, 0) if region[one] == region[other] else (region[one], region[other])]
        lines.append(f"link {one} {other} rate_mbit={rate} delay_ms={delay_ms}")
    uplinks = enumerate((50, 30, 20, 50, 40, 25, 40, 20))
    return [*lines, *(f"host {host} egress_mbit={rate} ingress_mbit={2 * rate}" for host, rate in uplinks)]


NETWORKS = {
    "uplinks": Network(
        4,
        [
            "link * * delay_ms=10",
            *(f"host {host} egress_mbit={rate} ingress_mbit={rate}" for host, rate in enumerate((100, 400, 400, 800))),
        ],
        ["host 3 egress_mbit=80 ingress_mbit=80"],
    ),
    "paths": Network(
        4,
        [
            *(f"link {pair} rate_mbit=1000 delay_ms=5" for pair in ("0 1", "2 3")),
            *(f"link {pair} rate_mbit=300 delay_ms=20" for pair in ("0 2", "1 3")),
            *(f"link {pair} rate_mbit=50 delay_ms=50" for pair in ("0 3", "1 2")),
        ],
        ["link 0 2 rate_mbit=30"],
    ),
    "fat": Network(2, ["link * * delay_ms=50 rate_mbit=1000 loss=0.1%"], ["link 0 1 rate_mbit=100"]),
    "regions": Network(8, in_regions(), ["link 0 1 rate_mbit=3"]),
}


def measure(options: argparse.Namespace) -> Rows:
    """Each network in turn, with new processes."""
    for name in options.networks:
        network = NETWORKS[name]
        master = f"link {network.peers} * delay_ms=10 rate_mbit=0 loss=0"
        settings = Settings(network.peers + 1).with_lines([*network.lines, master])
        with EmulatedNetwork(settings, options.seed) as hosts:
            if options.congestion:
                hosts.use_congestion_control(options.congestion)
            yield measure_network(hosts, name, options)


def measure_network(hosts: EmulatedNetwork, name: str, options: argparse.Namespace) -> Row:
    """All calls in one network."""
    network = NETWORKS[name]
    with start_system(Hosts(hosts), "zpccl", network.peers, options.connections, algorithm=options.algorithm) as system:
        call_all(system.workers, "allocate", options.bytes, "float32", "none")
        if options.optimize:
            call_all(system.workers, "optimize")
        bound_s = bound_seconds(hosts.settings, network.peers, options.bytes)
        for _ in range(options.calls):
            system.repeat()
        seconds, system.seconds = system.seconds, []
        fallen: Row = {}
        if options.fall:
            hosts.change(*network.fall)
            for _ in range(options.calls):
                system.repeat()
            fallen_bound_s = bound_seconds(hosts.settings, network.peers, options.bytes)
            median_s = statistics.median(system.seconds[FALL_CALLS:] or system.seconds)
            fallen = {
                "fallen_seconds": system.seconds,
                "fallen_median_s": median_s,
                "fallen_bound_s": fallen_bound_s,
                "fallen_over_bound": median_s / fallen_bound_s,
            }
        return {
            "network": name,
            "peers": network.peers,
            "bytes": options.bytes,
            "algorithm": options.algorithm,
            "connections": options.connections,
            "congestion": options.congestion or "default",
            "seconds": seconds,
            "first_s": seconds[0],
            "median_s": statistics.median(seconds),
            "best_s": min(seconds),
            "last_s": seconds[-1],
            "bound_s": bound_s,
            "over_bound": statistics.median(seconds) / bound_s,
            **fallen,
            **what_the_emulator_says(hosts),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which (default: all of them)"
    )
    add(parser, "--bytes", "32MiB", "of the tensor")
    add(parser, "--calls", 10, "all-reduces in a row", type=positive)
    parser.add_argument("--optimize", action="store_true", help="call optimize_topology first")
    parser.add_argument("--fall", action="store_true", help="then cut a path to a tenth, and as many calls again")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="auto", help="that all peers ask for")
    parser.add_argument("--congestion", choices=CONGESTION_CONTROLS, help="of all connections (default the system's)")
    text = "a pair; 0: as many as zpccl chooses"
    add(parser, "--connections", 0, text, type=whole(0, limits.LINK_CONNECTIONS_MAX))
    add(parser, "--seed", 0)


COLUMNS = [
    *plain("network", "peers", "bytes", "algorithm", "congestion"),
    Column("first s", "first_s", ".2f"),
    Column("median s", "median_s", ".2f"),
    Column("best s", "best_s", ".2f"),
    Column("last s", "last_s", ".2f"),
    Column("bound s", "bound_s", ".2f"),
    Column("over bound", "over_bound", ".2f"),
    Column("fallen s", "fallen_median_s", ".2f"),
    Column("over its bound", "fallen_over_bound", ".2f"),
    Column("late %", "late", ".2f", 100),
]
SCENARIO = Scenario(__doc__, add_arguments, measure, "All-reduce over uneven networks", COLUMNS)
