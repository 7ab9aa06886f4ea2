"""One configuration of a process group: its fixed ranks, the peer of each rank, and the collectives that it issued.

torch's ranks are fixed, zpccl's peers come and go. So a configuration ends when the first rank is lost, and all its
collectives in flight fail with a typed error. The process group may then get another one (`ProcessGroup.reconfigure`).
A collective belongs to its configuration: it fails with that, and does not affect the next one.

Any thread may call. The lock guards error, tags and pairs. Nothing waits under it, unless a signal handler interrupts
its holder and ends the configuration: that waits until the peer's thread has ended, so the peer's thread must not take
the lock. Threads of the configuration, as many as wait at the same time, complete futures and run their callbacks.
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
        rank: rank of this process.
        size: number of ranks.
        ranks: the rank of each row of an all-gather; rows are in order of peer ids.
        rows: `ranks` as a tensor.
        is_in_order: True if rows are in order of ranks.
        error: why it has ended; None while it works.
        failure: the same if it has failed; None while it works, and after this rank has left.
    """

    def __init__(self, members: Membership) -> None:
        self.rank, self.size = members.rank, members.size
        self.ranks = members.ranks
        self.rows = torch.tensor(members.ranks, device="cpu")  # Whatever torch's default device is.
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
        """The configuration of a group that has no ranks yet: it refuses every collective."""
        configuration = cls(Membership(rank, size, None, tuple(range(size)), None, dist.HashStore()))
        configuration.error = InvalidUsage("the process group has no ranks yet: call reconfigure")
        return configuration

    @property
    def communicator(self) -> Communicator:
        """The communicator of this rank.

        Raises:
            InvalidUsage: the only rank of a group has no communicator.
        """
        if self._members.communicator is None:
            raise InvalidUsage("a process group of one rank has no communicator")
        return self._members.communicator

    @property
    def store_of_program(self) -> Any:
        """A store of these ranks alone, whose keys are not those of zpccl."""
        return dist.PrefixStore("program", self._members.store)

    def issue(
        self,
        signature: tuple[str, int, Any, Hashable],
        launch: Callable[[Communicator, int], AsyncReduceHandle],
        timeout: timedelta,
    ) -> AsyncReduceHandle:
        """Makes a call of the communicator, at the next tag of this signature.

        Args:
            signature: kind, elements, dtype and all else that all ranks must agree on.
            launch: makes the call, at the given tag.
            timeout: how long to wait for the earlier call with this tag, if all tags of the signature are in flight.
        """
        self.check()  # Also before the lock: after a fork it may stay locked.
        with self._lock:
            self.check()
            tag = self._tags.next(signature)
            before = self._in_flight.get(self._latest.get(tag, -1))
        try:
            if before is not None:
                before.wait(timeout.total_seconds())  # Its own Work reports its outcome.
            if self.communicator.world_size < self.size:
                raise PeerLost(f"only {self.communicator.world_size} of {self.size} ranks remain")
            handle = launch(self.communicator, tag)
        except InvalidArgument:
            raise  # All ranks get the same error, or this one may still issue the call that the others wait for.
        except (RuntimeError, MemoryError) as error:  # Also torch's errors, if there is no memory for copies.
            raise copy.copy(self.fail(as_own(error))) from error
        number = self._latest[tag] = next(self._numbers)
        self._in_flight[number] = handle
        # The callback must not refer to the handle, which refers to the callback.
        handle.add_done_callback(lambda: self._in_flight.pop(number, None))
        return handle

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """For several calls that the other ranks count as one: Ctrl-C or a torch error in it ends the configuration."""
        try:
            yield
        except PCCLError:
            raise  # `issue` has ended the configuration where necessary.
        except BaseException as error:
            self.fail(as_own(error) if isinstance(error, (RuntimeError, MemoryError)) else interruption())
            raise

    def pair(self, other: int, timeout: timedelta) -> Pair:
        """This rank and another one, for messages. They meet at the first message, within `timeout`."""
        self.check()  # As in `issue`.
        with self._lock:
            self.check()
            if other not in self._pairs:
                low, high = sorted((self.rank, other))
                # The pair needs its own client of the store: a client that waits for a key blocks other threads.
                store = dist.PrefixStore(f"pair/{low}/{high}", self._members.store.clone())
                communicator, peer_id = self.communicator, self._members.peer_ids[other]
                pair = Pair(
                    store,
                    is_lower=self.rank == low,
                    timeout=timeout,
                    is_lost=lambda: peer_id not in communicator.peer_ids,
                )
                _late_threads.add(pair.thread)
                self._pairs[other] = pair
            return self._pairs[other]

    def store_of(self, ranks: Sequence[int]) -> Any:
        """The store in which some of the ranks meet to form a separate group."""
        return claimed(dist.PrefixStore(f"only/{'-'.join(map(str, ranks))}", self._members.store), str(self.rank))

    def fail(self, error: PCCLError) -> PCCLError:
        """Ends the configuration: this rank leaves, so that no other waits for collectives that it will not issue.

        Returns the first error that ended the configuration. In a child process made by fork nothing ends.
        """
        if self._pid != os.getpid():
            return error
        with self._lock:
            if self.error is None:
                self.error = self.failure = copy.copy(error)  # Its traceback would keep the tensors of the callers.
            error = self.error
            pairs = list(self._pairs.values())
        if self._members.communicator is not None:
            self._members.communicator.close()
        for pair in pairs:
            pair.close(is_orderly=False)
        return error

    def run_later(self, function: Callable[[], object]) -> None:
        """Runs a function soon in a thread of the configuration."""
        try:
            self._threads.submit(function)
        except RuntimeError:  # `leave` or the end of the program has ended these threads.
            try:
                thread = threading.Thread(target=function, name="zpccl-torch", daemon=True)
                _late_threads.add(thread)
                thread.start()
            except RuntimeError:  # No thread can be started.
                function()

    def leave(self, error: PCCLError, *, is_orderly: bool) -> None:
        """Leaves the run. Collectives in flight fail; later ones raise `error`, or an earlier error.

        Args:
            error: the error for later collectives.
            is_orderly: True: a master in this process goes on until the others have left, for TORCH_LEAVE_TIMEOUT at
                most.
        """
        if self._pid != os.getpid():
            return  # The ranks belong to the parent.
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
        """Raises the error that ended the configuration, if any, or an error in a child process made by fork."""
        if self._pid != os.getpid():
            raise InvalidUsage("the process group belongs to the parent process; make a new one after fork")
        if self.error is not None:
            raise copy.copy(self.error)  # Raising modifies the error, and several threads may raise it.


_late_threads: Living[threading.Thread] = Living()


def wait_for_late_threads() -> None:
    """Waits, for TORCH_LEAVE_TIMEOUT at most, for callbacks and pairs that run at the end of the program.

    Otherwise Python ends their threads in the middle, and torch's C++ code that calls them aborts the process.
    """
    deadline = time.monotonic() + limits.TORCH_LEAVE_TIMEOUT_NS / limits.SECOND
    for thread in _late_threads.all():
        if thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0))


def interruption() -> PCCLError:
    """The error of a configuration whose rank has given up a call in the middle."""
    return InvalidUsage("Ctrl-C, or another exception of a signal handler, has ended a call in the middle")
