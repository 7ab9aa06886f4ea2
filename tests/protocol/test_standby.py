"""Several masters: which one leads, who waits, and where peers go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Kicked, MasterUnreachable, Result, TooFewPeers
from zpccl.limits import SECOND
from zpccl.protocol import events
from zpccl.protocol.effects import Reject, Send, UseMaster
from zpccl.protocol.leadership import Promise
from zpccl.protocol.messages import (
    Acknowledgement,
    Decision,
    Hello,
    Kick,
    Leave,
    Linked,
    Members,
    MembersCommitted,
    Ready,
    Refusal,
    Refused,
    RunReport,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)
from zpccl.protocol.peer import State

from .harness import CONNECT, RUN_ID, UPDATE, PeerBench, bench_of, member_list, pid, pids, running_attempt, spec, token
from .standby import TWO, Standby, peer_of_two
from .takeover import OLD_RUN, hello_of, report_of


@pytest.fixture
def bench() -> Standby:
    return Standby()


def refusals(told: list[Any]) -> list[Refusal]:
    return [message.refusal for _, message in told if isinstance(message, Refused)]


# --- Taking over ------------------------------------------------------------------------------------------------------


def test_a_quorum_goes_on_after_the_grace_period(bench: Standby) -> None:
    """L3: three of four are a quorum; the fourth may still come."""
    bench.report("abc", "abcd")
    assert bench.machine.is_recovering
    told = bench.tick_at_deadline()
    assert sum(isinstance(message, Welcome) for _, message in told) == 3
    assert bench.names() == "abcd"


def test_all_of_them_go_on_at_once(bench: Standby) -> None:
    bench.report("a", "ab")
    assert any(isinstance(message, Welcome) for _, message in bench.report("b", "ab"))


def test_whoever_has_said_hello_is_waited_for(bench: Standby) -> None:
    """L3: c may know a list that includes itself, of which the others have not heard yet."""
    report = report_of("c", "abc", epoch=6, parent=5, old_members=pids("ab"))
    hello = replace(report.hello, connection=1, **TWO)
    (asked,) = [message for _, message in bench.say("c", hello, on="c1")]
    assert asked.refusal is Refusal.REPORT
    bench.report("ab", "ab")
    assert bench.machine.is_recovering
    bench.say("c", replace(report, hello=bench.promising(hello)))
    assert bench.names() == "abc"


def test_a_part_that_is_no_quorum_waits_without_end(bench: Standby) -> None:
    """S3: c and d are half of the members, without the lowest id."""
    bench.report("cd", "abcd")
    bench.tick(3600 * SECOND)
    assert bench.machine.is_recovering
    assert any(isinstance(message, Welcome) for _, message in bench.report("b", "abcd"))


def test_half_with_the_lowest_id_goes_on(bench: Standby) -> None:
    bench.report("ad", "abcd")
    bench.tick_at_deadline()
    assert bench.names() == "abcd"


def test_an_old_member_that_never_knew_it_acknowledges_the_list_without_it(bench: Standby) -> None:
    """L2. Duel, seed 9561481: c was admitted without hearing of it, and removed; then b left. All waited for ever."""
    old = replace(hello_of("c"), is_member=False, **TWO)
    assert bench.say("c", old, on="c1") == []
    told = bench.report("a", "ab", 9, old_members=pids("abc"), parent=5)
    assert [(to, m.refusal) for to, m in told if to == "c1"] == [("c1", Refusal.REPORT)]
    bench.say("c", report_of("c", "", hello=bench.promising(old)))
    told = bench.tick_at_deadline()
    assert [type(m) for to, m in told if to == "c1"] == [Welcome, Members] and bench.names() == "ab"
    bench.see("a")
    assert bench.machine.registry.old_members == pids("abc")
    told = bench.say("c", Acknowledgement(bench.machine.registry.epoch))
    assert bench.machine.registry.old_members == ()
    assert [m.refusal for to, m in told if to == "c1"] == [Refusal.UNREGISTERED]
    assert any(isinstance(m, Welcome) for _, m in bench.say("c", old)), "it waits to be admitted, like any newcomer"


def test_who_has_gone_elsewhere_does_not_count(bench: Standby) -> None:
    """S3: a has reported, but may follow another master by now."""
    bench.report("a", "abc")
    bench.disconnect("a")
    bench.report("b", "abc")
    bench.tick(3600 * SECOND)
    assert bench.machine.is_recovering


def test_a_refusal_is_final_only_when_the_list_is_committed(bench: Standby) -> None:
    """S3: the list may never be committed, and a peer that is not in it may be a member by another list."""
    bench.report("ab", "ab")
    hello = bench.promising(replace(hello_of("x"), **TWO), Promise(bench.machine.term + 1, b"some other one.."))
    for number in range(2):
        (refused,) = [m for _, m in bench.say("x", hello, on="x1") if isinstance(m, Refused)]
        assert refused.refusal is Refusal.UNKNOWN_SESSION
        final = bench.machine.run_id, bench.machine.registry.epoch
        assert (refused.run_id, refused.epoch) == (final if number else (bytes(16), 0))
        bench.see("ab")
        assert bench.machine.registry.is_committed


def test_members_cut_off_in_several_groups_go_together() -> None:
    """L2: with several masters, each list without one of them must be committed before the next one is removed."""
    bench = Standby()
    bench.groups = {name: index // 3 for index, name in enumerate("abcdefghi")}
    bench.begin_run("a")
    bench.hello("bcdefghi", **TWO)
    for names in ("abc", "def", "ghi"):
        bench.link(names)
    bench.vote("a", UPDATE, 900)
    bench.see("abcdefghi")
    for names in ("abc", "def", "ghi"):
        bench.link(names[:2])
        bench.say(names[2], Linked(()))
        bench.begin(names, 1)
    begun_ns = bench.now_ns
    while len(bench.names()) > 6:
        bench.tick_at_deadline()
        while not bench.machine.registry.is_committed:
            bench.see(bench.connections)
    assert bench.names() == "abdegh"
    assert bench.now_ns - begun_ns < limits.LINK_WAIT_TIMEOUT_NS + SECOND


def test_who_comes_back_reports_again(bench: Standby) -> None:
    """It may have heard more in the meantime, even if the master has not noticed that its old connection broke."""
    bench.report("a", "abc")
    number = bench.connections["a"]
    bench.report("a", "abc", 6)
    assert bench.connections["a"] != number
    bench.report("b", "abc")
    bench.tick_at_deadline()
    assert bench.machine.registry.epoch >= 7


def test_a_list_that_is_not_established_needs_both_quorums(bench: Standby) -> None:
    """S3: c and d know a list without a and b, which may not know it. c and d are only half of the list before."""
    bench.report("cd", "cd", 9, old_members=pids("abcd"), parent=5)
    bench.tick(3600 * SECOND)
    assert bench.machine.is_recovering


def test_who_is_removed_by_such_a_list_must_confirm_it(bench: Standby) -> None:
    """Split, seed 1533. S3, L1: nothing is decided before. Its Leave also confirms, as it goes on nowhere."""
    bench.report("b", "abcd", 5)
    bench.report("c", "cd", 9, old_members=pids("abcd"), parent=5)
    told = bench.report("d", "cd", 9, old_members=pids("abcd"), parent=5)
    told += bench.tick_at_deadline() if bench.machine.is_recovering else []
    assert [message.epoch for to, message in told if isinstance(message, Members) and to == bench.connections["b"]]
    bench.see("cd")
    assert not bench.machine.registry.is_committed
    told = bench.say("b", Acknowledgement(bench.machine.registry.epoch))
    assert any(isinstance(message, MembersCommitted) for _, message in told)
    assert [to for to, message in told if isinstance(message, Kick)] == [bench.connections["b"]]


def test_nothing_is_decided_before_the_list_is_established(bench: Standby) -> None:
    """Split, seed 456. S1, S3."""
    running = running_attempt(1, "ab", (4, 5), spec())
    bench.report("ab", "ab", running=(running,))
    bench.finish("a", 4, 1)
    bench.finish("b", 5, 1)
    assert bench.verdict("a", 4) is None
    bench.see("ab")
    assert bench.decision("a", 4).committed


def test_the_report_of_one_who_leaves_counts_with_it(bench: Standby) -> None:
    """S3: otherwise it adds to a quorum for an older list than the one that it has reported."""
    bench.report("p", "pq", 9)
    bench.leave("p")
    bench.disconnect("p")
    bench.report("r", "pqr", 5)
    bench.tick(3600 * SECOND)
    assert bench.names() != "pqr"


def test_a_newcomer_admitted_late_hears_that_its_list_is_not_established(bench: Standby) -> None:
    """S3: otherwise it would report the list to another master as committed."""
    bench.report("ab", "ab", round=3)
    bench.see("ab")
    told = bench.report("n", "abn", 6, round=4)
    assert bench.names() == "abn"
    assert all(message.old_members for _, message in told if isinstance(message, Members))


def test_those_who_have_heard_of_no_list_elect_nobody(bench: Standby) -> None:
    """Duel, seed 269, S3: they are members without knowing it, and the only peer that knew a list has left them."""
    bench.report("z", "abz", 5)
    for name in "ab":
        bench.hello(name, run_id=OLD_RUN, **TWO)
        hello = replace(hello_of(name), is_member=False, **TWO)
        if name == "a":
            bench.say(name, report_of(name, "", hello=hello))
    bench.disconnect("z")
    bench.say("b", report_of("b", "", hello=hello))
    bench.tick(3600 * SECOND)
    assert bench.machine.is_recovering


# --- Promises ---------------------------------------------------------------------------------------------------------


def test_a_promise_to_another_master_is_outbid(bench: Standby) -> None:
    """Split, seed 162. S3: the master asks both again, in a higher term than either has promised."""
    bench.report("a", "ab")
    first = bench.machine.candidate
    assert first is not None
    low = first.promise.term
    hello = replace(report_of("b", "ab").hello, promised=low + 9, **TWO)
    told = bench.say("b", hello, on="b1")
    assert {to for to, _ in told} == {"a1", "b1"}
    assert min(message.term for _, message in told) > low + 9
    assert first.reports == {}


def test_an_answer_to_an_earlier_request_does_not_count(bench: Standby) -> None:
    bench.report("a", "ab", promised=0)
    assert bench.machine.candidate is not None
    assert bench.machine.candidate.reports == {}


def test_a_leader_whose_member_has_promised_itself_gathers_anew(bench: Standby) -> None:
    """S3: another master may have a quorum by now."""
    bench.begin_run("ab")
    hello = Hello(pid("b"), token("b"), True, 0, "b", (), 9, RUN_ID, 0, 5, **TWO)
    told = bench.say("b", hello, on="b9")
    assert bench.machine.is_recovering
    assert {to for to, message in told if isinstance(message, Refused)} >= {"a1", "b9"}
    assert all(message.term > 5 for _, message in told if isinstance(message, Refused))


def test_a_member_of_another_masters_list_is_not_admitted_as_a_newcomer(bench: Standby) -> None:
    """Split, seed 96, S1: this master had removed it and decided without it."""
    bench.report("abc", "abcd", round=1)
    bench.tick_at_deadline()
    bench.see("abc")
    bench.tick(limits.QUORUM_WAIT_NS)
    assert bench.names() == "abc"
    own = bench.machine.term
    bench.report("d", "abcd", own << 32, term=own - 1, round=2)
    assert bench.names() == "abc"


def test_an_attempt_of_which_nobody_is_left_is_forgotten(bench: Standby) -> None:
    """Split, seed 1217, B1: this holds also if the list is not committed."""
    running = running_attempt(1, "a", (4,), spec())
    for name in "abc":
        bench.report(name, "abc", running=(running,) if name == "a" else ())
    assert bench.machine.operations.running
    bench.leave("a")
    assert bench.names() == "abc", "S3: no other list before the adopted one is committed"
    bench.see("bc")
    assert bench.names() == "bc"
    assert not bench.machine.registry.is_committed
    assert not bench.machine.operations.running


def test_nobody_makes_a_leader_gather_but_a_member(bench: Standby) -> None:
    """S7: neither a peer that does not know its token, nor a term that leaves no room for a next one."""
    bench.begin_run("ab")
    for bad, promised in ((token("x"), 5), (token("b"), limits.TERM_MAX)):
        bench.say("b", Hello(pid("b"), bad, True, 0, "b", (), 9, RUN_ID, 0, promised, **TWO), on="b9")
        assert not bench.machine.is_recovering


def test_peers_with_other_lists_do_not_stop_a_run() -> None:
    """L1: a stranger with two masters changes nothing."""
    bench = bench_of("ab")
    bench.say("x", Hello(pid("a"), token("x"), True, 0, "x", (), 1, RUN_ID, **TWO), on="x1")
    bench.lose("b")
    assert bench.machine.registry.is_committed


# --- Leading ----------------------------------------------------------------------------------------------------------


def test_a_quorum_goes_on_without_the_lost(bench: Standby) -> None:
    bench.begin_run("abc")
    bench.lose("c")
    assert bench.names() == "ab"


def test_a_rest_that_is_no_quorum_steps_down(bench: Standby) -> None:
    """S3: a and b may be at another master and go on there."""
    bench.begin_run("abc")
    bench.disconnect("a")
    told = bench.lose("b")
    assert bench.machine.is_recovering
    assert refusals(told) == [Refusal.REPORT]


def test_who_leaves_may_be_the_last_of_a_quorum(bench: Standby) -> None:
    """Split, seed 1592: nobody was left to confirm the list without it."""
    bench.begin_run("ab")
    bench.leave("a")
    assert bench.names() == "b"
    bench.see("b")
    assert bench.machine.registry.is_committed


def test_two_losses_need_two_steps(bench: Standby) -> None:
    """S3: the second loss waits until the list without the first one is known."""
    bench.begin_run("abcde")
    bench.lose("e")
    assert bench.names() == "abcd"
    bench.disconnect("ab")
    bench.tick(bench.options.disconnect_grace_ns)
    assert bench.machine.is_recovering


def test_nobody_is_removed_against_the_quorum(bench: Standby) -> None:
    """S3: if a member breaks its bounds, the list without it counts once that member confirms that it goes."""
    bench.begin_run("ab")
    bench.break_bounds("a")
    assert bench.names() == "b"
    bench.see("b")
    assert not bench.machine.registry.is_committed
    told = bench.say("a", Acknowledgement(bench.machine.registry.epoch))
    assert any(isinstance(message, MembersCommitted) for _, message in told)
    assert any(to == "a1" and isinstance(message, Kick) for to, message in told)


def test_who_is_removed_and_dies_before_it_confirms_may_be_elsewhere(bench: Standby) -> None:
    """S3."""
    bench.begin_run("ab")
    bench.break_bounds("a")
    bench.disconnect("a")
    assert bench.machine.is_recovering


def test_who_is_removed_is_asked_again_when_its_master_steps_down(bench: Standby) -> None:
    """L2. Duel, seed 9345785: the list without it is not committed, and nobody sent it anything any more."""
    bench.begin_run("abc")
    bench.break_bounds("c")
    assert bench.names() == "ab"
    bench.disconnect("ab")
    told = bench.tick_at_deadline()
    assert bench.machine.is_recovering
    assert [(to, message.refusal) for to, message in told] == [("c1", Refusal.REPORT)]


def test_a_link_that_stays_down_does_not_keep_the_master_busy(bench: Standby) -> None:
    """L1: one of the two is removed, whichever has the lower id, and the other one gets an error that it is alone."""
    bench.begin_run("ba")
    for name in "ab":
        bench.say(name, Linked(()))
        bench.begin(name, 50)
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "b"
    bench.see("b")
    bench.leave("a")
    assert bench.decision("b", 50).result == Result.TOO_FEW_PEERS


def test_a_member_that_has_not_seen_its_welcome_has_time(bench: Standby) -> None:
    """Split, seed 228. It may have left for another master while the welcome was on its way."""
    bench.report("abc", "abc")
    bench.see("ab")
    bench.lose("c")
    assert bench.names() == "abc"
    bench.tick(limits.QUORUM_WAIT_NS)
    assert bench.names() == "ab"


# --- Newcomers --------------------------------------------------------------------------------------------------------


def test_an_idle_standby_sends_newcomers_on(bench: Standby) -> None:
    bench.now_ns += limits.RECOVERY_GRACE_NS
    assert refusals(bench.hello("n", **TWO)) == [Refusal.NO_RUN]
    assert bench.machine.is_recovering


def test_a_newcomer_waits_where_members_are(bench: Standby) -> None:
    bench.report("b", "ab")
    assert bench.hello("n", **TWO) == []
    assert refusals(bench.tick_at_deadline()) == [Refusal.NO_QUORUM]


def test_one_that_all_others_sent_on_begins_a_run(bench: Standby) -> None:
    """This happens after a pause: members may be on their way here."""
    bench.now_ns += limits.RECOVERY_GRACE_NS
    assert bench.hello("n", begins=RUN_ID, **TWO) == []
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == "n"


def test_no_run_is_begun_by_the_word_of_a_master_that_is_no_more(bench: Standby) -> None:
    """Standby, seed 50260, S3: since it said that it led no run, it had led one, whose members were on their way."""
    bench.now_ns += limits.RECOVERY_GRACE_NS
    (_, refused) = bench.hello("n", begins=b"its predecessor.", **TWO)[0]
    assert (refused.refusal, refused.run_id) == (Refusal.NO_RUN, RUN_ID)
    assert bench.machine.is_recovering


def test_no_run_is_begun_where_members_may_come_back(bench: Standby) -> None:
    """Split, seed 203."""
    bench.begin_run("ab")
    bench.disconnect("a")
    bench.lose("b")
    bench.hello("n", begins=bench.machine.run_id, **TWO)
    assert refusals(bench.tick(limits.RECOVERY_GRACE_NS)) == [Refusal.NO_QUORUM]
    bench.now_ns += limits.RUN_MEMORY_NS
    bench.hello("n", begins=bench.machine.run_id, **TWO)
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == "n"


def test_a_newcomer_that_is_a_member_without_knowing_counts(bench: Standby) -> None:
    """Split, seed 23. L3: the former master admitted b, and died before b heard of it."""
    bench.report("z", "az", 5, old_members=pids("z"))
    ((_, asked),) = bench.hello("a", run_id=OLD_RUN, **TWO)
    assert asked.refusal is Refusal.REPORT
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.machine.is_recovering, "S3: it counts for nothing until it has promised"
    hello = replace(hello_of("a"), is_member=False, **TWO)
    bench.say("a", report_of("a", "", hello=hello))
    assert bench.names() == "az"
    assert all(peer.has_reported for peer in bench.machine.registry.order)


# --- A peer that has gone over to another run -------------------------------------------------------------------------


def test_the_sole_member_of_a_run_has_joined_another_one(bench: Standby) -> None:
    """Duel, seed 9750095, S3: it got the list of a run that it never knew, and was not asked for its report."""
    bench.now_ns += limits.RECOVERY_GRACE_NS
    bench.hello("c", begins=RUN_ID, **TWO)
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == "c"
    for name in "cab":  # The bench checks that each is asked for its report, and for nothing else.
        bench.disconnect("c")
        bench.report(name, "abc")
    bench.tick_at_deadline()
    assert (bench.names(), bench.machine.run_id) == ("abc", OLD_RUN)


def test_a_pending_peer_has_joined_another_run(bench: Standby) -> None:
    bench.begin_run("x")
    bench.hello("c", **TWO)
    assert bench.pending() == "c"
    bench.report("c", "abc")
    assert (bench.names(), bench.pending()) == ("x", ""), "until the quorum of the other run is back"
    bench.report("ab", "abc")
    assert bench.names() == "abc"


def test_a_member_has_joined_another_run_before_the_list_may_change(bench: Standby) -> None:
    bench.report("abc", "abc")
    bench.disconnect("c")
    hello = replace(hello_of("c", b"another run....."), connection=9, **TWO)
    assert [m.refusal for to, m in bench.say("c", hello, on="c9") if to == "c9"] == [Refusal.UNKNOWN_SESSION]
    assert bench.names() == "abc", "S3: no other list before the adopted one is committed"
    bench.see("ab")
    assert bench.names() == "ab"


def lead(bench: Standby, names: str) -> None:
    """The master takes over the run of these peers, and its list is committed."""
    bench.report(names, names)
    if bench.machine.is_recovering:
        bench.tick_at_deadline()
    bench.see(names)
    assert bench.names() == names and bench.machine.registry.is_committed


def test_a_member_that_may_be_at_another_master_is_lost_once_all_links_to_it_are(bench: Standby) -> None:
    """Split, seed 34003391, S6: it had tried the next master, and one link to it broke and came back."""
    bench.report("abc", "abc")
    bench.see("ac")
    bench.link("abc")
    bench.tick(limits.WITNESS_AFTER_NS)
    bench.disconnect("b")
    bench.say("a", Linked(pids("c")))
    assert bench.names() == "abc"
    bench.say("c", Linked(pids("a")))
    assert bench.names() == "ac"


def test_a_link_that_broke_before_the_take_over_is_noticed_late(bench: Standby) -> None:
    """S6: b is away for a moment just after a notices that its link to b broke while both looked for a master."""
    lead(bench, "abc")
    bench.link("abc")
    bench.tick(limits.PATH_TIMEOUT_NS)
    bench.say("a", Linked(pids("c")))
    bench.tick(limits.SECOND)
    bench.disconnect("b")
    assert bench.names() == "abc"


ELSEWHERE: dict[str, Any] = {"run_id": b"another run.....", "promised": 9, "leader": b"of that run....."}
BY_FORMER: dict[str, Any] = {"run_id": OLD_RUN, "promised": 1, "leader": b"replaced long ago"[:16]}
AFTER_YIELDING = pytest.mark.parametrize(
    "bound",
    [ELSEWHERE, {"run_id": OLD_RUN}, BY_FORMER],
    ids=["registered elsewhere", "registered nowhere", "registered by a former master"],
)


@AFTER_YIELDING
def test_the_sole_member_of_a_run_that_has_yielded_elsewhere(bench: Standby, bound: dict[str, Any]) -> None:
    """Duel, seed 33515753, S3: it got its list again, though another master had led it by a later one."""
    lead(bench, "c")
    told = bench.hello("c", connection=9, is_returning=True, **TWO, **bound)
    assert not any(isinstance(message, Members) for _, message in told)
    assert bench.machine.is_recovering and not bench.names()


@AFTER_YIELDING
def test_members_of_a_run_that_has_yielded_elsewhere(bench: Standby, bound: dict[str, Any]) -> None:
    """S3: c's acknowledgements do not count. If the others are a quorum, they go on without c, and c may join again."""
    lead(bench, "abc")
    bench.hello("c", connection=9, is_returning=True, **TWO, **bound)
    assert (bench.names(), bench.pending()) == ("ab", "c")
    bench.see("ca")
    assert not bench.machine.registry.is_committed
    bench.see("b")
    assert bench.machine.registry.is_committed


def admit_unaware(bench: Standby) -> None:
    """The run of a and b admits a newcomer c, which hears nothing of it."""
    lead(bench, "ab")
    bench.hello("c", **TWO)
    bench.link("abc")
    bench.vote("ab", UPDATE, 900)
    bench.see("ab")
    assert bench.names() == "abc" and bench.machine.registry.is_committed


@pytest.mark.parametrize("bound", [ELSEWHERE, BY_FORMER], ids=["by another run", "by a former master"])
def test_an_unaware_member_that_was_registered_elsewhere_since(bench: Standby, bound: dict[str, Any]) -> None:
    """S3: in the meantime another candidate may have counted a promise of c, which c has forgotten."""
    admit_unaware(bench)
    bench.hello("c", connection=9, **TWO, **bound)
    assert (bench.names(), bench.pending()) == ("ab", "c")


@pytest.mark.parametrize("is_registered", [True, False])
def test_an_unaware_member_that_comes_back_hears_of_its_admission(bench: Standby, is_registered: bool) -> None:
    """L3: it has been nowhere else since it first said Hello, or since this master registered it."""
    admit_unaware(bench)
    promise = bench.machine._leader.promise
    bound: dict[str, Any] = {"run_id": OLD_RUN, "promised": promise.term, "leader": promise.leader}
    told = bench.hello("c", connection=9, **TWO, **(bound if is_registered else {}))
    assert any(isinstance(message, Members) for _, message in told)
    assert bench.names() == "abc"


def test_a_returning_peer_that_is_no_member_yet_comes_back(bench: Standby) -> None:
    """It keeps its turn: none of its promises counts while it waits."""
    bench.begin_run("a")
    bench.hello("bcb", connection=9, is_returning=True, **TWO, **ELSEWHERE)
    assert bench.pending() == "bc"


def test_a_hello_from_before_the_admission_removes_no_member(bench: Standby) -> None:
    """L3: the master had asked for it twice, and the second one came after the peer was admitted."""
    bench.begin_run("ab")
    bench.hello_again("b", is_returning=True, **TWO, **ELSEWHERE)
    assert bench.names() == "ab"


def test_the_only_master_keeps_a_returning_member_that_has_missed_its_admission() -> None:
    """S6: no other master has led it since."""
    bench = bench_of("ab")
    told = bench.hello("b", is_returning=True, **ELSEWHERE)
    assert any(isinstance(message, Members) for _, message in told)
    assert bench.names() == "ab"


# --- The peer ---------------------------------------------------------------------------------------------------------


def failed(peer: PeerBench) -> list[Any]:
    return peer.handle(events.ConnectionFailed("refused")) + peer.tick()


def test_a_newcomer_asks_all_and_begins_at_the_first() -> None:
    peer = peer_of_two()
    peer.handle(events.ConnectCalled(CONNECT, attempts=2))
    (hello,) = peer.up()
    assert hello.message.begins == bytes(16)
    assert peer.hear(Refused(Refusal.NO_RUN, "", RUN_ID)) + peer.tick() == [UseMaster(1)]
    (hello,) = peer.up()
    assert hello.message.begins == bytes(16)
    peer.hear(Refused(Refusal.NO_RUN, "", b"another one's id"))
    assert peer.tick(limits.RECONNECT_INTERVAL_MAX_NS) == [UseMaster(0)]
    (hello,) = peer.up()
    assert hello.message.begins == RUN_ID


def test_one_that_does_not_answer_may_lead_a_run() -> None:
    """S3: the peer then begins no run; connect() gives up after its tries."""
    peer = peer_of_two()
    peer.handle(events.ConnectCalled(CONNECT, attempts=2))
    told: list[Any] = []
    for _ in range(4):
        told += peer.up()
        told += peer.hear(Refused(Refusal.NO_RUN, "", RUN_ID)) + peer.tick(SECOND)
        told += failed(peer) + peer.tick(SECOND)
    hellos = [e.message for e in told if isinstance(e, Send) and isinstance(e.message, Hello)]
    assert hellos and not any(hello.begins.strip(b"\0") for hello in hellos)
    assert isinstance(peer.machine.error, MasterUnreachable)
    assert "m:1,n:2" in str(peer.machine.error)


def test_a_member_turns_to_the_next_master() -> None:
    """L3: at once, when nobody answers any more. Calls go on."""
    peer = peer_of_two().member()
    peer.reduce(5)
    peer.down()
    assert failed(peer) == [UseMaster(1)]
    said = peer.up()
    assert isinstance(said[0].message, Hello)
    (report,) = peer.hear(Refused(Refusal.REPORT, "", term=77))
    assert isinstance(report.message, RunReport)
    assert report.message.hello.promised == 77
    peer.hear(Welcome(RUN_ID, 77))
    assert peer.machine.term == 77
    assert peer.machine.state is State.MEMBER


def test_a_member_does_not_stay_where_nobody_leads() -> None:
    peer = peer_of_two().member()
    peer.down()
    failed(peer)
    peer.up()
    peer.hear(Refused(Refusal.REPORT, "", term=7))
    assert peer.tick(limits.MASTER_STAY_NS - 1) == []
    assert peer.tick(limits.MASTER_STAY_SPREAD_NS + 1) == [UseMaster(0)]


def test_a_master_that_answers_is_not_left_for_an_earlier_failure() -> None:
    """Standby, seed 328: the master took the run over with its report, and then removed it, as it had gone on."""
    peer = peer_of_two().member()
    peer.down()
    for _ in range(2):
        peer.handle(events.ConnectionFailed("refused"))
        peer.tick()
    peer.handle(events.ConnectionFailed("refused"))
    peer.up()
    assert peer.tick(limits.RECONNECT_INTERVAL_MAX_NS) == []


def test_a_member_whose_master_stepped_down_does_not_wait_for_ever() -> None:
    """Split, seed 215, L1: its connection never broke, so no timeout ran."""
    peer = PeerBench(masters=("m:1", "n:2"), master_timeout_ns=20 * SECOND).member()
    peer.hear(Refused(Refusal.REPORT, "", term=9))
    for _ in range(20):
        peer.tick(SECOND)
    assert isinstance(peer.machine.error, MasterUnreachable)


def test_a_list_without_a_welcome_does_not_count() -> None:
    """Standby, seed 10059, L3: the welcome came too late and was dropped. After that, no master believed the report."""
    peer = peer_of_two().member()
    peer.hear(member_list(7 << 32, "ab"))
    assert peer.machine.epoch == 2


def test_a_promise_is_kept() -> None:
    """S3: a peer that has reported to a candidate of term 9 does not obey a leader of term 8."""
    peer = peer_of_two().member()
    peer.reconnect()
    peer.hear(Refused(Refusal.REPORT, "", term=9))
    peer.hear(Welcome(RUN_ID, 8))
    assert peer.machine.term == 0
    peer.hear(Welcome(RUN_ID, 9))
    assert peer.machine.term == 9


def test_a_master_of_before_cannot_remove_a_member() -> None:
    """S3: the earlier master does not know what the run has decided since."""
    peer = peer_of_two().member()
    peer.reconnect()
    peer.hear(Refused(Refusal.UNKNOWN_SESSION, "", RUN_ID, epoch=peer.machine.epoch))
    assert peer.machine.state is State.MEMBER
    assert peer.tick() == [UseMaster(1)]


def test_the_master_of_now_can() -> None:
    peer = peer_of_two().member()
    peer.reconnect()
    peer.hear(Refused(Refusal.REPORT, "", term=9))
    peer.reconnect()
    peer.hear(Refused(Refusal.UNKNOWN_SESSION, "", RUN_ID, epoch=peer.machine.epoch + 1))
    assert isinstance(peer.machine.error, Kicked), "whatever it has promised: a committed list stays committed"


@pytest.mark.parametrize("knows", [False, True])
def test_a_newcomer_whose_admission_came_to_nothing_waits_for_the_next(knows: bool) -> None:
    """Standby, seed 9663024, L3: its master died before the list was committed; its first call ended with Kicked."""
    peer = peer_of_two().pending()
    peer.hear(replace(member_list(3, "ab"), old_members=pids("b"), parent=2))
    if knows:
        peer.hear(MembersCommitted(3))
    assert peer.machine.epoch == 3
    peer.reduce(5)
    peer.reconnect()
    peer.hear(Refused(Refusal.REPORT, "", term=9))
    effects = peer.hear(Refused(Refusal.UNKNOWN_SESSION, "", RUN_ID, epoch=9 << 32))
    if knows:
        assert isinstance(peer.machine.error, Kicked), "it has been a member, so it was removed"
        return
    (hello,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(hello, Hello) and not hello.is_member
    assert [type(effect.error) for effect in effects if isinstance(effect, Reject)] == [TooFewPeers]
    peer.hear(Welcome(RUN_ID, 9))
    peer.hear(member_list(10 << 32, "ab"))
    assert peer.machine.epoch == 0, "that list is of another term than the promised one"
    peer.hear(member_list((9 << 32) + 1, "ab"))
    assert peer.machine.state is State.MEMBER


def test_a_pending_peer_acknowledges_a_list_without_it() -> None:
    """L2: it may be an old member. Its later report to another master must not make it a member."""
    peer = peer_of_two().pending()
    assert peer.hear(replace(member_list(3, "ab"), members=member_list(3, "bc").members)) == [Send(Acknowledgement(3))]
    assert peer.machine.state is State.PENDING
    (hello, _) = peer.hear(Refused(Refusal.UNREGISTERED, ""))
    assert isinstance(hello.message, Hello) and not hello.message.is_member


def test_who_is_removed_says_so() -> None:
    peer = peer_of_two().member()
    assert Send(Leave()) in peer.hear(Kick(Result.RANK_CONNECTION_LOST, "removed by the former master"))


def test_a_pending_peer_is_a_newcomer_to_another_master() -> None:
    """Unless that master counts it as a member by a list that it does not know: then it promises like the others."""
    peer = peer_of_two().pending()
    peer.down()
    failed(peer)
    hello = peer.up()[0].message
    assert isinstance(hello, Hello) and not hello.is_member
    (report,) = peer.hear(Refused(Refusal.REPORT, "", term=9))
    assert (report.message.members, report.message.hello.promised) == ((), 9)
    assert peer.machine.state is State.PENDING
    peer.hear(Welcome(b"another run 1234", 3))
    assert (peer.machine.run_id, peer.machine.state) == (b"another run 1234", State.PENDING)


@pytest.mark.parametrize("peer", [peer_of_two(), PeerBench()], ids=["two masters", "one"])
def test_lists_are_acknowledged(peer: PeerBench) -> None:
    assert peer.member().hear(member_list(3, "ab")) == [Send(Acknowledgement(3))]


@pytest.mark.parametrize("call", ["reduce", "sync"])
def test_nobody_is_alone_before_the_list_is_established(call: str) -> None:
    """The next leader may go on with the members that the list removes, and they would wait for this call."""
    peer = peer_of_two().member()
    peer.hear(replace(member_list(3, "a"), old_members=pids("ab"), parent=2))
    make = getattr(peer, call)
    (vote,) = make(1)
    assert isinstance(vote.message, Votes)
    peer.hear(Decision(1, Result.TOO_FEW_PEERS))
    peer.hear(MembersCommitted(3))
    assert type(peer.error(make(2))) is TooFewPeers


def test_the_base_is_reported_until_the_list_is_established() -> None:
    peer = peer_of_two().member()
    peer.hear(replace(member_list(3, "ab"), old_members=pids("abc"), parent=2))
    (report,) = peer.hear(Refused(Refusal.REPORT, "", term=9))
    assert (report.message.old_members, report.message.parent) == (pids("abc"), 2)
    peer = peer_of_two().member()
    peer.hear(replace(member_list(3, "ab"), old_members=pids("abc"), parent=2))
    peer.hear(MembersCommitted(3))
    (report,) = peer.hear(Refused(Refusal.REPORT, "", term=9))
    assert report.message.old_members == ()


def test_a_master_that_is_gone_for_good_ends_the_membership() -> None:
    """L1: whatever masters the peer has tried in the meantime."""
    peer = PeerBench(masters=("m:1", "n:2"), master_timeout_ns=20 * SECOND).member()
    peer.reduce(5)
    peer.down()
    end_ns = peer.now_ns + 20 * SECOND
    while peer.machine.state is State.MEMBER:
        assert peer.now_ns <= end_ns + 5 * SECOND
        failed(peer)
        peer.tick(limits.RECONNECT_INTERVAL_MAX_NS)
    assert isinstance(peer.machine.error, MasterUnreachable)


def test_who_returns_asks_a_master_that_refuses_it_once_more_and_then_another() -> None:
    """B1: a master of its former run knows it as a member with another token, and asked it again without a pause."""
    peer = peer_of_two().member()
    peer.hear(Refused(Refusal.YIELDED, ""))
    peer.hear(Welcome(b"another run 1234", 3))
    refused = Refused(Refusal.UNKNOWN_SESSION, "")
    assert [type(effect.message) for effect in peer.hear(refused)] == [Hello]
    assert not any(isinstance(effect, Send) for effect in peer.hear(refused))
    assert peer.tick() == [UseMaster(1)]
    assert peer.machine.state is State.RETURNING


def hellos(effects: Iterable[Any]) -> list[bool]:
    """For each Hello: whether the peer says that it is ready."""
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.is_ready for message in sent if isinstance(message, Hello)]


def test_who_returns_is_ready_once_it_waits_for_its_admission() -> None:
    """L3: otherwise it is admitted between two of its calls, and makes the second one while the members sync."""
    peer = peer_of_two().member()
    assert hellos(peer.hear(Refused(Refusal.YIELDED, ""))) == [False]
    assert not any(isinstance(effect, Send) and isinstance(effect.message, Ready) for effect in peer.topology(5))
    assert Send(Ready()) in peer.hear(Welcome(b"another run 1234", 3))
    peer.reconnect()
    assert Send(Ready()) in peer.hear(Welcome(b"another run 1234", 3))

    peer = peer_of_two().member()
    peer.hear(Refused(Refusal.YIELDED, ""))
    assert Send(Ready()) not in peer.hear(Welcome(b"another run 1234", 3))
    assert Send(Ready()) in peer.topology(5)

    peer = peer_of_two().member()
    peer.topology(5)
    assert hellos(peer.hear(Refused(Refusal.YIELDED, ""))) == [True]


def test_refusals_of_all_that_was_said_do_not_multiply() -> None:
    """Split, seed 264. A master of another run refuses the Hello, and then every later message."""
    peer = peer_of_two().member()
    peer.reduce(5)
    peer.reconnect()
    peer.hear(Refused(Refusal.UNKNOWN_SESSION, "", b"another run 1234", epoch=7))
    assert peer.hear(Refused(Refusal.UNREGISTERED, "")) == []


def test_no_list_is_told_before_it_is_proposed() -> None:
    """S3: b connects in the same step in which a asks for the list that voids plans ahead."""
    bench = Standby()
    bench.begin_run("abc")
    epoch = bench.machine.registry.epoch
    with bench.standing_still():
        bench.say("a", Votes(0, (Vote(2, spec(), 5),)))
        bench.say("a", Withdraw(2, is_bound=True))
        bench.hello("b", connection=2, **TWO)
    lists = [message for message in bench.said[bench.connections["b"]] if isinstance(message, Members)]
    assert lists[-1].epoch == epoch + 1
    assert all(message.old_members for message in lists if message.epoch > epoch)
