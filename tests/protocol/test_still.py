"""A master that has stood still gets a Tick that is late: messages that came meanwhile may not have been read yet."""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.limits import MS, SECOND
from zpccl.protocol.messages import Linked

from .harness import bench_of, pids

STILL_NS = 30 * SECOND


def test_a_vote_that_was_not_read_in_time() -> None:
    """L2: the master stood still; b is no straggler."""
    bench = bench_of("abc", straggler_timeout_ns=20 * SECOND)
    bench.begin("ac", 1)
    bench.wake(STILL_NS)
    bench.begin("b", 1)
    assert bench.names() == "abc" and bench.machine.operations.running


def test_a_hello_that_was_not_read_in_time() -> None:
    """S6: b was back after a moment."""
    bench = bench_of("abc", straggler_timeout_ns=20 * SECOND)
    bench.disconnect("b")
    bench.wake(STILL_NS)
    bench.hello("b", welcomed=True, connection=2)
    bench.tick(STILL_NS)
    assert bench.names() == "abc"


def test_links_that_were_not_read_in_time() -> None:
    """S6, L2: they came up again while the master stood still."""
    bench = bench_of("ab")
    bench.register("j")
    for name in "ab":
        bench.say(name, Linked(()))
        bench.begin(name, 1)
    bench.wake(STILL_NS)
    bench.link("abj")
    bench.tick(STILL_NS)
    assert (bench.names(), bench.pending()) == ("ab", "j")
    assert bench.machine.operations.running


@pytest.mark.parametrize("is_late_again", [False, True])
def test_the_next_tick_counts(is_late_again: bool) -> None:
    """L1: whoever is gone is lost, though the master may be so busy that all Ticks are late."""
    bench = bench_of("abc", straggler_timeout_ns=20 * SECOND)
    bench.disconnect("b")
    bench.wake(STILL_NS)
    assert bench.names() == "abc" and bench.machine.deadline_ns() == bench.now_ns + limits.LATE_TICK_NS
    bench.wake(limits.LATE_TICK_NS - 1)
    assert bench.names() == "abc"
    bench.wake(SECOND if is_late_again else 1)
    assert bench.names() == "ac"


def test_a_tick_that_is_late_by_some_milliseconds_counts() -> None:
    """L1: a busy machine."""
    bench = bench_of("abc", straggler_timeout_ns=20 * SECOND)
    bench.disconnect("b")
    bench.wake(limits.DISCONNECT_GRACE_NS + 100 * MS)
    assert bench.names() == "ac"


def test_a_second_still_time() -> None:
    """S6: the Tick after it does not count either."""
    bench = bench_of("abc", straggler_timeout_ns=20 * SECOND)
    for name in "bc":
        bench.disconnect(name)
        bench.wake(STILL_NS)
        assert bench.names() == "abc"
        bench.hello(name, welcomed=True, connection=2)
        bench.tick(SECOND)
    assert bench.names() == "abc" and pids("abc") == tuple(bench.machine.registry.peers)
