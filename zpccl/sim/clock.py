"""Simulated time: a heap of timers. Nothing happens between two timers, and no two of them at once.

Processes have clocks of their own, which agree with the world's on nothing but that time goes on.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from zpccl.limits import SECOND

OFFSET_NS_MAX = 10**6 * SECOND
DRIFT_PPM_MAX = 10_000
PPM = 10**6


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


class LocalClock:
    """What one process takes for the time: it began at another moment, and runs fast or slow.

    Args:
        offset_ns: what it shows when the world begins.
        drift_ppm: by how many parts in a million it runs fast.
    """

    def __init__(self, clock: Clock, offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self._clock = clock
        self.offset_ns = offset_ns
        self.drift_ppm = drift_ppm

    @staticmethod
    def draw(clock: Clock, rng: random.Random) -> LocalClock:
        """One as processes may have."""
        offset_ns = rng.choice((0, rng.randrange(OFFSET_NS_MAX)))
        return LocalClock(clock, offset_ns, rng.randint(-DRIFT_PPM_MAX, DRIFT_PPM_MAX))

    def now_ns(self) -> int:
        """What it shows now."""
        return self.offset_ns + self._clock.now_ns * (PPM + self.drift_ppm) // PPM

    def world_ns(self, local_ns: int | None) -> int | None:
        """The first moment of the world at which it shows `local_ns` or more."""
        if local_ns is None:
            return None
        return -((self.offset_ns - local_ns) * PPM // (PPM + self.drift_ppm))
