"""S3, L1: two masters, restarts and short cuts. In each case one of them leads the run, and every call ends."""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.errors import Kicked, MasterUnreachable, TooFewPeers
from zpccl.limits import MS, SECOND
from zpccl.protocol.membership import Standing
from zpccl.protocol.messages import Hello, Members, RunReport, TopologyKind
from zpccl.protocol.peer import State

from .world import (
    TWO,
    Call,
    Master,
    Peer,
    World,
    check_agreement,
    check_members,
    leave_after_a_report,
    one_master,
    run_at_two,
    two_masters,
)

CUTS_MS = (0, 3, 6, 9, 12, 20, 40)
"""When paths are cut, after a master has adopted a run: before its first message arrives, between two, and later."""


def fail_over(world: World) -> Master:
    """The first two steps of a rolling restart: b leads after a was restarted, then b dies, and a adopts the run."""
    world.kill_master("a")
    world.until(lambda: bool(world.leading()), what="b leads")
    world.start_master("a", 3000)
    world.run(1)
    world.kill_master("b")
    master = world.masters["a"]
    world.until(lambda: not master.machine.is_recovering, what="a adopts the run")
    return master


@pytest.mark.parametrize("cut_ms", CUTS_MS)
@pytest.mark.parametrize("salt", [500, 1, 4000])
def test_hole1_hang(cut_ms: int, salt: int) -> None:
    """L1, L2: members come back to a master that they have promised nothing since. It does not leave them waiting.

    Two masters are restarted in turn. The one that has just adopted the run loses all peers for half a second, and the
    other one leads meanwhile. Calls are in flight when all come back.
    """
    world, peers = run_at_two("pqr")
    fail_over(world)
    world.run(cut_ms / 1000)
    world.cut(peers, "a")
    world.start_master("b", salt)
    world.run(0.6)
    world.join(peers, "a")
    world.until(lambda: not world.masters["b"].machine.is_recovering and bool(world.leading()), what="one leads")
    for peer in peers:
        peer.finishes = False
    calls = [peer.reduce() for peer in peers]
    world.until(lambda: all(peer.running for peer in peers), what="an attempt runs")
    world.kill_master(next(peer.address for peer in peers))
    world.run(3)
    for peer in peers:
        peer.finishes = True
        peer.finish()
    world.settle(calls)
    check_agreement(calls)
    assert all(call.is_ok for call in calls), calls
    check_members(world, peers)


@pytest.mark.parametrize("cut_ms", CUTS_MS)
def test_hole1_split(cut_ms: int) -> None:
    """S3: a list that was never committed does not take precedence over a committed one, whatever its number.

    As above, but one member stays with a for as long as it likes. Meanwhile b commits lists of the others and of
    newcomers; then one of the others goes back to a.
    """
    world, peers = run_at_two("pqr")
    p, q, r = peers
    fail_over(world)
    world.run(cut_ms / 1000)
    world.cut([q, r], "a")
    b = world.start_master("b", 500)
    world.until(lambda: b in world.leading(), what="b leads")
    world.run(15)  # By now p is lost at b, or has come to it.
    voters = [peer for peer in peers if peer.name in b.member_names]
    assert {q, r} <= set(voters)
    x, y = world.peer("x", TWO), world.peer("y", TWO)
    for newcomer in (x, y):
        newcomer.connect()
    world.until(lambda: x.state is State.PENDING and y.state is State.PENDING, what="x and y are pending")
    world.run(0.5)
    world.admit(voters, [x, y])
    calls = [peer.reduce() for peer in (*voters, x, y)]
    world.settle(calls, 2)
    assert all(call.is_ok for call in calls), calls
    world.join([q, r], "a")
    world.cut([q], "b")
    world.run(40)
    world.check_one_leads()
    calls = [peer.reduce() for peer in (p, q, r, x, y)]
    world.run(5)
    check_agreement(calls)
    synced = {peer: peer.sync(7, f"of {peer.address}") for peer in (p, q, r, x, y)}
    world.run(5)
    assert len({peer.address for peer, call in synced.items() if call.is_ok}) < 2, "S3: two states of one revision"
    world.heal()
    world.settle([*calls, *synced.values()])
    check_agreement(calls)


@pytest.mark.parametrize("cut_ms", CUTS_MS)
@pytest.mark.parametrize("notice_ns", [0, limits.HEARTBEAT_TIMEOUT_NS])
def test_nobody_is_lost_whom_a_cut_off_master_holds(
    cut_ms: int, notice_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: the others have found the next master. They wait there until the one that can no longer lead steps down.

    That one notices at once that it is cut off, or only when a silent connection is noticed.
    """
    world, peers = run_at_two("pqr")
    fail_over(world)
    world.run(cut_ms / 1000)
    tell_master = world.tell_master
    monkeypatch.setattr(world, "tell_master", lambda cut: world.after(notice_ns, lambda: tell_master(cut)))
    world.cut(peers[1:], "a")
    world.start_master("b", 500)
    world.run(30)
    assert [peer.address for peer in peers] == ["b"] * 3
    check_members(world, peers)


@pytest.mark.parametrize("delay_ms", [0, 20, 100, 400, 700, 2000])
def test_hole2_revoked(delay_ms: int) -> None:
    """S3: a master does not count a peer whose key it no longer allows. The other master may still lead that peer."""
    world, peers = run_at_two("pqr", {"p": "KEY-OF-P"})
    p, q, r = peers
    world.run(1)
    world.cut([p, r], "a")
    world.run(delay_ms / 1000)
    world.revoke("a", p)
    world.run(20)
    world.check_one_leads()
    world.revoke("b", p)
    world.run(20)
    world.heal()
    world.settle([p.reduce()])
    world.until(lambda: p.state is State.CLOSED, what="p is out")
    world.until(lambda: world.check_one_leads().member_names in ("qr", "rq"), what="q and r go on")
    check_members(world, [q, r])


@pytest.mark.parametrize("delay_ms", range(200, 12_000, 200))
def test_hole3_held(delay_ms: int) -> None:
    """S3: a newcomer that waits at a master and has promised it nothing does not count for its quorum.

    x is a member by a list that it has not received. Its connection to a breaks for a moment. x asks b, that connection
    breaks too, and x is back at a; then q loses a. x asks b between 0.2 and 12 s after p has come there.
    """
    world, peers = run_at_two("pq")
    p, q = peers
    a = world.masters["a"]
    x = world.newcomer("c", TWO)  # Its id is the lowest but for p's and q's: with q it is the half that counts.
    world.drop_to_peers.add(x.name)
    voted = [peer.topology(TopologyKind.UPDATE) for peer in peers]
    world.settle(voted)
    world.run(0.1)
    assert x.state is State.PENDING
    assert a.member_names == "pqc"
    world.drop_to_peers.clear()
    world.drop_to_peers.add(x.name)
    world.cut([p], "a")
    world.until(lambda: p.address == "b" and p.connection is not None)
    world.run(delay_ms / 1000)
    world.drop_to_peers.clear()
    world.cut([x], "a")
    world.until(lambda: x.address == "b" and x.connection is not None, 12, what="x asks b")
    world.run(0.05)
    world.join([x], "a")
    world.cut([x], "b")
    world.run(2)
    world.cut([q], "a")
    world.run(30)
    world.check_one_leads()
    world.heal()
    world.run(30)
    world.check_one_leads()
    left = [peer for peer in (p, q, x) if not isinstance(peer.machine.error, Kicked)]
    if len(left) == 1:  # x came back to a in time, so p was removed, and of q and x, x is the half that counts.
        assert [peer.state for peer in left] == [State.MEMBER]
    else:
        check_members(world, left)


@pytest.mark.parametrize("salt", [1, 500, 2000, 4000])
def test_a_promise_to_another_leadership_is_reported(salt: int) -> None:
    """S3: a peer that comes back from another leadership is asked for a report, not merely welcomed.

    a leads; all of its members go to b, which leads; b dies, and all come back to a. a still believes that it leads.
    The peers come with a higher promise than that of a, or with a lower one.
    """
    world, peers = run_at_two("pqr")
    fail_over(world)
    world.cut(peers, "a")
    world.start_master("b", salt)
    world.until(lambda: bool(world.leading()) and world.leading()[0].address == "b", what="b leads")
    world.join(peers, "a")
    for peer in peers:
        peer.sent.clear()
    world.kill_master("b")
    world.until(lambda: all(peer.address == "a" and peer.connection is not None for peer in peers))
    world.run(15)
    for peer in peers:
        assert any(isinstance(message, RunReport) for message in peer.sent), f"{peer.name} was not asked for a report"
    check_members(world, peers)


@pytest.mark.parametrize("first_salt", [77, 1500, 4000])
def test_rolling_restart(first_salt: int) -> None:
    """L3, S3: two masters are restarted in turn, every 3 s; no call fails, and each call has one outcome."""
    world = two_masters((first_salt, 4001 - first_salt))
    peers = world.begin_run("pqr", TWO)
    calls: dict[Peer, list[Call]] = {peer: [] for peer in peers}
    is_over = False

    def train(peer: Peer) -> None:
        if not is_over and (not calls[peer] or calls[peer][-1].has_ended):
            calls[peer].append(peer.reduce())
        world.after(50 * MS, lambda: train(peer))

    for peer in peers:
        train(peer)
    for step in range(12):
        address = TWO[step % 2]
        world.kill_master(address)
        world.run(0.7)
        world.start_master(address, 1 + (first_salt + step * 1237) % 4000)
        world.run(2.3)
    world.run(15)
    steps = min(len(made) for made in calls.values())
    is_over = True
    for made in calls.values():
        world.settle(made[:steps])
    for step in range(steps):
        check_agreement(made[step] for made in calls.values())
    assert all(call.is_ok for made in calls.values() for call in made[:steps])
    assert steps > 20, steps
    world.check_one_leads()
    assert [peer.state for peer in peers] == [State.MEMBER] * 3


@pytest.mark.parametrize("lost", ["p", "r"])
def test_the_lost_learn_of_it(lost: str) -> None:
    """L1: a member is cut off from all masters until the others go on without it. It hears so when it is back."""
    world, peers = run_at_two("pqr")
    gone = next(peer for peer in peers if peer.name == lost)
    rest = [peer for peer in peers if peer is not gone]
    for address in TWO:
        world.cut([gone], address)
    call = gone.reduce()
    world.run(20)
    check_members(world, rest)
    world.heal()
    world.settle([call])
    assert isinstance(call.result, Kicked)
    assert call.ended_ns is not None
    assert call.ended_ns < world.now_ns + SECOND


def test_a_pending_peer_that_no_master_leads_gives_up() -> None:
    """L2: a master steps down and sends the peer on: no connection breaks. It waits no longer than for a broken one."""
    world, members = run_at_two("pq")
    pending = world.peer("r", TWO)
    call = pending.connect()
    world.until(lambda: pending.state is State.PENDING)
    world.cut([pending], "b")
    world.cut(members, "a")
    world.until(lambda: pending.address == "b")
    world.cut([pending], "a")
    world.settle([call], 10 + limits.MASTER_TIMEOUT_NS / SECOND)
    assert isinstance(call.result, MasterUnreachable)
    check_members(world, members)


def test_an_admission_that_no_quorum_knew_of_comes_to_nothing() -> None:
    """L3: only the newcomer knew of it. The run goes on without it, and it waits to be admitted again."""
    world, members = run_at_two("pqr")
    newcomer = world.peer("s", TWO)
    connecting = newcomer.connect()
    world.until(lambda: newcomer.state is State.PENDING)
    world.run(1)  # Its links come up.
    world.filter = lambda peer, message: None if peer in members and isinstance(message, Members) else message
    votes = [peer.topology() for peer in members]
    world.until(lambda: connecting.has_ended, what="the newcomer is admitted")
    world.kill_master("a")
    world.cut([newcomer], "b")
    world.filter = lambda peer, message: message
    world.settle(votes)
    world.join([newcomer], "b")
    call = newcomer.reduce()
    world.settle([call])
    assert isinstance(call.result, TooFewPeers)
    world.admit(members, [newcomer])
    check_members(world, [*members, newcomer])


def test_a_report_that_comes_after_the_others_is_expected() -> None:
    """L2: the connection that it comes on is no stranger's, of which the master takes few bytes."""
    world, _ = one_master("abcde")
    held = world.hold_back(RunReport, "e")
    world.kill_master("m")
    master = world.start_master("m", 900).machine
    world.until(lambda: bool(held) and not master.is_recovering)
    connection, _ = held[-1]
    assert connection.is_up and master.standing(connection.name) is Standing.EXPECTED


@pytest.mark.parametrize("salts", [(4000, 1), (1, 4000)])
def test_a_master_is_not_elected_by_a_member_that_has_left(salts: tuple[int, int]) -> None:
    """S3: p, which was removed long ago, reports its old list and leaves. Then a newcomer may begin a run at that
    master. The newcomer has found no run; meanwhile the members have found the other master, which leads them."""
    world, (p, q, r) = run_at_two("pqr")
    for address in TWO:
        world.cut([p], address)
    world.until(lambda: world.masters["a"].member_names == "qr", what="the removal of p")
    s = world.peer("s", TWO)
    s.connect()
    world.run(2)
    world.admit([q, r], [s])
    for address, salt in zip(TWO, salts, strict=True):
        world.kill_master(address)
        world.cut([q, r, s], address)
        world.start_master(address, salt)
    a = world.masters["a"]
    world.join([p], "a")
    leave_after_a_report(world, p)
    world.run(limits.MINORITY_WAIT_NS / SECOND + 2)
    x = world.peer("x", TWO)
    x.connect()
    may_begin = lambda: any(isinstance(message, Hello) and any(message.begins) for message in x.sent)  # noqa: E731
    world.until(may_begin, what="a newcomer that may begin a run")
    world.join([q, r, s], "b")
    world.until(lambda: not a.machine.is_recovering, what="a leads")
    world.until(lambda: any(m.address == "b" for m in world.leading()), what="b leads")
    world.cut([q], "b")
    world.join([q], "a")
    world.run(10)
    world.check_one_leads()


def test_attempt_ids_go_on_after_2_to_the_32() -> None:
    """S3: in each term, whatever bits its number has."""
    machine = World().start_master("a", 77).machine
    for machine.term in (2, 3):
        machine._attempt_count = 2**32 - 2
        ids = [machine._next_attempt_id() for _ in range(4)]
        assert ids == list(range(ids[0], ids[0] + 4))
