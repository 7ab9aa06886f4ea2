"""Progress of long transfers: callbacks and log lines.

A `ProgressReporter` belongs to the user's thread that made the call, and calls the callback in that thread only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from zpccl import limits
from zpccl.errors import InvalidArgument

_logger = logging.getLogger("zpccl.progress")


@dataclass(frozen=True)
class Progress:
    """Progress of a transfer.

    Attributes:
        operation: "fetch" (of shared state from other peers), "prefetch" (the same, before admission), "save" or
            "load" (of a checkpoint).
        bytes_done: bytes of tensors transferred so far, uncompressed.
        bytes_expected: the total, as far as known: a fetch discovers on the way how much differs.
        seconds: since the transfer began.
        bytes_per_second: rate over the last PROGRESS_WINDOW; 0 if nothing moved.
        seconds_left: remaining time at this rate; None if nothing moved.
        is_done: True in the last callback of a successful transfer.
    """

    operation: str
    bytes_done: int
    bytes_expected: int
    seconds: float
    bytes_per_second: float
    seconds_left: float | None
    is_done: bool = False

    def __str__(self) -> str:
        if self.is_done:
            whole_rate = self.bytes_done / self.seconds if self.seconds > 0 else 0.0
            return f"{self.operation}: {_mib(self.bytes_done)} MiB in {self.seconds:.1f} s, {_mib(whole_rate)} MiB/s"
        share = self.bytes_done / self.bytes_expected if self.bytes_expected else 1.0
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{self.operation}: {_mib(self.bytes_done)} of {_mib(self.bytes_expected)} MiB ({share:.0%}), "
            f"{_mib(self.bytes_per_second)} MiB/s{left}"
        )


ProgressCallback: TypeAlias = Callable[[Progress], object]
"""A user's callback. It is called often enough for a progress bar, and must return soon: the transfer waits for it."""


class ProgressReporter:
    """Reports one transfer: to the callback at its start, every PROGRESS_INTERVAL and at its end; to the log every
    second after the first one, and at the end of a transfer that took longer. A transfer of 0 bytes is not reported.

    If the callback raises an `Exception`, that is logged with its traceback. The transfer continues without further
    calls of it. Other exceptions, such as KeyboardInterrupt, propagate and end the transfer.

    Args:
        operation: as in `Progress`.
        callback: the user's callback; None: log only.
        clock_ns: a monotonic clock.
    """

    def __init__(
        self, operation: str, callback: ProgressCallback | None, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        now_ns = clock_ns()
        self._operation = operation
        self._callback = callback
        self._clock_ns = clock_ns
        self._began_ns = now_ns
        self._samples = deque([(now_ns, 0)])  # (time, bytes done); the first is the last sample before the window.
        self._called_ns = now_ns - limits.PROGRESS_INTERVAL_NS  # The first call is due at once.
        self._logged_ns = now_ns
        self._bytes_done = 0

    def measure(self, bytes_done: int, bytes_expected: int, now_ns: int) -> Progress:
        """The progress now. Time and bytes never decrease."""
        samples = self._samples
        if now_ns - samples[-1][0] >= limits.PROGRESS_INTERVAL_NS:
            samples.append((now_ns, bytes_done))
        while len(samples) > 1 and samples[1][0] <= now_ns - limits.PROGRESS_WINDOW_NS:
            samples.popleft()
        since_ns, done_then = samples[0]
        rate = (bytes_done - done_then) * limits.SECOND / (now_ns - since_ns) if now_ns > since_ns else 0.0
        left = max(0, bytes_expected - bytes_done)
        return Progress(
            operation=self._operation,
            bytes_done=bytes_done,
            bytes_expected=bytes_expected,
            seconds=(now_ns - self._began_ns) / limits.SECOND,
            bytes_per_second=rate,
            seconds_left=0.0 if left == 0 else left / rate if rate > 0 else None,
        )

    def update(self, bytes_done: int, bytes_expected: int) -> None:
        """Updates the progress. Cheap when no report is due."""
        self._bytes_done = bytes_done
        now_ns = self._clock_ns()
        if bytes_expected > 0 and now_ns - self._called_ns >= limits.PROGRESS_INTERVAL_NS:
            self._called_ns = now_ns
            is_log_due = now_ns - self._logged_ns >= limits.PROGRESS_LOG_INTERVAL_NS
            self._tell(self.measure(bytes_done, bytes_expected, now_ns), is_log_due)

    def end(self) -> None:
        """The transfer has succeeded; the last update had all bytes."""
        now_ns = self._clock_ns()
        if self._bytes_done > 0:
            progress = self.measure(self._bytes_done, self._bytes_done, now_ns)
            is_log_due = now_ns - self._began_ns >= limits.PROGRESS_LOG_INTERVAL_NS
            self._tell(replace(progress, is_done=True), is_log_due)

    def _tell(self, progress: Progress, is_log_due: bool) -> None:
        if is_log_due:
            self._logged_ns = self._clock_ns()
            _logger.info("%s", progress)
        if self._callback is None:
            return
        try:
            self._callback(progress)
        except Exception:
            _logger.exception("the progress callback failed; it is not called again for this %s", progress.operation)
            self._callback = None


def check_callback(callback: object) -> None:
    """Checks a user's callback.

    Raises:
        InvalidArgument: it is neither callable nor None.
    """
    if callback is not None and not callable(callback):
        raise InvalidArgument(f"a {type(callback).__name__} cannot be called; give a function of one Progress, or None")


def _mib(count: float) -> str:
    return f"{count / limits.MIB:,.1f}"
