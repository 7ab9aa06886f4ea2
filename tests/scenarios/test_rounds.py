"""L1: a topology call that a peer gave up, and the answer to its next one."""

from __future__ import annotations

import pytest

from zpccl.protocol.messages import TopologyKind
from zpccl.protocol.peer import State

from .digests import TellingWorld, give_up
from .world import ONE, Call, Peer, World, one_master

PENDING, UPDATE = TopologyKind.PENDING, TopologyKind.UPDATE


def run_with_joiner(kind: type[World] = World) -> tuple[World, Peer, Peer, Peer]:
    """Two members and one that waits to be admitted."""
    world, (p, q) = one_master("pq", kind)
    joiner = world.newcomer("j", ONE)
    return world, p, q, joiner


def miss_an_answer(world: World, p: Peer, q: Peer, *, dies: bool) -> list[Call]:
    """Both ask whether peers are pending. q gets the answer; p loses it with its connection, or with the master."""
    world.drop_to_peers.add(p.name)
    asks = [p.topology(PENDING), q.topology(PENDING)]
    world.run(0.1)
    assert asks[1].has_ended and not asks[0].has_ended
    if dies:
        world.kill_master("m")
    else:
        p.lose_connection()
    world.run(0.05)
    give_up(p, asks[0])
    world.drop_to_peers.clear()
    return asks


@pytest.mark.parametrize("dies", [False, True], ids=["connection breaks", "master dies"])
def test_an_update_is_not_answered_by_a_round_of_another_call(dies: bool) -> None:
    """Otherwise q would wait for p's update_topology() without end."""
    world, p, q, joiner = run_with_joiner()
    miss_an_answer(world, p, q, dies=dies)
    updates = [p.topology(UPDATE)]
    if dies:
        world.start_master("m", 900)
    world.run(10)
    assert not updates[0].has_ended and joiner.state is State.PENDING
    updates.append(q.topology(UPDATE))
    world.settle(updates)
    assert joiner.state.name == "MEMBER"


@pytest.mark.parametrize("dies", [False, True], ids=["connection breaks", "master dies"])
def test_who_asks_again_gets_the_answer_of_the_others(dies: bool) -> None:
    """The others have the answer and do not ask again."""
    world, p, q, joiner = run_with_joiner()
    miss_an_answer(world, p, q, dies=dies)
    again = p.topology(PENDING)
    if dies:
        world.start_master("m", 900)
    world.settle([again], 20)
    updates = [p.topology(UPDATE), q.topology(UPDATE)]
    world.settle(updates)
    assert joiner.state.name == "MEMBER"


@pytest.mark.parametrize("dies", [False, True], ids=["connection breaks", "master dies"])
def test_who_asks_again_and_then_reduces_gets_the_answer_of_the_others(dies: bool) -> None:
    """L1: the second question is held back until the first one has ended. Meanwhile another thread of p reduces."""
    world, p, q, _ = run_with_joiner()
    miss_an_answer(world, p, q, dies=dies)
    calls = [p.topology(PENDING), p.reduce(), q.reduce()]
    if dies:
        world.start_master("m", 900)
    world.settle(calls, 20)


@pytest.mark.parametrize("dies", [False, True], ids=["connection breaks", "master dies"])
def test_a_later_call_is_not_answered_by_a_round_that_is_over(dies: bool) -> None:
    """The members have reduced since, so all have gone on. Otherwise p would go on alone, and q would wait for it."""
    world, p, q, _ = run_with_joiner()
    miss_an_answer(world, p, q, dies=dies)
    if dies:
        world.start_master("m", 900)
    world.run(5)
    world.settle([p.reduce(), q.reduce()])
    first = p.topology(PENDING)
    world.run(5)
    assert not first.has_ended
    second = q.topology(PENDING)
    world.settle([first, second])


def test_a_question_beside_a_collective_is_given_up_and_not_repeated() -> None:
    """L1: a program starts an all-reduce, asks, treats a timeout as "no", and waits for the all-reduce. Its next
    question must not be answered with the round that it missed: from then on it would be one round behind.
    """
    world, (p, q) = one_master("pq", TellingWorld)
    world.settle([p.reduce(), q.reduce()])
    world.run(0.3)
    world.drop_to_peers.add("p")
    sums = [p.reduce(), q.reduce()]
    asks = [p.topology(PENDING), q.topology(PENDING)]
    world.run(0.1)
    assert all(call.is_ok for call in sums) and asks[1].is_ok and not asks[0].has_ended
    give_up(p, asks[0])
    world.run(2.1)
    world.drop_to_peers.clear()
    p.lose_connection()
    world.until(lambda: asks[0].has_ended, 5)
    world.run(1)
    sums = [p.reduce(), q.reduce()]
    asked = [p.topology(PENDING), q.topology(PENDING)]
    world.settle([*sums, *asked])


def test_who_asks_again_gets_the_answer_though_a_collective_ends_between() -> None:
    """L1: the all-reduce was called before the question. p misses both answers and asks again. q has gone on."""
    world, (p, q) = one_master("pq")
    sums = [p.reduce(), q.reduce()]
    world.until(lambda: bool(p.running and q.running))
    asks = [p.topology(PENDING), q.topology(PENDING)]
    world.run(0.006)
    world.drop_to_peers.add("p")
    world.run(0.1)
    assert sums[1].is_ok and asks[1].is_ok and not sums[0].has_ended and not asks[0].has_ended
    give_up(p, asks[0])
    world.until(lambda: asks[0].has_ended, 5)
    again = p.topology(PENDING)
    world.drop_to_peers.clear()
    p.lose_connection()
    world.settle([again, sums[0]])


def test_a_decision_that_comes_again_brings_no_plans_for_fewer_members() -> None:
    """S1: p and q miss the decision on their all-reduce, and their connections break while they admit j.

    The plans ahead in that decision are for the two of them: with these they would commit the next all-reduce without
    j.
    """
    world, p, q, joiner = run_with_joiner(TellingWorld)
    world.settle([p.reduce(), q.reduce()])
    world.run(0.3)
    world.drop_to_peers |= {"p", "q"}
    world.settle([p.reduce(), q.reduce()], 1)
    updates = [p.topology(UPDATE), q.topology(UPDATE)]
    world.until(lambda: joiner.state.name == "MEMBER", 1)
    for peer in (p, q):
        peer.lose_connection()
    world.run(0.02)
    world.drop_to_peers.clear()
    world.settle(updates)
    world.run(0.1)
    sums = [peer.reduce() for peer in (p, q, joiner)]
    world.settle(sums)
    assert [call.result for call in sums] == [7, 7, 7]
