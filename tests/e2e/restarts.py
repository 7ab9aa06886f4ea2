"""Masters that are killed and restarted."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import zpccl
from e2e import harness
from e2e.harness import Child, MasterProcess, Peer


def train(peer: Peer, is_newcomer: bool) -> dict[str, Any]:
    """A training loop: admits pending peers, all-reduces, syncs. Ends after the test has called any `tell()`."""
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
    """Kills the master and starts another one at its address."""
    address = run.master.address
    run.master.kill()
    run.master = start(run, address)


def start(run: harness.Cluster, address: str) -> MasterProcess:
    """Starts a master that can take over a run: it has the default grace period for peers to reconnect."""
    master = MasterProcess(str(run.master.log.parent), "master", "--recovery-grace", "1", bind=address)
    assert master.address == address
    return master


def read_notes(children: list[Child], count: int) -> None:
    """Waits until each child has sent `count` more notes."""
    for child in children:
        for _ in range(count):
            child.note()
