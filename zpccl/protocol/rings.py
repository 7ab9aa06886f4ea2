"""The order of peers in a ring, and which links it needs.

The order is that of admission while its links work. Where they do not, another one is looked for that needs none of the
broken ones: in a small group by trying all there are, in a large one by a bounded search that mends the order of
admission. The search finds an order quickly where most links work; where few do, it may miss one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from zpccl import limits

T = TypeVar("T")


def ring_edges(order: Sequence[T]) -> list[tuple[T, T]]:
    """The pairs of neighbours of a ring, each pair once."""
    if len(order) < 2:
        return []
    if len(order) == 2:
        return [(order[0], order[1])]
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]


def owners_of(order: Sequence[bytes]) -> tuple[int, ...]:
    """Places in the ring of those who own the rows of an all-gather, or the parts of a reduce-scatter, in turn.

    Rows and parts are in order of peer ids, whatever the order of the ring: so they stay where they are while the same
    peers take part, and every peer and every master finds the same.
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def mesh_edges(peers: Sequence[T]) -> list[tuple[T, T]]:
    """All pairs of peers, each pair once."""
    return list(itertools.combinations(peers, 2))


def find_order(peers: Sequence[T], is_usable: Callable[[T, T], bool]) -> list[T] | None:
    """An order of a ring whose every edge is usable, or None. The same input gives the same order.

    Args:
        peers: in order of admission, which is the answer where it works.
        is_usable: whether two peers may be neighbours; symmetric.
    """
    if all(is_usable(one, other) for one, other in ring_edges(peers)):
        return list(peers)
    if len(peers) <= 3:
        return None  # There is no other ring of so few.
    if len(peers) <= limits.RING_EXACT_PEERS_MAX:
        return _first_order(peers, is_usable)
    return _Mender(peers, is_usable).mend()


def _first_order(peers: Sequence[T], is_usable: Callable[[T, T], bool]) -> list[T] | None:
    """The first of all orders, by places in `peers`. Takes time in proportion to the number of sets of peers.

    Places but the first are bits. `starts[s]` are the places from which a path goes through all of the set `s` and ends
    at a neighbour of the first peer.
    """
    first, *rest = peers
    usable = [sum(is_usable(one, other) << bit for bit, other in enumerate(rest) if other is not one) for one in rest]
    beside_first = sum(is_usable(first, other) << bit for bit, other in enumerate(rest))
    everyone = (1 << len(rest)) - 1
    starts = [0] * (everyone + 1)
    for places in range(1, everyone + 1):
        left, found = places, 0
        while left:
            bit = left & -left
            left ^= bit
            without = places ^ bit
            if usable[bit.bit_length() - 1] & starts[without] if without else beside_first & bit:
                found |= bit
        starts[places] = found
    order, places, allowed = [first], everyone, beside_first
    while places:
        choices = starts[places] & allowed
        if not choices:
            return None  # Only at the first place: a path that was begun can be ended.
        bit = choices & -choices
        place = bit.bit_length() - 1
        order.append(rest[place])
        places, allowed = places ^ bit, usable[place]
    return order


class _Mender(Generic[T]):
    """Mends the broken edges of a ring one after the other, without breaking others.

    The ring is turned so that the broken edge closes it: what is left is a path whose ends do not go together. Three
    changes may give it ends that do:

        a..j k..z  ->  a..j z..k     if j-z and k-a are usable      (the rest of the path is reversed)
        a..i j k..z  ->  a..i k..z j if i-k, z-j and j-a are usable (one peer moves in between)
        a..j k..z  ->  a..j z..k     if j-z is usable: other ends, from which the same is tried again
    """

    def __init__(self, peers: Sequence[T], is_usable: Callable[[T, T], bool]) -> None:
        self._ring = list(peers)
        self._is_usable = is_usable
        self._steps_left = limits.RING_SEARCH_STEPS_MAX

    def mend(self) -> list[T] | None:
        """The ring with all edges usable, or None where that was not found."""
        while (place := self._broken_place()) is not None:
            path = self._ring[place + 1 :] + self._ring[: place + 1]
            closed = self._close(path)
            if closed is None:
                return None
            self._ring = closed
        return self._ring

    def _broken_place(self) -> int | None:
        ring = self._ring
        return next((i for i in range(len(ring)) if not self._is_usable(ring[i], ring[(i + 1) % len(ring)])), None)

    def _close(self, path: list[T]) -> list[T] | None:
        """The peers of a path in another order, whose ends go together and in which no more edges are broken."""
        seen = {(path[0], path[-1])}
        waiting = deque([path])
        while waiting and self._steps_left > 0:
            path = waiting.popleft()
            closed = self._reversed(path) or self._moved(path)
            if closed is not None:
                return closed
            for turned in (path, path[::-1]):
                for place in range(len(path) - 2):
                    ends = turned[0], turned[place + 1]
                    if ends not in seen and ends[::-1] not in seen and self._try(turned[place], turned[-1]):
                        seen.add(ends)
                        waiting.append(turned[: place + 1] + turned[:place:-1])
        return None

    def _try(self, one: T, other: T) -> bool:
        self._steps_left -= 1
        return self._is_usable(one, other)

    def _reversed(self, path: list[T]) -> list[T] | None:
        first, last = path[0], path[-1]
        for place in range(1, len(path) - 2):
            if self._try(path[place], last) and self._try(path[place + 1], first):
                return path[: place + 1] + path[:place:-1]
        return None

    def _moved(self, path: list[T]) -> list[T] | None:
        first, last = path[0], path[-1]
        for place in range(1, len(path) - 1):
            moved = path[place]
            if self._try(moved, first) and self._try(moved, last) and self._try(path[place - 1], path[place + 1]):
                return path[:place] + path[place + 1 :] + [moved]
        return None
