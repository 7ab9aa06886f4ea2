"""Worker threads that have ended when their call ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from zpccl import limits
from zpccl.state.workers import Workers, in_parallel, worker_count


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """S4: nobody reads the caller's memory after a call."""
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_threads_are_as_many_as_they_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    assert worker_count(0) == worker_count(limits.STATE_WORKER_BYTES) == 1
    assert worker_count(3 * limits.STATE_WORKER_BYTES) == 3
    assert worker_count(2**40) == worker_count() == limits.STATE_WORKERS_MAX


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_parts_are_worked_on(count: int) -> None:
    done: list[int] = []
    in_parallel(done.append, range(100), count)
    assert sorted(done) == list(range(100))


def test_this_thread_works_too() -> None:
    alone: list[threading.Thread] = []
    in_parallel(lambda part: alone.append(threading.current_thread()), range(3), 1)
    assert alone == [threading.current_thread()] * 3


def test_a_failure_in_any_thread_is_raised_when_all_have_ended() -> None:
    meet = threading.Barrier(3)

    def fail(part: int) -> None:
        meet.wait(30)
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        in_parallel(fail, range(100), 3)


def test_an_interrupt_is_raised_when_all_have_ended() -> None:
    """Ctrl-C in this thread, while another one works."""
    here = threading.current_thread()
    helping, interrupted = threading.Event(), threading.Event()
    done: list[str] = []

    def work(part: int) -> None:
        if threading.current_thread() is here:
            assert helping.wait(30)
            interrupted.set()
            raise KeyboardInterrupt
        helping.set()
        assert interrupted.wait(30)
        done.append("helper")

    with pytest.raises(KeyboardInterrupt):
        in_parallel(work, range(2), 2)
    assert done == ["helper"]


def test_jobs_that_are_not_begun_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, begun, closing = Workers(1), threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        assert closing.wait(30)
        done.append(1)

    workers.submit(first)
    assert begun.wait(30)
    workers.submit(lambda: done.append(2))
    ((_, ended),) = workers._threads
    wait = ended.wait

    def wait_when_the_rest_is_forgotten(timeout: float) -> bool:
        closing.set()
        return wait(timeout)

    monkeypatch.setattr(ended, "wait", wait_when_the_rest_is_forgotten)
    workers.close()
    assert done == [1]


def test_an_interrupt_while_a_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: Python counts it as running, but there is no thread to wait for. Queued work is done or dropped."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    done: list[int] = []
    workers = Workers(1)
    name = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading, name, interrupt)
        workers.submit(partial(done.append, 1))
    thread, _ = workers._threads[0]
    closing = threading.Thread(target=workers.finish, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive() and done == [1]
    del threading._limbo[thread]  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [0, 1])
def test_a_lack_of_threads_is_no_failure(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The system may be out of threads: the present threads, or this one, do the work."""
    start, started = threading.Thread.start, 0

    def refuse(thread: threading.Thread) -> None:
        nonlocal started
        if started == most:
            raise RuntimeError("can't start new thread")
        started += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    in_parallel(done.append, range(100), 5)
    assert sorted(done) == list(range(100))
    workers, ran = Workers(3), [threading.Event() for _ in range(5)]
    started = 0
    for event in ran:
        workers.submit(event.set)
    assert all(event.wait(30) for event in ran), "without finish()"
    workers.close()
