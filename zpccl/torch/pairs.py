"""send and recv: a message from one rank to another is a broadcast in a run of these two.

A collective involves all members of a run, so each pair of ranks that exchanges messages gets its own run, with a
master in the process of the lower rank, when the first message is sent or received. Messages of one direction and tag
arrive in the order in which they are sent.

Calls of users return at once. Each pair has a thread that meets the other rank and then makes the calls. It is a daemon
thread, as it may wait for a rank that never comes. The lock guards the state of a pair; nothing waits under it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from zpccl import limits
from zpccl.caller import wait
from zpccl.collectives import AsyncReduceHandle
from zpccl.communicator import Communicator
from zpccl.control.calls import Answer
from zpccl.engine.devices import device_of
from zpccl.engine.tensors import is_on_gpu
from zpccl.errors import InternalError, InvalidUsage, OperationTimeout, PCCLError, PeerLost
from zpccl.torch.rendezvous import Membership, meet
from zpccl.types import ReduceInfo


def as_own(error: Exception) -> PCCLError:
    """Converts an error of torch, or a MemoryError, to one of zpccl."""
    return error if isinstance(error, PCCLError) else InternalError(f"{type(error).__name__}: {error}")


class Message:
    """A broadcast that begins once the two ranks have met and earlier messages are done. Like `AsyncReduceHandle`."""

    def __init__(self) -> None:
        self._begun: Answer[AsyncReduceHandle] = Answer()
        self._ended: Future[None] = Future()
        self._error: PCCLError | None = None

    def begin(self, handle: AsyncReduceHandle) -> None:
        """The call is made; the message ends with it."""
        self._begun.set_result(handle)
        ended = self._ended  # The callback must not refer to the message: in a cycle both would live too long.
        handle.add_done_callback(lambda: ended.set_result(None))

    def fail(self, error: PCCLError) -> None:
        """The call is not made."""
        self._begun.set_exception(copy.copy(error))  # A traceback would refer to this message, and to the tensor.
        self._ended.set_result(None)

    def wait(self, timeout: float) -> tuple[bool, int, ReduceInfo | None]:
        """Like `wait` of a handle; the info is None if the message has not begun."""
        deadline = time.monotonic() + timeout
        if not wait(self._begun, timeout):
            self._error = OperationTimeout(f"the other rank has not come within {timeout:.1f} s")
            return False, int(self._error.result), None
        error = self._begun.exception()
        if isinstance(error, PCCLError):
            self._error = error
            return False, int(error.result), None
        return self._begun.result().wait(max(deadline - time.monotonic(), 0))

    def exception(self) -> PCCLError | None:
        """The error of a message that failed, after `wait`."""
        if self._error is not None or not self._begun.done():
            return self._error
        error = self._begun.exception()
        return error if isinstance(error, PCCLError) else self._begun.result().exception()

    def done(self) -> bool:
        """True once it has succeeded or failed."""
        return self._ended.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once it has ended, as a handle does."""
        self._ended.add_done_callback(lambda _: callback())

    @property
    def result(self) -> Any:
        """The tensor."""
        return self._begun.result().result


class Pair:
    """This rank and another one.

    Args:
        store: a store of these two ranks alone.
        is_lower: True on the lower rank.
        timeout: for meeting.
        is_lost: tells if the other rank was lost before they have met.

    Attributes:
        thread: the thread that makes the calls. It ends soon after `close`.
    """

    def __init__(self, store: Any, *, is_lower: bool, timeout: timedelta, is_lost: Callable[[], bool]) -> None:
        self._is_lower, self._is_lost = is_lower, is_lost
        self._lock = threading.RLock()  # A signal handler may close it meanwhile, in the same thread.
        self._met: Membership | None = None
        self._is_closed = False
        self._counts: Counter[tuple[bool, int]] = Counter()  # Messages so far, by direction and tag.
        self._latest: dict[int, Message] = {}  # By tag of the call.
        self._waiting: set[Message] = set()  # Messages that have neither begun nor failed.
        self._room = threading.Semaphore(limits.calls_in_flight_max(2))  # For messages that have begun.
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None comes last.
        self._store, self._timeout = store, timeout
        self.thread = threading.Thread(target=self._run, name="zpccl-pair", daemon=True)
        self.thread.start()

    def transfer(self, memory: Any, tag: int, *, is_sender: bool) -> Message:
        """Sends a contiguous tensor to the other rank, or receives one from it.

        A tensor on a GPU is sent or received after the work that is on the caller's stream now.
        """
        message, from_lower = Message(), is_sender == self._is_lower
        behind: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if is_on_gpu(memory):
            device = device_of(memory)
            behind = device.behind(device.mark())
        with self._lock:
            number = self._counts[from_lower, tag]
            self._counts[from_lower, tag] += 1
            # Both ranks count alike. Messages use a few call tags in turn, so that calls are planned ahead.
            call_tag = (tag % 2**32 * 2 + from_lower) * limits.TORCH_TAGS_PER_SIGNATURE_MAX
            call_tag += number % limits.TORCH_TAGS_PER_SIGNATURE_MAX
            before, self._latest[call_tag] = self._latest.get(call_tag), message
            self._waiting.add(message)

        def begin() -> None:
            try:
                communicator = self._communicator()
            except Exception as error:  # noqa: BLE001 - handed to who waits for the message
                if self._take(message):
                    message.fail(as_own(error))
                return
            self._room.acquire()  # Closing the pair ends the messages that have begun.
            if not self._take(message):
                return self._room.release()
            try:
                with behind:
                    handle = communicator.broadcast_async(memory, is_root=is_sender, tag=call_tag)
            except Exception as error:  # noqa: BLE001 - handed to who waits for the message
                self._room.release()
                message.fail(as_own(error))
            else:
                handle.add_done_callback(self._room.release)
                message.begin(handle)

        reference = weakref.ref(message)
        message.add_done_callback(lambda: self._forget(call_tag, reference))
        if before is None:
            self._submit(begin)
        else:
            next_ones = [begin]  # An earlier message must not keep the tensors of all later ones alive.
            before.add_done_callback(lambda: self._submit(next_ones.pop()))
        return message

    def close(self, *, is_orderly: bool) -> None:
        """Leaves the run of the two. Messages in flight fail."""
        with self._lock:
            is_first, self._is_closed, met = not self._is_closed, True, self._met
            waiting, self._waiting = self._waiting, set()
        if is_first:
            self._work.put(None)
        for message in waiting:  # The thread may be waiting for the other rank.
            message.fail(InvalidUsage("the process group has ended"))
        if met is not None:
            met.leave(is_orderly=is_orderly)

    def _forget(self, call_tag: int, reference: weakref.ref[Message]) -> None:
        with self._lock:
            message = self._latest.get(call_tag)
            if message is not None and message is reference():
                del self._latest[call_tag]

    def _take(self, message: Message) -> bool:
        """True if a message has neither begun nor failed; the caller then begins or fails it."""
        with self._lock:
            is_waiting = message in self._waiting
            self._waiting.discard(message)
        return is_waiting

    def _submit(self, begin: Callable[[], object]) -> None:
        """Lets the thread begin a message. Once the pair is closed, `begin` only fails the message, in this thread."""
        with self._lock:
            if not self._is_closed:
                return self._work.put(begin)
        begin()

    def _communicator(self) -> Communicator:
        """The communicator of the run, once the two have met. Only the pair's thread waits here.

        Other threads call it only after the pair is closed.
        """
        with self._lock:
            met, is_closed = self._met, self._is_closed
        if is_closed:
            raise InvalidUsage("the process group has ended")
        if met is None:
            rank = 0 if self._is_lower else 1
            met = meet(self._store, rank, 2, self._timeout, is_default=False, check=self._check)
            with self._lock:
                self._met, is_closed = met, self._is_closed
            if is_closed:
                met.leave(is_orderly=False)
        assert met.communicator is not None
        return met.communicator

    def _check(self) -> None:
        if self._is_closed:
            raise InvalidUsage("the process group has ended")
        if self._is_lost():
            raise PeerLost("the other rank was lost before the first message between the two")

    def _run(self) -> None:
        while (begin := self._work.get()) is not None:
            begin()
            del begin  # Otherwise its tensor lives until the next message.
