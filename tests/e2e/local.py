"""Several communicators in one process, for tests that need no separate processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import zpccl
from e2e.harness import HANG_SECONDS, until

T = TypeVar("T")


class Run:
    """A master and the members of its run, all in this process."""

    def __init__(self, size: int, groups: list[int] | None, options: dict[str, Any]) -> None:
        self.master = zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05)
        self.master.run()
        self.comms = [
            zpccl.Communicator(self.master.address, groups[i] if groups else 0, name=f"peer{i}", **options)
            for i in range(size)
        ]
        self._threads = ThreadPoolExecutor(64)
        self.all(lambda comm: join(comm, size))

    def start(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> Future[T]:
        """Runs a function in a thread."""
        return self._threads.submit(function, *arguments, **keywords)

    def all(self, function: Callable[[zpccl.Communicator], T]) -> list[T]:
        """Runs a function for every member concurrently. Returns the values, or raises the first exception."""
        return [finish(future) for future in [self.start(function, comm) for comm in self.comms]]

    def errors(self, function: Callable[[zpccl.Communicator], Any]) -> list[BaseException | None]:
        """Runs a function for every member concurrently. Returns the exceptions."""
        return [failure(future) for future in [self.start(function, comm) for comm in self.comms]]

    def close(self) -> None:
        """Closes all communicators, then the master."""
        for comm in self.comms:
            comm.close()
        self.master.interrupt()
        self._threads.shutdown()


def finish(future: Future[T]) -> T:
    """Waits for a function in a thread, and returns its value."""
    assert wait([future], HANG_SECONDS).done, "the call hangs"
    return future.result()


def failure(future: Future[Any]) -> BaseException | None:
    """Waits for a function in a thread, and returns its exception or None."""
    assert wait([future], HANG_SECONDS).done, "the call hangs"
    return future.exception()


def join(comm: zpccl.Communicator, size: int) -> None:
    """Connects, and admits others until the run has `size` members."""
    comm.connect()
    while comm.get_attribute(zpccl.Attribute.GLOBAL_WORLD_SIZE) < size:
        comm.update_topology()


@contextlib.contextmanager
def local_run(size: int, groups: list[int] | None = None, **options: Any) -> Iterator[Run]:
    """A run whose members are all in this process."""
    before = threading.active_count()
    run = Run(size, groups, options)
    try:
        yield run
    finally:
        run.close()
    until(lambda: threading.active_count() <= before, f"the end of all threads but {before}")
