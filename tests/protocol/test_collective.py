"""Collectives at the master: votes, plans, reports, decisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol import events
from zpccl.protocol.effects import Level
from zpccl.protocol.messages import Decision, Kick, Linked, Plan
from zpccl.protocol.operation import COLLECTIVE, Key
from zpccl.protocol.rings import plan_edges, ring_edges
from zpccl.types import Algorithm, CollectiveKind, DataType, ReduceOp

from .harness import (
    FIRST_ATTEMPT,
    RING_ONLY,
    MasterBench,
    bench_of,
    committed,
    entry,
    fail_by,
    offer,
    pid,
    pids,
    plan_of,
    spec,
    unlink,
)

ALONE = "this peer is alone in its group"
LOST = Result.RANK_CONNECTION_LOST


def aborted(call_id: int, reason: str, *blamed: str, attempt_id: int = FIRST_ATTEMPT, peers: int = 2) -> Decision:
    return Decision(call_id, LOST, peers, reason, attempt_id=attempt_id, peers=blamed)


def test_from_votes_to_commit() -> None:
    """S1, S3: golden."""
    bench = bench_of("ab")
    assert bench.begin("a", 1) == []
    assert bench.begin("b", 5) == [("a1", plan_of(0, calls=(1, 5))), ("b1", plan_of(0, calls=(1, 5)))]
    assert bench.finish("a", 1) == []
    assert bench.finish("b", 5) == [("a1", committed(1)), ("b1", committed(5))]
    assert bench.snapshot()["attempts"] == bench.snapshot()["pending"] == {}


def test_the_ring_is_in_order_of_admission() -> None:
    bench = bench_of("cab")
    bench.begin("ab", 1)
    sent = bench.begin("c", 1)
    assert [message.how.order for _, message in sent] == [pids("cab")] * 3


def test_many_tags_in_any_order() -> None:
    bench = bench_of("ab")
    bench.begin("a", 1, spec(10), spec(20), spec(30))
    assert bench.begin("b", 1, spec(30)) == [
        ("a1", plan_of(0, FIRST_ATTEMPT, calls=(3, 1))),
        ("b1", plan_of(0, FIRST_ATTEMPT, calls=(3, 1))),
    ]
    bench.begin("b", 2, spec(10))
    bench.finish("a", 1, FIRST_ATTEMPT + 1)
    assert bench.finish("b", 2, FIRST_ATTEMPT + 1)[0] == ("a1", committed(1, FIRST_ATTEMPT + 1))
    assert bench.verdict("a", 2) is bench.verdict("a", 3) is None
    assert list(bench.snapshot()["pending"]) == [Key(COLLECTIVE, 0, 20)]


def test_a_tag_is_free_again_after_its_decision() -> None:
    bench = bench_of("ab")
    for round_number in range(1, 4):
        bench.begin("ab", round_number)
        bench.finish("ab", round_number, max(bench.plans))
        assert bench.verdict("a", round_number) == committed(round_number, max(bench.plans))


def test_groups_are_independent() -> None:
    """The same tag in two groups means two collectives. A failure in one does not touch the other."""
    bench = bench_of("ab", others="xy")
    for name in "axby":
        bench.begin(name, 1, spec(count=8 if name in "ab" else 9))
    assert bench.plans[FIRST_ATTEMPT].order == pids("ab")
    assert bench.plans[FIRST_ATTEMPT + 1].order == pids("xy")
    bench.lose("y")
    bench.finish("x", 1, FIRST_ATTEMPT + 1, ok=False, reason="lost y")
    assert bench.verdict("x", 1) == aborted(1, "lost y", "y", attempt_id=FIRST_ATTEMPT + 1)
    bench.finish("ab", 1)
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == committed(1)


def test_joiners_do_not_delay_collectives() -> None:
    """S6: joiners come, link, unlink, send nonsense, and die."""
    bench = bench_of("ab")
    bench.begin("a", 1)
    bench.register("j")
    bench.begin("b", 1)
    bench.say("j", Linked(pids("ab")))
    bench.begin("j", 1)
    bench.finish("j", 1, ok=False, fault=pid("b"))
    bench.handle(events.MalformedReceived("j1", "nonsense"))
    bench.say("j", Linked(()))
    bench.withdraw("j", 1)
    bench.finish("a", 1)
    bench.lose("j")
    bench.finish("b", 1)
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == committed(1)


# --- Votes ----------------------------------------------------------------------------------------------------------


def test_alone() -> None:
    bench = bench_of("a")
    assert bench.begin("a", 1) == [("a1", Decision(1, Result.TOO_FEW_PEERS, reason=ALONE))]


def test_alone_in_its_group_though_not_in_the_run() -> None:
    bench = bench_of("a", others="x")
    assert bench.begin("x", 1) == [("x1", Decision(1, Result.TOO_FEW_PEERS, reason=ALONE))]


@pytest.mark.parametrize(
    "changes, values",
    [
        ({"count": 9}, ("8 from a, c", "9 from b")),
        ({"datatype": DataType.DOUBLE}, ("FLOAT from a, c", "DOUBLE from b")),
        ({"op": ReduceOp.MAX}, ("SUM from a, c", "MAX from b")),
        ({"op": 77}, ("SUM from a, c", "77 from b")),
        ({"quantization": 1}, ("NONE from a, c", "MIN_MAX from b")),
        ({"quantized_datatype": 1}, ("UINT8 from a, c", "INT8 from b")),
        ({"block_size": 64}, ("256 from a, c", "64 from b")),
        ({"algorithm": Algorithm.DIRECT}, ("RING from a, c", "DIRECT from b")),
        ({"min_world_size": 2}, ("0 from a, c", "2 from b")),
        ({"count": 9, "op": 1}, ("8 from a, c", "9 from b")),
    ],
)
def test_a_mismatch_names_field_and_peers(changes: dict[str, Any], values: tuple[str, ...]) -> None:
    bench = bench_of("abc")
    bench.begin("a", 1, spec(3))
    bench.begin("b", 2, spec(3, **changes))
    field = next(iter(changes))
    reason = f"tag 3: peers differ in {field}: {'; '.join(values)}"
    expected = [
        (f"{name}1", Decision(call_id, Result.INVALID_USAGE, reason=reason, field=field, values=values))
        for name, call_id in (("a", 1), ("b", 2), ("c", 3))
    ]
    assert bench.begin("c", 3, spec(3)) == expected
    assert bench.snapshot()["pending"] == {}


def test_a_mismatch_of_many_can_be_read() -> None:
    """L1: if the reason were too long for its message, every voter would wait on. The bench decodes all messages."""
    names = [chr(ord("A") + i) * limits.NAME_CHARS_MAX for i in range(50)]
    bench = bench_of(names)
    for number, name in enumerate(names):
        bench.begin([name], 1, spec(count=number + 1))
    for name in names:
        answer = bench.decision(name, 1)
        assert (answer.result, answer.field) == (Result.INVALID_USAGE, "count")
        assert [value.partition(" ")[0] for value in answer.values] == ["1", "2", "3", "47"]
        assert answer.values[-1] == "47 other values"


def test_of_many_who_give_one_value_some_are_named() -> None:
    names = [f"{number:02}-trainer" for number in range(40)]
    bench = bench_of(names)
    bench.begin(names[:-1], 1, spec(count=8))
    bench.begin(names[-1:], 1, spec(count=9))
    answer = bench.decision(names[0], 1)
    assert answer.values[0] == f"8 from {', '.join(names[:13])} and 26 others"
    assert answer.values[1] == f"9 from {names[-1]}"


def test_missing_links_of_many_can_be_told() -> None:
    names = [chr(ord("A") + i) * limits.NAME_CHARS_MAX for i in range(50)]
    bench = bench_of(names)
    bench.say(names, Linked(()))
    bench.begin(names, 1)
    bench.tick_at_deadline()
    assert bench.names() == names[0]
    assert bench.verdict(names[0], 1) == Decision(1, Result.TOO_FEW_PEERS, reason=ALONE)


def test_an_old_reason_of_a_lost_voter_does_not_count() -> None:
    """When a voter is lost, the master forgets its spec too."""
    bench = bench_of("abc")
    bench.begin("c", 1, spec(count=9))
    bench.lose("c")
    bench.begin("a", 1)
    assert isinstance(bench.begin("b", 1)[0][1], Plan)


@pytest.mark.parametrize("is_running", [False, True])
def test_one_tag_for_two_calls_of_a_peer(is_running: bool) -> None:
    bench = bench_of("ab")
    bench.begin("a", 1)
    if is_running:
        bench.begin("b", 1)
    ((connection, answer),) = bench.begin("a", 2)
    assert connection == "a1"
    assert answer.result == Result.INVALID_USAGE
    assert "tag 0 is in use" in answer.reason
    if not is_running:
        bench.begin("b", 1)
    bench.finish("ab", 1)
    assert bench.verdict("b", 1) == committed(1)


def test_a_refused_second_call_leaves_no_empty_vote() -> None:
    """The next vote at that tag begins as if nothing had happened."""
    bench = bench_of("ab")
    bench.begin("ab", 1)
    bench.begin("a", 2)
    assert bench.snapshot()["pending"] == {}
    bench.finish("ab", 1)
    bench.begin("ab", 3)
    assert bench.plans.keys() == {FIRST_ATTEMPT, FIRST_ATTEMPT + 1}


# --- Links ----------------------------------------------------------------------------------------------------------


def test_a_plan_waits_for_links() -> None:
    """L2."""
    bench = bench_of("ab")
    bench.say("a", Linked(()))
    bench.begin("a", 1)
    assert bench.begin("b", 1) == []
    assert bench.machine.deadline_ns() == bench.now_ns + limits.LINK_WAIT_TIMEOUT_NS
    bench.tick(limits.SECOND)
    assert bench.say("a", Linked(pids("b"))) == [("a1", plan_of(1)), ("b1", plan_of(1))]


def test_a_ring_goes_around_a_link_that_is_down() -> None:
    """L2: at once, and nobody is removed."""
    bench = bench_of("abcd")
    unlink(bench, "ab")
    bench.begin("abcd", 1)
    assert bench.plans[FIRST_ATTEMPT].order == pids("acbd")
    bench.finish("abcd", 1)
    assert bench.verdict("b", 1) == committed(1, value=4)
    assert bench.names() == "abcd"


def test_links_are_waited_for_only_where_no_ring_does_without() -> None:
    """L2: a plan waits for a link only if no ring avoids it."""
    bench = bench_of("abcd")
    unlink(bench, "ab", "ac")
    bench.begin("abcd", 1, spec(**RING_ONLY))
    assert bench.plans == {}
    bench.tick(limits.SECOND)
    bench.say("a", Linked(pids("cd")))
    assert bench.plans == {}
    bench.say("c", Linked(pids("abd")))
    assert bench.plans[FIRST_ATTEMPT].order == pids("acbd")


@pytest.mark.parametrize("copies", [1, 2])
def test_links_are_not_waited_for_without_end(copies: int) -> None:
    """L1, L2: the member that is cut off is removed, and the others go on."""
    bench = bench_of("abc", copies=copies)
    bench.say("a", Linked(pids("c")))
    bench.say("c", Linked(pids("a")))
    bench.begin("abc", 1)
    assert bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 1) == []
    kick = Kick(Result.RANK_CONNECTION_FAILED, "no working data connection to a, c")
    assert bench.tick(1)[0] == ("b1", kick)
    assert bench.names() == "ac"
    assert bench.plans[FIRST_ATTEMPT].order == pids("ac")
    bench.finish("ac", 1)
    assert bench.verdict("a", 1) == committed(1)


def test_no_ring_is_needed_for_an_all_reduce() -> None:
    """L2: two pairs can never connect, and three peers have one link each. Trees connect all, and nobody is removed."""
    bench = bench_of("abcd")
    unlink(bench, "bc", "bd", "cd")
    bench.begin("abcd", 1)
    how = bench.plans[FIRST_ATTEMPT]
    assert how.algorithm == Algorithm.TREES and how.order == pids("abcd")
    assert [how.order[lane.root] for lane in how.lanes] == [pid("a")]


def test_a_tree_may_use_a_link_that_has_failed_if_nothing_else_connects_all() -> None:
    """L2: this ends when the link has failed so often that it counts as down. Then the member behind it is removed."""
    bench = bench_of("abc")
    unlink(bench, "ac")
    tries = -(-limits.LINK_FAILING_MAX_NS // limits.PATH_TIMEOUT_NS)
    for call_id in range(1, tries + 1):
        fail_by(bench, "b", "c", call_id, kind=CollectiveKind.ALL_REDUCE)
        assert bench.plans[FIRST_ATTEMPT + call_id - 1].algorithm == Algorithm.TREES
    bench.begin("abc", tries + 1)
    assert bench.machine.operations.pending
    sent = bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert sent[0] == ("c1", Kick(Result.RANK_CONNECTION_FAILED, "no working data connection to a, b"))


def test_nobody_is_removed_for_links_while_all_are_away() -> None:
    """L3: a plan waits for a link when the network of all breaks."""
    bench = bench_of("ab")
    unlink(bench, "ab")
    for name in "ab":
        bench.begin(name, 1)
        bench.disconnect(name)
    bench.tick(60 * limits.SECOND)
    assert bench.names() == "ab"


def test_nobody_is_removed_for_links_just_after_all_were_away() -> None:
    """L3: the plan has waited 10 s by then, but no link could come up."""
    bench = bench_of("ab")
    unlink(bench, "ab")
    bench.begin("ab", 1)
    bench.disconnect("ab")
    bench.now_ns += limits.LINK_WAIT_TIMEOUT_NS - 1
    bench.hello("ab", welcomed=True, connection=2)
    bench.tick(1)
    assert bench.names() == "ab"
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "a"  # As usual.


@pytest.mark.parametrize("away", ["ab", "b"])
def test_outages_that_break_one_attempt_after_the_other_remove_nobody(away: str) -> None:
    """L2: two peers, all of whose links are open again. All connections of both, or of one, were reset."""
    bench = bench_of("ab")
    for call in (1, 2):
        bench.begin("ab", call)
        bench.tick(limits.STALL_TIMEOUT_NS)
        bench.disconnect(away)
        bench.tick(limits.MS)
        bench.hello(away, welcomed=True, connection=1 + call)
        for name, other in ("ab", "ba"):
            bench.say(name, Linked(()))
            bench.finish(name, call, call, ok=False, digest=0, fault=pid(other), reason="link broke")
        bench.link("ab")
    bench.begin("ab", 3)
    assert bench.machine.operations.running and not bench.machine.operations.pending


def test_a_link_that_breaks_once_late_in_a_long_attempt_removes_nobody() -> None:
    """L2: two peers, after a minute of a large tensor. The link is back when they call again."""
    bench = bench_of("ab")
    bench.begin("ab", 1)
    bench.tick(60 * limits.SECOND)
    for name, other in ("ab", "ba"):
        bench.finish(name, 1, ok=False, digest=0, fault=pid(other), reason="link broke")
    unlink(bench, "ab")
    bench.link("ab")
    bench.begin("ab", 2)
    assert bench.machine.operations.running and not bench.machine.operations.pending


@pytest.mark.parametrize("kind", ["BROADCAST", "ALL_GATHER", "REDUCE_SCATTER"])
def test_trees_take_the_place_of_a_ring(kind: str) -> None:
    """L2: if links connect all, other peers forward the data of any collective. The owners are the roots."""
    bench = bench_of("abcd")
    unlink(bench, "bc", "bd", "cd")
    for name in "dcab":
        bench.begin(name, 1, spec(kind=CollectiveKind[kind], is_root=kind == "BROADCAST" and name == "c"))
    how = bench.plans[FIRST_ATTEMPT]
    assert how.algorithm == Algorithm.TREES
    assert tuple(how.order[lane.root] for lane in how.lanes) == (pids("c") if kind == "BROADCAST" else pids("abcd"))
    assert set(map(frozenset, plan_edges(how))) == {frozenset(pids(pair)) for pair in ("ab", "ac", "ad")}
    bench.finish("abcd", 1)
    assert bench.verdict("b", 1) == committed(1, value=4) and bench.names() == "abcd"


def test_more_trees_than_a_plan_can_name_are_none() -> None:
    """B1, L1: an all-gather needs a tree for each peer."""
    bench, letters = bench_of("abcdefghi"), "abcdefghi"
    unlink(bench, *(one + other for one, other in itertools.combinations(letters[1:], 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LANE_PARENTS_MAX", 9 * 9 - 1)
        bench.begin(letters, 1, spec(kind=CollectiveKind.ALL_GATHER))
        answers = [message for _, message in bench.tick(limits.LINK_WAIT_TIMEOUT_NS)]
    assert {answer.result for answer in answers} == {Result.RANK_CONNECTION_FAILED} and len(answers) == 9


def test_what_needs_a_ring_is_refused_where_there_is_none() -> None:
    """L1, L2: nobody is removed for it, and all-reduces go on."""
    bench = bench_of("abcd")
    unlink(bench, "bc", "bd", "cd")
    bench.begin("abcd", 1, spec(**(RING_ONLY | {"kind": CollectiveKind.REDUCE_SCATTER})))
    assert bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 1) == []
    answers = [message for _, message in bench.tick(1)]
    assert [(answer.call_id, answer.result) for answer in answers] == [(1, Result.RANK_CONNECTION_FAILED)] * 4
    down = "the connection between b and c is down, and those of 2 other pairs"
    needs = f"needs data connections around a ring of all peers; {down}"
    assert {answer.reason for answer in answers} == {f"this reduce-scatter {needs}"}
    bench.begin("abcd", 2)
    assert list(bench.plans.values())[-1].algorithm == Algorithm.TREES and bench.names() == "abcd"


def test_an_unknown_kind_that_links_do_not_allow_is_refused() -> None:
    """L1: the members of a group may send any kind. The master goes on, for other groups too."""
    bench = bench_of("abcd")
    unlink(bench, "bc", "bd", "cd")
    bench.begin("abcd", 1, spec(**(RING_ONLY | {"kind": 200})))
    answers = [message for _, message in bench.tick(limits.LINK_WAIT_TIMEOUT_NS)]
    assert {answer.result for answer in answers} == {Result.RANK_CONNECTION_FAILED} and len(answers) == 4
    assert answers[0].reason.startswith("this 200 needs data connections around a ring")


def test_a_call_does_not_wait_for_links_that_another_has_waited_for() -> None:
    """L1: otherwise each step of a program would take ten seconds longer. Once a link has changed, calls wait again."""
    bench = bench_of("abcd")
    unlink(bench, "bc", "bd", "cd")
    mean = spec(**RING_ONLY)
    bench.begin("abcd", 1, mean)
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    for name in "abcd":
        answers = bench.begin(name, 2, mean)
    assert {message.result for _, message in answers} == {Result.RANK_CONNECTION_FAILED} and len(answers) == 4
    for name in "bc":
        bench.say(name, Linked(pids("abc".replace(name, ""))))
    assert bench.begin("abcd", 3, mean) == []
    bench.link("abcd")
    assert list(bench.plans.values())[-1].algorithm == Algorithm.RING


def test_wide_sums_need_a_star_or_a_ring() -> None:
    """L1: a chain of four has neither."""
    bench = bench_of("abcd")
    unlink(bench, "ac", "ad", "bd")
    bench.begin("abcd", 1, spec(op=ReduceOp.AVG, datatype=DataType.INT8, algorithm=Algorithm.AUTO))
    answers = [message for _, message in bench.tick(limits.LINK_WAIT_TIMEOUT_NS)]
    reason = "this all-reduce needs data connections around a ring of all peers, or between one peer and all others; "
    assert {answer.reason for answer in answers} == {
        reason + "the connection between a and c is down, and those of 2 other pairs"
    }
    assert bench.names() == "abcd"


def test_a_member_that_is_cut_off_goes() -> None:
    bench = bench_of("abcde")
    unlink(bench, "ba", "bc", "bd", "be", "de")
    bench.begin("abcde", 1, spec(1), spec(2))
    (gone, kick) = bench.tick(limits.LINK_WAIT_TIMEOUT_NS)[0]
    assert (gone, kick.reason) == ("b1", "no working data connection to a, c, d, e")
    assert bench.names() == "acde"
    assert [how.order for how in bench.plans.values()] == [pids("adce")] * 2


def test_two_halves_without_a_link_between_them() -> None:
    """The half with the first member goes on."""
    bench = bench_of("abcd")
    unlink(bench, "ac", "ad", "bc", "bd")
    bench.begin("abcd", 1)
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "ab"
    assert bench.plans[FIRST_ATTEMPT].order == pids("ab")


def test_groups_are_judged_by_their_own_links() -> None:
    bench = bench_of("ab", others="xy")
    bench.say("x", Linked(()))
    bench.begin("xyab", 1)
    assert bench.plans[FIRST_ATTEMPT].order == pids("ab")
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == "abx"
    assert bench.verdict("x", 1) == Decision(1, Result.TOO_FEW_PEERS, reason=ALONE)


# --- Links that fail ------------------------------------------------------------------------------------------------


def order_of(bench: MasterBench, call_id: int, count: int = 8) -> tuple[bytes, ...]:
    """All make the call and succeed. Returns the order of the ring."""
    bench.begin(bench.names(), call_id, spec(count=count, **RING_ONLY))
    attempt_id, how = list(bench.plans.items())[-1]
    bench.finish(bench.names(), call_id, attempt_id)
    return how.order


def test_a_link_that_failed_is_avoided_for_a_while() -> None:
    """L2: the link may be up again, for example if small packets pass and large ones do not."""
    bench = bench_of("abcd")
    assert fail_by(bench, "a", "b", 1) == pids("abcd")
    assert order_of(bench, 2) == pids("acbd")
    bench.tick(limits.LINK_SUSPECT_NS - 1)
    assert order_of(bench, 3) == pids("acbd")
    bench.tick(1)
    assert order_of(bench, 4) == pids("abcd")


def test_the_least_suspected_links_are_used_where_no_ring_does_without() -> None:
    bench = bench_of("abcd")
    fail_by(bench, "a", "b", 1)
    assert fail_by(bench, "a", "c", 2) == pids("acbd")  # Now a has one good link, to d.
    assert fail_by(bench, "b", "a", 3) == pids("abcd")  # Of two equal failures, it uses the older one.
    assert order_of(bench, 4) == pids("acbd")


@pytest.mark.parametrize("count, is_trusted", [(7, False), (8, True)])
def test_success_clears_a_link_unless_the_tensor_was_smaller(count: int, is_trusted: bool) -> None:
    bench = bench_of("abc")
    for call_id in range(1, 4):
        fail_by(bench, "b", "c", call_id)
    assert order_of(bench, 4, count) == pids("abc")
    fail_by(bench, "b", "c", 5)  # The fourth in a row, or the first.
    bench.begin("abc", 6, spec(**RING_ONLY))
    assert (bench.machine.operations.pending == {}) is is_trusted


def test_a_link_that_goes_on_failing_counts_as_down() -> None:
    """L2: three peers have only one ring. After a while they go on with a tree, and nobody is removed."""
    bench = bench_of("abc")
    tries = -(-limits.LINK_FAILING_MAX_NS // limits.PATH_TIMEOUT_NS)
    for call_id in range(1, tries + 1):
        fail_by(bench, "a", "b", call_id)
    bench.begin("abc", tries + 1)
    how = list(bench.plans.values())[-1]
    assert how.algorithm == Algorithm.TREES and [how.order[lane.root] for lane in how.lanes] == [pid("c")]
    assert bench.names() == "abc"


def stall(bench: MasterBench, call_id: int, *faults: str, **changes: Any) -> tuple[bytes, ...]:
    """All call, and stall at the same time. `faults` has "ab" if a blames b; the other peers give no cause.

    The first report decides; the others are on their way by then. Returns the order of the attempt.
    """
    bench.begin(bench.names(), call_id, spec(**(RING_ONLY | changes)))
    attempt_id, how = list(bench.plans.items())[-1]
    bench.tick(limits.STALL_TIMEOUT_NS)
    blamed = {fault[0]: pid(fault[1]) for fault in faults}
    for name in sorted(bench.names(), key=lambda name: name in blamed):  # A peer that knows something reports last.
        bench.finish(name, call_id, attempt_id, ok=False, digest=0, fault=blamed.get(name), reason="timed out")
    order = how.order
    return order


@pytest.mark.parametrize("faults", [("bc",), ("cb",), ("bc", "cb")])
@pytest.mark.parametrize("copies", [1, 2])
def test_who_names_a_link_late_is_heard(faults: tuple[str, ...], copies: int) -> None:
    """L2: every peer of a ring stalls at once, and the first one to report knows nothing."""
    bench = bench_of("abcd", copies=copies)
    assert stall(bench, 1, *faults) == pids("abcd")
    assert order_of(bench, 2) == pids("abdc")


def test_a_link_that_both_ends_name_costs_once() -> None:
    """Otherwise one stall of three peers would count twice, and the link would count as down at once."""
    bench = bench_of("abc")
    stall(bench, 1, "bc", "cb")
    assert stall(bench, 2, "bc", "cb") == pids("abc")
    bench.begin("abc", 3, spec(**RING_ONLY))
    assert bench.machine.operations.pending  # After two failures the link counts as down.


def test_stalls_without_a_culprit_change_the_ring() -> None:
    """L2: for each link some ring avoids it, and all rings take turns. Nobody is removed for it."""
    bench = bench_of("abcd")
    orders = [stall(bench, call_id) for call_id in range(1, 6)]
    assert orders[0] == orders[1] == pids("abcd")
    rings = [frozenset(frozenset(edge) for edge in ring_edges(order)) for order in orders[1:]]
    assert len(set(rings[:3])) == 3 and rings[3] != rings[2]  # There are no more rings of four.
    assert bench.names() == "abcd"


def test_success_takes_doubts_away() -> None:
    bench = bench_of("abcd")
    for call_id in range(1, 9, 2):
        assert stall(bench, call_id) == pids("abcd")
        assert order_of(bench, call_id + 1) == pids("abcd")


def test_stalls_at_the_same_time_count_once() -> None:
    """They have one cause."""
    bench = bench_of("abcd")
    bench.begin("abcd", 1, spec(1), spec(2))
    bench.tick(limits.STALL_TIMEOUT_NS)
    for tag in (0, 1):
        bench.finish("a", 1 + tag, FIRST_ATTEMPT + tag, ok=False, digest=0)
    assert stall(bench, 3) == pids("abcd")
    assert stall(bench, 4) != pids("abcd")


def test_a_failure_at_once_is_no_stall() -> None:
    """If a link is lost just before the plan comes, its ends report so at once."""
    bench = bench_of("abcd")
    for call_id in range(1, 2 * limits.LINK_DOUBTS_MAX):
        bench.begin("abcd", call_id)
        bench.tick(limits.UNEXPLAINED_STALL_MIN_NS - 1)
        bench.finish("a", call_id, FIRST_ATTEMPT + call_id - 1, ok=False, digest=0, reason="cannot start")
    assert order_of(bench, 50) == pids("abcd")


def test_groups_are_doubted_on_their_own() -> None:
    bench = bench_of("abcd", others="wxyz")
    for call_id in (1, 2):
        bench.begin("abcdwxyz", call_id)
        bench.tick(limits.STALL_TIMEOUT_NS)
        for attempt_id in list(bench.plans)[-2:]:
            is_first = bench.plans[attempt_id].order == pids("abcd")
            bench.finish("abcd" if is_first else "wxyz", call_id, attempt_id, ok=not is_first, digest=0)
    bench.begin("abcdwxyz", 3)
    orders = [how.order for how in bench.plans.values()][-2:]
    assert pids("wxyz") in orders and pids("abcd") not in orders


def test_few_failures_are_remembered() -> None:
    """B1. A report on a forgotten failure changes nothing."""
    bench = bench_of("abcd")
    count = limits.ABORTED_ATTEMPTS_KEPT_MAX + 1
    bench.begin("abcd", 1, *map(spec, range(count)))
    bench.tick(limits.STALL_TIMEOUT_NS)
    for number in range(count):
        bench.finish("a", 1 + number, FIRST_ATTEMPT + number, ok=False, digest=0)
    assert len(bench.machine.collectives._aborted) == limits.ABORTED_ATTEMPTS_KEPT_MAX
    bench.finish("b", 1, FIRST_ATTEMPT, ok=False, digest=0, fault=pid("c"))
    assert order_of(bench, 50) == pids("abcd")
    bench.finish("b", count, FIRST_ATTEMPT + count - 1, ok=False, digest=0, fault=pid("c"))
    assert order_of(bench, 51) == pids("abdc")


def test_only_a_neighbour_can_be_at_fault() -> None:
    """The master ignores a peer that accuses itself, or a peer that is not its neighbour in the ring."""
    bench = bench_of("abcd")
    for call_id, fault in enumerate((pid("c"), pid("a"), pid("z")), 1):
        bench.begin("abcd", call_id)
        bench.finish("a", call_id, FIRST_ATTEMPT + call_id - 1, ok=False, digest=0, fault=fault)
    assert order_of(bench, 9) == pids("abcd")


def test_faults_of_who_is_gone_are_forgotten() -> None:
    bench = bench_of("abcd")
    fail_by(bench, "a", "b", 1)
    bench.leave("b")
    assert order_of(bench, 2) == pids("acd")
    assert not bench.machine.paths._faults


def test_a_loss_may_end_the_wait_for_links() -> None:
    """A lost peer needs no links: the others go on without it."""
    bench = bench_of("abc")
    bench.say("b", Linked(()))
    bench.begin("abc", 1)
    assert bench.plans == {}
    bench.leave("b")
    assert bench.plans[FIRST_ATTEMPT].order == pids("ac")


def test_a_ring_needs_only_its_own_links() -> None:
    bench = bench_of("abcd")
    bench.say("a", Linked(pids("bd")))  # Its link to c is down; c is not its neighbour in the ring.
    bench.begin("abcd", 1)
    assert bench.plans[FIRST_ATTEMPT].order == pids("abcd")


# --- The end of an attempt ------------------------------------------------------------------------------------------


def running(names: str) -> MasterBench:
    bench = bench_of(names)
    bench.begin(names, 1)
    return bench


def test_one_failure_aborts_for_all() -> None:
    """S1."""
    bench = running("abc")
    bench.finish("b", 1)
    decision = aborted(1, "link broke", "c", peers=3)
    assert bench.finish("a", 1, ok=False, digest=0, fault=pid("c"), reason="link broke") == [
        ("a1", decision),
        ("b1", decision),
        ("c1", decision),
    ]
    assert bench.finish("c", 1) == [("c1", decision)]
    assert bench.names() == "abc"


def test_a_failure_without_facts() -> None:
    bench = running("ab")
    bench.finish("a", 1, ok=False)
    assert bench.verdict("b", 1) == aborted(1, "a peer failed")


def test_digests_that_differ_abort() -> None:
    """S1: the master compares digests before it commits."""
    bench = running("ab")
    bench.finish("a", 1, digest=1)
    bench.finish("b", 1, digest=2)
    reason = "results differ: a: 0000000000000001, b: 0000000000000002"
    expected = Decision(1, Result.INTERNAL_ERROR, 2, reason, attempt_id=FIRST_ATTEMPT)
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == expected
    assert any(log.level is Level.ERROR and reason in log.text for log in bench.logged)


@pytest.mark.parametrize("how", ["leave", "lose"])
def test_a_loss_before_all_survivors_finished_aborts(how: str) -> None:
    """S1: b may have finished, and a and c committed with it. So the master asks b, whose link to c is lost."""
    bench = running("abc")
    bench.finish("ac", 1)
    getattr(bench, how)("c")
    assert bench.verdict("a", 1) is None
    decision = aborted(1, "the link broke", "c", peers=3)
    bench.finish("b", 1, ok=False, reason="the link broke")
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == decision
    assert bench.finish("b", 1) == [("b1", decision)]


@pytest.mark.parametrize("kind", [CollectiveKind.BROADCAST, CollectiveKind.ALL_REDUCE])
def test_a_loss_is_the_end_where_peers_commit_nothing(kind: CollectiveKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: in a broadcast, and in a group that is too large for peers to tell each other their digests."""
    monkeypatch.setattr(limits, "COMMIT_PEERS_MAX", 2)
    bench = bench_of("abc")
    for name in "abc":
        bench.begin(name, 1, spec(kind=kind, is_root=kind is CollectiveKind.BROADCAST and name == "a"))
    bench.lose("c")
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == aborted(1, "lost c", "c", peers=3)


def test_a_loss_after_all_survivors_finished_does_no_harm() -> None:
    """S1: all survivors hold the same result."""
    bench = running("abc")
    bench.finish("ab", 1)
    bench.disconnect("c")
    assert bench.verdict("a", 1) is None
    bench.tick(limits.DISCONNECT_GRACE_NS)
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == committed(1, value=3)


@pytest.mark.parametrize("go_away", [MasterBench.disconnect, MasterBench.leave])
def test_the_digest_of_who_is_away_counts(go_away: Callable[[MasterBench, str], object]) -> None:
    """S1: its digest may be the right one. Nobody can tell, so nobody gets a result. (Hostile, seed 212.)"""
    bench = running("abc")
    bench.finish("c", 1, digest=99)
    bench.finish("a", 1)
    go_away(bench, "c")
    bench.finish("b", 1)
    verdict = bench.decision("a", 1)
    assert (verdict.committed, verdict.result) == (False, Result.INTERNAL_ERROR)


def test_survivors_that_differ_do_not_commit() -> None:
    bench = running("abc")
    bench.finish("a", 1, digest=1)
    bench.finish("b", 1, digest=2)
    bench.leave("c")
    verdict = bench.decision("a", 1)
    assert (verdict.committed, verdict.result) == (False, Result.INTERNAL_ERROR)


def test_all_participants_die() -> None:
    bench = running("ab")
    bench.disconnect("ab")
    bench.hello("n")  # Until some peer comes, the master itself may be cut off.
    bench.tick(limits.RECOVERY_WAIT_NS)
    assert bench.names() == "n"
    assert bench.snapshot()["attempts"] == {}


def test_a_loss_aborts_only_attempts_that_it_is_part_of() -> None:
    bench = running("ab")
    bench.register("c")
    bench.link("abc")
    bench.machine.registry.admit([bench.peer("c")])  # While a collective runs, as a hostile vote could achieve.
    bench.machine._announced_epoch = bench.machine.registry.epoch
    bench.leave("c")
    bench.finish("ab", 1)
    assert bench.verdict("a", 1) == committed(1)


def test_a_retry_among_the_survivors() -> None:
    """L2."""
    bench = running("abc")
    bench.lose("b")
    bench.finish("a", 1, ok=False, reason="lost b")
    assert bench.verdict("a", 1) == aborted(1, "lost b", "b", peers=3)
    bench.begin("ac", 2)
    assert bench.plans[FIRST_ATTEMPT + 1].order == pids("ac")


def test_reports_on_unknown_attempts_are_ignored() -> None:
    """S4: call and attempt identify what a report is about."""
    bench = running("ab")
    bench.begin("a", 2, spec(2))
    before = bench.snapshot()
    assert bench.finish("a", 1, FIRST_ATTEMPT + 7) == []
    assert bench.finish("a", 2, FIRST_ATTEMPT) == []
    assert bench.finish("a", 77, 0) == []
    assert bench.snapshot() == before


def test_a_report_after_the_answer_was_forgotten() -> None:
    bench = running("ab")
    bench.finish("ab", 1)
    bench.begin("a", 2, oldest=2)
    assert bench.finish("a", 1) == []


def test_a_vote_again_gets_what_has_become_of_it() -> None:
    bench = bench_of("ab")
    bench.begin("a", 1)
    assert bench.begin("a", 1) == []
    bench.begin("b", 1)
    assert bench.begin("a", 1) == [("a1", plan_of(1))]
    bench.finish("ab", 1)
    assert bench.begin("a", 1) == [("a1", committed(1))]


# --- Withdrawing ----------------------------------------------------------------------------------------------------


def test_withdraw_while_voting() -> None:
    bench = bench_of("abc")
    bench.begin("ab", 1)
    assert bench.withdraw("a", 1) == [("a1", Decision(1, LOST, reason="withdrawn"))]
    assert bench.begin("c", 1) == []
    bench.begin("a", 2)
    assert bench.plans[FIRST_ATTEMPT].order == pids("abc")


def test_withdraw_the_only_vote() -> None:
    bench = bench_of("ab")
    bench.begin("a", 1)
    bench.withdraw("a", 1)
    assert bench.snapshot()["pending"] == {}


def test_withdraw_while_links_are_waited_for() -> None:
    bench = bench_of("ab")
    bench.say("a", Linked(()))
    bench.begin("ab", 1)
    bench.withdraw("b", 1)
    assert bench.machine.operations.deadline_ns() is None
    bench.say("a", Linked(pids("b")))
    assert bench.plans == {}


def test_withdrawals_that_wait_are_heeded() -> None:
    """L1: a call that timed out while the master stood still must not meet the next call of another peer."""
    bench = bench_of("ab")
    with bench.standing_still():
        for name in "ab":
            bench.begin(name, 1)
            bench.withdraw(name, 1)
            bench.begin(name, 2, spec(count=77))
    withdrawn = Decision(1, LOST, reason="withdrawn")
    assert bench.verdicts == {("a", 1): withdrawn, ("b", 1): withdrawn}
    assert bench.plans[FIRST_ATTEMPT].order == pids("ab")


@pytest.mark.parametrize("reported", [False, True])
def test_withdraw_while_running_aborts_for_all(reported: bool) -> None:
    """S1."""
    bench = running("ab")
    if reported:
        bench.finish("a", 1)
    decision = aborted(1, "a withdrew from it", "a")
    assert bench.withdraw("a", 1) == [("a1", decision), ("b1", decision)]


def test_withdraw_after_the_decision_gets_the_decision() -> None:
    """S1: the withdrawal comes too late."""
    bench = running("ab")
    bench.finish("ab", 1)
    assert bench.withdraw("a", 1) == [("a1", committed(1))]


# --- Any order of anything ------------------------------------------------------------------------------------------

ACTIONS = ["all begin"] * 3 + [
    "begin",
    "again",
    "ok",
    "other",
    "fail",
    "withdraw",
    "lose",
    "leave",
    "back",
    "unlink",
    "link",
    "tick",
    "sync",
]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(ACTIONS), st.integers(0, 1)), max_size=40))
def test_any_order_of_anything(steps: list[tuple[str, str, int]]) -> None:
    """S1, S3: each attempt has one outcome, each call one answer, and in the end nothing stays open."""
    bench = bench_of("abc")
    calls = dict.fromkeys("abc", 0)

    def alive(name: str) -> bool:
        return pid(name) in bench.machine.registry.peers

    for name, action, tag in steps:
        if not alive(name):
            continue
        attempts = bench.machine.operations.running.values()
        mine = [(a.calls[bench.peer(name)], a.attempt_id) for a in attempts if bench.peer(name) in a.calls]
        if bench.peer(name).connection is None and action not in ("back", "tick"):
            continue
        if action in ("begin", "all begin"):
            for voter in name if action == "begin" else "abc":
                if alive(voter) and bench.peer(voter).connection is not None:
                    calls[voter] += 1
                    bench.begin(voter, calls[voter], spec(tag))
        elif action == "again" and bench.peer(name).open_calls:
            call_id, key = next(iter(bench.peer(name).open_calls.items()))
            if key.function == COLLECTIVE:
                bench.begin(name, call_id, spec(key.tag))
        elif action in ("ok", "other", "fail") and mine:
            bench.finish(name, *mine[tag % len(mine)], ok=action != "fail", digest=7 if action == "ok" else 8)
        elif action == "withdraw":
            bench.withdraw(name, calls[name])
        elif action == "lose":
            bench.disconnect(name)
        elif action == "leave":
            bench.leave(name)
        elif action == "back":
            bench.hello(name, welcomed=True)
        elif action == "unlink":
            bench.say(name, Linked(()))
        elif action == "link":
            bench.say(name, Linked(pids("abc")))
        elif action == "tick":
            bench.tick(limits.DISCONNECT_GRACE_NS // 2)
        elif action == "sync":
            calls[name] += 1
            bench.say(name, offer(calls[name], 0, entry("w", name)))
    outcomes: dict[int, set[bool]] = {}
    for verdict in bench.verdicts.values():
        if isinstance(verdict, Decision):
            outcomes.setdefault(verdict.attempt_id, set()).add(verdict.committed)
    assert all(len(outcome) == 1 for outcome in outcomes.values())
    for name in "abc":
        if alive(name) and bench.peer(name).connection is None:
            bench.hello(name, welcomed=True)
    for name in "abc":
        if alive(name):
            for call_id in list(bench.peer(name).open_calls):
                bench.withdraw(name, call_id)
    assert not any(peer.open_calls for peer in bench.machine.registry.peers.values())
    assert bench.snapshot()["attempts"] == bench.snapshot()["pending"] == bench.snapshot()["transfers"] == {}
