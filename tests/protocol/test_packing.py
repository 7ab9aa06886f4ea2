"""The division of work among several ways to do it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol.packing import GAP, divide

Ways = list[dict[int, float]]


def time_of(ways: Ways, shares: list[float]) -> float:
    loads = dict.fromkeys((name for way in ways for name in way), 0.0)
    for way, share in zip(ways, shares, strict=True):
        for name, busy in way.items():
            loads[name] += share * busy
    return max(loads.values())


def is_division(shares: list[float]) -> bool:
    return min(shares) >= 0 and sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ways", "shares"),
    [
        ([{0: 1.0}], [1.0]),
        ([{0: 2.0}, {0: 1.0}], [0.0, 1.0]),
        ([{0: 0.1, 1: 1.0}, {0: 0.1, 2: 3.0}], [0.75, 0.25]),
        ([{0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.0}], [0.5, 0.5]),
        ([{0: 0.1, 1: 1.0}, {0: 0.1, 2: 1.0}, {0: 0.1, 1: 1.0, 2: 1.0}], [0.5, 0.5, 0.0]),
        ([{0: 1.0, 1: 1.0}, {0: 1.0}], [0.0, 1.0]),
    ],
)
def test_divisions_that_are_known(ways: Ways, shares: list[float]) -> None:
    """In the last case both ways take the same time, and the first one uses more resources."""
    assert divide(ways, 0, [1.0] * len(ways)) == pytest.approx(shares, abs=GAP)


def test_all_alike_share_alike() -> None:
    ways = [{0: 0.01, 1 + way: 1.0} for way in range(32)]
    assert divide(ways, 0, [1.0] * len(ways)) == pytest.approx([1 / 32] * 32)


def random_ways(seed: int, count: int, resources: int) -> Ways:
    rng = random.Random(seed)
    return [
        {0: rng.random() + 0.1} | {rng.randrange(1, resources): rng.random() * 10 for _ in range(rng.randrange(1, 9))}
        for _ in range(count)
    ]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(2, 40))
def test_no_other_division_is_quicker(seed: int, count: int, resources: int) -> None:
    """Neither one way alone, nor equal shares, nor any small change of the result."""
    ways = random_ways(seed, count, resources)
    shares = divide(ways, 0, [1.0] * len(ways))
    assert is_division(shares)
    least = time_of(ways, shares) / (1 + GAP)
    others = [[float(way == one) for way in range(count)] for one in range(count)] + [[1 / count] * count]
    for other in others:
        assert time_of(ways, other) >= least * (1 - 1e-6)
        changed = [0.9 * mine + 0.1 * its for mine, its in zip(shares, other, strict=True)]
        assert time_of(ways, changed) >= least * (1 - 1e-6)


@pytest.mark.parametrize("pivots_max", [1, 2, 5, 10, 20])
def test_a_search_that_is_cut_short_divides_as_well_as_it_can(pivots_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PACKING_PIVOTS_MAX", pivots_max)
    ways = random_ways(7, 24, 40)
    shares = divide(ways, 0, [1.0] * len(ways))
    assert is_division(shares)
    assert time_of(ways, shares) <= time_of(ways, [1 / 24] * 24) * (1 + 1e-9)
