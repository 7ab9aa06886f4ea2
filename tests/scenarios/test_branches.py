"""One address: branches of a run, whose members had removed each other, meet at a new master (S1, L1, L3, S6).

Reports of removed members do not count for the members who go on.
"""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol.messages import Decision, RunReport, TopologyKind, Votes
from zpccl.protocol.peer import State

from .digests import TellingWorld
from .world import ONE, Call, Peer, World, check_agreement, one_master, run_at_two


def is_led(world: World, names: str) -> None:
    """Waits until the master has lost all peers but these."""
    world.until(lambda: world.masters["m"].member_names == names, what=f"the list of {names}")
    world.run(0.1)


def lead_only(world: World, here: list[Peer], away: list[Peer], salt: int) -> None:
    """The master dies. Only these peers reach the next one, which leads them."""
    world.kill_master("m")
    world.cut(away, "m")
    world.join(here, "m")
    world.take_over("m", salt)
    world.run(0.1)


def fail_alone(world: World, p: Peer, q: Peer, x: Peer) -> list[Call]:
    """x fails in an all-reduce and is the only one to hear that it is aborted. The others have their results."""
    for peer in (p, q, x):
        peer.finishes = False
    sums = [peer.reduce() for peer in (p, q, x)]
    world.until(lambda: bool(p.running and q.running and x.running))
    world.drop_to_peers.update("pq")
    p.finish()
    q.finish()
    world.run(0.1)
    x.handle(events.ReduceDone(next(iter(x.running)), error="no memory"))
    world.until(lambda: sums[2].has_ended)
    return sums


def test_rounds_of_removed_members_do_not_count_for_those_who_went_on_without_them() -> None:
    """L1: a run has split in two, and the removed members know later rounds than the members whose list goes on.

    r asks whether peers are pending before n knows how their all-reduce ended. Minority, seed 21036728.
    """
    world, peers = one_master("pqr")
    *removed, r = peers
    world.cut([r], "m")
    is_led(world, "pq")
    for _ in range(2):  # Twice, so that the last of these rounds has the number that r's question gets later.
        world.settle([peer.topology(TopologyKind.PENDING) for peer in removed])
    world.kill_master("m")
    world.cut(removed, "m")
    world.join([r], "m")
    world.start_master("m", 500)
    is_led(world, "r")
    n = world.newcomer("n", ONE)
    world.admit([r], [n])
    sums = [r.reduce(), n.reduce()]
    world.until(lambda: bool(r.running and n.running))
    world.drop_to_peers.add("n")
    world.until(lambda: sums[0].has_ended)
    asks = [r.topology(TopologyKind.PENDING)]
    world.run(0.05)
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.join(removed, "m")
    world.start_master("m", 900)
    world.settle(sums)
    world.run(1)
    asks.append(n.topology(TopologyKind.PENDING))
    world.settle(asks)
    assert [call.result for call in asks] == [0, 0]


def test_the_rounds_of_one_who_comes_too_late_do_not_count() -> None:
    """L1: p's list went on without q and x. These have decided something since under the old list, so p goes."""
    world, (p, r) = one_master("pr")
    q, x = (world.peer(name, ONE, group=1) for name in "qx")
    for peer in (q, x):
        peer.connect()
    world.run(0.5)
    world.admit([p, r], [q, x])
    world.cut([q, x], "m")
    is_led(world, "pr")
    world.settle([peer.topology(TopologyKind.PENDING) for peer in (p, r)])
    world.kill_master("m")
    world.cut([p, r], "m")
    world.join([q, x], "m")
    world.take_over("m", 500)
    world.settle([q.reduce(), x.reduce()])
    asks = [q.topology(TopologyKind.PENDING)]
    world.join([p], "m")
    world.until(lambda: p.state is State.CLOSED, what="the removal of p")
    world.run(0.5)
    asks.append(x.topology(TopologyKind.PENDING))
    world.settle(asks)


def test_an_outcome_that_a_removed_member_knows_does_not_count() -> None:
    """S1: x fails in an all-reduce, hears alone that it is aborted, and is lost; the next master commits it."""
    world, (p, q, x) = one_master("pqx")
    sums = fail_alone(world, p, q, x)
    world.kill_master("m")
    world.cut([x], "m")
    world.drop_to_peers.clear()
    world.take_over("m", 500)
    world.run(1)
    world.drop_to_peers.add("q")
    world.until(lambda: sums[0].has_ended)
    assert sums[0].is_ok and not sums[1].has_ended
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.join([x], "m")
    world.start_master("m", 900)
    world.settle(sums[:2])
    assert sums[1].is_ok, sums


def test_the_same_with_two_masters() -> None:
    """S1: the same, with a quorum."""
    world, (p, q, x) = run_at_two("pqx")
    sums = fail_alone(world, p, q, x)
    world.kill_master("a")
    world.cut([x], "b")
    world.drop_to_peers.clear()
    b = world.masters["b"]
    world.until(lambda: b.member_names == "pqx")
    world.filter = lambda to, message: None if to is q and isinstance(message, Decision) else message
    world.until(lambda: sums[0].has_ended)
    world.run(0.1)
    assert sums[0].is_ok and not sums[1].has_ended
    world.kill_master("b")
    world.filter = lambda to, message: message
    world.join([x], "b")
    world.start_master("b", 900)
    world.settle(sums[:2])
    assert sums[1].is_ok, sums


def test_a_round_of_those_who_go_for_a_late_one_does_not_count() -> None:
    """S1: p and q come first and know a round that r and s have completed again without them. s gets the value of r."""
    world, (p, q, r, s) = one_master("pqrs")
    j = world.newcomer("j", ONE)
    world.drop_to_peers.update("rs")
    asks = [peer.topology(TopologyKind.PENDING) for peer in (p, q, r, s)]
    world.until(lambda: asks[0].has_ended and asks[1].has_ended)
    assert asks[0].result == 1
    world.kill_peer(j)
    world.kill_master("m")
    world.cut([p, q], "m")
    world.drop_to_peers.clear()
    world.take_over("m", 500)
    world.run(0.1)
    world.drop_to_peers.add("s")
    world.until(lambda: asks[2].has_ended)
    assert asks[2].result == 0 and not asks[3].has_ended
    world.run(0.1)
    world.kill_master("m")
    world.cut([r, s], "m")
    world.drop_to_peers.clear()
    world.join([p, q], "m")
    world.take_over("m", 900)
    world.join([r, s], "m")
    world.settle(asks)
    check_agreement(asks[2:])


def test_three_branches_do_not_remove_each_other() -> None:
    """S6, L3: each of the three has gone on alone and knows its own list. One of them stays."""
    world, peers = one_master("abc")
    a, b, c = peers
    world.cut([b, c], "m")
    is_led(world, "a")
    world.kill_master("m")
    world.cut([a], "m")
    world.join([b], "m")
    world.start_master("m", 500)
    is_led(world, "b")
    lead_only(world, [c], [b], 900)
    world.kill_master("m")
    world.join([a, b], "m")
    world.start_master("m", 1300)
    world.run(20)
    assert any(peer.state is State.MEMBER for peer in peers), [peer.machine.error for peer in peers]


def test_who_came_after_the_removal_stays_with_those_who_removed() -> None:
    """S6: r has gone on with n, without p and q. p and q come back at another master, and then all meet at a third."""
    world, (p, q, r) = one_master("pqr")
    world.cut([p, q], "m")
    is_led(world, "r")
    n = world.newcomer("n", ONE)
    world.admit([r], [n])
    world.settle([r.reduce(), n.reduce()])
    lead_only(world, [p, q], [r, n], 500)
    world.kill_master("m")
    world.join([r, n], "m")
    world.start_master("m", 900)
    world.run(20)
    assert r.state is n.state is State.MEMBER, [peer.machine.error for peer in world.peers]
    world.settle([r.reduce(), n.reduce()])


def test_members_that_are_to_go_are_not_listed_again() -> None:
    """S6: r and s have gone on without p and q. p and q come first to the next master, and together with r and s to the
    one after that. They are no newcomers, though their list is newer. Minority, seed 23503736."""
    world, (p, q, r, s) = one_master("pqrs")
    world.cut([p, q], "m")
    is_led(world, "rs")
    world.settle([r.sync(1, "1"), s.sync(1, "1")])
    lead_only(world, [p, q], [r, s], 500)
    world.kill_master("m")
    world.join([r, s], "m")
    last = world.take_over("m", 900)
    assert last.member_names == "rs"
    calls = [r.sync(2, "2"), s.sync(2, "2")]
    world.settle(calls)
    assert [call.result for call in calls] == [2, 2]
    assert r.machine.epoch == last.machine.term << limits.EPOCH_BITS, "the first list of that master was not the last"


def test_a_round_that_was_told_is_not_taken_back() -> None:
    """S1: p alone knows a round, and comes first, with r. The master tells r of the round. r's vote is late. Then q
    comes, who knows that p was removed."""
    world, (p, q, r) = one_master("pqr")
    j = world.newcomer("j", ONE)
    world.drop_to_peers.update("qr")
    asks = [peer.topology(TopologyKind.PENDING) for peer in (p, q, r)]
    world.until(lambda: asks[0].has_ended)
    world.kill_peer(j)
    world.kill_master("m")
    world.cut([p], "m")
    world.drop_to_peers.clear()
    late = world.hold_back(Votes, "r")
    world.take_over("m", 500)
    world.run(0.1)
    world.drop_to_peers.add("r")
    is_led(world, "qr")
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.cut([q], "m")
    world.join([p], "m")
    late.clear()
    world.take_over("m", 900)
    world.run(0.1)
    world.join([q], "m")
    world.until(lambda: State.CLOSED in (p.state, q.state), what="one of them goes")
    world.drop_to_peers.update("pq")
    world.release(late)
    world.until(lambda: asks[2].has_ended)
    world.run(0.05)
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.start_master("m", 1300)
    world.run(20)
    stay = [ask for ask in asks if ask.peer.state is State.MEMBER]
    check_agreement(stay)
    assert len({ask.result for ask in stay}) == 1, stay


def test_the_last_sync_of_removed_members_does_not_count() -> None:
    """L3: two of four members were removed, and have synced later than the other two. These keep their revision."""
    world, (p, q, r, s) = one_master("pqrs")
    world.settle([peer.sync(10, "10") for peer in (p, q, r, s)])
    world.cut([r, s], "m")
    is_led(world, "pq")
    for revision in range(11, 16):
        world.settle([peer.sync(revision, "pq") for peer in (p, q)])
    world.kill_master("m")
    world.cut([p, q], "m")
    world.join([r, s], "m")
    world.start_master("m", 500)
    is_led(world, "rs")
    world.run(0.2)
    world.kill_master("m")
    world.join([p, q], "m")
    world.start_master("m", 900)
    world.until(lambda: p.state is q.state is State.CLOSED, what="p and q go")
    n = world.peer("n", ONE)
    n.connect()
    world.run(1)
    world.admit([r, s], [n])
    calls = [r.sync(11, "11"), s.sync(11, "11"), n.sync(16, "pq")]
    world.settle(calls)
    assert [call.result for call in calls[:2]] == [11, 11], calls


@pytest.mark.parametrize("kind", ["round", "outcome"])
def test_who_comes_late_goes_if_others_were_told_otherwise(kind: str) -> None:
    """S1: x knows an answer that its master did not live to send to p and q. p and q go on without x, but only p hears
    of it. q gets the answer that x knows, and then p comes late."""
    world, (p, q, x) = one_master("pqx")
    if kind == "round":
        j = world.newcomer("j", ONE)
        world.drop_to_peers.update("pq")
        calls = [peer.topology(TopologyKind.PENDING) for peer in (p, q, x)]
        world.until(lambda: calls[2].has_ended)
        world.kill_peer(j)
    else:
        calls = fail_alone(world, p, q, x)
    world.kill_master("m")
    world.cut([x], "m")
    world.drop_to_peers.clear()
    world.take_over("m", 500)
    world.run(1)
    world.drop_to_peers.add("q")
    world.until(lambda: calls[0].has_ended and p.member_names == "pq")
    assert not calls[1].has_ended
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.cut([p], "m")
    world.join([x], "m")
    world.start_master("m", 900)
    world.until(lambda: calls[1].has_ended)
    world.join([p], "m")
    world.run(10)
    stay = [call for call in calls if call.peer.state is State.MEMBER]
    assert stay and len({str(call.result) for call in stay}) == 1, (stay, calls)


def test_who_was_removed_and_comes_last_does_not_remove_who_knows_that() -> None:
    """S6: b and d do not know that z was removed, and come first. c knows, comes, and reduces with them; then z."""
    world, (b,) = one_master("b")
    others = [world.peer(name, ONE, group=int(name == "z")) for name in "cdz"]
    c, d, z = others
    for peer in others:
        peer.connect()
    world.run(0.5)
    world.admit([b], others)
    world.cut([z], "m")
    world.drop_to_peers.update("bd")
    is_led(world, "bcd")
    world.kill_master("m")
    world.cut([c], "m")
    world.drop_to_peers.clear()
    world.take_over("m", 500)
    world.join([c], "m")
    world.settle([peer.reduce() for peer in (b, c, d)])
    world.join([z], "m")
    world.until(lambda: z.state is State.CLOSED or c.state is State.CLOSED, what="a removal")
    assert c.state is State.MEMBER, c.machine.error
    world.settle([peer.reduce() for peer in (b, c, d)])


def test_attempt_of_those_who_go_does_not_stay() -> None:
    """p and q come first, with a running attempt. Then come r and s, who went on alone and forgot how it ended."""
    world, (p, q, r, s) = one_master("pqrs")
    for peer in (p, q, r, s):
        peer.finishes = False
    sums = [peer.reduce() for peer in (p, q, r, s)]
    world.until(lambda: all(peer.running for peer in (p, q, r, s)))
    world.kill_master("m")
    world.cut([p, q], "m")
    world.start_master("m", 500)
    world.run(0.5)
    for peer in (r, s):
        peer.handle(events.ReduceDone(next(iter(peer.running)), error="stalled"))
    is_led(world, "rs")
    world.settle(sums[2:])
    world.validates = False
    for peer in (r, s):
        peer.finishes = True
    for _ in range(1100):
        world.settle([r.reduce(), s.reduce()])
    world.kill_master("m")
    world.cut([r, s], "m")
    world.join([p, q], "m")
    world.take_over("m", 900)
    world.join([r, s], "m")
    is_led(world, "rs")
    again = [r.reduce(), s.reduce()]
    world.settle(again)
    assert all(call.is_ok for call in again), again


def test_an_attempt_that_a_removed_member_left_behind_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: x has returned from an all-reduce and gone on alone, as its master had lost the others. x comes late to the
    next master of the others, and goes. By then its digest has reached p and not q: the master does not end the attempt
    as x left it."""
    world, (p,) = one_master("p", TellingWorld)
    q, x, *others = (world.peer(name, ONE, group=int(name in "yz")) for name in "qxyz")
    for peer in (q, x, *others):
        peer.connect()
    world.run(0.5)
    world.admit([p], [q, x, *others])
    held: list[events.DigestReceived] = []
    handle = p.handle

    def hold(event: events.PeerEvent) -> None:
        if isinstance(event, events.DigestReceived) and event.peer_id == x.peer_id:
            held.append(event)
        else:
            handle(event)

    monkeypatch.setattr(p, "handle", hold)
    monkeypatch.setattr(
        q, "handle", lambda event, take=q.handle: None if isinstance(event, events.DigestReceived) else take(event)
    )
    world.filter = lambda to, message: None if to is not x and isinstance(message, Decision) else message
    sums = [peer.reduce() for peer in (p, q, x)]
    world.until(lambda: sums[2].has_ended)
    world.run(0.05)
    world.cut([p, q, *others], "m")
    is_led(world, "x")
    world.settle([x.topology(TopologyKind.PENDING)])
    world.kill_master("m")
    world.cut([x], "m")
    world.filter = lambda to, message: message
    world.join([p, q, *others], "m")
    world.take_over("m", 500)
    world.settle([peer.reduce() for peer in others])
    assert not any(call.has_ended for call in sums[:2])
    world.join([x], "m")
    count = len(x.sent)
    world.until(lambda: any(isinstance(message, RunReport) for message in x.sent[count:]))
    world.run(0.006)  # The report has arrived, and the master's answer to it is on its way.
    for event in held:
        handle(event)
    world.settle(sums)
    assert [call.result for call in sums] == [7, 7, 7]
    assert p.state is q.state is State.MEMBER and x.state is State.CLOSED


def test_who_was_removed_one_after_the_other_do_not_wait_for_each_other() -> None:
    """L1, L2: p was removed, then q, the last member, and n went on with the run. p comes first to the next master, and
    all come to the one after that. n's list does not tell it that p was removed when q stayed. Minority, seed
    41014793."""
    world, (p, q) = one_master("pq")
    sums = [p.reduce(), q.reduce()]
    world.settle(sums)
    world.cut([p], "m")
    is_led(world, "q")
    sums = [p.reduce()]
    world.settle([q.topology(TopologyKind.PENDING)])
    n = world.peer("n", ONE)
    n.connect()
    world.until(lambda: n.state is State.PENDING)
    world.cut([q], "m")
    asks = [q.topology(TopologyKind.PENDING)]
    is_led(world, "n")
    lead_only(world, [p], [n], 500)
    world.kill_master("m")
    world.join([q, n], "m")
    last = world.take_over("m", 900)
    world.settle([*sums, *asks])
    assert last.member_names == "n" and n.state is State.MEMBER
    assert p.state is q.state is State.CLOSED


def test_two_runs_and_removed_members_of_one() -> None:
    """L3: p and q were removed, so r is the only member. n and o have a run of their own that has decided something."""
    world, (p, q, r) = one_master("pqr")
    world.settle([peer.reduce() for peer in (p, q, r)])
    world.cut([p, q], "m")
    is_led(world, "r")
    world.kill_master("m")
    world.cut([r], "m")
    world.run(5)
    world.start_master("m", 500)
    n, o = world.peer("n", ONE), world.peer("o", ONE)
    n.connect()
    world.until(lambda: n.state is State.MEMBER)
    o.connect()
    world.run(0.5)
    world.admit([n], [o])
    world.settle([n.sync(5, "5"), o.sync(5, "5")])
    world.kill_master("m")
    world.run(0.2)
    world.join([p, q, r], "m")
    world.start_master("m", 900)
    world.run(20)
    assert n.state is o.state is State.MEMBER, (n.machine.error, o.machine.error)
    world.settle([n.sync(6, "6"), o.sync(6, "6")])
