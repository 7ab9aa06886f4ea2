"""Plans all-reduces for synthetic networks, and compares the estimated times with a lower bound.

`plan` is the time of the plan by the model of zpccl/protocol/network.py, divided by a time that no plan can beat. That
is the solution of a linear program over all spanning trees (HiGHS), plus twice the latency from the best root to the
peer that is farthest from it. A plan may be unable to reach it, since the least busy trees are not those of least
latency.

`admission`, `shortest` and `direct` are the same for the ring in order of admission, the ring with the least sum of
latencies (2-opt) and the direct exchange. They show what a plan gains. `by` counts the algorithms of the plans. CPU
time is that of one plan, on one core.

Networks:

    random    each path 20 to 1000 Mbit/s and 5 to 250 ms, each host 1 to 5 Gbit/s
    clusters  about sqrt(N) sites: 2 to 10 Gbit/s within, 50 to 500 Mbit/s and 20 to 200 ms between two
    regions   eight regions of a cloud, with rates and round trips like published ones; hosts of 1 to 5 Gbit/s
    homes     only the hosts are slow: 20 to 1000 Mbit/s up and down, 10 to 60 ms
    sparse    random, but every other path is missing, except those of one ring
"""

from __future__ import annotations

import argparse
import collections
import random
import statistics
import time
from collections.abc import Callable, Sequence

from common import Row, Rows, add, positive, whole

from benchmarks.plan_bounds import latency_seconds_min, moving_seconds_min, quantile
from benchmarks.scenario import Column, Scenario, plain
from zpccl import limits
from zpccl.protocol.network import Model, Network, Route, Speeds, Tensor
from zpccl.protocol.rings import shorter_order
from zpccl.protocol.routes import plan
from zpccl.types import Algorithm

MBIT = 125_000
REGIONS = ("us-east", "us-west", "eu-west", "eu-central", "ap-south", "ap-southeast", "ap-northeast", "sa-east")
ROUND_TRIPS_MS = (
    (1, 65, 70, 90, 190, 215, 150, 115),
    (65, 1, 125, 145, 220, 165, 98, 175),
    (70, 125, 1, 25, 122, 175, 200, 178),
    (90, 145, 25, 1, 110, 160, 225, 205),
    (190, 220, 122, 110, 1, 60, 125, 300),
    (215, 165, 175, 160, 60, 1, 70, 320),
    (150, 98, 200, 225, 125, 70, 1, 260),
    (115, 175, 178, 205, 300, 320, 260, 1),
)
RATES_MBIT = (
    (5000, 2000, 1500, 1200, 400, 400, 700, 600),
    (2000, 5000, 900, 800, 350, 500, 1000, 400),
    (1500, 900, 5000, 3000, 600, 450, 350, 350),
    (1200, 800, 3000, 5000, 600, 450, 300, 300),
    (400, 350, 600, 600, 5000, 900, 500, 150),
    (400, 500, 450, 450, 900, 5000, 900, 150),
    (700, 1000, 350, 300, 500, 900, 5000, 200),
    (600, 400, 350, 300, 150, 150, 200, 5000),
)
"""Rates from one host to one of another region with many connections, of the order of published ones."""

Path = tuple[float, float]
"""Rate in Mbit/s, round trip in ms."""


def made_of(count: int, path: Callable[[int, int], Path], hosts_mbit: list[float | None]) -> Network:
    """The network with these paths; `path` is asked once for each pair."""
    rates: list[list[int | None]] = [[None] * count for _ in range(count)]
    round_trips_ns: list[list[int | None]] = [[None] * count for _ in range(count)]
    for one in range(count):
        for other in range(one):
            rate_mbit, round_trip_ms = path(one, other)
            rate = None if rate_mbit == float("inf") else int(rate_mbit * MBIT)
            rates[one][other] = rates[other][one] = rate
            round_trips_ns[one][other] = round_trips_ns[other][one] = int(round_trip_ms * limits.MS)
    hosts = tuple(None if mbit is None else int(mbit * MBIT) for mbit in hosts_mbit)
    return Network(tuple(map(tuple, rates)), tuple(map(tuple, round_trips_ns)), hosts)


def between(rng: random.Random, least: float, most: float) -> float:
    """A random number on a logarithmic scale: each factor of two is equally likely."""
    return float(least * (most / least) ** rng.random())


def random_network(rng: random.Random, count: int) -> Network:
    hosts: list[float | None] = [between(rng, 1000, 5000) for _ in range(count)]
    return made_of(count, lambda one, other: (between(rng, 20, 1000), rng.uniform(5, 250)), hosts)


def clusters(rng: random.Random, count: int) -> Network:
    sites = max(2, round(count**0.5))
    site = [rng.randrange(sites) for _ in range(count)]
    links = {
        (one, other): (between(rng, 50, 500), rng.uniform(20, 200)) for one in range(sites) for other in range(one)
    }

    def path(one: int, other: int) -> Path:
        if site[one] == site[other]:
            return rng.uniform(2000, 10000), 0.5
        rate_mbit, round_trip_ms = links[max(site[one], site[other]), min(site[one], site[other])]
        return rate_mbit * rng.uniform(0.6, 1.4), round_trip_ms

    return made_of(count, path, [rng.choice((2500.0, 5000.0, 10000.0)) for _ in range(count)])


def regions(rng: random.Random, count: int) -> Network:
    region = [rng.randrange(len(REGIONS)) for _ in range(count)]

    def path(one: int, other: int) -> Path:
        places = region[one], region[other]
        return RATES_MBIT[places[0]][places[1]] * rng.uniform(0.7, 1.3), ROUND_TRIPS_MS[places[0]][places[1]]

    return made_of(count, path, [rng.choice((1000.0, 2500.0, 5000.0)) for _ in range(count)])


def homes(rng: random.Random, count: int) -> Network:
    hosts: list[float | None] = [between(rng, 20, 1000) for _ in range(count)]
    return made_of(count, lambda one, other: (float("inf"), rng.uniform(10, 60)), hosts)


def sparse(rng: random.Random, count: int) -> Network:
    ring = rng.sample(range(count), count)
    kept = {frozenset((ring[place - 1], one)) for place, one in enumerate(ring)}
    missing = [
        (one, other)
        for one in range(count)
        for other in range(one)
        if frozenset((one, other)) not in kept and rng.random() < 0.5
    ]
    return random_network(rng, count).without(missing)


NETWORKS = {"random": random_network, "clusters": clusters, "regions": regions, "homes": homes, "sparse": sparse}


def bound_ns(network: Network, moving_seconds_per_byte: float, wire_bytes: int) -> float:
    """The least time that trees need."""
    latency_seconds = latency_seconds_min(Model(network, Tensor(wire_bytes), Speeds()))
    return (moving_seconds_per_byte * wire_bytes + latency_seconds) * limits.SECOND


def moving_seconds_per_byte(network: Network) -> float:
    """The moving part of the bound, per byte: it does not depend on the size of the tensor."""
    return moving_seconds_min(Model(network, Tensor(limits.MIB), Speeds()), Speeds()) / limits.MIB


def other_times_ns(network: Network, tensor: Tensor) -> dict[str, int | None]:
    """Times of the simple algorithms; None if they need missing paths."""
    model, everyone = Model(network, tensor, Speeds()), tuple(range(network.count))
    rates = [[1.0 if network.is_usable(one, other) else 0.0 for other in everyone] for one in everyone]
    shortest = tuple(shorter_order(everyone, rates, model.hop_ns, 1.0))
    return {
        "admission": model.time_ns(Route(Algorithm.RING, everyone)),
        "shortest": model.time_ns(Route(Algorithm.RING, shortest)),
        "direct": model.time_ns(Route(Algorithm.DIRECT, everyone)),
    }


def row_of(networks: Sequence[tuple[Network, float]], wire_bytes: int) -> Row:
    """Times relative to the bound, and CPU times, over all these networks."""
    ratios: dict[str, list[float]] = {"plan": [], "admission": [], "shortest": [], "direct": []}
    seconds, algorithms, tensor = [], collections.Counter[str](), Tensor(wire_bytes)
    for network, per_byte in networks:
        began = time.thread_time()
        route = plan(network, tensor)
        seconds.append(time.thread_time() - began)
        assert route is not None, "the paths connect all"
        algorithms[route.algorithm.name.lower()] += 1
        least_ns = bound_ns(network, per_byte, wire_bytes)
        for name, time_ns in ({"plan": route.time_ns} | other_times_ns(network, tensor)).items():
            if time_ns is not None:
                ratios[name].append(time_ns / least_ns)
    row: Row = {"bytes": wire_bytes, "by": " ".join(f"{name} {times}" for name, times in algorithms.most_common())}
    for name, values in ratios.items():
        row |= {f"{name}_{what}": quantile(values, part) for what, part in (("median", 0.5), ("p95", 0.95))}
    return row | {"cpu_s_median": statistics.median(seconds), "cpu_s_max": max(seconds)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--networks", list(NETWORKS), "kinds of networks", choices=NETWORKS)
    add(parser, "--peers", [4, 8, 16, 32, 64])
    add(parser, "--bytes", [4 * limits.MIB, 64 * limits.MIB, 1024 * limits.MIB])
    add(parser, "--seeds", 10, "networks of each kind", type=positive)
    add(parser, "--seed", 0, "of the first of them", type=whole(0))


def measure(options: argparse.Namespace) -> Rows:
    for kind in options.networks:
        for count in options.peers:
            seeds = range(options.seed, options.seed + options.seeds)
            made = [NETWORKS[kind](random.Random(f"{kind} {count} {seed}"), count) for seed in seeds]
            networks = [(network, moving_seconds_per_byte(network)) for network in made]
            for wire_bytes in options.bytes:
                yield {"network": kind, "peers": count} | row_of(networks, wire_bytes)


COLUMNS = [
    *plain("network", "peers", "bytes"),
    Column("plan, median", "plan_median", ".2f"),
    Column("p95", "plan_p95", ".2f"),
    *(Column(name, f"{name}_median", ".2f") for name in ("admission", "shortest", "direct")),
    Column("by", "by"),
    Column("CPU ms", "cpu_s_median", ".1f", 1e3),
    Column("max", "cpu_s_max", ".1f", 1e3),
]
TITLE = "Estimated times of plans, divided by a lower bound"

SCENARIO = Scenario(__doc__, add_arguments, measure, TITLE, COLUMNS)
