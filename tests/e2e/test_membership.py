"""Joining, leaving, dying and freezing, as peers and the rest of the run see it."""

from __future__ import annotations

import signal
import socket
import time
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Peer, all_of, cluster, sums, until
from zpccl.errors import Result

pytestmark = pytest.mark.e2e


def ones(count: int = 1000) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


# --- Killed in the middle of a transfer -------------------------------------------------------------------------------


def reduce_and_be_interrupted(peer: Peer, seed: int, count: int, in_place: bool) -> dict[str, Any]:
    """Reduces until a call fails, then again. Returns what happened on the way."""
    peer.kept["input"] = original = np.random.default_rng(seed).standard_normal(count, np.float32)
    send = original.copy()
    recv = send if in_place else np.empty_like(send)
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + (1 << 20), "moving")
    try:
        for tag in range(1000):
            peer.comm.all_reduce(send, recv, op=zpccl.ReduceOp.SUM, tag=tag)
            send[:] = original
    except zpccl.PeerLost as error:
        failed_ns = time.monotonic_ns()
        facts: dict[str, Any] = {
            "failed_ns": failed_ns,
            "result": error.result,
            "restored": bool((send.view(np.uint32) == original.view(np.uint32)).all()),
            "tag": tag,
        }
    peer.comm.all_reduce(send, recv, op=zpccl.ReduceOp.SUM, tag=tag)
    facts["view"] = harness.view(peer)
    facts["attributes"] = harness.attributes(peer)
    facts["sum"] = recv[:: count // 64].copy()
    return facts


@pytest.mark.alone
@pytest.mark.parametrize("in_place", [True, False])
def test_a_peer_killed_in_a_transfer(in_place: bool) -> None:
    """S1, S2, L1, L2: the others' calls fail in about a second, with buffers as before; the next calls succeed."""
    count = 16 << 20
    with cluster() as run:
        children = run.members(4)
        for seed, child in enumerate(children):
            child.start(reduce_and_be_interrupted, seed, count, in_place)
        victim, rest = children[2], children[:2] + children[3:]
        victim.note()
        killed_ns = time.monotonic_ns()
        victim.kill()
        facts = [child.value() for child in rest]
    inputs = [np.random.default_rng(seed).standard_normal(count, np.float32)[:: count // 64] for seed in (0, 1, 3)]
    for fact in facts:
        assert fact["result"] == Result.RANK_CONNECTION_LOST
        assert fact["restored"], "S2"
        assert fact["view"][1] == 3 and fact["attributes"] == (3, 3, 1, 3)
        assert np.array_equal(fact["sum"], facts[0]["sum"]), "S1"
        assert np.allclose(fact["sum"], sum(inputs), rtol=1e-5, atol=1e-5), "L2"
        assert (fact["failed_ns"] - killed_ns) / 1e9 < 3.0, "L1"  # About 1 s on an idle machine.
    assert len({fact["tag"] for fact in facts}) == 1, "S1"


def test_a_peer_that_leaves_is_not_missed() -> None:
    """L2: a graceful leave fails nobody's call, even if the others wait for the leaver's vote."""
    with cluster() as run:
        one, two, three = run.members(3)
        one.start(waiting_reduce)
        two.start(waiting_reduce)
        assert one.note() == two.note() == "calling"
        three.call(harness.close)
        assert [float(child.value()[0]) for child in (one, two)] == [2.0, 2.0]
        assert one.call(harness.attributes) == (2, 2, 1, 2)
        assert "left" in run.master.log.read_text()


def waiting_reduce(peer: Peer, tag: int = 0) -> np.ndarray[Any, Any]:
    """Reduces ones, and sends a note once the call waits."""
    peer.note_when_calling()
    return harness.reduce(peer, ones(), tag=tag)


# --- Silent hosts -----------------------------------------------------------------------------------------------------


def connect_again(peer: Peer) -> int:
    """Connects on the same communicator."""
    peer.comm.connect()
    return peer.comm.world_size


def test_a_silent_host_is_evicted_and_may_come_back() -> None:
    """L1, L2: the others go on within the heartbeat timeout. The silent peer gets an error and can connect again."""
    with cluster("--heartbeat-timeout", "2") as run:
        one, two, three = run.members(3, heartbeat_timeout=2)
        three.freeze()
        assert sums([one, two]) == [2.0, 2.0]
        three.thaw()
        failure = three.fails(reduce_until_it_fails)
        assert failure.kind == "Kicked" and failure.result == Result.MASTER_CONNECTION_FAILED
        assert failure.attributes["reason"]
        for child in (one, two):
            child.start(harness.admit, 3)
        assert three.call(connect_again) == 3
        for child in (one, two):
            child.value()
        assert sums([one, two, three]) == [3.0] * 3


def reduce_until_it_fails(peer: Peer) -> None:
    """Reduces, and repeats the call if a peer was lost."""
    while True:
        try:
            peer.comm.all_reduce(ones())
        except zpccl.PeerLost:
            continue


# --- Joining ----------------------------------------------------------------------------------------------------------


def test_a_joiner_that_dies_while_pending_is_forgotten() -> None:
    """S6, L1: reduces go on, no peer is pending afterwards, and update_topology does not wait for the dead one."""
    with cluster() as run:
        members = run.members(2)
        joiner = run.child()
        joiner.start(harness.connect, run.master.address, name="joiner")
        until(lambda: "joiner registered" in run.master.log.read_text(), "the registration")
        assert all_of(members, is_anyone_pending) == [True, True]
        joiner.kill()
        until(lambda: "pending peer joiner lost" in run.master.log.read_text(), "the loss")
        assert sums(members) == [2.0, 2.0]
        assert all_of(members, is_anyone_pending) == [False, False]
        assert all_of(members, harness.update) == [None, None]


def is_anyone_pending(peer: Peer) -> bool:
    """Asks the run."""
    return peer.comm.are_peers_pending()


# --- Groups -----------------------------------------------------------------------------------------------------------


def test_two_groups_reduce_independently() -> None:
    """Groups have their own sums. There are attributes for the group and for the run."""
    with cluster() as run:
        children = run.members(5, groups=[0, 7, 7, 0, 7])
        assert sums(children) == [2.0, 3.0, 3.0, 2.0, 3.0]
        assert [child.call(harness.attributes) for child in children] == [
            (5, 2, 2, 3),
            (5, 3, 2, 3),
            (5, 3, 2, 3),
            (5, 2, 2, 3),
            (5, 3, 2, 3),
        ]
        views = [child.call(harness.view) for child in children]
        assert len({epoch for epoch, _, _, _ in views}) == 1
        assert sorted(rank for _, _, rank, _ in views) == [0, 0, 1, 1, 2]
        for child, (_, size, rank, members) in zip(children, views, strict=True):
            assert members[rank] == child.name and len(members) == size
        children[1].kill()
        assert sums([children[0], children[3]]) == [2.0, 2.0]


# --- The end of programs and of the master ----------------------------------------------------------------------------


def test_a_peer_that_ends_leaves_gracefully() -> None:
    """L1: a program that ends without close() does not hang, and the run sees it leave."""
    with cluster() as run:
        one, two = run.members(2)
        two.hang_up()
        assert two.join() == 0
        until(lambda: f"{two.name} left" in run.master.log.read_text(), "the leave")
        assert one.fails(harness.reduce, ones()).result == Result.TOO_FEW_PEERS


@pytest.mark.slow
def test_a_killed_master_is_missed_in_time() -> None:
    """L1: calls wait for the master as long as configured; then each of them raises an error that says so."""
    with cluster() as run:
        one, two = run.members(2, master_timeout=1)
        one.start(waiting_reduce)
        assert one.note() == "calling"
        run.master.kill()
        assert one.failure(10).kind == "MasterUnreachable"
        for child in (one, two):
            failure = child.fails(harness.reduce, ones())
            assert failure.kind == "MasterUnreachable"
            assert failure.result == Result.MASTER_CONNECTION_FAILED
            assert failure.attributes["address"] == run.master.address
            child.call(harness.close)
            child.call(harness.close)


def descriptors_and_threads() -> tuple[int, int]:
    import os
    import threading

    return len(os.listdir("/proc/self/fd")), threading.active_count()


def connect_and_close(peer: Peer, address: str, times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Connects and closes again and again. Returns descriptors and threads after the first time and after the last."""
    seen = []
    for _ in range(times):
        with zpccl.Communicator(address):
            pass
        seen.append(descriptors_and_threads())
    return seen[0], min(seen[-3:])


@pytest.mark.slow
def test_connecting_and_closing_leaks_nothing() -> None:
    with cluster() as run:
        child = run.child()
        first, last = child.call(connect_and_close, run.master.address, 20)
        assert last == first
        descriptors = run.master.descriptors()
        child.call(connect_and_close, run.master.address, 20)
        until(lambda: run.master.descriptors() <= descriptors, "the master to close its descriptors")
        run.master.signal(signal.SIGTERM)
        assert run.master.join() == 0


def test_the_port_of_a_dead_peer_is_free_again() -> None:
    """A peer that listens on one fixed port can connect again at once, after close() and after being kicked."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with cluster() as run:
        child = run.child()
        for _ in range(3):
            child.call(harness.connect, run.master.address, listen=f"127.0.0.1:{port}")
            child.call(harness.close)
