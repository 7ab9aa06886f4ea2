"""The growth of links, over paths that are made up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from zpccl import limits
from zpccl.control.link_growth import LinkGrowth, Look, Phase

MBIT = 10**6 // 8
RTT_NS = 100 * limits.MS
LOOK_NS = limits.LINK_GROWTH_LOOK_NS


@dataclass
class Path:
    """What a link over it shows.

    Args:
        capacity: bytes per second of the path, in one direction.
        each: bytes per second that a connection carries at most.
        offered: bytes per second that there are to send.
        noise: by so much of itself a rate differs from look to look.
        is_one_way: the other end sends, this one receives.
    """

    capacity: float
    each: float
    offered: float = 1e12
    noise: float = 0.0
    is_one_way: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def look(self, count: int) -> Look:
        """At so many connections."""
        can = min(self.capacity, count * self.each)
        rate = min(can, self.offered) * (1 + self.chance.uniform(-self.noise, self.noise))
        moved = int(rate * LOOK_NS / limits.SECOND)
        at_work = min(count, int(count * self.offered / can))
        if self.is_one_way:
            return Look(LOOK_NS, 0, moved, count, 0, at_work)
        return Look(LOOK_NS, moved, moved, count, at_work, at_work)


def run(growth: LinkGrowth, path: Path, seconds: float = 120.0) -> list[int]:
    """Looks until the growth is settled or so much time has passed; the numbers of connections there were."""
    counts = [growth.count]
    for _ in range(int(seconds * limits.SECOND / LOOK_NS)):
        more = growth.look(path.look(counts[-1]))
        if more:
            assert growth.count == counts[-1] + more <= limits.LINK_CONNECTIONS_GROWN_MAX
            assert (more < 0) is (growth.phase is Phase.SETTLED)
            counts.append(growth.count)
        if growth.phase is Phase.SETTLED:
            break
    return counts


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("is_one_way", [False, True])
def test_it_grows_until_more_does_not_help(noise: float, is_one_way: bool) -> None:
    """1,000 Mbit/s by connections of 30: 34 are needed; the step beyond them is taken back."""
    growth = LinkGrowth(17, RTT_NS)
    counts = run(growth, Path(1000 * MBIT, 30 * MBIT, noise=noise, is_one_way=is_one_way))
    assert counts == [17, 25, 37, 55, 37]
    assert growth.phase is Phase.SETTLED
    assert growth.bits_per_second == pytest.approx(10**9, rel=noise / 2 + 0.01)


def test_a_full_path_keeps_what_it_has() -> None:
    growth = LinkGrowth(17, RTT_NS)
    assert run(growth, Path(500 * MBIT, 130 * MBIT, noise=0.1)) == [17, 25, 17]
    assert growth.phase is Phase.SETTLED


def test_there_is_a_bound() -> None:
    growth = LinkGrowth(4, RTT_NS)
    assert run(growth, Path(1e12, MBIT)) == [4, 6, 9, 13, 19, 28, 42, 63]
    assert growth.phase is Phase.SETTLED
    assert growth.bits_per_second == pytest.approx(63e6)


@pytest.mark.parametrize("is_one_way", [False, True])
def test_a_link_that_is_no_bottleneck_does_not_grow(is_one_way: bool) -> None:
    """It is quiet, or other links or processors hold up what it could carry; when that ends it grows."""
    path = Path(1e12, 100 * MBIT, offered=0, is_one_way=is_one_way)
    growth = LinkGrowth(4, RTT_NS)
    assert run(growth, path) == [4]
    path.offered = 199 * MBIT
    assert run(growth, path) == [4] and growth.phase is Phase.WATCH
    path.offered = 1000 * MBIT
    assert run(growth, path)[:3] == [4, 6, 9]


def test_it_watches_on_where_connections_are_not_the_bottleneck_any_more() -> None:
    """The path loses less than before."""
    growth = LinkGrowth(4, RTT_NS)
    path = Path(1e12, 100 * MBIT, offered=500 * MBIT)
    while not growth.look(path.look(4)):
        pass
    path.each *= 3
    assert run(growth, path) == [6]
    assert growth.phase is Phase.WATCH


def test_help_may_come_late() -> None:
    """Another link of the ring grows two windows later."""
    growth = LinkGrowth(16, RTT_NS)
    held_up = Path(16 * 10 * MBIT, 10 * MBIT)
    while not growth.look(held_up.look(16)):
        pass
    for _ in range(2 * limits.LINK_GROWTH_WINDOW_NS // LOOK_NS):
        assert growth.look(held_up.look(24)) == 0
    held_up.capacity *= 2
    assert run(growth, held_up) == [24, 36, 54, 36] and growth.phase is Phase.SETTLED


def test_connections_have_time_to_get_warm() -> None:
    """What they carry before is no reason to stop, and none to go on."""
    growth = LinkGrowth(16, RTT_NS)
    path = Path(1e12, 10 * MBIT)
    while not growth.look(path.look(16)):
        pass
    for _ in range(limits.LINK_GROWTH_WARM_ROUND_TRIPS_MAX * RTT_NS // LOOK_NS):
        cold = path.look(24)
        assert growth.look(Look(LOOK_NS, 0, 0, 24, cold.sending_count, cold.receiving_count)) == 0
    assert growth.phase is Phase.GROWING
    assert run(growth, path)[1] == 36


def test_what_is_carried_while_a_connection_is_missing_does_not_count() -> None:
    growth = LinkGrowth(16, RTT_NS)
    path = Path(1e12, 10 * MBIT)
    for _ in range(1000):
        assert growth.look(path.look(15)) == 0
    assert growth.phase is Phase.WATCH
    assert run(growth, path)[:2] == [16, 24]


def test_connections_that_cannot_be_had_are_not_waited_for() -> None:
    growth = LinkGrowth(16, RTT_NS)
    path = Path(1e12, 10 * MBIT)
    while not growth.look(path.look(16)):
        pass
    for _ in range(limits.LINK_GROWTH_WAIT_NS // LOOK_NS - 1):
        assert growth.look(path.look(20)) == 0
        assert growth.phase is Phase.GROWING
    assert growth.look(path.look(20)) == -8
    assert growth.phase is Phase.SETTLED and growth.count == 16


def test_settled_is_settled() -> None:
    growth = LinkGrowth(16, RTT_NS)
    run(growth, Path(100 * MBIT, 10 * MBIT))
    assert growth.phase is Phase.SETTLED
    assert all(growth.look(Path(1e12, MBIT).look(growth.count)) == 0 for _ in range(1000))
