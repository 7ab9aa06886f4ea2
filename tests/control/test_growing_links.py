"""When links are looked at, and what is asked for."""

from __future__ import annotations

import copy
import errno
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from zpccl import limits
from zpccl.control.growing_links import GrowingLinks
from zpccl.control.links import NewLink
from zpccl.dataplane.engine import LinkStats

FAR, NEAR = b"far".ljust(16, b"."), b"near".ljust(16, b".")
LINK, NUMBER = 3, 7
LOOK_NS = limits.LINK_GROWTH_LOOK_NS


class World:
    """Engine and broker: connections carry the same at each look, until a path is full."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.now_ns = 0
        self.states: dict[bytes, LinkStats] = {}
        self.added: list[tuple[bytes, int]] = []  # Peer and place.
        self.removed: list[tuple[bytes, int]] = []
        self.given_up: list[tuple[bytes, list[int]]] = []
        self.looked_at: set[bytes] = set()
        both: Any = self
        self.links = GrowingLinks(both, both, lambda peer_id: f"<{peer_id.decode()}>")

    def open(self, peer_id: bytes, count: int, round_trip_ns: int) -> None:
        self.states[peer_id] = LinkStats(LINK, count, count, 0, 0, 0, [0] * count, [0] * count, [0] * count)
        self.links.open(NewLink(peer_id, NUMBER, [None] * count, None, round_trip_ns))  # type: ignore[list-item]

    def link_state(self, peer_id: bytes) -> LinkStats:
        self.looked_at.add(peer_id)
        if peer_id not in self.states:
            raise OSError(errno.ENOTCONN, "no link")
        return copy.deepcopy(self.states[peer_id])

    def redial(self, peer_id: bytes, number: int, index: int, generation: int) -> None:
        before = self.states[peer_id]
        assert (number, index, generation) == (NUMBER, before.open_count, 0)
        self.added.append((peer_id, index))
        count = index + 1
        self.states[peer_id] = LinkStats(
            LINK, count, count, 0, 0, 0, [*before.tx_bytes, 0], [*before.rx_bytes, 0], [0] * count
        )

    def stop_dialling(self, peer_id: bytes, number: int, indexes: Sequence[int]) -> None:
        assert number == NUMBER
        self.given_up.append((peer_id, list(indexes)))

    def remove_connection(self, peer_id: bytes, link_id: int, index: int) -> None:
        assert link_id == LINK
        self.removed.append((peer_id, index))

    def move(self, peer_id: bytes, looks: int) -> None:
        """Lets a link carry what it can, for so many looks."""
        for _ in range(looks):
            self.links.attend(self.now_ns, is_moving=True)
            assert self.links.deadline_ns is None or self.links.deadline_ns == self.now_ns + LOOK_NS
            state = self.states[peer_id]
            each = 10**6 * min(state.open_count, self.most) // state.open_count
            state.tx_bytes[:] = state.rx_bytes[:] = [count + each for count in state.tx_bytes]
            self.now_ns += LOOK_NS


def test_connections_are_added_until_they_do_not_help(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zpccl.links")
    world = World(6)
    world.open(FAR, 4, limits.MS)
    world.move(FAR, 200)
    assert world.added == [(FAR, index) for index in (4, 5, 6, 7, 8)]
    assert world.removed == [(FAR, index) for index in (6, 7, 8)] and world.given_up == [(FAR, [6, 7, 8])]
    assert [record.getMessage() for record in caplog.records] == [
        f"link to <{FAR.decode()}>: 6 connections, {6 * 8 * limits.SECOND // LOOK_NS} Mbit/s"
    ]
    assert world.links.deadline_ns is None, "nobody need look at it any more"


def test_only_what_may_grow_is_looked_at() -> None:
    world = World(100)
    world.open(NEAR, 4, 0)
    world.move(NEAR, 100)
    assert world.looked_at == set() and world.links.deadline_ns is None


def test_nothing_is_looked_at_while_nothing_is_moved() -> None:
    """The time between two transfers does not count either."""
    world = World(100)
    world.open(FAR, 4, limits.MS)
    world.links.attend(0, is_moving=False)
    assert world.links.deadline_ns is None and world.looked_at == set()
    window = limits.LINK_GROWTH_WINDOW_NS // LOOK_NS
    world.move(FAR, window)
    world.now_ns += 1000 * limits.LINK_GROWTH_WINDOW_NS
    world.links.attend(world.now_ns, is_moving=False)
    assert world.links.deadline_ns is None
    world.move(FAR, window)
    assert world.added == []
    world.move(FAR, window)
    assert world.added == [(FAR, 4), (FAR, 5)]


def test_a_link_that_is_lost_is_forgotten() -> None:
    world = World(100)
    world.open(FAR, 4, limits.MS)
    world.move(FAR, 3)
    del world.states[FAR]
    world.links.attend(world.now_ns, is_moving=True)
    world.links.attend(world.now_ns, is_moving=True)
    assert world.links.deadline_ns is None
    world.open(FAR, 4, limits.MS)
    world.links.close(FAR)
    world.looked_at.clear()
    world.move(FAR, 100)
    assert world.looked_at == set() and world.added == []
