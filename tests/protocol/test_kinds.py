"""All kinds of collectives except the all-reduce, at the master and at a peer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import CollectiveMismatch, PeerLost, Result, TooFewPeers
from zpccl.protocol import events
from zpccl.protocol.effects import Broadcast, EndReduce, Reject, Resolve, Send, StartReduce
from zpccl.protocol.messages import CollectiveSpec, Decision, Linked, Plan, TopologyKind, Vote, Votes
from zpccl.protocol.rings import owners_of
from zpccl.types import Algorithm, CollectiveKind, ReduceOp

from .harness import (
    FIRST_ATTEMPT,
    RING_ONLY,
    MasterBench,
    PeerBench,
    bench_of,
    fail_by,
    pid,
    pids,
    plan_of,
    reducing,
    running_attempt,
    spec,
)
from .takeover import TakeOver

KINDS = list(CollectiveKind)


def of_kind(kind: CollectiveKind, tag: int = 0, *, is_root: bool = False, **changes: Any) -> CollectiveSpec:
    return spec(tag, kind=kind, is_root=is_root, **changes)


BARRIER = of_kind(CollectiveKind.BARRIER)
ROOT, OTHER = (of_kind(CollectiveKind.BROADCAST, is_root=is_root) for is_root in (True, False))


def cut(bench: MasterBench, one: str, other: str) -> None:
    """Two members have no link with each other; both are linked with all others."""
    for name, gone in ((one, other), (other, one)):
        bench.say(name, Linked(pids(each for each in "abcd" if each not in (name, gone))))


def passed(call_id: int, world_size: int, attempt_id: int = FIRST_ATTEMPT) -> Decision:
    """The decision of a barrier, without its participants, which the bench leaves out."""
    return Decision(call_id, 0, world_size, attempt_id=attempt_id)


# --- All kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind: CollectiveKind) -> None:
    """No collective of any kind succeeds alone: if a tensor goes nowhere, the program should know."""
    bench = bench_of("a")
    sent = bench.begin("a", 1, of_kind(kind, is_root=True))
    assert sent == [("a1", Decision(1, Result.TOO_FEW_PEERS, reason="this peer is alone in its group"))]
    peer = PeerBench().member("a")
    assert isinstance(peer.error(peer.reduce(2, of_kind(kind, is_root=True))), TooFewPeers)


@pytest.mark.parametrize("other", KINDS[1:])
def test_kinds_that_differ_are_named_first(other: CollectiveKind) -> None:
    """Other fields differ only because the kinds do."""
    bench = bench_of("ab")
    bench.begin("a", 1, spec(3, op=ReduceOp.MAX))
    values = ("ALL_REDUCE from a", f"{other.name} from b")
    reason = f"tag 3: peers differ in kind: {'; '.join(values)}"
    answers = [
        Decision(call_id, Result.INVALID_USAGE, reason=reason, field="kind", values=values) for call_id in (1, 2)
    ]
    sent = bench.begin("b", 2, of_kind(other, 3, is_root=other is CollectiveKind.BROADCAST))
    assert sent == [("a1", answers[0]), ("b1", answers[1])]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_waiting_voters_are_told_what_they_wait_in(kind: CollectiveKind) -> None:
    """L1: one waits in a collective, the other in update_topology. The error names these calls."""
    bench = bench_of("ab")
    bench.begin("a", 1, of_kind(kind, 4, is_root=True))
    ((_, answer), _) = bench.vote("b", TopologyKind.UPDATE, 2)
    assert f"{kind.name.lower()} at tag 4 by a" in answer.reason


# --- Broadcast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root, order", [("a", "abc"), ("b", "bca"), ("c", "cab")])
def test_the_ring_of_a_broadcast_begins_with_its_root(root: str, order: str) -> None:
    bench = bench_of("abc")
    for name in "ab":
        bench.begin(name, 1, ROOT if name == root else OTHER)
    sent = bench.begin("c", 1, ROOT if root == "c" else OTHER)
    assert sent == [(f"{name}1", plan_of(1, names=order)) for name in order]


def test_the_root_may_come_where_the_ring_goes_around_a_broken_link() -> None:
    """L2: the ring is rotated, and keeps avoiding the link."""
    bench = bench_of("abcd")
    cut(bench, "a", "b")
    for name in "abc":
        bench.begin(name, 1, ROOT if name == "c" else OTHER)
    order = bench.begin("d", 1, OTHER)[0][1].how.order
    assert order[0] == pid("c") and order in (pids("cadb"), pids("cbda"))


@pytest.mark.parametrize(
    "roots, values",
    [("", ("False from a, b, c",)), ("ac", ("True from a, c", "False from b")), ("abc", ("True from a, b, c",))],
)
def test_a_broadcast_has_one_root(roots: str, values: tuple[str, ...]) -> None:
    """S1: without a root there is nothing to send; with two roots, one would receive what it did not ask for."""
    bench = bench_of("abc")
    for name in "ab":
        bench.begin(name, 1, ROOT if name in roots else OTHER)
    reason = f"tag 0: one peer must be the root: {'; '.join(values)}"
    answer = Decision(1, Result.INVALID_USAGE, reason=reason, field="is_root", values=values)
    sent = bench.begin("c", 1, ROOT if "c" in roots else OTHER)
    assert sent == [(f"{name}1", answer) for name in "abc"]


def test_a_root_that_is_lost_in_a_broadcast() -> None:
    """S1, L1: the attempt fails for the survivors. If they try again without another root, their error says so."""
    bench = bench_of("abc")
    for name in "abc":
        bench.begin(name, 1, ROOT if name == "b" else OTHER)
    bench.finish("b", 1)
    sent = bench.lose("b")
    ended = [message for _, message in sent if isinstance(message, Decision)]
    assert [(d.committed, d.result, d.peers) for d in ended] == [(False, Result.RANK_CONNECTION_LOST, ("b",))] * 2
    bench.begin("a", 2, OTHER)
    assert {message.field for _, message in bench.begin("c", 2, OTHER)} == {"is_root"}


def test_a_broadcast_says_nothing_of_the_link_that_it_does_not_use() -> None:
    """L2: nothing goes from the end of its ring to the root. All-reduces fail by that link until it counts as down."""
    bench, tries = bench_of("abc"), -(-limits.LINK_FAILING_MAX_NS // limits.PATH_TIMEOUT_NS)
    for call_id in range(1, 2 * tries, 2):
        for name in "abc":
            bench.begin(name, call_id, ROOT if name == "a" else OTHER)
        bench.finish("abc", call_id, list(bench.plans)[-1])
        fail_by(bench, "c", "a", call_id + 1)
    bench.begin("abc", 2 * tries + 1, spec(**RING_ONLY))
    assert bench.machine.operations.pending  # The link counts as down, and the call waits for it.


def test_a_peer_that_is_told_of_two_roots() -> None:
    peer = PeerBench().member()
    peer.reduce(2, of_kind(CollectiveKind.BROADCAST, 5, is_root=True))
    values = ("True from a, b",)
    effects = peer.hear(Decision(2, Result.INVALID_USAGE, reason="why", field="is_root", values=values))
    error = peer.error(effects)
    assert isinstance(error, CollectiveMismatch) and (error.tag, error.field, error.values) == (5, "is_root", values)


# --- All-gather and reduce-scatter ------------------------------------------------------------------------------------


@given(st.permutations([bytes([i]) * 16 for i in range(1, 8)]))
def test_rows_are_in_order_of_ids_whatever_the_ring(order: list[bytes]) -> None:
    """S1: each peer owns one row, the same one in every ring of the same peers."""
    owners = owners_of(order)
    assert [order[rank] for rank in owners] == sorted(order)


# --- All-to-all -------------------------------------------------------------------------------------------------------

ALL_TO_ALL = of_kind(CollectiveKind.ALL_TO_ALL)


def test_an_all_to_all_is_direct_and_in_order_of_ids() -> None:
    """S1: rows are in order of ranks, so ranks must be in order of ids. Later rings are in order of admission."""
    bench = bench_of("cab")
    bench.begin("ca", 1, ALL_TO_ALL)
    plan = Plan(FIRST_ATTEMPT, (1, 1, 1), reducing("abc", Algorithm.DIRECT))
    assert bench.begin("b", 1, ALL_TO_ALL) == [(f"{name}1", plan) for name in "abc"]
    bench.finish("abc", 1)
    for name in "abc":
        sent = bench.begin(name, 2)
    assert sent == [(f"{name}1", plan_of(2, FIRST_ATTEMPT + 1, "cab")) for name in "cab"]


def test_rows_for_a_peer_that_is_lost_end_an_all_to_all_for_all() -> None:
    """S1: b has heard of the loss before it makes its rows, a has not. Both get an error, and make new rows."""
    bench = bench_of("abc")
    bench.lose("c")
    bench.begin("a", 1, replace(ALL_TO_ALL, count=6, rows=3))
    bench.begin("b", 1, replace(ALL_TO_ALL, count=4, rows=2))
    for name in "ab":
        verdict = bench.decision(name, 1)
        assert (verdict.result, verdict.field) == (Result.RANK_CONNECTION_LOST, "")
        assert "rows for 3 peers, but the group has only 2" in verdict.reason
    bench.begin("ab", 2, replace(ALL_TO_ALL, count=4, rows=2))
    assert list(bench.plans.values()) == [reducing("ab", Algorithm.DIRECT)]


@pytest.mark.parametrize("kind", CollectiveKind)
def test_a_collective_needs_as_many_members_as_its_callers_say(kind: CollectiveKind) -> None:
    """S2: a has called before c is lost, b calls afterwards. Between these two, the call would change tensors."""
    bench = bench_of("abc")
    needy = replace(of_kind(kind), min_world_size=3)
    bench.begin("a", 1, replace(needy, is_root=kind is CollectiveKind.BROADCAST))
    bench.lose("c")
    bench.begin("b", 1, needy)
    for name in "ab":
        verdict = bench.decision(name, 1)
        assert verdict.result == Result.TOO_FEW_PEERS
        assert verdict.reason == "2 peers are in the group, and min_world_size is 3; wait for others"
    assert not bench.plans


def test_an_all_to_all_goes_by_way_of_others_where_a_link_is_missing() -> None:
    """L2: all rows go to all peers around a ring. Once the link is there, each row goes straight to its receiver."""
    bench = bench_of("abcd")
    cut(bench, "a", "b")
    bench.begin("abcd", 1, ALL_TO_ALL)
    assert list(bench.plans.values()) == [reducing("acbd")]
    bench.finish("abcd", 1)
    bench.link("abcd")
    bench.begin("abcd", 2, ALL_TO_ALL)
    assert list(bench.plans.values()) == [reducing("acbd"), reducing("abcd", Algorithm.DIRECT)]


def test_an_all_to_all_goes_along_trees_where_no_ring_is_left() -> None:
    """L2: only c reaches all others. The tree of each row has its owner as the root."""
    bench = bench_of("abc")
    cut(bench, "a", "b")
    bench.begin("abc", 1, ALL_TO_ALL)
    (how,) = bench.plans.values()
    assert (how.algorithm, how.order) == (Algorithm.TREES, pids("abc"))
    assert [(lane.root, lane.parents) for lane in how.lanes] == [(0, (0, 2, 0)), (1, (2, 1, 1)), (2, ())]


# --- Barrier ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", (1, 2))
def test_a_barrier_opens_when_all_are_there(copies: int) -> None:
    """S1: it needs no links, no plan and no reports."""
    bench = bench_of("abc", copies=copies)
    bench.say("abc", Linked(()))
    assert bench.begin("c", 7, BARRIER) == bench.begin("a", 8, BARRIER) == []
    assert bench.begin("b", 9, BARRIER) == [
        (f"{name}1", passed(call_id, 3)) for name, call_id in (("a", 8), ("b", 9), ("c", 7))
    ]
    assert bench.snapshot()["pending"] == bench.snapshot()["attempts"] == {}


def test_a_barrier_does_not_wait_for_the_lost() -> None:
    """L1."""
    bench = bench_of("abc")
    bench.begin("ab", 1, BARRIER)
    assert [m for _, m in bench.lose("c") if isinstance(m, Decision)] == [passed(1, 2)] * 2


def test_a_barrier_that_was_missed_is_said_again() -> None:
    """L1: the connection broke before the decision arrived."""
    bench = bench_of("ab")
    bench.begin("a", 1, BARRIER)
    bench.disconnect("a")
    bench.begin("b", 4, BARRIER)
    bench.hello("a", welcomed=True)
    assert bench.begin("a", 1, BARRIER) == [("a2", passed(1, 2))]


def test_barriers_follow_each_other() -> None:
    bench = bench_of("ab")
    for call_id in (1, 2):
        bench.begin("ab", call_id, BARRIER, oldest=call_id)
        assert bench.verdict("a", call_id) == passed(call_id, 2, call_id)


def test_a_vote_for_a_barrier_may_be_withdrawn() -> None:
    bench = bench_of("ab")
    bench.begin("a", 1, BARRIER)
    assert bench.withdraw("a", 1) == [("a1", Decision(1, Result.RANK_CONNECTION_LOST, reason="withdrawn"))]
    assert bench.begin("b", 1, BARRIER) == []


def test_a_peer_passes_a_barrier() -> None:
    """S4: the data plane is not involved."""
    peer = PeerBench().member()
    ((send,)) = peer.reduce(2, BARRIER)
    assert isinstance(send, Send)
    assert peer.hear(passed(2, 2)) == [Resolve(2, 2)]


def test_a_barrier_does_not_make_plans_late() -> None:
    """L2: both were lost with a connection, and come again in order of calls. The engine never saw the barrier."""
    peer = PeerBench().member()
    peer.reduce(2, BARRIER, spec(1))
    peer.hear(passed(2, 2, FIRST_ATTEMPT + 1))
    assert peer.plan(3) == [StartReduce(3, FIRST_ATTEMPT, reducing("ab"), tells_digest=True)]


def test_a_peer_is_told_that_a_barrier_failed() -> None:
    """The error comes from a master that took over and knows another end, or from the peer's own close()."""
    peer = PeerBench().member()
    peer.reduce(2, BARRIER)
    (effect,) = peer.hear(Decision(2, Result.RANK_CONNECTION_LOST, 2, "lost", attempt_id=FIRST_ATTEMPT))
    assert isinstance(effect, Reject) and isinstance(effect.error, PeerLost)


def test_a_plan_that_comes_for_a_commit_without_a_result_still_counts() -> None:
    """S1: only a barrier may be committed without a result of this peer."""
    peer = PeerBench().member()
    peer.reduce(2, of_kind(CollectiveKind.ALL_GATHER))
    peer.plan(2)
    effects = peer.hear(Decision(2, 0, 2, attempt_id=FIRST_ATTEMPT))
    assert EndReduce(FIRST_ATTEMPT, commit=False) in effects and peer.machine.error is not None


# --- Another master ---------------------------------------------------------------------------------------------------


def test_a_barrier_that_one_has_passed_opens_for_all() -> None:
    """L3: the former master died before it had told all peers."""
    former = bench_of("ab")
    former.begin("a", 2, BARRIER)
    vote = Votes(0, (Vote(5, BARRIER),))
    effects = former.handle(events.PeerMessageReceived(former.connections["b"], vote))
    (told,) = (e.message for e in effects if isinstance(e, Broadcast) and e.connections == ("a1",))
    peer = PeerBench().member()
    peer.reduce(2, BARRIER)
    peer.hear(told)
    outcome = peer.machine._memory.report(peer.machine._hello(), 3, 2, peer.machine.members, (), 0, ()).outcomes[0]
    assert outcome == Decision(0, 0, 2, attempt_id=FIRST_ATTEMPT, order=pids("ab"), calls=(2, 5))
    bench = TakeOver()
    bench.report("a", outcomes=(outcome,), oldest_call_id=3)
    bench.report("b", oldest_call_id=5)
    assert bench.begin("b", 5, BARRIER, oldest=5) == [("b1", passed(5, 2))]


def test_a_barrier_that_nobody_has_passed_is_voted_for_anew() -> None:
    """L3."""
    bench = TakeOver()
    bench.report("ab")
    assert bench.begin("a", 1, BARRIER) == []
    assert {type(message) for _, message in bench.begin("b", 2, BARRIER)} == {Decision}


@pytest.mark.parametrize("reporter", "ab")
def test_a_broadcast_that_one_reports_goes_on_with_its_root(reporter: str) -> None:
    """L3: votes that come again repeat what each peer has said, and start nothing new."""
    bench, specs = TakeOver(), {"a": OTHER, "b": ROOT}
    running = running_attempt(7, "ba", (5, 2), specs[reporter])
    for name in "ab":
        bench.report(name, running=(running,) if name == reporter else ())
    for name, call_id in (("a", 2), ("b", 5)):
        ((_, plan),) = bench.begin(name, call_id, specs[name])
        assert plan == plan_of(0, 7, "ba", (5, 2)) and isinstance(plan, Plan)
    assert bench.names() == "ab", "nobody is taken for a liar"
    bench.finish("a", 2, 7)
    assert [d.committed for _, d in bench.finish("b", 5, 7)] == [True, True]
