"""Ctrl-C in every call that waits: it is prompt, touches nothing afterwards, and harms nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Cluster, Peer, all_of, cluster, sums, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def run() -> Iterator[Cluster]:
    with cluster() as run:
        yield run


def array() -> np.ndarray[Any, Any]:
    return np.arange(1000, dtype=np.float32)


def blocked_reduce(peer: Peer) -> None:
    peer.kept["array"] = send = array()
    peer.note_when_calling()
    peer.comm.all_reduce(send, send, op=zpccl.ReduceOp.SUM)


def blocked_wait(peer: Peer) -> None:
    peer.kept["array"] = send = array()
    handle = peer.comm.all_reduce_async(send, send, op=zpccl.ReduceOp.SUM)
    peer.note_when(lambda: harness.is_waited_for(handle), "waiting")  # The call itself has been made.
    handle.wait()


def blocked_many(peer: Peer) -> None:
    peer.kept["array"] = send = array()
    peer.note_when_calling()
    operand = zpccl.ReduceOperandDescriptor(zpccl.DataType.FLOAT)
    descriptors = [
        zpccl.ReduceOpDescriptor.from_numpy(
            tensor, tensor, zpccl.ReduceDescriptor(1000, zpccl.ReduceOp.SUM, tag, operand)
        )
        for tag, tensor in enumerate([send, array(), array()])
    ]
    peer.comm.all_reduce_multiple_with_retry(descriptors)


def blocked_update(peer: Peer) -> None:
    peer.note_when_calling()
    peer.comm.update_topology()


def blocked_question(peer: Peer) -> None:
    peer.note_when_calling()
    peer.comm.are_peers_pending()


def blocked_sync(peer: Peer) -> None:
    peer.kept["array"] = held = array()
    peer.kept["state"] = state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(held, "x")])
    state.revision = 3
    peer.note_when_calling()
    peer.comm.sync_shared_state(state)


def untouched(peer: Peer) -> bool:
    state = peer.kept.get("state")
    return np.array_equal(peer.kept.get("array", array()), array()) and (state is None or state.revision == 3)


def settled(peer: Peer) -> None:
    """Waits until nothing is left of earlier calls."""
    until(lambda: harness.is_settled(peer.comm), "the end of all calls")


@pytest.mark.parametrize(
    "function", [blocked_reduce, blocked_wait, blocked_many, blocked_update, blocked_question, blocked_sync]
)
def test_a_call_that_waits_for_others(run: Cluster, function: Any) -> None:
    """S2, S4, L1, L2: the vote is withdrawn, and everything works again at once, including the same call."""
    members = run.members(2)
    victim = members[0].start(function)
    victim.note()
    victim.signal(signal.SIGINT)
    assert victim.failure(5).kind == "KeyboardInterrupt"
    assert victim.call(untouched)
    assert sums(members) == [2.0, 2.0]
    assert victim.call(untouched)


def reduce_much(peer: Peer) -> None:
    """Reduces 64 MiB again and again. Sends a note when bytes move."""
    peer.kept["original"] = np.random.default_rng(1).standard_normal(16 << 20, np.float32)
    peer.kept["array"] = send = peer.kept["original"].copy()
    recv = np.empty_like(send)
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + (8 << 20), "moving")
    while True:
        peer.comm.all_reduce(send, recv, op=zpccl.ReduceOp.SUM)


def is_restored(peer: Peer) -> bool:
    return np.array_equal(peer.kept["array"].view(np.uint32), peer.kept["original"].view(np.uint32))


def test_a_reduce_that_moves_bytes(run: Cluster) -> None:
    """S2: everyone's buffers are as before the call. The others get an error that names the peer, and stay."""
    members = run.members(3)
    for child in members:
        child.start(reduce_much)
    members[1].note()
    members[1].signal(signal.SIGINT)
    assert members[1].failure(10).kind == "KeyboardInterrupt"
    assert members[1].call(is_restored)
    for child in (members[0], members[2]):
        failure = child.failure()
        assert failure.kind == "PeerLost" and failure.attributes["peers"] == (members[1].name,)
        assert child.call(is_restored)
    assert sums(members) == [3.0] * 3


def connect_slowly(peer: Peer, address: str, n_attempts: int = 5) -> None:
    peer.comm = zpccl.Communicator(address)
    peer.note_when_calling()
    peer.comm.connect(n_attempts)


def connect_again(peer: Peer) -> int:
    peer.comm.connect()
    return peer.comm.world_size


@pytest.mark.slow
def test_connect_while_pending(run: Cluster) -> None:
    """S6: the master forgets the joiner at once; the same communicator may connect again."""
    members = run.members(2)
    joiner = run.child().start(connect_slowly, run.master.address)
    joiner.note()
    until(lambda: run.master.log.read_text().count(" registered for group") == 3, "its registration")
    joiner.signal(signal.SIGINT)
    assert joiner.failure(5).kind == "KeyboardInterrupt"
    for child in members:
        child.start(harness.update)
    assert [child.value(5) for child in members] == [None, None]
    joiner.start(connect_again)
    assert all_of(members, harness.admit, 3) == [None, None] and joiner.value() == 3
    assert sums([*members, joiner]) == [3.0] * 3


@pytest.mark.slow
def test_connect_while_nobody_listens(run: Cluster) -> None:
    child = run.child().start(connect_slowly, "127.0.0.1:1", 1000)
    child.note()
    child.signal(signal.SIGINT)
    assert child.failure(5).kind == "KeyboardInterrupt"


@pytest.mark.slow
def test_without_a_master_an_interrupted_call_ends(run: Cluster) -> None:
    """L1, L3: no decision of the master arrives. The user has the memory back, and the peer stays a member."""
    members = run.members(2)
    members[0].start(blocked_reduce)
    members[0].note()
    run.master.freeze()
    members[0].signal(signal.SIGINT)
    assert members[0].failure(15).kind == "KeyboardInterrupt"
    assert members[0].call(untouched) and members[0].call(harness.state_of) == "member"
    run.master.thaw()
    members[0].call(settled)
    assert sums(members) == [2.0, 2.0]


PROGRAM = """
import sys
import numpy, zpccl
with zpccl.Communicator(sys.argv[1]) as comm:
    while comm.world_size < 2:
        comm.update_topology()
    print("ready", flush=True)
    x = numpy.ones(5, numpy.float32)
    while True:
        comm.all_reduce(x, tag=int(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_program_ends_as_python_programs_do(run: Cluster) -> None:
    """Its exit status is that of Ctrl-C, it prints nothing but the traceback, and the run sees a graceful leave.

    The other program, left alone, ends with an error that it does not catch. That is a graceful leave too.
    """
    command = [sys.executable, "-W", "error", "-c", PROGRAM, run.master.address]
    programs = [
        subprocess.Popen([*command, str(tag)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for tag in range(2)  # Different tags: both wait for ever.
    ]
    try:
        for program in programs:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
        programs[0].send_signal(signal.SIGINT)
        for program, status, last in zip(
            programs, (-signal.SIGINT, 1), ("KeyboardInterrupt", "TooFewPeers"), strict=True
        ):
            _, errors = program.communicate(timeout=harness.HANG_SECONDS)
            assert program.returncode == status
            assert errors.startswith("Traceback") and last in errors.splitlines()[-1]
            assert errors.count("Traceback") == 1
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    harness.until(lambda: run.master.log.read_text().count(" left") == 2, "both to leave")
