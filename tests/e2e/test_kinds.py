"""Peers that die in a broadcast, an all-gather, a reduce-scatter or a barrier: real processes, real SIGKILL."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.harness import Child, Peer, cluster
from e2e.restarts import restart
from zpccl.errors import Result

pytestmark = pytest.mark.e2e

COUNT = 4_000_001
"""Elements of 8 bytes: a call takes long enough to be killed in the middle of it."""

Array = np.ndarray[Any, Any]


def input_of(seed: int) -> Array:
    return np.arange(COUNT, dtype=np.int64) * seed


def broadcast(peer: Peer, tensor: Array, is_root: bool) -> dict[str, Any]:
    info = peer.comm.broadcast(tensor, is_root=is_root, tag=4)
    factor = int(tensor[1])
    return {"size": info.local_world_size, "factor": factor, "right": bool((tensor == input_of(factor)).all())}


def all_gather(peer: Peer, tensor: Array, is_root: bool) -> dict[str, Any]:
    result = peer.comm.all_gather(tensor)
    factors = [int(row[1]) for row in result.tensor]
    right = all(bool((row == input_of(factor)).all()) for row, factor in zip(result.tensor, factors, strict=True))
    right = (
        right and result.peer_ids[result.row] == peer.comm.peer_id and bool((result.tensor[result.row] == tensor).all())
    )
    return {"size": len(result.peers), "factor": sum(factors), "right": right}


def reduce_scatter(peer: Peer, tensor: Array, is_root: bool) -> dict[str, Any]:
    result = peer.comm.reduce_scatter(tensor)
    start = result.part.start
    factor, rest = divmod(int(result.tensor[-1]), result.part.stop - 1)
    right = rest == 0 and bool((result.tensor == input_of(factor)[result.part]).all())
    return {"size": len(result.peers), "factor": factor, "right": right, "part": (start, result.part.stop)}


def all_to_all(peer: Peer, tensor: Array, is_root: bool) -> dict[str, Any]:
    size = peer.comm.world_size
    result = peer.comm.all_to_all(tensor[: COUNT // size * size].reshape(size, -1))
    row = slice(result.row * (COUNT // size), (result.row + 1) * (COUNT // size))
    factors = [int(got[1] - got[0]) for got in result.tensor]
    right = all(bool((got == input_of(f)[row]).all()) for got, f in zip(result.tensor, factors, strict=True))
    return {"size": len(result.peers), "factor": sum(factors), "right": right}


def work(peer: Peer, call: Callable[..., dict[str, Any]], seed: int, is_root: bool) -> dict[str, Any]:
    """Repeats a call until a peer is lost, and then with the remaining peers until it succeeds.

    A peer may also be lost between two calls. Then the next call has fewer participants, or lacks its root.
    """
    tensor, size = input_of(seed), peer.comm.world_size
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + (8 << 20), "moving")
    found: dict[str, Any] = {"lost": None}
    try:
        while found.get("size", size) == size:
            tensor[:] = input_of(seed)
            found |= call(peer, tensor, is_root)
            assert found["right"]
    except (zpccl.PeerLost, zpccl.CollectiveMismatch) as error:
        if isinstance(error, zpccl.PeerLost) and error.peers:  # The error names no peer if all had called too late.
            found["lost"] = error.result, error.peers
        assert (tensor == input_of(seed)).all()
    except zpccl.TooFewPeers:
        return found | {"size": 1}
    if found.get("size", size) < size:
        return found
    while True:
        try:
            return found | call(peer, tensor, peer.comm.rank == 0)
        except zpccl.PeerLost as error:
            assert "make new rows" in str(error)  # This peer had not heard of the loss when it made them.
        except zpccl.TooFewPeers:
            return found | {"size": 1}


def run_until_one_dies(
    size: int, call: Callable[..., Any], root: int, victim: int
) -> tuple[list[dict[str, Any]], Child]:
    """Returns the reports of the survivors, and the victim. Seeds are 1, 10, 100, 1000."""
    with cluster() as run:
        children = run.members(size)
        for place, child in enumerate(children):
            child.start(work, call, 10**place, place == root)
        assert children[victim if call is not broadcast else root].note() == "moving"
        children[victim].kill()
        return [child.value() for place, child in enumerate(children) if place != victim], children[victim]


CASES = [
    pytest.param(broadcast, 1, 1, id="broadcast, the root dies"),
    pytest.param(broadcast, 0, 1, id="broadcast, a receiver dies"),
    pytest.param(all_gather, 0, 1, id="all_gather"),
    pytest.param(reduce_scatter, 0, 1, id="reduce_scatter"),
    pytest.param(all_to_all, 0, 1, id="all_to_all"),
]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call, root, victim", CASES)
def test_a_peer_dies_in_the_middle(size: int, call: Callable[..., Any], root: int, victim: int) -> None:
    """S1, S2, L1, L2: the call fails for all survivors and leaves their tensors as before. They go on."""
    ends, dead = run_until_one_dies(size, call, root, victim)
    for end in ends:
        assert end["lost"] in ((Result.RANK_CONNECTION_LOST, (dead.name,)), None)
        assert end["lost"] == ends[0]["lost"]
        assert end["size"] == size - 1
    if size == 2:
        return
    alive = [10**place for place in range(size) if place != victim]
    factors = {end["factor"] for end in ends}
    assert all(end["right"] for end in ends) and len(factors) == 1
    assert factors <= set(alive) if call is broadcast else factors == {sum(alive)}
    if call is reduce_scatter:
        parts = sorted(end["part"] for end in ends)
        assert parts[0][0] == 0 and parts[-1][1] == COUNT
        assert all(one[1] == other[0] for one, other in pairwise(parts))


def pass_barrier(peer: Peer) -> int:
    peer.note_when_calling()
    return peer.comm.barrier().local_world_size


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_barrier_does_not_wait_for_the_dead(size: int) -> None:
    """L1: nobody waits for a peer that is killed, whether or not it had reached the barrier."""
    with cluster() as run:
        children = run.members(size)
        for child in children[1:]:
            child.start(pass_barrier)
            assert child.note() == "calling"
        children[1].kill()
        assert children[0].start(pass_barrier).value() == size - 1
        assert [child.value() for child in children[2:]] == [size - 1] * (size - 2)
        for child in children[2:]:
            child.start(pass_barrier)
        children[0].kill()
        if size == 3:
            assert children[2].failure().result == Result.TOO_FEW_PEERS
        else:
            assert [child.value() for child in children[2:]] == [2, 2]


def test_barriers_go_on_when_the_master_is_started_again() -> None:
    """L3: a peer that waits in a barrier goes on waiting."""
    with cluster() as run:
        one, two = run.members(2)
        one.start(pass_barrier)
        assert one.note() == "calling"
        restart(run)
        assert two.start(pass_barrier).value() == one.value() == 2
