"""Both algorithms between processes: equal results, and peers that die in the middle."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.harness import Peer, cluster
from zpccl.types import Algorithm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FORCED = ("ring", "direct")
DTYPES = ("uint8", "int16", "int64", "float16", "float32", "float64")
COUNT = 100_003
LARGE = 24 << 20
"""Elements: 96 MiB, of which only a part is on its way at a time."""


def inputs_of(seed: int, dtype: str) -> np.ndarray[Any, Any]:
    """From 1 to 2, so that no order of adding four of them in an integer or a half overflows."""
    return (np.random.default_rng(seed).random(COUNT) + 1).astype(dtype)


def reduce_all(peer: Peer, seed: int) -> tuple[list[str], set[Algorithm], float]:
    """Every op of some dtypes, quantised and not, with both algorithms: digests, algorithms, the worst difference."""
    digests, used, worst = [], set(), 0.0
    for dtype in DTYPES:
        send = inputs_of(seed, dtype)
        for op in zpccl.ReduceOp:
            for quantisation in list(zpccl.QuantizationAlgorithm) if dtype.startswith("float") else [0]:
                options = zpccl.QuantizationOptions(algorithm=zpccl.QuantizationAlgorithm(quantisation))
                results = []
                for algorithm in FORCED:
                    recv = np.empty_like(send)
                    info = peer.comm.all_reduce(send, recv, op=op, quantization_options=options, algorithm=algorithm)
                    used.add(info.algorithm)
                    digests.append(hashlib.blake2b(recv.tobytes()).hexdigest())
                    results.append(recv.astype(np.float64))
                largest = float(np.abs(results[0]).max())
                worst = max(worst, float(np.abs(results[0] - results[1]).max()) / largest)
    return digests, used, worst


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parity(size: int) -> None:
    """S1: all peers have the same bits, and both algorithms the same sums but for roundings."""
    with cluster() as run:
        children = run.members(size)
        for seed, child in enumerate(children):
            child.start(reduce_all, seed)
        ended = [child.value() for child in children]
    digests, used, worst = ended[0]
    assert all(end[0] == digests for end in ended[1:])
    assert used == {Algorithm.RING, Algorithm.DIRECT}
    assert worst < 0.05


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
