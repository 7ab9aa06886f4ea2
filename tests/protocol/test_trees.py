"""Packings of spanning trees and of stars."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from zpccl import limits
from zpccl.protocol.network import Model, Network, Route, Speeds, Tensor, Tree
from zpccl.protocol.trees import NEAR, SHARES, STARS_MAX, Packer
from zpccl.types import Algorithm

MB = 10**6
ENDLESS = Speeds(0, 10**15, 10**15, 10**15)
"""Work takes no time."""
LARGE = Tensor(1000 * MB)


def made_of(rates: list[list[int | None]], hosts: list[int | None] | None = None) -> Network:
    count = len(rates)
    return Network(tuple(map(tuple, rates)), ((None,) * count,) * count, tuple(hosts or [None] * count))


def random_network(seed: int, count: int) -> Network:
    rng = random.Random(seed)
    rates: list[list[int | None]] = [[None] * count for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        rates[one][other] = rates[other][one] = rng.choice([0, 10, 20, 50, 100, 200]) * MB
    return made_of(rates, [rng.choice([100, 400, 1000]) * MB for _ in range(count)])


def seconds(network: Network, trees: list[Tree]) -> float:
    route = Route(Algorithm.TREES, tuple(range(network.count)), tuple(trees))
    return Model(network, LARGE, ENDLESS).network_ns(route) / limits.SECOND


def packings(network: Network, tensor: Tensor = LARGE) -> list[list[Tree]]:
    return list(Packer(Model(network, tensor, ENDLESS)).trees())


def stars(network: Network, tensor: Tensor = LARGE) -> list[Tree]:
    return next(Packer(Model(network, tensor, ENDLESS)).stars(), [])


@pytest.mark.parametrize("count", [3, 4, 5, 8, 13, 24])
def test_all_are_spanning_trees_over_usable_paths(count: int) -> None:
    for seed in range(4):
        network = random_network(seed, count)
        for trees in [*packings(network), stars(network)]:
            assert len(trees) <= max(limits.LANES_MAX, count)
            for tree in trees:
                assert len(tree.parents) == count and tree.share > 0
                assert max(tree.depths()) < count, "depths() finds circles"
                assert all(network.is_usable(*edge) for edge in tree.edges)
            if trees:
                assert sum(tree.share for tree in trees) == pytest.approx(SHARES, abs=len(trees))


def test_stars_follow_the_rates_of_hosts() -> None:
    """1 + 2 w <= T u for each of the four, and the shares w sum to 1: so T is 6 / 16 s for 1 GB."""
    network = made_of([[None] * 4] * 4, [3000 * MB, 3000 * MB, 4000 * MB, 6000 * MB])
    found = stars(network)
    assert all(tree.parents == (tree.root,) * 4 for tree in found)
    assert seconds(network, found) == pytest.approx(0.375, rel=0.01)
    shares = {tree.root: tree.share / SHARES for tree in found}
    assert shares == pytest.approx({0: 0.0625, 1: 0.0625, 2: 0.25, 3: 0.625}, abs=0.01)


def test_only_who_reaches_all_others_is_the_middle_of_a_star() -> None:
    network = made_of([[10 * MB] * 4 for _ in range(4)]).without([(0, 1), (0, 2)])
    assert {tree.root for tree in stars(network)} == {3}
    assert stars(network.without([(3, 0)])) == []


def test_a_chain_has_one_tree_and_its_root_is_in_the_middle() -> None:
    count = 9
    ends = [(one, other) for one, other in itertools.combinations(range(count), 2) if other - one > 1]
    (trees,) = {tuple(trees) for trees in packings(made_of([[10 * MB] * count] * count).without(ends))}
    (tree,) = trees
    assert tree.share == SHARES and tree.root in (3, 4, 5) and max(tree.depths()) <= 5


def test_islands_have_no_tree() -> None:
    network = made_of([[10 * MB] * 4] * 4).without([(0, 2), (0, 3), (1, 2), (1, 3)])
    assert packings(network) == [] and stars(network) == []


def test_roots_are_spread() -> None:
    """Each tree is a chain of three: its middle adds the most."""
    found = stars(made_of([[100 * MB] * 6] * 6))
    assert len({tree.root for tree in found}) == 6


@pytest.mark.parametrize("count", [4, 9, 16])
def test_roots_are_about_as_good_as_any_other(count: int) -> None:
    """Of a large tensor, whose frames are complete long before its parts are."""
    for seed in range(8):
        network = random_network(seed, count)
        rng = random.Random(seed)
        round_trips_ns: list[list[int | None]] = [[None] * count for _ in range(count)]
        for one, other in itertools.combinations(range(count), 2):
            round_trips_ns[one][other] = round_trips_ns[other][one] = rng.randrange(200) * limits.MS
        model = Model(replace(network, round_trip_ns=tuple(map(tuple, round_trips_ns))), LARGE, ENDLESS)
        for trees in Packer(model).trees():
            for tree in trees:
                latencies_ns = [model.trees_latency_ns([rooted(tree, root)]) for root in range(count)]
                assert latencies_ns[tree.root] <= NEAR * min(latencies_ns) * 1.001


def rooted(tree: Tree, root: int) -> Tree:
    """The tree with another root."""
    parents, one, parent = list(tree.parents), root, root
    while parents[one] != one:
        parents[one], one, parent = parent, parents[one], one
    parents[one] = parent
    return Tree(tree.share, tuple(parents))


def test_large_groups_have_no_stars_but_for_wide_sums() -> None:
    network = made_of([[10 * MB] * (STARS_MAX + 1)] * (STARS_MAX + 1))
    assert stars(network) == []
    assert len(stars(network, Tensor(LARGE.wire_bytes, are_sums_wide=True))) == STARS_MAX + 1


def best(network: Network) -> float:
    return min(seconds(network, trees) for trees in packings(network))


def test_a_slow_pair_of_clusters_uses_all_paths_between_them() -> None:
    """Two clusters of four with quick paths; 16 paths of 10 MB/s between them carry 160 MB/s."""
    rates: list[list[int | None]] = [
        [(1000 if one // 4 == other // 4 else 10) * MB for other in range(8)] for one in range(8)
    ]
    assert best(made_of(rates)) == pytest.approx(1000 / 160, rel=0.1)


def test_the_cut_with_the_least_rate_is_the_bound() -> None:
    """Between pairs that are quick internally: 300 + 300 + 50 + 50."""
    table = [[None, 1000, 300, 50], [1000, None, 50, 300], [300, 50, None, 1000], [50, 300, 1000, None]]
    rates = [[None if rate is None else rate * MB for rate in row] for row in table]
    assert best(made_of(rates)) == pytest.approx(1000 / 700, rel=0.02)


def test_a_slow_host_sends_the_tensor_once() -> None:
    network = made_of([[None] * 5] * 5, [10 * MB, 500 * MB, 500 * MB, 500 * MB, 500 * MB])
    assert best(network) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("wire_bytes", [0, 1, limits.LANE_MIN_BYTES, 5 * limits.LANE_MIN_BYTES])
def test_small_tensors_have_few_lanes(wire_bytes: int) -> None:
    network = made_of([[(one + other + 1) * MB for other in range(8)] for one in range(8)])
    for trees in [*packings(network, Tensor(wire_bytes)), stars(network, Tensor(wire_bytes))]:
        assert 1 <= len(trees) <= max(1, wire_bytes // limits.LANE_MIN_BYTES)


def test_where_latency_counts_trees_are_not_deep() -> None:
    """A chain is as quick as any tree for a large tensor, but a small one takes the star at once."""
    count = 16
    rates: list[list[int | None]] = [[50 * MB] * count for _ in range(count)]
    for one in range(count - 1):
        rates[one][one + 1] = rates[one + 1][one] = 100 * MB
    network = Network(tuple(map(tuple, rates)), ((50 * limits.MS,) * count,) * count, (None,) * count)
    model = Model(network, Tensor(limits.MIB), Speeds())
    found = [Route(Algorithm.TREES, tuple(range(count)), tuple(trees)) for trees in Packer(model).trees()]
    assert min(model.time_ns(route) or 0 for route in found) < 200 * limits.MS
