"""Worker threads for one call, for digests and state transfers; they have ended when the call returns."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias, TypeVar

from zpccl import limits

Job: TypeAlias = Callable[[], None]
_PartT = TypeVar("_PartT")


def worker_count(nbytes: int | None = None) -> int:
    """Number of threads: by the CPUs of this process, and by the amount of work if `nbytes` is given."""
    count = min(len(os.sched_getaffinity(0)), limits.STATE_WORKERS_MAX)
    return count if nbytes is None else max(1, min(count, nbytes // limits.STATE_WORKER_BYTES))


class Workers:
    """A pool of threads, started on demand, that runs jobs in order of submission. One thread owns it.

    A job handles its own errors.

    Args:
        count: maximum number of threads. 0: `finish` runs all jobs in the calling thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Queues a job."""
        self._jobs.put(job)
        if len(self._threads) < self.count:
            thread = threading.Thread(target=self._work, name="zpccl-state", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Helps with the queued jobs, waits until all are done, and ends the threads."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job()
        for _ in self._threads:
            self._jobs.put(None)
        while self._threads:
            with contextlib.suppress(RuntimeError):  # Ctrl-C came before its start; if it starts later, it ends.
                self._threads[-1].join()
            self._threads.pop()

    def close(self) -> None:
        """Ends the threads after their current jobs; drops queued jobs.

        Raises:
            KeyboardInterrupt: it came meanwhile; all threads have ended nevertheless.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._jobs.get_nowait()
                self.finish()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
            del job  # Release its memory before waiting.


def in_parallel(function: Callable[[_PartT], None], parts: Iterable[_PartT], count: int) -> None:
    """Calls a function with each part, in this thread and `count - 1` others, which have ended when this returns.

    Raises:
        Exception: the first exception of the function, raised after the threads have ended. Parts that were not begun
            by then are skipped.
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
