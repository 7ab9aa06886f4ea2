"""The interpreter without its garbage collector, traced, limited, or interrupted by signals."""

from __future__ import annotations

import gc
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def without_collector() -> Iterator[None]:
    """The garbage collector, which has collected everything, does not run by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def tracing(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """This thread calls `trace` as sys.settrace says."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """The signal with this number has this handler."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """The process has this soft limit, such as `resource.RLIMIT_FSIZE`."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextmanager
def alarm(handler: Callable[[int, FrameType | None], Any], seconds: float, interval: float = 0) -> Iterator[None]:
    """A handler runs in the main thread after this time, and then at intervals, if there is one."""
    with handling(signal.SIGALRM, handler):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, interval)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def raising(error: BaseException, seconds: float = 0.3) -> Iterator[None]:
    """A handler raises this error in the main thread after this time."""

    def handle(*_: object) -> None:
        raise error

    with alarm(handle, seconds):
        yield
