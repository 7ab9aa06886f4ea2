"""How optimize_topology measures paths."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from zpccl import limits
from zpccl.errors import CollectiveMismatch, PCCLError, PeerLost, TooFewPeers
from zpccl.measuring import measure_paths
from zpccl.types import ReduceOp

MIB = limits.MIB


def sizes_at(
    rate: float, world_size: int, monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], None] = lambda call: None
) -> list[tuple[int, str]]:
    """The sizes of large all-reduces in a network that moves this many bytes per second."""
    found: list[tuple[int, str]] = []
    now = 0.0

    def all_reduce(data: np.ndarray, op: ReduceOp, algorithm: str) -> None:
        nonlocal now
        if op is ReduceOp.MAX:
            assert data.size == 1
            return
        found.append((data.nbytes, algorithm))
        fail(len(found))
        now += data.nbytes / rate

    monkeypatch.setattr(time, "monotonic", lambda: now)
    measure_paths(all_reduce, world_size)
    return found


def test_exchanges_grow_until_they_take_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sizes_at(20 * MIB, 8, monkeypatch)
    assert found == [(4 * MIB, "direct"), (16 * MIB, "direct"), (64 * MIB, "direct"), (64 * MIB, "auto")]
    found = sizes_at(10 * MIB, 40, monkeypatch)
    assert found == [(10 * MIB, "direct")] + [(10 * MIB, "auto")] * 3


def test_slow_networks_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the smallest tensor about which peers report anything."""
    assert sizes_at(MIB / 10, 2, monkeypatch) == [(4 * MIB, "direct"), (4 * MIB, "auto")]


@pytest.mark.parametrize("world_size", [2, 8, 128])
def test_memory_has_a_bound(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    assert max(size for size, _ in sizes_at(1e15, world_size, monkeypatch)) <= limits.MEASURING_BYTES_MAX


@pytest.mark.parametrize("error", [PeerLost, TooFewPeers, CollectiveMismatch])
def test_the_loss_of_a_peer_ends_it(error: type[PCCLError], monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: for all others, since all get the same outcome."""

    def fail(call: int) -> None:
        if call == 2:
            raise error("lost")

    assert len(sizes_at(20 * MIB, 8, monkeypatch, fail)) == 2
