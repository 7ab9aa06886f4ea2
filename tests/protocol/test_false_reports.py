"""L3, and false reports: what a master that takes a run over makes of late and contradictory reports."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.messages import Linked, Plan, Refusal, Refused, Running, Vote, Votes

from .harness import offer, pids, reducing, running_attempt, running_sync, spec
from .standby import TWO, Standby
from .takeover import TakeOver, hello_of, outcome, report_of

OTHER_RUN = b"x" * 16


@pytest.mark.parametrize("what", ["outcome", "running"])
def test_a_run_does_not_yield_once_a_late_report_tells_that_it_has_decided(what: str) -> None:
    """L3, S2: c, d and e were admitted last and know of nothing decided. a and b report after the master has begun to
    collect the reports of another run."""
    bench = TakeOver()
    bench.report("cde", "abcde", waits=False)
    bench.recover()
    assert bench.names() == "abcde"
    run_id = bench.machine.run_id
    bench.report("x", "x", 3, run_id=OTHER_RUN)
    facts: dict[str, Any] = {"outcomes": (outcome(1, True, "ab", 1, 1),)}
    if what == "running":
        facts = {"running": (running_attempt(7, "ab", (3, 4), spec()),)}
    for name in "ab":
        report = report_of(name, "abcde", **facts)
        bench.say(name, report.hello, on=f"{name}1")
        bench.say(name, bench.promising(report, bench.machine._leader.promise))
    for _ in range(3):
        bench.tick(limits.SECOND)
    assert bench.names() == "abcde" and bench.machine.run_id == run_id
    for name in "abcde":
        refusals = [m.refusal for m in bench.said[bench.connections[name]] if isinstance(m, Refused)]
        assert Refusal.YIELDED not in refusals
    assert [m.refusal for m in bench.said["x1"] if isinstance(m, Refused)][-1] is Refusal.UNKNOWN_SESSION


def lying(*running: Running) -> TakeOver:
    """a and b have reported; b lied."""
    bench = TakeOver()
    bench.report("a", "ab", waits=False)
    bench.report("b", "ab", waits=False, running=running)
    bench.recover()
    return bench


def test_one_call_in_a_collective_and_in_a_sync() -> None:
    """A false report must not crash the master: a's call would be answered twice."""
    bench = lying(running_attempt(7, "ab", (3, 4), spec()), running_sync(8, 2, "a", "ab", (3, 4), False))
    for name, call_id in (("a", 3), ("b", 4)):
        bench.finish(name, call_id, 7)
    for name, call_id in (("a", 3), ("b", 4)):
        bench.fetched(name, call_id, 8)
    assert bench.verdict("a", 3) is not None


def test_one_attempt_id_for_a_collective_and_a_sync() -> None:
    """The same: two attempts with one id."""
    bench = lying(running_attempt(7, "ab", (3, 4), spec()), running_sync(7, 2, "a", "ab", (5, 6), False))
    for name, call_id in (("a", 3), ("b", 4)):
        bench.finish(name, call_id, 7)
    assert bench.verdict("a", 3) is not None


def test_a_call_that_runs_and_has_an_outcome_of_another_attempt() -> None:
    """The same, with an outcome that comes late."""
    bench = TakeOver()
    bench.report("ac", "abc", waits=False, running=(running_attempt(7, "ac", (3, 4), spec()),))
    bench.recover()
    bench.report("b", "abc", outcomes=(outcome(5, False, "ac", 3, 4),))
    for name, call_id in (("a", 3), ("c", 4)):
        bench.finish(name, call_id, 7)
    assert bench.verdict("a", 3) is not None


def test_a_plan_that_lacks_calls_is_no_plan() -> None:
    """The master would not find the participants of its ring."""
    bench = TakeOver()
    bench.report("a", "ab", waits=False)
    false = replace(running_attempt(7, "ab", (3, 4), spec()), plan=Plan(7, (3,), reducing("ab")))
    (told,) = bench.report("b", "ab", running=(false,), waits=False)
    assert told[1].refusal is Refusal.UNKNOWN_SESSION


@pytest.mark.parametrize("kind", ["sync", "empty"])
def test_a_participant_that_registers_again_is_no_survivor(kind: str) -> None:
    """L1: d was admitted and has voted, but heard neither that its list is committed nor of a plan. It was removed, so
    it registers again, and gives its call up. b reports late: it alone has got the plan, which names d."""
    bench = Standby()
    of: dict[str, Any] = {"members": "abcd", "epoch": 5, "old_members": pids("abc"), "parent": 4}
    bench.report("ac", **of)
    bench.recover()
    bench.see("ac")
    bench.say("a", Linked(pids("bc")))
    bench.say("c", Linked(pids("ab")))
    empty = spec(count=0)
    bench.say("ac", offer(1, 1) if kind == "sync" else Votes(0, (Vote(1, empty),)))
    bench.tick(limits.QUORUM_WAIT_NS)
    bench.see("ac")
    assert bench.names() == "abc"
    hello = replace(hello_of("d"), is_member=False, is_returning=True, **TWO)
    bench.say("d", hello, on="d1")
    assert bench.pending() == "d"
    bench.tick(limits.SECOND)
    calls = (1, 1, 1, 1)
    is_sync = kind == "sync"
    ran = running_sync(7, 1, "abcd", "abcd", calls, False) if is_sync else running_attempt(7, "abcd", calls, empty)
    bench.report("b", **of, running=(ran,))
    bench.see("abc")
    if kind == "sync":
        bench.say("b", offer(1, 1))
    for name in "abc":
        bench.finish(name, 1, 7) if kind == "empty" else bench.fetched(name, 1, 7)
    bench.link("abcd")
    for _ in range(90):
        bench.tick(limits.SECOND)
    assert all(bench.verdict(name, 1) is not None for name in "abc")
