"""The shell of the master: what reaches the machine, and in which order."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from e2e.strangers import GREETING, READY, is_dropped, raw

import zpccl
from zpccl import limits
from zpccl.control.master_loop import MasterLoop

WAIT_S = 30


def test_leave_counts_though_the_connection_closed_before_it_was_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both come after the messages were taken and before the master looks at what has closed.

    This moment lasts microseconds: only the loop itself can be stopped in it, hence the private names.
    """
    take_messages = MasterLoop._take_messages
    armed, taken, left = threading.Event(), threading.Event(), threading.Event()

    def take_and_wait(loop: MasterLoop) -> list[Any]:
        messages = take_messages(loop)
        if armed.is_set() and not messages:
            armed.clear()
            taken.set()
            assert left.wait(WAIT_S)
            assert loop._monitor.poll(WAIT_S * 1000)
        return messages

    monkeypatch.setattr(MasterLoop, "_take_messages", take_and_wait)
    caplog.set_level(logging.INFO, "zpccl.master")
    with zpccl.MasterNode("127.0.0.1:0") as master:
        comm = zpccl.Communicator(master.address, listen="127.0.0.1")
        comm.connect()
        armed.set()
        assert master._loop is not None
        os.write(master._loop.wakeup_descriptor, b"\0")
        assert taken.wait(WAIT_S)
        comm.close()
        left.set()
        witness = zpccl.Communicator(master.address, listen="127.0.0.1")
        witness.connect()  # Answered after the leave.
        witness.close()
    texts = [record.getMessage() for record in caplog.records]
    assert any(text.endswith(" left") for text in texts)
    assert not any("lost" in text for text in texts)


def test_a_connection_that_was_given_up_is_heard_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends a thousand malformed messages at once, and not even the first answer can be sent to it."""
    monkeypatch.setattr(limits, "OUTSIDER_UNSENT_BYTES_MAX", -(1 << 20))
    caplog.set_level(logging.INFO, "zpccl.master")
    with zpccl.MasterNode("127.0.0.1:0") as master:
        with raw(master.address) as connection:
            connection.sendall(GREETING)
            with connection.makefile("rb") as reader:
                reader.read(len(GREETING))
            connection.sendall(READY + b"\0\4junk" * 1000)
            assert is_dropped(connection)
        monkeypatch.undo()
        witness = zpccl.Communicator(master.address, listen="127.0.0.1")
        witness.connect()
        witness.close()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("malformed" in text for text in texts) == 1
    assert sum("does not read" in text for text in texts) == 1


RESET_WHILE_NOBODY_READS = """
import socket, struct, sys
import zmq
from zpccl import limits
from zpccl.control.master_loop import open_router

limits.HEARTBEAT_INTERVAL_NS = limits.MS
greeting, ready = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2])
with zmq.Context() as context, open_router(context, 10 * limits.SECOND) as router:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with router.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(greeting)
            connection.recv(len(greeting), socket.MSG_WAITALL)
            connection.sendall(ready + b"\\0\\4junk" * 1000)
            assert router.poll(30000)
        assert monitor.poll(30000), "nobody tells of its end"
        router.disable_monitor()
    count = 0
    while router.poll(0):
        router.recv_multipart()
        count += 1
    print(count)
"""


def test_a_connection_that_is_reset_while_nobody_reads_aborts_nothing() -> None:
    """Heartbeats are due all the time, and nobody reads what it sent: libzmq aborts where it had stopped reading."""
    arguments = [sys.executable, "-c", RESET_WHILE_NOBODY_READS, GREETING.hex(), READY.hex()]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0
