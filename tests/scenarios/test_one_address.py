"""L3, S6: one address. The master dies, alone, again, or with the network; the run belongs to its members."""

from __future__ import annotations

import itertools

import pytest

from zpccl import limits
from zpccl.errors import HostIncomplete, Kicked, TooFewPeers
from zpccl.limits import SECOND
from zpccl.protocol import events
from zpccl.protocol.messages import Hello, MasterMessage, Members, TopologyKind
from zpccl.protocol.peer import State

from .digests import give_up
from .world import (
    ONE,
    Call,
    Master,
    Peer,
    World,
    check_agreement,
    check_all_go_on,
    host_of_two,
    leave_after_a_report,
    one_master,
)


def restart_out_of_reach(world: World, peers: list[Peer]) -> None:
    """The members are cut off, and the master is restarted."""
    world.cut(peers, "m")
    world.kill_master("m")
    world.run(5)
    world.start_master("m", 500)


def begin_beside(world: World, peers: list[Peer]) -> Peer:
    """The members cannot reach the new master, and a newcomer begins a run of its own there."""
    restart_out_of_reach(world, peers)
    newcomer = world.peer("n", ONE)
    newcomer.connect()
    world.until(lambda: newcomer.state is State.MEMBER, what="a run of its own")
    return newcomer


@pytest.mark.parametrize("late", [1.4, 3.0, 9.0, 20.0])
def test_hole7d_a_newcomer_comes_first(late: float) -> None:
    """S6, L3: a newcomer that comes first after an outage does not take the run from its members.

    The master's host was unreachable. A newcomer is the first to reach it again; the members follow seconds later.
    """
    world, peers = one_master("pqr")
    run_id = peers[0].machine.run_id
    calls = [peer.reduce() for peer in peers[:2]]
    world.run(0.1)
    restart_out_of_reach(world, peers)
    world.run(0.1)
    newcomer = world.peer("n", ONE)
    newcomer.connect()
    world.run(late)
    world.join(peers, "m")
    calls.append(peers[2].reduce())
    world.settle(calls)
    check_agreement(calls)
    assert all(call.is_ok for call in calls), calls
    check_all_go_on(world, peers, run_id)
    world.until(lambda: newcomer.machine.run_id == run_id, what="the newcomer waits for the members of the old run")
    world.run(0.5)
    if newcomer.state is not State.MEMBER:
        world.admit(peers, [newcomer])
    check_all_go_on(world, [*peers, newcomer], run_id)


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_lone_newcomer_yields_however_often_the_master_died(restarts: int) -> None:
    """S6, L3: a newcomer's run has decided nothing for another peer, whichever master leads it and however many rounds
    it took.

    Its calls are answered as if it were alone, except update_topology(), which waits for the members. When the master
    dies again, the next one does not mistake the rounds of that run for rounds of the members.
    """
    world, peers = one_master("pqr")
    run_id, newcomer = peers[0].machine.run_id, begin_beside(world, peers)
    for salt in range(restarts):
        world.kill_master("m")
        world.start_master("m", 600 + salt)
        world.settle([newcomer.topology()])
    for _ in range(3):
        world.settle([newcomer.topology()])
    world.join(peers, "m")
    asked = [newcomer.topology(TopologyKind.PENDING)]

    def has_yielded() -> bool:  # The newcomer always has an open call, also when its run yields.
        if asked[-1].has_ended and newcomer.state is State.MEMBER:
            asked.append(newcomer.topology(TopologyKind.PENDING))
        return newcomer.state is State.RETURNING

    world.until(has_yielded, what="the yielding")
    alone, pending, waiting = newcomer.reduce(), newcomer.topology(TopologyKind.PENDING), newcomer.topology()
    assert isinstance(alone.result, TooFewPeers) and asked[-1].result == pending.result == 1 and not waiting.has_ended
    world.until(lambda: all(peer.machine.run_id == run_id for peer in [*peers, newcomer]), what="the old run")
    world.run(0.5)
    calls = [peer.topology() for peer in peers]
    world.settle([*calls, waiting])
    check_all_go_on(world, [*peers, newcomer], run_id)
    world.kill_master("m")
    world.start_master("m", 700)
    world.run(3)
    check_all_go_on(world, [*peers, newcomer], run_id)


def test_a_peer_whose_run_has_yielded_is_admitted_without_knowing() -> None:
    """S6, B1: the members know of the admission when the master dies. The next master asks the new member too, and it
    promises like the others."""
    world, peers = one_master("pqr")
    run_id, newcomer = peers[0].machine.run_id, begin_beside(world, peers)
    world.join(peers, "m")
    world.until(lambda: newcomer.machine.run_id == run_id, what="the old run")
    world.run(0.5)
    waiting = newcomer.topology()
    world.drop_to_peers.update(newcomer.name)
    world.settle([peer.topology() for peer in peers])
    assert newcomer.state is State.RETURNING and all(len(peer.machine.members) == 4 for peer in peers)
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.take_over("m", 700)
    world.settle([waiting])
    check_all_go_on(world, [*peers, newcomer], run_id)


def test_a_lone_member_that_was_lost_does_not_come_before_who_came_after_it() -> None:
    """L3, S6: the lost member is the whole of the list that it knows. But the run has since gone on with a newcomer."""
    world, (lost,) = one_master("p")
    world.cut([lost], "m")
    master = world.masters["m"]
    world.until(lambda: not master.member_names, what="the run is empty")
    newcomer = world.peer("n", ONE)
    newcomer.connect()
    world.until(lambda: newcomer.state is State.MEMBER, what="it goes on with a newcomer")
    world.kill_master("m")
    world.run(1)
    world.join([lost], "m")
    world.cut([newcomer], "m")
    master = world.start_master("m", 500)
    world.until(lambda: lost.connection is not None, what="the lost member comes first")
    world.run(0.3)
    world.join([newcomer], "m")
    world.until(lambda: not master.machine.is_recovering, what="the run goes on")
    world.run(1)
    assert master.member_names == "n" and newcomer.state is State.MEMBER
    assert lost.state is State.CLOSED and isinstance(lost.machine.error, Kicked)


def test_members_of_two_runs_that_come_at_the_same_time() -> None:
    """S6: of two runs that a new master finds, the larger one goes on; the other has decided nothing and joins it."""
    world, peers = one_master("pqr")
    run_id, newcomer = peers[0].machine.run_id, begin_beside(world, peers)
    world.kill_master("m")
    world.join(peers, "m")
    world.run(1)
    world.start_master("m", 600)
    world.until(lambda: newcomer.machine.run_id == run_id, what="the old run")
    world.run(0.5)
    world.admit(peers, [newcomer])
    check_all_go_on(world, [*peers, newcomer], run_id)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("decides", [False, True])
def test_the_last_member_and_newcomers_that_come_at_the_same_time(count: int, decides: bool) -> None:
    """L3: newcomers that have decided nothing, however many, do not displace the last member and its state (minority,
    seed 18965656). If they have decided something and are more, their run goes on."""
    world, peers = one_master("pqr")
    run_id, member = peers[0].machine.run_id, peers[0]
    calls = [peer.reduce() for peer in peers]
    world.settle(calls)
    for peer in peers[1:]:
        world.kill_peer(peer)
    world.until(lambda: len(member.machine.members) == 1, what="it is alone")
    newcomers = [begin_beside(world, [member])]
    for name in "ot"[:count]:
        newcomers.append(world.peer(name, ONE))
        newcomers[-1].connect()
        world.run(0.5)
        world.admit(newcomers[:-1], newcomers[-1:])
    if decides:
        world.settle([peer.reduce() for peer in newcomers])
    world.kill_master("m")
    world.join([member], "m")
    world.run(1)
    world.start_master("m", 600)
    if decides:
        world.until(lambda: member.state is State.CLOSED, what="the run of most")
        assert isinstance(member.machine.error, Kicked)
        return check_all_go_on(world, newcomers, newcomers[0].machine.run_id)
    world.until(lambda: all(peer.machine.run_id == run_id for peer in newcomers), what="the run of the member")
    world.run(0.5)
    world.admit([member], newcomers)
    return check_all_go_on(world, [member, *newcomers], run_id)


@pytest.mark.parametrize("late", [7.0, 90.0])
def test_a_minority_that_comes_together_with_a_newcomer(late: float) -> None:
    """S6, L3: a new master adopts the run of a newcomer, which has decided nothing and is whole. A member of the other
    run that reported at the same time is not removed: it waits for the others as if it had come a moment later."""
    world, peers = one_master("pqr")
    run_id = peers[0].machine.run_id
    world.settle([peer.reduce() for peer in peers])
    newcomer = begin_beside(world, peers)
    world.kill_master("m")
    take_over(world, 600)  # From then on the list of the newcomer has the higher epoch.
    world.kill_master("m")
    world.join(peers[:1], "m")
    world.run(1)
    world.start_master("m", 700)
    world.run(late)
    if late > limits.MINORITY_WAIT_NS / SECOND:
        peers = peers[:1]
    world.join(peers, "m")
    world.until(lambda: all(peer.machine.run_id == run_id for peer in [*peers, newcomer]), what="the run of most")
    world.run(0.5)
    world.admit(peers, [newcomer])
    check_all_go_on(world, [*peers, newcomer], run_id)


@pytest.mark.parametrize("operations", [0, 1])
def test_a_lone_newcomer_that_comes_after_the_members(operations: int) -> None:
    """S6: the members have gone on with their run when the newcomer comes. If its run has decided nothing, it waits to
    be admitted; if it has, the newcomer gets an error that there is no way back."""
    world, peers = one_master("pqr")
    run_id, newcomer = peers[0].machine.run_id, begin_beside(world, peers)
    if operations:
        other = world.newcomer("o", ONE)
        world.admit([newcomer], [other])
        world.settle([newcomer.reduce(), other.reduce()])
    late = [newcomer, other] if operations else [newcomer]
    world.cut(late, "m")
    world.kill_master("m")
    world.join(peers, "m")
    world.start_master("m", 600)
    world.settle([peer.reduce() for peer in peers])
    world.join(late, "m")
    world.until(lambda: newcomer.state is not State.MEMBER, what="the answer of the master")
    if operations:
        assert isinstance(newcomer.machine.error, Kicked)
        return check_all_go_on(world, peers, run_id)
    world.run(0.5)
    world.admit(peers, [newcomer])
    return check_all_go_on(world, [*peers, newcomer], run_id)


@pytest.mark.parametrize("salts", [(3000, 500), (500, 3000), (500, 500)])
def test_hole7e_a_crash_loop_removes_nobody(salts: tuple[int, int]) -> None:
    """L3: one of three has heard of a master that died at once, and comes late to the next: all stay members."""
    world, peers = one_master("pqr")
    run_id, p = peers[0].machine.run_id, peers[0]
    world.kill_master("m")
    world.take_over("m", salts[0])
    world.drop_to_peers.update("qr")
    world.run(0.02)
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.cut([p], "m")
    world.start_master("m", salts[1])
    world.run(3)
    world.join([p], "m")
    world.run(10)
    check_all_go_on(world, peers, run_id)


@pytest.mark.parametrize("late", [0.5, 5.0, 9.5, 20.0])
def test_hole8_a_minority_does_not_take_the_run_back(late: float) -> None:
    """S3, L3: two of five were removed, and come first to a restarted master. The other three keep the run."""
    world, peers = one_master("pqrst")
    removed, kept = peers[:2], peers[2:]
    world.settle([peer.sync(10, "10") for peer in peers])
    world.cut(removed, "m")
    world.run(2)
    for revision in range(11, 16):
        calls = [peer.sync(revision, str(revision)) for peer in kept]
        world.settle(calls)
        assert [call.result for call in calls] == [revision] * 3
    world.kill_master("m")
    world.cut(kept, "m")
    world.join(removed, "m")
    world.start_master("m", 500)
    world.run(late)
    old = [peer.sync(11, "old") for peer in removed]
    world.join(kept, "m")
    world.settle(old)
    assert all(isinstance(call.result, Kicked) for call in old), old
    calls = [peer.sync(16, "16") for peer in kept]
    world.settle(calls)
    assert [call.result for call in calls] == [16] * 3
    assert world.masters["m"].member_names == "rst"


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("late", [0.5, 3.0, 10.0])
def test_an_old_list_that_is_revived_loses_no_votes(rounds: int, late: float) -> None:
    """L1: removed members revive an old list. r comes later, has seen more rounds, and still gets answers to its calls.

    r has gone on alone, and has had answers of are_peers_pending that p and q do not know of.
    """
    world, peers = one_master("pqr")
    p, q, r = peers
    world.cut([p, q], "m")
    world.until(lambda: world.masters["m"].member_names == "r", what="p and q are removed")
    for _ in range(rounds):
        world.settle([r.topology(TopologyKind.PENDING)])
    world.cut([r], "m")
    world.kill_master("m")
    world.join([p, q], "m")
    world.start_master("m", 500)
    world.run(late)
    calls: list[Call] = [peer.topology(TopologyKind.PENDING) for peer in (p, q)]
    world.join([r], "m")
    calls.append(r.topology(TopologyKind.PENDING))
    world.settle(calls)
    check_agreement(calls)
    for _ in range(3):
        members = [peer for peer in peers if peer.state is State.MEMBER]
        assert members
        calls = [peer.topology(TopologyKind.PENDING) for peer in members]
        world.settle(calls)
        check_agreement(calls)
        assert len({call.result for call in calls}) == 1, calls


@pytest.mark.parametrize("restarts", [1, 2, 3])
def test_members_that_removed_others_and_these_do_not_meet_at_different_points(restarts: int) -> None:
    """L1: two of three are cut off and removed. They come back first after their master has died, one or more times.

    Minority, seed 2304: the third has gone on alone. Its call matches those of the others only if they go on under its
    list. The second new master knows a list of the first one, with a higher number than that of the third.
    """
    world, peers = one_master("pqr")
    *removed, last = peers
    world.cut(removed, "m")
    master = world.masters["m"]
    world.until(lambda: master.member_names == last.name, what="the removal")
    world.settle([last.topology(TopologyKind.PENDING)])
    for salt in range(restarts):
        world.cut([last], "m")
        world.kill_master("m")
        world.join(removed, "m")
        new = world.start_master("m", 500 + salt)
        world.until(lambda new=new: not new.machine.is_recovering, what="the take-over")  # type: ignore[misc]
    calls = [peer.reduce() for peer in removed]
    asked = last.topology(TopologyKind.PENDING)
    for _ in range(restarts):
        world.join([last], "m")
    world.settle([*calls, asked], 60)
    assert asked.result == 0
    assert all(isinstance(call.result, Kicked) for call in calls), calls


def remove_unheard() -> tuple[World, list[Peer], Peer, Peer, Call, Call]:
    """The master removes a member, and dies when only one other has heard of it.

    Returns:
        The world; the members that have not heard of it; the removed member; the one that has heard of it. The last two
        are cut off. A call of each: the removed member waits for the other one, and this one for all members.
    """
    world, others = one_master("rst")
    removed, last = (world.peer(name, ONE, group=1) for name in "pq")
    for peer in (removed, last):
        peer.connect()
    world.run(1)
    world.admit(others, [removed, last])
    world.cut([removed], "m")
    call = removed.reduce()
    return world, others, removed, last, call, die_after_a_removal(world, last)


def die_after_a_removal(world: World, last: Peer) -> Call:
    """The other member of its group is removed, and only this one hears of it. It is cut off, and the master dies.

    Returns:
        A call of it, which waits for all members.
    """
    alone = last.reduce()
    world.drop_to_peers.update("rst")
    world.settle([alone])
    assert isinstance(alone.result, TooFewPeers)
    asked = last.topology(TopologyKind.PENDING)
    world.run(0.2)
    world.cut([last], "m")
    world.kill_master("m")
    world.drop_to_peers.clear()
    return asked


def take_over(world: World, salt: int) -> Master:
    """Starts a new master and waits until it leads the run."""
    master = world.take_over("m", salt)
    world.run(0.1)
    return master


def die_after_a_list(world: World, peer: Peer) -> None:
    """The master dies just after it has sent this peer a member list, if it sends one, or a little later."""
    is_sent = False

    def deliver(to: Peer, message: MasterMessage) -> MasterMessage | None:
        nonlocal is_sent
        if is_sent:
            return None
        is_sent = to is peer and isinstance(message, Members)
        return message

    world.filter = deliver
    world.join([peer], "m")
    world.run(0.4)
    world.kill_master("m")
    world.filter = lambda to, message: message


def check_the_removed_one_goes(world: World, others: list[Peer], removed: Peer, call: Call, asked: Call) -> None:
    """The removed member reaches the next master. Its call ends with Kicked, and those of all others succeed."""
    world.join([removed], "m")
    world.start_master("m", 501)
    world.settle([call, asked, *(peer.topology(TopologyKind.PENDING) for peer in others)])
    assert isinstance(call.result, Kicked) and asked.result == 0


def test_a_removed_member_goes_with_the_first_report_of_its_removal() -> None:
    """L2: a master takes the run over from members that have not heard of a removal, and dies before the removed member
    reports.

    Minority, seed 59268600: a member came late and told of the removal. The list that it was sent named the removed
    member again, so the next master admitted both. Each waited for the other in a different call.
    """
    world, others, removed, last, call, asked = remove_unheard()
    second = take_over(world, 500)
    assert second.member_names == "rstpq"
    world.join([last], "m")
    world.run(0.4)
    world.kill_master("m")
    check_the_removed_one_goes(world, others, removed, call, asked)


@pytest.mark.parametrize("has_reported", [False, True])
def test_a_removed_member_goes_before_a_list_is_sent(has_reported: bool) -> None:
    """L2: the same. The first list that the member gets which told of the removal is without the removed one."""
    world, others, removed, last, call, asked = remove_unheard()
    if has_reported:
        world.join([removed], "m")
    take_over(world, 500)
    die_after_a_list(world, last)
    check_the_removed_one_goes(world, others, removed, call, asked)


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("restarts", [1, 2])
def test_a_removed_member_goes_though_later_masters_have_listed_it(restarts: int, decides: bool) -> None:
    """L2: the same where other masters lead the run in between, to which neither of the two comes.

    The lists of these masters are later than the removal and name the removed member, but they have not admitted it.
    """
    world, others, removed, last, call, asked = remove_unheard()
    for salt in range(restarts):
        master = take_over(world, 400 + salt)
        if decides:
            world.settle([peer.reduce() for peer in others])
        assert master.member_names == "rstpq"
        world.kill_master("m")
    take_over(world, 500)
    world.join([last], "m")
    world.run(0.4)
    world.kill_master("m")
    check_the_removed_one_goes(world, others, removed, call, asked)


def test_a_late_member_that_has_to_go_gets_no_list() -> None:
    """L2: the others have decided something since, so it is the member which tells of the removal that goes."""
    world, others, removed, last, call, asked = remove_unheard()
    world.join([removed], "m")
    take_over(world, 500)
    world.settle([peer.reduce() for peer in others])
    die_after_a_list(world, last)
    world.start_master("m", 501)
    world.settle([call, asked])
    assert isinstance(call.result, TooFewPeers) and isinstance(asked.result, Kicked)


def admit_after_a_removal(group: int = 0) -> tuple[World, list[Peer], Peer, list[Call]]:
    """d was removed, and then n was admitted. Only c and n, which are of this group, have heard of both.

    Returns:
        The world, with a new master that leads a and b; the members a to d; n; the calls of a, b and c that admit n.
    """
    world, (a, b) = one_master("ab")
    c, d, n = world.peer("c", ONE, group=group), world.peer("d", ONE), world.peer("n", ONE, group=group)
    for peer in (c, d):
        peer.connect()
    world.run(1)
    world.admit([a, b], [c, d])
    n.connect()
    world.run(1)
    world.drop_to_peers.update("ab")
    world.cut([d], "m")
    world.until(lambda: c.member_names == "abc", what="the removal")
    updates = [peer.topology() for peer in (a, b, c)]
    world.until(lambda: updates[2].has_ended and n.state is State.MEMBER, what="the admission")
    if group:
        world.settle([c.reduce(), n.reduce()])
    world.cut([c, n], "m")
    world.kill_master("m")
    world.drop_to_peers.clear()
    take_over(world, 500)
    return world, [a, b, c, d], n, updates


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("order", ["cnd", "ncd", "ndc", "dcn", "dnc"])
def test_a_newcomer_that_was_admitted_after_a_removal_stays(order: str, group: int) -> None:
    """S6, L3: the newcomer is no less a member because the first ones to come back have not heard of the removal.

    In group 1, it has decided something with c, so it could not even register again.
    """
    world, peers, n, updates = admit_after_a_removal(group)
    a, b, c, d = peers
    for name in order:
        world.join([peer for peer in (c, d, n) if peer.name == name], "m")
        world.run(0.25)
    world.settle(updates)
    assert group or [call.result for call in updates] == [1, 1, 1]
    check_all_go_on(world, [a, b, c, n], a.machine.run_id)
    assert isinstance(d.machine.error, Kicked)


@pytest.mark.parametrize("comes", [True, False])
def test_a_newcomer_waits_for_who_may_tell_of_its_admission(comes: bool) -> None:
    """L3: n comes before c. If it registered again at once, its sync would end, and it would be admitted by c between
    that sync and its next call, which the others do not make. It does so if c does not come."""
    world, (a, b, c, _), n, updates = admit_after_a_removal()
    sync = n.sync(0, "n")
    world.join([n], "m")
    world.run(1)
    if comes:
        world.join([c], "m")
        world.settle(updates)
        world.settle([sync, *(peer.sync(1, "1") for peer in (a, b, c))])
        return check_all_go_on(world, [a, b, c, n], a.machine.run_id)
    world.settle([sync])
    assert n.state is State.RETURNING and isinstance(sync.result, TooFewPeers)
    waiting = n.topology()
    world.run(0.5)
    world.settle([*updates[:2], waiting, a.topology(), b.topology()])
    return check_all_go_on(world, [a, b, n], a.machine.run_id)


@pytest.mark.parametrize(("keeps", "decides"), [("", False), ("", True), ("a", False)])
def test_a_lost_member_does_not_remove_the_others(keeps: str, decides: bool) -> None:
    """S6: c, perhaps together with a, has gone on with n. It comes late: the next master has lost it already."""
    world, (a, b, c, d) = one_master("abcd")
    n = world.peer("n", ONE)
    world.drop_to_peers.update("abd")
    for peer in (a, b, d):
        if peer.name not in keeps:
            world.cut([peer], "m")
    world.until(lambda: set(world.masters["m"].member_names) == {"c", *keeps}, what="the removals")
    n.connect()
    world.run(0.5)
    if keeps:
        a.topology()
    world.settle([c.topology()])
    world.until(lambda: n.state is State.MEMBER, what="the admission")
    if decides:
        world.settle([c.reduce(), n.reduce()])
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.cut([c, n], "m")
    world.join([a, b, d], "m")
    master = take_over(world, 500)
    assert master.member_names == "abcd"
    world.until(lambda: master.member_names == "abd", what="the loss of c")
    world.run(0.1)
    world.join([c], "m")
    world.run(2)
    assert a.state is b.state is d.state is State.MEMBER
    assert isinstance(c.machine.error, Kicked)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_who_has_not_heard_of_its_admission_and_was_removed_goes(is_first: bool, is_restarted: bool) -> None:
    """L1: p was admitted and removed, and has heard of neither; of the others only q has heard of the removal.

    The next master lists p, which makes a call before q comes. It would wait for q, and q for all others.
    """
    world, others = one_master("rst")
    q, p = (world.peer(name, ONE, group=1) for name in "qp")
    q.connect()
    world.run(1)
    world.admit(others, [q])
    p.connect()
    world.run(1)
    world.drop_to_peers.add("p")
    world.settle([peer.topology() for peer in [*others, q]])
    world.run(0.1)
    assert p.state is State.PENDING
    world.cut([p], "m")
    asked = die_after_a_removal(world, q)
    if is_first:
        world.join([p], "m")
    assert take_over(world, 500).member_names == "rstqp"
    world.join([p], "m")
    world.until(lambda: p.state is State.MEMBER, 3, what="the admission")
    call = p.reduce()
    world.run(0.2)
    if is_restarted:
        world.kill_master("m")
        world.start_master("m", 501)
    world.join([q], "m")
    world.settle([call, asked, *(peer.topology(TopologyKind.PENDING) for peer in others)])
    assert isinstance(call.result, Kicked) and asked.result == 0


def test_a_list_whose_knowers_have_gone_removes_nobody() -> None:
    """S6: c alone knows that d was removed. The next master loses c, and e has heard of neither removal."""
    world, (a, b, c, d, e) = one_master("abcde")
    world.cut([d], "m")
    world.drop_to_peers.update("abe")
    world.until(lambda: c.member_names == "abce", what="the removal")
    world.cut([c, e], "m")
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.join([d], "m")
    master = take_over(world, 500)
    world.run(3)
    world.drop_to_peers.add("e")
    world.join([e], "m")
    world.until(lambda: master.member_names == "abde", 5, what="the loss of c")
    world.run(0.1)
    assert a.member_names == b.member_names == d.member_names == "abde"
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.join([c], "m")
    take_over(world, 900)
    world.run(5)
    check_all_go_on(world, [a, b, d, e], a.machine.run_id)
    assert isinstance(c.machine.error, Kicked)


def test_who_registers_again_is_not_admitted_by_the_list_of_another_newcomer() -> None:
    """L3: n, o and p were admitted after the removal of d, of which no member has heard.

    All members have reported when n comes, so it registers again. It is not admitted before it calls update_topology().
    """
    world, (a, b) = one_master("ab")
    d = world.newcomer("d", ONE)
    world.admit([a, b], [d])
    n, *others = (world.peer(name, ONE, group=int(name != "n")) for name in "nop")
    for peer in (n, *others):
        peer.connect()
    world.run(1)
    world.drop_to_peers.update("ab")
    world.cut([d], "m")
    world.until(lambda: world.masters["m"].member_names == "ab", what="the removal")
    updates = [peer.topology() for peer in (a, b)]
    world.until(lambda: all(peer.state is State.MEMBER for peer in (n, *others)), what="the admission")
    world.cut([n, *others], "m")
    world.kill_master("m")
    world.drop_to_peers.clear()
    take_over(world, 500)
    sync = n.sync(0, "n")
    world.join([n, d], "m")
    world.run(0.5)
    world.join(others, "m")
    world.settle([*updates, d.topology()])
    world.settle([sync])
    assert isinstance(sync.result, TooFewPeers) and world.masters["m"].member_names == "abd"
    waiting = [peer.topology() for peer in (n, *others)]
    world.run(0.5)
    world.settle([*waiting, *(peer.topology() for peer in (a, b, d))])
    check_all_go_on(world, [a, b, d, n, *others], a.machine.run_id)


def test_a_newcomer_waits_while_a_minority_does() -> None:
    """L3: two of three die with their master. The restarted one waits 30 s for them, and a newcomer waits with it."""
    world, peers = one_master("pqr")
    world.kill_master("m")
    for peer in peers[1:]:
        world.kill_peer(peer)
    world.start_master("m", 900)
    world.run(1)
    newcomer = world.peer("n", ONE)
    call = newcomer.connect(attempts=1)
    world.until(lambda: newcomer.state is State.PENDING, what="the run that goes on with the minority")
    world.until(lambda: world.masters["m"].member_names == "p", what="the loss of the others")
    world.run(0.5)
    world.settle([peers[0].topology(), call])
    assert call.is_ok


@pytest.mark.parametrize("late", [6.0, 12.0, 25.0])
def test_a_member_that_leaves_does_not_shorten_the_wait_for_the_others(late: float) -> None:
    """L3: members have 30 s to come back, also if the first one has left meanwhile and a newcomer waits."""
    world, (p, q, r) = one_master("pqr")
    world.settle([peer.reduce() for peer in (p, q, r)])
    run_id = q.machine.run_id
    world.kill_master("m")
    world.cut([q, r], "m")
    world.start_master("m", 900)
    leave_after_a_report(world, p)
    world.peer("x", ONE).connect()
    world.run(late)
    world.join([q, r], "m")
    world.run(10)
    check_all_go_on(world, [q, r], run_id)


def test_peers_that_left_are_forgotten() -> None:
    """B1: a master does not remember every member that has ever left."""
    world, peers = one_master("pq")
    for name in "abc":
        newcomer = world.peer(name, ONE)
        newcomer.connect()
        world.run(1)
        world.admit(peers, [newcomer])
        newcomer.handle(events.CloseCalled())
        world.run(1)
    assert world.masters["m"].member_names == "pq"
    assert not world.masters["m"].machine._leader._left


def come_back(world: World, peers: list[Peer], newcomer: Peer, run_id: bytes) -> None:
    """The members come back, and the run of the newcomer yields."""
    world.join(peers, "m")
    world.until(lambda: all(peer.machine.run_id == run_id for peer in [*peers, newcomer]), what="the old run")
    world.run(0.5)
    assert newcomer.state is State.RETURNING


def test_a_returning_peer_that_gives_its_update_up_and_makes_it_again() -> None:
    """L2: meanwhile the members have admitted the peer, and wait for its sync."""
    world, peers = one_master("pqr")
    run_id, n = peers[0].machine.run_id, begin_beside(world, peers)
    come_back(world, peers, n, run_id)
    first = n.topology()
    world.run(1)
    give_up(n, first)
    world.run(1)
    world.settle([peer.topology() for peer in peers])
    world.run(0.5)
    syncs = [peer.sync(1, "x") for peer in peers]
    world.run(1)
    again = n.topology()
    world.run(1)
    assert again.is_ok
    syncs.append(n.sync(0, "y"))
    world.settle(syncs)
    assert all(call.is_ok for call in syncs)


def test_a_call_given_up_in_a_run_that_yields_is_forgotten() -> None:
    """L1: otherwise a round of the other run would answer that call, and the others would wait for it."""
    world, peers = one_master("p")
    run_id, n = peers[0].machine.run_id, begin_beside(world, peers)
    world.drop_to_peers.add("n")
    ask = n.topology(TopologyKind.PENDING)
    world.run(0.01)
    world.kill_master("m")
    give_up(n, ask)
    world.run(3)
    world.drop_to_peers.clear()
    world.start_master("m", 600)
    world.run(6)
    come_back(world, peers, n, run_id)
    waiting = n.topology()
    world.run(0.2)
    world.settle([peers[0].topology(), waiting])
    ask = n.topology(TopologyKind.PENDING)
    world.run(5)
    assert not ask.has_ended


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_returning_peer_whose_own_run_is_taken_over_after_all(is_registered: bool) -> None:
    """B1, L2: its run has yielded, but the other members of that run have not heard of it when the master dies.

    They come first to the next master, which adopts their list with the returning peer in it. The returning peer is no
    longer a member and cannot report: the master neither asks it again and again, nor tells it that its token is wrong.
    """
    world, peers = one_master("pqr")
    run_id, n = peers[0].machine.run_id, begin_beside(world, peers)
    others = [world.peer(name, ONE) for name in "os"]
    for other in others:
        other.connect()
    world.run(0.5)
    world.admit([n], others)
    own_run_id = n.machine.run_id
    world.drop_to_peers.update("os")
    world.join(peers, "m")
    world.until(
        lambda: n.machine.run_id == run_id if is_registered else n.state is State.RETURNING, what="the yielding"
    )
    world.kill_master("m")
    world.cut(peers, "m")
    world.drop_to_peers.clear()
    master = world.start_master("m", 900)
    n.sent.clear()
    world.until(lambda: master.member_names == "os", what="the take-over")
    world.run(1)
    assert n.state is State.RETURNING and n.machine.run_id == own_run_id
    assert sum(isinstance(message, Hello) for message in n.sent) <= 3
    world.admit(others, [n])
    check_all_go_on(world, [n, *others], own_run_id)


def test_a_returning_peer_comes_back_with_the_round_of_the_others() -> None:
    """L3: as above, but all of its run have called update_topology(). The next call of each is the same one."""
    world, peers = one_master("pqr")
    run_id, n = peers[0].machine.run_id, begin_beside(world, peers)
    other = world.newcomer("o", ONE)
    world.admit([n], [other])
    own_run_id, waiting = n.machine.run_id, [other.topology()]
    world.drop_to_peers.add("o")
    world.join(peers, "m")
    world.until(lambda: n.machine.run_id == run_id, what="the yielding")
    waiting.append(n.topology())
    world.run(0.1)
    world.kill_master("m")
    world.cut(peers, "m")
    world.drop_to_peers.clear()
    world.start_master("m", 900)
    world.settle(waiting)
    check_all_go_on(world, [n, other], own_run_id)


def test_a_newcomer_that_was_admitted_in_vain_is_a_member() -> None:
    """L3: f was admitted with its host as it registered, but has not heard of that when the master dies."""
    world = World()
    world.start_master("m", 77)
    e, f = host_of_two(world, "ef")
    e.connect()
    world.run(1.5)
    world.drop_to_peers.add("f")
    call = f.connect()
    world.until(lambda: e.state is State.MEMBER)
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.start_master("m", 900)
    world.settle([call])
    assert call.is_ok and e.state is f.state is State.MEMBER
    calls = [peer.topology(TopologyKind.PENDING) for peer in (e, f)]
    world.settle(calls)
    assert [call.result for call in calls] == [False, False]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_who_was_admitted_in_vain_and_waits_in_another_run_is_a_member(is_restarted: bool) -> None:
    """L3: f was admitted with its host, but has not heard of that. Then a newcomer begins a run, and f waits there.

    That run has decided nothing and yields: to the members of the first run, or when another master takes that one
    over.
    """
    world, peers = one_master("pq")
    run_id, (e, f) = peers[0].machine.run_id, host_of_two(world, "ef")
    calls = [e.connect(), f.connect()]
    world.until(lambda: e.state is f.state is State.PENDING)
    world.run(0.5)
    world.drop_to_peers.add("f")
    world.settle([calls[0], *(peer.topology() for peer in peers)])
    world.drop_to_peers.clear()
    members = [*peers, e]
    newcomer = begin_beside(world, members)
    world.run(0.5)
    assert f.state is State.PENDING and f.machine.run_id == newcomer.machine.run_id
    if is_restarted:
        world.kill_master("m")
        world.start_master("m", 900)
    world.join(members, "m")
    world.settle([*calls, *(peer.reduce() for peer in members)])
    assert all(call.is_ok for call in calls) and f.machine.run_id == run_id
    check_all_go_on(world, members, run_id)


def test_who_waits_for_the_rest_of_its_host_without_end_is_told() -> None:
    """L1: e and f begin a run, which yields. f dies together with the master, so no master knows that f ever waited."""
    world, peers = one_master("pqr")
    restart_out_of_reach(world, peers)
    e, f = host_of_two(world, "ef")
    for peer in (e, f):
        peer.connect()
    world.until(lambda: f.state is State.MEMBER, what="a run of their own")
    world.join(peers, "m")
    world.until(lambda: e.state is f.state is State.RETURNING, what="the yielding")
    world.until(lambda: e.machine.run_id == peers[0].machine.run_id, what="the old run")
    waiting = e.topology()
    world.run(1)
    world.kill_master("m")
    world.kill_peer(f)
    world.start_master("m", 600)
    world.run(5)
    assert e.state is State.RETURNING and not waiting.has_ended
    world.settle([waiting], limits.HOST_TIMEOUT_NS / limits.SECOND)
    assert isinstance(waiting.result, HostIncomplete) and waiting.result.missing == 1
    check_all_go_on(world, peers, peers[0].machine.run_id)


@pytest.mark.parametrize(("first", "seconds"), [("pqr", 3.0), ("pqr", 20.0), ("p", 40.0)])
def test_nobody_is_removed_when_the_network_of_all_was_away_at_a_take_over(first: str, seconds: float) -> None:
    """L3: all members that have reported to a new master disconnect before it takes the run over, and do so at once.

    It waits for further members for 1 s, and for a quorum for 30 s.
    """
    world, peers = one_master("pqr")
    world.settle([peer.sync(5, "5") for peer in peers])
    world.kill_master("m")
    world.cut([peer for peer in peers if peer.name not in first], "m")
    master = world.start_master("m", 500)
    world.run(0.5)
    world.cut(peers, "m")
    world.run(seconds)
    assert not master.machine.is_recovering
    world.join(peers, "m")
    world.run(5)
    check_all_go_on(world, peers, peers[0].machine.run_id)
    calls = [peer.sync(6, "6") for peer in peers]
    world.settle(calls)
    assert [call.result for call in calls] == [6] * 3


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_nobody_is_removed_when_the_network_of_all_was_away(names: str) -> None:
    """L3: it was away for longer than a heartbeat: links and connections broke. The first one back had no link."""
    world, peers = one_master(names)
    pairs = list(itertools.combinations(peers, 2))
    for peer in peers:
        assert peer.connection is not None
        peer.connection.is_up = False  # From now on nothing arrives.
    world.run(limits.PATH_TIMEOUT_NS / SECOND)
    for one, other in pairs:
        world.break_link(one, other)
    world.run(limits.HEARTBEAT_TIMEOUT_NS / SECOND)
    for peer in peers:
        world.cut([peer], "m")
        world.run(0.1)
    world.heal()
    for one, other in pairs:
        world.run(0.3)
        world.mend_link(one, other)
    world.run(10)
    check_all_go_on(world, peers, peers[0].machine.run_id)
