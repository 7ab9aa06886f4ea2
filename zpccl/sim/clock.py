"""Simulated time: a heap of timers. Nothing happens between two timers; timers run one at a time.

Each process has a local clock with an offset and a drift against simulated time.
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
    """A callback that runs at a time, unless it is cancelled."""

    __slots__ = ("callback", "time_ns")

    def __init__(self, time_ns: int, callback: Callable[[], None]) -> None:
        self.time_ns = time_ns
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Prevents the callback. Has no effect after it has run."""
        self.callback = None


class Clock:
    """Runs timers in order of time; timers of the same time run in the order in which they were set.

    Time begins at 0, which exposes code that uses the time 0 as "never".
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = 0

    def after(self, delay_ns: int, callback: Callable[[], None]) -> Timer:
        """Calls `callback` in `delay_ns` nanoseconds."""
        return self.at(self.now_ns + max(0, delay_ns), callback)

    def at(self, time_ns: int, callback: Callable[[], None]) -> Timer:
        """Calls `callback` at `time_ns`, or as soon as possible if that is past."""
        timer = Timer(max(time_ns, self.now_ns), callback)
        self._count += 1
        heapq.heappush(self._heap, (timer.time_ns, self._count, timer))
        return timer

    def next_ns(self) -> int | None:
        """Time of the next timer, or None."""
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
    """The clock of one process.

    Args:
        offset_ns: its value at simulated time 0.
        drift_ppm: how much it runs fast, in parts per million; negative: slow.
    """

    def __init__(self, clock: Clock, offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self._clock = clock
        self.offset_ns = offset_ns
        self.drift_ppm = drift_ppm

    @staticmethod
    def draw(clock: Clock, rng: random.Random) -> LocalClock:
        """A clock with random offset and drift."""
        offset_ns = rng.choice((0, rng.randrange(OFFSET_NS_MAX)))
        return LocalClock(clock, offset_ns, rng.randint(-DRIFT_PPM_MAX, DRIFT_PPM_MAX))

    def now_ns(self) -> int:
        """Its value now."""
        return self.offset_ns + self._clock.now_ns * (PPM + self.drift_ppm) // PPM

    def world_ns(self, local_ns: int | None) -> int | None:
        """The first simulated time at which its value is `local_ns` or more."""
        if local_ns is None:
            return None
        return -((self.offset_ns - local_ns) * PPM // (PPM + self.drift_ppm))
