"""What one thread waits for: messages on channels of an engine, and what other threads of this process put there."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from typing import Any

from zpccl import limits
from zpccl.engine.engine import Engine


class Mailbox:
    """Belongs to the thread that takes; any thread may put.

    A message wakes that thread and no other, and stays with the engine, whose bounds it counts against, until then.
    """

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._channels: list[tuple[Engine, int]] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def __del__(self) -> None:  # Not before: whoever may still put something holds it.
        if hasattr(self, "_fd"):  # Else there was no descriptor to have.
            os.close(self._fd)

    def fileno(self) -> int:
        """The eventfd that is written when there is something new. `Engine.open_channel` needs it."""
        return self._fd

    def put(self, item: Any) -> None:
        """Adds something to what is taken."""
        self._items.append(item)
        os.eventfd_write(self._fd, 1)

    def listen(self, engine: Engine, channel_id: int) -> None:
        """From now on takes the events of a channel, too, which was opened with this mailbox."""
        self._channels.append((engine, channel_id))

    def take(self, deadline_ns: int) -> list[Any]:
        """What is there, once there is something; [] if nothing has come by the deadline of the monotonic clock."""
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
        for engine, channel_id in self._channels:  # Later, and first: what came over a link precedes its loss.
            with contextlib.suppress(OSError):  # The engine is closed.
                found += engine.poll(limits.POLL_EVENTS_MAX, channel_id)
        return found + items
