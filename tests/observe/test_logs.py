"""The library's logger, as the environment sets it up."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading

import pytest
from e2e.harness import HANG_SECONDS

from zpccl import limits
from zpccl.observe.logs import BoundedLog, NonBlockingHandler, log_as_environment_says

READERLESS = """
import fcntl, os, zpccl
fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 4096)
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x")
except BlockingIOError:
    os.set_blocking(2, True)
with zpccl.MasterNode("127.0.0.1:0") as master, zpccl.Communicator(master.address) as comm:
    print(comm.world_size)
"""


def test_a_level_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_LOG_LEVEL", "loud")
    with pytest.warns(RuntimeWarning, match="ZPCCL_LOG_LEVEL is 'loud', not one of debug, info, warning, error"):
        log_as_environment_says()


def test_usual_lines_leave_room_for_warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that sync with every step cause three lines each time."""
    monkeypatch.setattr(limits, "LOG_LINES_MAX", 10)
    caplog.set_level(logging.INFO, "zpccl.master")
    log = BoundedLog(logging.getLogger("zpccl.master"), "LOG_LINES_MAX")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        for _ in range(20):
            log.write(level, logging.getLevelName(level), 0)
    assert [record.levelname for record in caplog.records] == ["INFO"] * 5 + ["WARNING"] * 5
    caplog.clear()
    log.write(logging.INFO, "INFO", limits.REFUSALS_LOGGED_INTERVAL_NS)
    assert [record.getMessage() for record in caplog.records] == ["50 more lines before this one were left out", "INFO"]


def test_nobody_forges_a_line_or_controls_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """S7: the description of a malformed message has parts of the message, and reasons come from members."""
    log = BoundedLog(logging.getLogger("zpccl.master"), "LOG_LINES_MAX")
    log.write(logging.WARNING, "Invalid value '\nERROR \x1b[2J\x9b\u2028\ud800 Grüße'", 0)
    assert [record.getMessage() for record in caplog.records] == [
        r"Invalid value '\nERROR \x1b[2J\x9b\u2028\ud800 Grüße'"
    ]


def test_a_log_that_nobody_reads() -> None:
    """Lines are left out while there is no room, and counted once there is."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as lines, open(writer, "wb", buffering=0) as log:
        handler = NonBlockingHandler(writer)

        def emit(text: str) -> None:
            handler.emit(logging.LogRecord("zpccl", logging.INFO, "", 0, text, (), None))

        count = 0
        while select.select([], [log], [], 0)[1]:
            emit("x" * 999)
            count += 1
        for _ in range(3):
            emit("left out")
        read = b""
        while read.count(b"\n") < count:
            read += lines.read(1 << 20)
        assert read == (b"x" * 999 + b"\n") * count
        emit("read")
        emit("again")
        assert lines.read(1 << 20) == b"3 lines were left out here: they could not be written\nread\nagain\n"


def test_a_line_that_a_signal_handler_interrupts_holds_up_no_other_thread() -> None:
    """L1: the handler closes a peer, and waits for its thread, which logs."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as lines, open(writer, "wb", buffering=0):
        handler = NonBlockingHandler(writer)
        record = logging.LogRecord("zpccl", logging.INFO, "", 0, "text", (), None)
        handler.acquire()  # As while a line is written.
        thread = threading.Thread(target=handler.handle, args=(record,), daemon=True)
        thread.start()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
        handler.release()
        handler.handle(record)
        assert lines.read(1 << 20) == b"1 lines were left out here: they could not be written\ntext\n"


def test_a_log_whose_reader_has_ended() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0):
        NonBlockingHandler(writer).emit(logging.LogRecord("zpccl", logging.INFO, "", 0, "text", (), None))


def test_a_peer_whose_log_nobody_reads() -> None:
    """L1: its thread does not wait for room in the pipe, since all its calls would wait with it."""
    environment = {**os.environ, "ZPCCL_LOG_LEVEL": "info"}
    command = [sys.executable, "-c", READERLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        try:
            assert child.wait(HANG_SECONDS) == 0
            assert child.stdout is not None and child.stdout.read() == b"1\n"
        finally:
            child.kill()
