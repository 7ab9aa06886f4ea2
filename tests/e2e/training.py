"""A training loop for children that survives the loss of others, and reports who took part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import zpccl
from e2e import harness
from e2e.harness import Peer

T = TypeVar("T")

ELEMENTS = 50_000


def train(peer: Peer, is_newcomer: bool = False) -> dict[str, Any]:
    """Admits pending peers, all-reduces, syncs; retries if a peer was lost. Ends when the test has called `tell()` of
    any member.

    Sends a note whenever the number of participants of an all-reduce changes.
    """
    weights = np.full(ELEMENTS, -1.0 if is_newcomer else 0.0, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    failures: list[tuple[str, ...]] = []
    is_over, participants, must_sync = False, 0, is_newcomer
    while not is_over:
        if not is_newcomer and again(failures, peer.comm.are_peers_pending):
            again(failures, peer.comm.update_topology)
            must_sync = True
        if must_sync:
            again(failures, lambda: peer.comm.sync_shared_state(state))
            must_sync = is_newcomer = False
        send = np.ones(ELEMENTS, np.float32)
        send[0] = 1000.0 * peer.is_told()
        total = again(failures, lambda send=send: peer.comm.all_reduce(send))  # type: ignore[misc]
        weights[1:] += total[1:] * np.float32(state.revision % 7)
        state.push_revision()
        is_over = bool(total[0] >= 1000.0)
        if participants != int(total[1]):
            participants = int(total[1])
            peer.note(participants)
    digest = hashlib.blake2b(weights.tobytes()).hexdigest()
    return {"digest": digest, "revision": state.revision, "failures": failures, "view": harness.view(peer)}


def again(failures: list[tuple[str, ...]], call: Callable[[], T]) -> T:
    """Repeats a call until it does not raise PeerLost; appends the names of lost peers to `failures`."""
    while True:
        try:
            return call()
        except zpccl.PeerLost as error:
            failures.append(error.peers)


def train_anew(peer: Peer, address: str, **options: Any) -> dict[str, Any]:
    """Replaces a closed communicator with a new one, joins, and trains."""
    peer.comm.close()
    harness.connect(peer, address, **options)
    return train(peer, is_newcomer=True)


def start_training(run: harness.Cluster, count: int, **options: Any) -> list[harness.Child]:
    """Starts members that train; returns once each has reported that all take part."""
    children = run.members(count, **options)
    for child in children:
        child.start(train)
    assert [child.note() for child in children] == [count] * count
    return children


def lines_of_losses(run: harness.Cluster) -> list[str]:
    """Lines of the master's log about lost or removed members."""
    lines = run.master.log.read_text().splitlines()
    return [line for line in lines if "zpccl.master: member " in line and not line.endswith(" left")]


def end(children: list[harness.Child]) -> list[dict[str, Any]]:
    """Ends the training, and checks that all members hold the same state."""
    children[0].tell()  # The others learn of it from this one.
    results = [child.value() for child in children]
    for key in ("digest", "revision"):
        assert len({result[key] for result in results}) == 1, (key, results)
    return results
