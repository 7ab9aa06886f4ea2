"""A new master takes a run over from the peers' reports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Result
from zpccl.limits import SECOND
from zpccl.protocol import events
from zpccl.protocol.leadership import choose_run
from zpccl.protocol.master import MasterOptions
from zpccl.protocol.messages import (
    NO_ID,
    Decision,
    FetchEntry,
    Kick,
    Linked,
    Members,
    Neighbours,
    NeighboursChanged,
    Plan,
    Refusal,
    Refused,
    RunReport,
    Welcome,
)
from zpccl.protocol.recovery import History

from .harness import (
    PENDING,
    RUN_ID,
    UPDATE,
    PeerBench,
    digest,
    entry,
    fetching,
    is_fetching,
    neighbour,
    offer,
    pid,
    pids,
    plan_of,
    running_attempt,
    running_sync,
    sent,
    spec,
    sync_plan,
    token,
    topology_vote,
)
from .takeover import OLD_RUN, TakeOver, hello_of, outcome, report_of


@pytest.fixture
def bench() -> TakeOver:
    return TakeOver()


# --- The pure part ----------------------------------------------------------------------------------------------------


def test_no_reports_no_run() -> None:
    assert choose_run([]) is None


def test_the_run_of_most_reports_is_chosen() -> None:
    """A peer that claims a high epoch in its own run changes nothing."""
    reports = [report_of("a"), report_of("b"), report_of("x", "x", 2**60, run_id=RUN_ID)]
    assert choose_run(reports) == OLD_RUN


def test_outcomes_that_all_report_are_kept_once() -> None:
    """128 peers that keep 520 outcomes each, of 128 calls, would take 850 MB while the master leads."""
    reports = [report_of(name, outcomes=(outcome(7, True, "ab", 1, 2), outcome(8, name == "a", "ab"))) for name in "ab"]
    history = history_of(*reports)
    first, second = (report.outcomes for report in history._reports.values())
    assert (first, second) == tuple(report.outcomes for report in reports)
    assert first[0] is second[0] and first[1] is not second[1]


def history_of(*reports: RunReport) -> History:
    """The history that members' reports tell."""
    history = History(OLD_RUN, reports)
    for report in reports:
        history.add(report)
    return history


def test_the_newest_list_and_round_count() -> None:
    first = report_of("a", "abc", 7, round=3, round_value=1, term=4)
    second = report_of("b", "ab", 8, round=2, round_value=0, term=5)
    history = History(OLD_RUN, [first, second])
    history.add(second)
    assert (history.round, history.round_value) == (2, 0)
    history.add(first)
    assert (history.adopted.epoch, len(history.members), history.round, history.round_value) == (8, 2, 3, 1)
    assert history.adopted_term == 5
    history.drop(pids("a"))
    assert (history.round, history.round_value) == (2, 0)


@pytest.mark.parametrize("is_member", [False, True])
def test_who_waits_to_be_admitted_is_not_removed(is_member: bool) -> None:
    """L3: a returning peer reports the list of its former membership, and others have gone on without it since."""
    hello = replace(hello_of("p"), is_member=is_member)
    reports = [report_of("p", "abp", 1, hello=hello, since=1), *(report_of(name, "ab", 2, since=1) for name in "ab")]
    gone = history_of(*reports).parted(dict.fromkeys(pids("abp"), 0))
    assert gone == ([pid("p")] if is_member else [])


def test_pending_peers_know_nothing() -> None:
    history = history_of(report_of("p", "", outcomes=(outcome(1, True, "ab", 1, 1),), round=9))
    assert (history.outcomes, history.round) == ({}, 0)


def test_the_outcome_that_names_more_is_kept() -> None:
    history = history_of(report_of("a", outcomes=(outcome(1, False, ""),)))
    history.add(report_of("b", outcomes=(outcome(1, False, "ab", 4, 5),)))
    assert history.calls_of(history.outcomes[1]) == {pid("a"): 4, pid("b"): 5}


def test_an_outcome_without_names_is_joined_with_the_plan_of_another() -> None:
    history = history_of(report_of("a", outcomes=(outcome(1, False, ""),)))
    history.add(report_of("b", running=(running_attempt(1, "ab", (4, 5), spec()),)))
    assert history.calls_of(history.outcomes[1]) == {pid("a"): 4, pid("b"): 5}
    assert history.take_running(pids("ab")) == []


names = st.sampled_from("abcd")
reports = st.builds(
    lambda name, members, epoch, number, ended, running: report_of(
        name,
        "".join(sorted(members)),
        epoch,
        round=number,
        round_value=number,
        term=number,
        outcomes=tuple(outcome(i, i % 2 == 0, "ab", 1, 2) for i in sorted(ended)),
        running=tuple(running_attempt(i, "ab", (1, 2), spec()) for i in sorted(running)),
    ),
    names,
    st.sets(names, max_size=4),
    st.integers(1, 9),
    st.integers(0, 9),
    st.sets(st.integers(1, 6)),
    st.sets(st.integers(1, 6)),
)


@settings(max_examples=200)
@given(st.lists(reports, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_reports_does_not_matter(some: list[RunReport], rng: Any) -> None:
    """S3: different lists have different epochs, so the choice of the list does not depend on who reported first."""
    some = list({(report.epoch, bool(report.members)): report for report in some}.values())
    some = list({report.hello.peer_id: report for report in some}.values())
    shuffled = list(some)
    rng.shuffle(shuffled)
    one, other = history_of(*some), history_of(*shuffled)
    facts = [(h.adopted, h.members, h.round, h.round_value, h.adopted_term, h.outcomes) for h in (one, other)]
    assert facts[0] == facts[1]
    taken = [history.take_running(pids("ab")) for history in (one, other)]
    assert sorted(taken[0], key=str) == sorted(taken[1], key=str)
    assert not {running.plan.attempt_id for _, running in taken[0]} & one.outcomes.keys()
    assert one.take_running(pids("ab")) == []


# --- Recovery --------------------------------------------------------------------------------------------------------


def test_who_may_be_far_away_is_waited_for_longer(bench: TakeOver) -> None:
    """L3: the reports say how long a peer takes to connect."""
    hello = replace(hello_of("a"), handshake_ms=1000)
    bench.report("a", hello=hello)
    assert bench.tick(limits.RECOVERY_GRACE_NS) != []
    assert bench.names() == "ab"
    bench.tick(8 * limits.SECOND - 1 - limits.RECOVERY_GRACE_NS)
    assert bench.names() == "ab"
    bench.tick(limits.RECOVERY_GRACE_NS + 1)
    assert bench.names() == "a"


def test_a_newcomer_waits_for_the_grace_period(bench: TakeOver) -> None:
    assert [message.refusal for _, message in bench.hello("n")] == [Refusal.NO_QUORUM]
    assert bench.machine.deadline_ns() == bench.now_ns + limits.RECOVERY_GRACE_NS
    told = [message for _, message in bench.tick_at_deadline()]
    assert Welcome(RUN_ID, 0) in told
    assert bench.names() == "n"


def test_a_newcomer_leaves_time_to_members_of_whom_others_tell(bench: TakeOver) -> None:
    """L3: a formerly pending peer says that its run has members. A master that stood still reads theirs later."""
    bench.say("p", replace(hello_of("p"), is_member=False), on="p1")
    bench.hello("n")
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    assert bench.names() == ""
    bench.report("a", "a", 5)
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == "a"


@pytest.mark.parametrize("comes_before", [True, False])
@pytest.mark.parametrize("masters", [(), ("m", "s")])
def test_a_master_that_stood_still_reads_on_first(
    bench: TakeOver, masters: tuple[str, ...], comes_before: bool
) -> None:
    """L3: no newcomer begins a run while the Hello of a member is still unread (seed 16242162).

    The master is restarted and stands still until the time of newcomers is over. Then it reads the messages that have
    arrived, but not all at once, and a newcomer's Hello comes first.
    """
    begins = bench.machine.run_id if masters else NO_ID
    if comes_before:
        bench.hello("n", masters=masters, begins=begins)
    bench.now_ns += limits.RECOVERY_GRACE_NS + SECOND
    if not comes_before:
        bench.hello("n", masters=masters, begins=begins)
    else:
        bench.tick()
    assert bench.names() == ""
    bench.report("a", "a", 5, hello=replace(hello_of("a"), masters=masters))
    assert bench.names() == "a"
    assert [peer.name for peer in bench.machine.registry.pending()] == ["n"]


def test_a_master_that_did_not_stand_still_begins_a_run_at_once(bench: TakeOver) -> None:
    """L2: newcomers need not wait if nobody has come since the end of the grace period."""
    bench.tick_at_deadline()
    assert bench.machine.deadline_ns() is None
    bench.now_ns += 3600 * SECOND
    bench.hello("n")
    assert bench.names() == "n"


def test_a_newcomer_waits_no_longer_than_the_grace_period_once_more(bench: TakeOver) -> None:
    """L2: the wait starts after the master has stood still, if no member comes."""
    bench.hello("n")
    bench.tick(limits.RECOVERY_GRACE_NS + SECOND)
    assert bench.names() == ""
    went_on_ns = bench.now_ns
    bench.tick_at_deadline()
    assert bench.names() == "n"
    assert bench.now_ns == went_on_ns + limits.RECOVERY_GRACE_NS


def test_a_newcomer_does_not_wait_for_them_for_ever(bench: TakeOver) -> None:
    """L2: the wait ends even if further peers that were pending keep coming."""
    bench.hello("n")
    for name in "pqrs":
        bench.say(name, replace(hello_of(name), is_member=False), on=name + "1")
        assert bench.names() == ""
        bench.tick(limits.RECOVERY_WAIT_NS // 4)
    assert bench.names() == "n"


def test_who_is_asked_and_refuses_is_not_asked_again(bench: TakeOver) -> None:
    """B1: a newcomer that is a member without knowing it answers with its Hello and promises nothing."""
    hello = replace(hello_of("n"), is_member=False)
    assert [message.refusal for _, message in bench.say("n", hello, on="n1")] == [Refusal.NO_QUORUM]
    assert [(c, message.refusal) for c, message in bench.report("a", "abn", 6)] == [("n1", Refusal.REPORT)]
    assert bench.say("n", hello) == []


def adopt_without_n(bench: TakeOver, masters: tuple[str, ...] = ()) -> None:
    """The master adopts the run of a, b and n, and then n connects."""
    for name in "ab":
        bench.report(name, "abn", 6, hello=replace(hello_of(name), masters=masters))
    bench.recover()
    bench.connections["n"] = "n1"


def test_a_member_that_has_heard_nothing_of_its_admission_is_welcomed(bench: TakeOver) -> None:
    """L3: the master died as it admitted n. n has nothing to report, and its host would be removed together with it."""
    adopt_without_n(bench)
    hello = replace(hello_of("n", NO_ID), is_member=False)
    assert [message.refusal for _, message in bench.say("n", hello)] == [Refusal.UNREGISTERED]
    told = [message for connection, message in bench.say("n", hello) if connection == "n1"]
    assert [type(message) for message in told[:3]] == [Welcome, Members, Neighbours]
    assert bench.machine.registry.have_all_reported and bench.peer("n").is_member


@pytest.mark.parametrize("is_returning", [True, False])
@pytest.mark.parametrize("masters", [(), ("m", "s")])
def test_a_member_that_waits_in_another_run_is_welcomed(
    bench: TakeOver, masters: tuple[str, ...], is_returning: bool
) -> None:
    """L3: n had heard nothing of its admission, and waits in a run of newcomers that no master leads any more.

    This does not hold if another master may lead that run, or if n has made calls as a member.
    """
    adopt_without_n(bench, masters)
    hello = hello_of("n", b"of newcomers....")
    hello = replace(hello, is_member=False, leader=b"their leader....", is_returning=is_returning, masters=masters)
    for _ in range(2):
        bench.say("n", hello)
    assert bench.machine.registry.have_all_reported == (not masters)
    assert bench.names() == ("ab" if is_returning and not masters else "abn")
    assert bench.peer("n").has_reported == (not masters)


@pytest.mark.parametrize("run_id", [NO_ID, RUN_ID], ids=["newcomer", "of another run"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_old_hello_does_not_speak_for_a_member(bench: TakeOver, run_id: bytes, is_first: bool) -> None:
    """L3, S1: n said Hello here before another master admitted it, on a connection that broke. The Hello arrives only
    now.

    The master must not take n for a peer that has started anew, and remove it. Nor may it take n for one that knows
    nothing, and ignore its report.
    """
    adopt_without_n(bench)
    old = replace(hello_of("n", run_id, connection=4), is_member=False)
    if is_first:
        bench.say("n", old)
        bench.disconnect("n")
    report = report_of("n", "abn", 6, outcomes=(outcome(9, True, "abn", 1, 1, 1),), hello=hello_of("n", connection=5))
    bench.say("n", report.hello, on="n2")
    if not is_first:
        bench.say("n", old, on="n1")
        bench.connections["n"] = "n2"
    assert bench.names() == "abn" and not bench.peer("n").has_reported
    told = bench.say("n", report)
    assert bench.peer("n").has_reported and bench.names() == "abn"
    assert [message.attempt_id for to, message in told if to == "a1" and isinstance(message, Decision)] == [9]


def test_who_refuses_the_leader_is_not_asked_again_either(bench: TakeOver) -> None:
    """B1: n, of the adopted list, began anew at another master. It answers each request with its Hello."""
    adopt_without_n(bench)
    hello = replace(hello_of("n"), is_member=False, promised=bench.machine.term - 1, leader=b"another leader..")
    assert [message.refusal for _, message in bench.say("n", hello)] == [Refusal.REPORT]
    assert bench.say("n", hello) == []


@pytest.mark.parametrize("masters", [(), ("m:1", "n:2")])
def test_a_newcomer_with_a_later_promise_voids_no_reports(bench: TakeOver, masters: tuple[str, ...]) -> None:
    """S6, L3: the only master asks all again only for a member. Otherwise newcomers could keep it from leading."""
    bench.report("ab", "ab", waits=False)
    candidate = bench.machine.candidate
    assert candidate is not None
    term = candidate.promise.term
    hello = replace(hello_of("n", b"some other run.."), is_member=False, promised=term + 5, leader=b"another leader..")
    bench.say("n", replace(hello, masters=masters), on="n1")
    assert candidate.promise.term == term and len(candidate.reports) == 2


def test_a_late_member_that_knows_a_later_list_is_back(bench: TakeOver) -> None:
    """L3: c was lost, as it came late. Only c knows the round that admitted n; the others have not completed it yet.

    n must report too.
    """
    bench.report("ab", "abc", round=1)
    while bench.names() != "ab":
        bench.tick_at_deadline()
    bench.report("c", "abcn", 6, round=2, waits=False)
    assert sorted(bench.names()) == list("abcn") and not bench.machine.registry.pending()


def test_who_is_pending_and_says_that_it_is_a_member_is_asked_for_a_report(bench: TakeOver) -> None:
    """S1: another master has admitted it in the meantime, and its knowledge of that run must not be lost."""
    bench.report("ab", "ab")
    bench.hello("n")
    known = replace(hello_of("n", connection=2), promised=bench.machine.term - 1, leader=b"another leader..")
    assert [(c, message.refusal) for c, message in bench.say("n", known)] == [("n1", Refusal.REPORT)]


def test_an_idle_master_admits_at_once(bench: TakeOver) -> None:
    bench.now_ns += limits.RECOVERY_GRACE_NS
    bench.hello("n")
    assert bench.names() == "n"


def test_the_run_goes_on_when_all_members_have_reported(bench: TakeOver) -> None:
    """L3, S3: same members in the same order, a higher epoch and term, the same run."""
    assert bench.report("b", "ba", 5) == []
    told = bench.report("a", "ba", 5)
    welcome = next(message for _, message in told if isinstance(message, Welcome))
    assert welcome.run_id == OLD_RUN
    assert welcome.term >= 1
    members = next(message for _, message in told if isinstance(message, Members))
    assert members.epoch == welcome.term << 32
    assert bench.names() == "ba"


def test_the_newest_list_wins(bench: TakeOver) -> None:
    """L3: a peer that is not in it was removed."""
    bench.report("c", "abc", 5)
    bench.report("a", "ab", 6)
    told = bench.report("b", "abc", 5)
    assert bench.names() == "ab"
    assert ("c1", Refusal.UNKNOWN_SESSION) in [(c, m.refusal) for c, m in told if isinstance(m, Refused)]


def test_members_that_do_not_report_are_waited_for_and_then_lost(bench: TakeOver) -> None:
    bench.report("ab", "abc")
    bench.tick_at_deadline()
    assert bench.names() == "abc"
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    assert bench.names() == "abc"
    bench.tick(1)
    assert bench.names() == "ab"


def test_when_all_have_reported_others_may_know_more(bench: TakeOver) -> None:
    """Headless, seed 168: only the last admitted members knew of their admission; the rest went on without them."""
    bench.report("a", "ab")
    assert bench.report("b", "ab", waits=False) == []
    assert bench.names() == ""
    bench.report("c", "abc", 6)
    assert bench.names() == "abc"


def test_a_member_by_a_list_that_nobody_else_knows_comes_late(bench: TakeOver) -> None:
    """L3: the former master died right after it had admitted the newcomer, and only the newcomer heard of it."""
    bench.report("ab", "ab", round=3)
    assert bench.names() == "ab"
    bench.report("c", "abc", 6, round=4, round_value=1)
    assert bench.names() == "abc"
    assert bench.machine.registry.round == 4


def test_who_waits_for_that_admission_hears_of_the_list_first(bench: TakeOver) -> None:
    """Standby, seed 9991228, L3: otherwise it goes on alone, and the newcomer waits for it in a sync."""
    bench.report("ab", "ab", round=3)
    bench.say("a", topology_vote(50, 50, UPDATE, after_round=3))
    told = bench.report("c", "abc", 6, round=4, round_value=1)
    heard = [type(message) for connection, message in told if connection == "a1"]
    assert heard.index(Members) < heard.index(Decision)


@pytest.mark.parametrize("members", ["ac", "ab"])
def test_a_list_that_lacks_one_of_ours_or_its_reporter_makes_no_member(bench: TakeOver, members: str) -> None:
    """S3: the former master had removed b and told only c. Here b is a member, so c cannot be one by that list, and
    registers again. Or c has acknowledged a list without it, as the master asks of a peer that was a member without
    knowing it."""
    bench.report("ab")
    told = bench.report("c", members, 6, round=1)
    refusal = Refusal.YIELDED if members == "ac" else Refusal.UNKNOWN_SESSION
    assert [(c, message.refusal) for c, message in told] == [("c1", refusal)]
    assert bench.names() == "ab"


def test_a_peer_that_has_said_hello_is_waited_for(bench: TakeOver) -> None:
    """S3: only c knows the newest list, which admitted it."""
    bench.say("c", hello_of("c"), on="c1")
    bench.report("ab")
    assert bench.machine.is_recovering
    bench.report("c", "abc", 6)
    assert bench.names() == "abc"


def test_a_member_that_comes_too_late_has_been_removed(bench: TakeOver) -> None:
    """Regicide, seed 4609: it was in the middle of a step when others had started anew, and both waited for ever."""
    bench.report("p", "ap", 6)
    bench.tick(limits.MINORITY_WAIT_NS)
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.names() == "p"
    assert [message.refusal for _, message in bench.say("a", hello_of("a"), on="a1")] == [Refusal.REPORT]
    assert [message.refusal for _, message in bench.say("a", report_of("a", "a", 5))] == [Refusal.UNKNOWN_SESSION]
    assert bench.names() == "p"


def test_a_peer_that_comes_back_while_others_report_need_not_report_again(bench: TakeOver) -> None:
    """Regicide, seed 394: the master believed that it was gone because its first connection had broken."""
    bench.report("a")
    bench.disconnect("a")
    assert bench.say("a", bench.promising(hello_of("a", connection=2)), on="a2") == []
    bench.report("b")
    assert bench.peer("a").connection == "a2"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["in order", "overtaken"])
def test_the_last_report_of_a_peer_counts(bench: TakeOver, order: tuple[int, int]) -> None:
    """L3: its first connection broke, on which nobody listens any more, though its messages may be read last."""
    for number in order:
        assert bench.say("a", report_of("a", hello=hello_of("a", connection=number)), on=f"a{number}") == []
    bench.report("b")
    told = bench.tick(limits.RECOVERY_GRACE_NS)
    assert {c for c, _ in told} == {"a2", "b1"}


def test_a_report_with_another_token_is_refused(bench: TakeOver) -> None:
    """S7: the first peer to report owns the id. A later one with the same id must know the token."""
    bench.report("a")
    stranger = replace(hello_of("a", connection=9), token=token("x"))
    ((connection, refused),) = bench.say("x", report_of("a", hello=stranger), on="x1")
    assert (connection, refused.refusal) == ("x1", Refusal.UNKNOWN_SESSION)
    told = bench.report("b")
    assert {c for c, _ in told} == {"a1", "b1"}
    assert bench.peer("a").token == token("a")


def test_messages_before_the_report_start_no_avalanche(bench: TakeOver) -> None:
    """Regicide, seed 73: the master answered each with "say everything again", which caused as many messages again."""
    bench.report("a", "ab")
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert [message.refusal for _, message in bench.say("b", hello_of("b"), on="b1")] == [Refusal.REPORT]
    assert bench.begin("b", 1) == []
    bench.say("b", report_of("b"))
    assert bench.names() == "ab"


@pytest.mark.parametrize("has_decided", (True, False))
def test_another_run_is_refused(bench: TakeOver, has_decided: bool) -> None:
    """Its members are removed. If their run has decided nothing, they may register."""
    bench.report("a", "ab", outcomes=(outcome(1, True, "ab", 1, 1),))
    outcomes = (outcome(1, True, "x", 1),) if has_decided else ()
    assert bench.report("x", "x", 99, waits=False, run_id=b"x" * 16, outcomes=outcomes) == []
    assert bench.report("b", "ab", waits=False) == []
    told = bench.tick_at_deadline()
    assert bench.names() == "ab"
    refusal = Refusal.UNKNOWN_SESSION if has_decided else Refusal.YIELDED
    assert [m.refusal for c, m in told if c == "x1"] == [refusal]


@pytest.mark.parametrize("members, names", [("x", "x"), ("xyz", "ab")])
def test_a_run_that_has_decided_nothing_counts_for_less(bench: TakeOver, members: str, names: str) -> None:
    """It counts for less than a run that has decided something and of which a quorum is here."""
    bench.report("x", members, 3, waits=False, run_id=b"x" * 16, outcomes=(outcome(1, True, members, *range(1, 3)),))
    bench.report("ab", "ab", waits=False)
    bench.tick_at_deadline()
    assert bench.names() == names


def test_a_run_that_has_decided_nothing_yields_to_reports_that_come_late(bench: TakeOver) -> None:
    """S6, L3: a newcomer reports in time, and the members do not: a refusal would remove all who have the state."""
    bench.connections |= {"a": "a1", "b": "b1"}
    for name in "ab":
        bench.say(name, hello_of(name))
    bench.report("x", "x", 99, waits=False, run_id=b"x" * 16)
    bench.tick(2 * limits.RECOVERY_WAIT_NS)
    assert bench.names() == "x"
    late = {name: report_of(name, "ab", outcomes=(outcome(1, True, "ab", 1, 1),)) for name in "ab"}
    promise = bench.machine._leader.promise
    for name, report in late.items():
        told = bench.say(name, bench.promising(report, promise))
        assert [message.refusal for _, message in told] == [Refusal.REPORT]
    for name, report in late.items():
        bench.say(name, report)
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.names() == "ab"


@pytest.mark.parametrize("has_decided", [True, False])
@pytest.mark.parametrize("members", ["x", "xyz"])
def test_a_run_that_all_have_left_counts_for_no_more(bench: TakeOver, members: str, has_decided: bool) -> None:
    """L1, L3: nobody would be left of it, and the members of the other run would be removed, or lose each other."""
    calls = range(1, 1 + len(members))
    for name in members:
        bench.report(name, members, 3, waits=False, run_id=b"x" * 16, outcomes=(outcome(1, True, members, *calls),))
        bench.leave(name)
    outcomes = (outcome(1, True, "ab", 1, 1),) if has_decided else ()
    bench.report("ab", "ab", waits=False, outcomes=outcomes)
    bench.tick_at_deadline()
    assert bench.names() == "ab"


@pytest.mark.parametrize(
    "members, old, refusal",
    [
        ("x", "", Refusal.YIELDED),
        ("xy", "", Refusal.UNKNOWN_SESSION),
        ("x", "xy", Refusal.UNKNOWN_SESSION),
    ],
)
def test_a_run_with_several_masters_yields_as_a_whole(members: str, old: str, refusal: Refusal) -> None:
    """Duel, seeds 9536109 and 9540235: a member that had just been admitted knew of no decision of its run, and changed
    to another run. Its own run, at the other master, counted it as lost and committed the sync that it was in."""
    bench = TakeOver()
    masters = ("m1:1", "m2:1")
    report_here = {name: replace(hello_of(name), masters=masters) for name in "ab"}
    bench.report("a", "ab", hello=report_here["a"])
    stranger = replace(hello_of("x", b"x" * 16), masters=masters)
    bench.report("x", members, 99, waits=False, hello=stranger, old_members=tuple(map(pid, old)))
    assert bench.report("b", "ab", waits=False, hello=report_here["b"]) == []
    told = bench.tick_at_deadline()
    assert bench.names() == "ab"
    assert [m.refusal for c, m in told if c == "x1"] == [refusal]


def test_a_report_to_a_master_that_has_given_its_recovery_up_is_asked_for_again() -> None:
    """Anarchy, seed 10774166, L2: newcomers had begun another run by then, and nobody answered the member."""
    bench = TakeOver()
    (asked,) = (message for _, message in bench.say("a", hello_of("a"), on="a1"))
    bench.hello("xy")
    bench.recover()
    assert bench.names() == "x"
    late = report_of("a", "ab", hello=replace(hello_of("a"), promised=asked.term, leader=pid("m")))
    again = [message for to, message in bench.say("a", late) if to == "a1"]
    assert [message.refusal for message in again] == [Refusal.REPORT]


def test_who_leaves_meanwhile_is_not_waited_for(bench: TakeOver) -> None:
    bench.report("a", "abc")
    bench.leave("a")
    bench.report("bc", "abc")
    assert bench.names() == "bc"


# --- What was under way -----------------------------------------------------------------------------------------------

RUNNING = running_attempt(7, "ab", (3, 4), spec())
OF_THREE = running_attempt(7, "abc", (3, 4, 5), spec())


def test_one_participant_knows_for_all(bench: TakeOver) -> None:
    """L3: b never got the plan and gets it now; it is the same attempt."""
    bench.report("a", running=(RUNNING,))
    told = bench.report("b")
    assert ("b1", plan_of(0, 7, calls=(3, 4))) in told
    bench.finish("a", 3, 7)
    bench.finish("b", 4, 7)
    assert bench.verdict("a", 3) == Decision(3, 0, 2, attempt_id=7)
    assert bench.verdict("b", 4) == Decision(4, 0, 2, attempt_id=7)


def test_a_decision_that_one_has_heard_is_that_of_all(bench: TakeOver) -> None:
    """S1: the call is committed, though b has only its own result."""
    bench.report("a", outcomes=(outcome(7, True, "ab", 3, 4),), oldest_call_id=5)
    bench.report("b", running=(RUNNING,), oldest_call_id=4)
    assert bench.verdict("b", 4) == Decision(4, 0, 2, attempt_id=7)
    assert bench.verdict("a", 3) is None


def test_who_has_heard_a_decision_is_in_no_call() -> None:
    """L1: a and b report that it runs, then c that it is over. Otherwise c would seem busy, and never a straggler."""
    bench = TakeOver(MasterOptions(straggler_timeout_ns=20 * SECOND))
    bench.report("ab", "abc", running=(OF_THREE,))
    bench.recover()
    bench.report("c", "abc", outcomes=(outcome(7, True, "abc", 3, 4, 5),), oldest_call_id=6)
    bench.begin("ab", 6, oldest=6)
    bench.tick_at_deadline()
    assert [name for name, _, _ in bench.machine.stragglers()] == ["c"]
    bench.tick(10 * SECOND)
    assert bench.names() == "ab"


def test_nothing_is_decided_while_one_who_may_know_is_away(bench: TakeOver) -> None:
    """S1: a has failed, but c may have heard any decision. Then c is lost, and the attempt aborts."""
    bench.report("ab", "abc", running=(OF_THREE,))
    bench.tick_at_deadline()
    bench.finish("a", 3, 7, ok=False, digest=0, reason="the link broke")
    bench.finish("b", 4, 7)
    assert bench.verdict("b", 4) is None
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert not bench.decision("b", 4).committed


def test_the_digest_of_who_is_lost_meanwhile_counts(bench: TakeOver) -> None:
    """S1: a and b have different results. When only b is left, nobody can tell whose result is wrong."""
    bench.report("ab", "abc", running=(OF_THREE,))
    bench.tick_at_deadline()
    bench.finish("a", 3, 7, digest=1)
    bench.finish("b", 4, 7, digest=2)
    bench.leave("a")
    assert bench.verdict("b", 4) is None
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.decision("b", 4).result == Result.INTERNAL_ERROR


def test_no_sync_is_decided_while_one_who_may_know_is_away(bench: TakeOver) -> None:
    """S5: b could not fetch, but c may have heard any decision; in this test, that a and c committed without b."""
    bench.report("a", "abc", running=(running_sync(7, 2, "a", "abc", (3, 4, 5), False),))
    bench.report("b", "abc", running=(running_sync(7, 2, "a", "abc", (3, 4, 5), True),))
    bench.tick_at_deadline()
    bench.fetched("b", 4, 7, ok=False, reason="the link broke")
    assert bench.verdict("a", 3) is None
    told = bench.report("c", "ac", 6, outcomes=(outcome(7, True, "ac", 3, 5),), oldest_call_id=6)
    assert any(c == "b1" and isinstance(message, Kick) for c, message in told)
    assert bench.verdict("a", 3) == Decision(3, 0, 2, attempt_id=7)


def test_who_was_removed_unheard_cannot_take_part_in_what_was_committed(bench: TakeOver) -> None:
    """S1: c comes late and reports that the former master committed without b, which has no result."""
    bench.report("ab", "abc", running=(OF_THREE,))
    bench.tick_at_deadline()
    told = bench.report("c", "ac", 6, outcomes=(outcome(7, True, "ac", 3, 5),), oldest_call_id=6)
    assert any(c == "b1" and isinstance(message, Kick) for c, message in told)
    assert bench.verdict("a", 3) == Decision(3, 0, 2, attempt_id=7)


def test_a_withdrawal_waits_until_all_have_reported(bench: TakeOver) -> None:
    bench.report("ab", "abc", running=(OF_THREE,))
    bench.tick_at_deadline()
    assert bench.withdraw("a", 3) == []
    bench.report("c", "abc", outcomes=(outcome(7, True, "abc", 3, 4, 5, value=3),), oldest_call_id=6)
    assert bench.verdict("a", 3) == Decision(3, 0, 3, attempt_id=7)


def test_what_was_withdrawn_is_not_planned_when_the_last_absent_member_is_lost(bench: TakeOver) -> None:
    """Anarchy, seed 9442642: the plan would end at once, for all."""
    bench.report("ab", "abc")
    bench.tick_at_deadline()
    bench.link("ab")
    bench.begin("ab", 3, spec())
    bench.withdraw("a", 3)
    told = []
    while bench.names() == "abc":
        told += [message for _, message in bench.tick_at_deadline()]
    assert not any(isinstance(message, Plan) for message in told)
    assert bench.verdict("a", 3) == Decision(3, Result.RANK_CONNECTION_LOST, reason="withdrawn")
    assert bench.verdict("b", 3) is None


def test_a_round_that_one_has_heard_of_is_complete(bench: TakeOver) -> None:
    """L3: a went on to its next call; b must not wait for it."""
    bench.report("a", round=4, round_value=1)
    bench.report("b", round=3)
    assert bench.say("b", topology_vote(1, 1, PENDING, 3)) == [("b1", Decision(1, Result.SUCCESS, 1))]
    assert bench.say("b", topology_vote(2, 2, UPDATE, 4)) == []


def test_who_was_removed_gets_no_value_of_a_later_round(bench: TakeOver) -> None:
    """L1: the former master had removed c. The others went on from are_peers_pending to update_topology and beyond.

    The new master revives c's list first. c would take the value of the last round for its own and make a different
    call from theirs: a correct program would get the error that its peers wait for each other in different calls.
    """
    bench.report("c", "abc", 5, round=6, since=1)
    bench.tick(limits.RECOVERY_GRACE_NS)
    bench.tick(limits.MINORITY_WAIT_NS)
    assert bench.names() == "abc"
    bench.say("c", topology_vote(0, 50, PENDING, 6))
    bench.report("ab", "ab", 9, round=8, round_value=1, since=1)
    assert bench.names() == "ab"
    assert ("c1", 50) not in bench.verdicts and ("c", 50) not in bench.verdicts


def test_who_missed_the_last_round_is_told_of_it(bench: TakeOver) -> None:
    bench.report("ab", "abc", 5, round=8, round_value=1)
    bench.report("c", "abc", 5, round=7)
    assert bench.names() == "abc"
    told = bench.say("c", topology_vote(0, 50, PENDING, 7))
    assert told == [("c1", Decision(50, Result.SUCCESS, 1))]


def test_a_running_sync_goes_on(bench: TakeOver) -> None:
    """S5, L3: the holder has its plan, b has none. Both offers together show what b must fetch."""
    sync = running_sync(7, 2, "a", "ab", (3, 4), False)
    bench.report("a", running=(sync,))
    bench.report("b")
    bench.link("ab")
    bench.say("a", offer(3, 2, entry("w", "new")))
    told = bench.say("b", offer(4, 1, entry("w", "old")))
    (plan,) = [message for c, message in told if c == "b1" and is_fetching(message)]
    assert (plan.attempt_id, fetching(plan).revision, [e.key for e in fetching(plan).fetch]) == (7, 2, ["w"])
    bench.fetched("b", 4, 7)
    assert bench.verdict("a", 3) == Decision(3, 0, 2, attempt_id=7)


def test_a_running_sync_goes_on_without_its_first_holder(bench: TakeOver) -> None:
    """L2, L3: a, which won the election, is gone. b holds the same state; c's offer shows what c must fetch."""
    sync = running_sync(7, 2, "ab", "abc", (3, 4, 5), False)
    bench.report("b", "abc", running=(sync,))
    bench.report("c", "abc")
    bench.tick_at_deadline()
    bench.say("b", offer(4, 2, entry("w", "new")))
    bench.say("c", offer(5, 1, entry("w", "old")))
    while bench.machine.deadline_ns() is not None and bench.names() != "bc":
        bench.tick_at_deadline()
    bench.link("bc")
    (plan,) = [message for message in bench.said["c1"] if is_fetching(message)]
    assert (plan.attempt_id, fetching(plan).sources, [e.key for e in fetching(plan).fetch]) == (7, pids("b"), ["w"])
    bench.fetched("c", 5, 7)
    assert bench.verdict("b", 4) == Decision(4, 0, 2, attempt_id=7)


def a_sync_with_one_who_has_no_plan(bench: TakeOver, held_by_b: str = "new") -> None:
    """a holds the state, b fetches it, and c has no plan. a and b are linked; c has not reported its links yet.

    Contents of key v may differ: b will have the contents `held_by_b`.
    """
    sync = running_sync(7, 2, "a", "abc", (3, 4, 5), False)
    contents = (FetchEntry("v", digest(held_by_b)),) * bool(held_by_b)
    fetches = replace(sync.plan, how=replace(fetching(sync.plan), fetch=contents))
    bench.report("a", "abc", running=(sync,))
    bench.report("b", "abc", running=(replace(sync, plan=fetches, is_open=True),))
    bench.report("c", "abc")
    for name, others in (("a", "bc"), ("b", "ac")):
        bench.say(name, Linked(pids(others)))
    bench.say("a", offer(3, 2, entry("v", "new", free=True), entry("w", "new")))
    bench.say("c", offer(5, 1, entry("v", "own", free=True), entry("w", "old")))


@pytest.mark.parametrize("linked", ["a", "b", "ab"])
def test_who_has_no_plan_of_a_running_sync_fetches_from_whom_it_reaches(bench: TakeOver, linked: str) -> None:
    """S6, L3: a peer that fetches the same stands in for the holder. A plan without a link would fail the sync."""
    a_sync_with_one_who_has_no_plan(bench)
    assert not any(is_fetching(message) for message in bench.said["c1"])
    told = bench.say("c", Linked(pids(linked)))
    (plan,) = [message for c, message in told if c == "c1" and is_fetching(message)]
    assert fetching(plan).sources == pids("a" * ("a" in linked))
    assert fetching(plan).partial_seeds == pids("b" * ("b" in linked))
    assert fetching(plan).fetch == tuple(FetchEntry(key, digest("new")) for key in "vw")
    bench.fetched("b", 4, 7)
    bench.fetched("c", 5, 7)
    assert bench.verdict("a", 3) == Decision(3, 0, 2, attempt_id=7)


@pytest.mark.parametrize(
    ("held_by_b", "linked", "told"), [("other", "b", "other"), ("own", "b", ""), ("other", "ab", "new")]
)
def test_who_has_no_plan_of_a_running_sync_takes_what_those_whom_it_reaches_have(
    bench: TakeOver, held_by_b: str, linked: str, told: str
) -> None:
    """S5, S6: keys that allow inequality get the contents of a holder, if the peer reaches one."""
    a_sync_with_one_who_has_no_plan(bench, held_by_b)
    bench.say("c", Linked(pids(linked)))
    (plan,) = [message for message in bench.said["c1"] if is_fetching(message)]
    assert fetching(plan).fetch == (FetchEntry("v", digest(told)),) * bool(told) + (FetchEntry("w", digest("new")),)
    assert (fetching(plan).sources, fetching(plan).partial_seeds) == (
        (pids("a"), ()) if "a" in linked else ((), pids("b"))
    )


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(("linked", "source"), [("b", "b"), ("bd", "b"), ("d", "d")])
def test_who_has_no_plan_of_a_running_sync_fetches_what_its_holder_has(
    bench: TakeOver, linked: str, source: str, tells: bool
) -> None:
    """L3: the winner, a, is gone. c has a's contents of key v, so it had to fetch nothing of it. b and d have other
    contents.

    The plan must not ask c to fetch b's contents from d: c would get wrong bytes, and the sync would fail if it reached
    only d.
    """
    sync = running_sync(7, 2, "abd", "abcd", (3, 4, 5, 6), False)
    for name in "bd":
        contents = (FetchEntry("v", digest(name)),) * tells
        plan = replace(sync.plan, how=replace(fetching(sync.plan), fetch=contents))
        bench.report(name, "abcd", running=(replace(sync, plan=plan),))
    bench.report("c", "abcd")
    bench.tick_at_deadline()
    for name, call_id in (("d", 6), ("b", 4)):
        bench.say(name, Linked(pids("bcd".replace(name, ""))))
        bench.say(name, offer(call_id, 2, entry("v", name, free=True), entry("w", "new")))
    bench.say("c", Linked(pids(linked)))
    bench.say("c", offer(5, 1, entry("v", "a", free=True), entry("w", "old")))
    while bench.names() != "bcd":
        bench.tick_at_deadline()
    (plan,) = [message for message in bench.said["c1"] if is_fetching(message)]
    assert fetching(plan).sources == pids(source)
    assert fetching(plan).fetch == (FetchEntry("v", digest(source)), FetchEntry("w", digest("new")))
    bench.fetched("c", 5, 7)
    assert bench.verdict("b", 4) == Decision(4, 0, 2, attempt_id=7)


def test_who_does_not_tell_its_contents_is_no_partial_seed(bench: TakeOver) -> None:
    """S5: its report omits them, as too many keys allow inequality."""
    a_sync_with_one_who_has_no_plan(bench, "")
    bench.say("c", Linked(pids("b")))
    assert not any(is_fetching(message) for message in bench.said["c1"])
    bench.say("c", Linked(pids("ab")))
    (plan,) = [message for message in bench.said["c1"] if is_fetching(message)]
    assert (fetching(plan).sources, fetching(plan).partial_seeds) == (pids("a"), ())


def test_who_has_no_plan_of_a_running_sync_and_no_link_is_removed(bench: TakeOver) -> None:
    """L1: the others do not wait for it without end."""
    a_sync_with_one_who_has_no_plan(bench)
    bench.fetched("b", 4, 7)
    assert bench.verdict("a", 3) is None
    bench.tick(bench.options.link_wait_ns)
    assert any(isinstance(message, Kick) for message in bench.said["c1"])
    assert bench.verdict("a", 3) == Decision(3, 0, 2, attempt_id=7)


def test_a_running_sync_ends_where_nobody_can_tell_what_to_fetch(bench: TakeOver) -> None:
    """L1, L3: the holder is gone. b has fetched everything, but nobody knows what c must fetch."""
    bench.report("b", "abc", running=(running_sync(7, 2, "a", "abc", (3, 4, 5), True),))
    bench.report("c", "abc")
    bench.tick_at_deadline()
    bench.say("b", offer(4, 1, entry("w", "old")))
    bench.fetched("b", 4, 7)
    bench.say("c", offer(5, 1, entry("w", "old")))
    while bench.machine.deadline_ns() is not None and bench.names() != "bc":
        bench.tick_at_deadline()
    verdict = bench.decision("c", 5)
    assert (verdict.committed, verdict.reason) == (False, "lost a, and no source is left to fetch from")


def test_an_offer_that_came_before_the_report_of_its_sync_is_part_of_it(bench: TakeOver) -> None:
    """L1, L3: b has no plan and offers. a has a plan and reports late. b does not offer again, and must not wait."""
    bench.report("b")
    bench.tick(limits.MINORITY_WAIT_NS)
    bench.say("b", offer(4, 1, entry("w", "old")))
    bench.report("a", running=(running_sync(7, 2, "a", "ab", (3, 4), False),))
    bench.link("ab")
    told = bench.say("a", offer(3, 2, entry("w", "new")))
    assert [message.attempt_id for c, message in told if c == "b1" and is_fetching(message)] == [7]
    bench.fetched("b", 4, 7)
    assert bench.verdict("b", 4) == Decision(4, 0, 2, attempt_id=7)
    bench.say("b", offer(5, 3, entry("w", "next"), oldest=5))  # The offer counts once: the next sync is another one.
    bench.say("a", offer(4, 3, entry("w", "next"), oldest=4))
    verdict = bench.decision("b", 5)
    assert (verdict.committed, verdict.value) == (True, 3)


def test_an_offer_that_does_not_fit_ends_the_sync(bench: TakeOver) -> None:
    bench.report("a", running=(running_sync(7, 2, "a", "ab", (3, 4), False),))
    bench.report("b")
    bench.say("a", offer(3, 2, entry("w", "new")))
    bench.say("b", offer(4, 1, entry("other", "old")))
    assert not bench.decision("a", 3).committed


def test_the_revision_goes_on(bench: TakeOver) -> None:
    """L3: no revision is lost."""
    last = outcome(6, True, "ab", 1, 1, value=41)
    bench.report("a", last_sync=last)
    bench.report("b")
    assert bench.machine.syncs.last_revision == {0: 41}


def test_a_sync_that_ends_with_the_take_over_is_the_last_one(bench: TakeOver) -> None:
    """L3: no revision is lost. a and b hold revision 42, had nothing to fetch, and have not heard the decision.

    If the master went on from 41, which they had completed before, c with another 42 would win over their 43.
    """
    last, sync = outcome(6, True, "ab", 1, 1, value=41), running_sync(7, 42, "ab", "ab", (2, 2), False)
    bench.report("ab", last_sync=last, running=(sync,))
    assert bench.verdict("a", 2) == Decision(2, Result.SUCCESS, 42, attempt_id=7)
    assert bench.machine.syncs.last_revision == {0: 42}
    bench.hello("c")
    bench.link("abc")
    bench.vote("ab", UPDATE, 3)
    for name, revision in zip("abc", (43, 43, 42), strict=True):
        bench.say(name, offer(4, revision, entry("w", name if name == "c" else "w")))
    (plan,) = [message for message in bench.said["c1"] if is_fetching(message)]
    assert fetching(plan).revision == 43


def test_the_last_sync_is_that_of_the_newest_report(bench: TakeOver) -> None:
    """S5: a late report must not change the revision and the participants, which have the vote in the next election."""
    bench.report("a", "abcde", last_sync=outcome(6, True, "a", 1, value=41))
    bench.report("bc", "abcde")
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.machine.syncs._completed_last == {0: {bench.peer("a")}}
    for name, last in (("d", outcome(9, True, "ad", 2, 2, value=43)), ("e", outcome(7, True, "ae", 1, 1, value=42))):
        bench.report(name, "abcde", last_sync=last)
        assert bench.machine.syncs.last_revision == {0: 43}
        assert bench.machine.syncs._completed_last == {0: {bench.peer("a"), bench.peer("d")}}


def test_an_attempt_with_a_call_that_was_answered_is_not_begun_again(bench: TakeOver) -> None:
    """S1: otherwise the call would get two answers. b withdrew it while a's report of the attempt was on its way."""
    bench.report("ab")
    bench.begin("b", 5)
    bench.withdraw("b", 5)
    peers = {bench.peer("a"): 4, bench.peer("b"): 5}
    machine = bench.machine
    machine.collectives.restore(running_attempt(1, "ab", (4, 5), spec()), bench.peer("a"), peers)
    machine.validate()
    assert not machine.operations.running
    ended = bench.peer("a").answers[4]
    assert isinstance(ended, Decision)
    assert (ended.committed, ended.result, ended.attempt_id) == (False, Result.RANK_CONNECTION_LOST, 1)
    assert isinstance(bench.peer("b").answers[5], Decision)


def test_a_refusal_of_all_is_the_same_for_who_has_not_heard_it(bench: TakeOver) -> None:
    """Headless, seed 375: no peer could send the state. One heard so; the other waited in its sync for ever."""
    refused = Decision(
        0, Result.NO_SHARED_STATE_AVAILABLE, 0, "all receive", attempt_id=7, order=pids("ab"), calls=(3, 4)
    )
    bench.report("a", outcomes=(refused,), oldest_call_id=4)
    bench.report("b", oldest_call_id=4)
    assert bench.decision("b", 4).result == Result.NO_SHARED_STATE_AVAILABLE


# --- The peer ---------------------------------------------------------------------------------------------------------


def test_a_peer_reports_and_says_all_again_when_it_is_welcomed() -> None:
    peer = PeerBench().calling()
    peer.plan(10, 7)
    (said,) = peer.hear(Refused(Refusal.REPORT, "another master", term=2))
    report = said.message
    assert isinstance(report, RunReport)
    assert report.running == (running_attempt(7, "ab", (10, 10), spec()),)
    assert (report.hello.run_id, report.epoch, report.oldest_call_id) == (RUN_ID, 2, 10)
    assert [type(effect.message).__name__ for effect in peer.hear(Welcome(RUN_ID, 2))] == ["Linked", "Votes"]
    assert peer.hear(Welcome(RUN_ID, 2)) == []


def test_a_peer_remembers_ends_of_attempts() -> None:
    peer = PeerBench().calling()
    peer.plan(10, 7)
    peer.handle(events.ReduceDone(7, digest=9))
    peer.hear(Decision(10, 0, 2, attempt_id=7))
    (said,) = peer.hear(Refused(Refusal.REPORT, "another master", term=5))
    assert said.message.outcomes == (outcome(7, True, "ab", 10, 10),)


def test_a_peer_remembers_whom_an_outcome_concerns() -> None:
    """L3: another master can tell b only if a knows that b took part."""
    told = Decision(10, 0, 2, attempt_id=7, order=pids("ab"), calls=(10, 11))
    for first, second in ((told, Decision(10, 0, 2, attempt_id=7)), (Decision(10, 0, 2, attempt_id=7), told)):
        peer = PeerBench().member()
        peer.hear(first)
        peer.hear(second)
        (said,) = peer.hear(Refused(Refusal.REPORT, "another master", term=5))
        assert said.message.outcomes == (outcome(7, True, "ab", 10, 11),)


def test_a_peer_remembers_the_round_that_answered_it() -> None:
    """L3: another master may hear of the round only from this peer, and the next vote is for a later round."""
    peer = PeerBench().member()
    peer.topology(10)
    peer.hear(Decision(10, Result.SUCCESS, value=1, round=4))
    (said,) = peer.hear(Refused(Refusal.REPORT, "another master", term=5))
    assert (said.message.round, said.message.round_value) == (4, 1)
    assert peer.topology(11) == [], "that master drops it, or leads and takes it before what is still to be said again"
    assert peer.hear(Welcome(RUN_ID, 5))[-1].message == topology_vote(11, 11, UPDATE, 4)


def test_a_sync_that_failed_is_not_the_last_one() -> None:
    """S5: the next election goes on from the revision that all peers have."""
    peer = PeerBench().member()
    for call_id, revision, is_committed in ((10, 4, True), (11, 5, False)):
        attempt_id = call_id - 3
        peer.sync(call_id, revision)
        peer.hear(sync_plan(call_id, revision, "b", ("w", "2"), attempt_id=attempt_id))
        peer.handle(events.FetchDone(attempt_id))
        peer.hear(Decision(call_id, 0 if is_committed else 6, revision, attempt_id=attempt_id))
    (said,) = peer.hear(Refused(Refusal.REPORT, "another master", term=5))
    assert said.message.last_sync == outcome(7, True, "ab", 10, 10, value=4)


def test_an_older_master_is_not_obeyed() -> None:
    """S3."""
    peer = PeerBench().member()
    peer.hear(Refused(Refusal.REPORT, "another master", term=5))
    peer.hear(Welcome(RUN_ID, 5))
    peer.reconnect()
    peer.hear(Welcome(RUN_ID, 4))
    assert peer.machine.term == 5
    assert peer.machine.deadline_ns() == peer.now_ns + limits.MASTER_TIMEOUT_NS


@pytest.mark.parametrize("phase", ["voting", "running", "failed"])
def test_a_commit_without_a_result_ends_the_membership(phase: str) -> None:
    """S1: the peer has no result to return."""
    peer = PeerBench().calling()
    if phase != "voting":
        peer.plan(10, 7)
    if phase == "failed":
        peer.handle(events.ReduceDone(7, error="the link broke"))
    effects = peer.hear(Decision(10, 0, 2, attempt_id=7))
    assert "without this peer" in str(peer.error(effects))


MISMATCH = Decision(
    10, Result.INVALID_USAGE, 0, "peers differ", "count", ("8 from a", "9 from b"), 0, 7, pids("ab"), (10, 20)
)


def test_a_mismatch_is_remembered_for_another_master() -> None:
    """S1: in full, so that others get the same typed error."""
    peer = PeerBench().calling()
    peer.hear(MISMATCH)
    (said,) = peer.hear(Refused(Refusal.REPORT, ""))
    assert said.message.outcomes == (replace(MISMATCH, call_id=0),)


@pytest.mark.parametrize("late", [False, True])
def test_a_mismatch_that_one_has_heard_of_is_one_for_the_other(bench: TakeOver, late: bool) -> None:
    """L1: the former master died between two sends. Otherwise b would wait for ever for a, which goes on."""
    outcome = replace(MISMATCH, call_id=0)
    if late:  # b votes again before anybody knows that it was refused.
        bench.report("b", oldest_call_id=20)
        bench.tick_at_deadline()
        bench.begin("b", 20, oldest=20)
    bench.report("a", outcomes=(outcome,), oldest_call_id=11)
    if not late:
        bench.report("b", oldest_call_id=20)
    bench.begin("b", 20, oldest=20)
    assert bench.verdict("b", 20) == replace(MISMATCH, call_id=20, attempt_id=0, order=(), calls=())
    assert bench.peer("b").answers[20].order == pids("ab")
    assert bench.verdict("a", 10) is None
    assert not bench.machine.operations.pending


def test_calls_are_refused_for_each_other_only_when_all_are_heard(bench: TakeOver) -> None:
    """S1: an absent peer may have heard what the former master decided about them."""
    bench.report("ab", "abc")
    bench.tick(limits.RECOVERY_GRACE_NS)
    bench.vote("a", UPDATE, 10)
    bench.begin("b", 20)
    assert bench.verdict("a", 10) is None
    bench.report("c", "abc")
    assert isinstance(bench.verdict("a", 10), Decision)
    assert isinstance(bench.verdict("b", 20), Decision)


def test_a_deadlock_is_ended_only_when_all_are_heard() -> None:
    bench = TakeOver(MasterOptions(straggler_timeout_ns=2 * SECOND))
    bench.report("ab", "abx", groups={"x": 1})
    bench.tick(limits.RECOVERY_GRACE_NS)
    bench.begin("a", 10, spec(1))
    bench.begin("b", 20, spec(2))
    bench.tick(2 * SECOND)
    assert bench.verdict("a", 10) is None
    bench.groups["x"] = 1
    bench.report("x", "abx", groups={"x": 1})
    bench.tick(2 * SECOND)
    for name, call_id in (("a", 10), ("b", 20)):
        assert isinstance(bench.verdict(name, call_id), Decision)


def test_a_refusal_ends_a_topology_call_too(bench: TakeOver) -> None:
    refused = Decision(0, Result.INVALID_USAGE, 0, "in different calls", attempt_id=7, order=pids("ab"), calls=(10, 20))
    bench.report("a", outcomes=(refused,), oldest_call_id=11)
    bench.report("b", oldest_call_id=20)
    bench.vote("b", UPDATE, 20)
    assert bench.verdict("b", 20) == Decision(20, Result.INVALID_USAGE, reason="in different calls")
    assert not bench.machine.operations.pending


def test_a_gathering_master_does_not_hold_more_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    monkeypatch.setattr(limits, "PENDING_PEERS_MAX", 2)
    bench = TakeOver()
    for name in "klm":
        told = bench.hello(name)
    assert [message.refusal for _, message in told] == [Refusal.FULL]
    assert 3 * SECOND > limits.RECOVERY_GRACE_NS
    assert sent(bench.handle(events.PeerMessageReceived("z", topology_vote(0, 0, UPDATE))))
    assert Plan not in map(type, bench.said)


def test_who_comes_late_has_time_for_its_report(bench: TakeOver) -> None:
    """Anarchy, seed 4151, S6: it was removed a moment after it had come back."""
    bench.report("p", "ap")
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    bench.say("a", hello_of("a"), on="a1")
    bench.tick(1)
    assert bench.machine.is_recovering
    bench.say("a", report_of("a", "a", 6))
    assert bench.names() == "a"


def test_only_who_comes_late_is_introduced(bench: TakeOver) -> None:
    """Lists of all peers to all, for each of many late reports, would be hundreds of megabytes among 128 peers."""
    bench.report("ac", "abc")
    bench.tick_at_deadline()
    told = bench.report("b", "abc")
    introduced = [(to, m) for to, m in told if isinstance(m, Neighbours | NeighboursChanged)]
    assert introduced == [
        ("b1", Neighbours((neighbour("a"), neighbour("c", dial=False)))),
        ("a1", NeighboursChanged(joined=(neighbour("b", dial=False),))),
        ("c1", NeighboursChanged(joined=(neighbour("b"),))),
    ]


def test_who_comes_late_has_time_for_its_report_after_all_were_cut_off(bench: TakeOver) -> None:
    """Minority, seed 16239064, S6: the members were cut off just after the take-over. Those that had not reported were
    removed 4 s after the network was back, one of them a moment after its Hello."""
    bench.report("ab", "abcd")
    bench.tick_at_deadline()
    bench.disconnect("ab")
    bench.hello("ab", welcomed=True, connection=2)
    bench.tick(limits.RECOVERY_WAIT_NS - 1)
    assert [m.refusal for _, m in bench.say("c", hello_of("c"), on="c1")] == [Refusal.REPORT]
    bench.tick(1)
    assert bench.names() == "abc"
    bench.say("c", report_of("c", "abcd"))
    assert (bench.names(), bench.machine.is_alone) == ("abc", False)


def test_a_newcomer_whose_round_was_done_anew_is_not_admitted(bench: TakeOver) -> None:
    """Split, seed 5439, L1: the others were at other points of their programs, and all waited for each other."""
    bench.report("ab", "ab", round=3)
    assert bench.names() == "ab"
    bench.vote("ab", PENDING, 50)
    bench.report("n", "abn", 6, round=4)
    assert bench.names() == "ab"


def test_who_was_removed_by_a_later_list_is_none() -> None:
    """L1, S1: the former master had removed a. Only c heard so, and its report came late.

    Flaky, seed 40891: a had heard nothing, and waited without end in an attempt that the others had ended.
    """
    for committed in (False, True):
        bench = TakeOver()
        bench.report("b", "abc", 5)
        bench.tick(limits.MINORITY_WAIT_NS)
        assert bench.names() == "abc"
        bench.report("c", "bc", 6, outcomes=(outcome(1, committed, "bc", 5, 6),))
        bench.report("a", "abc", 5, running=(running_attempt(1, "abc", (4, 5, 6), spec()),), since=5)
        assert bench.names() == "bc"


LATER = 1 << limits.EPOCH_BITS
"""The first epoch and attempt id of term 1."""


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("has_gone_on", [False, True])
def test_lists_of_two_branches_do_not_meet(is_late: bool, has_gone_on: bool) -> None:
    """L1, L3: c knows that a and b were removed. Since then, another master took the run over from a and b.

    The members of the earlier list go, unless they have decided something since. A list that c never had decides
    nothing.
    """
    for since, names in ((0, "abc"), (4, "c"), (7, "abc")):
        bench = TakeOver()
        facts = {"outcomes": (outcome(LATER + 1, True, "ab", 5, 6),)} if has_gone_on else {}
        reports: dict[str, tuple[str, int, dict[str, Any]]]
        reports = {name: ("abc", LATER, {"since": since, "term": 1, **facts}) for name in "ab"}
        reports["c"] = ("c", 6, {"since": 4})
        for name in "abc":
            members, epoch, rest = reports[name]
            if name == "c" and is_late:
                bench.tick(limits.MINORITY_WAIT_NS)
            bench.report(name, members, epoch, **rest)
        if bench.machine.is_recovering:
            bench.tick(limits.MINORITY_WAIT_NS)
        assert bench.names() == ("ab" if names == "c" and has_gone_on else names)


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
@pytest.mark.parametrize("last", ["c", "bc"])
def test_a_removal_counts_though_the_last_list_of_its_term_does_not(order: str, last: str) -> None:
    """L1, L2: b knows that a was removed. c, which no later list has, knows a later list of the same term than b.

    Minority, seed 41014793: a and b were in one list again, in calls that waited for each other.
    """
    facts: dict[str, tuple[str, int, dict[str, Any]]] = {
        "a": ("ab", LATER, {"since": 1, "term": 1}),
        "b": ("b", 3, {"since": 2}),
        "c": (last, 5, {"since": 5, "parent": 4}),
    }
    bench = TakeOver()
    for name in order:
        members, epoch, rest = facts[name]
        bench.report(name, members, epoch, waits=False, **rest)
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == last


def test_a_removal_counts_though_the_last_list_of_its_term_does_not_and_its_member_comes_late() -> None:
    """L1, L2: the same where b comes late: it goes, or a does, if nothing was decided since."""
    for outcomes, names in (((), "b"), ((outcome(LATER + 1, True, "a", 5),), "a")):
        bench = TakeOver()
        bench.report("a", "ab", LATER, since=1, term=1, outcomes=outcomes, waits=False)
        bench.report("c", "c", 5, since=5, parent=4, waits=False)
        bench.tick(limits.MINORITY_WAIT_NS)
        assert bench.names() == "ab"
        bench.report("b", "b", 3, since=2)
        assert bench.names() == names


def test_who_was_listed_again_in_the_same_term_was_not_removed() -> None:
    """S6: a list of the same term lacks b, and a later one, of which a has not heard, has b again."""
    bench = TakeOver()
    bench.report("a", "a", LATER, since=1, term=1, waits=False)
    bench.report("b", "ab", LATER + 1, since=1, term=1)
    assert bench.names() == "ab"


@pytest.mark.parametrize("last", ["unaware", "unheard", "led"])
def test_the_list_of_a_late_peer_that_had_to_go_removes_nobody(last: str) -> None:
    """L2, L3: c knows that a was removed. It comes late, so it goes; d comes after it, and belongs with a and b."""
    bench = TakeOver()
    epoch = LATER if last == "led" else 1
    facts: dict[str, Any] = {"term": 1} if last == "led" else {}
    bench.report("a", "abcd", epoch, since=1, round=2, waits=False, **facts)
    bench.report("b", "abcd", 1, since=1, round=1, waits=False)
    bench.tick(limits.MINORITY_WAIT_NS)
    bench.report("c", "bcd", 2, since=1)
    assert bench.names() == "abd"
    if last == "unaware":
        bench.hello("d")
        bench.hello_again("d")
    else:
        bench.report("d", "abcd", epoch, since=1, **facts)
    assert bench.names() == "abd"
    assert bench.peer("d").has_reported


@pytest.mark.parametrize("order", ["pqrs", "rqps", "qrps"])
@pytest.mark.parametrize("term", [0, 1])
def test_who_has_not_heard_of_a_removal_stays(order: str, term: int) -> None:
    """L3: r knows that p was removed. Then p and s decided something in their group. q had not heard of the removal,
    and not of the list of p and s either, though it may have been welcomed by their master."""
    ended = {"outcomes": (outcome(LATER + 1, True, "ps", 5, 6),)}
    facts: dict[str, tuple[str, int, dict[str, Any]]] = {
        "p": ("pqrs", LATER, {"term": 1, **ended}),
        "q": ("pqrs", 1, {"term": term}),
        "r": ("qrs", 2, {}),
        "s": ("pqrs", LATER, {"term": 1, **ended}),
    }
    bench = TakeOver()
    for name in order:
        members, epoch, rest = facts[name]
        bench.report(name, members, epoch, since=1, groups={"q": 1, "r": 1}, waits=False, **rest)
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == "pqs"


@pytest.mark.parametrize("has_told", [False, True])
@pytest.mark.parametrize("is_listed_later", [False, True])
@pytest.mark.parametrize("admitted", [1, 3])
def test_a_removed_member_goes_before_it_has_reported(admitted: int, is_listed_later: bool, has_told: bool) -> None:
    """L2: c knows that d was removed, and comes late. b has not heard of that: it stays, and d goes before it reports.

    So it does if b knows a later list with d, unless a master has admitted d again: it stays, and so it reports.
    """
    bench = TakeOver()
    epoch, term = (LATER, 1) if is_listed_later else (admitted, 0)
    facts: dict[str, Any] = {"since": 1, "admitted": {"d": admitted}, "waits": False, "term": term}
    bench.report("a", "abcd", epoch, round=2, **facts)
    bench.report("b", "abcd", epoch, round=1 if has_told else 2, **facts)
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert bench.names() == "abcd"
    bench.report("c", "abc", 2, since=1, round=2)
    names = "abcd" if admitted > 2 else "abc"
    assert bench.names() == names
    bench.report("d", "abcd", admitted, since=admitted, admitted={"d": admitted}, round=1)
    assert bench.names() == names


def test_a_member_stays_though_an_absent_one_was_removed() -> None:
    """S6: a and b have decided something since. That needs c or d to go, and c is here."""
    bench = TakeOver()
    ended: dict[str, Any] = {"outcomes": (outcome(LATER + 1, True, "ab", 5, 6),), "term": 1, "since": 1}
    bench.report("ab", "abcd", LATER, admitted=dict.fromkeys("abcd", 1), **ended, waits=False)
    bench.tick(limits.RECOVERY_GRACE_NS)
    bench.report("c", "abc", 2, since=1, admitted=dict.fromkeys("abc", 1))
    assert bench.names() == "abc"


def test_a_member_that_has_to_go_removes_no_absent_one() -> None:
    """L3: c knows that a and d were removed, and has to go: a and b have decided something since. d stays."""
    bench = TakeOver()
    ended = {"outcomes": (outcome(LATER + 1, True, "ab", 5, 6),), "term": 1, "since": 1}
    bench.report("ab", "abcd", LATER, **ended, waits=False)
    bench.tick(limits.RECOVERY_GRACE_NS)
    bench.report("c", "c", 2, since=1)
    assert bench.names() == "abd"


@pytest.mark.parametrize("reports", [False, True])
def test_who_is_here_is_waited_for_once_the_time_for_all_is_over(bench: TakeOver, reports: bool) -> None:
    """S3: c has gone on without a and b. Minority, seed 19673656: they took the run back before c's report came."""
    bench.report("a", "abc", 5)
    bench.tick(3 * limits.RECOVERY_WAIT_NS)
    bench.say("c", hello_of("c"), on="c1")
    bench.report("b", "abc", 5)
    assert bench.machine.is_recovering
    if reports:
        bench.say("c", report_of("c", "c", 6))
    else:
        bench.tick_at_deadline()
    assert bench.names() == ("c" if reports else "abc")


def test_those_that_say_hello_one_after_the_other_hold_up_nobody(bench: TakeOver) -> None:
    """L1: they send nothing but a Hello."""
    bench.report("a", "abc", 5)
    bench.tick(3 * limits.RECOVERY_WAIT_NS)
    since_ns = bench.now_ns
    bench.say("c", hello_of("c"), on="c0")
    bench.report("b", "abc", 5)
    while bench.machine.is_recovering:
        bench.tick(limits.RECOVERY_GRACE_NS // 2)
        bench.say("c", hello_of("c"), on=f"c{bench.now_ns}")
    assert bench.now_ns - since_ns < 3 * limits.RECOVERY_WAIT_NS


def test_a_list_that_names_one_twice_is_no_list(bench: TakeOver) -> None:
    """B1: such a list stopped the master, and each next one, whenever that peer reported."""
    told = bench.report("a", "aa")
    assert [message.refusal for _, message in told] == [Refusal.UNKNOWN_SESSION]


def test_a_connection_reports_for_one_peer(bench: TakeOver) -> None:
    bench.report("a", "ab")
    told = bench.say("a", report_of("b", "ab"))
    assert [message.refusal for _, message in told] == [Refusal.UNKNOWN_SESSION]
    assert bench.machine.is_recovering


def test_a_link_that_broke_before_the_master_died_is_noticed_late() -> None:
    """S6: an outage of all ended the former master, too; the next outage begins as a notices that its link broke."""
    bench = TakeOver()
    bench.report("abc", "abc")
    bench.link("abc")
    bench.tick(limits.PATH_TIMEOUT_NS)
    bench.say("a", Linked(pids("c")))
    bench.tick(SECOND)
    bench.disconnect("b")
    assert bench.names() == "abc"
    bench.tick(limits.DISCONNECT_GRACE_NS)
    assert bench.names() == "ac", "L1"
