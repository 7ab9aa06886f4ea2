"""A few threads that do work for one call, and have ended when it returns."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from zpccl import limits

Job: TypeAlias = Callable[[], None]


class Workers:
    """Threads that do jobs in the order in which they were submitted, started as there is work. One thread owns them.

    A job handles its own errors.

    Attributes:
        count: threads at most.
    """

    def __init__(self) -> None:
        self.count = max(1, min(len(os.sched_getaffinity(0)), limits.STATE_WORKERS_MAX))
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Has a job done by the next thread that is free."""
        self._jobs.put(job)
        if len(self._threads) < self.count:
            thread = threading.Thread(target=self._work, name="zpccl-state", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Waits until all jobs are done, and ends the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        while self._threads:
            with contextlib.suppress(RuntimeError):  # Ctrl-C came before it was started; if it starts yet, it ends.
                self._threads[-1].join()
            self._threads.pop()

    def close(self) -> None:
        """Ends the threads, when they are done with the jobs that they have begun; the others are forgotten.

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
            del job  # It may hold memory.
