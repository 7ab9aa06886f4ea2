"""Peers behind NATs: a peer that can be dialled works with all others, and a pair that cannot meet stays in the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Child, Cluster, Peer, all_of, cluster
from e2e.nats import nat_hosts
from e2e.secured import SECRET, write_private
from e2e.training import lines_of_losses
from zpccl.engine.engine import Engine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ELEMENTS = 1 << 20


def connect(peer: Peer, address: str, **options: Any) -> float:
    """Connects. Returns the time it took, in seconds."""
    begun = time.monotonic()
    harness.connect(peer, address, **options)
    return time.monotonic() - begun


def join_in_turn(run: Cluster, count: int, **options: Any) -> tuple[list[Child], list[float]]:
    """Starts members one after the other, the first one on host 1. Returns them and the time each took to join."""
    members: list[Child] = []
    seconds = []
    for _ in range(count):
        child = run.child()
        child.start(connect, run.master.address, name=child.name, **options)
        if members:
            all_of(members, harness.admit, len(members) + 1)
        seconds.append(child.value())
        members.append(child)
    return members, seconds


def reduce(peer: Peer, value: float) -> tuple[float, str]:
    """All-reduces. Returns the sum and the algorithm."""
    recv = np.empty(ELEMENTS, np.float32)
    info = peer.comm.all_reduce(np.full(ELEMENTS, value, np.float32), recv)
    assert (recv == recv[0]).all()
    return float(recv[0]), info.algorithm.name


def move(peer: Peer, value: float, is_root: bool) -> tuple[list[float], float, float]:
    """Calls the other collectives. Returns the gathered values, the root's value, and a part of the sum."""
    tensor = np.full(ELEMENTS, value, np.float32)
    rows = peer.comm.all_gather(tensor).tensor
    part = peer.comm.reduce_scatter(tensor).tensor
    peer.comm.broadcast(tensor, is_root=is_root)
    assert (rows == rows[:, :1]).all() and (part == part[0]).all() and (tensor == tensor[0]).all()
    return sorted(rows[:, 0].tolist()), float(tensor[0]), float(part[0])


def swap(peer: Peer, value: float) -> tuple[list[float], str]:
    """Calls all-to-all. Returns one number from each peer, and the algorithm."""
    rows = np.repeat(value + np.arange(3, dtype=np.float32), ELEMENTS).reshape(3, ELEMENTS)
    result = peer.comm.all_to_all(rows)
    assert (result.tensor == result.tensor[:, :1]).all()
    return result.tensor[:, 0].tolist(), result.info.algorithm.name


def place(peer: Peer) -> int:
    """The peer's index in the order of ids."""
    return peer.comm.peer_ids.index(peer.comm.peer_id)


def sync(peer: Peer, value: float) -> float:
    """Syncs a shared state. Returns its value afterwards."""
    weights = np.full(ELEMENTS, value, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    strategy = zpccl.SharedStateSyncStrategy.SEND_ONLY if value else zpccl.SharedStateSyncStrategy.ENFORCE_POPULAR
    peer.comm.sync_shared_state(state, strategy)
    assert (weights == weights[0]).all()
    return float(weights[0])


def connections(peer: Peer) -> list[int]:
    """The number of connections of each of its links."""
    return [len(state.tx_bytes) for state in harness.link_facts(peer.comm, Engine.link_state)]


both_versions = pytest.mark.parametrize("is_ipv6", [False, True], ids=["IPv4", "IPv6"])


@both_versions
@pytest.mark.parametrize("natted", [1, 2])
def test_a_peer_behind_a_nat_and_one_that_can_be_dialled(natted: int, is_ipv6: bool) -> None:
    """L2: whichever of the two registers first."""
    with nat_hosts(3, natted, is_ipv6=is_ipv6) as network, cluster(network=network) as run:
        members, seconds = join_in_turn(run, 2)
        print("joined after", seconds)
        assert [total for total, _ in all_of(members, reduce, 2.0)] == [4.0] * 2
        assert lines_of_losses(run) == []


@both_versions
@pytest.mark.parametrize("is_secret", [False, True], ids=["open", "secret"])
def test_two_peers_behind_nats_that_keep_ports(is_ipv6: bool, is_secret: bool, tmp_path: Path) -> None:
    """L2: they open a connection together."""
    arguments = ("--secret-file", write_private(tmp_path / "secret", SECRET)) if is_secret else ()
    options = {"secret": SECRET} if is_secret else {}
    with (
        nat_hosts(3, 1, 2, is_ipv6=is_ipv6, keeps_ports=True) as network,
        cluster(*arguments, network=network) as run,
    ):
        members, seconds = join_in_turn(run, 2, **options)
        print("joined after", seconds)
        assert [total for total, _ in all_of(members, reduce, 2.0)] == [4.0] * 2
        assert all_of(members, connections) == [[1]] * 2
        assert lines_of_losses(run) == []


@both_versions
@pytest.mark.parametrize("public", [1, 2])
def test_a_pair_that_cannot_meet(public: int, is_ipv6: bool) -> None:
    """L2, S5: the third peer relays all data, and nobody is removed."""
    with nat_hosts(4, *({1, 2, 3} - {public}), is_ipv6=is_ipv6) as network, cluster(network=network) as run:
        members, seconds = join_in_turn(run, 3)
        print("joined after", seconds)
        assert all_of(members, reduce, 2.0) == [(6.0, "TREES")] * 3
        for value, child in enumerate(members):  # Starts with the last one, which does not reach all others.
            child.start(sync, 7.0 if value == 2 else 0.0)
        assert [child.value() for child in members] == [7.0] * 3
        for value, child in enumerate(members):
            child.start(move, float(value), is_root=value == 2)
        assert [child.value() for child in members] == [([0.0, 1.0, 2.0], 2.0, 3.0)] * 3
        places = all_of(members, place)
        for value, child in zip(places, members, strict=True):
            child.start(swap, 10.0 * value)
        assert [child.value() for child in members] == [
            ([value, value + 10.0, value + 20.0], "TREES") for value in places
        ]
        assert all_of(members, reduce, 3.0) == [(9.0, "TREES")] * 3
        assert lines_of_losses(run) == []


@both_versions
def test_a_peer_that_nobody_reaches(is_ipv6: bool) -> None:
    """S6, L2: its error says which addresses were tried. It takes part as soon as a peer comes that both can reach."""
    with nat_hosts(4, 1, 2, is_ipv6=is_ipv6) as network, cluster(network=network) as run:
        (first,), _ = join_in_turn(run, 1)
        second = run.child()
        failure = second.fails(connect, run.master.address, name=second.name)
        assert failure.kind == "PeerUnreachable"
        port = 48149
        assert f"no data connection to {first.name} ({first.name}: no link in 5 s; " in failure.text
        assert f"{network.address(1)}:{port}: no answer in time" in failure.text
        third = run.child()
        for newcomer in (second, third):  # The second one may be admitted with the third one, or after it.
            newcomer.start(harness.join, run.master.address, 3, name=newcomer.name)
        first.call(harness.admit, 3)
        second.value()
        third.value()
        assert all_of([first, second, third], reduce, 2.0) == [(6.0, "TREES")] * 3
        assert lines_of_losses(run) == []
