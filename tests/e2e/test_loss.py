"""Peers that die while others reduce many tensors. test_state_faults.py has deaths in a sync."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.harness import Peer, cluster, sums
from zpccl.errors import Result

pytestmark = pytest.mark.e2e

MIB = 1 << 20


def reduce_many(peer: Peer, seed: int) -> dict[str, Any]:
    """Reduces 24 tensors of 4 MiB, four at a time."""
    arrays = [np.full(MIB, seed + tag, np.float32) for tag in range(24)]
    operand = zpccl.ReduceOperandDescriptor(zpccl.DataType.FLOAT)
    descriptors = [
        zpccl.ReduceOpDescriptor.from_numpy(array, array, zpccl.ReduceDescriptor(MIB, zpccl.ReduceOp.SUM, tag, operand))
        for tag, array in enumerate(arrays)
    ]
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + 12 * MIB, "moving")
    info = peer.comm.all_reduce_multiple_with_retry(descriptors)
    assert all((array == array[0]).all() for array in arrays)
    return {"size": info.local_world_size, "values": [float(array[0]) for array in arrays]}


def test_many_reduces_go_on_without_a_peer_that_is_killed() -> None:
    """S1, L2: each tensor is the sum of all peers that were members when it was reduced: of four, or of three."""
    with cluster() as run:
        children = run.members(4)
        for seed, child in enumerate((1, 10, 100, 1000)):
            children[seed].start(reduce_many, child)
        children[3].note()
        children[3].kill()
        ended = [child.value() for child in children[:3]]
    assert ended[0] == ended[1] == ended[2]
    assert ended[0]["size"] == 3
    for tag, value in enumerate(ended[0]["values"]):
        assert value in (1111.0 + 4 * tag, 111.0 + 3 * tag)


def fork_worker(peer: Peer) -> int:
    """Forks a child that does nothing, as a DataLoader does. Returns its process id."""
    pid = os.fork()
    while pid == 0:
        signal.pause()
    return pid


@pytest.mark.parametrize("local", [False, True])
def test_a_worker_that_survives_its_trainer_does_not_hide_its_death(local: bool) -> None:
    """L2: the worker has inherited and closed all connections. Missed heartbeats would be too late for this test."""
    with cluster("--heartbeat-timeout", "120") as run:
        members = run.members(3, local_sockets=local)
        worker = members[2].call(fork_worker)
        try:
            members[2].signal(signal.SIGKILL)
            assert sums(members[:2]) == [2.0, 2.0]
        finally:
            os.kill(worker, signal.SIGKILL)


def test_many_reduces_end_when_nobody_is_left() -> None:
    """L1: TOO_FEW_PEERS once the group is down to one."""
    with cluster() as run:
        one, two = run.members(2)
        one.start(reduce_many, 1)
        two.start(reduce_many, 2)
        two.note()
        two.kill()
        assert one.failure().result == Result.TOO_FEW_PEERS
