"""Stragglers: the log names them, errors carry them as data, and a timeout removes them."""

from __future__ import annotations

import re

import pytest

from zpccl import limits
from zpccl.errors import Result
from zpccl.limits import SECOND
from zpccl.protocol.effects import Level
from zpccl.protocol.master import MasterOptions
from zpccl.protocol.messages import Acknowledgement, Decision, Kick, Linked, Plan
from zpccl.protocol.operation import SYNC, Key

from .harness import OPTIMIZE, PENDING, UPDATE, MasterBench, bench_of, offer, pids, spec
from .standby import Standby
from .takeover import TakeOver

WARNING = limits.STRAGGLER_WARNING_NS
TIMEOUT = 25 * limits.SECOND


def lines(bench: MasterBench, level: Level = Level.WARNING) -> list[str]:
    """The lines logged since the last call."""
    found = [log.text for log in bench.logged if log.level is level]
    bench.logged.clear()
    return found


def test_who_does_not_vote_is_named() -> None:
    bench = bench_of("abcd")
    bench.begin("a", 1, spec(3))
    bench.tick(limits.SECOND)
    bench.begin("c", 1, spec(3))
    bench.tick(WARNING - limits.SECOND - 1)
    assert lines(bench) == []
    assert bench.machine.stragglers() == ()
    assert bench.machine.deadline_ns() == bench.now_ns + 1
    bench.tick(1)
    assert lines(bench) == ["waiting for b, d: a, c called all_reduce at tag 3 of group 0 10 s ago"]
    operation = "all_reduce at tag 3 of group 0"
    assert bench.machine.stragglers() == (("b", operation, WARNING), ("d", operation, WARNING))
    assert bench.machine.stragglers(bench.now_ns + 5) == (("b", operation, WARNING + 5), ("d", operation, WARNING + 5))


def test_it_is_said_again_ever_more_rarely() -> None:
    bench = bench_of("ab")
    bench.begin("a", 1)
    waited = []
    for _ in range(4):
        bench.tick_at_deadline()
        (line,) = lines(bench)
        waited.append(int(line.split()[-3]))
    assert waited == [10, 20, 40, 80]


def test_it_is_said_when_they_have_voted_after_all() -> None:
    bench = bench_of("abc")
    bench.begin("a", 1)
    bench.tick(WARNING)
    lines(bench)
    bench.begin("c", 1)
    assert lines(bench, Level.INFO) == ["no longer waiting for c in all_reduce at tag 0 of group 0"]
    bench.begin("b", 1)
    assert lines(bench, Level.INFO) == ["no longer waiting for b in all_reduce at tag 0 of group 0"]
    assert bench.machine.stragglers() == ()
    assert bench.machine.deadline_ns() is None


def test_nothing_is_said_of_who_is_gone() -> None:
    bench = bench_of("abc")
    bench.begin("a", 1)
    bench.tick(WARNING)
    lines(bench)
    bench.leave("b")
    assert [text for text in lines(bench, Level.INFO) if "longer" in text] == []
    bench.begin("c", 1)
    assert lines(bench, Level.INFO) == ["no longer waiting for c in all_reduce at tag 0 of group 0"]


@pytest.mark.parametrize("kind, name", [(UPDATE, "update_topology"), (OPTIMIZE, "optimize_topology")])
def test_topology_calls_wait_for_all_groups(kind: int, name: str) -> None:
    bench = bench_of("a", others="x")
    bench.vote("a", kind, 1)  # type: ignore[arg-type]
    bench.tick(WARNING)
    assert lines(bench) == [f"waiting for x: a called {name} 10 s ago"]


def test_syncs_wait_for_their_group() -> None:
    bench = bench_of("ab", others="xy")
    bench.say("x", offer(1, 0))
    bench.tick(1)
    bench.say("a", offer(1, 0))
    bench.tick(WARNING)
    assert lines(bench) == [
        "waiting for y: x called sync_shared_state of group 1 10 s ago",
        "waiting for b: a called sync_shared_state of group 0 10 s ago",
    ]


def test_peers_that_wait_for_each_other() -> None:
    """a waits in are_peers_pending for b and c. These wait for a in a collective that may run beside it."""
    bench = bench_of("abc", straggler_timeout_ns=TIMEOUT)
    bench.vote("a", PENDING, 1)
    bench.begin("bc", 1)
    bench.tick(WARNING)
    assert lines(bench) == [
        "waiting for b, c, busy in other calls: a called are_peers_pending 10 s ago",
        "waiting for a: b, c called all_reduce at tag 0 of group 0 10 s ago",
    ]
    assert [name for name, _, _ in bench.machine.stragglers()] == ["a"]
    bench.tick(TIMEOUT - WARNING)
    assert bench.names() == "bc"


def test_who_is_held_up_by_a_straggler_is_none() -> None:
    """Found by the simulator: all of another group waited for b, too. b waited for c, which did not respond."""
    bench = bench_of("bc", others="x", straggler_timeout_ns=TIMEOUT)
    bench.vote("x", PENDING, 1)
    bench.tick(limits.SECOND)
    bench.begin("b", 1)
    assert [name for name, _, _ in bench.machine.stragglers(bench.now_ns + WARNING)] == ["c", "c"]
    bench.tick(TIMEOUT)
    assert bench.names() == "bx"


def test_who_is_in_a_long_collective_is_no_straggler() -> None:
    """The other group waits. Nobody is removed for it, and the master is not kept busy."""
    bench = bench_of("ab", others="x", straggler_timeout_ns=TIMEOUT)
    bench.begin("ab", 1)
    bench.vote("x", PENDING, 1)
    while bench.now_ns < 10 * TIMEOUT:
        bench.tick_at_deadline()
    assert bench.names() == "abx"
    bench.finish("ab", 1)
    bench.vote("a", PENDING, 2)
    bench.tick(TIMEOUT - 1)
    assert bench.names() == "abx"
    bench.tick(1)
    assert bench.names() == "ax"


def test_who_waits_for_links_is_no_straggler() -> None:
    bench = bench_of("ab")
    bench.say("a", Linked(()))
    bench.begin("ab", 1)
    bench.tick(WARNING - 1)
    assert bench.machine.stragglers() == ()
    assert lines(bench) == []


def test_who_takes_its_vote_back_is_waited_for_again() -> None:
    """Also if all had voted and only links were missing."""
    bench = bench_of("ab")
    bench.say("a", Linked(()))
    bench.begin("ab", 1)
    bench.tick(WARNING - 1)
    bench.withdraw("b", 1)
    bench.tick_at_deadline()
    assert lines(bench) == ["waiting for b, busy in other calls: a called all_reduce at tag 0 of group 0 10 s ago"]
    bench.tick_at_deadline()
    assert lines(bench) == ["waiting for b: a called all_reduce at tag 0 of group 0 20 s ago"]


def test_a_running_attempt_has_no_stragglers() -> None:
    bench = bench_of("ab")
    bench.begin("ab", 1)
    bench.tick(10 * WARNING)
    assert lines(bench) == []
    assert bench.machine.deadline_ns() is None


def test_a_short_operation_beside_a_long_one() -> None:
    """Each operation has its own time."""
    bench = bench_of("ab")
    bench.begin("a", 1, spec(1))
    bench.tick(WARNING // 2)
    bench.begin("ab", 2, spec(2))
    bench.finish("ab", 2)
    bench.tick(WARNING // 4)
    bench.begin("a", 3, spec(3))
    bench.tick_at_deadline()
    assert [re.findall(r"tag (\d)", text) for text in lines(bench)] == [["1"]]
    bench.tick_at_deadline()
    assert [re.findall(r"tag (\d)", text) for text in lines(bench)] == [["3"]]


def test_nobody_is_removed_without_a_timeout() -> None:
    bench = bench_of("ab")
    bench.begin("a", 1)
    for _ in range(10):
        bench.tick_at_deadline()
    assert bench.names() == "ab"


def test_a_straggler_is_removed_after_the_timeout() -> None:
    """L1: the others go on. The straggler gets an error that says why, and may join again."""
    bench = bench_of("abc", straggler_timeout_ns=TIMEOUT)
    bench.begin("ac", 1)
    bench.tick(TIMEOUT - 1)
    assert bench.names() == "abc"
    assert bench.machine.deadline_ns() == bench.now_ns + 1
    (connection, kick), *_ = bench.tick(1)
    reason = "a, c called all_reduce at tag 0 of group 0 25 s ago, and this peer did not vote"
    assert (connection, kick) == ("b1", Kick(Result.RANK_CONNECTION_LOST, reason))
    assert bench.names() == "ac"
    assert any(isinstance(message, Plan) for message in bench.said["a1"])
    bench.register("b")
    assert bench.pending() == "b"


def test_a_timeout_shorter_than_the_warning() -> None:
    bench = bench_of("ab", straggler_timeout_ns=2 * limits.SECOND)
    bench.begin("a", 1)
    bench.tick_at_deadline()
    assert bench.names() == "a"
    assert bench.now_ns < WARNING
    assert bench.verdict("a", 1) == Decision(1, Result.TOO_FEW_PEERS, reason="this peer is alone in its group")


@pytest.mark.parametrize("kind", [TakeOver, Standby])
def test_who_has_not_found_the_new_master_is_no_straggler(kind: type[TakeOver] | type[Standby]) -> None:
    """L3: c may have voted at the former master. Once it is here, it has the same time as others."""
    bench = kind(MasterOptions(straggler_timeout_ns=limits.SECOND))
    bench.report("ab", "abc")
    bench.recover()
    for name in "ab":
        bench.say(name, Acknowledgement(bench.machine.registry.epoch))
        bench.begin(name, 1)
    for _ in range(3):
        bench.tick(limits.SECOND)
    bench.report("c", "abc")
    assert bench.names() == "abc"
    bench.tick(limits.SECOND - 1)
    assert bench.names() == "abc"
    bench.tick_at_deadline()
    bench.tick(limits.SECOND)
    assert bench.names() == "ab"


def test_nobody_is_a_straggler_before_all_are_back() -> None:
    """S6: b has been in no call for long, but could not have made one in the outage. c has died in it."""
    bench = bench_of("abc", straggler_timeout_ns=2 * SECOND)
    bench.begin("ac", 1)
    bench.disconnect("abc")
    bench.tick(25 * SECOND)
    bench.hello("ab", welcomed=True, connection=2)
    bench.tick(limits.RECOVERY_WAIT_NS + SECOND)
    assert bench.names() == "ab"
    bench.tick(2 * SECOND)
    assert bench.names() == "a"


@pytest.mark.parametrize("is_back", [False, True])
def test_a_member_that_is_away_may_have_voted(is_back: bool) -> None:
    """S6: its vote was lost with its connection, and comes again. Until it is back, its grace period counts."""
    bench = bench_of("abc", straggler_timeout_ns=5 * SECOND)
    bench.hello("b", welcomed=True, connection=2, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.disconnect("b")
    bench.begin("ac", 1)
    bench.tick(4 * SECOND)
    if is_back:
        bench.hello("b", welcomed=True, connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(SECOND)
    assert bench.names() == "abc"
    if not is_back:
        bench.hello("b", welcomed=True, connection=3, handshake_ms=limits.HANDSHAKE_MS_MAX)
    bench.tick(10 * SECOND)  # It has not voted, after all.
    assert bench.names() == "ac"


def test_a_straggler_that_was_away_is_removed_soon_after() -> None:
    """L2: not only after another timeout, which may be an hour."""
    bench = bench_of("abc", straggler_timeout_ns=TIMEOUT)
    bench.begin("ac", 1)
    begun_ns = bench.now_ns
    bench.tick(TIMEOUT - 1)
    bench.disconnect("b")
    bench.hello("b", welcomed=True, connection=2)
    while "b" in bench.names():
        bench.tick_at_deadline()
    assert bench.now_ns == begun_ns + TIMEOUT - 1 + limits.CUT_OFF_SPREAD_NS


def test_a_straggler_that_comes_and_goes_is_removed() -> None:
    """L2: it never votes, and connects again every second, for ever."""
    bench = bench_of("abc", straggler_timeout_ns=TIMEOUT)
    bench.begin("ac", 1)
    excused_ns = TIMEOUT + limits.AWAY_EXCUSE_MAX_NS
    assert bench.come_and_go("b", SECOND, lambda: "b" not in bench.names(), excused_ns + SECOND) >= excused_ns


def test_a_straggler_in_two_operations_is_removed_once() -> None:
    bench = bench_of("ab", straggler_timeout_ns=TIMEOUT)
    bench.begin("a", 1, spec(1), spec(2))
    kicks = [message for _, message in bench.tick(TIMEOUT) if isinstance(message, Kick)]
    assert len(kicks) == 1
    assert bench.names() == "a"
    assert pids("b")[0] not in bench.machine.registry.peers


def test_many_operations_are_counted() -> None:
    """A batch of hundreds of tensors does not fill the log."""
    bench = bench_of("ab")
    bench.begin("a", 1, *(spec(tag) for tag in range(100)))
    bench.tick(WARNING)
    found = lines(bench)
    assert len(found) == limits.STRAGGLER_LINES_MAX + 1
    assert found[-1] == f"{100 - limits.STRAGGLER_LINES_MAX} more operations lack votes"
    assert len(bench.machine.stragglers()) == 100
    bench.begin("b", 1, *(spec(tag) for tag in range(100)))
    assert len(lines(bench, Level.INFO)) == limits.STRAGGLER_LINES_MAX
    bench.begin("a", 200, spec(500))
    bench.tick(WARNING)
    assert len(bench.machine._stragglers._warnings) == 1


# --- Peers that wait for each other -----------------------------------------------------------------------------------


def refused(bench: MasterBench, name: str, call_id: int) -> str:
    """The reason why a call was refused."""
    answer = bench.decision(name, call_id)
    assert answer.result == Result.INVALID_USAGE
    return answer.reason


def until(bench: MasterBench, now_ns: int) -> None:
    """Lets time pass; the master runs at each of its deadlines."""
    while (deadline_ns := bench.machine.deadline_ns()) is not None and deadline_ns <= now_ns:
        bench.tick_at_deadline()
    bench.tick(now_ns - bench.now_ns)


DEADLOCK = (
    "peers wait for each other: a, c in all_reduce at tag 1 of group 0, which waits for b; "
    "b in all_reduce at tag 2 of group 0, which waits for a, c"
)


@pytest.mark.parametrize("timeout_ns", [None, TIMEOUT])
def test_peers_in_different_tags(timeout_ns: int | None) -> None:
    """L1: nobody was a straggler, so nobody was named, for ever."""
    bench = bench_of("abc", straggler_timeout_ns=timeout_ns)
    began_ns = bench.now_ns
    for name, tag in (("a", 1), ("b", 2), ("c", 1)):
        bench.begin(name, 1, spec(tag))
    until(bench, began_ns + WARNING - 1)
    assert lines(bench) == []
    until(bench, began_ns + WARNING)
    assert lines(bench) == [f"{DEADLOCK}; since 10 s"]
    until(bench, began_ns + TIMEOUT - 1)
    assert lines(bench) == [f"{DEADLOCK}; since 20 s"]
    assert bench.verdict("a", 1) is None
    until(bench, began_ns + TIMEOUT)
    if timeout_ns is None:
        assert bench.verdict("a", 1) is None
        until(bench, began_ns + 4 * WARNING)
        assert lines(bench) == [f"{DEADLOCK}; since 40 s"]
        return
    assert lines(bench) == [f"{DEADLOCK}; since 25 s; the master ends their calls"]
    assert [refused(bench, name, 1) for name in "abc"] == [DEADLOCK] * 3
    assert bench.names() == "abc"
    first, second = bench.peer("a").answers[1], bench.peer("b").answers[1]
    assert (first.order, second.order) == (pids("ac"), ())
    bench.begin("abc", 2, spec(1))
    assert len(bench.plans) == 1


def test_batches_that_overlap_in_part() -> None:
    """L1: operations with all votes run. c waits for both, neither waits for c, and c is in the deadlock."""
    bench = bench_of("abc", straggler_timeout_ns=TIMEOUT)
    bench.begin("a", 1, spec(1), spec(2))
    bench.begin("b", 1, spec(2), spec(3))
    bench.begin("c", 1, spec(1), spec(2), spec(3))
    bench.begin("c", 4, spec(4))
    until(bench, bench.now_ns + 2 * TIMEOUT)  # They reduce during this time.
    assert lines(bench) != []
    assert [bench.verdict(name, 1) for name in "abc"] == [None] * 3
    bench.finish("a", 2)
    bench.finish("b", 1)
    bench.finish("c", 2)
    lines(bench)
    began_ns = bench.now_ns
    until(bench, began_ns + WARNING)
    (line,) = [text for text in lines(bench) if text.startswith("peers wait")]
    assert "a, c in all_reduce at tag 1 of group 0, which waits for b" in line
    assert "b, c in all_reduce at tag 3 of group 0, which waits for a" in line
    assert "tag 4" not in line
    until(bench, began_ns + TIMEOUT - 1)
    assert bench.verdict("c", 1) is None
    until(bench, began_ns + TIMEOUT)
    for name, call_id in (("a", 1), ("c", 1), ("b", 2), ("c", 3)):
        assert "peers wait for each other" in refused(bench, name, call_id)
    assert bench.verdict("c", 4) is None
    bench.begin("ab", 9, spec(4))
    assert len(bench.plans) == 2


def test_a_slow_peer_is_in_no_deadlock() -> None:
    """The votes of a and b wait for each other, but both also wait for c's vote, and c is in no call."""
    bench = bench_of("abc")
    bench.begin("a", 1, spec(1))
    bench.begin("b", 1, spec(2))
    until(bench, bench.now_ns + WARNING)
    assert not any(text.startswith("peers wait") for text in lines(bench))
    bench.begin("c", 1, spec(1))
    until(bench, bench.now_ns + WARNING)
    assert sum(text.startswith("peers wait") for text in lines(bench)) == 1


def test_a_peer_that_waits_for_links_is_in_no_deadlock() -> None:
    """An operation that runs is not ended: all have voted for that tag."""
    bench = bench_of("ab", straggler_timeout_ns=TIMEOUT)
    bench.say("a", Linked(()))
    for name, tag in (("a", 1), ("b", 2)):
        bench.begin(name, 1, spec(3))
        bench.begin(name, 2, spec(tag))
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS - 1)
    assert not any(text.startswith("peers wait") for text in lines(bench))


def test_are_peers_pending_is_no_excuse() -> None:
    """A peer that also waits in it may be in a deadlock. The question goes on when the deadlock is gone."""
    bench = bench_of("ab", others="x", straggler_timeout_ns=TIMEOUT)
    bench.vote("ax", PENDING, 1)
    bench.begin("a", 2, spec(1))
    bench.begin("b", 2, spec(2))
    until(bench, bench.now_ns + TIMEOUT)
    assert "are_peers_pending" not in refused(bench, "a", 2)
    assert refused(bench, "b", 2)
    bench.vote("b", PENDING, 3)
    assert bench.verdict("x", 1) == Decision(1, Result.SUCCESS)


def test_a_deadlock_is_looked_for_though_nobody_votes_any_more() -> None:
    """An attempt that ends leaves its peers in calls that wait for each other."""
    bench = bench_of("ab")
    for name, tag in (("a", 1), ("b", 2)):
        bench.begin(name, 1, spec(3))
        bench.begin(name, 2, spec(tag))
    until(bench, bench.now_ns + 20 * WARNING)
    lines(bench)
    bench.finish("ab", 1)
    until(bench, bench.now_ns + WARNING)
    assert any(text.startswith("peers wait") for text in lines(bench))


def test_the_loss_of_a_peer_may_leave_the_others_in_a_deadlock() -> None:
    bench = bench_of("abc")
    bench.begin("a", 1, spec(1))
    bench.begin("b", 1, spec(2))
    until(bench, bench.now_ns + 20 * WARNING)
    lines(bench)
    bench.leave("c")
    until(bench, bench.now_ns + WARNING)
    assert any(text.startswith("peers wait") for text in lines(bench))


def test_two_deadlocks_and_operations_that_wait_for_them() -> None:
    bench = bench_of("ab", others="xy", straggler_timeout_ns=TIMEOUT)
    for name, tag in zip("abxy", (1, 2, 1, 2), strict=True):
        bench.begin(name, 1, spec(tag))
    bench.vote("a", PENDING, 2)
    until(bench, bench.now_ns + WARNING)
    assert [re.findall(r"group (\d)", text) for text in lines(bench)] == [["0", "0"], ["1", "1"], []]
    until(bench, bench.now_ns + TIMEOUT - WARNING)
    for name in "abxy":
        assert refused(bench, name, 1)
    assert bench.verdict("a", 2) is None


def test_a_line_about_a_large_deadlock_can_be_read() -> None:
    names = [chr(ord("A") + i) * limits.NAME_CHARS_MAX for i in range(40)]
    bench = bench_of(names, straggler_timeout_ns=TIMEOUT)
    for tag, name in enumerate(names):
        bench.begin([name], 1, spec(tag))
    until(bench, bench.now_ns + WARNING)
    (line,) = lines(bench)
    assert line.count(" in all_reduce at tag ") == limits.STRAGGLER_LINES_MAX
    assert "and 32 more operations; since 10 s" in line
    until(bench, bench.now_ns + TIMEOUT)
    assert len({refused(bench, name, 1) for name in names}) == 1


def test_an_operation_in_a_deadlock_of_rounds_can_be_ended() -> None:
    """At present no votes are in such a deadlock, as they are refused at once. If one occurs, it does not last."""
    bench = bench_of("ab")
    bench.say("a", offer(1, 0))
    bench.machine.operations.refuse(Key(SYNC, 0), Result.INVALID_USAGE, "why")
    assert bench.peer("a").answers[1] == Decision(1, Result.INVALID_USAGE, reason="why")


@pytest.mark.parametrize("seconds", [TIMEOUT // limits.SECOND - 1, 2 * TIMEOUT // limits.SECOND])
def test_who_cannot_vote_in_an_outage_of_all_is_no_straggler(seconds: int) -> None:
    """L3: b and c are removed only if they do not vote once all are back."""
    bench = bench_of("abc", straggler_timeout_ns=TIMEOUT)
    bench.begin("a", 1)
    bench.disconnect("abc")
    for _ in range(seconds):
        bench.tick(limits.SECOND)
    assert bench.names() == "abc"
    bench.hello("abc", welcomed=True, connection=2)
    bench.tick(TIMEOUT - 1)
    assert bench.names() == "abc"
    bench.tick(1)
    assert bench.names() == "a"
