"""Calls that wait for all others: topology votes, and calls that would wait for each other without end."""

from __future__ import annotations

import itertools

import pytest

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.messages import Decision, Kick, Linked, Plan, Ready, TopologyKind
from zpccl.types import Algorithm

from .harness import FIRST_ATTEMPT, OPTIMIZE, PENDING, RUN_ID, UPDATE, MasterBench, bench_of, offer, pids, spec

OK = Result.SUCCESS


@pytest.fixture
def bench() -> MasterBench:
    return bench_of("ab")


def ask(bench: MasterBench, name: str, function: str, call_id: int = 1) -> None:
    """Peer `name` makes a call."""
    if function == "all_reduce":
        bench.begin(name, call_id)
    elif function == "sync":
        bench.say(name, offer(call_id, 0))
    else:
        bench.vote(name, TopologyKind[function.upper()], call_id)


@pytest.mark.parametrize("kind", [UPDATE, OPTIMIZE, PENDING])
def test_a_round_takes_all_members_of_all_groups(bench: MasterBench, kind: TopologyKind) -> None:
    bench.members("x", group=1)
    assert bench.vote("a", kind, 1) == []
    assert bench.vote("b", kind, 2) == []
    value = 2 if kind is OPTIMIZE else 0  # Nothing is known of the paths of b and x to those before them.
    assert bench.vote("x", kind, 3) == [(f"{name}1", Decision(call, OK, value)) for call, name in enumerate("abx", 1)]


@pytest.mark.parametrize("group", [0, 1])
def test_are_peers_pending_gives_all_the_same_answer(bench: MasterBench, group: int) -> None:
    bench.vote("a", PENDING, 1)
    bench.register("j", group=group)
    bench.vote("b", PENDING, 1)
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == Decision(1, OK, value=1)
    bench.leave("j")
    bench.vote("ab", PENDING, 2)
    assert bench.verdict("a", 2) == bench.verdict("b", 2) == Decision(2, OK, value=0)
    assert bench.names() == "ab"


@pytest.mark.parametrize("again", [False, True])
def test_who_fetches_state_ahead_is_not_pending_until_it_is_ready(bench: MasterBench, again: bool) -> None:
    """S6: until then nobody hears of it, waits for its links or admits it. It may report on another connection."""
    bench.hello("j", is_ready=False)
    bench.link("abj")
    for call_id, kind in ((1, PENDING), (2, UPDATE)):
        bench.vote("ab", kind, call_id)
    for name in "ab":
        assert (bench.verdict(name, 1), bench.verdict(name, 2)) == (Decision(1, OK, value=0), Decision(2, OK, value=0))
    assert bench.names() == "ab"
    bench.vote("a", UPDATE, 3)
    if again:
        bench.disconnect("j")
        bench.hello("j", welcomed=True, run_id=RUN_ID)
        bench.link("abj")
    else:
        bench.say("j", Ready())
    bench.vote("b", UPDATE, 3)
    assert bench.names() == "abj"
    assert bench.verdict("a", 3) == Decision(3, OK, value=1)


def test_a_peer_is_ready_once_and_for_all(bench: MasterBench) -> None:
    """A Hello that was already on its way when it became ready changes nothing."""
    bench.hello("j", is_ready=False)
    bench.say("j", Ready())
    bench.hello_again("j", welcomed=True, is_ready=False, run_id=RUN_ID, connection=1)
    bench.link("abj")
    bench.vote("ab", UPDATE, 1)
    assert bench.names() == "abj"


def test_links_of_who_is_not_ready_are_not_waited_for(bench: MasterBench) -> None:
    """Other joiners that are ready are admitted at once."""
    bench.hello("j", is_ready=False)
    bench.register("k")
    bench.link("abk")
    bench.vote("ab", UPDATE, 1)
    assert bench.names() == "abk"


def test_an_empty_run_admits_who_is_not_ready() -> None:
    """L1: there is nobody to fetch from, and nobody else would ever admit it."""
    bench = MasterBench()
    bench.hello("j", is_ready=False)
    assert bench.names() == "j"


@pytest.mark.parametrize("how", ["leave", "lose"])
def test_a_lost_member_is_not_waited_for(bench: MasterBench, how: str) -> None:
    """L1."""
    bench.vote("a", PENDING, 1)
    getattr(bench, how)("b")
    assert bench.verdict("a", 1) == Decision(1, OK)


def test_the_vote_of_a_lost_member_does_not_count(bench: MasterBench) -> None:
    bench.members("c")
    bench.vote("ca", UPDATE, 1)
    bench.leave("c")
    assert bench.verdict("a", 1) is None
    bench.vote("b", UPDATE, 1)
    assert bench.verdict("a", 1) == Decision(1, OK)


def test_a_joiner_that_is_admitted_has_no_vote_in_that_round(bench: MasterBench) -> None:
    bench.register("j")
    bench.link("abj")
    bench.vote("ab", UPDATE, 1)
    assert bench.names() == "abj"
    bench.vote("ab", UPDATE, 2)
    assert bench.verdict("a", 2) is None
    bench.vote("j", UPDATE, 1)
    assert bench.verdict("a", 2) == Decision(2, OK)


def test_withdraw_from_a_round(bench: MasterBench) -> None:
    bench.vote("a", UPDATE, 1)
    assert bench.withdraw("a", 1) == [("a1", Decision(1, Result.RANK_CONNECTION_LOST, reason="withdrawn"))]
    bench.vote("b", UPDATE, 1)
    assert bench.verdict("b", 1) is None
    bench.vote("a", UPDATE, 2)
    assert bench.verdict("b", 1) == Decision(1, OK)


def test_withdraw_while_joiners_are_waited_for(bench: MasterBench) -> None:
    bench.register("j")
    bench.vote("ab", UPDATE, 1)
    assert bench.machine.operations.deadline_ns() == bench.now_ns + limits.ADMISSION_WAIT_NS
    bench.withdraw("b", 1)
    assert bench.machine.operations.deadline_ns() is None
    bench.tick(limits.ADMISSION_WAIT_NS // 2)
    assert bench.verdict("a", 1) is None
    bench.vote("b", UPDATE, 2)
    assert bench.machine.operations.deadline_ns() == bench.now_ns + limits.ADMISSION_WAIT_NS


def test_only_one_call_at_a_time(bench: MasterBench) -> None:
    bench.vote("a", PENDING, 1)
    assert bench.vote("a", UPDATE, 2) == [
        ("a1", Decision(2, Result.INVALID_USAGE, reason="this peer is already waiting in are_peers_pending"))
    ]
    bench.vote("b", PENDING, 1)
    assert bench.verdict("a", 1) == Decision(1, OK)


# --- Joiners that lack links ----------------------------------------------------------------------------------------


def update(bench: MasterBench, call_id: int = 1) -> None:
    """All members vote."""
    bench.vote(bench.names(), UPDATE, call_id)


def test_a_joiner_that_lacks_a_link_is_admitted_where_a_ring_takes_it_in() -> None:
    """L2: it is admitted after the time in which links are set up."""
    bench = bench_of("abc")
    bench.register("j")
    bench.say("j", Linked(pids("ab")))
    bench.say("a", Linked(pids("bcj")))
    bench.say("b", Linked(pids("acj")))
    update(bench)
    assert bench.verdict("a", 1) is None
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert bench.verdict("a", 1) == Decision(1, OK, value=1)
    assert bench.names() == "abcj"
    bench.begin("abcj", 2)
    assert bench.plans[FIRST_ATTEMPT].order == pids("acbj")


@pytest.mark.parametrize("link", "abc")
def test_a_joiner_that_reaches_one_member_is_admitted(link: str) -> None:
    """L2: no ring can include it, and all-reduces go on with it."""
    bench = bench_of("abc")
    bench.register("j")
    bench.say("j", Linked(pids(link)))
    bench.say(link, Linked(pids({*"abcj"} - {link})))
    update(bench)
    assert bench.verdict("a", 1) is None
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert bench.names() == "abcj"
    bench.begin("abcj", 2)
    assert bench.plans[FIRST_ATTEMPT].algorithm == Algorithm.TREES


def test_a_joiner_that_reaches_nobody_is_not_admitted() -> None:
    """S6."""
    bench = bench_of("abc")
    bench.register("j")
    bench.say("j", Linked(pids("abc")))  # j only claims these links.
    update(bench)
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert bench.verdict("a", 1) == Decision(1, OK)
    assert (bench.names(), bench.pending()) == ("abc", "j")
    kick = bench.tick(limits.LINK_WAIT_TIMEOUT_NS)[0][1]
    assert isinstance(kick, Kick)
    assert kick.result == Result.RANK_CONNECTION_FAILED


def test_who_has_lacked_links_for_long_is_not_pending_until_it_has_them() -> None:
    """S6: a program may make no step while a joiner is pending, and one that gets no links may come again and again."""
    bench = bench_of("ab")
    bench.register("j")
    bench.vote("ab", PENDING, 1)
    bench.tick(limits.ADMISSION_WAIT_NS)
    bench.vote("ab", PENDING, 2)
    update(bench, 3)
    bench.link("bj")
    bench.vote("ab", PENDING, 4)
    values = [getattr(bench.verdict("a", call_id), "value", None) for call_id in (1, 2, 3, 4)]
    assert (values, bench.names()) == ([1, 0, 0, 1], "ab")
    update(bench, 5)
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert bench.names() == "abj"


def test_a_host_is_not_pending_while_one_of_its_peers_lacks_links() -> None:
    """S6: the host is admitted as a whole, so the links of its other peers do not help."""
    bench = bench_of("ab")
    for name in "jk":
        bench.hello(name, host="h", host_size=2)
    bench.link("abj")
    bench.tick(limits.ADMISSION_WAIT_NS)
    bench.vote("ab", PENDING, 1)
    bench.link("abjk")
    bench.vote("ab", PENDING, 2)
    values = [getattr(bench.verdict("a", call_id), "value", None) for call_id in (1, 2)]
    assert values == [0, 1]


def test_a_joiner_that_reaches_one_member_may_wait() -> None:
    """It is not removed for a link that it can do without. When it cannot do without it, its time begins."""
    bench = bench_of("abc")
    bench.register("j")
    for name, linked in (("j", "ab"), ("a", "bcj")):
        bench.say(name, Linked(pids(linked)))
    assert bench.machine.deadline_ns() is None
    bench.say("a", Linked(pids("bc")))
    assert bench.machine.deadline_ns() == bench.now_ns + limits.LINK_WAIT_TIMEOUT_NS
    bench.tick_at_deadline()
    assert (bench.names(), bench.pending()) == ("abc", "")


def test_joiners_that_lack_links_are_judged_together() -> None:
    """A joiner may reach the members through another one that is admitted with it, if that one registered first."""
    bench = bench_of("abc")
    bench.register("ijk")
    for name, linked in (("i", "jk"), ("j", "ai"), ("k", "i"), ("a", "bcj")):
        bench.say(name, Linked(pids(linked)))
    update(bench)
    bench.tick(limits.ADMISSION_WAIT_NS)
    assert (bench.names(), bench.pending()) == ("abcj", "ik")


# --- Calls that would wait for each other ---------------------------------------------------------------------------

FUNCTIONS = ["update", "optimize", "pending", "sync", "all_reduce"]
MAY_RUN_BESIDE = {frozenset({"pending", "all_reduce"})}


@pytest.mark.parametrize("first, second", list(itertools.permutations(FUNCTIONS, 2)))
def test_conflicting_calls(bench: MasterBench, first: str, second: str) -> None:
    """L1: members that wait in different calls would wait for ever."""
    ask(bench, "a", first)
    ask(bench, "b", second)
    if frozenset({first, second}) in MAY_RUN_BESIDE:
        assert bench.verdict("a", 1) is bench.verdict("b", 1) is None
        ask(bench, "a", second, 2)
        ask(bench, "b", first, 2)
        assert len(bench.plans) == 1
        assert bench.verdict("a", 2 if second == "pending" else 1) is not None
        return
    for name in "ab":
        answer = bench.decision(name, 1)
        assert answer.result == Result.INVALID_USAGE
        for voter, its_function in (("a", first), ("b", second)):
            shown = {"update": "update_topology", "optimize": "optimize_topology", "pending": "are_peers_pending"}
            assert shown.get(its_function, its_function) in answer.reason
            assert f"by {voter}" in answer.reason
    assert not bench.snapshot()["pending"]
    for name in "ab":  # And both go on afterwards.
        ask(bench, name, "pending", 2)
    assert bench.verdict("a", 2) == Decision(2, OK)


@pytest.mark.parametrize("first, second", list(itertools.permutations(["update", "optimize", "pending"], 2)))
def test_topology_calls_of_other_groups_conflict(bench: MasterBench, first: str, second: str) -> None:
    """L1: such a round needs the members of all groups, so neither call would ever be complete."""
    bench.members("x", group=1)
    ask(bench, "a", first)
    ask(bench, "x", second)
    for name in "ax":
        assert bench.decision(name, 1).result == Result.INVALID_USAGE
    assert not bench.snapshot()["pending"]


def test_three_different_calls() -> None:
    bench = bench_of("abc")
    bench.begin("a", 1)
    bench.vote("b", PENDING, 1)
    assert bench.vote("c", UPDATE, 1) != []
    assert isinstance(bench.verdict("b", 1), Decision)
    assert isinstance(bench.verdict("c", 1), Decision)
    assert bench.verdict("a", 1) is None  # The others can still vote for it.
    bench.begin("b", 2)
    assert isinstance(bench.begin("c", 2)[0][1], Plan)


def test_a_vote_after_all_have_voted_for_the_collective(bench: MasterBench) -> None:
    """A peer that has voted on a collective may wait in another call: the collective no longer waits for it."""
    bench.begin("a", 1)
    bench.vote("a", UPDATE, 2)
    assert bench.verdict("a", 2) is None
    assert isinstance(bench.begin("b", 1)[0][1], Plan)


def test_a_collective_that_waits_for_links_is_no_conflict(bench: MasterBench) -> None:
    bench.say("a", Linked(()))
    bench.begin("ab", 1)
    bench.vote("a", UPDATE, 2)
    assert bench.verdict("a", 2) is None
    bench.say("a", Linked(pids("b")))
    assert FIRST_ATTEMPT in bench.plans


def test_collectives_of_other_groups_are_no_conflict(bench: MasterBench) -> None:
    bench.members("xy", group=1)
    bench.begin("x", 1)
    bench.vote("a", UPDATE, 1)
    assert bench.verdict("a", 1) is bench.verdict("x", 1) is None
    bench.vote("y", UPDATE, 1)  # Now x waits for y, and y for x.
    for name in "axy":
        assert bench.decision(name, 1).result == Result.INVALID_USAGE


def test_syncs_of_other_groups_are_no_conflict(bench: MasterBench) -> None:
    """A group may sync while another waits for an update of all."""
    bench.members("xy", group=1)
    bench.vote("a", UPDATE, 1)
    bench.say("xy", offer(1, 0))
    assert bench.verdict("x", 1) is not None
    assert bench.verdict("a", 1) is None


def test_a_conflict_in_one_group_leaves_the_sync_of_another_alone(bench: MasterBench) -> None:
    bench.members("xy", group=1)
    bench.say("x", offer(1, 0))
    bench.vote("a", UPDATE, 1)
    bench.say("b", offer(1, 0))
    for name in "ab":
        answer = bench.decision(name, 1)
        assert answer.result == Result.INVALID_USAGE
        assert "x" not in answer.reason.split("by ", 1)[1]
    assert bench.verdict("x", 1) is None
    bench.say("y", offer(1, 0))
    assert bench.verdict("x", 1) is not None


def test_a_loss_may_end_a_conflict(bench: MasterBench) -> None:
    bench.members("x", group=1)
    bench.say("a", offer(1, 0))
    bench.vote("x", UPDATE, 1)
    bench.leave("a")
    bench.vote("b", UPDATE, 1)
    assert bench.verdict("b", 1) == Decision(1, OK)


def test_a_conflict_at_several_tags(bench: MasterBench) -> None:
    bench.begin("a", 1, spec(1), spec(2))
    bench.vote("b", UPDATE, 1)
    assert bench.decision("b", 1).result == bench.decision("a", 1).result == Result.INVALID_USAGE
    # Only a still waits in the second tag; b can vote on it.
    bench.begin("b", 2, spec(2))
    assert len(bench.plans) == 1


def test_a_conflict_is_one_decision_for_all_whose_calls_it_ends(bench: MasterBench) -> None:
    """S1: a peer that does not hear it from this master hears it from the next, whatever call it waits in."""
    bench.begin("a", 5)
    bench.vote("b", UPDATE, 6)
    answers = [bench.peer("a").answers[5], bench.peer("b").answers[6]]
    assert answers[0].attempt_id > 0
    assert {(answer.attempt_id, answer.order, answer.calls) for answer in answers} == {
        (answers[0].attempt_id, pids("ba"), (6, 5))
    }
    bench.vote("a", UPDATE, 7)
    bench.say("b", offer(7, 0))
    assert bench.peer("a").answers[7].attempt_id > answers[0].attempt_id
    assert bench.peer("b").answers[7].order == pids("ab")
