"""A lower bound for the time of an all-reduce over spanning trees. `plans` compares its plans with it.

Which trees reduce which share of a tensor, so that no path and no host is busy for long, is a linear program with a
column for each spanning tree (docs/algorithms.md). It is solved by column generation with HiGHS. For any prices of
paths and hosts, the price of the cheapest spanning tree divided by the sum of all prices is a lower bound (duality). So
the answer is a bound whenever the search ends, and it is exact once a solution takes no longer. With up to 64 peers, it
was within 0.1 % in all checked cases. Multiplicative weights give the first columns and prices. Later prices are those
of the program, moved halfway to those of the best bound so far, because they oscillate without that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from common import Array
from scipy.optimize import linprog

from zpccl import limits
from zpccl.protocol.network import Model, Speeds
from zpccl.types import Algorithm

STEPS = 1000
"""Steps of the multiplicative weights."""
GROWTH = 0.3
ROUNDS_MAX = 150
"""Maximum rounds of the column generation in small networks. Large networks get fewer, as each round takes longer."""
GAP = 0.001
"""The search ends when the best solution takes at most this fraction longer than the bound."""

Edges = tuple[tuple[int, int], ...]


def moving_seconds_min(model: Model, speeds: Speeds) -> float:
    """The least time in which trees can move the tensor."""
    return _Bound(model, speeds).find()


def latency_seconds_min(model: Model) -> float:
    """The least time up and down a tree: twice the way from the best root to the peer that is farthest from it."""
    count, network = model.network.count, model.network
    ways = np.array(
        [
            [
                0.0 if one == other else model.hop_ns[one][other] if network.is_usable(one, other) else math.inf
                for other in range(count)
            ]
            for one in range(count)
        ]
    )
    for middle in range(count):
        ways = np.minimum(ways, ways[:, middle : middle + 1] + ways[middle : middle + 1, :])
    return 2 * float(ways.max(axis=1).min()) / limits.SECOND


class _Bound:
    def __init__(self, model: Model, speeds: Speeds) -> None:
        network, size, rate_max = model.network, model.tensor.wire_bytes, speeds.rate(Algorithm.TREES)
        self._count = network.count
        hosts = [rate_max if rate is None else min(rate, rate_max) for rate in network.host_bytes_per_second]
        self._pairs = [
            (one, other) for one in range(self._count) for other in range(one) if network.is_usable(one, other)
        ]
        rates = [network.path_bytes_per_second[one][other] for one, other in self._pairs]
        self._busy = np.array(
            [size / rate for rate in hosts] + [0.0 if rate is None else size / rate for rate in rates]
        )
        """Seconds that each host and each path needs for the whole tensor."""
        self._rows = {pair: self._count + place for place, pair in enumerate(self._pairs)}
        self._trees: dict[Edges, Array] = {}
        self._least = 0.0
        self._best_prices = np.ones_like(self._busy)

    def find(self) -> float:
        self._weigh()
        for _ in range(ROUNDS_MAX if self._count <= 16 else ROUNDS_MAX // 5):
            time, prices = self._solve()
            if time <= self._least * (1 + GAP):
                break
            known = len(self._trees)
            for part in (0.5, 1.0):
                self._add(part * prices + (1 - part) * self._best_prices)
            if len(self._trees) == known:
                break
        return self._least

    def _weigh(self) -> None:
        prices = np.where(self._busy > 0, 1.0, 0.0)
        for _ in range(STEPS):
            column = self._add(prices)
            prices = prices * (1 + GROWTH * column / column.max())
            prices /= prices.max()

    def _add(self, prices: Array) -> Array:
        """Adds the cheapest tree, and updates the bound."""
        edges = self._cheapest(prices * self._busy)
        column = self._trees.get(edges)
        if column is None:
            column = np.zeros_like(self._busy)
            for one, other in edges:
                for row in (one, other, self._rows[one, other]):
                    column[row] += self._busy[row]
            self._trees[edges] = column
        bound = float(column @ prices) / float(prices.sum())
        if bound > self._least:
            self._least, self._best_prices = bound, prices / prices.sum()
        return column

    def _cheapest(self, costs: Array) -> Edges:
        beside: list[list[tuple[float, int]]] = [[] for _ in range(self._count)]
        for (one, other), row in self._rows.items():
            cost = costs[row] + costs[one] + costs[other]
            beside[one].append((cost, other))
            beside[other].append((cost, one))
        reached, edges = {0}, []
        waiting = [(cost, 0, other) for cost, other in beside[0]]
        heapq.heapify(waiting)
        while waiting:
            _, parent, one = heapq.heappop(waiting)
            if one not in reached:
                reached.add(one)
                edges.append((max(one, parent), min(one, parent)))
                for cost, other in beside[one]:
                    heapq.heappush(waiting, (cost, one, other))
        return tuple(sorted(edges))

    def _solve(self) -> tuple[float, Array]:
        """The least time with the trees so far, and its prices."""
        columns = np.stack(list(self._trees.values()), axis=1)
        rows, count = columns.shape
        found = linprog(
            [0.0] * count + [1.0],
            A_ub=np.hstack([columns, -np.ones((rows, 1))]),
            b_ub=np.zeros(rows),
            A_eq=[[1.0] * count + [0.0]],
            b_eq=[1.0],
            method="highs",
        )
        return float(found.fun), np.maximum(0.0, -found.ineqlin.marginals)


def quantile(values: Sequence[float], part: float) -> float | None:
    """The value below which this fraction of the values lies; None if there are no values."""
    return float(np.quantile(values, part)) if values else None
