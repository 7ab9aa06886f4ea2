"""Logging: the logger "zpccl" of `logging`, a log on standard error that never waits, and rate-limited logs."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import warnings

from zpccl import limits
from zpccl.errors import printable

LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr(level: str) -> None:
    """Logs messages of all zpccl loggers at `level` or above to standard error, without waiting for its reader."""
    handler: logging.Handler = logging.StreamHandler()
    is_replaced = sys.stderr is not sys.__stderr__  # By the program, as in a notebook.
    if not is_replaced:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # There is none, or it is closed.
            handler = NonBlockingHandler(sys.stderr.fileno())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("zpccl")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def log_as_environment_says() -> None:
    """Logs to standard error if ZPCCL_LOG_LEVEL is set, otherwise leaves logging to the program."""
    logging.getLogger("zpccl").addHandler(logging.NullHandler())
    level = os.environ.get("ZPCCL_LOG_LEVEL", "").lower()
    if level in LEVELS:
        log_to_stderr(level)
    elif level:
        text = f"ZPCCL_LOG_LEVEL is {level!r}, not one of {', '.join(LEVELS)}; zpccl logs nothing by itself"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


class NonBlockingHandler(logging.Handler):
    """Writes log lines to a descriptor, and leaves lines out while it takes none: a pipe that nobody reads, a terminal
    after Ctrl-S. Otherwise the thread that logs would stand still until somebody reads.

    Args:
        descriptor: open for writing, and not closed before the handler.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._left_out = 0

    def handle(self, record: logging.LogRecord) -> bool:
        """Writes a line, as the base class does, but does not wait for the lock: the main thread may hold it while a
        signal handler closes a peer, and so waits for a thread that logs.
        """
        is_wanted = bool(self.filter(record))
        if is_wanted and self.lock is not None:
            if self.lock.acquire(timeout=limits.LOG_WAIT_NS / limits.SECOND):
                try:
                    self.emit(record)
                finally:
                    self.lock.release()
            else:
                self._left_out += 1
        return is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, and before it how many were left out."""
        try:
            line = f"{self.format(record)}\n"
            if self._left_out and not self._write(
                f"{self._left_out} lines were left out here: they could not be written\n"
            ):
                self._left_out += 1
                return
            self._left_out = 0 if self._write(line) else 1
        except Exception:  # noqa: BLE001 - as all handlers do
            self.handleError(record)

    def _write(self, line: str) -> bool:
        data = line.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # The other end is closed.
            while data and self._room.poll(0):
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]  # A ready pipe has room for so much.
        return not data


class BoundedLog:
    """A rate-limited log, because strangers and members may cause floods of lines. For one thread, or under a lock.

    They choose parts of the text, too, so line ends and control characters are escaped: each call makes one line, and
    nothing in it controls a terminal.

    Args:
        logger: receives the lines.
        lines_max: name in `limits` of the number of lines per REFUSALS_LOGGED_INTERVAL. Lines below a warning get at
            most half of them, so that they cannot keep out warnings and errors.
    """

    def __init__(self, logger: logging.Logger, lines_max: str) -> None:
        self._logger = logger
        self._lines_max = lines_max
        self._begin_ns: int | None = None
        self._written = self._suppressed = 0

    def write(self, level: int, text: str, now_ns: int) -> None:
        """Writes a line, or counts it as suppressed."""
        if not self._logger.isEnabledFor(level):
            return
        lines_max: int = getattr(limits, self._lines_max)
        if self._begin_ns is None or now_ns - self._begin_ns >= limits.REFUSALS_LOGGED_INTERVAL_NS:
            if self._suppressed > 0:
                self._logger.warning("%d more lines before this one were left out", self._suppressed)
            self._begin_ns, self._written, self._suppressed = now_ns, 0, 0
        if self._written < (lines_max if level >= logging.WARNING else lines_max // 2):
            self._written += 1
            self._logger.log(level, "%s", printable(text))
        else:
            self._suppressed += 1


class RefusalLog(BoundedLog):
    """Logs one warning per refused connection."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, "REFUSALS_LOGGED_MAX")
        self.refused_count = 0
        """Refusals since the start."""

    def add(self, text: str, now_ns: int) -> None:
        """Counts and logs one refusal."""
        self.refused_count += 1
        self.write(logging.WARNING, f"refused {text}", now_ns)
