"""The commit between peers: a peer that has the digests of all returns before the master decides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import InvalidUsage, Kicked, OperationTimeout, Result
from zpccl.protocol import events
from zpccl.protocol.commit import Digests, Told, tells_digests
from zpccl.protocol.effects import EndReduce, Reject, Resolve, Send, StartReduce
from zpccl.protocol.messages import (
    Decision,
    Linked,
    NeighboursChanged,
    Refusal,
    Refused,
    Report,
    TopologyKind,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)
from zpccl.protocol.peer import SPLIT, State
from zpccl.types import CollectiveKind

from .harness import FIRST_ATTEMPT, RUN_ID, PeerBench, member_list, pid, pids, plan_of, reducing, spec

AHEAD = (5, 6, 7, 8)


class Bench(PeerBench):
    """Peer a of a group, with links to all others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tells: dict[int, bool] = {}  # By attempt.

    @classmethod
    def of(cls, names: str = "abc") -> Bench:
        bench = cls()
        bench.member(names)
        return bench

    def run(self, call_id: int = 10, names: str = "abc", **changes: Any) -> Bench:
        """A call is made, and its plan arrives."""
        self.reduce(call_id, spec(**changes))
        self.hear(plan_of(call_id, FIRST_ATTEMPT, names))
        return self

    def done(self, attempt_id: int = FIRST_ATTEMPT, error: str = "", **facts: Any) -> list[Any]:
        """The data plane is done. It has told its digest, unless the call was withdrawn or needs no digests."""
        call = next((call for call in self.machine.calls.values() if call.attempt_id == attempt_id), None)
        has_told = not error and self.tells[attempt_id] and call is not None and call.withdrawn is None
        return self.handle(events.ReduceDone(attempt_id, 7, error, has_told=has_told, **facts))

    def handle(self, event: Any) -> list[Any]:
        effects = super().handle(event)
        self.tells.update((e.attempt_id, e.tells_digest) for e in effects if isinstance(e, StartReduce))
        return effects

    def told(self, name: str, call_id: int, attempt_id: int = FIRST_ATTEMPT, digest: int = 7) -> list[Any]:
        """Another peer tells its digest."""
        return self.handle(events.DigestReceived(pid(name), attempt_id, call_id, digest))

    def commit(self, call_id: int = 10, attempt_id: int = FIRST_ATTEMPT) -> list[Any]:
        """All tell their digests."""
        self.done(attempt_id)
        self.told("b", 20, attempt_id)
        return self.told("c", 30, attempt_id)

    def give_up(self, call_id: int = 10) -> list[Any]:
        return self.handle(events.CallWithdrawn(call_id, timed_out=True))

    def decided(self, call_id: int = 10, attempt_id: int = FIRST_ATTEMPT, **facts: Any) -> list[Any]:
        """The master commits."""
        return self.hear(Decision(call_id, 0, 3, attempt_id=attempt_id, **facts))


@pytest.fixture
def bench() -> Bench:
    """Peer a, which has called, and has the plan of the collective."""
    return Bench.of().run()


def start(call_id: int, attempt_id: int, *, tells_digest: bool = True, is_ahead: bool = True) -> StartReduce:
    return StartReduce(call_id, attempt_id, reducing("abc"), tells_digest, is_ahead)


def end(call_id: int = 10, attempt_id: int = FIRST_ATTEMPT, count: int = 3) -> list[Any]:
    return [EndReduce(attempt_id, True), Resolve(call_id, count)]


REPORT = Report(10, FIRST_ATTEMPT, True, digest=7, count=3)

# --- Returning --------------------------------------------------------------------------------------------------------


def test_who_has_the_digests_of_all_returns(bench: Bench) -> None:
    """S1: the data plane has told the others first. The report follows, without haste."""
    assert bench.done() == [Send(REPORT, may_wait=True)]
    assert bench.told("b", 20) == []
    assert bench.told("c", 30) == end()
    assert bench.decided() == [] and bench.machine.calls == {}


@pytest.mark.parametrize("early", [0, 1, 2])
def test_digests_may_come_at_any_time(early: int) -> None:
    """Digests may arrive before this peer has its result, before it has its plan, and twice."""
    bench = Bench.of()
    if early == 2:
        bench.told("b", 20)
        bench.told("b", 20)
    bench.run()
    if early == 1:
        bench.told("b", 20)
    bench.told("c", 30)
    effects = bench.done() if early else [*bench.done(), *bench.told("b", 20)]
    assert effects[-2:] == end()


def test_results_that_differ_are_for_the_master(bench: Bench) -> None:
    """S1: no peer returns, and the master sees the difference in the reports."""
    bench.done()
    assert bench.told("b", 20, digest=8) == [Send(replace(REPORT, other_digest=8))], "b may be lost before it reports"
    assert bench.told("c", 30) == []
    first, second = bench.hear(Decision(10, Result.INTERNAL_ERROR, 3, "results differ", attempt_id=FIRST_ATTEMPT))
    assert first == EndReduce(FIRST_ATTEMPT, False) and isinstance(second, Reject)


def test_the_word_of_strangers_and_of_other_attempts_counts_for_nothing(bench: Bench) -> None:
    bench.done()
    assert bench.told("b", 20) == bench.told("x", 30) == bench.told("c", 30, FIRST_ATTEMPT + 1) == []


def test_a_participant_without_a_link_is_waited_for_at_the_master(bench: Bench) -> None:
    """A digest is forgotten together with its peer's link, so that none is kept for ever (B1)."""
    bench.told("b", 20)
    bench.hear(NeighboursChanged(gone=pids("b")))
    bench.done()
    assert bench.told("c", 30) == []
    assert bench.decided() == end()


@pytest.mark.parametrize(
    ("changes", "count", "tells"),
    [
        ({}, 2, True),
        ({"kind": CollectiveKind.ALL_GATHER}, 3, True),
        ({"kind": CollectiveKind.REDUCE_SCATTER}, 3, True),
        ({"kind": CollectiveKind.ALL_TO_ALL}, 3, True),
        ({}, limits.COMMIT_PEERS_MAX, True),
        ({}, limits.COMMIT_PEERS_MAX + 1, False),
        ({"kind": CollectiveKind.BROADCAST}, 2, False),
        ({"kind": CollectiveKind.BARRIER, "count": 0}, 2, False),
        ({"count": 0}, 2, False),
    ],
)
def test_digests_are_told_where_a_result_needs_all(changes: dict[str, Any], count: int, tells: bool) -> None:
    """L1: the root of a broadcast is done before others begin, so it must not be bound to them."""
    assert tells_digests(spec(**changes), count) == tells


def test_the_root_of_a_broadcast_tells_nothing() -> None:
    bench = Bench.of().run(kind=CollectiveKind.BROADCAST, is_root=True)
    assert bench.done() == [Send(REPORT)]
    assert bench.told("b", 20) == bench.told("c", 30) == []
    assert bench.give_up() == [Send(Withdraw(10))]


# --- Being bound ------------------------------------------------------------------------------------------------------


def test_who_has_told_its_digest_is_bound(bench: Bench) -> None:
    """S1: another peer may have committed, so neither a timeout nor Ctrl-C ends the call while a master leads."""
    bench.done()
    assert bench.give_up() == []
    for _ in range(3):
        assert bench.tick(limits.WITHDRAW_TIMEOUT_NS) == []
    bench.told("b", 20)
    assert bench.told("c", 30) == end()
    assert bench.machine.deadline_ns() is None


def test_who_has_told_its_digest_ends_as_the_master_says(bench: Bench) -> None:
    bench.done()
    bench.give_up()
    first, second = bench.hear(Decision(10, Result.RANK_CONNECTION_LOST, 3, "lost c", attempt_id=FIRST_ATTEMPT))
    assert first == EndReduce(FIRST_ATTEMPT, False)
    assert isinstance(second, Reject) and isinstance(second.error, OperationTimeout)


def test_without_a_master_it_waits_no_longer_than_others(bench: Bench) -> None:
    """L1: it waits no longer than others, and leaves if these have committed."""
    bench.done()
    bench.down()
    bench.give_up()
    ended, rejected = [e for e in bench.tick(limits.WITHDRAW_TIMEOUT_NS) if isinstance(e, EndReduce | Reject)]
    assert ended == EndReduce(FIRST_ATTEMPT, False) and isinstance(rejected, Reject)
    assert bench.told("b", 20) == bench.told("c", 30) == []


def test_who_has_given_up_first_tells_nothing(bench: Bench) -> None:
    """S1: its withdrawal is on its way to the master, which aborts the call for all."""
    assert bench.give_up() == [Send(Withdraw(10))]
    assert bench.done() == [Send(REPORT)]
    assert bench.told("b", 20) == bench.told("c", 30) == []


def test_who_has_failed_tells_nothing(bench: Bench) -> None:
    bench.told("b", 20)
    bench.told("c", 30)
    (sent,) = bench.done(error="reset", fault=pid("b"))
    assert isinstance(sent, Send) and isinstance(sent.message, Report) and not sent.message.ok


def test_a_plan_frees_who_has_told_the_digest_of_a_plan_ahead() -> None:
    """L1: the peer now sends its withdrawal. The master plans anew only if nobody has committed."""
    bench = committed_once()
    bench.reduce(11)
    bench.done(AHEAD[0])
    bench.give_up(11)
    effects = bench.hear(plan_of(11, 99, "abc"))
    assert effects[:2] == [EndReduce(AHEAD[0], False), Send(Withdraw(11))]
    assert effects[2] == start(11, 99, tells_digest=False, is_ahead=False), "it has withdrawn"
    assert bench.done(99) == [Send(Report(11, 99, True, digest=7, count=3))]


# --- What another master hears ----------------------------------------------------------------------------------------


def ask_for_report(bench: Bench) -> Any:
    """Another master takes the run over. Returns the run report."""
    bench.down()
    bench.up()
    refused = Refused(Refusal.REPORT, "report", term=4, leader=pid("n"))
    return next(e.message for e in bench.hear(refused) if isinstance(e, Send))


def test_a_run_report_tells_of_the_commit_with_the_calls_of_all(bench: Bench) -> None:
    """S1: the others get the same outcome."""
    bench.commit()
    report = ask_for_report(bench)
    assert report.running == ()
    assert [(o.attempt_id, o.committed, o.order, o.calls, o.value) for o in report.outcomes] == [
        (FIRST_ATTEMPT, True, pids("abc"), (10, 20, 30), 3)
    ]
    said = [e.message for e in bench.hear(Welcome(RUN_ID, 4, pid("n"))) if isinstance(e, Send)]
    assert said[-1] == REPORT
    assert bench.decided() == [] and bench.machine.calls == {}


@pytest.mark.parametrize("is_done", [False, True])
def test_a_run_report_changes_nothing(bench: Bench, is_done: bool) -> None:
    """S1: a bound peer also reports its result to the new master, which then decides as the peers have decided."""
    if is_done:
        bench.done()
    report = ask_for_report(bench)
    assert [running.plan.attempt_id for running in report.running] == [FIRST_ATTEMPT]
    said = [e.message for e in bench.hear(Welcome(RUN_ID, 4, pid("n"))) if isinstance(e, Send)]
    assert (said[-1] == REPORT) == is_done
    bench.told("b", 20)
    effects = bench.told("c", 30) if is_done else [*bench.told("c", 30), *bench.done()]
    assert effects[-2:] == end()


@pytest.mark.parametrize("is_same_connection", [False, True])
def test_nothing_is_said_of_calls_between_a_promise_and_its_welcome(is_same_connection: bool) -> None:
    """S1: a candidate drops messages that come before it leads, and would then mistake a later call for this one."""
    bench = committed_once()
    bench.reduce(11)
    if is_same_connection:
        bench.hear(Refused(Refusal.REPORT, "report", term=4, leader=pid("n")))
    else:
        ask_for_report(bench)
        bench.down()
        names = [type(e.message).__name__ for e in bench.up() if isinstance(e, Send)]
        assert names == ["Hello", "Linked"], "the candidate knows its report, and may lead before the rest comes"
    effects = [*bench.commit(11, AHEAD[0]), *bench.reduce(12), *bench.done(AHEAD[1]), *bench.give_up(12)]
    assert not [e for e in effects if isinstance(e, Send)]
    said = [e.message for e in bench.hear(Welcome(RUN_ID, 4, pid("n"))) if isinstance(e, Send)]
    assert isinstance(said[0], Linked) and said[-1] == Withdraw(12, is_bound=True)
    votes = [vote.call_id for message in said if isinstance(message, Votes) for vote in message.votes]
    assert votes == [11, 12] and [m.call_id for m in said if isinstance(m, Report)] == [11, 12]
    assert [type(message).__name__ for message in said[1:-1]] == ["Votes", "Report", "Votes", "Report"]


def test_a_master_that_decides_otherwise_is_left(bench: Bench) -> None:
    """S1: no honest master decides otherwise."""
    bench.commit()
    bench.hear(Decision(10, Result.RANK_CONNECTION_LOST, 3, "lost c", attempt_id=FIRST_ATTEMPT))
    assert bench.machine.state is State.CLOSED
    assert isinstance(bench.machine.error, Kicked) and SPLIT in str(bench.machine.error)


# --- The next call ----------------------------------------------------------------------------------------------------


def committed_once() -> Bench:
    """A peer that may start its next calls at once."""
    bench = Bench.of().run()
    bench.commit()
    bench.decided(ahead=AHEAD)
    return bench


def test_calls_follow_each_other_without_the_master() -> None:
    """This works while the master's decisions are under way, and until the plans ahead are used up."""
    bench = committed_once()
    for call_id, attempt_id in enumerate(AHEAD, start=11):
        assert bench.reduce(call_id)[0] == start(call_id, attempt_id)
        assert bench.commit(call_id, attempt_id)[-2:] == end(call_id, attempt_id)
    assert bench.reduce(15) == []  # The call is held: the decision on call 11 brings the next plan.
    effects = bench.decided(11, AHEAD[0], ahead=(9,))
    assert effects == [start(15, 9), Send(Votes(12, (Vote(15, spec(), 9),)), may_wait=True)]


def planned_ahead() -> Bench:
    """A peer with a planned first call, and with plans ahead for more calls like it."""
    bench = Bench.of()
    bench.reduce(10)
    bench.hear(replace(plan_of(10, FIRST_ATTEMPT, "abc"), ahead=AHEAD))
    return bench


def test_the_second_call_needs_no_decision_on_the_first() -> None:
    bench = planned_ahead()
    bench.commit()
    assert bench.reduce(11)[0] == start(11, AHEAD[0])


def test_plans_ahead_end_with_an_attempt_that_is_aborted() -> None:
    """The master drops them too."""
    bench = planned_ahead()
    bench.hear(Decision(10, Result.RANK_CONNECTION_LOST, 3, "lost c", attempt_id=FIRST_ATTEMPT))
    assert bench.reduce(11) == [Send(Votes(11, (Vote(11, spec()),)))]


def test_plans_ahead_end_with_a_refusal_of_any_call() -> None:
    """S1. Unruly, seed 9536502: b had started the next one, and told its digest, when both calls were refused."""
    bench = committed_once()
    bench.topology(11, TopologyKind.UPDATE)
    bench.told("b", 20, AHEAD[0])
    bench.hear(Decision(11, Result.INVALID_USAGE, reason="peers wait for each other", attempt_id=99))
    assert bench.reduce(12) == [Send(Votes(12, (Vote(12, spec()),)))]


def test_a_held_call_goes_its_way_when_no_plan_comes(bench: Bench) -> None:
    bench.commit()
    assert bench.reduce(11) == []
    assert bench.decided() == [Send(Votes(11, (Vote(11, spec()),)))]


def test_a_held_call_may_be_given_up(bench: Bench) -> None:
    bench.commit()
    bench.reduce(11)
    (rejected,) = bench.give_up(11)
    assert isinstance(rejected, Reject) and isinstance(rejected.error, OperationTimeout)


def test_another_call_is_not_held(bench: Bench) -> None:
    bench.commit()
    assert bench.reduce(11, spec(count=9)) == [Send(Votes(10, (Vote(11, spec(count=9)),)))]


def test_a_sync_may_follow_a_commit(bench: Bench) -> None:
    """The call before it has been answered, though not by the master."""
    bench.commit()
    (sent,) = bench.sync(11)
    assert isinstance(sent, Send) and isinstance(sent.message, Votes)


def test_plans_ahead_are_dropped_with_the_first_plan_that_is_none() -> None:
    """Peers that have used different numbers of plans ahead start again together."""
    bench = committed_once()
    bench.reduce(11)
    bench.hear(plan_of(11, 99, "abc"))
    assert bench.machine._ahead == {}


@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_have_returned_undecided_have_a_bound(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: beyond the bound the peer waits for the master."""
    monkeypatch.setattr(limits, "CALLS_UNDECIDED_MAX", count)
    bench = committed_once()
    for number in range(2):
        bench.reduce(11 + number)
        ends = bench.commit(11 + number, AHEAD[number])
        assert bool(ends) == (number < count)


def test_who_has_returned_does_not_count_against_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CALLS_IN_FLIGHT_MAX", 1)
    bench = Bench.of().run()
    bench.commit()
    assert not any(isinstance(effect, Reject) for effect in bench.reduce(11, spec(1)))
    assert isinstance(bench.error(bench.reduce(12, spec(2))), InvalidUsage)


def test_a_smaller_list_leaves_a_commit_as_it_is(bench: Bench) -> None:
    bench.commit()
    bench.hear(member_list(9, "ab"))
    assert bench.hear(Decision(10, 0, 3, attempt_id=FIRST_ATTEMPT, order=pids("ab"), calls=(10, 20))) == []


# --- What is kept -----------------------------------------------------------------------------------------------------


def test_digests_of_one_peer_push_out_its_own_alone() -> None:
    """B1, B2."""
    digests = Digests()
    digests.add(pid("b"), 1, Told(2, 3))
    for attempt_id in range(limits.DIGESTS_KEPT_MAX + 1):
        digests.add(pid("c"), attempt_id, Told(4, 3))
    assert digests.calls_of(1, 3, pids("bc")) == {pid("b"): 2, pid("c"): 4}
    assert digests.calls_of(0, 3, pids("c")) is None
    digests.forget(1)
    assert digests.calls_of(1, 3, pids("b")) is None


def test_who_owns_no_part_of_a_reduce_scatter_is_not_bound() -> None:
    """L1: such a peer has its result at once, whether or not others have called. So its timeout must end the call."""
    scatter = spec(kind=CollectiveKind.REDUCE_SCATTER, count=1)
    assert not tells_digests(scatter, 2) and tells_digests(replace(scatter, count=2), 2)
    peer = PeerBench().member("ab")
    peer.reduce(10, scatter)
    peer.hear(replace(plan_of(10, names="ab"), ahead=(FIRST_ATTEMPT + 1,)))
    peer.handle(events.ReduceDone(FIRST_ATTEMPT, 0))
    peer.hear(Decision(10, 0, 2, attempt_id=FIRST_ATTEMPT))
    start, _ = peer.reduce(11, scatter)
    assert isinstance(start, StartReduce) and not start.tells_digest
    peer.handle(events.ReduceDone(start.attempt_id, 0))
    assert Send(Withdraw(11)) in peer.handle(events.CallWithdrawn(11, timed_out=True))
