"""L3: the master is killed and started again on its port while peers work; no call fails, and nothing is lost."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Child, MasterProcess, Peer, cluster

pytestmark = pytest.mark.e2e


def train(peer: Peer, is_newcomer: bool) -> dict[str, Any]:
    """A training loop: admits who waits, all-reduces, syncs. Ends when any was told to."""
    weights = np.zeros(50_000, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    digest = hashlib.blake2b()
    is_over, steps, must_sync = False, 0, True
    while not is_over:
        if not is_newcomer and peer.comm.are_peers_pending():
            peer.comm.update_topology()
            must_sync = True
        if must_sync or state.revision % 5 == 0:
            peer.comm.sync_shared_state(state)
            must_sync = is_newcomer = False
        send = np.full(50_000, float(peer.comm.epoch >= 0), np.float32)
        send[0] = 1000.0 * peer.is_told()
        total = peer.comm.all_reduce(send)
        weights[1:] += total[1:]
        state.push_revision()
        digest.update(total.tobytes())
        is_over = bool(total[0] >= 1000.0)
        steps += 1
        if steps % 10 == 1:
            peer.note(steps)
    digest.update(weights.tobytes())
    return {"digest": digest.hexdigest(), "weights": weights[:4].tolist(), "revision": state.revision, "steps": steps}


def restart(run: harness.Cluster) -> None:
    """Kills the master and starts another one in its place."""
    address = run.master.address
    run.master.kill()
    run.master = start(run, address)


def start(run: harness.Cluster, address: str) -> MasterProcess:
    """A master that may take a run over: with the usual grace period, which peers need to come back in."""
    master = MasterProcess(str(run.master.log.parent), "master", "--recovery-grace", "1", bind=address)
    assert master.address == address
    return master


def read_notes(children: list[Child], count: int) -> None:
    """Waits until each has gone on by so many notes."""
    for child in children:
        for _ in range(count):
            child.note()


def test_killed_at_random_moments() -> None:
    """L3, S1, S5: no call fails, no result differs, revisions go on."""
    rng = random.Random(7)
    with cluster() as run:
        members = run.members(4)
        for child in members:
            child.start(train, False)
        for _ in range(6):
            read_notes(members[: rng.randrange(1, 5)], 1)
            restart(run)
        read_notes(members[:1], 1)
        for child in members:
            child.tell()
        results = [child.value() for child in members]
        assert len({result["digest"] for result in results}) == 1
        assert len({result["revision"] for result in results}) == 1
        assert results[0]["steps"] > 10


def test_a_newcomer_is_admitted_by_the_new_master() -> None:
    """L3, L2: a peer that comes while there is no master, or that one has registered and another admits."""
    with cluster() as run:
        members = run.members(2)
        for child in members:
            child.start(train, False)
        newcomer = run.child()
        newcomer.start(harness.connect, run.master.address, name=newcomer.name, n_attempts=100)
        restart(run)
        newcomer.value()
        newcomer.start(train, True)
        read_notes([newcomer], 1)
        restart(run)
        for child in (*members, newcomer):
            child.tell()
        results = [child.value() for child in (*members, newcomer)]
        assert len({tuple(result["weights"]) for result in results}) == 1
        assert len({result["revision"] for result in results}) == 1


def test_epochs_grow_and_the_run_is_the_same() -> None:
    """S3, L3."""
    with cluster() as run:
        members = run.members(3)
        before = [child.call(harness.view) for child in members]
        restart(run)
        for child in members:
            child.start(harness.reduce, np.ones(10, np.float32))
        assert [float(child.value()[0]) for child in members] == [3.0] * 3
        after = [child.call(harness.view) for child in members]
        for old, new in zip(before, after, strict=True):
            assert new[0] > old[0]
            assert new[1:] == old[1:]


def test_calls_wait_while_there_is_no_master() -> None:
    """L3: longer than a peer waits for a peer, shorter than master_timeout."""
    with cluster() as run:
        members = run.members(2)
        address = run.master.address
        run.master.kill()
        for child in members:
            child.start(harness.reduce, np.ones(10, np.float32))
        assert not any(child.is_done() for child in members)
        run.master = start(run, address)
        assert [float(child.value()[0]) for child in members] == [2.0] * 2
