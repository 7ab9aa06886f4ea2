"""The order of a ring and the links that it needs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol.rings import delay_bound, find_order, quickest_order, rate_bound, ring_edges, shorter_order

Edges = set[frozenset[int]]


@pytest.mark.parametrize(
    "order, edges",
    [("", []), ("a", []), ("ab", ["ab"]), ("abc", ["ab", "bc", "ca"]), ("abcd", ["ab", "bc", "cd", "da"])],
)
def test_ring_edges(order: str, edges: list[str]) -> None:
    assert [one + other for one, other in ring_edges(order)] == edges


def broken(edges: Edges) -> Callable[[int, int], bool]:
    """All edges except these are usable."""
    return lambda one, other: frozenset((one, other)) not in edges


def works(order: list[int], count: int, edges: Edges) -> bool:
    """True if the order is a ring of all peers and needs none of these edges."""
    return sorted(order) == list(range(count)) and all(map(broken(edges), *zip(*ring_edges(order), strict=True)))


def brute_force(count: int, edges: Edges) -> list[int] | None:
    """The first order that works, of all."""
    for rest in itertools.permutations(range(1, count)):
        if works([0, *rest], count, edges):
            return [0, *rest]
    return None


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Edges]:
    """The number of peers, and the broken edges."""
    count = draw(st.integers(2, 7))
    pairs = [frozenset(pair) for pair in itertools.combinations(range(count), 2)]
    return count, set(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs))))


@given(graphs())
def test_an_order_is_found_wherever_there_is_one(graph: tuple[int, Edges]) -> None:
    """L2: it is the first of all orders, so it is the order of admission if that works."""
    count, edges = graph
    assert find_order(range(count), broken(edges)) == brute_force(count, edges)


@given(graphs())
def test_the_search_finds_nothing_that_does_not_work(graph: tuple[int, Edges]) -> None:
    count, edges = graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "RING_EXACT_PEERS_MAX", 0)
        order = find_order(range(count), broken(edges))
    assert order is None or works(order, count, edges)
    assert order is not None or count < 6 or len(edges) > 2, "so few broken edges of so many"


@pytest.mark.parametrize("count", [0, 1])
def test_a_ring_of_one_needs_nothing(count: int) -> None:
    assert find_order(range(count), lambda one, other: False) == list(range(count))


@pytest.mark.parametrize("count", range(limits.RING_EXACT_PEERS_MAX + 1, 60, 5))
def test_half_of_all_edges_at_each_peer_are_enough(count: int) -> None:
    """Dirac: if so, there is an order. The search for large rings finds it."""
    for seed in range(10):
        rng = random.Random(seed)
        edges: Edges = set()
        degrees = [count - 1] * count
        for one, other in rng.sample(list(itertools.combinations(range(count), 2)), count * (count - 1) // 2):
            if degrees[one] > (count + 1) // 2 and degrees[other] > (count + 1) // 2:
                edges.add(frozenset((one, other)))
                degrees[one], degrees[other] = degrees[one] - 1, degrees[other] - 1
        order = find_order(range(count), broken(edges))
        assert order is not None and works(order, count, edges)


@pytest.mark.parametrize("broken_count", [1, 3, 100, 5000])
def test_a_thousand_peers(broken_count: int) -> None:
    rng = random.Random(broken_count)
    edges = {frozenset(rng.sample(range(1000), 2)) for _ in range(broken_count)} | {frozenset((7, 8))}
    asked = 0

    def is_usable(one: int, other: int) -> bool:
        nonlocal asked
        asked += 1
        return frozenset((one, other)) not in edges

    order = find_order(range(1000), is_usable)
    assert order is not None and works(order, 1000, edges)
    assert asked < limits.RING_SEARCH_STEPS_MAX


def test_a_peer_without_links_is_given_up_soon() -> None:
    asked = 0

    def is_usable(one: int, other: int) -> bool:
        nonlocal asked
        asked += 1
        return 500 not in (one, other)

    assert find_order(range(1000), is_usable) is None
    assert asked < 2 * limits.RING_SEARCH_STEPS_MAX


def test_the_same_graph_gives_the_same_order() -> None:
    edges = [frozenset((i, i + 1)) for i in range(0, 98, 3)]
    others = edges[::-1]
    assert find_order(range(100), broken(set(edges))) == find_order(range(100), broken(set(others)))


# --- Rates ------------------------------------------------------------------------------------------------------------

Table = list[list[int]]


def slowest(order: Sequence[int], rates: Table) -> int:
    return min(rates[one][other] for one, other in ring_edges(order))


def length(order: Sequence[int], delays: Table) -> int:
    return sum(delays[one][other] for one, other in ring_edges(order))


def random_table(rng: random.Random, count: int, values_max: int) -> Table:
    """A symmetric table with values from 0 to values_max."""
    table = [[0] * count for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        table[one][other] = table[other][one] = rng.randint(0, values_max)
    return table


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_no_ring_is_quicker(count: int) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        rates, delays = random_table(rng, count, 3 + seed), random_table(rng, count, 100)
        best = max(slowest((0, *rest), rates) for rest in itertools.permutations(range(1, count)))
        order = quickest_order(rates, delays)
        assert (order is None) == (best == 0)
        assert rate_bound(rates) >= best
        if order is not None:
            assert sorted(order) == list(range(count)) and slowest(order, rates) == best
            assert delay_bound(rates, delays) <= length(order, delays)


@pytest.mark.parametrize("count", [2, 3])
def test_two_or_three_have_one_ring(count: int) -> None:
    table = [[5] * count for _ in range(count)]
    assert quickest_order(table, table) == list(range(count))
    assert quickest_order([[0] * count] * count, table) is None


def test_the_search_among_many_is_about_as_good_as_the_one_among_few() -> None:
    for seed in range(10):
        rates = random_table(random.Random(seed), limits.RING_EXACT_PEERS_MAX, 10**6)
        exact = quickest_order(rates, rates)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "RING_EXACT_PEERS_MAX", 0)
            found = quickest_order(rates, rates)
        assert exact is not None and found is not None
        assert 10 * slowest(found, rates) >= 9 * slowest(exact, rates)


@pytest.mark.parametrize("count", [16, 32])
def test_a_hidden_ring_among_many_is_found(count: int) -> None:
    """All paths of one ring are quick, in an unknown order, and a few others are quick too."""
    rng = random.Random(count)
    rates = [[1] * count for _ in range(count)]
    hidden = rng.sample(range(count), count)
    quick = [*ring_edges(hidden), *(rng.sample(range(count), 2) for _ in range(count))]
    for one, other in quick:
        rates[one][other] = rates[other][one] = 9
    order = quickest_order(rates, rates)
    assert order is not None and slowest(order, rates) == 9


def test_of_equally_quick_rings_a_short_one_is_taken() -> None:
    """Peers are on a circle, in mixed order."""
    circle = [0, 5, 2, 7, 4, 1, 6, 3]
    delays = [[0] * 8 for _ in range(8)]
    for i, j in itertools.permutations(range(8), 2):
        delays[circle[i]][circle[j]] = min((i - j) % 8, (j - i) % 8)
    order = quickest_order([[1] * 8 for _ in range(8)], delays)
    assert order is not None and length(order, delays) == 8


def test_a_ring_is_not_shortened_by_slower_paths() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        rates, delays = random_table(rng, 10, 9), random_table(rng, 10, 100)
        least = slowest(range(10), rates)
        order = shorter_order(range(10), rates, delays, least)
        assert sorted(order) == list(range(10)) and slowest(order, rates) >= least
        assert length(order, delays) <= length(range(10), delays)
