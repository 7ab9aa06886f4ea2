"""Checkpoints: a run that lost all members resumes from the newest one; a kill in a save leaves the old one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import zpccl
from e2e.harness import Cluster, Peer, close, cluster

pytestmark = pytest.mark.e2e

ELEMENTS = 400_000
"""More than one piece."""


@pytest.fixture
def run() -> Iterator[Cluster]:
    with cluster() as run:
        yield run


def train(peer: Peer, path: str, steps: int) -> None:
    """Takes steps with the others; saves a checkpoint of each step up to `steps`. Ends when the peer is alone."""
    weights = np.zeros(ELEMENTS, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    while True:
        peer.comm.sync_shared_state(state)
        weights += peer.comm.all_reduce(np.arange(ELEMENTS, dtype=np.float32), op=zpccl.ReduceOp.AVG)
        state.push_revision()
        if state.revision <= steps:
            state.save_state(path)
        if state.revision == steps:
            peer.note(steps)


def resume(peer: Peer, path: str) -> tuple[int, float, float, str]:
    """Loads its checkpoint if valid, and syncs. Returns its revision, two elements, and the error of the load."""
    weights = np.full(ELEMENTS, -1, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    problem = ""
    try:
        state.load_state(path)
    except (zpccl.CheckpointDamaged, zpccl.CheckpointFailed) as error:
        problem = type(error).__name__
    peer.comm.sync_shared_state(state)
    return state.revision, float(weights[1]), float(weights[-1]), problem


def test_the_newest_checkpoint_wins_when_everybody_is_gone(run: Cluster, tmp_path: Path) -> None:
    """S5, L2: four peers start anew. One has an old checkpoint, one a newer, one a damaged newest, and one has none."""
    paths = [str(tmp_path / f"state{index}") for index in range(4)]
    members = run.members(3)
    for member, path, steps in zip(members, paths, (2, 4, 5), strict=False):
        member.start(train, path, steps)
    for member in members:
        member.note()
    for member in members[:2]:
        member.kill()
    assert "PCCLError" in members[2].failure().kinds
    members[2].call(close)  # Not killed: a master that loses all members waits for them.
    damaged = bytearray(Path(paths[2]).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    Path(paths[2]).write_bytes(damaged)

    came = run.members(4)
    for child, path in zip(came, paths, strict=True):
        child.start(resume, path)
    outcomes = [child.value() for child in came]
    assert [outcome[:3] for outcome in outcomes] == [(4, 4.0, 4.0 * (ELEMENTS - 1))] * 4
    assert [outcome[3] for outcome in outcomes] == ["", "", "CheckpointDamaged", "CheckpointFailed"]
    assert "taking the highest revision offered, 4" in run.master.log.read_text()


def save_and_stop_in_the_middle(peer: Peer, path: str) -> None:
    """Saves revision 1, begins to save revision 2, and blocks when a part of it is written."""
    random = np.random.default_rng(0).integers(0, 256, 16 * 2**20, np.uint8)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(random, "x")])
    state.push_revision()
    state.save_state(path)
    random += 1
    state.push_revision()

    def stop(_: zpccl.Progress) -> None:
        partial = Path(path + ".partial")
        if partial.stat().st_size > 2**20:
            peer.note(partial.stat().st_size)
            signal.pause()

    with mock.patch("zpccl.limits.PROGRESS_INTERVAL_NS", 0):  # So that every callback is due.
        state.save_state(path, on_progress=stop)


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_checkpoint(run: Cluster, tmp_path: Path) -> None:
    """The remains of the new checkpoint do not stop a later save."""
    path = tmp_path / "state"
    child = run.child().start(save_and_stop_in_the_middle, str(path))
    assert child.note() > 2**20
    child.kill()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["state", "state.partial"]
    loaded = np.zeros(16 * 2**20, np.uint8)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(loaded, "x")])
    state.load_state(path)
    assert state.revision == 1
    assert np.array_equal(loaded, np.random.default_rng(0).integers(0, 256, 16 * 2**20, np.uint8))
    state.revision = 3
    state.save_state(path)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    state.revision = 0
    state.load_state(path)
    assert state.revision == 3
