"""Progress: rates and remaining time by a given clock, when callbacks are due, and what callbacks may do."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from zpccl import limits, progress
from zpccl.errors import InvalidArgument
from zpccl.limits import MIB, MS, SECOND
from zpccl.progress import Progress, ProgressReporter


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns


def reporter(seen: list[Progress], clock: Clock) -> ProgressReporter:
    return ProgressReporter("fetch", seen.append, clock)


def meter_of(operation: str, now_ns: int) -> ProgressReporter:
    return ProgressReporter(operation, None, lambda: now_ns)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """Fast at first, due to bytes that are already here, then as slow as the path: the remaining time follows."""
    meter = meter_of("fetch", 0)
    for second in range(1, 4):
        fast = meter.measure(second * 100 * MIB, 1000 * MIB, second * SECOND)
    assert (fast.bytes_per_second, fast.seconds, fast.seconds_left) == (100 * MIB, 3.0, 7.0)
    for second in range(4, 20):
        slow = meter.measure((300 + (second - 3) * 10) * MIB, 1000 * MIB, second * SECOND)
    assert slow.bytes_per_second == 10 * MIB
    assert slow.seconds_left == pytest.approx(54)
    for second in range(20, 30):
        stalled = meter.measure(460 * MIB, 1000 * MIB, second * SECOND)
    assert (stalled.bytes_per_second, stalled.seconds_left, stalled.is_done) == (0, None, False)


def test_nothing_has_moved_yet() -> None:
    assert meter_of("load", 7).measure(0, 10, 7) == Progress("load", 0, 10, 0.0, 0.0, None)


def test_nothing_is_said_where_there_is_nothing_to_do() -> None:
    seen: list[Progress] = []
    reports = reporter(seen, Clock())
    reports.update(0, 0)
    reports.end()
    assert not seen


def test_the_memory_of_a_meter_is_bounded() -> None:
    meter = meter_of("load", 0)
    for now_ns in range(0, 60 * SECOND, 10 * MS):
        meter.measure(now_ns, 60 * SECOND, now_ns)
    assert len(meter._samples) <= limits.PROGRESS_WINDOW_NS // limits.PROGRESS_INTERVAL_NS + 2


def test_callbacks_are_due_at_the_begin_at_times_and_once_at_the_end() -> None:
    seen: list[Progress] = []
    clock = Clock()
    reports = reporter(seen, clock)
    for done in range(1001):
        reports.update(done, 1000)
        clock.now_ns += MS
    reports.end()
    assert [item.bytes_done for item in seen] == [*range(0, 1001, 100), 1000]
    assert [item.is_done for item in seen] == [False] * 11 + [True]


def test_what_is_done_so_far_is_not_the_end() -> None:
    """A fetch that has everything so far may hear of more."""
    seen: list[Progress] = []
    clock = Clock()
    reports = reporter(seen, clock)
    for done in range(500):
        reports.update(done, done)
        clock.now_ns += MS
    assert len(seen) == 5
    assert not any(item.is_done for item in seen)


def test_long_transfers_leave_a_line_a_second_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    reports = ProgressReporter("save", None, clock)
    with caplog.at_level(logging.INFO, "zpccl.progress"):
        for step in range(26):
            reports.update(step * MIB, 25 * MIB)
            clock.now_ns += limits.PROGRESS_INTERVAL_NS
        reports.end()
    assert [record.getMessage() for record in caplog.records] == [
        "save: 10.0 of 25.0 MiB (40%), 10.0 MiB/s, 2 s left",
        "save: 20.0 of 25.0 MiB (80%), 10.0 MiB/s, 0 s left",
        "save: 25.0 MiB in 2.6 s, 9.6 MiB/s",
    ]


def test_short_transfers_leave_no_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    reports = ProgressReporter("save", None, clock)
    with caplog.at_level(logging.INFO, "zpccl.progress"):
        for done in (0, 5, 10):
            reports.update(done, 10)
            clock.now_ns += 300 * MS
        reports.end()
    assert not caplog.records


def test_a_callback_that_fails_is_logged_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Progress] = []

    def fail(item: Progress) -> None:
        calls.append(item)
        raise RuntimeError("a bar without a terminal")

    clock = Clock()
    reports = ProgressReporter("fetch", fail, clock)
    for done in range(3):
        reports.update(done, 2)
        clock.now_ns += SECOND
    assert len(calls) == 1
    assert "a bar without a terminal" in caplog.text and "not called again" in caplog.text


def test_an_interrupt_in_a_callback_is_one() -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProgressReporter("fetch", interrupt, Clock()).update(0, 1)


@pytest.mark.parametrize("callback", [5, "print", []])
def test_what_cannot_be_called_is_refused(callback: Any) -> None:
    with pytest.raises(InvalidArgument, match="called"):
        progress.check_callback(callback)


def test_what_can_be_called_is_not() -> None:
    progress.check_callback(None)
    progress.check_callback(print)
