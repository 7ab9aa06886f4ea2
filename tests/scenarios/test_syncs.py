"""Syncs of shared state: members that are refused, and a master that dies."""

from __future__ import annotations

import pytest

from zpccl.errors import InvalidUsage
from zpccl.protocol.messages import Decision, MasterMessage

from .world import ONE, TWO, Peer, World, one_master, results_of


@pytest.mark.parametrize("is_over", [False, True], ids=["running", "committed"])
def test_who_was_refused_in_a_sync_hears_so_from_another_master(is_over: bool) -> None:
    """L3: r is ahead and is refused; the others go on. The master dies before r has heard of the refusal.

    The next master tells r. Otherwise r would wait in its sync for ever, and the all-reduce of the others would be
    refused, as they and r would seem to wait for each other.
    """
    world, (p, q, r) = one_master("pqr")
    world.settle([p.sync(3, "x"), q.sync(3, "x"), r.sync(3, "x")])

    def lose_refusals(to: Peer, message: MasterMessage) -> MasterMessage | None:
        return None if to is r and isinstance(message, Decision) else message

    world.filter = lose_refusals
    syncs, refused = [p.sync(4, "x"), q.sync(4, "y")], r.sync(9, "z")
    world.run(0.3 if is_over else 0.013)
    assert all(call.has_ended is is_over for call in syncs)
    world.kill_master("m")
    world.run(0.5)
    world.filter = lambda peer, message: message
    world.start_master("m", 78)
    world.settle([*syncs, refused])
    assert all(call.result == 4 for call in syncs)
    assert isinstance(refused.result, InvalidUsage)
    reduces = [p.reduce(), q.reduce()]
    world.run(1)
    world.kill_peer(r)
    world.settle(reduces)
    assert all(call.result == p.bit | q.bit for call in reduces)


@pytest.mark.parametrize("dies", [False, True])
def test_who_is_refused_waits_while_the_others_have_no_plan(dies: bool) -> None:
    """L3: r is refused in a sync that waits for a link of p and q, and the master dies.

    If r went on to its next call, the next master, which knows of no plan, would believe that r and the others wait for
    each other. It would refuse all calls.
    """
    world, (p, q, r) = one_master("pqr")
    world.settle([p.sync(3, "x"), q.sync(3, "x"), r.sync(3, "x")])
    world.break_link(p, q)
    world.run(0.1)
    syncs, refused = [p.sync(4, "x"), q.sync(4, "y")], r.sync(9, "z")
    world.run(0.3)
    reduces = [r.reduce()] if refused.has_ended else []
    world.run(0.1)
    if dies:
        world.kill_master("m")
        world.run(0.5)
        world.start_master("m", 78)
        world.run(1)
    world.mend_link(p, q)
    world.settle([*syncs, refused])
    assert all(call.result == 4 for call in syncs)
    assert isinstance(refused.result, InvalidUsage)
    world.settle([*reduces, *(peer.reduce() for peer in (p, q, r)[: 3 - len(reduces)])])


@pytest.mark.parametrize("addresses", [ONE, TWO])
def test_a_sync_whose_holder_is_lost_goes_on_at_another_master(addresses: tuple[str, ...]) -> None:
    """L3: p has fetched all of the state before h, its only holder, is lost. q fetches it from p as the master dies."""
    world = World()
    for number, address in enumerate(addresses):
        world.start_master(address, 77 + number)
    h, p, q = world.begin_run("hpq", addresses)
    q.finishes = False
    syncs = [h.sync(1, "x"), p.sync(0, "y"), q.sync(0, "y")]
    world.run(0.3)
    world.kill_peer(h)
    world.until(lambda: p.member_names == q.member_names == "pq")
    world.kill_master(addresses[0])
    world.run(0.5)
    if addresses is ONE:
        world.start_master(addresses[0], 78)
    world.until(lambda: p.machine.is_led and q.machine.is_led)
    world.run(1)
    assert not any(call.has_ended for call in syncs)
    q.finish_sync()
    world.settle(syncs[1:])
    assert results_of(syncs[1:]) == [1, 1]
