"""Peers that die while others sync, or reduce many tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Peer, cluster
from zpccl.errors import Result

pytestmark = pytest.mark.e2e

MIB = 1 << 20


def sync_until_it_works(peer: Peer, revision: int, seed: int | None) -> dict[str, Any]:
    """Syncs 96 MiB that do not compress; again where a peer was lost. What was seen on the way."""
    count = 96 * MIB
    contents = (
        np.zeros(count, np.uint8) if seed is None else np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    )
    original = contents[:: count // 97].copy()
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(contents, "x")])
    state.revision = revision
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + 8 * MIB, "sending")
    failures = []
    while True:
        try:
            peer.comm.sync_shared_state(state)
        except zpccl.PeerLost as error:
            untouched = bool((contents[:: count // 97] == original).all()) and state.revision == revision
            failures.append((error.result, error.peers, untouched))
        else:
            break
    return {"failures": failures, "revision": state.revision, "contents": contents[:: count // 97].copy()}


def test_a_holder_that_is_killed_while_it_sends() -> None:
    """S5: the sync goes on, and what it still owed comes from another holder."""
    with cluster() as run:
        children = run.members(3)
        ranks = {child.call(harness.view)[2]: child for child in children}
        first, second, receiver = ranks[0], ranks[1], ranks[2]  # The first of the ring sends.
        first.start(sync_until_it_works, 4, 1)
        second.start(sync_until_it_works, 4, 1)
        receiver.start(sync_until_it_works, 0, None)
        assert first.note() == "sending"
        first.kill()
        ended = [child.value() for child in (second, receiver)]
    expected = np.random.default_rng(1).integers(0, 256, 96 * MIB, np.uint8)[:: 96 * MIB // 97]
    for end in ended:
        assert end["revision"] == 4 and np.array_equal(end["contents"], expected)
        assert end["failures"] == []


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
    """S1, L2: each tensor is the sum of all who were there when it was reduced: of four, or of three."""
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


def test_many_reduces_end_when_nobody_is_left() -> None:
    """L1: TOO_FEW_PEERS once the group is down to one."""
    with cluster() as run:
        one, two = run.members(2)
        one.start(reduce_many, 1)
        two.start(reduce_many, 2)
        two.note()
        two.kill()
        assert one.failure().result == Result.TOO_FEW_PEERS
