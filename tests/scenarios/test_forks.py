"""S3, L1, L3: members and newcomers that know less than others, or say it late, at a master that takes a run over."""

from __future__ import annotations

from functools import partial

import pytest

from zpccl.limits import MS
from zpccl.protocol.messages import Acknowledgement, MasterMessage, Members, MembersCommitted, PeerMessage, RunReport
from zpccl.protocol.peer import State

from .test_leadership import TWO, two_masters
from .world import Connection, Peer, World


def hold_back(
    world: World, monkeypatch: pytest.MonkeyPatch, what: type, whose: set[str]
) -> list[tuple[Connection, PeerMessage]]:
    """From now on messages of one type from these peers do not arrive; they are kept in the list."""
    send = world.send_to_master
    held: list[tuple[Connection, PeerMessage]] = []

    def send_others(connection: Connection, message: PeerMessage) -> None:
        if isinstance(message, what) and connection.peer.name in whose:
            held.append((connection, message))
        else:
            send(connection, message)

    monkeypatch.setattr(world, "send_to_master", send_others)
    return held


def test_a_pending_peer_tells_of_the_list_that_it_has_acknowledged() -> None:
    """S3: p is admitted without hearing of it, lost, and acknowledges the list without it at master b. Then it comes to
    master a, where one waits that knows the list with p only. They are a quorum of that one.
    """
    world = two_masters()
    a, b = world.begin_run("ab", TWO)
    p = world.peer("p", TWO)
    p.connect()
    world.until(lambda: p.state is State.PENDING)
    world.run(0.5)
    world.drop_to_peers.add("p")
    world.settle([peer.topology() for peer in (a, b)])
    world.run(0.1)
    assert world.masters["a"].member_names == "abp" and world.masters["a"].machine.registry.is_committed
    world.cut([p], "a")
    world.drop_to_peers = {"b"}  # It does not hear of the list without p.
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
def test_a_newcomer_that_reports_late_does_not_change_the_list_too_early(
    join_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: n is asked by the candidate, and its report comes after the take-over, before the first list is committed.

    The adopted list abcde is committed, as d alone knows. So a list with n needs its quorum, and not that of ab, its
    old members: c, d and e may follow another master.
    """
    world = two_masters()
    ab = world.begin_run("ab", TWO)
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
    send = world.send_to_master
    held = hold_back(world, monkeypatch, RunReport, {"n"})
    world.until(lambda: other.machine.candidate is not None and len(other.machine.candidate.reports) == 3)
    world.run(join_ms / 1000)
    world.join([n], "a")
    world.until(lambda: not other.machine.is_recovering, 10, what="a adopts the run")
    assert other.member_names == "abcde" and held[-1][0].is_up
    monkeypatch.undo()
    world.after(20 * MS, lambda: send(*held[-1]))
    world.cut([c], "a")  # It does not hear who leads.
    world.start_master("b", 700)
    world.run(8)
    world.check_one_leads()


def test_a_member_that_is_back_before_its_loss_counts_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: its network fails for a moment before the list of a take-over is committed. Nobody would tell it."""
    world = two_masters()
    a, b, c = world.begin_run("abc", TWO)
    send = world.send_to_master
    held = hold_back(world, monkeypatch, Acknowledgement, {"a", "b"})
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
    monkeypatch.undo()
    for connection, message in held:
        send(connection, message)
    world.settle([call, a.topology(), b.topology()], 60)


def test_a_report_whose_sender_is_gone_is_answered_to_nobody() -> None:
    """L3: one address. A removed member reports to the next master, and its process ends."""
    world = World()
    world.start_master("m", 77)
    peers = world.begin_run("abx", ("m",))
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
