"""One configuration of a process group: ranks that are fixed, the peers that they are, and what this rank has issued.

torch's ranks are fixed, zpccl's peers come and go. So a configuration ends with the first rank that is lost, with a
typed error in all that it has issued; the process group may get another one then (`ProcessGroup.reconfigure`). What
has been issued belongs to its configuration: it fails with that, and does not touch the next one.

Threads: any may call. The lock guards error, tags and pairs; nothing waits under it, unless a signal handler ends the
configuration there. So the peer's thread, for whose end that waits, does not take it. Futures are completed, and their
callbacks run, in threads of the configuration, of which there are as many as wait at a time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zpccl import limits
from zpccl.collectives import AsyncReduceHandle
from zpccl.communicator import Communicator
from zpccl.engine.living import Living
from zpccl.errors import InvalidArgument, InvalidUsage, PCCLError, PeerLost
from zpccl.torch.pairs import Pair, as_own
from zpccl.torch.rendezvous import Membership, claimed
from zpccl.torch.tags import Tags


class Configuration:
    """The ranks of a process group from their meeting to the first loss.

    Attributes:
        rank: of this process.
        size: ranks there are.
        ranks: the rank of each row of an all-gather, which come in order of peer ids.
        rows: the same as a tensor.
        is_in_order: True if that is the order of ranks.
        error: why it has ended; None while it works.
        failure: the same, where it has failed; None where it works, or was left.
    """

    def __init__(self, members: Membership) -> None:
        self.rank, self.size = members.rank, members.size
        self.ranks = members.ranks
        self.rows = torch.tensor(members.ranks, device="cpu")  # Whatever torch's default is.
        self.is_in_order = members.ranks == tuple(range(members.size))
        self.error: PCCLError | None = None
        self.failure: PCCLError | None = None
        self._members = members
        self._pid = os.getpid()
        self._lock = threading.RLock()  # A signal handler may leave meanwhile, in the same thread.
        self._is_left = False
        self._tags = Tags(limits.calls_in_flight_max(members.size), limits.TORCH_TAGS_PER_SIGNATURE_MAX)
        self._numbers = itertools.count()  # Of calls.
        self._latest: dict[int, int] = {}  # By tag: the number of its last call.
        self._in_flight: dict[int, AsyncReduceHandle] = {}  # By number.
        self._pairs: dict[int, Pair] = {}  # With other ranks, for messages.
        self._threads = ThreadPoolExecutor(limits.TORCH_CALLBACK_THREADS_MAX, "zpccl-torch")

    @classmethod
    def none(cls, rank: int, size: int) -> Configuration:
        """Where there has been none yet: whatever is issued is refused."""
        configuration = cls(Membership(rank, size, None, tuple(range(size)), None, dist.HashStore()))
        configuration.error = InvalidUsage("the process group has no ranks yet: call reconfigure")
        return configuration

    @property
    def communicator(self) -> Communicator:
        """The communicator of this rank.

        Raises:
            InvalidUsage: there is only one rank, which needs none.
        """
        if self._members.communicator is None:
            raise InvalidUsage("a process group of one rank has no communicator")
        return self._members.communicator

    def issue(
        self,
        signature: tuple[str, int, Any, Hashable],
        launch: Callable[[Communicator, int], AsyncReduceHandle],
        timeout: timedelta,
    ) -> AsyncReduceHandle:
        """Makes a call of the communicator, at the next tag of calls with this signature.

        Args:
            signature: kind, elements, dtype and what else all ranks must agree on.
            launch: makes the call, at the tag that it is given.
            timeout: how long to wait for the call that has the tag, if as many as there are tags are in flight.
        """
        self.check()  # Also before: after a fork the lock may stay locked.
        with self._lock:
            self.check()
            tag = self._tags.next(signature)
            before = self._in_flight.get(self._latest.get(tag, -1))
        try:
            if before is not None:
                before.wait(timeout.total_seconds())  # Its own Work says what became of it.
            if self.communicator.world_size < self.size:
                raise PeerLost(f"{self.communicator.world_size} of {self.size} ranks are left")
            handle = launch(self.communicator, tag)
        except InvalidArgument:
            raise  # The same on all ranks, or this one is at fault: it may still issue what the others wait for.
        except (RuntimeError, MemoryError) as error:  # Those of torch, too, where there is no room for copies.
            raise copy.copy(self.fail(as_own(error))) from error
        number = self._latest[tag] = next(self._numbers)
        self._in_flight[number] = handle
        # What the handle refers to must not refer to it.
        handle.add_done_callback(lambda: self._in_flight.pop(number, None))
        return handle

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """For what the others count as a whole: Ctrl-C in the middle ends the configuration, and what torch raises."""
        try:
            yield
        except PCCLError:
            raise  # It has ended, unless it may go on.
        except BaseException as error:
            self.fail(as_own(error) if isinstance(error, (RuntimeError, MemoryError)) else interruption())
            raise

    def pair(self, other: int, timeout: timedelta) -> Pair:
        """This rank and another one, for messages. They meet, within `timeout`, at the first message."""
        self.check()  # As in `issue`.
        with self._lock:
            self.check()
            if other not in self._pairs:
                low, high = sorted((self.rank, other))
                # A client of a store of its own: one that waits for a key lets no other thread at it.
                store = dist.PrefixStore(f"pair/{low}/{high}", self._members.store.clone())
                self._pairs[other] = Pair(store, is_lower=self.rank == low, timeout=timeout)
            return self._pairs[other]

    def store_of(self, ranks: Sequence[int]) -> Any:
        """The store in which some of the ranks meet to be a group of their own."""
        return claimed(dist.PrefixStore(f"only/{'-'.join(map(str, ranks))}", self._members.store), str(self.rank))

    def fail(self, error: PCCLError) -> PCCLError:
        """Ends the configuration: this rank leaves, so that no other waits for what it will not issue any more.

        Returns the error that it has ended with: the first one. In a child process made by fork nothing ends.
        """
        if self._pid != os.getpid():
            return error
        with self._lock:
            if self.error is None:
                self.error = self.failure = error
            error = self.error
            pairs = list(self._pairs.values())
        if self._members.communicator is not None:
            self._members.communicator.close()
        for pair in pairs:
            pair.close(is_orderly=False)
        return error

    def run_later(self, function: Callable[[], object]) -> None:
        """Has a thread of the configuration call a function soon."""
        try:
            self._threads.submit(function)
        except RuntimeError:  # They have been ended, by `leave` or by the end of the program.
            try:
                thread = threading.Thread(target=function, name="zpccl-torch", daemon=True)
                _late_threads.add(thread)
                thread.start()
            except RuntimeError:  # There is none to have.
                function()

    def leave(self, error: PCCLError, *, is_orderly: bool) -> None:
        """Leaves the run. What is in flight fails; what is issued later raises `error`, or an earlier one.

        Args:
            error: what to tell.
            is_orderly: where the master is in this process, it goes on until the others have left, for a while.
        """
        if self._pid != os.getpid():
            return  # The ranks are the parent's.
        with self._lock:
            if self._is_left:
                return
            self._is_left = True
            is_orderly = is_orderly and self.error is None
            self.error = self.error or error
            pairs = list(self._pairs.values())
        for pair in pairs:
            pair.close(is_orderly=is_orderly)
        self._members.leave(is_orderly=is_orderly)
        self._threads.shutdown(wait=False)

    def check(self) -> None:
        """Raises the error that it has ended with, if it has. A child process made by fork has no ranks."""
        if self._pid != os.getpid():
            raise InvalidUsage("the process group belongs to the parent process; make a new one after fork")
        if self.error is not None:
            raise copy.copy(self.error)  # Raising writes to it, and several threads may.


_late_threads: Living[threading.Thread] = Living()


def wait_for_late_threads() -> None:
    """Waits, for a while, for callbacks that run at the end of the program.

    Python would end their threads in the middle, and the C++ of torch that calls them then aborts the process.
    """
    deadline = time.monotonic() + limits.TORCH_LEAVE_TIMEOUT_NS / limits.SECOND
    for thread in _late_threads.all():
        if thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0))


def interruption() -> PCCLError:
    """Why a configuration has ended whose rank has given up a call in the middle."""
    return InvalidUsage("Ctrl-C, or another exception of a signal handler, has ended a call in the middle")
