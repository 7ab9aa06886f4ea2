"""Worker threads for one call, for digests and state transfers; they have ended when the call returns."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias, TypeVar

from zpccl import limits
from zpccl.errors import InternalError

Job: TypeAlias = Callable[[], None]
_PartT = TypeVar("_PartT")
_TRIES_MAX = 10


def worker_count(nbytes: int | None = None) -> int:
    """Number of threads: by the CPUs of this process, and by the amount of work if `nbytes` is given."""
    count = min(len(os.sched_getaffinity(0)), limits.STATE_WORKERS_MAX)
    return count if nbytes is None else max(1, min(count, nbytes // limits.STATE_WORKER_BYTES))


class End:
    """The end of a thread. It calls `set`; others wait.

    A signal handler may wait while its own thread is in the midst of something that holds the lock, such as another
    wait. So the lock is reentrant, and waiting lets go of it: the thread that is waited for may need it.

    Args:
        lock: the lock, if that thread needs it in order to end; it must be reentrant.
    """

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self._lock = threading.RLock() if lock is None else lock
        self._changed = threading.Condition(self._lock)
        self._is_set = False

    def is_set(self) -> bool:
        """True once the thread has ended."""
        return self._is_set

    def set(self) -> None:
        """The thread has ended, but for this call."""
        with self._lock:  # Taken first: once it is set, a holder of the lock may join the thread.
            self._is_set = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Waits for at most this long. True if the thread has ended."""
        with self._lock:
            if not self._is_set:
                self._changed.wait(seconds)
        return self._is_set


class Workers:
    """A pool of threads, started on demand, that runs jobs in order of submission. One thread owns it.

    A job handles its own errors.

    Args:
        count: maximum number of threads. 0, or no thread can be started: jobs run in the calling thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[tuple[threading.Thread, End]] = []  # Each with its end.

    def submit(self, job: Job) -> None:
        """Queues a job, or runs it here if there are no threads."""
        self._jobs.put(job)
        if len(self._threads) < self.count:
            ended = End()
            thread = threading.Thread(target=self._work, args=(ended,), name="zpccl-state", daemon=True)
            self._threads.append((thread, ended))
            try:
                thread.start()
            except RuntimeError:  # The system cannot start another thread: go on with those that run.
                self._threads.pop()
                self.count = len(self._threads)
        if not self.count:
            self.finish()

    def finish(self) -> None:
        """Helps with the queued jobs, waits until all are done, and ends the threads."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job()
        for _ in self._threads:
            self._jobs.put(None)
        while self._threads:
            wait_for_end(*self._threads[-1])
            self._threads.pop()

    def close(self) -> None:
        """Ends the threads after their current jobs; drops queued jobs.

        Raises:
            BaseException: Ctrl-C or another signal came meanwhile; all threads have ended nevertheless.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._jobs.get_nowait()
                self.finish()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _work(self, ended: End) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
                del job  # Release its memory before waiting.
        finally:
            ended.set()


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread.

    Raises:
        InternalError: the system has no thread to give.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise InternalError(f"the thread {thread.name} cannot be started: {error}") from error


def wait_for_end(thread: threading.Thread, ended: End, timeout_ns: int | None = None) -> None:
    """Waits until a thread has ended, for `timeout_ns` at most; the thread sets `ended` at its end.

    It also waits after an earlier wait was interrupted. Does nothing if that thread calls it, has not been started, or
    belongs to the parent process.
    """
    if thread is threading.current_thread() or thread not in threading.enumerate():
        return
    deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
    # In Python 3.11 a signal that interrupts join() makes later calls of it return at once.
    while not ended.wait(limits.SIGNAL_CHECK_INTERVAL_NS / limits.SECOND):
        is_late = deadline_ns is not None and time.monotonic_ns() >= deadline_ns
        if is_late or thread.ident is None:  # None: start() was interrupted before there was a thread.
            return
    if thread.ident is not None:
        thread.join()


def despite_interrupts(action: Callable[[], None]) -> None:
    """Runs an idempotent action to its end: restarts it after an interrupt, which is raised at the end.

    An interrupt is Ctrl-C or an exception of another signal handler, perhaps several times. An action that fails by
    itself fails each time, and its error is raised after _TRIES_MAX tries.
    """
    interrupt: BaseException | None = None
    tries_left = _TRIES_MAX
    while True:
        try:
            action()
            break
        except BaseException as error:
            tries_left -= isinstance(error, Exception)
            if not tries_left:
                raise
            interrupt = error
    if interrupt is not None:
        raise interrupt


def in_parallel(function: Callable[[_PartT], None], parts: Iterable[_PartT], count: int) -> None:
    """Calls a function with each part, in this thread and `count - 1` others, which have ended when this returns.

    Raises:
        Exception: the first exception of the function, raised after the threads have ended. Parts that have not begun
            when it occurs are skipped.
    """
    workers = Workers(count - 1)
    errors: list[BaseException] = []

    def work(part: _PartT) -> None:
        try:
            if not errors:
                function(part)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    try:
        for part in parts:
            workers.submit(partial(work, part))
        workers.finish()
    finally:
        workers.close()
    if errors:
        raise errors[0]
