"""The master: registration, admission, connections, loss of peers, hostile input. Its parts have their own modules."""

from __future__ import annotations

from typing import Any

import pytest

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol import events
from zpccl.protocol.effects import Level, Log
from zpccl.protocol.master import MasterMachine, MasterOptions, with_seen_address
from zpccl.protocol.messages import (
    Decision,
    Hello,
    Kick,
    Leave,
    Linked,
    Member,
    Members,
    Neighbours,
    NeighboursChanged,
    Plan,
    Refusal,
    Refused,
    Report,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)

from .harness import (
    FIRST_ATTEMPT,
    PENDING,
    RING_ONLY,
    RUN_ID,
    UPDATE,
    MasterBench,
    bench_of,
    entry,
    logs,
    member_list,
    neighbour,
    offer,
    pid,
    pids,
    sent,
    spec,
    token,
    topology_vote,
)

WELCOME = Welcome(RUN_ID, 0)
SECOND = limits.SECOND


@pytest.fixture
def bench() -> MasterBench:
    return MasterBench()


# --- Registration ---------------------------------------------------------------------------------------------------


def test_an_empty_run_admits_at_once(bench: MasterBench) -> None:
    assert bench.hello("a") == [
        ("a1", WELCOME),
        ("a1", Neighbours(())),
        ("a1", Members(1, (Member(pid("a"), 0, "a", 1),))),
    ]
    assert (bench.names(), bench.pending()) == ("a", "")


def test_the_second_peer_is_pending(bench: MasterBench) -> None:
    """Of two peers, the one that came later dials."""
    bench.register("a")
    assert bench.hello("b") == [
        ("b1", WELCOME),
        ("b1", Neighbours((neighbour("a", dial=True),))),
        ("a1", NeighboursChanged(joined=(neighbour("b", dial=False, is_member=False),))),
    ]
    assert (bench.names(), bench.pending()) == ("a", "b")


def test_peers_of_other_groups_are_no_neighbours(bench: MasterBench) -> None:
    bench.register("a")
    bench.groups["b"] = 1
    assert bench.hello("b") == [("b1", WELCOME), ("b1", Neighbours(()))]


def test_hello_again_on_the_same_connection(bench: MasterBench) -> None:
    bench.members("ab")
    before = bench.snapshot()
    assert bench.hello_again("b", welcomed=True) == [
        ("b1", WELCOME),
        ("b1", member_list(2, "ab", (1, 2))),
        ("b1", Neighbours((neighbour("a", dial=True),))),
    ]
    assert bench.snapshot() == before


def test_a_connection_belongs_to_one_peer(bench: MasterBench) -> None:
    bench.register("a")
    bench.connections["b"] = "a1"
    ((connection, refused),) = bench.hello_again("b")
    assert connection == "a1"
    assert refused == Refused(Refusal.MALFORMED, "this connection belongs to another peer")
    assert bench.names() == "a"


def test_a_wrong_token_is_refused(bench: MasterBench) -> None:
    """S7: nobody takes over another peer's session."""
    bench.members("ab")
    before = bench.snapshot()
    for welcomed in (False, True):
        connection = f"a{2 + welcomed}"
        assert bench.hello("a", welcomed=welcomed, token=token("x")) == [
            (connection, Refused(Refusal.UNKNOWN_SESSION, "wrong token"))
        ]
    assert bench.snapshot() == before
    assert all("without its token" in log.text for log in bench.logged[-2:])


def test_who_is_member_elsewhere_is_not_registered(bench: MasterBench) -> None:
    ((_, refused),) = bench.hello("a", welcomed=True)
    assert refused.refusal is Refusal.UNKNOWN_SESSION
    assert "came back too late" in refused.reason
    assert bench.names() == ""


@pytest.mark.parametrize(
    "message",
    [
        Linked(()),
        Leave(),
        Votes(0, (Vote(1, spec()),)),
        topology_vote(0, 1, UPDATE),
        offer(1, 0),
        Withdraw(1),
        Report(1, 1, True),
    ],
)
def test_who_did_not_say_hello_is_told_to(bench: MasterBench, message: Any) -> None:
    bench.members("ab")
    before = bench.snapshot()
    effects = bench.handle(events.PeerMessageReceived("stranger", message))
    assert sent(effects) == [("stranger", Refused(Refusal.UNREGISTERED, "send a Hello first"))]
    assert bench.snapshot() == before


@pytest.mark.parametrize(
    "message", [Votes(0, (Vote(1, spec()),)), topology_vote(0, 1, UPDATE), offer(1, 0), Withdraw(1)]
)
def test_pending_peers_cannot_call(bench: MasterBench, message: Any) -> None:
    """S6. Flaky, seed 585091, L1: a peer that took itself for a member was removed; it read of its admission too
    late."""
    bench.members("ab")
    bench.register("j")
    before = bench.snapshot()
    ((connection, refused),) = bench.say("j", message)
    assert (connection, refused.refusal) == ("j1", Refusal.UNKNOWN_SESSION)
    assert bench.snapshot() == before


def test_the_bound_of_pending_peers(bench: MasterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    monkeypatch.setattr(limits, "PENDING_PEERS_MAX", 2)
    bench.members("a")
    bench.register("bc")
    assert bench.hello("d") == [("d1", Refused(Refusal.FULL, "the run takes no more peers"))]
    assert bench.pending() == "bc"
    bench.leave("b")
    bench.hello("d")
    assert bench.pending() == "cd"


def test_the_bound_of_all_peers(bench: MasterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    monkeypatch.setattr(limits, "PEERS_MAX", 2)
    bench.members("ab")
    assert bench.hello("c") == [("c1", Refused(Refusal.FULL, "the run takes no more peers"))]


def test_the_address_that_the_master_sees(bench: MasterBench) -> None:
    bench.register("a")
    bench.hello("b", seen="10.0.0.9", addresses=("192.168.0.2:50000",))
    assert bench.peer("b").addresses == ("192.168.0.2:50000", "10.0.0.9:50000")


@pytest.mark.parametrize(
    "addresses, host, expected",
    [
        ((), "1.2.3.4", ()),
        (("h:5",), "", ("h:5",)),
        (("h:5",), "1.2.3.4", ("h:5", "1.2.3.4:5")),
        (("1.2.3.4:5", "h:5"), "1.2.3.4", ("1.2.3.4:5", "h:5")),
        (("h:5", "172.17.0.1:5", "1.2.3.4:5"), "1.2.3.4", ("h:5", "1.2.3.4:5", "172.17.0.1:5")),
        (("[::1]:5",), "fe80::1", ("[::1]:5", "[fe80::1]:5")),
        (("h:5",) * 8, "1.2.3.4", ("h:5", "1.2.3.4:5", *("h:5",) * 6)),
    ],
)
def test_with_seen_address(addresses: tuple[str, ...], host: str, expected: tuple[str, ...]) -> None:
    assert with_seen_address(addresses, host) == expected


# --- Admission ------------------------------------------------------------------------------------------------------


def test_admission_when_linked_both_ways(bench: MasterBench) -> None:
    """S3: all members get the list of the new epoch before their call returns."""
    bench.register("ab")
    assert bench.vote("a", UPDATE, 1) == []
    assert bench.say("b", Linked(pids("a"))) == []
    assert bench.say("a", Linked(pids("b"))) == [
        ("a1", member_list(2, "ab", (1, 2))),
        ("b1", member_list(2, "ab", (1, 2))),
        ("a1", Decision(1, Result.SUCCESS, value=1)),
    ]
    assert (bench.names(), bench.pending()) == ("ab", "")


def test_update_waits_for_links_for_a_while_only(bench: MasterBench) -> None:
    bench.register("ab")
    bench.vote("a", UPDATE, 1)
    bench.say("b", Linked(pids("a")))  # The other end never reports this link.
    assert bench.machine.deadline_ns() == bench.now_ns + limits.ADMISSION_WAIT_NS
    assert bench.tick(limits.ADMISSION_WAIT_NS - 1) == []
    assert bench.tick(1) == [("a1", Decision(1, Result.SUCCESS, value=0))]
    assert (bench.names(), bench.pending()) == ("a", "b")


def test_update_admits_who_is_ready_when_time_is_up(bench: MasterBench) -> None:
    """S6: a joiner without links delays the others only for a moment."""
    bench.members("ab")
    bench.register("xy")
    bench.link("aby")
    bench.vote("ab", UPDATE, 1)
    assert bench.names() == "ab"
    bench.tick_at_deadline()
    assert (bench.names(), bench.pending()) == ("aby", "x")
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == Decision(1, Result.SUCCESS, value=1)


def test_update_with_nobody_pending(bench: MasterBench) -> None:
    bench.members("ab")
    bench.vote("a", UPDATE, 1)
    assert bench.vote("b", UPDATE, 2) == [
        ("a1", Decision(1, Result.SUCCESS, value=0)),
        ("b1", Decision(2, Result.SUCCESS, value=0)),
    ]
    assert bench.machine.registry.epoch == 2


def test_two_joiners_not_linked_with_each_other(bench: MasterBench) -> None:
    bench.register("axy")
    bench.say("a", Linked(pids("xy")))
    bench.say("xy", Linked(pids("a")))
    bench.vote("a", UPDATE, 1)
    bench.tick_at_deadline()
    assert (bench.names(), bench.pending()) == ("axy", "")  # They connect through a.


def test_a_disconnected_joiner_is_not_admitted(bench: MasterBench) -> None:
    bench.register("ab")
    bench.link("ab")
    bench.disconnect("b")
    bench.vote("a", UPDATE, 1)
    assert bench.names() == "a"
    bench.hello("b", welcomed=True)
    assert bench.names() == "ab"


def test_joiners_of_another_group_need_no_links_to_this_one(bench: MasterBench) -> None:
    bench.register("a")
    bench.register("x", group=7)
    bench.vote("a", UPDATE, 1)
    assert bench.names() == "ax"


def test_who_leaves_while_links_are_waited_for_does_not_hold_up_the_update(bench: MasterBench) -> None:
    bench.register("ab")
    bench.vote("a", UPDATE, 1)
    assert bench.verdict("a", 1) is None
    bench.leave("b")
    assert bench.verdict("a", 1) == Decision(1, Result.SUCCESS, value=0)


def test_an_unreachable_joiner_is_removed(bench: MasterBench) -> None:
    """S6: it is refused, and nobody is disturbed."""
    bench.members("ab")
    bench.register("j")
    bench.say("j", Linked(pids("a")))  # j only claims this link.
    assert bench.machine.deadline_ns() == bench.now_ns + limits.LINK_WAIT_TIMEOUT_NS
    kick, *rest = bench.tick_at_deadline()
    assert kick == ("j1", Kick(Result.RANK_CONNECTION_FAILED, "no data connection to a, b"))
    assert rest == [(connection, NeighboursChanged(gone=(pid("j"),))) for connection in ("a1", "b1")]
    assert (bench.names(), bench.pending(), bench.machine.deadline_ns()) == ("ab", "", None)


def test_the_wait_for_links_begins_anew_when_a_link_breaks(bench: MasterBench) -> None:
    bench.members("a")
    bench.register("j")
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 1)
    bench.link("aj")
    assert bench.machine.deadline_ns() is None
    bench.say("j", Linked(()))
    assert bench.machine.deadline_ns() == bench.now_ns + limits.LINK_WAIT_TIMEOUT_NS


def test_a_joiner_that_gets_on_is_waited_for(bench: MasterBench) -> None:
    """Each link to it that a member reports counts. Its own reports do not: it could repeat them for ever."""
    bench.members("abc")
    bench.register("j")
    for name in "ab":
        bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 2)
        bench.say(name, Linked(pids("j")))
        begun_ns = bench.now_ns
        assert bench.machine.deadline_ns() == begun_ns + limits.LINK_WAIT_TIMEOUT_NS
        bench.tick(1)
        bench.say(name, Linked(pids("j")))
        bench.say("j", Linked(pids("c")))
        assert bench.machine.deadline_ns() == begun_ns + limits.LINK_WAIT_TIMEOUT_NS
    bench.tick_at_deadline()
    assert (bench.names(), bench.pending()) == ("abc", "")


def test_a_master_that_loses_all_at_once_waits_for_them(bench: MasterBench) -> None:
    """L3: it was probably cut off itself, for whatever time. Once it hears from any member, the others may come too."""
    bench.members("abc")
    bench.disconnect("abc")
    assert bench.machine.deadline_ns() is None
    bench.tick(3600 * SECOND)
    bench.hello("b", welcomed=True)
    assert bench.names() == "abc"
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    bench.hello("c", welcomed=True)
    assert bench.names() == "abc"
    bench.tick(1)
    assert bench.names() == "bc"


def test_who_is_back_first_is_no_witness_against_the_others(bench: MasterBench) -> None:
    """L3: the network of all was away, and with it their links. a is back before any of its links is."""
    bench.members("abc")
    bench.disconnect("abc")
    bench.tick(15 * SECOND)
    for names in ("a", "ab", "abc"):
        bench.hello(names[-1], welcomed=True)
        bench.link(names)
        assert bench.names() == "abc"
        bench.tick(100 * limits.MS)
    bench.tick(limits.WITNESS_AFTER_NS)
    bench.say("a", Linked(pids("b")))
    bench.disconnect("c")
    assert bench.names() == "ab"  # As usual, once all have been back for a while.


def check_all_are_waited_for_until_one_is_back(bench: MasterBench, names: str) -> None:
    """However long all these members have been away, the others are lost only some time after the first one is back."""
    bench.tick(60 * SECOND)
    assert bench.names() == names
    bench.hello(names[0], welcomed=True)
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    assert bench.names() == names
    bench.tick(1)
    assert bench.names() == names[0]


def test_a_newcomer_that_is_missed_last_does_not_show_that_the_network_is_there(bench: MasterBench) -> None:
    """L3: the network of all is away. The master misses its members a moment before a pending peer."""
    bench.members("ab")
    bench.hello("n")
    for name in "abn":
        bench.tick(10 * limits.MS)
        bench.disconnect(name)
    check_all_are_waited_for_until_one_is_back(bench, "ab")


def test_who_is_refused_does_not_show_that_the_network_is_there_for_all(bench: MasterBench) -> None:
    """L3: the network of all is away. A client near the master connects, is refused and leaves, many times."""
    bench.members("ab")
    bench.disconnect("ab")
    for connection in range(1, 20):
        bench.hello("x", is_member=True, connection=connection)
        assert bench.machine.registry.peers.keys() == set(pids("ab"))
        bench.disconnect("x")
        bench.tick(SECOND)
    check_all_are_waited_for_until_one_is_back(bench, "ab")


def test_who_is_refused_does_not_keep_who_is_gone(bench: MasterBench) -> None:
    """L2: a is back, and b is lost as usual, while others connect and are refused."""
    bench.members("ab")
    bench.disconnect("ab")
    bench.hello("a", welcomed=True)
    for connection in range(1, 1 + limits.RECOVERY_WAIT_NS // SECOND):
        assert bench.names() == "ab"
        bench.hello("x", is_member=True, connection=connection)
        bench.disconnect("x")
        bench.tick(SECOND)
    assert bench.names() == "a"


def test_who_was_away_itself_is_no_witness(bench: MasterBench) -> None:
    """L2: the network of all was away, and is back before the master has missed b."""
    bench.members("abc")
    bench.hello("a", welcomed=True, connection=2)
    bench.say("a", Linked(()))
    bench.disconnect("b")
    assert bench.names() == "abc"
    bench.tick(limits.DISCONNECT_GRACE_NS)
    assert bench.names() == "ac"


@pytest.mark.parametrize("is_missed_first", [False, True])
def test_who_was_away_shortly_before_is_no_witness(bench: MasterBench, is_missed_first: bool) -> None:
    """S6: the same. a was back before it noticed that its link to b had broken too."""
    bench.members("abc")
    bench.disconnect("a")
    bench.tick(100 * limits.MS)
    if is_missed_first:
        bench.disconnect("b")
    bench.hello("a", welcomed=True, connection=2)
    bench.say("a", Linked(pids("bc")))
    bench.say("a", Linked(pids("c")))
    if not is_missed_first:
        bench.disconnect("b")
    assert bench.names() == "abc"
    bench.tick(limits.DISCONNECT_GRACE_NS - 1)
    bench.hello("b", welcomed=True, connection=2)
    bench.link("abc")
    bench.tick(limits.WITNESS_AFTER_NS)
    assert bench.names() == "abc"
    bench.say("a", Linked(pids("c")))
    bench.disconnect("b")
    assert bench.names() == "ac"  # As usual.


@pytest.mark.parametrize("was_away", ["a", "b"])
def test_a_link_that_broke_while_an_end_was_away_is_noticed_late(bench: MasterBench, was_away: str) -> None:
    """S6: the network of all is away again as a notices that its link to b broke in the outage before."""
    bench.members("abc")
    bench.disconnect(was_away)
    bench.tick(100 * limits.MS)
    bench.hello(was_away, welcomed=True, connection=2)
    bench.link("abc")
    bench.tick(limits.PATH_TIMEOUT_NS + SECOND)
    bench.say("a", Linked(pids("c")))
    bench.tick(SECOND)
    bench.disconnect("b")
    assert bench.names() == "abc"


def put_far_away(bench: MasterBench, name: str, handshake_ms: int, linked: str) -> None:
    """A member connects again from far away, some time ago."""
    bench.hello(name, welcomed=True, handshake_ms=handshake_ms)
    bench.say(name, Linked(pids(linked)))
    bench.tick(limits.WITNESS_AFTER_NS)


@pytest.mark.parametrize("order", ["ac", "ca"])
def test_a_far_peer_that_dies_is_lost_whoever_says_so_last(bench: MasterBench, order: str) -> None:
    """L1: a was away shortly before, so its link is no sign; but it is the last link, and c is a witness."""
    bench.members("abc")
    put_far_away(bench, "b", 900, linked="ac")
    bench.hello("a", welcomed=True, connection=2)
    bench.disconnect("b")
    for name in order:
        bench.say(name, Linked(pids("ac".replace(name, ""))))
    assert bench.names() == "ac"


@pytest.mark.parametrize("away_ns", [limits.MS, limits.SECOND])
def test_no_joiner_is_removed_for_links_while_members_are_away(bench: MasterBench, away_ns: int) -> None:
    """L2: no link to them could come up. The joiner goes only if none has come up in the whole time after that."""
    bench.members("ab")
    bench.register("j")
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - limits.SECOND)
    bench.disconnect("ab")
    bench.tick(away_ns)
    bench.hello("ab", welcomed=True, connection=2)
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 1)
    assert (bench.names(), bench.pending()) == ("ab", "j")
    bench.tick(1)
    assert (bench.names(), bench.pending()) == ("ab", "")


def test_who_is_away_itself_is_no_witness(bench: MasterBench) -> None:
    """L3: a link breaks, and then the network of all. The master misses both ends of the link before c."""
    bench.members("abc")
    bench.say("a", Linked(pids("c")))
    bench.disconnect("abc")
    check_all_are_waited_for_until_one_is_back(bench, "abc")


def test_a_link_that_broke_long_ago_shows_no_loss(bench: MasterBench) -> None:
    """S6: the master has heard nothing from a since then, as the network of all is away. It misses b first."""
    bench.members("abc")
    bench.say("a", Linked(pids("c")))
    bench.tick(limits.CUT_OFF_SPREAD_NS + 1)
    bench.disconnect("bca")
    bench.tick(60 * SECOND)
    assert bench.names() == "abc"


def test_a_link_that_is_lost_again_before_all_are_back_shows_no_loss(bench: MasterBench) -> None:
    """L3: the network of all was away, and comes and goes; c is still away."""
    bench.members("abc")
    bench.disconnect("abc")
    bench.hello("ab", welcomed=True)
    bench.link("ab")
    bench.tick(limits.CUT_OFF_SPREAD_NS)
    bench.say("a", Linked(()))
    bench.disconnect("b")
    assert bench.names() == "abc"


def test_all_who_are_back_are_cut_off_again_meanwhile(bench: MasterBench) -> None:
    """L3: the network of the master breaks again while one member is still away. It is now down for all of them."""
    bench.members("abc")
    bench.disconnect("abc")
    bench.hello("ab", welcomed=True)
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    bench.disconnect("ab")
    check_all_are_waited_for_until_one_is_back(bench, "abc")


def test_a_newcomer_ends_the_wait_for_those_who_are_gone(bench: MasterBench) -> None:
    """L2: they may all be dead."""
    bench.members("ab")
    bench.disconnect("ab")
    bench.hello("n")
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.names() == "n"


def test_all_are_back_and_one_is_lost_as_usual(bench: MasterBench) -> None:
    bench.members("ab")
    bench.disconnect("ab")
    bench.hello("ab", welcomed=True)
    assert not bench.machine.is_alone
    bench.lose("a")
    assert bench.names() == "b"


def test_the_last_member_is_lost_as_any(bench: MasterBench) -> None:
    bench.members("ab")
    bench.lose("a")
    bench.now_ns += limits.CUT_OFF_SPREAD_NS
    bench.lose("b")
    assert bench.names() == ""


@pytest.mark.parametrize("is_back", [False, True])
def test_no_joiner_is_removed_for_a_member_that_was_away(is_back: bool) -> None:
    """S6: a far member of another group, which no joiner can reach before the member hears of it."""
    bench = bench_of("a", others="x")
    bench.hello("x", welcomed=True, connection=2, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.register("j", group=1)
    bench.tick(SECOND)
    bench.disconnect("x")
    bench.tick(8 * SECOND)
    if is_back:
        bench.hello("x", welcomed=True, connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(SECOND)
    assert (bench.names(), bench.pending()) == ("ax", "j")
    if not is_back:
        bench.hello("x", welcomed=True, connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(2 * limits.LINK_WAIT_TIMEOUT_NS)  # It does not reach x then, either.
    assert (bench.names(), bench.pending()) == ("ax", "")


def test_no_joiner_is_removed_for_links_that_it_could_not_report() -> None:
    """L2: j is far, and away while its links come up. One that comes and goes for ever is removed all the same."""
    bench = bench_of("ab")
    bench.register("j")
    bench.hello("j", connection=2, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(SECOND)
    bench.disconnect("j")
    for name, other in ("ab", "ba"):
        bench.say(name, Linked(pids(other + "j")))
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - SECOND // 2)
    bench.hello("j", connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(SECOND)
    assert bench.pending() == "j"
    bench.say("j", Linked(pids("ab")))
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.pending() == "j"
    bench.say("j", Linked(()))
    begun_ns = bench.now_ns
    while bench.pending():
        bench.disconnect("j")
        bench.hello("j", connection=4)
        bench.tick(limits.LINK_WAIT_TIMEOUT_NS // 2)
        assert bench.now_ns - begun_ns <= limits.AWAY_EXCUSE_MAX_NS + 3 * limits.LINK_WAIT_TIMEOUT_NS


@pytest.mark.parametrize("is_back", [False, True])
def test_no_member_is_removed_for_links_that_it_could_not_report(is_back: bool) -> None:
    """S6: the link of two members breaks. Then b, which is far, is away for a while; the link comes up meanwhile."""
    bench = bench_of("ab")
    bench.hello("b", welcomed=True, connection=2, handshake_ms=limits.HANDSHAKE_MS_MAX)
    for name in "ab":
        bench.say(name, Linked(()))
        bench.begin(name, 1)
    bench.tick(2 * SECOND)
    bench.disconnect("b")
    bench.tick(SECOND)
    bench.say("a", Linked(pids("b")))
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 4 * SECOND)
    if is_back:
        bench.hello("b", welcomed=True, connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(SECOND)
    if not is_back:
        bench.hello("b", welcomed=True, connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    assert bench.names() == "ab"
    bench.say("b", Linked(pids("a")))
    assert bench.machine.operations.running


def test_a_call_waits_for_a_ring_just_after_an_outage() -> None:
    """L2: it had waited for links before. They come up one after the other."""
    bench = bench_of("abc")
    for name in "abc":
        bench.say(name, Linked(()))
        bench.begin(name, 1, spec(**RING_ONLY))
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 3 * SECOND)
    bench.disconnect("abc")
    bench.tick(SECOND)
    bench.hello("abc", welcomed=True, connection=2)
    bench.tick(SECOND)
    for name, others in (("a", "b"), ("b", "ac"), ("c", "b")):
        bench.say(name, Linked(pids(others)))
    bench.tick(5 * SECOND)
    bench.link("abc")
    assert bench.machine.operations.running and bench.names() == "abc"


def test_a_member_that_comes_and_goes_does_not_hold_up_the_others() -> None:
    """L1: c has no links, and b connects again every few seconds, for ever."""
    bench = bench_of("abc")
    bench.link("ab")
    bench.say("c", Linked(()))
    bench.begin("abc", 1)
    most_ns = limits.AWAY_EXCUSE_MAX_NS + 3 * limits.LINK_WAIT_TIMEOUT_NS
    took_ns = bench.come_and_go("b", limits.LINK_WAIT_TIMEOUT_NS // 2, lambda: "c" not in bench.names(), most_ns)
    assert took_ns > limits.AWAY_EXCUSE_MAX_NS and bench.names() == "ab"


def test_a_member_that_comes_and_goes_does_not_keep_joiners_for_ever() -> None:
    """L1, S6: each update_topology() waits for j, which has no links, and the user of j hears nothing."""
    bench = bench_of("ab")
    bench.register("j")
    most_ns = limits.AWAY_EXCUSE_MAX_NS + 3 * limits.LINK_WAIT_TIMEOUT_NS
    bench.come_and_go("b", limits.LINK_WAIT_TIMEOUT_NS // 2, lambda: not bench.pending(), most_ns)
    assert bench.names() == "ab"


def test_a_link_that_comes_and_goes_does_not_keep_a_joiner_for_ever() -> None:
    """L1, S6: the link of b and j comes up at one end only, and breaks at once, again and again."""
    bench = bench_of("ab")
    bench.register("j")
    begun_ns = bench.now_ns
    while bench.pending():
        bench.say("b", Linked(pids("aj")))
        bench.say("b", Linked(pids("a")))
        bench.tick(limits.LINK_WAIT_TIMEOUT_NS // 2)
        assert bench.now_ns - begun_ns <= limits.AWAY_EXCUSE_MAX_NS + 3 * limits.LINK_WAIT_TIMEOUT_NS
    assert bench.now_ns - begun_ns > limits.AWAY_EXCUSE_MAX_NS and bench.names() == "ab"


def test_an_outage_is_excused_though_another_group_has_been_excused_for_long() -> None:
    """L2: x comes and goes for ever. b is away once, and its link is up again."""
    bench = bench_of("abc", others="xyz")
    bench.link("xy")
    bench.say("z", Linked(()))
    bench.begin("xyz", 1)

    def pass_time() -> None:
        bench.disconnect("x")
        bench.hello("x", welcomed=True, connection=2)
        bench.tick(limits.LINK_WAIT_TIMEOUT_NS // 2)

    while "z" in bench.names():
        pass_time()
    for name in "abc":
        bench.say(name, Linked(()))
        bench.begin(name, 1)
    bench.tick(SECOND)
    bench.disconnect("b")
    bench.hello("b", welcomed=True, connection=2)
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "abcxy"
    bench.link("abc")
    assert bench.machine.operations.running


def test_a_member_that_came_back_without_links_is_removed_later() -> None:
    """L1: the wait for its links begins again, and ends."""
    bench = bench_of("abc")
    bench.hello("c", welcomed=True, connection=2, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.link("ab")
    bench.say("c", Linked(()))
    bench.begin("abc", 1)
    bench.tick(2 * limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "ab" and bench.machine.operations.running


def test_a_joiner_is_not_removed_with_the_one_it_could_not_reach() -> None:
    """Split, seed 51, S6: the member was removed at the same moment, and from then on no link was missing."""
    bench = MasterBench(options=MasterOptions(link_wait_ns=SECOND, disconnect_grace_ns=SECOND))
    bench.members("ab")
    bench.register("j")
    bench.say("j", Linked(pids("a")))
    bench.say("a", Linked(pids("bj")))
    bench.disconnect("b")
    bench.tick(SECOND)
    assert (bench.names(), bench.pending()) == ("a", "j")


def test_a_kick_can_be_read_however_many_members_there_are(bench: MasterBench) -> None:
    """L1: with a reason that is too long for the message, the joiner would go on waiting."""
    letters = [chr(ord("A") + i) * 100 for i in range(50)]
    for name in letters:
        bench.groups[name] = 0
        connection = bench.connections[name] = name
        hello = Hello(name.encode()[:16], token("m"), False, 0, name, ())
        bench.handle(events.PeerMessageReceived(connection, hello))
        everybody = tuple(peer for peer in bench.machine.registry.peers)
        for other in letters[: letters.index(name) + 1]:
            bench.handle(events.PeerMessageReceived(other, Linked(everybody)))
        for peer in list(bench.machine.registry.order):
            bench.vote([peer.name], UPDATE, letters.index(name))
    assert len(bench.machine.registry.order) == 50
    bench.register("j")
    ((_, kick), *_) = bench.tick_at_deadline()
    assert isinstance(kick, Kick)


def test_the_next_pending_peer_is_admitted_when_all_members_are_gone(bench: MasterBench) -> None:
    """L2."""
    bench.members("ab")
    bench.register("jk")
    bench.leave("ab")
    assert (bench.names(), bench.pending()) == ("j", "k")
    assert bench.machine.registry.epoch == 5


def test_an_empty_run_does_not_admit_who_is_disconnected(bench: MasterBench) -> None:
    bench.members("a")
    bench.register("jk")
    bench.disconnect("j")
    bench.leave("a")
    assert (bench.names(), bench.pending()) == ("k", "j")


def test_an_empty_run_admits_who_comes_back(bench: MasterBench) -> None:
    bench.members("a")
    bench.register("j")
    bench.disconnect("j")
    bench.leave("a")
    assert bench.names() == ""
    bench.hello("j", welcomed=True)
    assert bench.names() == "j"


# --- Loss -----------------------------------------------------------------------------------------------------------


def test_leave(bench: MasterBench) -> None:
    bench.members("abc")
    assert bench.leave("b") == [
        ("a1", member_list(3, "ac", (1, 2))),
        ("c1", member_list(3, "ac", (1, 2))),
        ("a1", NeighboursChanged(gone=(pid("b"),))),
        ("c1", NeighboursChanged(gone=(pid("b"),))),
    ]
    assert bench.disconnect("b") == []
    assert bench.say("b", Leave()) == [("b1", Refused(Refusal.UNREGISTERED, "send a Hello first"))]


def test_a_pending_peer_leaves(bench: MasterBench) -> None:
    bench.members("a")
    bench.register("j")
    assert bench.leave("j") == [("a1", NeighboursChanged(gone=(pid("j"),)))]
    assert bench.machine.registry.epoch == 1


def test_loss_after_the_grace_period(bench: MasterBench) -> None:
    """L1."""
    bench.members("abc")
    assert bench.disconnect("b") == []
    assert bench.machine.deadline_ns() == bench.now_ns + limits.DISCONNECT_GRACE_NS
    assert bench.tick(limits.DISCONNECT_GRACE_NS - 1) == []
    assert bench.tick(1)[:2] == [("a1", member_list(3, "ac", (1, 2))), ("c1", member_list(3, "ac", (1, 2)))]
    assert bench.machine.deadline_ns() is None


@pytest.mark.parametrize(
    "handshake_ms, seconds", [(0, 0.5), (60, 0.5), (300, 2.4), (900, 7.2), (limits.HANDSHAKE_MS_MAX, 10.0)]
)
def test_who_is_far_away_has_longer(bench: MasterBench, handshake_ms: int, seconds: float) -> None:
    """L2: at 300 ms of round trip a healthy peer needs more than DISCONNECT_GRACE. L1: near peers are lost as usual."""
    bench.members("abc")
    bench.hello("b", welcomed=True, handshake_ms=handshake_ms)
    bench.disconnect("b")
    assert bench.machine.deadline_ns() == bench.now_ns + int(seconds * SECOND)
    bench.tick(int(seconds * SECOND) - 1)
    assert bench.names() == "abc"
    bench.tick(1)
    assert bench.names() == "ac"


@pytest.mark.parametrize("first", ["link", "control"])
def test_a_far_peer_may_lose_one_link_too(bench: MasterBench, first: str) -> None:
    """L2: if its process has died, all its links break, and then it is lost at once (L1)."""
    bench.members("abc")
    put_far_away(bench, "b", 300, linked="ac")
    if first == "link":
        bench.say("a", Linked(pids("c")))
        bench.disconnect("b")
    else:
        bench.disconnect("b")
        bench.say("a", Linked(pids("c")))
    assert bench.names() == "abc"
    bench.say("c", Linked(pids("a")))
    assert bench.names() == "ac"


def test_far_peers_of_a_site_that_is_cut_off_for_a_moment_stay(bench: MasterBench) -> None:
    """L2: all connections to the other site are reset. Two peers that are killed together look the same."""
    bench.members("abcd")
    for name in "cd":
        bench.hello(name, welcomed=True, handshake_ms=300)
        bench.say(name, Linked(pids(other for other in "abcd" if other != name)))
    for name in "ab":
        bench.say(name, Linked(pids("ab".replace(name, ""))))
    bench.disconnect("cd")
    bench.tick(SECOND)
    assert bench.names() == "abcd"


@pytest.mark.parametrize("first", ["link", "control"])
def test_loss_at_once_with_a_witness(bench: MasterBench, first: str) -> None:
    """L1: a process that dies loses all its connections, and others see it."""
    bench.members("abc")
    if first == "link":
        bench.say("a", Linked(pids("c")))
        effects = bench.disconnect("b")
    else:
        bench.disconnect("b")
        effects = bench.say("a", Linked(pids("c")))
    assert effects[0] == ("a1", member_list(3, "ac", (1, 2)))
    assert bench.logged[-1].text == "member b lost its connections to the master and to a"


def test_a_lost_link_alone_loses_nobody(bench: MasterBench) -> None:
    """L2: a broken path between two live peers is no reason to evict either of them."""
    bench.members("abc")
    bench.say("ab", Linked(pids("c")))
    assert bench.names() == "abc"
    assert bench.machine.deadline_ns() is None


def test_a_link_that_never_was_is_no_witness(bench: MasterBench) -> None:
    """Only one end of a new link is up when that end's control connection breaks. That proves nothing."""
    bench.members("ab")
    bench.link("a")
    bench.link("b")
    bench.say("b", Linked(pids("a")))  # The link comes up again, on this end first.
    bench.disconnect("b")
    assert bench.names() == "ab"


def test_a_pending_peer_is_no_witness(bench: MasterBench) -> None:
    """S6: a hostile joiner cannot turn a moment without connection into a loss."""
    bench.members("ab")
    bench.register("j")
    bench.say("j", Linked(pids("ab")))
    bench.disconnect("b")
    bench.say("j", Linked(()))
    assert bench.names() == "ab"


def test_a_member_of_another_group_is_no_witness(bench: MasterBench) -> None:
    bench.members("ab")
    bench.members("x", group=1)
    bench.say("x", Linked(pids("b")))
    bench.disconnect("b")
    bench.say("x", Linked(()))
    assert bench.names() == "abx"


def test_resuming_within_the_grace_period(bench: MasterBench) -> None:
    """A broken control connection alone has no effect."""
    bench.members("ab")
    bench.begin("a", 1)
    bench.disconnect("b")
    bench.tick(limits.DISCONNECT_GRACE_NS - 1)
    assert bench.hello("b", welcomed=True) == [
        ("b2", WELCOME),
        ("b2", member_list(2, "ab", (1, 2))),
        ("b2", Neighbours((neighbour("a", dial=True),))),
    ]
    assert bench.tick(10 * SECOND) == []
    assert [type(message) for _, message in bench.begin("b", 5)] == [Plan, Plan]


def test_resuming_before_the_old_connection_is_known_to_be_gone(bench: MasterBench) -> None:
    bench.members("ab")
    bench.hello("b", welcomed=True)
    assert sent(bench.handle(events.ConnectionClosed("b1"))) == []
    assert bench.tick(10 * SECOND) == []
    assert bench.names() == "ab"


def test_a_hello_that_was_overtaken_by_a_later_one(bench: MasterBench) -> None:
    """Connections are not ordered among each other: the peer stays on the one with its highest number."""
    bench.members("ab")
    bench.hello("b", welcomed=True, connection=3)
    assert bench.hello("b", welcomed=True, connection=2) == []
    assert sent(bench.handle(events.ConnectionClosed("b3"))) == []
    assert bench.tick(10 * SECOND) == []
    assert bench.names() == "ab"
    assert bench.peer("b").connection == "b2"


def test_who_comes_back_too_late_is_unknown(bench: MasterBench) -> None:
    bench.members("ab")
    bench.lose("b")
    ((_, refused),) = bench.hello("b", welcomed=True)
    assert refused.refusal is Refusal.UNKNOWN_SESSION


def test_a_pending_peer_dies(bench: MasterBench) -> None:
    bench.members("a")
    bench.register("j")
    bench.lose("j")
    assert (bench.names(), bench.pending(), bench.machine.registry.epoch) == ("a", "", 1)


def test_a_dead_joiner_does_not_keep_the_master_busy(bench: MasterBench) -> None:
    """Both its deadlines run. The deadline for its links has no effect while it is away."""
    bench.members("a")
    bench.register("j")
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 1)
    bench.disconnect("j")
    bench.tick(1)  # The bench asserts that the deadline moves on.
    assert bench.pending() == "j"
    bench.tick_at_deadline()
    assert bench.pending() == ""


def test_several_die_at_once(bench: MasterBench) -> None:
    bench.members("abcd")
    bench.begin("a", 1)
    bench.disconnect("bcd")
    bench.tick(limits.DISCONNECT_GRACE_NS)
    assert bench.names() == "a"
    assert bench.verdict("a", 1) == Decision(1, Result.TOO_FEW_PEERS, reason="this peer is alone in its group")


# --- Hostile and malformed input ------------------------------------------------------------------------------------


def test_malformed_input_is_counted_answered_and_logged_once(bench: MasterBench) -> None:
    bench.members("a")
    bench.logged.clear()
    for connection in ("s", "a1"):
        for _ in range(3):
            effects = bench.handle(events.MalformedReceived(connection, "what"))
            assert sent(effects) == [(connection, Refused(Refusal.MALFORMED, "what"))]
    assert bench.logged == [
        Log(Level.WARNING, "malformed message from a stranger: what", of_stranger=True),
        Log(Level.WARNING, "malformed message from a: what"),
    ]
    assert bench.machine.malformed_count == 6
    bench.handle(events.ConnectionClosed("s"))
    assert logs(bench.handle(events.MalformedReceived("s", "what")))


def test_the_memory_of_malformed_senders_is_bounded(bench: MasterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    monkeypatch.setattr(limits, "PEERS_MAX", 2)
    for connection in range(5):
        bench.handle(events.MalformedReceived(connection, "what"))
    assert len(bench.logged) == 2


def test_a_call_id_for_two_calls(bench: MasterBench) -> None:
    """A member that breaks the protocol is removed; the master goes on."""
    bench.members("ab")
    bench.begin("b", 1)
    effects = bench.say("a", Votes(0, (Vote(1, spec(5)), Vote(1, spec(6)))))
    assert effects[0] == ("a1", Kick(Result.INVALID_USAGE, "call id 1 was used for two calls"))
    assert bench.names() == "b"


@pytest.mark.parametrize("second", [topology_vote(0, 1, UPDATE, 9), topology_vote(0, 1, PENDING, 9), offer(1, 0)])
@pytest.mark.parametrize("first", [Votes(0, (Vote(1, spec()),)), topology_vote(0, 1, UPDATE, 9), offer(1, 0)])
def test_a_call_id_for_two_kinds_of_calls(bench: MasterBench, first: Any, second: Any) -> None:
    bench.members("ab")
    bench.say("a", first)
    bench.say("a", second)
    assert bench.names() == ("ab" if first == second else "b")


@pytest.mark.parametrize("message", [topology_vote(0, 9, UPDATE), offer(9, 0), Votes(0, (Vote(9, spec(9)),))])
def test_the_bound_of_open_calls(bench: MasterBench, monkeypatch: pytest.MonkeyPatch, message: Any) -> None:
    """B1: for each kind of calls."""
    monkeypatch.setattr(limits, "CALLS_IN_FLIGHT_MAX", 1)
    monkeypatch.setattr(limits, "CALLS_UNDECIDED_MAX", 1)
    bench.members("ab")
    bench.begin("a", 1, spec(1), spec(2))
    assert bench.names() == "ab"
    effects = bench.say("a", message)
    assert effects[0] == ("a1", Kick(Result.INVALID_USAGE, "more than 2 calls without an answer, in a group of 2"))
    assert bench.names() == "b"


def test_the_bound_of_open_calls_follows_the_group(bench: MasterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: everything that they know must fit into a report."""
    monkeypatch.setattr(limits, "CALLS_NAMED_MAX", 6)
    monkeypatch.setattr(limits, "CALLS_UNDECIDED_MAX", 0)
    bench.members("abc")
    bench.members("x", group=1)
    bench.begin("x", 1, *(spec(tag) for tag in range(5)))
    bench.begin("a", 1, spec(1), spec(2))
    assert bench.names() == "abcx"
    bench.begin("a", 3, spec(3))
    assert bench.names() == "bcx"
    bench.begin("b", 1, spec(1), spec(2), spec(3))
    assert bench.names() == "bcx"


def test_the_bound_of_answers(bench: MasterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: no peer makes the master keep answers without limit. It keeps the latest, as these may have been lost."""
    monkeypatch.setattr(limits, "ANSWERS_KEPT_MAX", 3)
    bench.members("ab")
    for call_id in range(10, 16):
        bench.withdraw("a", call_id)
    assert sorted(bench.peer("a").answers) == [13, 14, 15]
    assert bench.names() == "ab"


def test_who_had_no_link_to_the_lost_has_time_for_the_next_member(bench: MasterBench) -> None:
    """S6. Chaos, seed 9376274: the run had become empty and went on with a newcomer, just when its wait was over."""
    bench.members("a")
    bench.register("bc")
    bench.now_ns += limits.LINK_WAIT_TIMEOUT_NS + 1
    bench.leave("a")
    assert bench.names() == "b" and bench.pending() == "c"
    deadline_ns = bench.machine.deadline_ns()
    assert deadline_ns is not None and deadline_ns == bench.now_ns + limits.LINK_WAIT_TIMEOUT_NS


def test_many_calls_beside_one_that_takes_long(bench: MasterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long collective holds `oldest_call_id` down. Short calls beside it must not get the peer removed."""
    monkeypatch.setattr(limits, "ANSWERS_KEPT_MAX", 8)
    bench.members("ab")
    bench.begin("ab", 1, spec(1))
    for call_id in range(2, 40):
        bench.begin("ab", call_id, spec(2), oldest=1)
        bench.finish("ab", call_id, max(bench.plans))
        assert isinstance(bench.verdict("a", call_id), Decision)
    bench.finish("ab", 1)
    assert bench.verdict("a", 1) == Decision(1, 0, 2, attempt_id=FIRST_ATTEMPT)


def test_answers_are_recalled_until_they_are_known(bench: MasterBench) -> None:
    bench.members("ab")
    bench.vote("ab", PENDING, 5)
    answer = Decision(5, Result.SUCCESS)
    assert bench.vote("a", PENDING, 5) == [("a1", answer)]
    bench.begin("a", 6, oldest=6)
    assert bench.peer("a").answers == {}
    assert bench.vote("a", PENDING, 5, oldest=6) == []
    assert bench.vote("b", PENDING, 5) == [("b1", answer)]


def test_the_answer_to_the_oldest_open_call_is_kept(bench: MasterBench) -> None:
    """S1: of two decisions a has heard only the first. Its vote for the second again must not begin an attempt."""
    bench.members("ab")
    bench.begin("ab", 5, spec(1), spec(2))
    for name in "ab":
        bench.finish(name, 5)
        bench.finish(name, 6, FIRST_ATTEMPT + 1)
    assert bench.begin("a", 6, spec(2), oldest=6) == [("a1", Decision(6, 0, 2, attempt_id=FIRST_ATTEMPT + 1))]
    assert list(bench.peer("a").answers) == [6]


def test_withdraw_of_a_call_whose_vote_was_lost(bench: MasterBench) -> None:
    bench.members("ab")
    assert bench.withdraw("a", 5) == [("a1", Decision(5, Result.RANK_CONNECTION_LOST, reason="withdrawn"))]
    assert bench.withdraw("a", 5) == [("a1", Decision(5, Result.RANK_CONNECTION_LOST, reason="withdrawn"))]
    bench.begin("a", 6, oldest=6)
    assert bench.withdraw("a", 5) == []


def test_attempt_ids_of_a_later_master_are_higher() -> None:
    """S3."""
    first, second = MasterMachine(RUN_ID), MasterMachine(RUN_ID, 1)
    assert [first._next_attempt_id() for _ in range(3)] == [FIRST_ATTEMPT, FIRST_ATTEMPT + 1, FIRST_ATTEMPT + 2]
    assert second._next_attempt_id() > FIRST_ATTEMPT + 2


def test_options_are_obeyed() -> None:
    bench = MasterBench(options=MasterOptions(disconnect_grace_ns=5, link_wait_ns=7, admission_wait_ns=9))
    bench.register("ab")
    assert bench.machine.deadline_ns() == bench.now_ns + 7
    bench.disconnect("b")
    assert bench.machine.deadline_ns() == bench.now_ns + 5


# --- Every message may come twice -----------------------------------------------------------------------------------


def collectives_of_all_fates(bench: MasterBench) -> None:
    bench.members("abc")
    for name in "abc":
        bench.begin(name, 1, spec(1), spec(2), spec(3, count=9 if name == "c" else 8))
    for name in "abc":
        bench.finish(name, 1, digest=7)
        bench.finish(name, 2, FIRST_ATTEMPT + 1, digest=ord(name))
    bench.begin("a", 4, spec(4))
    bench.withdraw("a", 4)
    bench.begin("abc", 5, spec(5), oldest=5)
    bench.finish("a", 5, FIRST_ATTEMPT + 2)
    bench.leave("c")


def topology_of_all_fates(bench: MasterBench) -> None:
    bench.members("ab")
    bench.register("j")
    bench.vote("ab", PENDING, 1)
    bench.link("abj")
    bench.vote("ab", UPDATE, 2)
    bench.vote("a", UPDATE, 3)
    bench.withdraw("a", 3)
    bench.vote("a", UPDATE, 4)
    bench.say("b", offer(4, 0))


def syncs_of_all_fates(bench: MasterBench) -> None:
    bench.members("abc")
    bench.say("a", offer(1, 1))
    bench.say("b", offer(1, 1, entry("w", "2")))
    bench.say("c", offer(1, 1, entry("v", "2")))
    bench.fetched("b", 1)
    for name in "abc":
        bench.say(name, offer(2, 2, entry("w", name)))
    bench.fetched("b", 2, FIRST_ATTEMPT + 1)
    bench.fetched("c", 2, FIRST_ATTEMPT + 1, ok=False, fault=pid("a"), reason="broke")
    for name in "abc":
        bench.say(name, offer(3, 2, entry("w", name), oldest=3))
    bench.withdraw("b", 3)


@pytest.mark.parametrize("fates", [collectives_of_all_fates, topology_of_all_fates, syncs_of_all_fates])
def test_messages_may_come_twice(fates: Any) -> None:
    """The bench checks that no call gets two answers. This test checks that the master ends in the same state."""
    once, thrice = MasterBench(), MasterBench(copies=3)
    fates(once)
    fates(thrice)
    assert once.verdicts
    assert thrice.verdicts == once.verdicts
    assert thrice.snapshot() == once.snapshot()


@pytest.mark.parametrize("fates", [collectives_of_all_fates, topology_of_all_fates, syncs_of_all_fates])
def test_connections_may_break_anywhere(fates: Any) -> None:
    """Every peer comes back on a new connection before each of its messages. Nothing else may change."""

    class Flaky(MasterBench):
        is_back = True

        def _say(self, name: str, message: Any, host: str) -> list[Any]:
            if self.is_back and not isinstance(message, Hello) and pid(name) in self.machine.registry.peers:
                self.is_back = False
                self.disconnect(name)
                self.hello(name, welcomed=True)
                self.is_back = True
            return super()._say(name, message, host)

    calm, flaky = MasterBench(), Flaky()
    fates(calm)
    fates(flaky)
    assert flaky.verdicts == calm.verdicts
    for key in ("epoch", "order", "open", "answers", "pending", "attempts", "transfers", "revisions"):
        assert flaky.snapshot()[key] == calm.snapshot()[key], key
