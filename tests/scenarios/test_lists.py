"""S3, L3: peers that were given other lists of masters, and masters of another version in a list."""

from __future__ import annotations

import pytest

from zpccl.errors import PCCLError
from zpccl.protocol.peer import State

from .world import OTHER_VERSION, Call, World, two_masters

FIRST, SECOND_ONE = "10.0.0.1:48148", "10.0.0.2:48148"
BOTH = (FIRST, SECOND_ONE)


def check_refused(call: Call, *lists: tuple[str, ...]) -> None:
    """The error names each address at least once for every list that contains it."""
    assert isinstance(call.result, PCCLError), call
    for address in BOTH:
        count = sum(address in one for one in lists)
        assert str(call.result).count(address) >= count, f"{call.result} does not name all of {lists}"


@pytest.mark.parametrize("other", [(FIRST,), (SECOND_ONE, FIRST)])
def test_hole7a_another_list_is_refused(other: tuple[str, ...]) -> None:
    """S3: a peer that has another list of masters is refused when it registers. The error names both lists."""
    world = two_masters(addresses=BOTH)
    peers = world.begin_run("pq", BOTH)
    run_id = peers[0].machine.run_id
    stranger = world.peer("r", other)
    call = stranger.connect()
    world.settle([call], 30)
    check_refused(call, BOTH, other)
    world.cut(peers, FIRST)
    world.run(20)
    calls = [peer.reduce() for peer in peers]
    world.settle(calls)
    assert all(call.is_ok for call in calls), calls
    assert all(peer.machine.run_id == run_id for peer in peers)


@pytest.mark.parametrize("pause", [0.0, 3.0, 10.0])
def test_hole7f_another_order_begins_no_second_run(pause: float) -> None:
    """S3: lists name the same masters in another order: no second run begins, and the refused peer gets the reason."""
    world = two_masters(addresses=BOTH)
    world.run(1)
    one = world.peer("p", BOTH)
    other = world.peer("q", BOTH[::-1])
    calls = [one.connect()]
    world.run(pause)
    calls.append(other.connect())
    world.run(40)
    members = [peer for peer in (one, other) if peer.state in (State.MEMBER, State.PENDING)]
    assert len(members) < 2, "S3: two runs began"
    for peer, call in zip((one, other), calls, strict=True):
        if peer not in members:
            assert call.has_ended, f"L1: {peer.name} is neither in a run nor refused"
            check_refused(call, BOTH, BOTH[::-1])
    if pause:
        assert members == [one]


def test_hole7b_a_standby_of_another_version_is_passed_over() -> None:
    """L3: the log names a standby that speaks another version of the protocol; the next one leads the run."""
    world = World()
    names = ("a", "odd-standby:48148", "c")
    world.start_master("a", 77)
    world.start_master(names[1], 600)
    world.start_master("c", 1000)
    peers = world.begin_run("pqr", names)
    world.kill_master(names[1])
    world.foreign.add(names[1])
    world.kill_master("a")
    calls = [peer.reduce() for peer in peers]
    world.settle(calls)
    assert [call.result for call in calls] == [7, 7, 7]
    for peer in peers:
        assert peer.state is State.MEMBER, f"{peer.name}: {peer.machine.error!r}"
        assert any(names[1] in line and str(OTHER_VERSION) in line for line in peer.log), peer.log
