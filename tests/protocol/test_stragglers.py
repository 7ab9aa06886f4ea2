"""Who is waited for: named in the log, given as data, removed where a timeout says so."""

from __future__ import annotations

import re

import pytest

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.master import MasterOptions
from zpccl.protocol.messages import Answer, Kick, Linked, Plan

from .harness import OPTIMIZE, PENDING, UPDATE, MasterBench, offer, pids, spec

WARNING = limits.STRAGGLER_WARNING_NS
TIMEOUT = 25 * limits.SECOND


def bench_of(*names: str, timeout_ns: int | None = None) -> MasterBench:
    bench = MasterBench(MasterOptions(straggler_timeout_ns=timeout_ns))
    bench.members(*names)
    bench.logged.clear()
    return bench


def lines(bench: MasterBench, level: Level = Level.WARNING) -> list[str]:
    """What was logged since the last look."""
    found = [log.text for log in bench.logged if log.level is level]
    bench.logged.clear()
    return found


def test_who_does_not_vote_is_named() -> None:
    bench = bench_of("a", "b", "c", "d")
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
    bench = bench_of("a", "b")
    bench.begin("a", 1)
    waited = []
    for _ in range(4):
        bench.tick_at_deadline()
        (line,) = lines(bench)
        waited.append(int(line.split()[-3]))
    assert waited == [10, 20, 40, 80]


def test_it_is_said_when_they_have_voted_after_all() -> None:
    bench = bench_of("a", "b", "c")
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
    bench = bench_of("a", "b", "c")
    bench.begin("a", 1)
    bench.tick(WARNING)
    lines(bench)
    bench.leave("b")
    assert [text for text in lines(bench, Level.INFO) if "longer" in text] == []
    bench.begin("c", 1)
    assert lines(bench, Level.INFO) == ["no longer waiting for c in all_reduce at tag 0 of group 0"]


@pytest.mark.parametrize("kind, name", [(UPDATE, "update_topology"), (OPTIMIZE, "optimize_topology")])
def test_topology_calls_wait_for_all_groups(kind: int, name: str) -> None:
    bench = bench_of("a")
    bench.members("x", group=1)
    bench.vote("a", kind, 1)  # type: ignore[arg-type]
    bench.tick(WARNING)
    assert lines(bench) == [f"waiting for x: a called {name} 10 s ago"]


def test_syncs_wait_for_their_group() -> None:
    bench = bench_of("a", "b")
    bench.members("x", "y", group=1)
    bench.say("x", offer(1, 0))
    bench.tick(1)
    bench.say("a", offer(1, 0))
    bench.tick(WARNING)
    assert lines(bench) == [
        "waiting for y: x called sync_shared_state of group 1 10 s ago",
        "waiting for b: a called sync_shared_state of group 0 10 s ago",
    ]


def test_peers_that_wait_for_each_other() -> None:
    """a waits in are_peers_pending for b and c, which wait for a in a collective that may run beside it."""
    bench = bench_of("a", "b", "c", timeout_ns=TIMEOUT)
    bench.vote("a", PENDING, 1)
    for name in "bc":
        bench.begin(name, 1)
    bench.tick(WARNING)
    assert lines(bench) == [
        "waiting for a: b, c called all_reduce at tag 0 of group 0 10 s ago",
        "waiting for b, c, busy in other calls: a called are_peers_pending 10 s ago",
    ]
    assert [name for name, _, _ in bench.machine.stragglers()] == ["a"]
    bench.tick(TIMEOUT - WARNING)
    assert bench.names() == "bc"


def test_who_is_held_up_by_a_straggler_is_none() -> None:
    """Found by the simulator: all of another group waited for b too, which waited for c, which was hung."""
    bench = bench_of("b", "c", timeout_ns=TIMEOUT)
    bench.members("x", group=1)
    bench.vote("x", PENDING, 1)
    bench.tick(limits.SECOND)
    bench.begin("b", 1)
    assert [name for name, _, _ in bench.machine.stragglers(bench.now_ns + WARNING)] == ["c", "c"]
    bench.tick(TIMEOUT)
    assert bench.names() == "bx"


def test_who_is_in_a_long_collective_is_no_straggler() -> None:
    """The other group waits; nobody is removed for it, and the master is not kept busy."""
    bench = bench_of("a", "b", timeout_ns=TIMEOUT)
    bench.members("x", group=1)
    for name in "ab":
        bench.begin(name, 1)
    bench.vote("x", PENDING, 1)
    while bench.now_ns < 10 * TIMEOUT:
        bench.tick_at_deadline()
    assert bench.names() == "abx"
    for name in "ab":
        bench.finish(name, 1)
    bench.vote("a", PENDING, 2)
    bench.tick(TIMEOUT - 1)
    assert bench.names() == "abx"
    bench.tick(1)
    assert bench.names() == "ax"


def test_who_waits_for_links_is_no_straggler() -> None:
    bench = bench_of("a", "b")
    bench.say("a", Linked(()))
    for name in "ab":
        bench.begin(name, 1)
    bench.tick(WARNING - 1)
    assert bench.machine.stragglers() == ()
    assert lines(bench) == []


def test_who_takes_its_vote_back_is_waited_for_again() -> None:
    """Also where all had voted and only links were missing."""
    bench = bench_of("a", "b")
    bench.say("a", Linked(()))
    for name in "ab":
        bench.begin(name, 1)
    bench.tick(WARNING - 1)
    bench.withdraw("b", 1)
    bench.tick_at_deadline()
    assert lines(bench) == ["waiting for b, busy in other calls: a called all_reduce at tag 0 of group 0 10 s ago"]
    bench.tick_at_deadline()
    assert lines(bench) == ["waiting for b: a called all_reduce at tag 0 of group 0 20 s ago"]


def test_a_running_attempt_has_no_stragglers() -> None:
    bench = bench_of("a", "b")
    for name in "ab":
        bench.begin(name, 1)
    bench.tick(10 * WARNING)
    assert lines(bench) == []
    assert bench.machine.deadline_ns() is None


def test_a_short_operation_beside_a_long_one() -> None:
    """Each has its own time."""
    bench = bench_of("a", "b")
    bench.begin("a", 1, spec(1))
    bench.tick(WARNING // 2)
    bench.begin("a", 2, spec(2))
    bench.begin("b", 2, spec(2))
    for name in "ab":
        bench.finish(name, 2)
    bench.tick(WARNING // 4)
    bench.begin("a", 3, spec(3))
    bench.tick_at_deadline()
    assert [re.findall(r"tag (\d)", text) for text in lines(bench)] == [["1"]]
    bench.tick_at_deadline()
    assert [re.findall(r"tag (\d)", text) for text in lines(bench)] == [["3"]]


def test_nobody_is_removed_without_a_timeout() -> None:
    bench = bench_of("a", "b")
    bench.begin("a", 1)
    for _ in range(10):
        bench.tick_at_deadline()
    assert bench.names() == "ab"


def test_a_straggler_is_removed_after_the_timeout() -> None:
    """L1: the others go on; it is told why, and may join again."""
    bench = bench_of("a", "b", "c", timeout_ns=TIMEOUT)
    for name in "ac":
        bench.begin(name, 1)
    bench.tick(TIMEOUT - 1)
    assert bench.names() == "abc"
    assert bench.machine.deadline_ns() == bench.now_ns + 1
    (connection, kick), *_ = bench.tick(1)
    reason = "a, c called all_reduce at tag 0 of group 0 25 s ago, and it did not vote"
    assert (connection, kick) == ("b1", Kick(Result.RANK_CONNECTION_LOST, reason))
    assert bench.names() == "ac"
    assert any(isinstance(message, Plan) for message in bench.said["a1"])
    bench.register("b")
    assert bench.pending() == "b"


def test_a_timeout_shorter_than_the_warning() -> None:
    bench = bench_of("a", "b", timeout_ns=2 * limits.SECOND)
    bench.begin("a", 1)
    bench.tick_at_deadline()
    assert bench.names() == "a"
    assert bench.now_ns < WARNING
    assert bench.verdict("a", 1) == Answer(1, Result.TOO_FEW_PEERS, reason="this peer is alone in its group")


def test_a_straggler_in_two_operations_is_removed_once() -> None:
    bench = bench_of("a", "b", timeout_ns=TIMEOUT)
    bench.begin("a", 1, spec(1), spec(2))
    kicks = [message for _, message in bench.tick(TIMEOUT) if isinstance(message, Kick)]
    assert len(kicks) == 1
    assert bench.names() == "a"
    assert pids("b")[0] not in bench.machine.registry.peers


def test_many_operations_are_counted() -> None:
    """A batch of hundreds of tensors fills no log."""
    bench = bench_of("a", "b")
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
