"""All algorithms between processes, with peers that die in the middle. engine/test_engine.py tests the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.harness import Child, Peer, all_of, cluster
from e2e.networks import hosts, wide
from e2e.training import again
from zpccl.types import Algorithm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FORCED = ("ring", "direct")
LARGE = 24 << 20
"""Number of elements: 96 MiB, of which only a part is in flight at a time."""


def reduce_large(peer: Peer, seed: int, algorithm: str) -> dict[str, Any]:
    """Reduces a large tensor in place until that succeeds. Returns what happened on the way."""
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
    """S1, S2, L1, L2: the others get their old buffers back; then they go on without it, with the same algorithm."""
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


# --- Trees ------------------------------------------------------------------------------------------------------------

UNEVEN = (
    *("link 1 2 rate_mbit=200", "link 3 4 rate_mbit=200"),
    *("link 1 3 rate_mbit=100", "link 2 4 rate_mbit=100"),
    *("link 1 4 rate_mbit=20", "link 2 3 rate_mbit=20"),
)


def reduce_until_it_is(peer: Peer, algorithm: str) -> None:
    """All-reduces 8 MiB until the plan uses this algorithm."""
    array = np.ones(2 << 20, np.float32)
    failures: list[tuple[str, ...]] = []
    while again(failures, lambda: peer.comm.all_reduce(array, np.empty_like(array))).algorithm.name != algorithm:
        pass


def kill_in_the_middle(children: list[Child], victim: int) -> Child:
    """All reduce, and one of them dies. Removes it from the list and returns it."""
    for index, child in enumerate(children):
        child.start(reduce_large, 10**index, "auto")
    dead = children.pop(victim)
    assert dead.note() == "moving"
    dead.kill()
    return dead


@pytest.mark.parametrize("victim", range(4))
def test_a_peer_that_dies_while_trees_share_the_tensor(victim: int) -> None:
    """S1, S2, L1, L2: whatever position the peer has in each of the lanes."""
    with wide(5, *UNEVEN) as network, cluster(network=network) as run:
        children = run.members(4)
        all_of(children, reduce_until_it_is, "TREES")
        dead = kill_in_the_middle(children, victim)
        for end in [child.value() for child in children]:
            assert end["value"] == {1111.0 - 10**victim}
            assert end["failures"] == [((dead.name,), True)]


@pytest.mark.parametrize("place", [0, 3])
def test_the_end_of_a_line_of_peers_dies(place: int) -> None:
    """The same in a line of peers: each has links to its neighbours only, and relays the frames of the others."""
    with hosts(5) as network, cluster(network=network) as run:
        children = run.members(4)
        for one, other in ((1, 3), (1, 4), (2, 4)):
            network.cut(one, other)
        all_of(children, reduce_until_it_is, "TREES")
        dead = kill_in_the_middle(children, place)
        for end in [child.value() for child in children]:
            assert end == {
                "value": {1111.0 - 10**place},
                "failures": [((dead.name,), True)],
                "used": Algorithm.TREES,
            }


def test_who_was_heard_by_way_of_a_dead_peer_alone_leaves() -> None:
    """L2, S6: the others go on. The peer that only reached the dead one leaves, and its error says why."""
    with hosts(5) as network, cluster(network=network) as run:
        children = run.members(4)
        for one, other in ((1, 3), (1, 4), (2, 4)):
            network.cut(one, other)
        all_of(children, reduce_until_it_is, "TREES")
        dead = kill_in_the_middle(children, 1)
        alone, *others = children
        failure = alone.failure()
        assert failure.kind == "Kicked" and "no working data connection" in failure.text
        for end in [child.value() for child in others]:
            assert end["value"] == {1100.0} and end["failures"][0] == ((dead.name,), True)
            assert all(restored for _, restored in end["failures"])
