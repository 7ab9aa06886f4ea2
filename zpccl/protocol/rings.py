"""The order of peers in a ring, and the links that a plan needs.

The order is the order of admission while its links work. If they do not, a search finds an order without broken links:
in a small group an exact search (a Hamiltonian cycle), in a large one a bounded search that repairs the order of
admission. The bounded search is fast if most links work. If few work, it may miss an order.

Where rates are known, `quickest_order` finds the ring whose slowest path is quickest. By the same searches it finds the
highest rate such that paths of at least this rate allow a ring. Then it shortens the ring, without slower paths.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from zpccl import limits
from zpccl.protocol.messages import Lane, Reducing
from zpccl.types import Algorithm

T = TypeVar("T")


def ring_edges(order: Sequence[T]) -> list[tuple[T, T]]:
    """The pairs of neighbours of a ring, each pair once."""
    if len(order) < 2:
        return []
    if len(order) == 2:
        return [(order[0], order[1])]
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]


def neighbours_of(how: Reducing, one: bytes) -> set[bytes]:
    """The participants to which one of them needs a link: its neighbours in the ring or in the trees, or all others."""
    order, rank = how.order, how.order.index(one)
    if how.algorithm == Algorithm.RING:
        return {order[rank - 1], order[(rank + 1) % len(order)]} - {one}
    if how.algorithm == Algorithm.TREES:
        edges = [edge for lane in how.lanes for edge in tree_edges(lane, len(order)) if rank in edge]
        return {order[place] for edge in edges for place in edge} - {one}
    return set(order) - {one}


def tree_edges(lane: Lane, count: int) -> list[tuple[int, int]]:
    """The edges of a lane's tree among `count` peers: each rank except the root's, with its parent."""
    parents = lane.parents or (lane.root,) * count
    return [(rank, parent) for rank, parent in enumerate(parents) if rank != lane.root]


def plan_edges(how: Reducing) -> list[tuple[bytes, bytes]]:
    """The links that an attempt of this plan uses, each once."""
    order = how.order
    if how.algorithm == Algorithm.RING:
        return ring_edges(order)
    if how.algorithm != Algorithm.TREES:
        return mesh_edges(order)
    pairs = {(min(edge), max(edge)) for lane in how.lanes for edge in tree_edges(lane, len(order))}
    return [(order[one], order[other]) for one, other in sorted(pairs)]


def owners_of(order: Sequence[bytes]) -> tuple[int, ...]:
    """Ring index of the owner of each row of an all-gather, or part of a reduce-scatter.

    Rows and parts are in order of peer ids, independent of the order of the ring. So they do not move while the same
    peers take part, and every peer and every master finds the same owners.
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def mesh_edges(peers: Sequence[T]) -> list[tuple[T, T]]:
    """All pairs of peers, each pair once."""
    return list(itertools.combinations(peers, 2))


def find_order(
    peers: Sequence[T], is_usable: Callable[[T, T], bool], steps_max: int = limits.RING_SEARCH_STEPS_MAX
) -> list[T] | None:
    """An order of a ring in which every edge is usable, or None. The same input gives the same order.

    Args:
        peers: in order of admission, which is returned if it works.
        is_usable: whether two peers may be neighbours; symmetric.
        steps_max: how many links the search in a large group may examine.
    """
    if all(is_usable(one, other) for one, other in ring_edges(peers)):
        return list(peers)
    if len(peers) <= 3:
        return None  # Up to three peers have only one ring.
    if len(peers) <= limits.RING_EXACT_PEERS_MAX:
        return _first_order(peers, is_usable)
    return _Repair(peers, is_usable, steps_max).run()


def quickest_order(rates: Sequence[Sequence[float]], delays: Sequence[Sequence[float]]) -> list[int] | None:
    """The ring whose slowest path is quickest, or None if there is no ring; of several such rings a short one.

    In a small group no ring is quicker. In a large one the search is bounded, and may miss a quicker ring.

    Args:
        rates: the rate of the path between each two peers, symmetric; 0: unusable.
        delays: the delays of the same paths; their sum around the ring is made small.
    """
    peers = range(len(rates))
    order = find_order(peers, lambda one, other: rates[one][other] > 0)
    if order is None or len(rates) <= 3:
        return order
    bound = rate_bound(rates)
    levels = sorted({rate for one, row in enumerate(rates) for rate in row[:one] if 0 < rate <= bound})
    low, high, middle = levels.index(_slowest(order, rates)), len(levels) - 1, len(levels) - 1
    while low < high:
        start = peers if len(rates) <= limits.RING_EXACT_PEERS_MAX else order
        found = _order_at(levels[middle], start, rates)  # The bound first: often it has a ring.
        if found is None:
            high = middle - 1
        else:
            order, low = found, levels.index(min(bound, _slowest(found, rates)))
        middle = (low + high + 1) // 2
    return shorter_order(order, rates, delays, levels[low])


def rate_bound(rates: Sequence[Sequence[float]]) -> float:
    """An upper bound for the rate of a ring of four or more: it needs two paths of each peer, and connects all."""
    bound = min(sorted(row[:one] + row[one + 1 :])[-2] for one, row in enumerate(map(list, rates)))
    return min(bound, -max(_connecting([[-rate for rate in row] for row in rates])))


def delay_bound(rates: Sequence[Sequence[float]], delays: Sequence[Sequence[float]]) -> float:
    """A lower bound for the sum of delays of a ring of three or more: without one path it still connects all."""
    usable = [
        [delay if rate > 0 else math.inf for rate, delay in zip(*rows, strict=True)]
        for rows in zip(rates, delays, strict=True)
    ]
    return sum(_connecting(usable))


def _connecting(costs: Sequence[Sequence[float]]) -> list[float]:
    """The costs of the paths of a minimum spanning tree (Prim)."""
    nearest, left, found = list(costs[0]), list(range(1, len(costs))), []
    while left:
        last = min(left, key=nearest.__getitem__)
        found.append(nearest[last])
        left.remove(last)
        for one in left:
            nearest[one] = min(nearest[one], costs[last][one])
    return found


def _order_at(level: float, start: Sequence[int], rates: Sequence[Sequence[float]]) -> list[int] | None:
    return find_order(start, lambda one, other: rates[one][other] >= level, limits.RING_LEVEL_STEPS_MAX)


def shorter_order(
    order: Sequence[int], rates: Sequence[Sequence[float]], delays: Sequence[Sequence[float]], rate_min: float
) -> list[int]:
    """Makes the sum of delays smaller by reversing parts of the ring (2-opt), on paths of at least this rate."""
    ring, count = list(order), len(order)
    for _ in range(limits.RING_PASSES_MAX):
        has_changed = False
        for i in range(count - 2):
            for j in range(i + 2, count - (i == 0)):
                a, b, c, d = ring[i], ring[i + 1], ring[j], ring[(j + 1) % count]
                if delays[a][c] + delays[b][d] < delays[a][b] + delays[c][d] and (
                    rates[a][c] >= rate_min and rates[b][d] >= rate_min
                ):
                    ring[i + 1 : j + 1] = ring[j:i:-1]
                    has_changed = True
        if not has_changed:
            break
    return ring


def _slowest(order: Sequence[int], rates: Sequence[Sequence[float]]) -> float:
    return min(rates[one][other] for one, other in ring_edges(order))


def _first_order(peers: Sequence[T], is_usable: Callable[[T, T], bool]) -> list[T] | None:
    """The lexicographically first order, by dynamic programming over sets of peers (Held and Karp): O(n 2^n).

    Each peer except the first is a bit. `starts[s]` has the peers from which a path through all of set `s` ends at a
    neighbour of the first peer.
    """
    first, *rest = peers
    usable = [sum(is_usable(one, other) << bit for bit, other in enumerate(rest) if other is not one) for one in rest]
    beside_first = sum(is_usable(first, other) << bit for bit, other in enumerate(rest))
    everyone = (1 << len(rest)) - 1
    starts = [0] * (everyone + 1)
    for subset in range(1, everyone + 1):
        left, found = subset, 0
        while left:
            bit = left & -left
            left ^= bit
            without = subset ^ bit
            if usable[bit.bit_length() - 1] & starts[without] if without else beside_first & bit:
                found |= bit
        starts[subset] = found
    order, subset, allowed = [first], everyone, beside_first
    while subset:
        choices = starts[subset] & allowed
        if not choices:
            return None  # Only in the first iteration: `starts` has only paths that can be completed.
        bit = choices & -choices
        index = bit.bit_length() - 1
        order.append(rest[index])
        subset, allowed = subset ^ bit, usable[index]
    return order


class _Repair(Generic[T]):
    """Repairs the broken edges of a ring one after the other, without breaking others.

    The ring is rotated so that the broken edge closes it; without that edge it is a path whose ends cannot be joined.
    Three changes may give ends that can be joined:

        a..j k..z  ->  a..j z..k     if j-z and k-a are usable      (the rest of the path is reversed: 2-opt)
        a..i j k..z  ->  a..i k..z j if i-k, z-j and j-a are usable (one peer moves between the ends)
        a..j k..z  ->  a..j z..k     if j-z is usable: other ends, from which the search continues
    """

    def __init__(self, peers: Sequence[T], is_usable: Callable[[T, T], bool], steps_max: int) -> None:
        self._ring = list(peers)
        self._is_usable = is_usable
        self._steps_left = steps_max

    def run(self) -> list[T] | None:
        """The ring with all edges usable, or None if the search did not find one."""
        while (index := self._broken_index()) is not None:
            path = self._ring[index + 1 :] + self._ring[: index + 1]
            closed = self._close(path)
            if closed is None:
                return None
            self._ring = closed
        return self._ring

    def _broken_index(self) -> int | None:
        ring = self._ring
        return next((i for i in range(len(ring)) if not self._is_usable(ring[i], ring[(i + 1) % len(ring)])), None)

    def _close(self, path: list[T]) -> list[T] | None:
        """The peers of a path reordered so that its ends can be joined, and no more of its edges are broken."""
        seen = {(path[0], path[-1])}
        waiting = deque([path])
        while waiting and self._steps_left > 0:
            path = waiting.popleft()
            closed = self._reversed(path) or self._moved(path)
            if closed is not None:
                return closed
            for turned in (path, path[::-1]):
                for index in range(len(path) - 2):
                    ends = turned[0], turned[index + 1]
                    if ends not in seen and ends[::-1] not in seen and self._try(turned[index], turned[-1]):
                        seen.add(ends)
                        waiting.append(turned[: index + 1] + turned[:index:-1])
        return None

    def _try(self, one: T, other: T) -> bool:
        self._steps_left -= 1
        return self._is_usable(one, other)

    def _reversed(self, path: list[T]) -> list[T] | None:
        first, last = path[0], path[-1]
        for index in range(1, len(path) - 2):
            if self._try(path[index], last) and self._try(path[index + 1], first):
                return path[: index + 1] + path[:index:-1]
        return None

    def _moved(self, path: list[T]) -> list[T] | None:
        first, last = path[0], path[-1]
        for index in range(1, len(path) - 1):
            moved = path[index]
            if self._try(moved, first) and self._try(moved, last) and self._try(path[index - 1], path[index + 1]):
                return path[:index] + path[index + 1 :] + [moved]
        return None
