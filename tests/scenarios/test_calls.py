"""L1, S1: calls end, with one outcome, despite broken paths, the users' own calls, limits, or the master's death."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import CollectiveMismatch, InvalidUsage, Kicked, OperationTimeout, PCCLError, Result, TooFewPeers
from zpccl.limits import SECOND
from zpccl.protocol.master import MasterOptions
from zpccl.protocol.messages import Decision, MasterMessage, Member, Members, Plan, Reducing, RunReport, encode
from zpccl.protocol.peer import State
from zpccl.types import CollectiveKind

from .digests import give_up
from .world import Call, Peer, World, check_agreement, one_master, reduce_spec, results_of


def start(names: str, masters: tuple[str, ...] = ("m",), **options: Any) -> tuple[World, list[Peer]]:
    world = World()
    for number, address in enumerate(masters):
        world.start_master(address, 77 + 900 * number, MasterOptions(**options))
    return world, world.begin_run(names, masters)


@pytest.mark.parametrize("masters", [("m",), ("a", "b")])
@pytest.mark.parametrize("names", ["pz", "zp"])
def test_hole4_two_members_without_a_path(names: str, masters: tuple[str, ...]) -> None:
    """L1: the path between two members is gone for good: one is removed, the other gets an error that it is alone.

    This holds whichever of them joined first, with and without standbys.
    """
    world, (one, other) = start(names, masters)
    world.break_link(one, other)
    world.run(1)
    calls = [one.reduce(), other.reduce()]
    world.settle(calls)
    assert {type(call.result) for call in calls} == {Kicked, TooFewPeers}, calls


def wait_crosswise(world: World, peers: list[Peer], is_batched: bool) -> tuple[list[Call], list[Call]]:
    """Members call all-reduces of different tags: some calls can end, the others wait for each other."""
    tags: dict[str, tuple[int, ...]] = {"p": (11,), "q": (12,), "r": (11,)}
    if is_batched:
        tags = {"p": (11, 12), "q": (12, 13), "r": (11, 12, 13)}
    fine: list[Call] = []
    stuck: list[Call] = []
    for peer in peers:
        own = tags[peer.name]
        for tag, call in zip(own, peer.batch(*map(reduce_spec, own)), strict=True):
            (fine if is_batched and tag == 12 else stuck).append(call)
    return fine, stuck


@pytest.mark.parametrize("is_batched", [False, True])
def test_hole5_who_waits_crosswise_is_named(is_batched: bool) -> None:
    """L1: the log names peers that wait for each other in collectives of different tags within 10 s."""
    world, peers = start("pqr")
    fine, stuck = wait_crosswise(world, peers, is_batched)
    began_ns, master = world.now_ns, world.masters["m"]
    world.run(10.5)
    assert all(call.is_ok for call in fine), fine
    text = "\n".join(line for at_ns, line in master.log if at_ns >= began_ns)
    for name in ("p", "q", "r", "11", "13" if is_batched else "12"):
        assert name in text.replace(",", " ").replace(":", " ").split(), f"{name} is not named: {text}"
    assert not any(call.has_ended for call in stuck)


@pytest.mark.parametrize("is_batched", [False, True])
def test_hole5_a_timeout_ends_calls_that_wait_crosswise(is_batched: bool) -> None:
    """L1: with straggler_timeout the calls end, with an error that says who waits in which collective."""
    world, peers = start("pqr", straggler_timeout_ns=20 * SECOND)
    fine, stuck = wait_crosswise(world, peers, is_batched)
    world.settle([*fine, *stuck], 30)
    assert all(call.is_ok for call in fine), fine
    for call in stuck:
        assert isinstance(call.result, PCCLError)
        words = str(call.result).replace(",", " ").replace(":", " ").split()
        named = {"p", "q", "r"}.intersection(words)
        assert named - {call.peer.name}, f"{call} names nobody else"
        assert {"11", "12", "13"}.intersection(words), f"{call} names no tag"


def call_up_to_the_limit(peer: Peer, count: int) -> list[Call]:
    """Makes `count` all-reduces, a few at a time. A refused one is refused because there are too many."""
    tags = range(count)
    calls = [call for at in tags[::8] for call in peer.batch(*map(reduce_spec, tags[at : at + 8]))]
    refused = [call for call in calls if call.has_ended]
    assert all(isinstance(call.result, InvalidUsage) for call in refused), refused
    return calls


@pytest.mark.parametrize("count", [64, 600])
def test_hole6_no_commit_is_forgotten(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: whatever was committed for one survivor is committed for all, however many calls were in flight.

    There are four members; the bounds are set so that they bind these as the real ones bind 256. p misses all
    decisions, q hears of all; then the master and the other two are gone.
    """
    for name in ("OUTCOME_CALLS_KEPT_MAX", "CALLS_NAMED_MAX"):
        monkeypatch.setattr(limits, name, 131_072 // 64, raising=False)
    world, (p, q, r, s) = start("pqrs")
    world.validates = count < 100
    calls = {peer: call_up_to_the_limit(peer, count) for peer in (p, q, r, s)}
    world.until(lambda: bool(p.running) and bool(q.running))
    world.run(0.01)
    world.drop_to_peers.add("p")
    world.run(1)
    assert sum(call.is_ok for call in calls[q]) >= 64
    for peer in (r, s):
        world.kill_peer(peer)
    world.kill_master("m")
    world.run(1)
    world.drop_to_peers.clear()
    world.start_master("m", 500)
    world.settle([*calls[p], *calls[q]], 90)
    lost = [pair for pair in zip(calls[p], calls[q], strict=True) if pair[0].result != pair[1].result]
    lost = [pair for pair in lost if not all(isinstance(call.result, InvalidUsage) for call in pair)]
    assert not lost, f"S1: {len(lost)} commits are lost, such as {lost[0]}"


@pytest.mark.parametrize(("size", "is_committed"), [(256, True), (512, False), (1024, True)])
def test_hole6b_the_largest_report_fits_a_message(size: int, is_committed: bool) -> None:
    """L3: a peer of a large group, with the maximum of calls in flight and of ended calls, can report to a new master.

    Two members are real; messages from the master to them are changed as if there were many more, with long names.
    """
    world, peers = start("pq")
    ids = tuple(peer.peer_id for peer in peers) + tuple(f"{i:016d}".encode() for i in range(size - 2))
    members = tuple(Member(peer_id, 0, f"{i:0128d}") for i, peer_id in enumerate(ids))

    def enlarge(peer: Peer, message: MasterMessage) -> MasterMessage:
        if isinstance(message, Members):
            return replace(message, members=members)
        if isinstance(message, Plan) and isinstance(message.how, Reducing):
            how = replace(message.how, order=ids)
            return replace(message, how=how, calls=message.calls + (2**31,) * (size - 2))
        if isinstance(message, Decision) and not is_committed:
            return replace(message, result=Result.RANK_CONNECTION_LOST, reason="x" * limits.TEXT_CHARS_MAX)
        return message

    world.filter = enlarge
    world.kill_master("m")
    world.start_master("m", 400)
    world.until(lambda: all(len(peer.machine.members) == size for peer in peers), what="the list is the long one")
    world.validates = False  # Validation takes time for each call in flight.
    world.settle(call for peer in peers for call in call_up_to_the_limit(peer, limits.CALLS_IN_FLIGHT_MAX))
    for peer in peers:
        peer.finishes = False
        call_up_to_the_limit(peer, limits.CALLS_IN_FLIGHT_MAX)
        peer.sent.clear()
    world.run(1)
    assert peers[0].running
    world.kill_master("m")
    world.start_master("m", 3000)
    world.until(lambda: any(isinstance(message, RunReport) for peer in peers for message in peer.sent))
    sizes = [len(encode(m)) for peer in peers for m in peer.sent if isinstance(m, RunReport)]
    assert max(sizes) <= limits.MESSAGE_BYTES_MAX, f"a report of {max(sizes)} bytes"


def test_hole7c_death_between_two_refusals() -> None:
    """L1, S1: two calls do not fit, and the master dies when one peer has heard so. The other gets the same error."""
    world, (p, q) = start("pq")
    world.drop_to_peers.add("q")
    calls = [p.reduce(reduce_spec(1, 8)), q.reduce(reduce_spec(1, 9))]
    world.run(0.1)
    assert isinstance(calls[0].result, CollectiveMismatch)
    world.kill_master("m")
    world.drop_to_peers.clear()
    world.run(0.5)
    world.start_master("m", 500)
    world.settle(calls)
    first, second = results_of(calls)
    assert isinstance(second, CollectiveMismatch), second
    assert (first.tag, first.field, first.values) == (second.tag, second.field, second.values)
    assert [peer.state for peer in (p, q)] == [State.MEMBER] * 2
    again = [p.reduce(reduce_spec(1)), q.reduce(reduce_spec(1))]
    world.settle(again)
    check_agreement(again)
    assert all(call.is_ok for call in again)


@pytest.mark.parametrize("sends", range(8))
@pytest.mark.parametrize("masters", [("m",), ("a", "b")])
def test_death_between_two_sends(sends: int, masters: tuple[str, ...]) -> None:
    """S1, L3: the master dies after its first, second, ... message on an all-reduce: it runs again, or ends for all."""
    world, peers = start("pqr", masters)
    calls = [peer.reduce() for peer in peers]
    world.masters[masters[0]].sends_left = sends
    world.until(lambda: masters[0] not in world.masters, 2, what="the master has died") if sends < 6 else world.run(2)
    world.run(0.3)
    if masters[0] not in world.masters:
        world.start_master(masters[0], 500)
    world.settle(calls)
    assert [call.result for call in calls] == [7] * 3


@pytest.mark.parametrize("is_late", [False, True], ids=["all come back", "one of another group is late"])
def test_a_call_that_is_given_up_without_a_master_costs_nobody_its_place(is_late: bool) -> None:
    """L1, B2: p has its part of a broadcast and gives the call up while there is no master.

    The next master hears that p gave up before it hears of the results, and does not wait for peers of another group: a
    commit would put p out of the run.
    """
    world, (p, q, *others) = one_master("pq")
    for name in "xyz":  # So that the next master adopts the run when one of the five is missing.
        others.append(world.peer(name, ("m",), group=1))
        others[-1].connect()
        world.until(lambda: others[-1].state is State.PENDING)
        world.admit([p, q, *others[:-1]], others[-1:])
    p.finishes = q.finishes = False
    calls = [peer.reduce(replace(reduce_spec(), kind=CollectiveKind.BROADCAST, is_root=peer is p)) for peer in (p, q)]
    world.until(lambda: bool(p.running and q.running))
    world.kill_master("m")
    world.run(0.1)
    p.finish()
    q.finish()
    give_up(p, calls[0])
    world.run(2.5)
    assert isinstance(calls[0].result, OperationTimeout)
    if is_late:
        world.cut(others[:1], "m")
    world.start_master("m", 900)
    world.run(2.5)
    world.join(others[:1], "m")
    world.settle(calls)
    world.run(5)
    assert [peer.state for peer in (p, q, *others)] == [State.MEMBER] * 5
    check_agreement(calls)


def test_a_late_participant_gets_the_plan_of_a_former_master_first() -> None:
    """L3: its engine would drop what others have sent it for an attempt so far behind one of a later term."""
    world, peers = start("abc")
    a, b, c = peers
    for peer in peers:
        peer.finishes = False
    calls = b.batch(reduce_spec(7)) + b.batch(reduce_spec(0))
    world.filter = lambda peer, message: None if peer is b and isinstance(message, Plan) else message
    calls += a.batch(reduce_spec(0)) + c.batch(reduce_spec(0))
    world.until(lambda: bool(a.running and c.running))
    world.cut([b], "m")
    world.kill_master("m")
    world.filter = lambda _, message: message
    calls += a.batch(reduce_spec(7)) + c.batch(reduce_spec(7))
    world.take_over("m", 900)
    world.join([b], "m")
    world.until(lambda: len(b.running) == 2)
    assert list(b.running) == sorted(b.running)
