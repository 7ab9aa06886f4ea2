"""S3, S6, L2, L3: two runs at one master, and newcomers that have heard nothing when their master dies."""

from __future__ import annotations

import pytest

from zpccl.protocol.messages import Hello
from zpccl.protocol.peer import State

from .world import ONE, TWO, World, check_all_go_on, reduce_spec, run_at_two


def test_a_peer_that_is_refused_twice_waits_to_be_admitted() -> None:
    """S6: the master asks n for a report, then its own run decides something, and it refuses n. n's run has decided
    nothing, so n waits to be admitted. The report, which was on its way, is refused, too: that must not end n."""
    world = World()
    world.start_master("m", 400)
    (late,) = world.begin_run("n", ONE)
    world.cut([late], "m")
    world.kill_master("m")
    world.start_master("m", 500)
    peers = world.begin_run("pq", ONE)
    run_id = peers[0].machine.run_id
    world.run(1)
    world.join([late], "m")
    late.sent.clear()
    world.until(lambda: any(isinstance(message, Hello) for message in late.sent), what="the Hello of n")
    calls = [peer.reduce() for peer in peers]
    world.run(0.002)  # Another event: a master yields, or refuses, when it handles one.
    calls += [peer.reduce(reduce_spec(1)) for peer in peers]
    world.until(lambda: late.state is not State.MEMBER, what="the refusal")
    world.run(0.5)
    world.settle(calls)
    assert late.state is State.RETURNING, late.machine.error
    world.admit(peers, [late])
    check_all_go_on(world, [*peers, late], run_id)


@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_newcomer_that_has_heard_nothing_counts_for_the_quorum(name: str, restarts: bool) -> None:
    """L2: a master dies as it registers and admits a newcomer, which has no links to wait for, as the first of its
    group. The member knows the new list; the newcomer, which may have the lowest id, has heard of no run."""
    world, (member,) = run_at_two("m")
    master = world.masters["a"]
    newcomer = world.peer(name, TWO, group=1)
    newcomer.connect()
    world.drop_to_peers.add(name)
    world.until(lambda: bool(master.machine.registry.pending()), what="the registration")
    call = member.topology()
    world.until(lambda: len(member.machine.members) == 2, what="the list with the newcomer")
    world.kill_master("a")
    world.drop_to_peers.clear()
    if restarts:
        world.run(1)
        world.start_master("a", 3000)
    world.until(lambda: newcomer.state is State.MEMBER and member.machine.is_led, 40, what="a master that leads both")
    world.settle([call])
    calls = [member.topology(), newcomer.topology()]
    world.settle(calls)
    assert all(call.is_ok for call in calls)
