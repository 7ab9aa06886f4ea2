"""The order of a ring and the links that it needs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol.rings import find_order, ring_edges

Edges = set[frozenset[int]]


@pytest.mark.parametrize(
    "order, edges",
    [("", []), ("a", []), ("ab", ["ab"]), ("abc", ["ab", "bc", "ca"]), ("abcd", ["ab", "bc", "cd", "da"])],
)
def test_ring_edges(order: str, edges: list[str]) -> None:
    assert [one + other for one, other in ring_edges(order)] == edges


def broken(edges: Edges) -> Callable[[int, int], bool]:
    """All edges are usable but these."""
    return lambda one, other: frozenset((one, other)) not in edges


def works(order: list[int], count: int, edges: Edges) -> bool:
    """True if it is a ring of all, and needs none of the edges."""
    return sorted(order) == list(range(count)) and all(map(broken(edges), *zip(*ring_edges(order), strict=True)))


def brute_force(count: int, edges: Edges) -> list[int] | None:
    """The first of all orders that works."""
    for rest in itertools.permutations(range(1, count)):
        if works([0, *rest], count, edges):
            return [0, *rest]
    return None


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Edges]:
    """How many peers, and the edges that are broken."""
    count = draw(st.integers(2, 7))
    pairs = [frozenset(pair) for pair in itertools.combinations(range(count), 2)]
    return count, set(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs))))


@given(graphs())
def test_an_order_is_found_wherever_there_is_one(graph: tuple[int, Edges]) -> None:
    """L2: and it is the first of all, so the order of admission where that works."""
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
    """Dirac: then there is an order. The search for large rings finds it."""
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
