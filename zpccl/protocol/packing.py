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

import itertools
from collections.abc import Mapping, Sequence

from zpccl import limits

TOLERANCE = 1e-9
GAP = 0.005
"""How much longer than necessary the answer may take."""
BUSY_FIRST = 0.7
"""Resources that the first answer keeps busy for this part of its time are added at the beginning, if they are few."""
ADDED_ROWS_MAX = 4
"""Overloaded resources that are added at the same time."""
TURNS_BETWEEN_ANSWERS = 4
"""How often resources are added before the next answer is made from the current solution."""


def divide(
    ways: Sequence[Mapping[int, float]],
    resource: int,
    begin: Sequence[float],
    cells_max: int = limits.PACKING_CELLS_MAX,
) -> list[float]:
    """The shares of the ways: 0 or more, of sum 1.

    Args:
        ways: for each way, how long it keeps each resource busy; resources with time 0 may be left out.
        resource: a resource that every way needs.
        begin: shares that are about right, up to a common factor.
        cells_max: how many numbers may be computed.
    """
    # In units of the best way alone, so that numbers are neither tiny nor huge.
    unit = min(max(way.values()) for way in ways)
    ways = [{name: busy / unit for name, busy in way.items()} for way in ways]
    program = _Program(ways, resource, cells_max)
    loads = load(ways, begin)
    time = max(loads.values())
    best = [share / time for share in begin]
    busiest = sorted((-busy, name) for name, busy in loads.items() if busy > BUSY_FIRST * time)
    program.add([name for _, name in busiest[: len(ways) // 2]])
    for turn in itertools.count():
        values = program.values()
        loads = load(ways, values)
        overloaded = sorted((-busy, name) for name, busy in loads.items() if busy > 1 + GAP)
        if turn % TURNS_BETWEEN_ANSWERS == 0 or not overloaded or not program.has_cells_left:
            # Ways whose resources are overloaded get less, until no resource is overloaded.
            allowed = [
                value and value / max(1.0, max([loads[name] for name in way]))
                for way, value in zip(ways, values, strict=True)
            ]
            if sum(allowed) >= sum(best):
                best = allowed
        # With all resources, the sum is at most the sum with only the added ones.
        is_good = not overloaded or sum(values) <= (1 + GAP) * sum(best)
        if is_good or not program.add([name for _, name in overloaded[:ADDED_ROWS_MAX]]):
            break
    return [value / sum(best) for value in best]


def load(ways: Sequence[Mapping[int, float]], shares: Sequence[float]) -> dict[int, float]:
    """How long each resource is busy in total."""
    loads: dict[int, float] = {}
    known = loads.get
    for way, share in zip(ways, shares, strict=True):
        if share > 0:
            for name, busy in way.items():
                loads[name] = known(name, 0.0) + share * busy
    return loads


class _Program:
    """The linear program with the resources that have been added."""

    def __init__(self, ways: Sequence[Mapping[int, float]], resource: int, cells_max: int) -> None:
        self._ways = ways
        self._cells_left = cells_max
        count = len(ways)
        self._free = list(range(count))
        self._basic = [count + resource]
        self._rows = [[way[resource] for way in ways]]
        self._constants = [1.0]
        self._gains = [1.0] * count
        # Of the ways that keep it busy least, the one that keeps the others busy least: often it is the answer.
        self._pivot(0, min(range(count), key=lambda name: (ways[name][resource], sum(ways[name].values()))))

    @property
    def has_cells_left(self) -> bool:
        """False once as many numbers have been computed as are allowed."""
        return self._cells_left > 0

    def values(self) -> list[float]:
        """The value of each way."""
        values = [0.0] * len(self._ways)
        for name, constant in zip(self._basic, self._constants, strict=True):
            if name < len(values):
                values[name] = max(0.0, constant)
        return values

    def add(self, resources: Sequence[int]) -> bool:
        """Adds resources that are overloaded, and solves the program again.

        Returns:
            False if that takes too many steps, or if all had been added before: then only rounding overloads them.
        """
        added = [self._add(resource) for resource in resources]
        if not any(added):
            return False
        while self.has_cells_left:
            row = min(range(len(self._basic)), key=lambda i: (self._constants[i], self._basic[i]))
            if self._constants[row] >= -TOLERANCE:
                return True
            column = self._entering(self._rows[row])
            if column is None:
                return False  # Only by rounding: with all shares 0, no resource is overloaded.
            self._pivot(row, column)
        return False

    def _entering(self, row: list[float]) -> int | None:
        """The column that lowers the total least for what it adds to the row."""
        choices = [
            (gain / value, name, column)
            for column, (value, gain, name) in enumerate(zip(row, self._gains, self._free, strict=True))
            if value < -TOLERANCE
        ]
        return min(choices)[2] if choices else None

    def _add(self, resource: int) -> bool:
        count = len(self._ways)
        if count + resource in self._free or count + resource in self._basic:
            return False
        self._cells_left -= len(self._rows) * len(self._free)
        needs = [way.get(resource, 0.0) for way in self._ways]
        row = [needs[name] if name < count else 0.0 for name in self._free]
        constant = 1.0
        for name, other, value in zip(self._basic, self._rows, self._constants, strict=True):
            need = needs[name] if name < count else 0.0
            if need:
                constant -= need * value
                row = [mine - need * its for mine, its in zip(row, other, strict=True)]
        self._basic.append(count + resource)
        self._rows.append(row)
        self._constants.append(constant)
        return True

    def _pivot(self, index: int, column: int) -> None:
        """Makes the variable of a column basic, in place of the variable of a row."""
        self._cells_left -= len(self._rows) * len(self._free)
        row, pivot = self._rows[index], self._rows[index][column]
        row = [value / pivot for value in row]
        row[column] = 1 / pivot
        constant = self._constants[index] / pivot
        for i, other in enumerate(self._rows):
            factor = other[column]
            if i != index and factor:
                changed = [value - factor * mine for value, mine in zip(other, row, strict=True)]
                changed[column] = -factor / pivot
                self._rows[i] = changed
                self._constants[i] -= factor * constant
        gain = self._gains[column]
        self._gains = [value - gain * mine for value, mine in zip(self._gains, row, strict=True)]
        self._gains[column] = -gain / pivot
        self._rows[index], self._constants[index] = row, constant
        self._basic[index], self._free[column] = self._free[column], self._basic[index]
