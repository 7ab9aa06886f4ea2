"""Messages that reach a master late, or from peers that know less, and what it must not do before them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.limits import SECOND
from zpccl.protocol import events
from zpccl.protocol.effects import Reject, Resolve, Send
from zpccl.protocol.leadership import Promise
from zpccl.protocol.messages import (
    Acknowledgement,
    Hello,
    Linked,
    Neighbours,
    Plan,
    Refusal,
    Refused,
    RunReport,
    Welcome,
    since_of,
)
from zpccl.protocol.peer import State

from .harness import MasterBench, PeerBench, bench_of, entry, member_list, neighbour, offer, pid, pids
from .standby import TWO, Standby, peer_of_two
from .takeover import OLD_RUN, TakeOver, hello_of, report_of

OTHER_RUN = b"one more run too"


def ask(bench: Standby, name: str, members: str, **facts: Any) -> RunReport:
    """A peer says Hello and is asked for its report. Returns the report."""
    report = report_of(name, members, **facts)
    hello = replace(report.hello, connection=1, **TWO)
    assert [message.refusal for _, message in bench.say(name, hello, on=f"{name}1")] == [Refusal.REPORT]
    return replace(report, hello=replace(hello, promised=0))


# --- The master -------------------------------------------------------------------------------------------------------


def test_a_report_that_would_change_the_list_waits_until_it_is_committed() -> None:
    """S3: this holds for a report that the candidate asked for, and for one that the leader asks for."""
    bench = Standby()
    late = ask(bench, "n", members="abcden", epoch=6, round=2, parent=5, old_members=pids("abcde"))
    bench.report("abc", "abcde", 5, round=1, parent=4, old_members=pids("ab"))
    bench.recover()
    first = bench.machine.registry.epoch
    bench.say("n", replace(late, hello=bench.promising(late.hello)))
    assert (bench.names(), bench.machine.registry.epoch) == ("abcde", first)
    bench.see("abc")
    assert bench.names() == "abcden" and bench.machine.registry.old_members == pids("abcde")


def test_a_late_report_is_forgotten_if_the_key_of_its_sender_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """S7, L1: the master accepts nothing more from n, so all would wait for its votes."""
    is_of = "zpccl.protocol.master.is_peer_id_of"
    monkeypatch.setattr(is_of, lambda peer_id, identity: not identity or peer_id == pid(identity))
    bench = Standby()
    late = ask(bench, "n", members="abcn", epoch=6, round=2, parent=5, old_members=pids("abc"))
    bench.report("abc", "abc", 5, round=1, parent=4, old_members=pids("ab"))
    bench.recover()
    bench.say("n", replace(late, hello=bench.promising(late.hello)))
    bench.handle(events.KeysRevoked({"n": "nick"}))
    bench.see("abc")
    assert bench.names() == "abc"


def test_who_reports_to_a_leader_that_steps_down_is_asked_again() -> None:
    """L1: c belongs to the run that would be next, and the leader hears of a higher promise."""
    bench = TakeOver()
    bench.report("n", "nq", waits=False)
    bench.recover()
    bench.report("c", "cde", run_id=OTHER_RUN)
    hello = replace(hello_of("q"), promised=bench.machine.term + 100, leader=b"a former process")
    told = bench.say("q", hello, on="q1")
    assert bench.machine.is_recovering
    assert [message.refusal for to, message in told if to == "c1"] == [Refusal.REPORT]


def lead_with_a_report_that_waits() -> TakeOver:
    """The report of n, which was admitted after the removal of d, waits until c, or nobody, may tell of that."""
    bench = TakeOver()
    bench.report("ab", "abcd")
    bench.tick(limits.MINORITY_WAIT_NS)
    assert bench.names() == "abcd"
    assert [m.refusal for to, m in bench.report("n", "abcn", 7, since=7, round=1) if to == "n1"] == []
    return bench


def test_whose_report_waits_at_a_leader_that_steps_down_is_asked_again() -> None:
    """L1: n has reported and says nothing more by itself."""
    bench = lead_with_a_report_that_waits()
    hello = replace(hello_of("c"), promised=bench.machine.term + 100, leader=b"a former process")
    told = bench.say("c", hello, on="c1")
    assert bench.machine.is_recovering
    assert [message.refusal for to, message in told if to == "n1"] == [Refusal.UNREGISTERED]


def test_whose_report_waits_in_a_run_that_yields_is_told() -> None:
    """L1: the same. The run of n yields as soon as all others have reported or are lost."""
    bench = lead_with_a_report_that_waits()
    bench.report("x", "x", run_id=OTHER_RUN)
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.names() == "x"
    assert [message.refusal for message in bench.said["n1"]][1:] == [Refusal.YIELDED]


def test_a_member_that_is_back_before_its_loss_counts_stays() -> None:
    """L1: nobody would tell it that it is lost."""
    bench = Standby()
    bench.report("abc", "abc")
    bench.link("abc")
    assert bench.names() == "abc" and not bench.machine._leader.may_change
    bench.disconnect("c")
    bench.say("a", Linked(pids("b")))
    hello = replace(hello_of("c", connection=2), term=bench.machine.term, **TWO)
    told = bench.say("c", bench.promising(hello), on="c2")
    assert any(isinstance(message, Welcome) for to, message in told if to == "c2")
    bench.link("abc")
    bench.see("cab")
    assert bench.names() == "abc"


def test_a_run_does_not_yield_while_one_is_absent_who_may_know_a_decision() -> None:
    """S1: q may have returned from a barrier of which n and p know nothing. The wait ends once q has had its time."""
    bench = Standby()
    bench.report("np", "npq", run_id=OLD_RUN)
    bench.recover()
    bench.see("np")
    assert bench.names() == "npq"
    for name in "abc":
        report = ask(bench, name, members="abc", run_id=OTHER_RUN)
        bench.say(name, replace(report, hello=bench.promising(report.hello)))

    def yielded() -> list[Any]:
        return [message for message in bench.said["n1"] if isinstance(message, Refused)]

    assert yielded()[1:] == []
    bench.tick(limits.QUORUM_WAIT_NS)
    bench.see("np")
    bench.tick(SECOND)
    assert [message.refusal for message in yielded()[1:]] == [Refusal.YIELDED]


@pytest.mark.parametrize("knocks", [False, True])
def test_a_run_whose_members_are_all_gone_yields_to_an_earlier_one(knocks: bool) -> None:
    """L1: q has not reported, so the run does not yield before q is lost. The members that are there show that the
    network works, whoever else connects and leaves."""
    bench = TakeOver()
    bench.report("np", "npq")
    bench.recover()
    bench.report("ab", "ab", run_id=OTHER_RUN)
    bench.disconnect("np")
    assert bench.names() == "npq"
    if knocks:
        bench.hello("x", is_member=True)
        bench.disconnect("x")
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.names() == "ab"


def test_who_was_refused_for_good_is_in_no_later_list() -> None:
    """S3: c is lost. Then a peer of a host comes that the former master had admitted to c's list."""
    bench = Standby()
    bench.report("ab", "abc", 5, round=1)
    bench.recover()
    bench.see("ab")
    bench.tick(limits.QUORUM_WAIT_NS)
    assert bench.names() == "ab"
    bench.see("ab")
    hello = replace(hello_of("n"), host="H", host_size=2)
    late = ask(bench, "n", members="abcno", epoch=6, round=2, parent=5, old_members=pids("abc"), hello=hello)
    bench.say("n", replace(late, hello=bench.promising(late.hello)))
    assert bench.names() == "abon"


def standby_and_newcomer() -> tuple[Standby, Hello]:
    """A master leads the run of a and b, and p connects. Returns p's Hello."""
    bench = Standby()
    bench.report("ab", "ab")
    bench.see("ab")
    bench.connections["p"] = "p1"
    hello = replace(hello_of("p"), is_member=False, **TWO)
    return bench, hello


def test_who_has_promised_a_later_leadership_is_not_registered_by_an_earlier_one() -> None:
    """S3: a list may count its promise. L1: so the leader asks for promises in a later term, as for a member."""
    bench, hello = standby_and_newcomer()
    bench.say("p", bench.promising(hello, Promise(bench.machine.term - 1, b"an earlier one.!")))
    assert [peer.peer_id for peer in bench.machine.registry.pending()] == [pid("p")]
    term = bench.machine.term
    bench.say("p", bench.promising(hello, Promise(limits.TERM_MAX, b"nobody has this!")))
    assert not bench.machine.is_recovering
    hello = replace(hello_of("q"), is_member=False, **TWO)
    told = bench.say("q", bench.promising(hello, Promise(term + 7, b"a later one....!")), on="q1")
    assert {to for to, message in told if isinstance(message, Refused)} >= {"a1", "b1"}
    candidate = bench.machine.candidate
    assert candidate is not None and candidate.promise.term > term + 7


def test_a_pending_peer_that_a_later_leader_has_admitted_is_ahead() -> None:
    """B1: it answers a request for a report with its Hello, so the master must not repeat the request."""
    bench, hello = standby_and_newcomer()
    bench.say("p", hello)
    term = bench.machine.term + 7
    hello = replace(hello, is_member=True, connection=2, term=term)
    told = bench.say("p", bench.promising(hello, Promise(term, b"a later one....!")), on="p2")
    assert {to for to, message in told if isinstance(message, Refused)} >= {"a1", "b1"}
    assert bench.machine.candidate is not None and bench.machine.candidate.promise.term > term


@pytest.mark.parametrize("is_member", [False, True])
def test_a_joiner_does_not_make_the_one_master_step_down(is_member: bool) -> None:
    """S6: whatever its promise. With one address, no list counts the promise of a joiner before it is a member."""
    bench = bench_of("ab")
    bench.hello("n")
    hello = replace(hello_of("n", bench.machine.run_id), is_member=is_member)
    bench.say("n", bench.promising(hello, Promise(bench.machine.term + 1, b"whatever it says")))
    assert not bench.machine.is_recovering


def test_no_sync_begins_while_the_list_is_not_committed() -> None:
    """Rule "decide": c waits for a link to a holder. d is lost, and the list without it is only proposed."""
    bench = Standby()
    bench.begin_run("abcd")
    for name, others in (("a", "bd"), ("b", "ad"), ("d", "ab"), ("c", "")):
        bench.say(name, Linked(pids(others)))
    for name, revision, text in (("a", 1, "x"), ("b", 1, "x"), ("d", 1, "x"), ("c", 0, "y")):
        bench.say(name, offer(5, revision, entry("w", text)))
    bench.disconnect("d")
    while "d" in bench.names():
        bench.tick_at_deadline()
    bench.say("c", Linked(pids("ab")))
    told = [message for name in "ab" for _, message in bench.say(name, Linked(pids("abc".replace(name, ""))))]
    assert not bench.machine.registry.is_committed and not any(isinstance(message, Plan) for message in told)
    bench.see("abc")
    assert any(isinstance(message, Plan) for message in bench.said["a1"])


def test_a_sync_that_waits_for_links_waits_for_the_list_too() -> None:
    """L1. Duel, seed 12521081: members without links were removed, and the master span until that was committed."""
    bench = Standby()
    bench.begin_run("abc")
    bench.say("abc", Linked(()))
    for name, revision in zip("abc", (1, 1, 0), strict=True):
        bench.say(name, offer(5, revision, entry("w", name)))
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "a" and not bench.machine.registry.is_committed
    bench.see("abc")
    assert bench.verdict("a", 5) is not None


def test_groups_that_come_and_go_leave_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: of this many groups it keeps the revision of the last sync."""
    bench = MasterBench()
    bench.members("z", group=1_000_000)
    for number, names in enumerate(("ab", "cd", "ef", "gh")):
        bench.members(names, group=number)
        bench.say(names, offer(5, 1))
        assert number in bench.machine.syncs.last_revision
        bench.leave(names)
        assert bench.machine.syncs._completed_last == {}
    monkeypatch.setattr(limits, "PEERS_MAX", 2)
    bench.members("i", group=9)
    bench.leave("i")
    assert list(bench.machine.syncs.last_revision) == [2, 3]


# --- The peer ---------------------------------------------------------------------------------------------------------


def returning() -> PeerBench:
    """A peer whose run has yielded, and which another run has registered."""
    peer = peer_of_two().member()
    peer.hear(Refused(Refusal.YIELDED, ""))
    peer.hear(Welcome(OLD_RUN, 3))
    assert peer.machine.state is State.RETURNING
    return peer


@pytest.mark.parametrize("make", [returning, lambda: peer_of_two().pending()], ids=["returning", "pending"])
def test_who_acknowledges_a_list_without_it_tells_of_that_list(make: Any) -> None:
    """S3, L2: it may be an old member, so that the list needs it. Then it must not forget the list."""
    peer = make()
    (report,) = peer.hear(Refused(Refusal.REPORT, "", term=9))
    assert isinstance(report.message, RunReport) and report.message.members == ()
    peer.hear(Welcome(peer.machine.run_id, 9))
    told = replace(member_list(9 << 32, "bc"), old_members=pids("abc"), parent=5)
    assert Send(Acknowledgement(9 << 32)) in peer.hear(told)
    (report,) = peer.hear(Refused(Refusal.REPORT, "", term=12))
    said = report.message
    assert [member.peer_id for member in said.members] == list(pids("bc")) and not said.hello.is_member
    assert (said.epoch, said.parent, said.old_members) == (9 << 32, 5, pids("abc"))
    assert since_of(said.members, said.hello.peer_id) == 0


def test_who_waits_to_be_admitted_keeps_its_promise() -> None:
    """S3: an earlier master of the run does not know yet that it was replaced."""
    peer = peer_of_two().pending()
    run_id, term = peer.machine.run_id, peer.machine.term
    peer.hear(Refused(Refusal.REPORT, "", term=term + 9))
    peer.down()
    peer.up()
    peer.hear(Welcome(run_id, term + 5))
    assert peer.hear(member_list((term + 5) << 32, "ab")) == [] and peer.machine.state.name == "PENDING"
    peer.hear(Welcome(run_id, term + 10))
    peer.hear(member_list((term + 10) << 32, "ab"))
    assert peer.machine.state.name == "MEMBER"


def test_who_was_refused_for_good_is_bound_to_no_later_leadership() -> None:
    """L1: it has promised a candidate that was never elected. The leader has a lower term and would be refused."""
    peer = peer_of_two().pending()
    peer.hear(replace(member_list(3, "ab"), old_members=pids("b"), parent=2))
    peer.hear(Refused(Refusal.REPORT, "", term=40))
    (hello,) = peer.hear(Refused(Refusal.UNKNOWN_SESSION, "", peer.machine.run_id, epoch=9 << 32))
    assert (hello.message.is_member, hello.message.promised) == (False, 0)
    peer.hear(Welcome(peer.machine.run_id, 9))
    peer.hear(member_list(9 << 32, "ab"))
    assert peer.machine.state.name == "MEMBER"


@pytest.mark.parametrize("held", ["", "reduce", "sync"])
def test_an_update_that_is_given_up_while_the_run_yields_is_answered_once(held: str) -> None:
    """L1, S1: and a call behind it does not count as done when this peer is admitted elsewhere."""
    peer = PeerBench().member("ab")
    peer.topology(2)
    peer.handle(events.CallWithdrawn(2, timed_out=True))
    told = peer.hear(Refused(Refusal.YIELDED, ""))
    assert [type(effect) for effect in told if isinstance(effect, Reject | Resolve)] == [Reject]
    peer.hear(Welcome(OLD_RUN, 0))
    peer.hear(Neighbours((neighbour("x"), neighbour("y"))))
    peer.tick(limits.WITHDRAW_TIMEOUT_NS)
    if held:
        answers = peer.reduce(3) if held == "reduce" else peer.sync(3)
        assert [effect.call_id for effect in answers if isinstance(effect, Reject | Resolve)] == [3], "it is alone"
    told = peer.hear(member_list(5, "xya"))
    assert not any(isinstance(effect, Resolve) for effect in told)


def test_who_reports_again_by_a_key_that_is_allowed_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: c and d have one key. It is revoked and allowed again while the master recovers, and only d reports again."""
    is_of = "zpccl.protocol.master.is_peer_id_of"
    monkeypatch.setattr(is_of, lambda peer_id, identity: not identity or peer_id in pids("cd"))
    bench = TakeOver()
    bench.report("abcd", "abcd", waits=False)
    candidate = bench.machine.candidate
    assert candidate is not None
    for name in "cd":
        event, report = candidate.reports[pid(name)]
        candidate.reports[pid(name)] = dataclasses.replace(event, identity="their key"), report
    bench.handle(events.KeysRevoked({"their key": "guest"}))
    bench.handle(events.PeerMessageReceived("d1", candidate.reports[pid("d")][1], identity="their key"))
    bench.recover()
    assert bench.names() == "abd"
