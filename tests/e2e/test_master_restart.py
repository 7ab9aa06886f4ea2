"""L3: the master is killed and started again on its port while peers work; no call fails, and nothing is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from e2e import harness
from e2e.harness import cluster, sums
from e2e.restarts import read_notes, restart, start, train

pytestmark = pytest.mark.e2e


@pytest.mark.slow
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
    """L3, L2: a peer comes while there is no master, or one master registers it and the next one admits it."""
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
        assert sums(members) == [3.0] * 3
        after = [child.call(harness.view) for child in members]
        for old, new in zip(before, after, strict=True):
            assert new[0] > old[0]
            assert new[1:] == old[1:]


def test_calls_wait_while_there_is_no_master() -> None:
    """L3: for longer than a peer waits for another peer, but shorter than master_timeout."""
    with cluster() as run:
        members = run.members(2)
        address = run.master.address
        run.master.kill()
        for child in members:
            child.start(harness.reduce, np.ones(10, np.float32))
        assert not any(child.is_done() for child in members)
        run.master = start(run, address)
        assert [float(child.value()[0]) for child in members] == [2.0] * 2
