"""Plans ahead: the decision that commits a collective also plans the next one like it, whose callers wait for no plan.

A peer that has started the planned attempt votes for it. If all have started it, it is an attempt like any other. If
not, another plan replaces it, and the only effect is the time that this takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Kicked, PeerLost, Result
from zpccl.limits import SECOND
from zpccl.protocol import events
from zpccl.protocol.effects import EndReduce, Reject, Resolve, Send, StartReduce
from zpccl.protocol.kinds.collective import Reduction
from zpccl.protocol.messages import (
    Acknowledgement,
    Decision,
    Linked,
    NeighboursChanged,
    Plan,
    Report,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)
from zpccl.types import Algorithm, CollectiveKind, DataType, ReduceOp

from .harness import (
    FIRST_ATTEMPT,
    RUN_ID,
    UPDATE,
    MasterBench,
    PeerBench,
    bench_of,
    member_list,
    neighbour,
    offer,
    pid,
    pids,
    plan_of,
    reducing,
    spec,
)
from .takeover import TakeOver

AHEAD = FIRST_ATTEMPT + 1
NEXT = AHEAD + limits.PLANS_AHEAD_AT_TAG_MAX
"""The first attempt after the attempts planned ahead."""

# --- The master -------------------------------------------------------------------------------------------------------


def next_plan(call_id: int, attempt_id: int, names: str = "ab", calls: tuple[int, ...] = ()) -> Plan:
    """A plan with as many plans ahead as a tag may have."""
    ids = range(attempt_id + 1, attempt_id + 1 + limits.PLANS_AHEAD_AT_TAG_MAX)
    return replace(plan_of(call_id, attempt_id, names, calls), ahead=tuple(ids))


class Bench(MasterBench):
    """A master of a group that has committed one collective, and has planned the next one ahead."""

    def __init__(self, names: str = "ab", specs: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.members(names)
        for name in names:
            self.begin(name, 1, (specs or {}).get(name, spec()))
        self.finish(names, 1)

    def call(self, names: str, call_id: int = 2, ahead: int = AHEAD, **changes: Any) -> list[Any]:
        """Peers vote for a call: they have started attempt `ahead` of it, or none if `ahead` is 0."""
        return self.say(names, Votes(0, (Vote(call_id, spec(**changes), ahead),)))


def test_a_call_that_all_have_started_needs_no_plan() -> None:
    """S1: the attempt is decided as others are. The decision lists the calls, as no plan has told them to the peers."""
    bench = Bench()
    assert bench.ahead == NEXT - 1
    assert bench.call("a") == bench.call("b") == []
    assert bench.finish("a", 2, AHEAD) == []
    assert bench.finish("b", 2, AHEAD) == [(f"{name}1", Decision(2, 0, 2, attempt_id=AHEAD)) for name in "ab"]
    kept = bench.peer("a").answers[2]
    assert (kept.order, kept.calls) == (pids("ab"), (2, 2))
    assert bench.ahead == NEXT and bench.plans.keys() == {FIRST_ATTEMPT}


def test_a_report_may_come_before_the_votes_of_others() -> None:
    """L1: the vote of b takes longer than the data between the peers."""
    bench = Bench()
    bench.call("a")
    assert bench.finish("a", 2, AHEAD) == []
    assert bench.call("b") == []
    assert bench.finish("b", 2, AHEAD) == [(f"{name}1", Decision(2, 0, 2, attempt_id=AHEAD)) for name in "ab"]


@pytest.mark.parametrize("early", ["a", "b"])
def test_what_not_all_have_started_is_planned_anew(early: str) -> None:
    """S1: the plan that replaces the attempt tells so to the peer that has started it."""
    bench = Bench()
    bench.call("a", ahead=AHEAD if early == "a" else 0)
    told = bench.call("b", ahead=AHEAD if early == "b" else 0)
    assert told == [(f"{name}1", next_plan(2, NEXT)) for name in "ab"]
    assert bench.finish(early, 2, AHEAD) == []  # The report comes too late.
    bench.finish("ab", 2, NEXT)
    assert bench.verdict(early, 2) == Decision(2, 0, 2, attempt_id=NEXT)


def test_a_plan_ahead_that_has_failed_is_planned_anew() -> None:
    """L1: a has lost a link, or has waited for longer than an attempt may stall."""
    bench = Bench()
    bench.call("a")
    assert bench.finish("a", 2, AHEAD, ok=False, fault=pid("b")) == []
    assert bench.call("b") == [(f"{name}1", next_plan(2, NEXT)) for name in "ab"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_who_is_bound_is_let_go_once_nobody_else_can_begin_the_attempt(has_begun: bool) -> None:
    """S1, L1: a and b have told their digests. c may have started the attempt too, with its vote still on the way.

    If c has not started it, it never will once it has accepted a later list, as that voids plans ahead.
    """
    bench = Bench("abc")
    for name in "ab":
        bench.call(name)
        bench.finish(name, 2, AHEAD)
    epoch = bench.machine.registry.epoch
    told = [message for _, message in bench.say("a", Withdraw(2, is_bound=True))]
    assert bench.machine.registry.epoch == epoch + 1 and not any(isinstance(message, Decision) for message in told)
    assert bench.say("b", Withdraw(2, is_bound=True)) == []
    if has_begun:
        bench.call("c")
    accepted = bench.say("c", Acknowledgement(epoch + 1))
    if has_begun:
        assert accepted == []
        bench.finish("c", 2, AHEAD)
        assert bench.verdict("a", 2) == Decision(2, 0, 3, attempt_id=AHEAD)
    else:
        assert [c for c, _ in accepted] == ["a1", "b1"]
        assert {message.result for _, message in accepted} == {Result.RANK_CONNECTION_LOST}


def test_a_failure_after_all_have_voted_fails_the_call() -> None:
    bench = Bench()
    bench.call("ab")
    told = bench.finish("a", 2, AHEAD, ok=False, fault=pid("b"))
    assert [(c, type(m), m.result != 0) for c, m in told] == [(f"{name}1", Decision, True) for name in "ab"]
    assert bench.call("a", 3, 0) == [] and bench.call("b", 3, 0) == [
        (f"{name}1", next_plan(3, NEXT)) for name in "ab"
    ], "of a failed attempt none is planned ahead"


def test_other_calls_are_compared_as_ever() -> None:
    """S1: a peer that has started the wrong one gets the same mismatch as the others."""
    bench = Bench()
    bench.call("a")
    told = bench.call("b", ahead=0, count=9)
    assert [(c, m.field) for c, m in told] == [("a1", "count"), ("b1", "count")]


def test_the_same_other_call_of_all_is_planned() -> None:
    bench = Bench()
    bench.call("a", ahead=0, count=9)
    assert bench.call("b", ahead=0, count=9) == [(f"{name}1", next_plan(2, NEXT)) for name in "ab"]


def test_who_withdraws_keeps_nobody() -> None:
    """L1: b has started the attempt and gives up. When b makes its next call, both get a plan."""
    bench = Bench()
    bench.call("b")
    bench.withdraw("b", 2)
    bench.call("a")
    told = bench.call("b", 3, 0)
    assert [(c, m.attempt_id, m.calls) for c, m in told] == [(f"{name}1", NEXT, (2, 3)) for name in "ab"]


def test_a_plan_ahead_is_only_for_the_members_it_was_made_for() -> None:
    """S1, L2: c is lost. a and b go on without it, whatever attempt they have started."""
    bench = Bench("abc")
    bench.call("ab")
    bench.lose("c")
    assert not bench.plans.keys() - {FIRST_ATTEMPT}, "c may have committed it with them"
    bench.finish("a", 2, AHEAD)
    bench.finish("b", 2, AHEAD, ok=False, fault=pid("c"))
    assert next_plan(2, NEXT, "ab", calls=(2, 2)) in bench.said["a1"]


def test_what_a_lost_peer_may_have_committed_with_all_others_is_committed() -> None:
    """S1: c is lost, and its vote with it."""
    bench = Bench("abc")
    bench.call("ab")
    bench.finish("a", 2, AHEAD, count=3)
    bench.lose("c")
    bench.finish("b", 2, AHEAD, count=3)
    assert bench.verdict("a", 2) == bench.verdict("b", 2) == Decision(2, 0, 3, attempt_id=AHEAD)


@pytest.mark.parametrize("digest", [7, 8])
def test_the_last_of_a_group_goes_on_with_what_it_has_started(digest: int) -> None:
    """S1, L1: b is lost before its vote arrives. a may know that both have the same result."""
    bench = Bench()
    bench.call("a")
    bench.lose("b")
    assert bench.verdict("a", 2) is None
    bench.finish("a", 2, AHEAD, count=2, digest=digest)
    assert bench.verdict("a", 2) == Decision(2, 0, 2, attempt_id=AHEAD)


def test_results_that_differ_after_a_loss_are_computed_again() -> None:
    """S1: if two results differ, nobody has committed them."""
    bench = Bench("abc")
    for digest, name in enumerate("ab"):
        bench.call(name)
        bench.finish(name, 2, AHEAD, digest=digest)
    bench.lose("c")
    assert next_plan(2, NEXT, "ab", calls=(2, 2)) in bench.said["a1"]


@pytest.mark.parametrize("attempt_id", [FIRST_ATTEMPT, 999], ids=["of another group", "of the future"])
def test_an_attempt_that_was_not_planned_for_them_gets_a_plan(attempt_id: int) -> None:
    """S3, B2: no message of one group's members touches an attempt of another group."""
    bench = bench_of("ab", others="xy")
    bench.begin("ab", 1)
    votes = Votes(0, (Vote(1, spec(), 99),))
    bench.say("x", votes)
    bench.finish("x", 1, attempt_id)
    bench.say("y", votes)
    bench.finish("y", 1, attempt_id)
    planned = {number: how.order for number, how in bench.plans.items()}
    assert list(planned.values()) == [pids("ab"), pids("xy")] and 999 not in planned
    bench.finish("ab", 1)
    assert bench.verdict("a", 1) == Decision(1, 0, 2, attempt_id=FIRST_ATTEMPT)


def test_a_false_attempt_that_is_issued_meanwhile_leaves_no_deadline() -> None:
    """B2: x and y lie. Their call waits for links, and then for their reports on this attempt, which never come. A
    deadline in the past would keep the master busy."""
    bench = bench_of("xy")
    bench.say("xy", Linked(()))
    bench.say("xy", Votes(0, (Vote(1, spec(), 99),)))
    bench.tick(SECOND)
    for _ in range(99):
        bench.say("x", Linked(pids("y")))
        bench.say("x", Linked(()))
    bench.tick(2 * limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "xy"


def test_who_has_committed_a_call_makes_the_next_one() -> None:
    """The votes of b come late: a's votes wait for them, one after the other."""
    bench = Bench()
    for number in (2, 3, 4):
        bench.call("a", number, AHEAD + number - 2)
        bench.finish("a", number, AHEAD + number - 2)
    for number in (2, 3, 4):
        assert bench.verdict("a", number) is None
        bench.call("b", number, AHEAD + number - 2)
        bench.finish("b", number, AHEAD + number - 2)
        assert (
            bench.verdict("a", number)
            == bench.verdict("b", number)
            == Decision(number, 0, 2, attempt_id=AHEAD + number - 2)
        )
    assert bench.ahead == NEXT + 2 and bench.plans.keys() == {FIRST_ATTEMPT}


def test_messages_on_later_calls_may_come_twice() -> None:
    bench = Bench()
    for number in (2, 3, 2, 3):
        bench.call("a", number, AHEAD + number - 2)
        bench.finish("a", number, AHEAD + number - 2)
    for number in (2, 3):
        bench.call("b", number, AHEAD + number - 2)
        bench.finish("b", number, AHEAD + number - 2)
    assert bench.verdict("a", 3) == bench.verdict("b", 3) == Decision(3, 0, 2, attempt_id=AHEAD + 1)


@pytest.mark.parametrize("last", ["report", "vote"])
def test_what_comes_behind_a_loss_in_one_step_is_not_taken_before_what_came_earlier(last: str) -> None:
    """S1, L1: a and b have committed three calls with c. The master hears of these calls and of the death of c at once.

    It decides the first call when it removes c. Messages about later calls that it has kept count before newer ones.
    """
    bench = Bench("abc")
    bench.disconnect("c")
    bench.now_ns += bench.options.disconnect_grace_ns
    bench.call("a")
    with bench.standing_still():
        bench.call("b")
        for number in (2, 3, 4):
            for name in "ab":
                bench.finish(name, number, AHEAD + number - 2)
                if name == "a" or number < 4 or last == "report":
                    bench.call(name, number + 1, AHEAD + number - 1)
        bench.tick()
        for name in "ab":
            if last == "vote" and name == "b":
                bench.call("b", 5, AHEAD + 3)
            bench.finish(name, 5, AHEAD + 3)
    for number in (2, 3, 4, 5):
        assert [bench.decision(name, number).result for name in "ab"] == [Result.SUCCESS] * 2


@pytest.mark.parametrize("dies", [False, True])
def test_calls_that_are_over_are_decided_before_others_join(dies: bool) -> None:
    """L1: a and b have committed two calls and call update_topology(); b's votes for all of these arrive at once.

    Otherwise the second call would wait for the joiner's vote, and all later calls at its tag for the decision on it.

    `dies`: the calls do not wait for b's vote, but for the loss of c.
    """
    bench = Bench("abc" if dies else "ab")
    bench.register("d")
    bench.link(bench.names() + "d")
    if dies:
        bench.disconnect("c")
    for name in "ab":
        with bench.standing_still():
            for number in (2, 3):
                bench.call(name, number, AHEAD + number - 2)
                bench.finish(name, number, AHEAD + number - 2)
            bench.vote(name, UPDATE, 4)
    if dies:
        bench.tick(bench.options.disconnect_grace_ns)
    assert bench.names() == "abd"
    for number in (2, 3, 4):
        assert [bench.decision(name, number).result for name in "ab"] == [Result.SUCCESS] * 2


def test_a_later_call_may_be_withdrawn() -> None:
    """L1: a's withdrawn call is gone, and a's next one takes its place."""
    bench = Bench()
    bench.call("a", 2)
    bench.finish("a", 2, AHEAD)
    bench.call("a", 3, AHEAD + 1)
    assert bench.withdraw("a", 3) == [("a1", Decision(3, Result.RANK_CONNECTION_LOST, reason="withdrawn"))]
    bench.call("a", 4, 0)
    bench.call("b", 2)
    bench.finish("b", 2, AHEAD)
    assert bench.verdict("a", 2) == Decision(2, 0, 2, attempt_id=AHEAD)
    assert bench.call("b", 3, AHEAD + 1) == [(f"{name}1", next_plan(4, NEXT + 1, calls=(4, 3))) for name in "ab"]


def test_a_call_at_a_tag_waits_for_the_result_of_the_one_before() -> None:
    """B1: only a peer that has its own result can know that its peers have committed the call."""
    bench = Bench()
    bench.call("a", 2)
    refused = bench.call("a", 3, AHEAD + 1)
    assert [(c, m.call_id, m.result) for c, m in refused] == [("a1", 3, Result.INVALID_USAGE)]


def test_a_vote_again_for_a_plan_ahead_gets_no_plan() -> None:
    """If all have started an attempt, nobody needs its plan. A peer that voted for another attempt gets the plan."""
    bench = Bench()
    bench.call("ab")
    assert bench.call("a") == []
    assert bench.call("a", ahead=AHEAD + 5) == [("a1", Plan(AHEAD, (2, 2), reducing()))]


def test_the_root_of_a_broadcast_stays_the_root() -> None:
    """S1: a plan ahead only fits calls in which each peer has the same arguments."""
    specs = {name: spec(kind=CollectiveKind.BROADCAST, is_root=name == "b") for name in "ab"}
    bench = Bench(specs=specs)
    for name, other in ("ab", "ba"):
        told = bench.say(name, Votes(0, (Vote(2, specs[other], AHEAD),)))
    assert told == [(f"{name}1", next_plan(2, NEXT, "ab")) for name in "ab"]


def test_plans_ahead_are_void_once_another_plan_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: an attempt that all have started before they hear of the better plan goes on with the old plan."""
    bench, better = Bench(), reducing(algorithm=Algorithm.DIRECT)
    monkeypatch.setattr(bench.machine.collectives.planner, "how", lambda *_, **__: better)
    for call_id in (2, 3):
        attempt_id = AHEAD + call_id - 2
        bench.call("ab", call_id, attempt_id)
        running = bench.machine.operations.running[attempt_id]
        assert isinstance(running, Reduction) and running.how == reducing()
        bench.finish("a", call_id, attempt_id)
        void = [(f"{name}1", Decision(call_id, 0, 2, attempt_id=attempt_id, is_ahead_void=True)) for name in "ab"]
        assert bench.finish("b", call_id, attempt_id) == void
    bench.call("a", 4, AHEAD + 2)
    bench.call("b", 4, 0)
    assert list(bench.plans.values())[-1] == better


@pytest.mark.parametrize("count", [limits.PLAN_AHEAD_BYTES_MAX // 4, limits.PLAN_AHEAD_BYTES_MAX // 4 + 1])
def test_large_tensors_are_not_planned_ahead(count: int) -> None:
    bench = Bench(specs=dict.fromkeys("ab", spec(count=count, datatype=10)))
    assert bool(bench.ahead) == (4 * count <= limits.PLAN_AHEAD_BYTES_MAX)


def test_plans_ahead_end_with_an_attempt_that_is_aborted() -> None:
    """The peers that hear of the abort drop them too."""
    bench = Bench()
    bench.call("ab")
    bench.finish("a", 2, AHEAD, ok=False)
    assert bench.machine.collectives._ahead == {}


def test_plans_ahead_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: the master drops the oldest plan ahead, and its callers get a plan."""
    monkeypatch.setattr(limits, "PLANS_AHEAD_MAX", 3)
    bench = bench_of("ab")
    for tag in range(5):
        bench.begin("ab", tag, spec(tag))
        bench.finish("ab", tag, max(bench.plans))
    assert [key.tag for key in bench.machine.collectives._ahead] == [2, 3, 4]


@pytest.mark.parametrize("ok", [False, True])
def test_a_new_master_waits_for_what_all_have_started(ok: bool) -> None:
    """L3, S1: a lost peer may have committed the attempt with the others. If one has failed, it is planned anew."""
    bench = TakeOver()
    bench.report("ab")
    bench.link("ab")
    votes = Votes(0, (Vote(3, spec(), 77),))
    bench.say("a", votes)
    assert bench.say("b", votes) == [] == bench.finish("a", 3, 77, count=4)
    told = bench.finish("b", 3, 77, ok=ok, count=4)
    if ok:
        assert bench.verdict("a", 3) == bench.verdict("b", 3) == Decision(3, 0, 4, attempt_id=77)
    else:
        assert [(c, type(m)) for c, m in told] == [("a1", Plan), ("b1", Plan)]


# --- The peer ---------------------------------------------------------------------------------------------------------


def start(call_id: int, attempt_id: int, names: str = "ab", *, is_ahead: bool = False) -> StartReduce:
    return StartReduce(call_id, attempt_id, reducing(names), tells_digest=True, is_ahead=is_ahead)


def after_a_commit(names: str = "ab", plan: Plan | None = None) -> PeerBench:
    """A peer that may start its next call at once."""
    peer = PeerBench().member(names)
    peer.reduce(10)
    peer.hear(plan or plan_of(10, names=names))
    peer.handle(events.ReduceDone(FIRST_ATTEMPT, 7))
    peer.hear(Decision(10, 0, 2, attempt_id=FIRST_ATTEMPT, ahead=(AHEAD,)))
    return peer


@pytest.fixture
def peer() -> PeerBench:
    """A peer that may start its next call at once."""
    return after_a_commit()


def vote(call_id: int, ahead: int = AHEAD, **changes: Any) -> Send:
    """A vote for an attempt planned ahead may wait: the others have the same plan."""
    return Send(Votes(call_id, (Vote(call_id, spec(**changes), ahead),)), may_wait=ahead > 0)


def test_the_vote_for_what_only_the_master_decides_is_sent_at_once() -> None:
    """In a broadcast, peers do not tell each other digests."""
    peer = PeerBench().member("ab")
    broadcast = spec(kind=CollectiveKind.BROADCAST, is_root=True)
    peer.reduce(10, broadcast)
    peer.hear(plan_of(10, names="ab"))
    peer.handle(events.ReduceDone(FIRST_ATTEMPT, 7))
    peer.hear(Decision(10, 0, 2, attempt_id=FIRST_ATTEMPT, ahead=(AHEAD,)))
    assert peer.reduce(11, broadcast)[-1] == Send(Votes(11, (Vote(11, broadcast, AHEAD),)))


def test_the_same_call_starts_at_once(peer: PeerBench) -> None:
    """The data plane starts first: it does not wait for the vote."""
    assert peer.reduce(11) == [start(11, AHEAD, is_ahead=True), vote(11)]
    assert peer.handle(events.ReduceDone(AHEAD, 7)) == [Send(Report(11, AHEAD, True, digest=7, count=2))]
    decision = Decision(11, 0, 2, attempt_id=AHEAD, order=pids("ab"), calls=(11, 3), ahead=(AHEAD + 1,))
    assert peer.hear(decision) == [EndReduce(AHEAD, True), Resolve(11, 2)]
    assert peer.reduce(12) == [start(12, AHEAD + 1, is_ahead=True), vote(12, AHEAD + 1)]


def test_a_plan_ahead_that_is_void_is_not_used() -> None:
    """L2: otherwise all calls that are planned ahead would use a path that has fallen."""
    peer = after_a_commit(plan=replace(plan_of(10), ahead=(AHEAD + 1,)))
    assert peer.reduce(11)[0] == start(11, AHEAD + 1, is_ahead=True)
    peer.handle(events.ReduceDone(AHEAD + 1, 7))
    peer.hear(Decision(11, 0, 2, attempt_id=AHEAD + 1, order=pids("ab"), calls=(11, 3), is_ahead_void=True))
    assert peer.reduce(12) == [vote(12, 0)]


def test_a_plan_ahead_is_used_once(peer: PeerBench) -> None:
    """S4: an attempt id never repeats."""
    peer.reduce(11)
    peer.hear(Decision(11, Result.RANK_CONNECTION_LOST, 0, "withdrawn"))
    assert peer.reduce(12) == [vote(12, 0)]


def test_an_old_plan_ahead_is_not_used(peer: PeerBench) -> None:
    """L1: a data plane takes frames with a far lower attempt id than others for late ones."""
    peer.reduce(11, spec(tag=1))
    peer.plan(11, AHEAD + limits.PLAN_AHEAD_AGE_MAX)
    assert peer.reduce(12)[-1].message.votes[0].ahead == 0


@pytest.mark.parametrize("changes", [{"count": 9}, {"tag": 1}, {"kind": CollectiveKind.BARRIER, "count": 0}])
def test_another_call_waits_for_its_plan(changes: dict[str, Any]) -> None:
    assert after_a_commit().reduce(11, spec(**changes))[-1] == vote(11, 0, **changes)


def test_a_plan_takes_the_place_of_a_plan_ahead(peer: PeerBench) -> None:
    """S1, S4: the attempt that was started ends and its input is restored before the new attempt begins."""
    peer.reduce(11)
    assert peer.plan(11, AHEAD + 1) == [EndReduce(AHEAD, False), start(11, AHEAD + 1)]
    assert peer.handle(events.ReduceDone(AHEAD, 7)) == []
    assert peer.plan(11, AHEAD + 1) == []  # The master sends it again.
    peer.handle(events.ReduceDone(AHEAD + 1, 7))
    assert peer.hear(Decision(11, 0, 2, attempt_id=AHEAD + 1)) == [EndReduce(AHEAD + 1, True), Resolve(11, 2)]


def test_it_does_so_too_after_a_report(peer: PeerBench) -> None:
    peer.reduce(11)
    peer.handle(events.ReduceDone(AHEAD, 7))
    assert peer.plan(11, AHEAD + 1) == [EndReduce(AHEAD, False), start(11, AHEAD + 1)]


def test_a_mismatch_ends_what_was_started(peer: PeerBench) -> None:
    """S2"""
    peer.reduce(11)
    first, second = peer.hear(
        Decision(11, Result.INVALID_USAGE, 0, "no", field="count", values=("1", "2"), attempt_id=99)
    )
    assert first == EndReduce(AHEAD, False) and isinstance(second, Reject)


def test_a_loss_ends_what_was_started(peer: PeerBench) -> None:
    """S2"""
    peer.reduce(11)
    first, second = peer.hear(
        Decision(11, Result.RANK_CONNECTION_LOST, 2, "lost b", attempt_id=AHEAD, order=pids("a"), calls=(11,))
    )
    assert first == EndReduce(AHEAD, False) and isinstance(second, Reject) and isinstance(second.error, PeerLost)


@pytest.mark.parametrize("is_done", [False, True], ids=["running", "reported"])
def test_the_end_of_an_attempt_without_its_plan_ends_what_was_started(peer: PeerBench, is_done: bool) -> None:
    """S2. Duel, seed 9436165: a plan that replaced it was lost with its master; another peer reported its end."""
    peer.reduce(11)
    if is_done:
        peer.handle(events.ReduceDone(AHEAD, 7))
    *ended, rejected = peer.hear(Decision(11, Result.RANK_CONNECTION_LOST, 2, "lost b", attempt_id=AHEAD + 1))
    assert ended == [EndReduce(AHEAD, False), EndReduce(AHEAD + 1, False)]
    assert isinstance(rejected, Reject) and isinstance(rejected.error, PeerLost)


def test_the_result_of_what_was_started_is_not_that_of_another_attempt(peer: PeerBench) -> None:
    """S1"""
    peer.reduce(11)
    peer.handle(events.ReduceDone(AHEAD, 7))
    peer.hear(Decision(11, 0, 2, attempt_id=AHEAD + 1))
    assert isinstance(peer.machine.error, Kicked)


def test_what_was_started_is_said_again_on_a_new_connection(peer: PeerBench) -> None:
    """L3: no master may know of the attempt, so the vote comes before the report."""
    peer.reduce(11)
    peer.handle(events.ReduceDone(AHEAD, 7))
    peer.down()
    said = [effect.message for effect in peer.reconnect() if isinstance(effect, Send)]
    assert said[-2:] == [vote(11).message, Report(11, AHEAD, True, digest=7, count=2)]


def test_a_list_of_other_members_voids_plans_ahead(peer: PeerBench) -> None:
    """S1"""
    peer.hear(member_list(3, "ab"))
    assert peer.reduce(11) == [vote(11, 0)]


def later_members(peer: PeerBench) -> list[Any]:
    return peer.hear(member_list(3, "ab"))


def another_call(peer: PeerBench) -> list[Any]:
    return peer.reduce(11, spec(count=9))


def no_link(peer: PeerBench) -> list[Any]:
    peer.handle(events.LinkFailed(pid("b"), "reset"))
    return peer.reduce(11)


def refusal(peer: PeerBench) -> list[Any]:
    peer.reduce(11, spec(tag=1))
    return peer.hear(Decision(11, Result.INVALID_USAGE))


def void(peer: PeerBench) -> list[Any]:
    peer.reduce(11)
    peer.handle(events.ReduceDone(AHEAD + 1, 7))
    return peer.hear(Decision(11, 0, 2, attempt_id=AHEAD + 1, order=pids("ab"), calls=(11, 3), is_ahead_void=True))


def other_plan(peer: PeerBench) -> list[Any]:
    peer.reduce(11)
    return peer.plan(11, 99)


@pytest.mark.parametrize("drop", [later_members, another_call, no_link, refusal, void, other_plan])
def test_a_plan_ahead_that_is_dropped_is_ended(drop: Callable[[PeerBench], list[Any]]) -> None:
    """L2, B1: others may have started the attempt. Their frames would fill the bound on early ones for good."""
    peer = after_a_commit(plan=replace(plan_of(10), ahead=(AHEAD + 1,)))
    ids = peer.machine._ahead[0].attempt_ids
    assert len(ids) == 2
    ended = [effect for effect in drop(peer) if isinstance(effect, EndReduce) and not effect.commit]
    assert {effect.attempt_id for effect in ended} >= set(ids[1:]) and not peer.machine._ahead
    assert len(ended) == len(ids) - (drop is void)


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT])
@pytest.mark.parametrize("broken", "bcd")
def test_a_link_that_is_down_waits_for_a_plan(broken: str, algorithm: Algorithm) -> None:
    """The next plan may avoid the link. In the ring abcd, a needs no link to c."""
    peer = after_a_commit("abcd", Plan(FIRST_ATTEMPT, (10, 10, 10, 10), reducing("abcd", algorithm)))
    peer.handle(events.LinkFailed(pid(broken), "reset"))
    is_needed = broken != "c" or algorithm is Algorithm.DIRECT
    assert isinstance(peer.reduce(11)[0], EndReduce if is_needed else StartReduce)


def test_a_neighbour_that_is_gone_waits_for_a_plan(peer: PeerBench) -> None:
    peer.hear(NeighboursChanged(gone=pids("b")))
    assert peer.reduce(11) == [EndReduce(AHEAD, False), vote(11, 0)]


def test_a_released_call_is_not_started_again(peer: PeerBench) -> None:
    """S4: the user has the buffers back. The plan that replaces the attempt fails for all."""
    peer.reduce(11)
    peer.down()
    peer.handle(events.CallWithdrawn(11, timed_out=True))
    peer.up()
    peer.hear(Welcome(RUN_ID, 0))
    ended, report = peer.plan(11, AHEAD + 1)
    assert ended == EndReduce(AHEAD + 1, False)
    assert isinstance(report, Send) and isinstance(report.message, Report) and not report.message.ok


def test_a_new_master_hears_of_it_by_the_vote(peer: PeerBench) -> None:
    """L3: the peer does not know the calls of the others, so its report cannot describe the attempt."""
    peer.reduce(11)
    report = peer.machine._run_report()
    assert report.running == () and [outcome.ahead for outcome in report.outcomes] == [()]


def test_peers_keep_as_many_as_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1"""
    monkeypatch.setattr(limits, "PLANS_AHEAD_MAX", 2)
    peer = PeerBench().member()
    for number in range(4):
        peer.reduce(10 + number, spec(number))
        peer.plan(10 + number, FIRST_ATTEMPT + 2 * number)
        peer.handle(events.ReduceDone(FIRST_ATTEMPT + 2 * number, 7))
        decision = Decision(10 + number, 0, 2, attempt_id=FIRST_ATTEMPT + 2 * number)
        peer.hear(replace(decision, ahead=(FIRST_ATTEMPT + 2 * number + 1,)))
    assert list(peer.machine._ahead) == [2, 3]


def test_nothing_is_planned_ahead_of_a_plan_that_another_master_has_made() -> None:
    """S3: peers would run the next call by the other master's plan, which this master does not know."""
    bench = TakeOver()
    for name in "abcd":
        bench.report(name, "abcd", waits=name == "d")
    bench.link("abcd")
    bench.say("abcd", Votes(0, (Vote(3, spec(), 77),)))
    bench.finish("abcd", 3, 77, count=4)
    assert bench.verdict("a", 3) == Decision(3, 0, 4, attempt_id=77)
    assert bench.machine.collectives._ahead == {}


def test_a_bound_call_that_follows_another_is_freed_as_soon_as_its_turn_comes() -> None:
    """L1: a gives its second call up while the master lacks c's votes for both. c gives up its second one too."""
    bench = Bench("abc")
    for name in "ab":
        for number in (2, 3):
            bench.call(name, number, AHEAD + number - 2)
            bench.finish(name, number, AHEAD + number - 2)
    bench.say("a", Withdraw(3, is_bound=True))
    epoch = bench.machine.registry.epoch
    with bench.standing_still():
        for number in (2, 3):
            bench.call("c", number, AHEAD + number - 2)
        bench.finish("c", 2, AHEAD)
        bench.withdraw("c", 3)
    assert bench.verdict("a", 2) == Decision(2, 0, 3, attempt_id=AHEAD)
    assert bench.machine.registry.epoch == epoch + 1, "what is planned ahead is void"
    bench.say("c", Acknowledgement(epoch + 1))
    assert bench.verdict("a", 3) == Decision(3, Result.RANK_CONNECTION_LOST, reason="withdrawn")
    assert bench.verdict("b", 3) is None


def test_a_call_that_follows_a_withdrawn_one_takes_its_place_before_calls_are_compared() -> None:
    """L1: a is in a sync too. Its call at the tag must not seem to be missing there, or b would be refused with it."""
    bench = Bench("abc")
    for name in "ab":
        bench.call(name)
        bench.finish(name, 2, AHEAD)
    bench.call("a", 3, 0)
    epoch = bench.machine.registry.epoch
    bench.say("a", Withdraw(2, is_bound=True))
    bench.say("a", offer(4, 1))
    bench.say("c", Acknowledgement(epoch + 1))
    assert bench.verdict("a", 2) == Decision(2, Result.RANK_CONNECTION_LOST, reason="withdrawn")
    assert bench.verdict("a", 3) is bench.verdict("a", 4) is bench.verdict("b", 2) is None


def test_what_may_be_ahead_is_bounded() -> None:
    """L2: others that make other calls first keep the frames of these. Once some have ended, more may begin."""
    peer = PeerBench().member("ab")
    fields = {"count": limits.PLAN_AHEAD_SMALL_BYTES // 4}
    most = limits.PLANS_AHEAD_BYTES_MAX // (limits.PLAN_AHEAD_SMALL_BYTES // 2)
    for tag in range(most + 2):
        peer.reduce(10 + tag, spec(tag, **fields))
        peer.hear(replace(plan_of(10 + tag, 1 + 2 * tag, "ab"), ahead=(2 + 2 * tag,)))
        peer.handle(events.ReduceDone(1 + 2 * tag, 7))
        peer.hear(Decision(10 + tag, 0, 2, attempt_id=1 + 2 * tag))
    votes = [peer.reduce(5000 + tag, spec(tag, **fields))[-1].message.votes[0].ahead for tag in range(most + 1)]
    assert votes == [2 + 2 * tag for tag in range(most)] + [0]
    peer.hear(Decision(5000, Result.RANK_CONNECTION_LOST, 0, "withdrawn"))
    assert peer.reduce(9000, spec(most + 1, **fields))[-1].message.votes[0].ahead > 0


WIDE = {"datatype": DataType.INT8, "op": ReduceOp.AVG, "count": 1 << 18}
SCALED = {"quantization": 1, "quantized_datatype": 0, "count": 1 << 16, "block_size": 1}


@pytest.mark.parametrize(
    ("fields", "early_bytes"),
    [
        (WIDE, 4 * (1 << 18) * 3 // 4),
        ({**WIDE, "kind": CollectiveKind.REDUCE_SCATTER}, 4 * (1 << 18) * 3 // 4),
        (SCALED, (1 + 8) * (1 << 16) * 3 // 4),
        ({"kind": CollectiveKind.ALL_TO_ALL, "count": 1 << 14}, 3 * 4 * (1 << 14)),
    ],
    ids=["wide sums", "wide sums that are scattered", "a scale for each element", "rows through others"],
)
def test_what_is_ahead_is_counted_as_it_travels(fields: dict[str, Any], early_bytes: int) -> None:
    """L2: in a ring a receiver keeps what the peer before it sends, which passes on what all others send."""
    peer = PeerBench().member("abcd")
    tags = limits.DATA_MESSAGES_QUEUED_BYTES_MAX // early_bytes + 1
    for tag in range(tags):
        peer.reduce(10 + tag, spec(tag, **fields))
        peer.hear(replace(plan_of(10 + tag, 1 + 2 * tag, "abcd"), ahead=(2 + 2 * tag,)))
        peer.handle(events.ReduceDone(1 + 2 * tag, 7))
        peer.hear(Decision(10 + tag, 0, 4, attempt_id=1 + 2 * tag))
    votes = [peer.reduce(5000 + tag, spec(tag, **fields))[-1].message.votes[0].ahead for tag in range(tags)]
    assert any(votes) and sum(map(bool, votes)) * early_bytes <= limits.DATA_MESSAGES_QUEUED_BYTES_MAX


def test_an_attempt_far_behind_one_that_was_dropped_is_not_started(peer: PeerBench) -> None:
    """L1: the data plane knows the dropped attempt, so it takes early frames of one far behind it for late ones. The
    master has given many ids to other groups while this peer was in one call."""
    peer.reduce(11, spec(1))
    peer.hear(plan_of(11, AHEAD + 1, names="ab"))
    peer.handle(events.ReduceDone(AHEAD + 1, 7))
    far = AHEAD + 2 * limits.PLAN_AHEAD_AGE_MAX
    peer.hear(Decision(11, 0, 2, attempt_id=AHEAD + 1, ahead=(far,)))
    assert peer.reduce(12, spec(1, count=99))[0] == EndReduce(far, commit=False)
    assert peer.reduce(13) == [EndReduce(AHEAD, commit=False), Send(Votes(12, (Vote(13, spec(), 0),)))]


@pytest.mark.parametrize("how", ["planned late", "lost plan", "lost plan after the release"])
def test_an_attempt_far_behind_one_that_was_never_started_is_not_started(how: str) -> None:
    """L1: the same after the end of an attempt whose plan got lost, or came after the call was withdrawn."""
    peer, far = after_a_commit(), AHEAD + 2 * limits.PLAN_AHEAD_AGE_MAX
    peer.reduce(11, spec(1))
    if how != "lost plan":
        peer.handle(events.CallWithdrawn(11, timed_out=True))
        peer.tick(limits.WITHDRAW_TIMEOUT_NS)
    if how == "planned late":
        effects = peer.plan(11, far)
    else:
        effects = peer.hear(Decision(11, Result.RANK_CONNECTION_LOST, 2, "lost b", attempt_id=far))
    assert EndReduce(far, commit=False) in effects
    assert peer.reduce(12)[-1].message.votes[0].ahead == 0


def test_a_plan_ahead_for_one_peer_does_not_crash_it() -> None:
    """Only a faulty master sends it."""
    peer = after_a_commit(plan=plan_of(10, names="a"))
    assert peer.reduce(11)[0] == start(11, AHEAD, "a", is_ahead=True)


@pytest.mark.parametrize("ahead_by", [0, 1, 2 * limits.PLAN_AHEAD_AGE_MAX])
def test_who_hears_that_another_has_ended_an_attempt_never_starts_it(peer: PeerBench, ahead_by: int) -> None:
    """L2: frames of it may have come. An attempt that is unknown here ends, too, if its id is not far from others."""
    is_known = ahead_by == 0
    told = peer.handle(events.AttemptEnded(pid("b"), AHEAD + ahead_by))
    assert told == ([EndReduce(AHEAD + ahead_by, commit=False)] if ahead_by <= 1 else [])
    assert peer.reduce(11) == ([vote(11, 0)] if is_known else [start(11, AHEAD, is_ahead=True), vote(11)])


@pytest.mark.parametrize("planned_by", ["decision", "plan"])
def test_who_hears_of_the_end_of_an_attempt_before_its_plan_never_starts_it(planned_by: str) -> None:
    """S4: the data plane drops its frames. The message with plans ahead took longer than what another peer began."""
    peer = PeerBench().member("ab")
    peer.reduce(10)
    assert peer.handle(events.AttemptEnded(pid("b"), AHEAD)) == [EndReduce(AHEAD, commit=False)]
    ahead = (AHEAD, AHEAD + 1)
    told = peer.hear(replace(plan_of(10), ahead=ahead if planned_by == "plan" else ()))
    peer.handle(events.ReduceDone(FIRST_ATTEMPT, 7))
    decision = Decision(10, 0, 2, attempt_id=FIRST_ATTEMPT, ahead=ahead if planned_by == "decision" else ())
    told += peer.hear(decision)
    assert {EndReduce(attempt_id, commit=False) for attempt_id in ahead} <= set(told)
    assert peer.reduce(11) == [vote(11, 0)]


def test_ends_that_a_member_tells_without_end_are_forgotten(peer: PeerBench) -> None:
    for number in range(2 * limits.PLANS_AHEAD_MAX):
        peer.handle(events.AttemptEnded(pid("b"), AHEAD + 1 + number))
    assert len(peer.machine._ended_ahead) == limits.PLANS_AHEAD_MAX


def test_wild_attempt_ids_of_a_member_have_a_bound(peer: PeerBench) -> None:
    """L2: otherwise the data plane would take the frames of all other attempts for late ones, also after it is gone."""
    far = FIRST_ATTEMPT + limits.PLAN_AHEAD_AGE_MAX
    assert peer.handle(events.AttemptEnded(pid("b"), far)) == [EndReduce(far, commit=False)]
    assert peer.handle(events.AttemptEnded(pid("b"), far + limits.PLAN_AHEAD_AGE_MAX)) == []
    assert peer.reduce(11) == [start(11, AHEAD, is_ahead=True), vote(11)]


@pytest.mark.parametrize("ahead_by", [0, 1])
def test_a_joiner_ends_no_attempt(peer: PeerBench, ahead_by: int) -> None:
    """S6: it has started none. The data plane would drop frames that come before the members start the attempt."""
    peer.hear(NeighboursChanged(joined=(neighbour("j"),)))
    peer.handle(events.LinkUp(pid("j")))
    assert peer.handle(events.AttemptEnded(pid("j"), AHEAD + ahead_by)) == []
    assert peer.reduce(11) == [start(11, AHEAD, is_ahead=True), vote(11)]


def test_who_runs_an_attempt_that_another_has_ended_waits_for_the_master(peer: PeerBench) -> None:
    peer.reduce(11)
    assert peer.handle(events.AttemptEnded(pid("b"), AHEAD)) == []
