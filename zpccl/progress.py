"""How far a long transfer is: what callbacks get, and lines in the log.

A `ProgressMeter` is pure: it is told the time. A `ProgressReporter` belongs to the thread of the user that made the
call, reads the clock, and calls the user back in that thread only.
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
    """How far a transfer is.

    Attributes:
        operation: "fetch" (of shared state from other peers), "prefetch" (the same, ahead of admission), "save" or
            "load" (of a checkpoint).
        bytes_done: of the contents of tensors, uncompressed.
        bytes_expected: what there is to do, as far as it is known: a fetch finds out on its way how much differs.
        seconds: since the transfer began.
        bytes_per_second: of the last seconds; 0 where nothing moved.
        seconds_left: at this rate; None while nothing moves.
        is_done: this is the last that is told of this transfer, which has succeeded.
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
"""What users give to be told. It is called often enough for a bar, and must return soon: the transfer waits for it."""


class ProgressMeter:
    """Measures the rate of one transfer over its last PROGRESS_WINDOW.

    Args:
        operation: as in `Progress`.
        now_ns: when it begins.
    """

    def __init__(self, operation: str, now_ns: int) -> None:
        self._operation = operation
        self._began_ns = now_ns
        self._samples = deque([(now_ns, 0)])  # Times and bytes done then; the first is from before the window.

    def measure(self, bytes_done: int, bytes_expected: int, now_ns: int) -> Progress:
        """How far it is now. Time and bytes never go back."""
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


class ProgressReporter:
    """Tells of one transfer: the callback at its begin, every PROGRESS_INTERVAL and at its end; the log each second
    after the first, and of the end of what took longer. Where there is nothing to do, it says nothing.

    A callback that raises an `Exception` is logged with its traceback and not called again for this transfer, which
    goes on: to stop one, use Ctrl-C. Other exceptions, such as KeyboardInterrupt, leave the call.

    Args:
        operation: as in `Progress`.
        callback: of the user; None for none.
        clock_ns: monotonic.
    """

    def __init__(
        self, operation: str, callback: ProgressCallback | None, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        now_ns = clock_ns()
        self._callback = callback
        self._clock_ns = clock_ns
        self._meter = ProgressMeter(operation, now_ns)
        self._began_ns = now_ns
        self._called_ns = now_ns - limits.PROGRESS_INTERVAL_NS  # The first call is due at once.
        self._logged_ns = now_ns
        self._bytes_done = 0

    def update(self, bytes_done: int, bytes_expected: int) -> None:
        """So much is done. Cheap when nothing is due."""
        self._bytes_done = bytes_done
        now_ns = self._clock_ns()
        if bytes_expected > 0 and now_ns - self._called_ns >= limits.PROGRESS_INTERVAL_NS:
            self._called_ns = now_ns
            is_log_due = now_ns - self._logged_ns >= limits.PROGRESS_LOG_INTERVAL_NS
            self._tell(self._meter.measure(bytes_done, bytes_expected, now_ns), is_log_due)

    def end(self, bytes_done: int | None = None) -> None:
        """The transfer has succeeded, with so much done; None: what was told last."""
        now_ns = self._clock_ns()
        bytes_done = self._bytes_done if bytes_done is None else bytes_done
        if bytes_done > 0:
            progress = self._meter.measure(bytes_done, bytes_done, now_ns)
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
    """Raises InvalidArgument if this is no callback of a user, nor None."""
    if callback is not None and not callable(callback):
        raise InvalidArgument(f"a {type(callback).__name__} cannot be called; give a function of one Progress, or None")


def _mib(count: float) -> str:
    return f"{count / limits.MIB:,.1f}"
