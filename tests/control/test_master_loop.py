"""The shell of the master: what reaches the machine, and in which order."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

import zpccl
from zpccl.control.master_loop import MasterLoop

WAIT_S = 30


def test_leave_counts_though_the_connection_closed_before_it_was_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both come after the messages were taken and before the master looks at what has closed."""
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
