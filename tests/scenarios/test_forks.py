"""S3, L1, L3: members and newcomers that know less than others, or report late, at a master that takes a run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from zpccl.errors import Kicked, OperationTimeout
from zpccl.limits import MS
from zpccl.protocol import events
from zpccl.protocol.messages import (
    Acknowledgement,
    Decision,
    Hello,
    Kick,
    MasterMessage,
    Members,
    MembersCommitted,
    Refusal,
    Refused,
    RunReport,
    Vote,
    Votes,
    Welcome,
)
from zpccl.protocol.peer import PeerMachine, State

from .digests import give_up
from .world import ONE, TWO, Connection, Peer, World, check_all_go_on, one_master, reduce_spec, run_at_two

THREE = (*TWO, "c")


def switch(world: World, peer: Peer, old: str, new: str) -> None:
    """A peer that reaches one master no more comes to another one."""
    world.cut([peer], old)
    world.join([peer], new)
    world.until(lambda: peer.connection is not None and peer.address == new, what=f"{peer.name} comes to {new}")
    world.run(1)


def test_a_pending_peer_tells_of_the_list_that_it_has_acknowledged() -> None:
    """S3: p is admitted without hearing of it, is lost, and acknowledges at master b the list without it. Then p comes
    to master a, where b waits, which knows only the list with p. b and p are a quorum of that list.
    """
    world, (a, b) = run_at_two("ab")
    p = world.newcomer("p", TWO)
    world.drop_to_peers.add("p")
    world.settle([peer.topology() for peer in (a, b)])
    world.run(0.1)
    assert world.masters["a"].member_names == "abp" and world.masters["a"].machine.registry.is_committed
    world.cut([p], "a")
    world.drop_to_peers = {"b"}  # Peer b does not hear of the list without p.
    world.until(lambda: world.masters["a"].member_names == "ab", what="p is lost")
    world.run(0.02)
    assert len(b.machine.members) == 3 and a.member_names == "ab"
    world.kill_master("a")
    world.cut([b], "b")
    world.drop_to_peers.clear()
    world.until(lambda: world.masters["b"] in world.leading(), 30, what="b leads")
    assert p.state is State.PENDING
    world.run(15)
    world.join([p], "a")
    world.start_master("a", 3000)
    world.cut([a], "a")
    world.cut([p], "b")
    world.run(30)
    world.check_one_leads()


@pytest.mark.parametrize("join_ms", [100, 300, 500])
def test_a_newcomer_that_reports_late_does_not_change_the_list_too_early(join_ms: int) -> None:
    """S3: the candidate asks n for a report. It arrives after the take-over, before the first list is committed.

    The adopted list abcde is committed, but only d knows so. So a list with n needs the quorum of abcde, and not that
    of ab, the old members: c, d and e may follow another master.
    """
    world, ab = run_at_two("ab")
    world.kill_master("a")
    master = world.masters["b"]
    world.until(lambda: master in world.leading(), what="b leads")
    _a, _b, c, d, e = peers = [*ab, *(world.peer(name, TWO) for name in "cde")]
    n = world.peer("n", TWO)
    for peer in (c, d, e):
        peer.connect()
    world.until(lambda: all(peer.state is State.PENDING for peer in (c, d, e)))
    world.run(0.5)

    def lists(peer: Peer, message: MasterMessage) -> MasterMessage | None:
        """Only d hears that abcde is committed, and only n hears of the list after it."""
        if isinstance(message, MembersCommitted) and peer is not d:
            return None
        if isinstance(message, Members) and n.peer_id in [member.peer_id for member in message.members]:
            return message if peer is n else None
        return message

    world.filter = lists
    world.settle([peer.topology() for peer in ab])
    world.run(0.1)
    assert master.member_names == "abcde" and master.machine.registry.is_committed
    n.connect()
    world.until(lambda: n.state is State.PENDING)
    world.run(1)
    for peer in peers:
        peer.topology()
    world.until(lambda: n.state is State.MEMBER, what="n is admitted")
    world.filter = lambda peer, message: message
    other = world.start_master("a", 3000)
    for peer in (d, e, n):
        world.cut([peer], "a")
    world.kill_master("b")
    held = world.hold_back(RunReport, "n")
    world.until(lambda: other.machine.candidate is not None and len(other.machine.candidate.reports) == 3)
    world.run(join_ms / 1000)
    world.join([n], "a")
    world.until(lambda: not other.machine.is_recovering, 10, what="a adopts the run")
    assert other.member_names == "abcde" and held[-1][0].is_up
    world.release([])
    world.after(20 * MS, lambda: world.release(held[-1:]))
    world.cut([c], "a")  # c does not hear who leads.
    world.start_master("b", 700)
    world.run(8)
    world.check_one_leads()


def test_a_member_that_is_back_before_its_loss_counts_stays() -> None:
    """L1: its network fails briefly before the list of a take-over is committed. Nobody would tell it of a loss."""
    world, (a, b, c) = run_at_two("abc")
    held = world.hold_back(Acknowledgement, "ab")
    world.kill_master("a")
    master = world.masters["b"].machine
    world.until(lambda: not master.is_recovering, what="b adopts the run")
    world.run(0.02)
    assert not master.registry.is_committed and c.connection is not None
    world.break_connection(c.connection)
    for other in (a, b):
        world.after(40 * MS, partial(world.break_link, other, c))
    world.run(0.3)
    assert c.machine.is_led and master.registry.peers[c.peer_id].connection is not None, "c is back"
    call = c.topology()
    world.run(0.02)
    world.release(held)
    world.settle([call, a.topology(), b.topology()], 60)


def test_a_report_whose_sender_is_gone_is_answered_to_nobody() -> None:
    """L3: one address. A removed member reports to the next master, and then its process ends."""
    world, peers = one_master("abx")
    world.cut([peers[2]], "m")
    world.run(20)
    assert world.masters["m"].member_names == "ab"
    world.kill_master("m")
    world.start_master("m", 500)
    for peer in peers[:2]:
        world.cut([peer], "m")
    world.join([peers[2]], "m")
    master = world.masters["m"].machine
    world.until(lambda: master.candidate is not None and bool(master.candidate.reports), what="x has reported")
    world.kill_peer(peers[2])
    world.join(peers[:2], "m")
    world.until(lambda: not master.is_recovering, 40)
    world.run(1)
    assert world.masters["m"].member_names == "ab"


@pytest.mark.parametrize("flaps", [False, True])
def test_a_removal_that_waits_for_the_list_is_not_forgotten(flaps: bool) -> None:
    """S7, L1: c is away for a moment, then its key is revoked, both before the list of a take-over is committed."""
    world, (a, b, c) = run_at_two("abc", {name: f"key of {name}" for name in "abc"})
    held = world.hold_back(Acknowledgement, "abc")
    world.kill_master("a")
    master = world.masters["b"].machine
    world.until(lambda: not master.is_recovering, what="b adopts the run")
    world.run(0.02)
    if flaps:
        c.lose_connection()
        for other in (a, b):
            world.after(40 * MS, partial(world.break_link, other, c))
        world.run(0.3)
    assert master.registry.peers[c.peer_id].connection is not None and not master.registry.is_committed
    world.revoke("b", c)
    world.run(0.02)
    world.release((connection, message) for connection, message in held if connection.peer is not c)
    world.run(30)
    assert world.masters["b"].member_names == "ab"
    world.settle([a.topology(), b.topology()])


def three_masters_and_a_run_that_is_away(names: str) -> tuple[World, list[Peer]]:
    """Three masters that lead nothing, and the members of a run that has decided something. These reach no master."""
    world = World()
    for address, salt in zip(THREE, (77, 1000, 2000), strict=True):
        world.start_master(address, salt)
    peers = world.begin_run(names, THREE)
    world.settle([peer.reduce() for peer in peers])
    for address in THREE:
        world.cut(peers, address)
    world.run(40)
    return world, peers


@pytest.mark.parametrize("later_ms", [0, 500])
def test_a_host_comes_together_though_the_first_master_is_down(later_ms: int) -> None:
    """L1: two masters lead a run each, and at the same time half of a new host comes to each."""
    world, pq = three_masters_and_a_run_that_is_away("pq")
    no = [world.peer(name, THREE) for name in "no"]
    no[0].connect()
    world.until(lambda: no[0].state is State.MEMBER, 120, "n begins a run")
    no[1].connect()
    world.until(lambda: no[1].state is State.PENDING, 60)
    world.run(0.5)
    world.admit(no[:1], no[1:])
    world.settle([peer.reduce() for peer in no])
    world.kill_master("a")
    world.cut(no, "c")
    world.until(lambda: world.masters["b"] in world.leading(), 60, "b leads the run of n and o")
    world.join(pq, "c")
    world.until(lambda: world.masters["c"] in world.leading(), 60, "c leads the run of p and q")
    halves = [world.peer(name, THREE) for name in "ef"]
    for peer, away in zip(halves, "cb", strict=True):
        peer.machine = PeerMachine(replace(peer.machine.options, host="three", host_size=2))
        world.cut([peer], away)
    for peer in halves:
        peer.connect()
        world.run(later_ms / 1000)
    world.until(lambda: all(peer.state is State.PENDING for peer in halves), 60)
    world.run(2)
    for peer, away in zip(halves, "cb", strict=True):
        world.join([peer], away)
    ids = {peer.peer_id for peer in halves}
    world.until(lambda: any(ids <= set(m.machine.registry.peers) for m in world.masters.values()), 600, "they meet")


def admit_unaware(what: type[MasterMessage]) -> tuple[World, list[Peer], Peer]:
    """Master a and members that admit a peer p, which receives no messages of type `what`."""
    world, members = run_at_two("abc")
    p = world.newcomer("p", TWO)
    world.filter = lambda peer, message: None if peer is p and isinstance(message, what) else message
    world.settle([peer.topology() for peer in members])
    world.run(0.02)
    return world, members, p


def promise_the_other(world: World, members: tuple[Peer, Peer, Peer], p: Peer) -> None:
    """p, cut off together with c, promises master b, which is never elected. Then p is lost and c dies."""
    a, b, c = members
    world.cut([c, p], "a")
    world.cut([a, b], "b")
    world.until(lambda: p.machine._acceptor.promised.term > world.masters["a"].machine.term, 60, what="p promises b")
    world.until(lambda: world.masters["a"].member_names == "ab", 60)
    world.run(1)
    world.filter = lambda peer, message: message
    world.kill_peer(c)


@pytest.mark.parametrize("b_lives", [False, True])
def test_a_newcomer_that_has_promised_a_later_candidate_is_not_locked_out(b_lives: bool) -> None:
    """L1: p is listed and does not hear of it. Cut off together with c, p promises b, which is never elected. a leads
    again, under a higher term.
    """
    world, (a, b, c), p = admit_unaware(Members)
    assert world.masters["a"].member_names == "abcp" and p.state is State.PENDING
    promise_the_other(world, (a, b, c), p)
    world.heal()
    if not b_lives:
        world.kill_master("b")
        world.start_master("b", 4000)
    world.run(60)
    world.check_one_leads()
    assert p.state.name == "PENDING" and p.machine.is_led


def test_a_passed_over_member_that_has_promised_a_later_candidate_is_not_locked_out() -> None:
    """L1: p knows the list that admits it, but not that it is committed. a goes on without p. Meanwhile p has promised
    b, which was never elected.
    """
    world, _, p = admit_unaware(MembersCommitted)
    assert p.state is State.MEMBER and p.machine._old_members
    world.cut([p], "a")
    world.until(lambda: p.machine._acceptor.promised.term > world.masters["a"].machine.term, 60, what="p promises b")
    world.until(lambda: world.masters["a"].member_names == "abc", 60)
    world.run(1)
    world.filter = lambda peer, message: message
    world.heal()
    world.run(30)
    assert p.state.name == "RETURNING" and p.machine.is_led


def test_a_passed_over_member_that_gave_its_call_up_is_no_survivor_of_it() -> None:
    """S1, L1: p has voted for a sync that is committed, and is cut off before it hears of anything. p gives the call up
    before it learns that it was removed, returns as a newcomer, and gets the state at its next sync.
    """
    world, members, p = admit_unaware(MembersCommitted)
    given_up, *syncs = [peer.sync(int(peer is not p), "same") for peer in (p, *members)]
    world.run(0.007)  # All votes have arrived, and the answers of a are on their way.
    world.cut([p], "a")
    world.cut([p], "b")
    world.settle(syncs)
    assert [call.result for call in syncs] == [1] * 3 and world.masters["a"].member_names == "abcp"
    give_up(p, given_up)
    world.settle([given_up])
    assert isinstance(given_up.result, OperationTimeout) and p.state is State.MEMBER
    world.until(lambda: world.masters["a"].member_names == "abc", 60)
    world.filter = lambda peer, message: message
    world.heal()
    world.until(lambda: p.state is State.RETURNING and p.machine.is_led, 60, "p registers again")
    world.run(1)
    world.admit(members, [p])
    syncs = [peer.sync(*((0, "same") if peer is p else (2, "next"))) for peer in (p, *members)]
    world.settle(syncs)
    assert [call.result for call in syncs] == [2] * 4


ONE_OR_TWO = pytest.mark.parametrize("masters", [("m",), TWO])


def take_over_slowly(world: World, masters: tuple[str, ...]) -> Callable[[], None]:
    """The master of a run with a member a dies. The next one gets a's report only by the returned function."""
    held = world.hold_back(RunReport, "a")
    world.kill_master(masters[0])
    if len(masters) == 1:
        world.start_master(masters[0], 3000)
    machine = world.masters[masters[-1]].machine

    def finish() -> None:
        world.release(held)
        world.until(lambda: not machine.is_recovering, what="it adopts the run")

    return finish


def world_with_keys(names: str, masters: tuple[str, ...]) -> tuple[World, list[Peer]]:
    """A run whose peers each have a key."""
    world = World()
    for number, address in enumerate(masters):
        world.start_master(address, 77 + 1000 * number)
    return world, world.begin_run(names, masters, {name: f"key of {name}" for name in names})


@ONE_OR_TWO
def test_a_key_that_is_revoked_while_a_master_takes_the_run_over(masters: tuple[str, ...]) -> None:
    """S7, L1: c has reported before. The master accepts nothing more from c, so all would wait for its votes."""
    world, (a, b, c) = world_with_keys("abc", masters)
    finish = take_over_slowly(world, masters)
    master = world.masters[masters[-1]]
    world.until(lambda: len(getattr(master.machine.candidate, "reports", ())) == 2, what="b and c report")
    world.revoke(masters[-1], c)
    finish()
    world.run(30)
    assert master.member_names == "ab"
    world.settle([a.topology(), b.topology()])


@ONE_OR_TWO
@pytest.mark.parametrize("goes", [True, False])
def test_a_newcomer_whose_key_is_revoked_while_it_is_held(goes: bool, masters: tuple[str, ...]) -> None:
    """S7, L1: otherwise c would get the keys of links, and be admitted to its own group, in which it never votes."""
    world, (a, b) = world_with_keys("ab", masters)
    world.settle([a.reduce(), b.reduce()])
    finish = take_over_slowly(world, masters)
    master = world.masters[masters[-1]]
    c = world.peer("c", masters, "key of c", group=1)
    c.connect()
    world.until(lambda: bool(getattr(master.machine.candidate, "held", ())), what="c is held")
    told: list[MasterMessage] = []

    def note(peer: Peer, message: MasterMessage) -> MasterMessage | None:
        if peer is c:
            told.append(message)
        return message if peer is not c or goes else None

    world.filter = note
    world.revoke(masters[-1], c)
    finish()
    world.settle([a.topology(), b.topology()])
    assert master.member_names == "ab" and not master.machine.registry.pending()
    world.settle([a.topology(), b.topology()])
    assert [type(message) for message in told] == [Kick]
    assert c.state is State.CLOSED or not goes


def test_a_key_that_is_allowed_again_is_not_remembered() -> None:
    """L3: the key of c leaves the allow lists and comes back, and c's host joins again. Then b takes the run over."""
    world, (a, b, c) = world_with_keys("abc", TWO)
    for address in TWO:
        world.revoke(address, c)
    world.until(lambda: world.masters["a"].member_names == "ab", what="the removal of c")
    world.revoked.clear()
    d = world.peer("d", TWO, "key of c")
    d.connect()
    world.until(lambda: d.state is State.PENDING)
    world.run(1)
    world.admit([a, b], [d])
    world.kill_master("a")
    calls = [peer.reduce() for peer in (a, b, d)]
    world.settle(calls)
    assert all(call.is_ok for call in calls), calls


def test_who_has_accepted_the_list_without_it_and_missed_the_kick_is_told() -> None:
    """L1: its connection breaks before the Kick. It is later refused with the list that it has already accepted."""
    world, (a, b, c) = world_with_keys("abc", TWO)
    world.filter = lambda peer, message: None if isinstance(message, Kick) else message
    call_id = c.reduce().call_id  # c uses this id for two calls, and is removed for that.
    assert c.connection is not None
    world.run(0.1)
    world.send_to_master(c.connection, Votes(call_id, (Vote(call_id, reduce_spec(1)),)))
    world.until(lambda: len(c.machine.members) == 2)
    assert c.state is State.MEMBER
    world.break_connection(c.connection)
    world.filter = lambda peer, message: message
    world.until(lambda: isinstance(c.machine.error, Kicked), 10, what="c hears of its removal")
    world.settle([a.topology(), b.topology()])


def test_nobody_is_told_to_go_by_a_master_that_has_stepped_down() -> None:
    """S3: two keys are revoked at a master that most members cannot reach. At the other one both are still members."""
    world, peers = world_with_keys("abcde", TWO)
    world.cut(peers[2:], "a")
    world.run(0.1)
    master = world.masters["a"]
    assert master.member_names == "abcde" and len(master.machine.registry.by_connection) == 2
    world.revoked["a"] = {peer.identity for peer in peers[:2]}
    master.handle(events.KeysRevoked({peer.identity: peer.name for peer in peers[:2]}))
    assert master.machine.is_recovering
    world.run(30)
    assert [peer.state for peer in peers] == [State.MEMBER] * 5
    world.settle([peer.topology() for peer in peers])


@pytest.mark.parametrize("salt", [1, 500])
def test_a_newcomer_beside_a_pending_peer_with_a_later_promise(salt: int) -> None:
    """L1: p has promised a later candidate that was never elected. The next candidate holds n and p. It must not
    register n and then step down for p: n would wait there without end.
    """
    world, (a, b, c), p = admit_unaware(Members)
    promise_the_other(world, (a, b, c), p)
    world.kill_master("b")
    world.kill_master("a")
    world.heal()
    n = world.peer("n", TWO)
    late = world.hold_back(RunReport, "a")
    machine = world.start_master("a", salt).machine

    def is_held(peer: Peer) -> bool:
        return peer.connection is not None and peer.connection.name in getattr(machine.candidate, "held", ())

    world.until(lambda: is_held(p), 30, what="p is held")
    n.connect()
    world.until(lambda: is_held(n), 30, what="n is held")
    world.release(late)
    world.until(lambda: any("taking over" in text for _, text in world.masters["a"].log), what="a adopts the run")
    assert not any("stepping down" in text for _, text in world.masters["a"].log)
    world.cut([a, b, p], "a")
    world.start_master("b", 4000)
    world.until(lambda: world.masters["b"] in world.leading(), 60, what="b leads")
    world.heal()
    world.run(30)
    leader = world.check_one_leads()
    assert {n.peer_id, p.peer_id} <= set(leader.machine.registry.peers)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_report_that_is_lost_with_its_connection_is_asked_for_again(is_lost: bool) -> None:
    """L3: only n knows of its admission. It comes while the master waits for c. The candidate had asked it, or not."""
    world, abc = one_master("abc")
    n = world.newcomer("n", ONE)
    world.filter = lambda peer, message: None if peer is not n and isinstance(message, (Members, Decision)) else message
    calls = [peer.topology() for peer in abc]
    world.until(lambda: n.state is State.MEMBER, what="n is admitted")
    world.filter = lambda peer, message: message
    world.cut(abc[2:] if is_lost else [*abc[2:], n], "m")
    world.kill_master("m")
    master = world.start_master("m", 3000)
    if is_lost:
        held = world.hold_back(RunReport, "n")
        world.until(lambda: bool(held), what="n is asked for its report")
        world.release([])
        world.cut([n], "m")
    world.until(lambda: not master.machine.is_recovering, what="it adopts the run")
    world.join([n], "m")
    world.run(1)
    world.join(abc[2:], "m")
    world.settle(calls)
    assert n.state is State.MEMBER and master.member_names == "abcn"
    world.settle([peer.reduce() for peer in (*abc, n)])


def test_who_was_admitted_elsewhere_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: p is pending at b, which does not notice that all have gone to a. a admits p, then p comes back to b."""
    world, abc = run_at_two("abc")
    world.kill_master("a")
    old = world.masters["b"]
    world.until(lambda: old in world.leading(), what="b leads")
    p = world.peer("p", TWO)
    world.start_master("a", 3000)
    p.connect()
    world.until(lambda: p.state is State.PENDING and p.address == "b")
    world.run(0.3)
    tell = world.tell_master
    monkeypatch.setattr(world, "tell_master", lambda c: None if c.machine is old.machine else tell(c))
    world.cut([*abc, p], "b")
    world.until(lambda: p.machine.is_led and p.address == "a", what="a leads")
    world.run(0.3)
    world.admit(abc, [p])
    world.join([p], "b")
    world.cut([p], "a")
    world.until(lambda: p.connection is not None and p.address == "b", 30, what="p comes back")
    p.sent.clear()
    world.run(4)
    assert sum(isinstance(message, Hello) for message in p.sent) < 10


def test_a_run_that_has_yielded_has_no_second_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: b leads m, n and s, whose run yields to that of x and y. Only m hears so, and goes to a. a still lists m and
    n and has not noticed that they are gone. The others go on at c: a must not count m.
    """
    world, xy = three_masters_and_a_run_that_is_away("xy")
    m, n = world.begin_run("mn", THREE)
    old, tell = world.masters["a"], world.tell_master
    unnoticed: list[Connection] = []

    def tell_others(connection: Connection) -> None:
        return unnoticed.append(connection) if connection.machine is old.machine else tell(connection)

    monkeypatch.setattr(world, "tell_master", tell_others)
    world.cut([m, n], "a")
    world.until(lambda: world.masters["b"] in world.leading(), what="b leads m and n")
    s = world.peer("s", THREE)
    world.cut([s], "a")
    s.connect()
    world.until(lambda: s.state is State.PENDING)
    world.run(0.3)
    world.admit([m, n], [s])
    world.filter = lambda peer, message: None if peer in (n, s) and isinstance(message, Refused) else message
    world.join(xy, "b")
    world.until(lambda: m.state is State.RETURNING, what="the run yields at b")
    world.filter = lambda peer, message: message
    world.cut([m, n, s], "b")
    switch(world, m, "c", "a")
    monkeypatch.undo()
    for connection in unnoticed:
        world.tell_master(connection)
    world.until(lambda: world.masters["c"] in world.leading(), what="c leads n and s")
    world.run(30)
    world.check_one_leads()
    assert m.state is State.RETURNING and world.masters["c"].member_names == "ns"


@pytest.mark.parametrize("away", "qr")
def test_who_was_away_when_its_run_yielded_joins_the_other_run(away: str) -> None:
    """L2: the run of q and r yields, and one of them loses its connection before it hears so. r alone would look for a
    master that leads its run until it gives up; q alone is a quorum of its run, and would be led by another master.
    """
    world, xy = three_masters_and_a_run_that_is_away("xy")
    qr = world.begin_run("qr", THREE)
    absent, other = qr if away == "q" else qr[::-1]

    def lose(peer: Peer, message: MasterMessage) -> MasterMessage | None:
        if peer is not absent or not isinstance(message, Refused) or message.refusal is not Refusal.YIELDED:
            return message
        assert peer.connection is not None
        world.filter = lambda peer, message: message
        world.break_connection(peer.connection)
        return None

    world.filter = lose
    world.join(xy, "a")
    world.until(lambda: other.state is State.RETURNING, what="the run yields")
    assert absent.state is State.MEMBER
    world.heal()
    world.until(lambda: absent.state is State.RETURNING, 1, what=f"{away} hears of it")
    world.run(1)
    world.admit(xy, qr)
    world.check_one_leads()
    check_all_go_on(world, [*xy, *qr], xy[0].machine.run_id)


def test_a_promise_that_a_newcomer_has_forgotten_makes_no_second_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: a admits p, which does not hear of it. p and x promise to follow b. Before b leads p, it goes to c, where
    another run registers it, and comes back to a. a must not count p, as x and y make a quorum at b.
    """
    world, (z,) = three_masters_and_a_run_that_is_away("z")
    x, y = world.begin_run("xy", THREE)
    world.join([z], "c")
    world.until(lambda: world.masters["c"] in world.leading(), what="c leads z")
    p = world.newcomer("p", THREE)
    unnoticed: list[Connection] = []
    monkeypatch.setattr(world, "tell_master", unnoticed.append)
    world.filter = lambda peer, message: None if peer is p and isinstance(message, Members) else message
    world.settle([peer.topology() for peer in (x, y)])
    world.run(0.1)
    assert world.masters["a"].member_names == "xyp" and p.state is State.PENDING
    world.filter = lambda peer, message: None if peer is p and isinstance(message, Welcome) else message
    for address in "ac":
        world.cut([x, p], address)
    world.cut([y], "b")
    world.until(lambda: world.masters["b"].member_names == "xyp", what="b takes the run over")
    world.filter = lambda peer, message: message
    world.cut([p], "b")
    world.join([p], "c")
    world.until(lambda: p.machine.run_id == z.machine.run_id, what="c registers p")
    switch(world, p, "c", "a")
    monkeypatch.undo()
    for connection in unnoticed:
        if connection.address == "a":
            world.tell_master(connection)
    world.run(3)
    world.join([y], "b")
    world.cut([y], "a")
    world.run(5)
    for connection in unnoticed:
        world.tell_master(connection)
    world.heal()
    world.run(30)
    world.check_one_leads()
    assert x.state is y.state is State.MEMBER
