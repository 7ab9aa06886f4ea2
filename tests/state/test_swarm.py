"""Which blocks a fetch requests from which source: sources are fast, slow, silent, dying or lying."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from zpccl import limits
from zpccl.limits import MIB, MS, SECOND, STATE_SOURCE_TIMEOUT_NS, STATE_STALL_TIMEOUT_NS
from zpccl.state.swarm import LIST, Place, Swarm

A, B, C, F, G = b"a" * 16, b"b" * 16, b"c" * 16, b"f" * 16, b"g" * 16


def blocks(count: int, size: int = MIB) -> list[tuple[Place, int]]:
    return [((0, index), size) for index in range(count)]


def make(sources: list[bytes], partial_seeds: list[bytes] = [], count: int = 0, begin: float = 0.0) -> Swarm:  # noqa: B006
    swarm = Swarm(sources, partial_seeds, begin, now_ns=0)
    swarm.add(blocks(count))
    return swarm


def deliver(swarm: Swarm, peer: bytes, place: Place, now_ns: int) -> bool:
    """A correct block arrives. Returns True if it was wanted."""
    wanted = swarm.on_arrived(peer, place, now_ns)
    if wanted:
        swarm.on_checked(peer, place)
    return wanted


@pytest.fixture(autouse=True)
def all_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests need requests to several sources from the beginning."""
    monkeypatch.setattr(limits, "STATE_IN_FLIGHT_FIRST_BYTES", limits.STATE_IN_FLIGHT_BYTES_MAX)


def state(swarm: Swarm) -> str:
    """The state of the fetch."""
    return "done" if swarm.is_done else "failed" if swarm.has_failed else "open"


def test_different_places_are_asked_of_all_sources() -> None:
    swarm = make([A, B], count=100)
    asks = swarm.ask(0)
    assert set(asks) == {A, B} and not set(asks[A]) & set(asks[B])
    for peer in (A, B):
        assert len(asks[peer]) * MIB == limits.STATE_WINDOW_FIRST_BYTES
    assert swarm.ask(1) == {}, "asked twice"


def test_what_has_come_makes_room_for_more() -> None:
    swarm = make([A], count=100)
    first = swarm.ask(0)[A]
    assert deliver(swarm, A, first[0], 5 * MS)
    assert swarm.ask(5 * MS)[A][0] == (0, len(first))
    assert (swarm.bytes_done, swarm.bytes_expected) == (MIB, 100 * MIB)


def test_a_fetch_is_done_when_all_is_checked() -> None:
    swarm = make([A], count=2)
    assert state(swarm) == "open"
    swarm.ask(0)
    assert deliver(swarm, A, (0, 0), 1) and swarm.on_arrived(A, (0, 1), 2)
    assert state(swarm) == "open"
    swarm.on_checked(A, (0, 1))
    assert state(swarm) == "done" and swarm.deadline_ns(3) is None


def test_nothing_to_fetch_is_done() -> None:
    swarm = make([A])
    assert swarm.is_done and swarm.ask(0) == {}


def test_places_that_are_known_later_are_asked_for_too() -> None:
    swarm = Swarm([A], [], 0.0, 0)
    swarm.add([((0, LIST), 64)])
    assert swarm.ask(0) == {A: [(0, LIST)]}
    assert swarm.on_arrived(A, (0, LIST), 1)
    swarm.add(blocks(2))
    swarm.on_checked(A, (0, LIST))
    assert swarm.ask(1) == {A: [(0, 0), (0, 1)]}
    assert swarm.bytes_expected == 2 * MIB, "lists are not counted"


def test_partial_seeds_begin_at_different_places() -> None:
    firsts = {make([A], count=90, begin=begin).ask(0)[A][0] for begin in (0, 1 / 3, 2 / 3)}
    assert firsts == {(0, 0), (0, 30), (0, 60)}


# --- Windows ----------------------------------------------------------------------------------------------------------


def run(swarm: Swarm, rates: dict[bytes, float], delay_ns: int, until: int = 10**6) -> tuple[int, dict[bytes, int]]:
    """Plays sources that deliver in order at these rates over paths of this delay. Returns the time and the counts."""
    now, counts = 0, dict.fromkeys(rates, 0)
    free = dict.fromkeys(rates, 0)
    coming: list[tuple[int, bytes, Place]] = []
    for _ in range(until):
        for peer, places in swarm.ask(now).items():
            for place in places:
                free[peer] = max(free[peer], now + delay_ns) + int(MIB * SECOND / rates[peer])
                coming.append((free[peer], peer, place))
        if swarm.is_done or not coming:
            break
        event = min(coming)
        deadline = swarm.deadline_ns(now)
        if deadline is not None and deadline < event[0]:
            now = deadline
            swarm.check(now)
            continue
        coming.remove(event)
        now = event[0]
        counts[event[1]] += deliver(swarm, event[1], event[2], now)
    return now, counts


def share(swarm: Swarm, peers: list[bytes], rate: float, step_ns: int = 10 * MS) -> tuple[int, int]:
    """Plays sources that share one path equally, each with its blocks in order. Returns the time, and blocks sent."""
    now = moved = 0
    owed: dict[bytes, deque[list[float]]] = {peer: deque() for peer in peers}  # Index and bytes left of each block.
    while state(swarm) == "open":
        swarm.check(now)
        for peer, places in swarm.ask(now).items():
            owed[peer] += ([place[1], MIB] for place in places)
        now += step_ns
        active = [blocks for blocks in owed.values() if blocks]
        for blocks in active:
            blocks[0][1] -= rate * step_ns / SECOND / len(active)
        for peer, blocks in owed.items():
            if blocks and blocks[0][1] <= 0:
                deliver(swarm, peer, (0, int(blocks.popleft()[0])), now)
                moved += 1
    return now, moved


@pytest.mark.parametrize(("count", "mbit"), [(8, 10), (48, 10), (32, 20), (48, 50), (48, 200)])
def test_many_sources_behind_one_slow_path(monkeypatch: pytest.MonkeyPatch, count: int, mbit: int) -> None:
    """S6: a block of each of them would take longer than any source may be silent."""
    monkeypatch.setattr(limits, "STATE_IN_FLIGHT_FIRST_BYTES", 4 * MIB)
    peers = [bytes([number + 1]) * 16 for number in range(count)]
    swarm = make(peers, count=64)
    took_ns, moved = share(swarm, peers, mbit * 125_000)
    assert state(swarm) == "done" and not swarm.dropped
    assert moved < 1.1 * 64 and took_ns < 1.1 * 64 * MIB / (mbit * 125_000) * SECOND


def test_an_idle_source_is_asked_before_one_that_still_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first source would owe all that may be in flight, and the others would idle."""
    monkeypatch.setattr(limits, "STATE_IN_FLIGHT_FIRST_BYTES", 2 * MIB)
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    assert deliver(swarm, B, asks[B][0], 4 * SECOND)
    assert swarm.ask(4 * SECOND).keys() == {B}


def test_a_long_fast_path_is_filled() -> None:
    """1 Gbit/s and a round trip of 100 ms: within 1.35 times the minimum time, including slow start."""
    rate = 125e6
    took_ns, _ = run(make([A], count=512), {A: rate}, 100 * MS)
    assert took_ns < 1.35 * 512 * MIB / rate * SECOND


def test_sources_deliver_in_proportion_to_their_speed() -> None:
    took_ns, counts = run(make([A, B, C], count=400), {A: 100e6, B: 50e6, C: 10e6}, 1 * MS)
    assert sum(counts.values()) == 400
    assert 1.6 < counts[A] / counts[B] < 2.4 and counts[B] > 3 * counts[C] > 0
    assert took_ns < 1.1 * 400 * MIB / 160e6 * SECOND


@pytest.mark.parametrize("bunch", [1, 4])
def test_sources_of_one_speed_are_hardly_ever_asked_twice(bunch: int) -> None:
    """On slow links, with blocks that share connections and come in bunches: bytes sent twice slow the others down."""
    rate, delay, now, twice = 25e6, 10 * MS, 0, 0
    swarm = make([A, B, C], count=90)
    owed: dict[bytes, list[Place]] = {A: [], B: [], C: []}
    due = {A: 0, B: 3 * MS, C: 9 * MS}
    while not swarm.is_done:
        for peer, places in swarm.ask(now).items():
            if not owed[peer]:
                due[peer] = now + delay + int(min(bunch, len(places)) * MIB * SECOND / rate)
            owed[peer] += places
        peer = min((peer for peer in owed if owed[peer]), key=lambda peer: due[peer])
        deadline = swarm.deadline_ns(now)
        if deadline is not None and deadline < due[peer]:
            now = deadline
            swarm.check(now)
            continue
        now = max(now, due[peer])
        for place in owed[peer][:bunch]:
            twice += not deliver(swarm, peer, place, now)
        del owed[peer][:bunch]
        due[peer] = now + int(min(bunch, len(owed[peer])) * MIB * SECOND / rate)
    assert not swarm.dropped and twice + sum(map(len, owed.values())) <= 2


@pytest.mark.parametrize("sources", [[A], [A, B, C, F]])
def test_windows_are_bounded(sources: list[bytes]) -> None:
    """However fast the sources are: everything requested is delivered before the next requests."""
    swarm = make(sources, count=1000)
    now = 0
    while not swarm.is_done:
        asks = swarm.ask(now)
        asked = [len(places) * MIB for places in asks.values()]
        assert max(asked) <= limits.STATE_WINDOW_BYTES_MAX and sum(asked) <= limits.STATE_IN_FLIGHT_BYTES_MAX
        now += 20 * MS
        for peer, places in asks.items():
            for place in places:
                deliver(swarm, peer, place, now)


def test_small_places_are_asked_for_by_the_thousand() -> None:
    swarm = Swarm([A], [], 0.0, 0)
    swarm.add(((key, 0), 100) for key in range(10_000))
    assert len(swarm.ask(0)[A]) == limits.STATE_REQUESTS_IN_FLIGHT_MAX


def test_a_place_larger_than_any_window_is_asked_for() -> None:
    swarm = Swarm([A], [], 0.0, 0)
    swarm.add([((0, 0), 2 * limits.STATE_IN_FLIGHT_BYTES_MAX)])
    assert swarm.ask(0) == {A: [(0, 0)]}


# --- Partial seeds ----------------------------------------------------------------------------------------------------


def test_a_partial_seed_is_asked_only_for_what_it_has() -> None:
    swarm = make([], [F], count=4)
    assert swarm.ask(0) == {} and not swarm.has_failed
    swarm.on_have(F, [(0, 2), (0, 2), (7, 7)])
    assert swarm.ask(0) == {F: [(0, 2)]}
    swarm.on_have(F, [], is_complete=True)
    assert set(swarm.ask(1)[F]) == {(0, 0), (0, 1), (0, 3)}
    assert all(deliver(swarm, F, (0, index), 2) for index in range(4)) and swarm.is_done


def test_complete_sources_are_spared_what_partial_seeds_have() -> None:
    swarm = make([A], [F], count=20)
    swarm.on_have(F, [(0, 0), (0, 1), (0, 2)])
    asks = swarm.ask(0)
    assert asks[F] == [(0, 0), (0, 1), (0, 2)]
    assert asks[A] == [(0, 3), (0, 4), (0, 5), (0, 6)]


def test_complete_sources_give_what_partial_seeds_have_too_when_nothing_else_is_left() -> None:
    swarm = make([A], [F, G], count=8)
    swarm.on_have(F, [(0, index) for index in range(8)])
    asks = swarm.ask(0)
    assert len(asks[F]) == 4 and len(asks[A]) == 4 and not set(asks[A]) & set(asks[F])


def test_what_a_partial_seed_announced_before_the_list_came_is_known() -> None:
    swarm = make([A], [F])
    swarm.on_have(F, [(0, 1)])
    swarm.add(blocks(2))
    assert swarm.ask(0) == {F: [(0, 1)], A: [(0, 0)]}


def test_strangers_are_not_asked() -> None:
    swarm = make([A], count=1)
    swarm.on_have(B, [(0, 0)], is_complete=True)
    assert swarm.ask(0) == {A: [(0, 0)]}


# --- Sources that fail ------------------------------------------------------------------------------------------------


def test_what_a_lost_source_owed_is_asked_of_others() -> None:
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    delivered = {asks[A][0]}
    assert deliver(swarm, A, asks[A][0], 1)
    swarm.drop(A, "gone")
    assert swarm.dropped == {A: "gone"}
    owed = asks[B]
    while not swarm.is_done:
        for place in owed:
            assert deliver(swarm, B, place, 2)
            delivered.add(place)
        asks = swarm.ask(2)
        owed = asks.pop(B, [])
        assert not asks and not set(owed) & delivered, "what was here is asked for again"
    assert len(delivered) == 8


def test_a_source_that_sends_wrong_bytes_is_dropped_and_the_place_asked_of_another() -> None:
    swarm = make([A, B], count=2)
    asks = swarm.ask(0)
    (place,) = asks[A][:1]
    assert swarm.on_arrived(A, place, 1)
    swarm.on_checked(A, place, "wrong")
    assert swarm.dropped == {A: "wrong"}
    for other in asks[B]:
        assert deliver(swarm, B, other, 2)
    assert place in swarm.ask(2)[B]


def test_a_block_that_is_being_checked_is_not_asked_for_again() -> None:
    """The loss of another source that was to send it does not cause a new request. A failed check does."""
    swarm = make([A, B, C], count=3)
    asks = swarm.ask(0)
    (place,) = asks[A]
    for other in (B, C):
        assert deliver(swarm, other, asks[other][0], 1 * MS)
    assert swarm.ask(5 * SECOND) == {B: [place]}
    assert swarm.on_arrived(A, place, 5 * SECOND)
    swarm.drop(B, "gone")
    assert swarm.ask(5 * SECOND) == {}
    swarm.on_checked(A, place, "wrong")
    assert swarm.ask(5 * SECOND) == {C: [place]}


def test_the_fetch_fails_with_its_last_source() -> None:
    swarm = make([A, B], count=8)
    swarm.ask(0)
    swarm.drop(A, "one")
    assert state(swarm) == "open"
    swarm.drop(B, "other")
    assert state(swarm) == "failed" and list(swarm.dropped) == [A, B]
    assert swarm.ask(1) == {}
    swarm.drop(B, "again")
    assert swarm.dropped[B] == "other"


def test_a_source_lost_after_the_end_is_no_failure() -> None:
    swarm = make([A], count=1)
    swarm.ask(0)
    deliver(swarm, A, (0, 0), 1)
    swarm.drop(A, "gone")
    assert swarm.is_done and not swarm.has_failed


def test_what_was_not_asked_for_is_not_wanted() -> None:
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    assert not swarm.on_arrived(B, asks[A][0], 1), "asked of another"
    assert not swarm.on_arrived(C, asks[A][0], 1), "a stranger"
    assert not swarm.on_arrived(A, (5, 5), 1), "no such place"
    assert swarm.on_arrived(A, asks[A][0], 1) and not swarm.on_arrived(A, asks[A][0], 1), "twice"


def test_a_silent_source_is_dropped_where_there_is_another() -> None:
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    for place in asks[B]:
        deliver(swarm, B, place, 1)
    swarm.check(STATE_SOURCE_TIMEOUT_NS - 1)
    assert not swarm.dropped
    assert swarm.deadline_ns(2) is not None
    swarm.check(STATE_SOURCE_TIMEOUT_NS)
    assert list(swarm.dropped) == [A]


def test_a_slow_source_is_not_silent() -> None:
    """L2: many fetch from each source, so that a block takes longer than a source may be silent."""
    swarm, bytes_of = make([A, B, C], count=12), dict.fromkeys((A, B, C), 5 * MIB)
    asks = swarm.ask(0)
    deliver(swarm, C, asks[C][0], 1)
    now = 1
    while now < STATE_STALL_TIMEOUT_NS - SECOND:
        deadline = swarm.deadline_ns(now)
        assert deadline is not None
        now = min(deadline, now + SECOND)
        bytes_of[A] = 5 * MIB + now * limits.STATE_HEARD_MIN_BYTES // STATE_SOURCE_TIMEOUT_NS * 4
        swarm.check(now, bytes_of.__getitem__)
        assert A not in swarm.dropped and (B in swarm.dropped) == (now >= STATE_SOURCE_TIMEOUT_NS)
    assert deliver(swarm, A, asks[A][0], now)


def test_a_slow_source_that_falls_silent_is_dropped() -> None:
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    swarm.check(STATE_SOURCE_TIMEOUT_NS // 2, lambda _: 0)
    heard_ns = STATE_SOURCE_TIMEOUT_NS - 1
    swarm.check(heard_ns, lambda _: limits.STATE_HEARD_MIN_BYTES)
    deliver(swarm, B, asks[B][0], heard_ns)
    swarm.check(heard_ns + STATE_SOURCE_TIMEOUT_NS - 1, lambda _: limits.STATE_HEARD_MIN_BYTES)
    assert not swarm.dropped
    swarm.check(heard_ns + STATE_SOURCE_TIMEOUT_NS, lambda _: 2 * limits.STATE_HEARD_MIN_BYTES - 1)
    assert list(swarm.dropped) == [A]


def test_a_source_from_which_bytes_come_but_no_block_is_dropped() -> None:
    """L1: whatever comes over its link, each block has a bound."""
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    for second in range(limits.STATE_STALL_TIMEOUT_NS // SECOND):
        swarm.check(second * SECOND, lambda _: second * MIB)  # noqa: B023 - called at once
    assert not swarm.dropped
    deliver(swarm, B, asks[B][0], STATE_STALL_TIMEOUT_NS)
    swarm.check(STATE_STALL_TIMEOUT_NS, lambda _: 30 * MIB)
    assert list(swarm.dropped) == [A]


def test_the_only_source_gets_more_time() -> None:
    swarm = make([A], [F], count=8)
    swarm.ask(0)
    swarm.check(STATE_SOURCE_TIMEOUT_NS)
    assert not swarm.dropped
    swarm.check(STATE_STALL_TIMEOUT_NS)
    assert list(swarm.dropped) == [A] and not swarm.has_failed, "the partial seed may get it elsewhere"


@pytest.mark.parametrize("last", [A, B])
def test_of_sources_that_are_all_silent_one_gets_more_time(last: bytes) -> None:
    """L2: on a slow path that they share, none of them delivers its first block in time."""
    swarm = make([A, B, C], count=12)
    asks, moved_ns = swarm.ask(0), 0
    if last == B:
        moved_ns = SECOND
        deliver(swarm, B, asks[B][0], moved_ns)
    swarm.check(moved_ns + STATE_SOURCE_TIMEOUT_NS)
    assert set(swarm.dropped) == {A, B, C} - {last}
    assert swarm.ask(moved_ns + STATE_SOURCE_TIMEOUT_NS).keys() <= {last}
    swarm.check(moved_ns + STATE_STALL_TIMEOUT_NS - 1)
    assert state(swarm) == "open"
    swarm.check(moved_ns + STATE_STALL_TIMEOUT_NS)
    assert state(swarm) == "failed"


def test_partial_seeds_that_wait_for_each_other_give_up() -> None:
    """L1: no peer has the missing blocks."""
    swarm = make([], [F], count=2)
    swarm.on_have(F, [(0, 0)])
    swarm.ask(0)
    deliver(swarm, F, (0, 0), 5)
    deadline = swarm.deadline_ns(6)
    assert deadline == 5 + STATE_STALL_TIMEOUT_NS
    swarm.check(deadline - 1)
    assert state(swarm) == "open"
    swarm.check(deadline)
    assert state(swarm) == "failed" and list(swarm.dropped) == [F]


def test_deadlines_are_always_ahead() -> None:
    """Otherwise the thread that waits for them would spin."""
    swarm = make([A], count=8)
    swarm.ask(0)
    for now in (1, STATE_SOURCE_TIMEOUT_NS, STATE_SOURCE_TIMEOUT_NS + 5, STATE_STALL_TIMEOUT_NS - 1):
        swarm.check(now)
        deadline = swarm.deadline_ns(now)
        assert deadline is not None and deadline > now


# --- The end of a fetch -----------------------------------------------------------------------------------------------


def slow_end(now: int) -> tuple[Swarm, list[Place]]:
    """A is fast and idle; B owes its first places. Also returns these places."""
    swarm = make([A, B], count=8)
    asks = swarm.ask(0)
    for place in asks[A]:
        deliver(swarm, A, place, now)
    return swarm, asks[B]


def test_an_idle_source_takes_over_what_a_silent_one_owes() -> None:
    swarm, owed = slow_end(10 * MS)
    assert swarm.ask(10 * MS) == {}, "it may still be on its way"
    later = swarm.deadline_ns(10 * MS)
    assert later is not None and later <= 10 * MS + limits.STATE_STEAL_INTERVAL_NS
    stolen = swarm.ask(1 * SECOND)[A]
    assert stolen == owed[::-1][: len(stolen)] and stolen
    for place in stolen:
        assert deliver(swarm, A, place, 1 * SECOND + 1)
        assert not deliver(swarm, B, place, 1 * SECOND + 2), "it is here"
    for place in owed:
        deliver(swarm, B, place, 2 * SECOND)
    assert swarm.is_done and swarm.bytes_done == 8 * MIB


def test_nothing_is_asked_of_more_than_two() -> None:
    """Two idle sources each take over a part of what a third one owes."""
    swarm = make([A, B, C], count=12)
    asks = swarm.ask(0)
    for peer in (A, B):
        for place in asks[peer]:
            deliver(swarm, peer, place, 10 * MS)
    askers = Counter(asks[C])
    for now in range(SECOND, 5 * SECOND, 100 * MS):
        askers.update(place for places in swarm.ask(now).values() for place in places)
    assert set(askers.values()) == {2}


def test_a_source_that_dies_after_it_was_helped_out_costs_nothing() -> None:
    swarm, owed = slow_end(10 * MS)
    stolen = swarm.ask(1 * SECOND)[A]
    swarm.drop(B, "gone")
    assert set(swarm.ask(1 * SECOND).get(A, [])) == set(owed) - set(stolen)


def test_a_wrong_copy_does_not_cost_the_right_one() -> None:
    swarm, _ = slow_end(10 * MS)
    place = swarm.ask(1 * SECOND)[A][0]
    assert swarm.on_arrived(B, place, 1 * SECOND + 1)
    swarm.on_checked(B, place, "wrong")
    assert list(swarm.dropped) == [B]
    assert deliver(swarm, A, place, 1 * SECOND + 2), "the other copy is wanted now"


@pytest.mark.parametrize("seed", range(200))
def test_everything_comes_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """L2, S5: sources die, lie, stay silent and send unrequested blocks; one is good. Each block is checked once.

    The bound on bytes in flight is so small that the fetch would end if one byte were wrongly counted as owed.
    """
    if seed % 2:
        monkeypatch.setattr(limits, "STATE_IN_FLIGHT_BYTES_MAX", MIB)
    rng = random.Random(seed)
    names = [bytes([65 + number]) * 16 for number in range(5)]
    complete, partial_seeds = names[:3], names[3:]
    swarm = Swarm(complete, partial_seeds, rng.random(), 0)
    good = rng.choice(complete)
    swarm.add([((0, LIST), 640)])
    total, done, now = 1, 0, 0
    queues: dict[bytes, list[Place]] = {name: [] for name in names}
    for _ in range(5000):
        now += rng.choice((1, MS, 30 * MS))
        for peer, places in swarm.ask(now).items():
            assert peer not in swarm.dropped
            queues[peer] += places
        if rng.random() < 0.05:
            swarm.on_have(rng.choice(partial_seeds), [(0, rng.randrange(20))], is_complete=rng.random() < 0.1)
        if rng.random() < 0.01 and (victim := rng.choice(names)) != good:
            swarm.drop(victim, "lost")
        peer = rng.choice(names)
        if rng.random() < 0.05:
            assert not swarm.on_arrived(peer, (9, rng.randrange(20)), now)
        if queues[peer]:
            place = queues[peer].pop(rng.randrange(len(queues[peer])))
            if swarm.on_arrived(peer, place, now):
                lies = peer != good and rng.random() < 0.1
                if place == (0, LIST) and not lies:
                    swarm.add(((0, index), rng.randrange(1, 3 * MIB)) for index in range(20))
                    total += 20
                swarm.on_checked(peer, place, "wrong" if lies else "")
                done += not lies
        swarm.check(now)
        assert not swarm.has_failed and good not in swarm.dropped
        if swarm.is_done:
            break
    assert swarm.is_done and done == total and swarm.bytes_done == swarm.bytes_expected
