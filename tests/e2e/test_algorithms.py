"""Both algorithms between processes: peers that die in the middle. Results: engine/test_engine.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.harness import Peer, cluster
from zpccl.types import Algorithm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FORCED = ("ring", "direct")
LARGE = 24 << 20
"""Elements: 96 MiB, of which only a part is on its way at a time."""


def reduce_large(peer: Peer, seed: int, algorithm: str) -> dict[str, Any]:
    """Reduces a large tensor in place until that works. What was seen on the way."""
    array = np.full(LARGE, float(seed), np.float32)
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + (16 << 20), "moving")
    failures = []
    while True:
        try:
            info = peer.comm.all_reduce(array, array, algorithm=algorithm)
        except zpccl.PeerLost as error:
            failures.append((error.peers, bool((array == seed).all())))
        else:
            return {"failures": failures, "value": {float(v) for v in np.unique(array)}, "used": info.algorithm}


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_peer_that_is_killed_in_the_middle(algorithm: str, victim: int) -> None:
    """S1, S2, L1, L2: the buffers of the others are as before; then they go on without it, in the same way."""
    with cluster() as run:
        children = run.members(4)
        for index, child in enumerate(children):
            child.start(reduce_large, 10**index, algorithm)
        dead = children.pop(victim)
        assert dead.note() == "moving"
        dead.kill()
        ended = [child.value() for child in children]
    for end in ended:
        assert end["value"] == {1111.0 - 10**victim}
        assert end["failures"] == [((dead.name,), True)]
        assert end["used"] is Algorithm.parse(algorithm)
