"""Divides a tensor among spanning trees so that no path and no host is busy for long.

A tree with a share of the tensor keeps each of its paths busy for share * S / rate, in both directions alike, and each
host for share * S * degree / rate, where S is the size of the tensor. Which trees with which shares make the busiest
path or host finish early? This is the fractional packing of spanning trees. It is solved in two steps:

1. Trees are collected by multiplicative weights. Each path and host has a price, which rises with the load that earlier
   trees have put on it. The next tree is the cheapest one: a minimum spanning tree of the prices (Prim). It gets as
   much of the tensor as its slowest path or host takes in a unit of time.
2. The shares of these trees are the solution of a linear program (packing.py).

The cheapest trees may be deep, and each hop takes time. So trees are built from a root outwards, and the latency to the
root counts in addition to the prices. There are several solutions: with all trees, and without the deepest ones. The
model of network.py, which knows the latency of each solution, decides between them.

Stars, that is trees of depth 1, are packed in the same way: there is one for each peer that has a path to all others.

Source: N. Garg, J. Koenemann, Faster and simpler algorithms for multicommodity flow and other fractional packing
problems, 1998; C. Alpert et al., Prim-Dijkstra tradeoffs for improved performance-driven routing tree design, 1995.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zpccl import limits
from zpccl.protocol.network import Model, Tree
from zpccl.protocol.packing import divide
from zpccl.types import Algorithm

GROWTH = 2.0
"""How much the price of a path or host grows when a tree fills it."""
KEPT_PARTS = (1.0, 0.6, 0.35, 0.2, 0.1)
"""The tensor is divided among these parts of the trees: in each case the trees of least latency."""
ROOTS_TRIED_MAX = 4
"""How many participants in the middle of a tree may be its root."""
NEAR = 1.1
"""A root may lengthen the latency of a tree by this factor."""
STARS_MAX = limits.LANES_MAX
"""Up to so many participants, stars are tried beside other trees."""
TINY = 1e-9
"""The amount of a tree that the weights have not chosen."""
SHARES = 1 << 16
"""The shares of a packing are whole numbers of about this sum."""


@dataclass(slots=True)
class _Candidate:
    """A tree that may get a share."""

    edges: tuple[tuple[int, int], ...]
    roots: tuple[int, ...]
    """The participants that are about as good a root as the best one."""
    latency_s: float
    """Latency of the longest way to the best root."""
    busy_s: dict[int, float]
    """How long it keeps hosts (0 to N - 1) and paths (N and more) busy if it reduces the whole tensor."""
    amount: float = 1.0
    """A share that is about right, relative to those of the others."""

    @property
    def alone_s(self) -> float:
        """The time that this tree alone needs for the whole tensor."""
        return 2 * self.latency_s + max(self.busy_s.values())


class Packer:
    """Packs trees for one tensor into one network."""

    def __init__(self, model: Model) -> None:
        network, wire_bytes = model.network, max(1, model.tensor.wire_bytes)
        self._model = model
        self._count = network.count
        rate_max = max(1, model.speeds.rate(Algorithm.TREES))
        self._hosts_s = [
            wire_bytes / max(1, rate_max if rate is None else min(rate, rate_max))
            for rate in network.host_bytes_per_second
        ]
        """How long each host needs to send the whole tensor."""
        self._paths_s = [
            [0.0 if rate is None else wire_bytes / rate if rate else math.inf for rate in row]
            for row in network.path_bytes_per_second
        ]
        """The same for each path; infinite where there is none."""
        self._lanes_max = max(1, wire_bytes // limits.LANE_MIN_BYTES)
        self._busiest = max(range(self._count), key=self._hosts_s.__getitem__)
        part_bytes = wire_bytes // min(self._lanes_max, limits.LANES_MAX)
        self._root_hops_s = [[hop_ns / limits.SECOND for hop_ns in row] for row in model.hop_ns]
        self._hops_s = [row.copy() for row in self._root_hops_s]
        for one, row in enumerate(model.hop_ns):
            for other, hop_ns in enumerate(row[:one]):
                hop_s = (hop_ns + model.passing_ns(one, other, part_bytes)) / limits.SECOND
                self._hops_s[one][other] = self._hops_s[other][one] = hop_s

    def stars(self) -> Iterator[list[Tree]]:
        """A packing of stars, then the best star alone; none if no peer has a path to all others.

        In a large group, too, there are none if other trees are allowed: these are quicker then.
        """
        if self._count > STARS_MAX and not self._model.tensor.are_sums_wide:
            return
        middles = [one for one, row in enumerate(self._paths_s) if math.inf not in row[:one] + row[one + 1 :]]
        found = [
            self._candidate([(one, middle) for one in range(self._count) if one != middle], middle)
            for middle in middles
        ]
        if not found:
            return
        best = sorted(found, key=lambda candidate: candidate.alone_s)
        yield self._divide(best[: 2 * self._lanes_max] if self._lanes_max < len(found) else found, self._lanes_max)
        # Shares are chosen by rates, whatever the latency. But latency is most of a small tensor's time.
        yield self._divide(best[:1], 1)

    def trees(self) -> Iterator[list[Tree]]:
        """Packings of ever fewer trees, those of least latency, then the best tree alone; none if no tree connects all.

        As a rule a packing moves its bytes no quicker than the one before it.
        """
        found = sorted(self._collect(), key=lambda candidate: candidate.latency_s)
        if self._lanes_max > 1:
            for size in sorted({math.ceil(part * len(found)) for part in KEPT_PARTS if found}, reverse=True):
                yield self._divide(found[:size], min(self._lanes_max, limits.LANES_MAX))
        if found:
            yield self._divide([min(found, key=lambda candidate: candidate.alone_s)], 1)

    def shortest(self, root: int) -> Tree | None:
        """The tree of the shortest ways to a root, whatever the load; None if the paths do not connect all."""
        edges = self._shortest(root)
        return None if edges is None else Tree(1, _parents(edges, root, self._count))

    # --- Collecting trees ---------------------------------------------------------------------------------------------

    def _collect(self) -> list[_Candidate]:
        """Trees that together are a good packing."""
        count, sizes = self._count, self._paths_s
        total = 1.0  # Sum of the prices of all hosts and paths, which begin equal. Below they are multiplied by sizes.
        first = total / (count + sum(0 < size < math.inf for one, row in enumerate(sizes) for size in row[:one]))
        hosts = [first * size for size in self._hosts_s]
        paths = [[first * size for size in row] for row in sizes]
        roots = sorted(range(count), key=lambda one: sum(self._hops_s[one]))[: max(1, count // 4)]
        edges = self._shortest(roots[0])
        if edges is None:
            return []
        found = {_undirected(edges): self._candidate(edges, amount=TINY)}
        for turn in range(min(limits.LANES_MAX, 4 * self._lanes_max) - 1):
            depth_weight = 2 * total / max(1, count - 1)
            edges = self._cheapest(roots[turn % len(roots)], hosts, paths, depth_weight)
            assert edges is not None, "the paths connect all"
            name = _undirected(edges)
            candidate = found.get(name) or self._candidate(edges, amount=0.0)
            found[name], busy_s = candidate, candidate.busy_s
            candidate.amount += 1 / max(busy_s.values())
            growth = GROWTH / max(busy_s.values())
            for one, other in edges:
                price = paths[one][other]
                total += growth * price
                paths[one][other] = paths[other][one] = price * (1 + growth * sizes[one][other])
            for one, price in enumerate(hosts):
                grown = growth * busy_s[one]
                total += grown * price / self._hosts_s[one]
                hosts[one] = price * (1 + grown)
        return list(found.values())

    def _shortest(self, root: int) -> list[tuple[int, int]] | None:
        free = [[0.0 if size < math.inf else math.inf for size in row] for row in self._paths_s]
        return self._cheapest(root, [0.0] * self._count, free, 1.0)

    def _cheapest(
        self, root: int, hosts: Sequence[float], paths: Sequence[Sequence[float]], depth_weight: float
    ) -> list[tuple[int, int]] | None:
        """The cheapest tree: each participant with its parent, after the parent's own pair.

        Latency to the root counts as a price, weighted by `depth_weight`.
        """
        left = [one for one in range(self._count) if one != root]
        # What each costs so far, apart from its host, and the parent for which it does.
        prices, parents = [math.inf] * self._count, [root] * self._count
        edges, last, latency_s = [], root, [0.0] * self._count
        while left:
            hops_s = self._root_hops_s[last] if last == root else self._hops_s[last]
            row, mine = paths[last], hosts[last] + depth_weight * latency_s[last]
            nearest, least = root, math.inf
            for one in left:
                price = row[one] + mine
                if price < prices[one]:  # Seldom, so the rest is added only now.
                    price += depth_weight * hops_s[one]
                    if price < prices[one]:
                        prices[one] = price
                        parents[one] = last
                price = prices[one] + hosts[one]
                if price < least:
                    nearest, least = one, price
            if nearest == root:
                return None
            last, parent = nearest, parents[nearest]
            hops_s = self._root_hops_s[parent] if parent == root else self._hops_s[parent]
            latency_s[last] = latency_s[parent] + hops_s[last]
            edges.append((last, parent))
            left.remove(last)
        return edges

    def _candidate(self, edges: Sequence[tuple[int, int]], root: int | None = None, amount: float = 1.0) -> _Candidate:
        """The tree of these pairs of child and parent, each after the parent's own, with its good roots or this one."""
        count, hosts_s, paths_s = self._count, self._hosts_s, self._paths_s
        busy_s = dict.fromkeys(range(count), 0.0)
        for one, other in edges:
            busy_s[one] += hosts_s[one]
            busy_s[other] += hosts_s[other]
            size = paths_s[one][other]
            if size:
                busy_s[count * (1 + one) + other if one < other else count * (1 + other) + one] = size
        latencies_s = self._latencies(edges)
        central = sorted(range(count), key=latencies_s.__getitem__) if root is None else [root]
        least = latencies_s[central[0]]
        near = tuple(one for one in central[:ROOTS_TRIED_MAX] if latencies_s[one] <= NEAR * least)
        return _Candidate(tuple(edges), near, least, busy_s, amount)

    def _latencies(self, edges: Sequence[tuple[int, int]]) -> list[float]:
        """For each participant, the latency from it to the farthest one, if it is the root of the tree."""
        latencies_s, longest, second = ([0.0] * self._count for _ in range(3))
        # Up: the longest way that begins at each participant with a child of it, and the longest with another child.
        for one, parent in reversed(edges):
            latencies_s[parent] = max(latencies_s[parent], self._root_hops_s[parent][one] + longest[one])
            way = self._hops_s[parent][one] + longest[one]
            if way > second[parent]:
                longest[parent], second[parent] = (
                    (way, longest[parent]) if way > longest[parent] else (longest[parent], way)
                )
        # Down: the longest way that begins with the parent is one more choice.
        for one, parent in edges:
            hop_s = self._hops_s[parent][one]
            beyond = second[parent] if hop_s + longest[one] == longest[parent] else longest[parent]
            latencies_s[one] = max(latencies_s[one], self._root_hops_s[one][parent] + beyond)
            way = hop_s + beyond
            if way > second[one]:
                longest[one], second[one] = (way, longest[one]) if way > longest[one] else (longest[one], way)
        return latencies_s

    # --- Shares -------------------------------------------------------------------------------------------------------

    def _divide(self, candidates: Sequence[_Candidate], lanes_max: int) -> list[Tree]:
        """Divides the tensor among the candidates so that it is done early, and gives each tree a root.

        The root has most to add, so different suitable participants become roots.
        """
        shares = [0.0]
        while True:
            amounts = [candidate.amount for candidate in candidates]
            shares = divide([candidate.busy_s for candidate in candidates], self._busiest, amounts)
            used = [place for place, share in enumerate(shares) if round(share * SHARES)]
            used.sort(key=shares.__getitem__, reverse=True)
            if len(used) <= lanes_max:
                break
            # Drop some at a time: among fewer candidates, other shares are the large ones.
            candidates = [candidates[place] for place in sorted(used[: max(lanes_max, len(used) * 3 // 4)])]
        trees, work = [], [0.0] * self._count
        for place in used:
            candidate = candidates[place]
            root = min(candidate.roots, key=lambda one: (work[one], one))
            work[root] += shares[place]
            trees.append(Tree(round(shares[place] * SHARES), _parents(candidate.edges, root, self._count)))
        return trees


def _undirected(edges: Sequence[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """The same for all trees with these paths, whatever their root."""
    return frozenset((one, other) if one < other else (other, one) for one, other in edges)


def _parents(edges: Sequence[tuple[int, int]], root: int, count: int) -> tuple[int, ...]:
    """The parent of each participant, if the edges are a tree with this root."""
    beside: list[list[int]] = [[] for _ in range(count)]
    for one, other in edges:
        beside[one].append(other)
        beside[other].append(one)
    parents, waiting = {root: root}, [root]
    for one in waiting:
        for other in beside[one]:
            if other not in parents:
                parents[other] = one
                waiting.append(other)
    return tuple(parents[one] for one in range(count))
