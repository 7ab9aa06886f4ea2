"""A mailbox for one thread: messages on channels of an engine, and items that other threads of this process put in."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from typing import Any

from zpccl import limits
from zpccl.engine.engine import Engine
from zpccl.errors import InternalError


class Mailbox:
    """Belongs to the thread that takes; any thread may put.

    A message wakes only that thread. Until it is taken it stays in the engine and counts against the engine's bounds.

    Raises:
        InternalError: the system has no descriptor to give.
    """

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._channels: list[tuple[Engine, int]] = []
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise InternalError(f"the system has no descriptor to give: {error.strerror}") from error
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def __del__(self) -> None:  # Not sooner: a thread that may still put something holds a reference.
        if hasattr(self, "_fd"):  # Without it, the system had no descriptor to give.
            os.close(self._fd)

    def fileno(self) -> int:
        """The eventfd that is written when something arrives. `Engine.open_channel` needs it."""
        return self._fd

    def put(self, item: Any) -> None:
        """Adds an item."""
        self._items.append(item)
        os.eventfd_write(self._fd, 1)

    def listen(self, engine: Engine, channel_id: int) -> None:
        """From now on `take` also returns the events of this channel, which was opened with this mailbox."""
        self._channels.append((engine, channel_id))

    def link_bytes(self, peer: bytes) -> int:
        """The bytes that the link to a peer has brought so far, on whatever channel."""
        for engine, _ in self._channels:
            with contextlib.suppress(OSError):  # There is no link, or the engine is closed.
                return sum(engine.link_state(peer).rx_bytes)
        return 0

    def take(self, deadline_ns: int) -> list[Any]:
        """Waits, then takes what has come; [] if nothing has come by the deadline on the monotonic clock."""
        while not (found := self._look()):
            left_ms = -(-(deadline_ns - time.monotonic_ns()) // limits.MS)
            if left_ms <= 0 or not self._poll.poll(left_ms):
                break
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        return found

    def _look(self) -> list[Any]:
        items = [self._items.popleft() for _ in range(min(len(self._items), limits.POLL_EVENTS_MAX))]
        found: list[Any] = []
        for engine, channel_id in self._channels:  # Polled later, listed first: a link's messages precede its loss.
            with contextlib.suppress(OSError):  # The engine is closed.
                found += engine.poll(limits.POLL_EVENTS_MAX, channel_id)
        return found + items
