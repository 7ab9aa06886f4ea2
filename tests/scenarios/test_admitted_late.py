"""S6: peers that were admitted as the master died, and that come late to the next one, stay members."""

from __future__ import annotations

import pytest

from zpccl.protocol.messages import Decision, Members
from zpccl.protocol.peer import State

from .world import ONE, Call, Peer, World, one_master


def admit_as_it_dies(members: str, joiners: str, heard: str) -> tuple[World, dict[str, Peer], list[Call]]:
    """The members admit peers; only some hear of that before the master is killed, and these are cut off then."""
    world, run = one_master(members)
    peers = {peer.name: peer for peer in run}
    for name in joiners:
        peers[name] = world.peer(name, ONE)
        peers[name].connect()
    world.run(0.5)
    world.drop_to_peers.update(set(members + joiners) - set(heard))
    updates = [peers[name].topology() for name in members]
    world.until(lambda: all(len(peers[name].machine.members) == len(members + joiners) for name in heard))
    world.run(0.02)
    world.kill_master("m")
    world.cut([peers[name] for name in heard], "m")
    world.drop_to_peers.clear()
    new = world.start_master("m", 500)
    world.until(lambda: not new.machine.is_recovering, what="the take-over")
    world.run(0.1)
    return world, peers, updates


def check(world: World, peers: dict[str, Peer], updates: list[Call]) -> None:
    world.settle(updates, 20)
    world.run(10)
    for peer in peers.values():
        assert peer.state is State.MEMBER, f"{peer.name}: {peer.machine.error!r}"
    calls = [peer.reduce() for peer in peers.values()]
    world.settle(calls)
    assert {call.result for call in calls} == {sum(peer.bit for peer in peers.values())}


@pytest.mark.parametrize("order", ["no", "on"])
def test_two_that_were_admitted_together_come_late(order: str) -> None:
    """S6: p and q have not heard of it; r is still to report, so the round is not over."""
    world, peers, updates = admit_as_it_dies("pqr", "no", "rno")
    for name in order + "r":
        world.join([peers[name]], "m")
        world.run(0.5)
    check(world, peers, updates)


@pytest.mark.parametrize("order", ["rn", "nr"])
def test_a_member_that_knows_it_comes_before_who_was_admitted(order: str) -> None:
    """S6: r knows of n's admission. p and q do not."""
    world, peers, updates = admit_as_it_dies("pqr", "n", "rn")
    for name in order:
        world.join([peers[name]], "m")
        world.run(0.5)
    check(world, peers, updates)


@pytest.mark.parametrize("unheard", ["p", "pn", "q"])
def test_who_was_admitted_late_stays_at_the_master_after_that(unheard: str) -> None:
    """S6: n was listed again by a master after the list that it repeated; p knows that one, q the next, and it dies."""
    world, peers, updates = admit_as_it_dies("pqr", "n", "rn")
    world.filter = lambda to, message: (
        None if to.name in unheard and isinstance(message, (Members, Decision)) else message
    )
    world.join([peers["n"]], "m")
    world.until(lambda: "n" in world.masters["m"].member_names, what="n's return")
    world.run(0.1)
    world.kill_master("m")
    world.filter = lambda to, message: message
    world.join([peers["r"]], "m")
    world.start_master("m", 900)
    check(world, peers, updates)
