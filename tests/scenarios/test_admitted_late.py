"""S6: peers that were admitted just as the master died, and reach the next one late, stay members."""

from __future__ import annotations

import pytest

from zpccl.protocol.messages import Decision, Members, TopologyKind
from zpccl.protocol.peer import State

from .digests import give_up
from .world import ONE, Call, Peer, World, check_agreement, check_members, host_of_two, one_master


def admit_as_it_dies(
    members: str, joiners: str, heard: str, *, given_up: str = "", is_host: bool = False
) -> tuple[World, dict[str, Peer], list[Call]]:
    """The members admit peers; only the peers in `heard` learn of it before the master is killed, and these are then
    cut off.

    The members in `given_up` give their update up while no master leads. With `is_host`, the joiners are one host.
    """
    world, run = one_master(members)
    joining = host_of_two(world, joiners) if is_host else [world.peer(name, ONE) for name in joiners]
    peers = {peer.name: peer for peer in [*run, *joining]}
    for peer in joining:
        peer.connect()
    world.run(0.5)
    world.drop_to_peers.update(set(members + joiners) - set(heard))
    updates = [peers[name].topology() for name in members]
    world.until(lambda: all(len(peers[name].machine.members) == len(members + joiners) for name in heard))
    world.run(0.02)
    world.kill_master("m")
    world.cut([peers[name] for name in heard], "m")
    world.drop_to_peers.clear()
    world.run(0.1)
    for name, call in zip(members, updates, strict=True):
        if name in given_up:
            give_up(peers[name], call)
    world.take_over("m", 500)
    world.run(0.1)
    return world, peers, updates


def check(world: World, peers: dict[str, Peer], updates: list[Call]) -> None:
    world.settle(updates, 20)
    world.run(10)
    check_members(world, peers.values())


@pytest.mark.parametrize("order", ["no", "on"])
def test_two_that_were_admitted_together_come_late(order: str) -> None:
    """S6: p and q have not heard of the admission; r has yet to report, so the round is not over."""
    world, peers, updates = admit_as_it_dies("pqr", "no", "rno")
    for name in order + "r":
        world.join([peers[name]], "m")
        world.run(0.5)
    check(world, peers, updates)


@pytest.mark.parametrize("is_back_early", [True, False])
def test_who_was_admitted_and_is_lost_as_a_newcomer_before_its_admission_is_known(is_back_early: bool) -> None:
    """S6: n does not know of its admission and registers anew. The master loses it, then hears that it is a member."""
    world, peers, updates = admit_as_it_dies("pqr", "no", "ro")
    n, master = peers["n"], world.masters["m"]
    world.until(lambda: n.peer_id in master.machine.registry.peers)
    world.cut([n], "m")
    world.until(lambda: n.peer_id not in master.machine.registry.peers, what="the loss of n")
    if is_back_early:
        world.join([n], "m")
        world.until(lambda: n.peer_id in master.machine.registry.peers)
    world.join([peers["o"]], "m")
    world.run(0.5)
    world.join([n, peers["r"]], "m")
    check(world, peers, updates)


@pytest.mark.parametrize("order", ["rn", "nr"])
def test_a_member_that_knows_it_comes_before_who_was_admitted(order: str) -> None:
    """S6: r knows of n's admission. p and q do not."""
    world, peers, updates = admit_as_it_dies("pqr", "n", "rn")
    for name in order:
        world.join([peers[name]], "m")
        world.run(0.5)
    check(world, peers, updates)


@pytest.mark.parametrize("has_reduced", [True, False])
@pytest.mark.parametrize("kind", [TopologyKind.PENDING, TopologyKind.OPTIMIZE])
def test_who_comes_when_the_call_that_admitted_it_was_given_up_is_no_member(
    kind: TopologyKind, has_reduced: bool
) -> None:
    """L1: p and q give update_topology() up while no master leads, and p is in another call when n comes. That call
    must not be answered with the value of the update: q, which calls later, would wait for p."""
    world, peers, _ = admit_as_it_dies("pq", "n", "n", given_up="pq")
    p, q, n = peers.values()
    if has_reduced:
        world.settle([p.reduce(), q.reduce()])
    asks = [p.topology(kind)]
    world.run(0.05)
    world.join([n], "m")
    world.run(1)
    asks.append(q.topology(kind))
    world.settle(asks)
    check_agreement(asks)
    assert world.masters["m"].member_names == "pq"


def test_who_was_admitted_by_a_call_that_was_given_up_is_admitted_again() -> None:
    """L3: n and o are a host; only n knows of their admission. p times out and tries again: n is not removed."""
    world, peers, updates = admit_as_it_dies("pqr", "no", "n", given_up="p", is_host=True)
    p, q, r, n, o = peers.values()
    world.run(0.2)
    assert updates[0].has_ended
    world.join([n], "m")
    world.run(0.5)
    assert n.state is State.RETURNING
    updates[0] = p.topology()
    world.settle(updates)
    waiting = n.topology()
    world.run(0.5)
    world.settle([waiting, *(peer.topology() for peer in (p, q, r))])
    assert sorted(world.masters["m"].member_names) == sorted("pqrno") and o.state is State.MEMBER
    world.settle([peer.reduce() for peer in (p, q, r, n)])


@pytest.mark.parametrize("unheard", ["p", "pn", "q"])
def test_who_was_admitted_late_stays_at_the_master_after_that(unheard: str) -> None:
    """S6: a master repeats the last list, then lists n again, and dies. The peers in `unheard` miss the second list."""
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
