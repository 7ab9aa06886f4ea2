"""Times all-reduces over uneven networks, call after call, beside the least time that the network allows.

Each peer, and the master, is on its own host in an emulated wide-area network (the package `wan`). The master's paths
have the delay only. The networks:

  uplinks  four hosts with up- and downlinks of 100, 400, 400 and 800 Mbit/s, round trip 20 ms
  paths    four hosts: two paths of 1,000 Mbit/s, two of 300 and two of 50, of which no host has two alike;
           round trips 10, 40 and 100 ms
  fat      two hosts, 1,000 Mbit/s, round trip 100 ms, 0.1 % of the segments lost

`bound_s` is the time in which the bytes cross the network if every path and every host is used as well as it can be
(the fractional packing of spanning trees), headers included and delays left out. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common import Row, Rows, add, positive
from wan.emulated import CONGESTION_CONTROLS, EmulatedNetwork
from wan.settings import Settings
from workers import Hosts, call_all

from benchmarks.scenario import BYTES, Column, Scenario
from benchmarks.systems import ALGORITHMS, start_system
from benchmarks.wan import what_the_emulator_says

PAYLOAD = 0.965
"""Of a rate, what TCP's payload gets."""


@dataclass(frozen=True)
class Network:
    """An uneven network.

    Attributes:
        peers: number of hosts, without the master's.
        lines: its settings.
        tensors_per_mbit: the bound: how often the tensor crosses the narrowest cut, over its rate in Mbit/s.
    """

    peers: int
    lines: Sequence[str]
    tensors_per_mbit: float

    def bound_s(self, size_bytes: int) -> float:
        """The least time of an all-reduce."""
        return size_bytes * 8 / 1e6 * self.tensors_per_mbit / PAYLOAD


NETWORKS = {
    "uplinks": Network(
        4,
        [
            "link * * delay_ms=10",
            *(f"host {host} egress_mbit={rate} ingress_mbit={rate}" for host, rate in enumerate((100, 400, 400, 800))),
        ],
        1 / 100,
    ),
    "paths": Network(
        4,
        [
            *(f"link {pair} rate_mbit=1000 delay_ms=5" for pair in ("0 1", "2 3")),
            *(f"link {pair} rate_mbit=300 delay_ms=20" for pair in ("0 2", "1 3")),
            *(f"link {pair} rate_mbit=50 delay_ms=50" for pair in ("0 3", "1 2")),
        ],
        1 / 700,
    ),
    "fat": Network(2, ["link * * delay_ms=50 rate_mbit=1000 loss=0.1%"], 1 / 1000),
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
    with start_system(Hosts(hosts), "zpccl", network.peers, 0, algorithm=options.algorithm) as system:
        call_all(system.workers, "allocate", options.bytes, "float32", "none")
        for _ in range(options.calls):
            system.repeat()
        seconds = system.seconds
        bound_s = network.bound_s(options.bytes)
        return {
            "network": name,
            "peers": network.peers,
            "bytes": options.bytes,
            "algorithm": options.algorithm,
            "congestion": options.congestion or "default",
            "seconds": seconds,
            "first_s": seconds[0],
            "median_s": statistics.median(seconds),
            "best_s": min(seconds),
            "last_s": seconds[-1],
            "bound_s": bound_s,
            "over_bound": statistics.median(seconds) / bound_s,
            **what_the_emulator_says(hosts),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which (default: all of them)"
    )
    add(parser, "--bytes", "32MiB", "of the tensor")
    add(parser, "--calls", 10, "all-reduces in a row", type=positive)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="auto", help="that all peers ask for")
    parser.add_argument("--congestion", choices=CONGESTION_CONTROLS, help="of all connections (default the system's)")
    add(parser, "--seed", 0)


COLUMNS = [
    Column("network", "network"),
    Column("peers", "peers"),
    Column("bytes", "bytes", BYTES),
    Column("algorithm", "algorithm"),
    Column("congestion", "congestion"),
    Column("first s", "first_s", ".2f"),
    Column("median s", "median_s", ".2f"),
    Column("best s", "best_s", ".2f"),
    Column("last s", "last_s", ".2f"),
    Column("bound s", "bound_s", ".2f"),
    Column("over bound", "over_bound", ".2f"),
    Column("late %", "late", ".2f", 100),
]
SCENARIO = Scenario(__doc__, add_arguments, measure, "All-reduce over uneven networks", COLUMNS)
