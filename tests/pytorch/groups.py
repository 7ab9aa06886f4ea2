"""Process groups whose ranks are threads of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from e2e.harness import HANG_SECONDS

import zpccl
from zpccl.torch.process_group import ProcessGroup

T = TypeVar("T")
TIMEOUT = timedelta(seconds=HANG_SECONDS)


def at_once(threads: ThreadPoolExecutor, function: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
    """Calls a function with each number at the same time; returns the values, or raises the first exception."""
    futures = [threads.submit(function, number) for number in numbers]
    assert not wait(futures, HANG_SECONDS).not_done, "the call hangs"
    return [future.result() for future in futures]


class Ranks:
    """The ranks of one process group."""

    def __init__(self, size: int, timeout: timedelta = TIMEOUT) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(size)
        # As launchers do: each rank has a connection to the store, which one thread uses at a time.
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        stores = [served] + [dist.TCPStore("127.0.0.1", served.port, timeout=timeout) for _ in range(1, size)]

        def make(rank: int) -> ProcessGroup:
            return ProcessGroup.of_all(stores[rank], rank, size, timeout)

        self.groups: list[ProcessGroup] = self._each(make, range(size))

    def all(self, function: Callable[[ProcessGroup, int], T]) -> list[T]:
        """Runs a function for every rank at the same time; returns the values, or raises the first exception."""
        return self._each(lambda rank: function(self.groups[rank], rank), range(self.size))

    def some(self, ranks: list[int], function: Callable[[ProcessGroup, int], T]) -> list[T]:
        """Runs a function for some of the ranks in the same way."""
        return self._each(lambda rank: function(self.groups[rank], rank), ranks)

    def _each(self, function: Callable[[int], T], ranks: Iterable[int]) -> list[T]:
        return at_once(self._threads, function, ranks)

    def close(self) -> None:
        """Leaves the group."""
        self.all(lambda group, _: group.shutdown())
        self._threads.shutdown()


@contextlib.contextmanager
def local_ranks(size: int, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """A process group. All ranks leave it at the end."""
    ranks = Ranks(size, timeout)
    try:
        yield ranks
    finally:
        ranks.close()


def failure(function: Callable[[], Any]) -> zpccl.PCCLError | None:
    """The error of a function, or None."""
    try:
        function()
    except zpccl.PCCLError as error:
        return error
    return None
