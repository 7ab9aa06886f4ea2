"""Peers of one host send data over Unix-domain sockets. The same promises hold as over TCP, which other tests use."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import LOCAL_PREFIX, Child, Cluster, Peer, all_of, cluster
from e2e.secured import SECRET, write_private

pytestmark = pytest.mark.e2e

ELEMENTS = 1 << 20
KILLS_MAX = 20
"""On a machine where nothing is on time, this many kills may miss the middle of a call."""


def data_families(peer: Peer, master_port: int) -> set[str]:
    """The families of the sockets of its links."""
    found = set()
    for connection, own, other in harness.stream_sockets():
        with connection:
            if connection.family != socket.AF_UNIX:
                found |= {"tcp"} if other[1] != master_port else set()
            elif LOCAL_PREFIX in (own[: len(LOCAL_PREFIX)], other[: len(LOCAL_PREFIX)]):
                found.add("unix")
    return found


def families_of(run: Cluster, members: list[Child]) -> list[set[str]]:
    return all_of(members, data_families, int(run.master.address.rpartition(":")[2]))


def share(peer: Peer, value: float) -> tuple[float, float]:
    """Makes a reduce and a sync. Returns the sum and the shared value."""
    total = peer.comm.all_reduce(np.full(ELEMENTS, value, np.float32))
    weights = np.full(ELEMENTS, value, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    state.revision = 1 if value == 1 else 0
    peer.comm.sync_shared_state(state)
    assert (total == total[0]).all() and (weights == weights[0]).all()
    return float(total[0]), float(weights[0])


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_all_data_goes_over_them(secret: str | None, tmp_path: Path) -> None:
    """S1, S5; with a secret it is encrypted, as over TCP."""
    arguments = ("--secret-file", write_private(tmp_path / "secret", secret)) if secret else ()
    with cluster(*arguments) as run:
        members = run.members(3, local_sockets=True, secret=secret)
        for child, value in zip(members, (1.0, 10.0, 100.0), strict=True):
            child.start(share, value)
        assert [child.value() for child in members] == [(111.0, 1.0)] * 3
        assert families_of(run, members) == [{"unix"}] * 3


def test_whoever_has_none_is_reached_by_tcp() -> None:
    with cluster() as run:
        members = run.members(2, local_sockets=True)
        members.append(run.newcomer(members, local_sockets=False))
        assert harness.sums(members) == [3.0] * 3
        assert families_of(run, members) == [{"unix", "tcp"}, {"unix", "tcp"}, {"tcp"}]


def reduce_in_place(peer: Peer, value: float) -> tuple[float, tuple[str, ...]]:
    """Reduces large tensors in place until a peer is lost. Returns the tensor's value then, and the peers that were
    lost in the call: none, if the loss was between two calls.
    """
    tensor = np.full(8 * ELEMENTS, value, np.float32)
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + tensor.nbytes, "moving")
    while peer.comm.world_size == 3:
        tensor[:] = value
        try:
            peer.comm.all_reduce(tensor, tensor)
        except zpccl.PeerLost as error:
            assert (tensor == tensor[0]).all()
            return float(tensor[0]), error.peers
    return value, ()


def test_a_peer_is_killed() -> None:
    """S2, L1: the others notice at once, without a heartbeat timeout, and have their old tensors."""
    with cluster("--heartbeat-timeout", "120") as run:
        members = run.members(2, local_sockets=True)
        lost: tuple[str, ...] = ()
        for _ in range(KILLS_MAX):
            victim = run.newcomer(members, local_sockets=True)
            for child, value in zip([*members, victim], (1.0, 10.0, 100.0), strict=True):
                child.start(reduce_in_place, value)
            victim.note()
            victim.kill()
            (one, lost), other = [child.value() for child in members]
            assert (one, *other) == (1.0, 10.0, lost)
            if lost:
                break
        assert lost
        assert harness.sums(members) == [2.0] * 2
