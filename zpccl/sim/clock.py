"""Simulated time: a heap of timers. Nothing happens between two timers, and no two of them at once."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timer:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("callback", "time_ns")

    def __init__(self, time_ns: int, callback: Callable[[], None]) -> None:
        self.time_ns = time_ns
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Makes it not happen. Harmless when it has happened."""
        self.callback = None


class Clock:
    """Runs timers in order of time; those of one time in the order in which they were set.

    Time begins at 0, so that code which takes the time 0 for "never" is found out.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = 0

    def after(self, delay_ns: int, callback: Callable[[], None]) -> Timer:
        """Calls `callback` in `delay_ns` nanoseconds."""
        return self.at(self.now_ns + max(0, delay_ns), callback)

    def at(self, time_ns: int, callback: Callable[[], None]) -> Timer:
        """Calls `callback` at `time_ns`, or as soon as possible where that is past."""
        timer = Timer(max(time_ns, self.now_ns), callback)
        self._count += 1
        heapq.heappush(self._heap, (timer.time_ns, self._count, timer))
        return timer

    def next_ns(self) -> int | None:
        """When the next timer is due, or None."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def step(self) -> bool:
        """Moves on to the next timer and runs it. False if there is none."""
        if self.next_ns() is None:
            return False
        self.now_ns, _, timer = heapq.heappop(self._heap)
        callback, timer.callback = timer.callback, None
        assert callback is not None
        callback()
        return True
