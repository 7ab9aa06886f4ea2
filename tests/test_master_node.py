"""A master inside a process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from e2e.harness import HANG_SECONDS, loop_of, until

import zpccl
from zpccl.errors import Result
from zpccl.protocol.session import SocketPhase

pytestmark = pytest.mark.e2e


def test_runs_beside_the_program_until_interrupted() -> None:
    master = zpccl.MasterNode("127.0.0.1:0")
    master.interrupt()  # It is not running: nothing to do.
    master.run()
    with zpccl.Communicator(master.address) as comm:
        assert comm.world_size == 1
        with pytest.raises(zpccl.InvalidUsage, match="already"):
            master.run()
    master.interrupt()
    master.interrupt()
    with pytest.raises(zpccl.MasterUnreachable):
        zpccl.Communicator(master.address).connect(1)


def test_a_master_cannot_be_copied() -> None:
    """The end of the copy would wait for the master."""
    with zpccl.MasterNode("127.0.0.1:0", daemon=True) as master:
        for function in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(zpccl.InvalidUsage, match="cannot be pickled or copied"):
                function(master)


def test_a_run_may_begin_anew() -> None:
    """A new run may begin in the same object, at the same address."""
    first = zpccl.MasterNode("127.0.0.1:0")
    for _ in range(2):
        with first, zpccl.Communicator(first.address) as comm:
            assert comm.epoch == 1
    with zpccl.MasterNode(first.address) as second, zpccl.Communicator(first.address) as comm:
        assert comm.epoch == 1 and second.address == first.address


def test_a_port_that_is_taken() -> None:
    with zpccl.MasterNode("127.0.0.1:0") as first:
        second = zpccl.MasterNode(first.address)
        with pytest.raises(zpccl.InvalidUsage, match="in use") as caught:
            second.run()
        assert caught.value.result == Result.INVALID_USAGE
        second.interrupt()


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1", "127.0.0.1:99999", "192.0.2.77:0", None, 5])
def test_bad_addresses(address: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument):
        zpccl.MasterNode(address).run()


def test_dropping_it_waits_for_its_end() -> None:
    master = zpccl.MasterNode("127.0.0.1:0")
    master.run()
    loop = master._loop  # Only this can still end it.
    assert loop is not None
    dropped = threading.Event()

    def drop() -> None:
        nonlocal master
        del master
        gc.collect()
        dropped.set()

    thread = threading.Thread(target=drop)
    thread.start()
    with zpccl.Communicator(loop.address) as comm:  # Meanwhile the run goes on.
        assert comm.world_size == 1 and not dropped.is_set()
    loop.stop()
    assert dropped.wait(HANG_SECONDS)
    thread.join()
    loop.stop()  # Harmless after its end: by now another file may have its descriptor.


def test_stop_after_the_end_writes_nowhere() -> None:
    with zpccl.MasterNode("127.0.0.1:0") as master:
        loop = master._loop  # A signal may come while it ends and the node still has it.
    assert loop is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.stop()
        ours.setblocking(False)
        theirs.setblocking(False)
        for end in (ours, theirs):
            with pytest.raises(BlockingIOError):
                end.recv(1)


PROGRAM = """
import os, signal, sys, threading, zpccl
master = zpccl.MasterNode("127.0.0.1:0")
master.run()
print(master.address, flush=True)
def end():
    sys.stdin.readline()
    master.interrupt()
threading.Thread(target=end).start()
"""


def test_the_process_lives_while_the_master_runs() -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        with zpccl.Communicator(address) as comm:
            assert comm.world_size == 1 and child.poll() is None
        child.communicate("\n", timeout=HANG_SECONDS)
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()


def test_a_daemon_ends_with_its_object() -> None:
    """L1: a thread that collects garbage does not wait for it."""
    before = set(threading.enumerate())
    master = zpccl.MasterNode("127.0.0.1:0", daemon=True)
    master.run()
    (thread,) = set(threading.enumerate()) - before
    del master
    gc.collect()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_a_daemon_ends_with_the_process() -> None:
    program = "import zpccl\nmaster = zpccl.MasterNode('127.0.0.1:0', daemon=True)\nmaster.run()\nprint('end')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_it_leaks_nothing() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with zpccl.MasterNode("127.0.0.1:0"):
        pass
    before, threads = descriptors(), threading.active_count()
    for _ in range(10):
        with zpccl.MasterNode("127.0.0.1:0"):
            pass
    until(lambda: descriptors() <= before and threading.active_count() <= threads)


def is_free(address: str) -> bool:
    """True if nobody listens at the address."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
        return True
    return False


def test_a_forked_child_keeps_neither_port_nor_connections() -> None:
    """L3: for example a DataLoader worker of the master's process. Peers notice its end at once, and it may return."""
    master = zpccl.MasterNode("127.0.0.1:0", metrics="127.0.0.1:0")
    with master as first, zpccl.Communicator(first.address) as comm:
        metrics_address = str(first.metrics_address)
        loop = loop_of(comm)
        pid = os.fork()
        while pid == 0:
            signal.pause()
        try:
            first.interrupt()
            until(lambda: loop._session.phase is not SocketPhase.UP, seconds=5)  # Missed heartbeats would be later.
            until(lambda: is_free(first.address), seconds=5)  # Either process may be the last to close it.
            with zpccl.MasterNode(first.address, metrics=metrics_address):
                until(lambda: loop._machine.is_led)
                assert comm.epoch >= 1
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_who_does_not_vote_is_removed_where_there_is_a_straggler_timeout() -> None:
    """L1: it is alive and silent. The others go on, and its error says why it was removed."""
    with zpccl.MasterNode("127.0.0.1:0", straggler_timeout=1) as master, zpccl.Communicator(master.address) as first:
        second = zpccl.Communicator(master.address, name="hung")
        thread = threading.Thread(target=second.connect)
        thread.start()
        until(first.are_peers_pending, "the second peer registers")

        def is_admitted() -> bool:
            first.update_topology()
            return first.world_size == 2

        until(is_admitted, "the second peer is admitted")
        thread.join(HANG_SECONDS)
        with pytest.raises(zpccl.TooFewPeers):
            first.all_reduce(np.ones(4))
        with pytest.raises(zpccl.Kicked, match="did not vote"):
            second.all_reduce(np.ones(4))
        second.close()


@pytest.mark.parametrize("seconds", [0, 0.9, -1, float("nan"), "5", [1]])
def test_a_straggler_timeout_that_cannot_be_right(seconds: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="straggler_timeout"):
        zpccl.MasterNode("127.0.0.1:0", straggler_timeout=seconds)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", [1]])
def test_a_recovery_grace_that_cannot_be_right(seconds: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="recovery_grace"):
        zpccl.MasterNode("127.0.0.1:0", recovery_grace=seconds)
