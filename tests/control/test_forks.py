"""Descriptors that a forked child closes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from e2e.harness import HANG_SECONDS

from zpccl.control.forks import Descriptor, closed_in_children
from zpccl.control.inflow import Duplicates


def test_a_number_that_is_another_file_by_now_is_left_alone() -> None:
    """libzmq may close its descriptors at any moment, and the next file gets the same number."""
    number, other = os.open(os.devnull, os.O_RDONLY), os.open("/", os.O_RDONLY)
    one, gone = Descriptor(number), Descriptor(number)
    assert (one.detach(), one.detach()) == (number, -1)
    os.close(number)
    assert Descriptor(number).detach() == -1
    os.dup2(other, number)
    assert gone.detach() == -1
    os.close(number)
    os.close(other)


def test_a_duplicate_of_a_connection_is_closed() -> None:
    """L3: a child may be forked while the master shuts a connection down, or before it learns of it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), HANG_SECONDS) as theirs,
        contextlib.closing(Duplicates()) as duplicates,
    ):
        with closed_in_children(listener.accept()[0]) as ours, duplicates.of(ours.fileno()):
            pid = os.fork()
            while pid == 0:
                signal.pause()
        try:
            assert theirs.recv(1) == b""
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
