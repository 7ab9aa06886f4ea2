"""The choice of the algorithm for an all-reduce."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol.network import Model, Network, Route, Speeds, Tensor, Tree
from zpccl.protocol.routes import plan, plan_ring
from zpccl.types import Algorithm

MBIT = 10**6 // 8
RING, DIRECT, ONE_SHOT, TREES = Algorithm.RING, Algorithm.DIRECT, Algorithm.ONE_SHOT, Algorithm.TREES
TENSOR = Tensor(32 * limits.MIB)
Rates = list[list[int | None]]


def made_of(rates: Rates, hosts: list[int | None] | None = None, round_trip_ns: int | None = None) -> Network:
    """A network with these rates in Mbit/s."""
    count = len(rates)
    return Network(
        tuple(tuple(None if rate is None else rate * MBIT for rate in row) for row in rates),
        ((round_trip_ns,) * count,) * count,
        tuple(None if rate is None else rate * MBIT for rate in hosts or [None] * count),
    )


UNEVEN_HOSTS = made_of([[None] * 4] * 4, [100, 400, 400, 800])
PAIRS = made_of([[None, 1000, 300, 50], [1000, None, 50, 300], [300, 50, None, 1000], [50, 300, 1000, None]])


def seconds(route: Route | None) -> float:
    assert route is not None
    return route.time_ns / limits.SECOND


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Networks of two to nine peers. Some paths are missing, and about some nothing is known."""
    count = draw(st.integers(2, 9))
    rng = draw(st.randoms(use_true_random=False))
    has_gaps = draw(st.booleans())
    rates: Rates = [[None] * count for _ in range(count)]
    round_trips_ns: Rates = [[None] * count for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        rate = rng.choice([None, 1, 10, 50, 100, 100, 1000, rng.randint(1, 10**4)])
        rates[one][other] = rates[other][one] = 0 if has_gaps and rng.random() < 0.3 else rate and rate * MBIT
        round_trip_ns = rng.choice([None, 0, rng.randint(0, 300) * limits.MS])
        round_trips_ns[one][other] = round_trips_ns[other][one] = round_trip_ns
    hosts = tuple(rng.choice([None, 100, 1000, rng.randint(10, 10**4)]) for _ in range(count))
    return Network(
        tuple(map(tuple, rates)), tuple(map(tuple, round_trips_ns)), tuple(rate and rate * MBIT for rate in hosts)
    )


tensors = st.builds(
    Tensor, st.integers(0, 36).map(lambda power: 3 * 2**power), is_quantised=st.booleans(), are_sums_wide=st.booleans()
)
speeds = st.builds(Speeds, *[st.none() | st.integers(1, 10**10)] * 4)


# --- Known networks ---------------------------------------------------------------------------------------------------


def test_a_slow_host_sends_and_gets_the_tensor_once() -> None:
    """At 100 Mbit/s that takes 2.68 s. A ring or a direct exchange takes 1.5 times as long."""
    route = plan(UNEVEN_HOSTS, TENSOR)
    assert seconds(route) <= 1.02 * 2.69
    assert route is not None and all(0 in set(range(4)) - set(tree.parents) for tree in route.trees)


def test_paths_of_different_rates_are_used_together() -> None:
    """The best ring uses the paths of 1000 and 300 Mbit/s: 1.34 s."""
    route, ring = plan(PAIRS, TENSOR), plan_ring(PAIRS, TENSOR)
    assert ring is not None and ring.order in ((0, 1, 3, 2), (0, 2, 3, 1))
    assert seconds(ring) == pytest.approx(1.34, abs=0.01)
    assert seconds(route) < 0.45
    assert route is not None and route.algorithm is TREES


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_with_nothing_known_the_choice_is_that_by_size_alone(count: int, is_quantised: bool) -> None:
    """By hops and bytes, with one latency for each hop and one rate for each algorithm."""
    rng = random.Random(count)
    for _ in range(50):
        size = int(2 ** rng.uniform(0, 40))
        known = [rng.choice([None, int(2 ** rng.uniform(10, 33))]) for _ in range(3)]
        route = plan(Network.unknown(count), Tensor(size, is_quantised), Speeds(*known))
        assert route is not None and route.order == tuple(range(count))
        defaults = limits.HOP_LATENCY_NS, limits.RING_BYTES_PER_SECOND, limits.DIRECT_BYTES_PER_SECOND
        hop_ns, ring_rate, direct_rate = (own or default for own, default in zip(known, defaults, strict=True))
        sent = 2 * (count - 1) * size // count
        times_ns = {
            ONE_SHOT: hop_ns + (count - 1) * size * limits.SECOND // direct_rate,
            DIRECT: 2 * hop_ns + sent * limits.SECOND // direct_rate,
            RING: 2 * (count - 1) * hop_ns + sent * limits.SECOND // ring_rate,
        }
        if is_quantised or (count - 1) * size > limits.ONE_SHOT_BYTES_MAX:
            del times_ns[ONE_SHOT]
        if count == 2:
            del times_ns[DIRECT]
        elif known[1:] == [None, None]:  # Nobody has tried how quick the paths are.
            del times_ns[RING]
        assert route.time_ns == pytest.approx(times_ns[route.algorithm], abs=2)
        worse = limits.QUANTIZED_DIRECT_PERCENT_MAX if is_quantised and count > 2 else 100
        costs = {algorithm: time_ns * (worse if algorithm is RING else 100) for algorithm, time_ns in times_ns.items()}
        assert costs[route.algorithm] <= min(costs.values()) + 1000


@pytest.mark.parametrize("rate", [1, 100, 3000])
@pytest.mark.parametrize("round_trip_ms", [0, 100])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
def test_an_even_network_has_a_simple_plan(rate: int, round_trip_ms: int, count: int) -> None:
    """Also if each path is a little quicker or slower."""
    rng = random.Random(count)
    for spread in (0, 5):
        for size in (1000, limits.MIB, 64 * limits.MIB, 4096 * limits.MIB):
            rates: Rates = [[None] * count for _ in range(count)]
            for one, other in itertools.combinations(range(count), 2):
                rates[one][other] = rates[other][one] = 100 * rate + rate * rng.randint(-spread, spread)
            network = made_of(rates, [500 * rate] * count, round_trip_ms * limits.MS)
            route = plan(network, Tensor(size))
            assert route is not None and route.algorithm in (RING, DIRECT, ONE_SHOT)
            assert route.order == tuple(range(count))


def test_two_use_their_path() -> None:
    for rate in (1, None, 10**5):
        network = made_of([[None, rate], [rate, None]], [7, 900])
        for size, expected in ((100, ONE_SHOT), (10**9, RING)):
            route = plan(network, Tensor(size))
            assert route is not None and route.algorithm is expected
    assert plan(Network.unknown(2).without([(0, 1)]), TENSOR) is None


def test_one_alone_has_nothing_to_do() -> None:
    assert plan(Network.unknown(1), TENSOR) == Route(RING, (0,))


@pytest.mark.parametrize("slow", [0, 1])
def test_three_with_a_slow_or_missing_path_use_the_other_two(slow: int) -> None:
    network = made_of([[None, 500, slow], [500, None, 500], [slow, 500, None]])
    route = plan(network, TENSOR)
    assert route is not None and route.algorithm is TREES
    assert max(route.trees, key=lambda tree: tree.share).parents == (1, 1, 1)


def test_a_chain_is_enough() -> None:
    """There is no ring."""
    count = 8
    gaps = [(one, other) for one, other in itertools.combinations(range(count), 2) if other - one > 1]
    network = made_of([[100] * count] * count).without(gaps)
    route = plan(network, TENSOR)
    assert route is not None and route.algorithm is TREES and len(route.trees) == 1
    assert plan_ring(network, TENSOR) is None
    assert plan(network.without([(3, 4)]), TENSOR) is None


def test_a_broken_path_is_avoided() -> None:
    network = Network.unknown(5).without([(0, 1)])
    route = plan(network, Tensor(4096 * limits.MIB))
    assert route is not None
    ring = plan_ring(network, TENSOR)
    assert ring is not None and ring.order == (0, 2, 1, 3, 4)
    assert plan_ring(network, TENSOR, previous=Route(RING, (0, 1, 2, 3, 4))) == ring


@pytest.mark.parametrize("count", [5, 20])
def test_a_ring_begins_with_the_first(count: int) -> None:
    """It begins with the root of a broadcast, even if the order is repaired."""
    for one in range(count):
        ring = plan_ring(Network.unknown(count).without([(one, (one + 1) % count)]), TENSOR)
        assert ring is not None and ring.order[0] == 0 and sorted(ring.order) == list(range(count))


def test_many_have_the_ring() -> None:
    count = limits.DIRECT_PEERS_MAX + 1
    route = plan(Network.unknown(count), Tensor(1000))
    assert route is not None and route.algorithm is RING and route.order == tuple(range(count))
    route = plan(Network.unknown(count).without([(0, 1)]), Tensor(1000), asked=DIRECT)
    assert route is not None and route.algorithm is RING and sorted(route.order) == list(range(count))


# --- What is asked for, and what is possible --------------------------------------------------------------------------


def test_users_may_ask_for_an_algorithm() -> None:
    route = plan(PAIRS, TENSOR, asked=RING)
    assert route is not None and route.algorithm is RING
    route = plan(PAIRS, TENSOR, asked=DIRECT)
    assert route is not None and route.algorithm is DIRECT
    route = plan(PAIRS.without([(0, 3)]), TENSOR, asked=DIRECT)
    assert route is not None and route.algorithm is not DIRECT, "a call that can succeed should"
    route = plan(PAIRS.without([(0, 1), (0, 2)]), TENSOR, asked=RING)
    assert route is not None and route.algorithm is TREES


@settings(deadline=None)
@given(networks(), st.integers(0, 32))
def test_wide_sums_do_not_travel(network: Network, power: int) -> None:
    """If nobody reaches all others, the plan is a ring, which the engine widens."""
    tensor = Tensor(2**power, are_sums_wide=True)
    route = plan(network, tensor)
    if network.count == 2 or route is None:
        return
    has_star = any(
        all(network.is_usable(one, other) for other in range(network.count) if other != one)
        for one in range(network.count)
    )
    assert route.algorithm in ((DIRECT, TREES) if has_star else (RING,))
    assert all(max(tree.depths()) == 1 for tree in route.trees)


def test_fewer_roundings_are_worth_some_time() -> None:
    """A ring may take as long as a direct exchange, and half of that less."""
    large = 2**40
    network = Network.unknown(4)
    for direct, expected in ((700, DIRECT), (600, RING)):
        route = plan(network, Tensor(large, is_quantised=True), Speeds(1, 1000, direct))
        assert route is not None and route.algorithm is expected


# --- Hysteresis -------------------------------------------------------------------------------------------------------


def uneven(slow: int) -> Network:
    rates: Rates = [[None if one == other else 100 for other in range(4)] for one in range(4)]
    rates[0][1] = rates[1][0] = slow
    return made_of(rates)


def test_a_plan_is_kept_unless_another_one_is_much_quicker() -> None:
    first = plan(uneven(100), TENSOR)
    assert first is not None and first.algorithm is DIRECT
    kept = plan(uneven(92), TENSOR, previous=first)
    assert kept is not None and kept.algorithm is DIRECT and kept.time_ns > first.time_ns, "its time is that of now"
    changed = plan(uneven(30), TENSOR, previous=first)
    assert changed is not None and changed.algorithm is TREES
    still = plan(uneven(34), TENSOR, previous=changed)
    assert still is not None and still.trees == changed.trees


@pytest.mark.parametrize(
    "previous",
    [
        Route(DIRECT, (0, 1, 2)),
        Route(DIRECT, (0, 1, 2, 3)),
        Route(ONE_SHOT, (0, 1, 2, 3)),
        Route(RING, (0, 1, 2, 3)),
        Route(TREES, (0, 1, 2, 3), (Tree(1, (1, 1, 1, 1)),)),
    ],
)
def test_a_plan_that_is_no_longer_possible_is_not_kept(previous: Route) -> None:
    """It has other peers, needs a path that is gone, or is for small tensors."""
    network = Network.unknown(4).without([(0, 1)])
    assert plan(network, TENSOR, previous=previous) == plan(network, TENSOR)


def test_wide_sums_do_not_keep_deep_trees() -> None:
    deep = Route(TREES, (0, 1, 2, 3), (Tree(1, (1, 2, 2, 2)),))
    route = plan(PAIRS, Tensor(TENSOR.wire_bytes, are_sums_wide=True), previous=deep)
    assert route is not None and all(max(tree.depths()) == 1 for tree in route.trees)


# --- Whatever the network ---------------------------------------------------------------------------------------------


def is_connected(network: Network) -> bool:
    reached, waiting = {0}, [0]
    for one in waiting:
        found = {other for other in range(network.count) if other not in reached and network.is_usable(one, other)}
        reached |= found
        waiting += sorted(found)
    return len(reached) == network.count


@settings(deadline=None, max_examples=200)
@given(networks(), tensors, speeds)
def test_every_plan_is_sound_and_none_is_slower_than_the_simple_ones(
    network: Network, tensor: Tensor, known: Speeds
) -> None:
    route = plan(network, tensor, known)
    everyone = tuple(range(network.count))
    if route is None:
        assert not is_connected(network) or tensor.are_sums_wide
        return
    assert sorted(route.order) == list(everyone)
    assert (route.algorithm is TREES) == bool(route.trees)
    assert len(route.trees) <= max(limits.LANES_MAX, network.count)
    for tree in route.trees:
        assert tree.share > 0 and len(tree.parents) == network.count and max(tree.depths()) < network.count
        assert all(network.is_usable(*edge) for edge in tree.edges)
    model = Model(network, tensor, known)
    assert model.time_ns(route) == route.time_ns
    if not tensor.is_quantised and not tensor.are_sums_wide:
        for algorithm in (RING, DIRECT) if network.count > 2 else (RING,):
            time_ns = model.time_ns(Route(algorithm, everyone))
            assert time_ns is None or route.time_ns <= time_ns


@settings(deadline=None)
@given(networks(), tensors)
def test_the_same_network_has_the_same_plan(network: Network, tensor: Tensor) -> None:
    route = plan(network, tensor)
    assert plan(renamed(network, range(network.count)), tensor) == route
    assert plan(network, tensor, previous=route) == route


def renamed(network: Network, names: Sequence[int]) -> Network:
    def table(rows: tuple[tuple[int | None, ...], ...]) -> tuple[tuple[int | None, ...], ...]:
        return tuple(tuple(rows[one][other] for other in names) for one in names)

    hosts = tuple(network.host_bytes_per_second[one] for one in names)
    return Network(table(network.path_bytes_per_second), table(network.round_trip_ns), hosts)


def test_a_small_tensor_goes_to_the_star_of_least_latency() -> None:
    """The names of the peers do not matter: all stars carry the same load."""
    times = set()
    for far in ((0, 1), (0, 2), (1, 2)):
        rows = [[limits.MS if one != other else None for other in range(3)] for one in range(3)]
        rows[far[0]][far[1]] = rows[far[1]][far[0]] = 100 * limits.MS
        network = Network(((None,) * 3,) * 3, tuple(map(tuple, rows)), (None,) * 3)
        route = plan(network, Tensor(2**16))
        assert route is not None and route.algorithm is Algorithm.TREES
        assert [tree.root for tree in route.trees] == [({0, 1, 2} - set(far)).pop()]
        times.add(route.time_ns)
    assert len(times) == 1


@settings(deadline=None)
@given(networks(), st.integers(16, 34), st.randoms(use_true_random=False))
def test_other_names_for_the_same_peers_give_about_the_same_time(
    network: Network, power: int, rng: random.Random
) -> None:
    names = list(range(network.count))
    rng.shuffle(names)
    route, other = plan(network, Tensor(2**power)), plan(renamed(network, names), Tensor(2**power))
    assert (route is None) == (other is None)
    if route is not None and other is not None:  # In 10,000 networks at most 1.7; 2.04 has been seen.
        assert 3 * other.time_ns >= route.time_ns and 3 * route.time_ns >= other.time_ns
