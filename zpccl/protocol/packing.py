"""Divides work among ways of doing it, so that the slowest resource is done as early as possible.

If way k does all the work, it keeps resource r busy for the time a[r][k]. The task is to find shares w >= 0 of sum 1
that make the largest sum over k of a[r][k] * w[k] least. With x = w / time this is a linear program: maximise the sum
of x with a x <= 1. There are many resources (each path between two peers), but few of them bound the solution. So the
program begins with those that a first answer keeps busy. While the solution overloads others, the most overloaded ones
are added, and the dual simplex method makes the solution valid again. The work is bounded: each intermediate solution
is an answer once the ways that overload a resource get less, and the best answer is taken.

The tableau is a dictionary: each row gives a basic variable, each column is a variable that is 0.

    basic[i] = constant[i] - sum over j of rows[i][j] * free[j]
    sum of x = total + sum over j of gains[j] * free[j]

Variables are numbered: ways 0 to K - 1, then the slack of each resource r, K + r.

Source: V. Chvatal, Linear Programming, 1983, chapters 2 and 10; G. Dantzig, R. Fulkerson, S. Johnson, Solution of a
large-scale traveling-salesman problem, 1954 (rows that are added when they are violated).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from zpccl import limits

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
GAP = 0.005
"""How much longer than necessary the answer may take."""
BUSY_FIRST = 0.7
"""Resources that the first answer keeps busy for this part of its time are added at the beginning, if they are few."""
ADDED_ROWS_MAX = 8
"""Overloaded resources that are added at the same time."""


def divide(ways: Sequence[Mapping[int, float]], resource: int, begin: Sequence[float]) -> list[float]:
    """The shares of the ways: 0 or more, of sum 1.

    Args:
        ways: for each way, how long it keeps each resource busy; resources with time 0 may be left out. Resources are
            numbered from 0; numbers that no way names cost little.
        resource: a resource that every way needs.
        begin: shares that are about right, up to a common factor.
    """
    count = 1 + max(max(way) for way in ways)
    busy, used = np.zeros((count, len(ways))), np.zeros(count, np.bool_)
    for column, way in enumerate(ways):
        resources = list(way)
        busy[resources, column] = list(way.values())
        used[resources] = True
    busy = busy[used]
    busy /= busy.max(axis=0).min()  # In units of the best way alone, so that numbers are neither tiny nor huge.
    needs = busy > 0
    program = _Program(busy, int(np.count_nonzero(used[:resource])))
    best = np.array(begin)
    loads = _loads(busy, best)
    best /= loads.max()
    program.add(_largest(loads / loads.max(), BUSY_FIRST, len(ways)))
    while True:
        values = program.values()
        loads = _loads(busy, values)
        # Ways whose resources are overloaded get less, until no resource is overloaded.
        allowed = values / np.maximum(1.0, np.where(needs, loads[:, np.newaxis], 0.0).max(axis=0))
        if allowed.sum() >= best.sum():
            best = allowed
        overloaded = _largest(loads, 1 + GAP, ADDED_ROWS_MAX)
        # With all resources, the sum is at most the sum with only the added ones.
        is_good = not overloaded or values.sum() <= (1 + GAP) * best.sum()
        if is_good or not program.add(overloaded):
            break
    shares: list[float] = (best / best.sum()).tolist()
    return shares


def _loads(busy: Floats, values: Floats) -> Floats:
    """How long each resource is busy in total. (Not by BLAS, which may start threads.)"""
    loads: Floats = np.einsum("rk,k->r", busy, values)
    return loads


def _largest(loads: Floats, least: float, count: int) -> list[int]:
    """The resources that are busy for longer than `least`: at most `count`, the busiest first."""
    found = np.flatnonzero(loads > least)
    order: list[int] = found[np.argsort(-loads[found], kind="stable")].tolist()
    return order[:count]


class _Program:
    """The linear program with the resources that have been added."""

    def __init__(self, busy: Floats, resource: int) -> None:
        self._busy = busy
        self._count = count = busy.shape[1]
        self._pivots_left = limits.PACKING_PIVOTS_MAX
        self._free = np.arange(count)
        self._basic = np.array([count + resource])
        self._table = np.ones((2, count + 1))
        """Rows and their constants; the last row has the gains."""
        self._table[0, :count] = busy[resource]
        # Of the ways that keep it busy least, the one that keeps the others busy least: often it is the answer.
        self._pivot(0, int(np.lexsort((busy.sum(axis=0), busy[resource]))[0]))

    def values(self) -> Floats:
        """The value of each way."""
        values = np.zeros(self._count)
        rows = self._rows_of_ways()
        values[self._basic[rows]] = np.maximum(0.0, self._table[rows, -1])
        return values

    def add(self, resources: Sequence[int]) -> bool:
        """Adds resources that are overloaded, and solves the program again.

        Returns:
            False if that takes too many steps, or if all had been added before: then only rounding overloads them.
        """
        known = {*self._free.tolist(), *self._basic.tolist()}
        slacks = [slack for resource in resources if (slack := self._count + resource) not in known]
        if not slacks:
            return False
        self._add(slacks)
        while self._pivots_left > 0:
            constants = self._table[:-1, -1]
            row = int(constants.argmin())
            if constants[row] >= -TOLERANCE:
                return True
            column = self._entering(row)
            if column is None:
                return False  # Only by rounding: with all shares 0, no resource is overloaded.
            self._pivot(row, column)
        return False

    def _add(self, slacks: list[int]) -> None:
        needs = self._busy[[slack - self._count for slack in slacks]]
        added = np.ones((len(slacks), self._count + 1))
        is_way = self._free < self._count
        added[:, :-1] = np.where(is_way, needs[:, np.where(is_way, self._free, 0)], 0.0)
        rows = self._rows_of_ways()
        added -= np.einsum("ij,jk->ik", needs[:, self._basic[rows]], self._table[rows])
        self._table = np.vstack([self._table[:-1], added, self._table[-1:]])
        self._basic = np.append(self._basic, slacks)

    def _rows_of_ways(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = np.flatnonzero(self._basic < self._count)
        return rows

    def _entering(self, row: int) -> int | None:
        """The column that lowers the total least for what it adds to the row; of equal ones, the first variable."""
        values = self._table[row, :-1]
        ratios = np.full(self._count, np.inf)
        np.divide(self._table[-1, :-1], values, out=ratios, where=values < -TOLERANCE)
        least = ratios.min()
        if least == np.inf:
            return None
        columns = np.flatnonzero(ratios == least)
        return int(columns[0] if len(columns) == 1 else columns[self._free[columns].argmin()])

    def _pivot(self, index: int, column: int) -> None:
        """Makes the variable of a column basic, in place of the variable of a row."""
        self._pivots_left -= 1
        table = self._table
        factors, pivot = table[:, column].copy(), table[index, column]
        row = table[index] / pivot
        row[column] = 1 / pivot
        table -= np.multiply.outer(factors, row)
        table[:, column] = factors / -pivot
        table[index] = row
        self._basic[index], self._free[column] = self._free[column], self._basic[index]
