"""S1: the master ends calls that wait for each other, while the peers commit one of these calls themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zpccl import limits
from zpccl.errors import InvalidUsage, PCCLError
from zpccl.limits import MS, SECOND
from zpccl.protocol import effects, events
from zpccl.protocol.master import MasterOptions
from zpccl.protocol.messages import PeerMessage, Report, RunReport
from zpccl.protocol.peer import State

from .digests import TellingWorld, give_up
from .world import Call, Connection, Master, Peer, one_master, reduce_spec

TIMEOUT_NS = 2 * SECOND
OPTIONS = MasterOptions(straggler_timeout_ns=TIMEOUT_NS)


def run_of(names: str, masters: tuple[str, ...], options: MasterOptions = OPTIONS) -> tuple[TellingWorld, list[Peer]]:
    """A run whose members have called tag 0, and have plans ahead for it."""
    world = TellingWorld()
    for salt, address in enumerate(masters):
        world.start_master(address, 77 + salt, options)
    peers = world.begin_run(names, masters)
    world.settle([peer.reduce(reduce_spec(0)) for peer in peers])
    world.run(0.5)
    return world, peers


def slow_down(world: TellingWorld, monkeypatch: pytest.MonkeyPatch, whose: str, delay_ns: int) -> None:
    """From now on messages from these peers take longer."""
    send = world.send_to_master

    def send_slowly(connection: Connection, message: PeerMessage) -> None:
        if connection.peer.name in whose:
            world.after(delay_ns, lambda: send(connection, message))
        else:
            send(connection, message)

    monkeypatch.setattr(world, "send_to_master", send_slowly)


@pytest.mark.parametrize("masters", [("m",), ("a", "b")], ids=["one address", "two masters"])
@pytest.mark.parametrize("early_ms", [-6, -3, 2, 6, 20])
def test_calls_are_ended_while_one_comes_for_which_others_wait(early_ms: int, masters: tuple[str, ...]) -> None:
    """b calls tag 0 shortly before or after the master ends the calls. Each way takes 5 ms; the master asks first."""
    world, (a, b, c) = run_of("abc", masters)
    zero = [a.reduce(reduce_spec(0)), c.reduce(reduce_spec(0))]  # They start ahead and wait for b.
    nine = b.reduce(reduce_spec(9))
    world.run((TIMEOUT_NS + 5 * MS - early_ms * MS) / SECOND)
    zero.append(b.reduce(reduce_spec(0)))
    world.run(0.5)
    assert all(peer.state is State.MEMBER for peer in (a, b, c))
    if early_ms > -5:
        assert [call.result for call in zero] == [7, 7, 7] and not nine.has_ended
    else:
        assert all(isinstance(call.result, InvalidUsage) for call in (*zero[:2], nine)) and not zero[2].has_ended


@pytest.mark.parametrize("masters", [("m",), ("a", "b")], ids=["one address", "two masters"])
def test_calls_that_wait_for_each_other_end(masters: tuple[str, ...]) -> None:
    """L1: all of them end, though some have started ahead. Nobody is removed."""
    world, (a, b, c) = run_of("abc", masters)
    calls = [a.reduce(reduce_spec(0)), c.reduce(reduce_spec(0)), b.reduce(reduce_spec(9))]
    world.settle(calls, 3)
    assert all(isinstance(call.result, InvalidUsage) for call in calls)
    again = [peer.reduce(reduce_spec(0)) for peer in (a, b, c)]
    world.settle(again)
    assert [call.result for call in again] == [7, 7, 7]


def replace_master(world: TellingWorld, peers: list[Peer], masters: tuple[str, ...]) -> Master:
    """Kills the master. Returns the next one, which does not lead yet, once all peers have sent it their reports."""
    world.kill_master(masters[0])
    world.run(0.1)
    master = world.start_master("m", 900) if len(masters) == 1 else world.masters[masters[1]]
    world.until(lambda: all(any(isinstance(m, RunReport) for m in peer.sent) for peer in peers))
    assert master.machine.is_recovering
    return master


def check_next_calls(world: TellingWorld, peers: list[Peer], names: str, first: list[Call]) -> None:
    """Some make the next call, the others a while later; all calls have their sums, and nobody has left."""
    second = [peer.reduce() for peer in peers if peer.name in names]
    world.run(0.3)
    second += [peer.reduce() for peer in peers if peer.name not in names]
    world.settle(second)
    assert [call.result for call in (*first, *second)] == [7] * 6
    assert all(peer.state is State.MEMBER for peer in peers)


@pytest.mark.parametrize("masters", [("m",), ("a", "b")], ids=["one address", "two masters"])
@pytest.mark.parametrize("next_calls", ["b", "c", "bc", "abc"])
def test_a_call_that_follows_a_commit_is_said_after_it_to_a_new_master(
    next_calls: str, masters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: all have reported before they commit a call, and make the next one before they hear that a new master leads.

    The new master has dropped the votes for the first call, as it did not lead yet. So it would mistake the next call
    for the first one.
    """
    world, peers = run_of("abc", masters)
    slow_down(world, monkeypatch, "a", 40 * MS)  # Its report is the last.
    master = replace_master(world, peers, masters)
    first = [peer.reduce() for peer in peers]
    world.settle(first, 4 * MS / SECOND)
    world.until(lambda: not master.machine.is_recovering)
    check_next_calls(world, peers, next_calls, first)


@pytest.mark.parametrize("follows", ["sync", "reduce"])
def test_who_has_no_digest_yet_gets_what_another_returned_before_it_went_on(
    follows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: the same, while the digests of the first call are on their way to c, which has not returned.

    The master would mistake a sync for one that waits for the first call, and refuse that call. With a further
    reduction it would plan the first one of c with the next ones of the others.
    """
    world, peers = run_of("abc", ("m",))
    a, b, c = peers
    slow_down(world, monkeypatch, "b", 40 * MS)
    master = replace_master(world, peers, ("m",))
    held: list[events.PeerEvent] = []
    handle = c.handle
    late = events.DigestReceived
    monkeypatch.setattr(c, "handle", lambda event: held.append(event) if isinstance(event, late) else handle(event))
    first = [peer.reduce() for peer in peers]
    world.settle(first[:2], 4 * MS / SECOND)
    world.until(lambda: not master.machine.is_recovering)
    second = [b.sync(1, "x") if follows == "sync" else b.reduce()]
    world.run(0.3)
    for event in held:
        handle(event)
    second += [peer.sync(1, "x") if follows == "sync" else peer.reduce() for peer in (a, c)]
    world.settle(second)
    assert [call.result for call in first] == [7, 7, 7] and all(call.is_ok for call in second)
    assert all(peer.state is State.MEMBER for peer in peers)


@pytest.mark.parametrize("masters", [("m",), ("a", "b")], ids=["one address", "two masters"])
def test_a_peer_is_welcomed_on_another_connection_than_it_has_promised_on(
    masters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: b loses its connection once it has committed a call, and makes the next call before it is welcomed."""
    world, peers = run_of("abc", masters)
    b = peers[1]
    slow_down(world, monkeypatch, "a", 400 * MS)  # Its report is the last.
    master = replace_master(world, peers, masters)
    first = [peer.reduce() for peer in peers]
    world.settle(first, 4 * MS / SECOND)
    b.lose_connection()
    world.until(lambda: not b.machine.is_led and b.connection is None)
    world.until(lambda: b.connection is not None)
    world.until(lambda: not master.machine.is_recovering)
    check_next_calls(world, peers, "b", first)


@pytest.mark.parametrize("goes_on", ["a", "b", "ab"])
def test_a_master_steps_down_and_leads_again_on_the_same_connections(
    goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: c has promised another master its term and comes back. All commit a call before they are welcomed again."""
    world, peers = run_of("abc", ("a", "b"), MasterOptions(disconnect_grace_ns=20 * SECOND))
    a, _, c = peers
    master = world.masters["a"]
    world.cut([c], "a")
    world.until(lambda: any(isinstance(m, RunReport) for m in c.sent))
    world.heal()
    world.until(lambda: master.machine.is_recovering)
    slow_down(world, monkeypatch, "c", 40 * MS)  # Its report is the last.
    connection, term = a.connection, a.machine.term
    world.until(lambda: all(isinstance(peer.sent[-1], RunReport) for peer in peers))
    assert master.machine.is_recovering
    first = [peer.reduce() for peer in peers]
    world.settle(first, 4 * MS / SECOND)
    world.until(lambda: not master.machine.is_recovering)
    check_next_calls(world, peers, goes_on, first)
    assert a.connection is connection and a.machine.term > term


def test_a_vote_is_under_way_for_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages from b to the master are delayed, and all three have long committed."""
    world, (a, b, c) = run_of("abc", ("m",))
    b.reduce(reduce_spec(9))
    world.run(0.1)
    slow_down(world, monkeypatch, "b", 3 * SECOND)
    zero = [peer.reduce(reduce_spec(0)) for peer in (a, b, c)]
    world.run(0.1)
    assert [call.result for call in zero] == [7, 7, 7]
    world.run(4)
    assert all(peer.state is State.MEMBER for peer in (a, b, c))


@pytest.mark.parametrize("masters", [("m",), ("a", "b")], ids=["one address", "two masters"])
@pytest.mark.parametrize("far_ms", [0, 20])
def test_calls_that_wait_for_each_other_end_where_others_are_far(
    masters: tuple[str, ...], far_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: the others wait for b and c, which are near the master; the rest of the quorum is 20 ms farther away."""
    world, (a, b, c, d, e) = run_of("abcde", masters)
    slow_down(world, monkeypatch, "ade", far_ms * MS)
    calls = [call for peer in (a, d, e) for call in peer.batch(reduce_spec(0), reduce_spec(9))]
    calls += [b.reduce(reduce_spec(0)), c.reduce(reduce_spec(9))]
    world.settle(calls, 10)
    assert all(isinstance(call.result, InvalidUsage) for call in calls)


@pytest.mark.parametrize(
    ("masters", "dies"),
    [(("m",), False), (("a", "b"), False), (("m",), True)],
    ids=["a vote is late", "the same with two masters", "the master dies"],
)
def test_a_timeout_ends_the_call_of_who_is_bound_to_an_attempt_that_another_gave_up(
    masters: tuple[str, ...], dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: c gives up before it has told its digest and before the master has all votes, and makes no further call yet.

    a and b have told their digests, so the master releases them once it knows that c will not commit the attempt.
    """
    world, (a, b, c) = run_of("abc", masters)
    if dies:
        world.kill_master(masters[0])
        world.run(0.2)
    else:
        slow_down(world, monkeypatch, "b", 40 * MS)
    calls = [peer.reduce(reduce_spec(0)) for peer in (c, a, b)]
    world.run(0.0005)
    give_up(c, calls[0])
    world.run(0.3)
    if dies:
        world.start_master(masters[0], 900)
    world.run(1.5)
    assert calls[0].has_ended and not calls[1].has_ended and not calls[2].has_ended
    give_up(a, calls[1])
    world.settle(calls[1:2], 2)
    assert not calls[2].has_ended
    again = [peer.reduce(reduce_spec(0)) for peer in (c, a)]
    world.settle([calls[2], *again], 2)
    assert [call.result for call in (calls[2], *again)] == [7, 7, 7]
    assert all(peer.state is State.MEMBER for peer in (a, b, c))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_result_that_differs_counts_though_its_peer_dies_before_it_reports(is_ahead: bool) -> None:
    """S1: b has told a its digest. One of the two results is wrong, and nobody knows which one."""
    world, (a, b) = one_master("ab", TellingWorld)
    for _ in range(is_ahead):
        world.settle([a.reduce(), b.reduce()])
        world.run(0.5)
    call = a.reduce()
    b.reduce()
    world.until(lambda: bool(a.running and b.running))
    b.running = dict.fromkeys(b.running, 99)
    b.lose_connection()
    world.run(0.006)
    world.kill_peer(b)
    world.settle([call])
    assert not call.is_ok and a.state is State.MEMBER


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("refusals", [10, 30])
def test_refused_calls_do_not_push_out_what_a_member_that_is_away_must_hear(
    refusals: int, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: b and c have returned; a was cut off before the decision. Meanwhile calls of b and c are refused.

    The bounds are those of a large group: with 2,048 members 40 outcomes are kept.
    """
    monkeypatch.setattr(limits, "CALLS_NAMED_MAX", 3 * 16)
    monkeypatch.setattr(limits, "COMMIT_PEERS_MAX", 2)
    world, (a, b, c) = one_master("abc", TellingWorld)
    if is_ahead:
        world.settle([peer.reduce() for peer in (a, b, c)])
        world.run(0.5)
        a.sent.clear()
    first = [peer.reduce() for peer in (a, b, c)]
    world.until(lambda: any(isinstance(m, Report) for m in a.sent))
    world.run(0.007)
    world.cut([a], "m")
    world.settle(first[1:])
    for _ in range(refusals):
        calls = [b.sync(1, "x"), c.reduce(reduce_spec(9))]
        world.settle(calls)
        assert all(isinstance(call.result, PCCLError) for call in calls)
    assert a.state is State.MEMBER and b.member_names == "abc"
    world.kill_master("m")
    world.run(0.1)
    world.start_master("m", 900)
    world.heal()
    if is_ahead:
        world.run(3)
        second = [peer.reduce() for peer in (b, c)]
        world.run(3)
        assert not any(call.has_ended for call in second), "the first call of a ran with the second ones of the others"
    world.settle(first)
    assert [call.result for call in first] == [7, 7, 7]


@pytest.mark.parametrize("lost", ["plan", "decision"])
def test_all_end_an_attempt_that_others_have_started_ahead(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: c loses its connection with a message that plans ahead, and gets that message again without these plans.

    a and b start one of them later. c has never heard of it, so its engine would keep what they have sent it.
    """
    world, peers = one_master("abc", TellingWorld)
    c = peers[-1]
    started: set[int] = set()
    ended: set[int] = set()
    for peer in peers:
        perform = peer._perform

        def note(effect: effects.PeerEffect, peer: Peer = peer, perform: Callable[..., None] = perform) -> None:
            if isinstance(effect, effects.StartReduce):
                (ended if peer is c else started).add(effect.attempt_id)
            if isinstance(effect, effects.EndReduce) and peer is c:
                ended.add(effect.attempt_id)
            perform(effect)

        monkeypatch.setattr(peer, "_perform", note)
    if lost == "decision":
        world.settle([peer.reduce() for peer in peers])
        world.run(0.5)
    calls = [peer.reduce() for peer in peers]
    world.run(0.0075 if lost == "plan" else 0.009)  # It is on its way to c.
    c.lose_connection()
    world.settle(calls)
    world.run(1)
    for _ in range(20):
        calls = [peer.reduce() for peer in peers]
        world.settle(calls)
        world.run(0.05)
        assert [call.result for call in calls] == [7, 7, 7]
    assert all(peer.state is State.MEMBER for peer in peers)
    assert started <= ended, f"c keeps the frames of attempts {sorted(started - ended)}"
