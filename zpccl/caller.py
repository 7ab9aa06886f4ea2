"""The base of all public calls: the peer's loop, waiting for answers, and Ctrl-C."""

from __future__ import annotations

import contextlib
import copy
import enum
import numbers
import operator
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from zpccl import limits
from zpccl.control.calls import Answer, PendingCall
from zpccl.control.peer_loop import PeerLoop
from zpccl.errors import InternalError, InvalidArgument, InvalidUsage
from zpccl.protocol.peer import State


class Caller:
    """Makes calls of a peer and waits for their answers. The subclass holds the peer."""

    _loop: PeerLoop | None
    _is_closed: bool
    _pid: int
    _group: int

    def _group_members(self) -> list[tuple[bytes, int, str]]:
        members = self._loop.view.members if self._loop is not None else ()
        return [member for member in members if member[1] == self._group]

    def _connected(self) -> PeerLoop:
        self._check_process()
        if self._is_closed:
            raise InvalidUsage("the communicator is closed")
        if self._loop is None:
            raise InvalidUsage("not connected; call connect() first")
        return self._loop

    def _admitted(self) -> PeerLoop:
        loop = self._connected()
        if loop.view.state in (State.MEMBER, State.RETURNING):
            return loop
        raise copy.copy(loop.error) if loop.error is not None else InvalidUsage("connect() has not returned yet")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidUsage("the communicator belongs to the parent process; make a new one after fork")

    def _check_thread(self, loop: PeerLoop) -> None:
        """Raises an error in the callback of a collective: its thread answers all calls, and would wait for itself."""
        if loop.is_own_thread():
            raise InvalidUsage("the callback of a collective must not wait for a call; let it wake another thread")

    def _run(self, call: PendingCall, timeout: float | None = None) -> Any:
        """Makes a call and waits for its result."""
        timeout, loop = checked_seconds(timeout), self._connected()
        self._check_thread(loop)
        with self._giving_up(loop, [call]):
            loop.call([call])
            self._answer(loop, call, timeout)
        return call.result()

    def _answer(self, loop: PeerLoop, call: PendingCall, timeout: float | None = None) -> int:
        """Waits for the answer to a call. After `timeout` seconds it withdraws the call; then the answer comes soon."""
        if not wait(call.future, timeout):
            self._give_up(loop, [call], timed_out=True)
        error = call.future.exception()
        if error is not None:
            # An error of the loop goes to many calls, and raising it modifies it: each call gets a copy.
            raise copy.copy(error)
        call.store()
        return call.future.result()

    @contextlib.contextmanager
    def _giving_up(self, loop: PeerLoop, calls: Sequence[PendingCall]) -> Iterator[None]:
        """If an exception leaves the block, withdraws the calls and waits until the caller may use their memory again.

        The exception may be Ctrl-C, that of another signal handler, or one of this library, such as a lack of memory.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, InternalError):
                raise  # The thread of the peer has ended, or hangs, and this thread has waited for it already.
            try:
                if not all(call.future.done() for call in calls):
                    self._give_up(loop, calls, timed_out=False)
            except InternalError:
                raise
            except BaseException:  # noqa: BLE001 - A second Ctrl-C: close at once, and raise the first exception.
                loop.close()
            raise

    def _give_up(self, loop: PeerLoop, calls: Sequence[PendingCall], *, timed_out: bool) -> None:
        """Withdraws calls and waits until the caller may use their memory again: WITHDRAW_TIMEOUT at most.

        Raises:
            InternalError: the thread of the peer no longer answers.
        """
        for call in calls:
            loop.withdraw(call, timed_out=timed_out)
        longest_ns = limits.WITHDRAW_TIMEOUT_NS + limits.PEER_LOOP_TIMEOUT_NS
        deadline = time.monotonic() + longest_ns / limits.SECOND
        if not all(wait(call.future, deadline - time.monotonic()) for call in calls):
            raise InternalError("the thread of the peer hangs, and may still use the tensors of the call")


def wait(future: Answer[Any], timeout: float | None) -> bool:
    """True once the future is done; False after the timeout. Wakes up regularly, to handle signals."""
    deadline = None if timeout is None else time.monotonic() + timeout
    interval = limits.SIGNAL_CHECK_INTERVAL_NS / limits.SECOND
    while not future.done():
        left = interval if deadline is None else min(interval, deadline - time.monotonic())
        if left <= 0:
            return False
        future.wait(left)
    return True


def is_number(value: Any) -> bool:
    """True for a real number of any type, including numpy's."""
    return isinstance(value, numbers.Real)


def checked_int(value: Any, name: str, least: int, most: int | None = None) -> int:
    """A checked argument: an integer of any type, but neither True nor False."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bound = "on" if most is None else f"to {most}"
        raise InvalidArgument(f"{name} {value!r} is not an integer from {least} {bound}")
    return number


def is_member(value: Any, kind: type[enum.IntEnum]) -> bool:
    """True for a member of the enum, or the number of one.

    False for members of other enums, which number them differently: torch.distributed.ReduceOp.MIN has the number of
    our MAX.
    """
    if isinstance(value, kind):
        return True
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, (bool, enum.Enum))
    return is_number and value in tuple(kind)


def checked_seconds(timeout: Any) -> float | None:
    """A checked `timeout=`: a number that a lock can wait for, or None."""
    if timeout is None:
        return None
    if not is_number(timeout) or not 0 <= timeout < float("inf"):
        raise InvalidArgument(f"timeout {timeout!r} is not a number of seconds, 0 or more; None waits without end")
    return float(min(timeout, threading.TIMEOUT_MAX))


def checked_nanoseconds(seconds: Any, name: str, at_least_ns: int = limits.MS) -> int:
    """A checked argument in seconds, up to a day."""
    if not is_number(seconds) or not at_least_ns / limits.SECOND <= seconds <= limits.GIVEN_TIME_MAX_NS / limits.SECOND:
        bound, most = at_least_ns / limits.SECOND, limits.GIVEN_TIME_MAX_NS // limits.SECOND
        raise InvalidArgument(f"{name} {seconds!r} is not a number of seconds from {bound:g} to {most:,}")
    return int(float(seconds) * limits.SECOND)
