"""Peers of one host are admitted together and removed together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from zpccl import limits
from zpccl.errors import HostIncomplete, Kicked, Result
from zpccl.limits import MS
from zpccl.protocol.master import MasterOptions
from zpccl.protocol.messages import (
    Acknowledgement,
    Decision,
    Hello,
    Kick,
    Linked,
    Ready,
    Refusal,
    Refused,
    TopologyKind,
    Welcome,
)
from zpccl.protocol.peer import State

from .harness import OPTIMIZE, PENDING, RUN_ID, UPDATE, MasterBench, PeerBench, member_list, pids
from .takeover import OLD_RUN, TakeOver, hello_of

GROUPS = {name: place % 2 for place, name in enumerate("abcdefghijkl")}
HOSTS = {"a": "one", "b": "one", "c": "two", "d": "two", "e": "three", "f": "three"}
HOSTS |= {"g": "three", "h": "three", "i": "four", "j": "four", "k": "five", "l": "five"}
"""g and h are new processes in place of e and f."""
MASTERS = ("m1:1", "m2:1")
OK = Result.SUCCESS


def come(bench: MasterBench, names: str, **changes: Any) -> None:
    """Peers of two-peer hosts register."""
    for name in names:
        bench.groups[name] = GROUPS[name]
        bench.hello(name, **{"host": HOSTS[name], "host_size": 2, **changes})


def of_host(name: str) -> Hello:
    """The Hello of a member."""
    return structs.replace(hello_of(name), host=HOSTS[name], host_size=2)


def link(bench: MasterBench) -> None:
    """All registered peers report links to all others of their groups."""
    there = [peer.name for peer in bench.machine.registry.peers.values()]
    for name in there:
        bench.say(name, Linked(pids(n for n in there if n != name and GROUPS[n] == GROUPS[name])))


def all_call(bench: MasterBench, kind: TopologyKind, call_id: int) -> Decision | None:
    """All members make a topology call. Returns the answer to the first one."""
    bench.vote(bench.names(), kind, call_id)
    return bench.verdict(bench.names()[0], call_id)


def kicked(bench: MasterBench) -> dict[str, str]:
    """The removed peers, and the reasons."""
    found: dict[str, str] = {}
    for connection, messages in bench.said.items():
        found |= {str(connection)[0]: message.reason for message in messages if isinstance(message, Kick)}
    return found


@pytest.fixture
def bench() -> MasterBench:
    """Two hosts of two members each."""
    bench = MasterBench()
    come(bench, "abcd")
    link(bench)
    all_call(bench, UPDATE, 1)
    assert bench.names() == "abcd"
    return bench


def test_a_run_begins_with_a_whole_host() -> None:
    """A run does not begin with the first peer that comes."""
    bench = MasterBench()
    come(bench, "ac")
    assert bench.names() == ""
    come(bench, "d")
    assert bench.names() == "cd"


def test_a_peer_without_a_host_begins_by_itself() -> None:
    bench = MasterBench()
    come(bench, "a")
    bench.hello("x")
    assert bench.names() == "x"


def see(bench: MasterBench) -> None:
    """All acknowledge the list, and those that follow from that."""
    while not bench.machine.registry.is_committed:
        for name in bench.connections:
            bench.say(name, Acknowledgement(bench.machine.registry.epoch))


@pytest.mark.parametrize("masters", [(), MASTERS])
def test_of_two_hosts_that_cannot_reach_each_other_one_stays(masters: tuple[str, ...]) -> None:
    """L2: their peers are in another order in each group, so each group would remove a peer of another host."""
    bench = MasterBench()
    come(bench, "ab", **({"masters": masters} if masters else {}))
    see(bench)
    come(bench, "cfed", **({"masters": masters} if masters else {}))
    link(bench)
    all_call(bench, UPDATE, 1)
    see(bench)
    bench.leave("ab")
    see(bench)
    assert bench.names() == "cfed"
    for name in "cfed":
        bench.say(name, Linked(()))
        bench.begin(name, 5)
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    see(bench)
    assert bench.names() == "cd" and kicked(bench).keys() >= set("ef") and kicked(bench).keys().isdisjoint("cd")


@pytest.mark.parametrize("index", [0, 1])
def test_a_part_of_a_host_goes_on_to_the_first_master(index: int) -> None:
    """L1. Duel, seed 10530373: two masters led a run each, and each had one peer of the same host pending."""
    bench = MasterBench()
    come(bench, "abcef", masters=MASTERS, master_index=index)
    link(bench)
    assert bench.names() == "ab"
    told = bench.tick(2 * limits.HOST_WAIT_NS)
    refusals = [(str(to)[0], message.refusal) for to, message in told if isinstance(message, Refused)]
    assert refusals == [("c", Refusal.NO_QUORUM)] * index
    pending = bench.machine.registry.pending
    assert {peer.name for peer in pending()} == set("ef") | set("c" * (index == 0)), "e and f are a whole host"
    come(bench, "cd", masters=MASTERS, master_index=index)
    link(bench)
    assert not bench.tick(2 * limits.HOST_WAIT_NS)
    assert {peer.name for peer in pending()} == set("cdef")


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_host_that_has_been_whole_stays_or_is_removed(comes_back: bool) -> None:
    """L1: while one peer of a host connects again, the other is not sent on. If one is lost, the other is removed."""
    bench = MasterBench()
    come(bench, "abef", masters=MASTERS, master_index=1)
    link(bench)
    bench.tick(2 * limits.HOST_WAIT_NS)
    bench.disconnect("e")
    bench.tick()
    assert {peer.name for peer in bench.machine.registry.pending()} == set("ef")
    if comes_back:
        come(bench, "e", masters=MASTERS, master_index=1, connection=2)
    bench.tick(limits.DISCONNECT_GRACE_NS)
    assert {peer.name for peer in bench.machine.registry.pending()} == (set("ef") if comes_back else set())
    assert set(kicked(bench)) == (set() if comes_back else {"f"})


def test_when_a_part_of_a_host_goes_on_is_a_deadline() -> None:
    bench = MasterBench()
    come(bench, "a", masters=MASTERS, master_index=1)
    deadline_ns = bench.machine.deadline_ns()
    assert deadline_ns is not None and 1 <= (deadline_ns - bench.now_ns) / limits.HOST_WAIT_NS < 2
    come(bench, "b", masters=MASTERS, master_index=1)
    assert bench.names() == "ab" and bench.machine.deadline_ns() is None


def test_a_host_is_pending_once_all_of_it_is_there(bench: MasterBench) -> None:
    come(bench, "e")
    assert all_call(bench, PENDING, 2) == Decision(2, OK, value=0)
    come(bench, "f", is_ready=False)
    assert all_call(bench, PENDING, 3) == Decision(3, OK, value=0)
    bench.say("f", Ready())
    assert all_call(bench, PENDING, 4) == Decision(4, OK, value=1)


@pytest.mark.parametrize("late", ["", "f"])
def test_a_host_is_admitted_as_a_whole_or_not_at_all(bench: MasterBench, late: str) -> None:
    """S6: the others go on without it once they have waited long enough for its links."""
    come(bench, "ef")
    link(bench)
    if late:
        bench.say(late, Linked(()))
    epoch = bench.machine.registry.epoch
    all_call(bench, UPDATE, 2)
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert bench.names() == ("abcd" if late else "abcdef")
    assert bench.machine.registry.epoch == epoch + (not late)
    assert bench.verdict("a", 2) == Decision(2, OK, value=0 if late else 2)


@pytest.mark.parametrize("how", ["leaves", "is lost", "is removed"])
def test_a_member_that_goes_takes_its_host_along(bench: MasterBench, how: str) -> None:
    """L1: the others of its host may wait for it, in collectives of which no master knows."""
    if how == "leaves":
        bench.leave("a")
    elif how == "is lost":
        bench.lose("a")
    else:
        bench.machine.options = replace(bench.options, straggler_timeout_ns=limits.STRAGGLER_TIMEOUT_MIN_NS)
        bench.vote("bcd", OPTIMIZE, 2)
        while "a" in bench.names():
            bench.tick_at_deadline()
    assert bench.names() == "cd"
    assert kicked(bench)["b"] == "its host one has lost a peer"
    assert "c" not in kicked(bench) and "d" not in kicked(bench)


def test_a_host_returns_once_the_old_one_is_gone(bench: MasterBench) -> None:
    """Its processes were restarted, and the master has not yet noticed that the old ones are dead."""
    for old, new in (("a", "e"), ("b", "f")):
        bench.disconnect(old)
        come(bench, new, host="one")
    link(bench)
    assert bench.machine.registry.joiners() == []
    while "a" in bench.names() or "b" in bench.names():
        bench.tick_at_deadline()
    assert bench.names() == "cd"
    assert all_call(bench, UPDATE, 2) == Decision(2, OK, value=2)
    assert bench.names() == "cdef"


def test_another_host_of_the_same_name_is_told(bench: MasterBench) -> None:
    """L1: its peers would wait as long as the other host takes part, and no log would say why."""
    begun_ns = bench.now_ns
    come(bench, "e", host="one")
    bench.tick(MS)
    come(bench, "f", host="one")
    link(bench)
    while bench.pending():
        bench.tick_at_deadline()
    assert bench.now_ns - begun_ns == limits.HOST_NAMESAKE_WAIT_NS
    reason = "peers of a host one are members; use another host= name for another host"
    assert kicked(bench) == {"e": reason, "f": reason}
    assert bench.names() == "abcd"


def test_a_restarted_host_waits_for_the_longest_heartbeat_timeout(bench: MasterBench) -> None:
    """L2: its power failed, and the master notices only then that the former processes are gone."""
    come(bench, "ef", host="one")
    link(bench)
    bench.tick(limits.HEARTBEAT_TIMEOUT_MAX_NS)
    bench.disconnect("ab")
    while "a" in bench.names() or "b" in bench.names():
        bench.tick_at_deadline()
    assert all_call(bench, UPDATE, 2) == Decision(2, OK, value=2)
    assert bench.names() == "cdef"


def test_a_host_that_has_lost_a_member_has_no_namesake() -> None:
    """L2: b goes as soon as the list without a is committed."""
    bench = MasterBench()
    come(bench, "ab", masters=MASTERS)
    see(bench)
    come(bench, "cd", masters=MASTERS)
    link(bench)
    all_call(bench, UPDATE, 1)
    see(bench)
    come(bench, "ef", host="one", masters=MASTERS)
    link(bench)
    bench.tick(limits.HOST_NAMESAKE_WAIT_NS - MS)
    bench.leave("a")
    bench.tick(MS)
    assert (bench.names(), bench.pending()) == ("bcd", "ef")
    see(bench)
    assert (bench.names(), bench.pending()) == ("cd", "ef") and kicked(bench).keys() == {"b"}


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_a_pending_peer_that_goes_takes_its_host_along(bench: MasterBench, how: str) -> None:
    """L1: otherwise the others of its host would wait for their admission without end."""
    come(bench, "ef")
    bench.leave("e") if how == "leaves" else bench.lose("e")
    assert kicked(bench) == {"f": "its host three has lost a peer"}
    assert bench.names() == "abcd" and len(bench.machine.registry.peers) == 4


def test_who_does_not_fit_its_host_is_told(bench: MasterBench) -> None:
    come(bench, "e")
    come(bench, "f", host_size=3)
    assert kicked(bench).pop("f") == "peers of host three differ in host_size: 3 and 2"
    come(bench, "f")
    come(bench, "g")
    reason = "all 2 peers of host three are already waiting; use another host= name for another host"
    assert kicked(bench)["g"] == reason
    assert {peer.name for peer in bench.machine.registry.pending()} == {"e", "f"}


@pytest.mark.parametrize("lost", ["", "b"])
def test_a_new_master_knows_of_hosts_by_reports(lost: str) -> None:
    """L1: the new master does not know the host of an absent member. It waits for that one before it removes any."""
    bench = TakeOver()
    for name in "acdb":
        if name != lost:
            bench.report(name, "abcd", hello=of_host(name))
    bench.recover()
    assert bench.names() == "abcd"
    while lost and lost in bench.names():
        assert kicked(bench) == {}
        bench.tick_at_deadline()
    assert bench.names() == ("cd" if lost else "abcd")
    assert set(kicked(bench)) == ({"a"} if lost else set())


def test_a_host_that_only_the_former_master_had_admitted_comes_late() -> None:
    """L3: the second peer is a member before it has reported, so that the first one is not removed for lack of it."""
    bench = TakeOver()
    for name in "ab":
        bench.report(name, "ab", hello=of_host(name))
    bench.recover()
    late: dict[str, Any] = {"epoch": 6, "round": 1, "since": 6}
    bench.report("e", "abef", hello=of_host("e"), **late)
    assert bench.names() in ("abef", "abfe") and kicked(bench) == {}
    bench.report("f", "abef", hello=of_host("f"), **late)
    assert all(peer.has_reported for peer in bench.machine.registry.order) and kicked(bench) == {}
    assert bench.names() in ("abef", "abfe")


def test_with_several_masters_no_list_without_members_is_proposed() -> None:
    """S3 (duel 20041): a report with an empty list tells another master nothing about past decisions."""
    bench = MasterBench()
    come(bench, "ab", masters=("m:1", "n:2"), begins=bench.machine.run_id)
    for name in "ab":
        bench.say(name, Acknowledgement(bench.machine.registry.epoch))
    link(bench)
    bench.leave("a")
    bench.say("b", Acknowledgement(bench.machine.registry.epoch))
    assert kicked(bench) == {"b": "its host one has lost a peer"}
    assert all(listed.members for listed in bench.epochs.values())


def test_a_host_that_connects_again_at_once_is_registered(bench: MasterBench) -> None:
    """e leaves and f is removed. A new process of the host does not belong with the ones that are gone."""
    come(bench, "ef")
    bench.leave("e")
    assert kicked(bench) == {"f": "its host three has lost a peer"}
    come(bench, "g")
    assert "g" not in kicked(bench) and [peer.name for peer in bench.machine.registry.pending()] == ["g"]


def test_a_pending_peer_that_was_away_when_its_host_lost_another_is_told(bench: MasterBench) -> None:
    """L1: otherwise it would be half a host, and wait without end."""
    come(bench, "ef")
    link(bench)
    bench.disconnect("e")
    bench.leave("f")
    come(bench, "e", connection=2)
    assert kicked(bench) == {"e": "its host three has lost a peer"}


def test_a_joiner_that_reaches_a_host_that_is_not_whole_is_not_admitted(bench: MasterBench) -> None:
    """S6: x reaches only e. e stays pending, as f of its host reaches nobody."""
    come(bench, "ef")
    bench.groups["x"] = 0
    bench.hello("x")
    for name, other in zip("ac", "ca", strict=True):
        bench.say(name, Linked(pids(other + "e")))
    bench.say("e", Linked(pids("acx")))
    bench.say("x", Linked(pids("e")))
    all_call(bench, UPDATE, 2)
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert bench.verdict("a", 2) is not None and bench.names() == "abcd"


def test_what_is_left_of_a_host_does_not_take_its_new_processes_along(bench: MasterBench) -> None:
    """L3: f leaves while e is away, a new process of the host registers, and then e is lost."""
    come(bench, "ef")
    bench.disconnect("e")
    bench.leave("f")
    come(bench, "g")
    bench.tick(limits.DISCONNECT_GRACE_NS)
    assert [peer.name for peer in bench.machine.registry.pending()] == ["g"] and "g" not in kicked(bench)


def test_the_processes_of_a_host_that_died_do_not_take_its_new_ones_along(bench: MasterBench) -> None:
    """L2: a far host was restarted at once, so the master still waits for its old processes when the new ones come."""
    come(bench, "ef", handshake_ms=400)
    for name in "ef":
        bench.disconnect(name)
        bench.tick(1)
    for group, name in enumerate("gh"):
        come(bench, name, handshake_ms=400)
        told = [m.host_missing for m in bench.said[bench.connections["g"]] if isinstance(m, Welcome)]
        assert told[-1] == 1 - group  # L1: peers that are away may not come back.
    link(bench)
    bench.tick(limits.RECONNECT_GRACE_HANDSHAKES * 400 * limits.MS)
    assert kicked(bench) == {} and bench.pending() == "gh"
    all_call(bench, UPDATE, 2)
    assert bench.names() == "abcdgh"


@pytest.mark.parametrize("is_whole", [False, True])
def test_only_who_is_there_makes_a_host_whole(is_whole: bool) -> None:
    """L2: a host was restarted under a master that is not the first of the list. The old processes are away."""
    bench = MasterBench()
    how = {"masters": MASTERS, "master_index": 1, "handshake_ms": 400}
    come(bench, "abef", **how)
    link(bench)
    bench.disconnect("e")
    if is_whole:
        bench.tick(1)
        bench.disconnect("f")
    else:
        bench.leave("f")
    for name in "gh"[: 1 + is_whole]:
        bench.tick(1)
        come(bench, name, **how)
    link(bench)
    bench.tick(limits.RECONNECT_GRACE_HANDSHAKES * 400 * limits.MS)
    assert bench.pending() == ("gh" if is_whole else "g") and kicked(bench) == {}
    told = bench.tick(2 * limits.HOST_WAIT_NS)
    sent_on = {str(to)[0] for to, message in told if isinstance(message, Refused)}
    assert sent_on == (set() if is_whole else {"g"})


def test_a_host_is_whole_once_who_was_away_is_back() -> None:
    bench = MasterBench()
    how = {"masters": MASTERS, "master_index": 1, "handshake_ms": 400}
    come(bench, "abe", **how)
    bench.disconnect("e")
    come(bench, "f", **how)
    come(bench, "e", connection=2, **how)
    link(bench)
    assert not [m for _, m in bench.tick(2 * limits.HOST_WAIT_NS) if isinstance(m, Refused)]
    assert bench.pending() == "ef"


def test_hosts_in_two_halves_are_the_same_halves_in_all_groups() -> None:
    """L2: of two halves the one with the earliest member stays. Here that is a different half in each group.

    If the groups chose differently, all hosts would have lost a peer, and all other peers would be removed too.
    """
    bench = MasterBench()
    come(bench, "abcfedijkl")
    link(bench)
    all_call(bench, UPDATE, 1)
    bench.leave("a")
    names = bench.names()
    assert names == "cfedijkl"
    for half in (("two", "four"), ("three", "five")):
        for group in (0, 1):
            bench.link([name for name in names if HOSTS[name] in half and GROUPS[name] == group])
    bench.begin(names, 5, oldest=5)
    bench.tick_at_deadline()
    assert bench.names() == "cdij"


def test_a_peer_that_was_away_when_others_of_its_host_were_sent_on_stays() -> None:
    """L3: it is sent on later, and not removed."""
    bench = MasterBench(MasterOptions(disconnect_grace_ns=4 * limits.HOST_WAIT_NS))
    come(bench, "ab", masters=MASTERS, master_index=1)
    come(bench, "ef", host_size=3, masters=MASTERS, master_index=1)
    link(bench)
    bench.disconnect("e")
    bench.tick(2 * limits.HOST_WAIT_NS)
    assert [peer.name for peer in bench.machine.registry.pending()] == ["e"]
    come(bench, "e", host_size=3, masters=MASTERS, master_index=1, connection=2)
    assert kicked(bench) == {} and [peer.name for peer in bench.machine.registry.pending()] == ["e"]


def test_who_was_admitted_with_a_late_reporter_is_admitted_with_it() -> None:
    """L1, L3: the former master admitted e and f, but only f has heard of it. f reports when e is pending again."""
    bench = TakeOver()
    for name in "abcd":
        bench.report(name, "abcd", 5, round=1, hello=of_host(name))
    come(bench, "e", run_id=OLD_RUN)
    bench.recover()
    assert [peer.name for peer in bench.machine.registry.pending()] == ["e"]
    bench.report("f", "abcdef", 6, round=2, hello=of_host("f"))
    assert bench.names() == "abcdef" and kicked(bench) == {}


def test_a_late_member_that_is_back_without_its_host_is_told() -> None:
    """L1: c and d came late and were lost. c knows a later list, so it is back; d is refused, so c must go."""
    bench = TakeOver()
    for name in "ab":
        bench.report(name, "abcd", 5, round=1, hello=of_host(name))
    while bench.names() != "ab":
        bench.tick_at_deadline()
    bench.hello("n", run_id=OLD_RUN)
    bench.report("c", "abcdn", 6, round=2, hello=of_host("c"))
    assert bench.names() == "abn" and set(kicked(bench)) == {"c"}


# --- A host that stays incomplete -----------------------------------------------------------------------------------


def missing(bench: MasterBench, name: str) -> list[int]:
    """The numbers of missing peers of its host that a peer was told on its latest connection."""
    return [m.host_missing for m in bench.said[bench.connections[name]] if isinstance(m, Welcome)]


def test_who_waits_hears_how_many_of_its_host_are_missing(bench: MasterBench) -> None:
    come(bench, "e", host_size=3)
    come(bench, "f", host_size=3)
    assert (missing(bench, "e"), missing(bench, "f")) == ([2, 1], [1])
    bench.hello("g", host="three", host_size=3)
    assert [missing(bench, name)[-1] for name in "efg"] == [0, 0, 0]
    assert missing(bench, "c") == [1, 0], "it was admitted, and hears of no other host"


def test_a_new_master_tells_it_too() -> None:
    """L1: that master has never heard of the peer that is gone."""
    bench = TakeOver()
    for name in "ab":
        bench.report(name, "ab", hello=of_host(name))
    come(bench, "e")
    bench.recover()
    assert missing(bench, "e") == [1] and missing(bench, "a") == [0]


def waiting(kind: str, **options: Any) -> PeerBench:
    """A peer of a host of four that waits to be admitted, in a call of its user. Its run has the id OLD_RUN."""
    peer = PeerBench(host="one", host_size=4, **options)
    if kind == "pending":
        peer.connecting()
    else:
        peer.member("ab")
        peer.hear(Refused(Refusal.YIELDED, ""))
        peer.topology(5)
    return peer


@pytest.mark.parametrize("kind", ["pending", "returning"])
def test_a_peer_whose_host_stays_incomplete_is_told(kind: str) -> None:
    """L1: one of a host of four has not come. connect() or update_topology() of the others would wait without end."""
    peer = waiting(kind)
    peer.hear(Welcome(OLD_RUN, 3, host_missing=2))
    peer.tick(limits.HOST_TIMEOUT_NS // 2)
    peer.hear(Welcome(OLD_RUN, 3, host_missing=1))
    deadline_ns = peer.machine.deadline_ns()
    assert deadline_ns == peer.now_ns + limits.HOST_TIMEOUT_NS // 2
    assert peer.tick(limits.HOST_TIMEOUT_NS // 2 - 1) == [] and len(peer.open) == 1
    error = peer.error(peer.tick(1))
    assert isinstance(error, HostIncomplete) and (error.host, error.missing) == ("one", 1)
    assert "1 of 4 peers of host one have not registered within 600 s" in str(error)
    assert peer.machine.state is State.CLOSED and not peer.open and peer.machine.deadline_ns() is None


@pytest.mark.parametrize("kind", ["pending", "returning"])
@pytest.mark.parametrize("missing", [0, 1])
def test_who_waits_with_the_first_that_gives_up_hears_the_same(kind: str, missing: int) -> None:
    """One of a host of four has not come. Another peer of it that has waited a little longer gives up, so all must
    leave.

    If the host was never whole, their error says so, and not only that the host has lost a peer.
    """
    peer = waiting(kind)
    peer.hear(Welcome(OLD_RUN, 3, host_missing=missing))
    peer.tick(limits.HOST_TIMEOUT_NS - 1)
    error = peer.error(peer.hear(Kick(Result.RANK_CONNECTION_LOST, "its host one has lost a peer")))
    assert isinstance(error, Kicked) and isinstance(error, HostIncomplete) is bool(missing)
    assert "its host one has lost a peer" in str(error) and ("1 of 4 peers" in str(error)) is bool(missing)


@pytest.mark.parametrize("kind", ["pending", "returning"])
@pytest.mark.parametrize("how", ["whole", "admitted"])
def test_a_peer_whose_host_is_complete_waits_on(kind: str, how: str) -> None:
    """The members admit it when they call update_topology(), even if that is hours later."""
    peer = waiting(kind)
    peer.hear(Welcome(OLD_RUN, 3, host_missing=1))
    peer.hear(Welcome(OLD_RUN, 3) if how == "whole" else member_list(3 << 32, "abxyz"))
    peer.tick(10 * limits.HOST_TIMEOUT_NS)
    assert peer.machine.state is not State.CLOSED


def test_the_wait_for_a_host_is_one_over_all_masters() -> None:
    """L1: half a host may be sent from one master to the next, and masters may be restarted."""
    peer = waiting("pending", masters=MASTERS)
    spent_ns = 0
    while peer.machine.error is None:
        peer.hear(Welcome(OLD_RUN, 3, host_missing=1))
        peer.tick(limits.HOST_WAIT_NS)
        spent_ns += limits.HOST_WAIT_NS
        if peer.machine.error is None:
            peer.hear(Refused(Refusal.NO_QUORUM, "some peers of host one have not registered at this master"))
            peer.tick()
            peer.up()
    assert isinstance(peer.machine.error, HostIncomplete)
    assert spent_ns in (limits.HOST_TIMEOUT_NS, limits.HOST_TIMEOUT_NS + limits.HOST_WAIT_NS)


def test_while_no_master_leads_nobody_is_missed() -> None:
    """L3: the others of the host may have come in the meantime, and find the new master a moment later."""
    peer = waiting("pending", master_timeout_ns=10 * limits.HOST_TIMEOUT_NS)
    peer.hear(Welcome(RUN_ID, 3, host_missing=1))
    peer.down()
    peer.tick(2 * limits.HOST_TIMEOUT_NS)
    peer.up()
    peer.hear(Welcome(RUN_ID, 4, host_missing=1))
    peer.tick(limits.HOST_WAIT_NS - 1)
    assert peer.machine.state is State.PENDING
    peer.tick(1)
    assert isinstance(peer.machine.error, HostIncomplete)
