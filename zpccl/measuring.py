"""Measures the paths of a group for `optimize_topology`, by all-reduces of data that mean nothing.

Peers report what each path carries in an all-reduce, and the master plans by that (protocol/plans.py). So nothing is
sent in another way than in training: first direct exchanges, which use every path, and then what the master plans.
Exchanges grow until one takes long enough to show the rate of paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from zpccl import limits
from zpccl.errors import CollectiveMismatch, PeerLost, TooFewPeers
from zpccl.types import ReduceOp


def measure_paths(all_reduce: Callable[[np.ndarray, ReduceOp, str], object], world_size: int) -> None:
    """Uses all paths between the members of a group. All of them must call it.

    If a peer is lost, all others end it: what they know then is not less than before.

    Args:
        all_reduce: reduces a float32 array in place with an algorithm ("auto" or "direct").
        world_size: members of the group.
    """

    def seconds_of(count: int, algorithm: str) -> float:
        """How long an all-reduce of so many elements takes: of all peers the longest, so that all go on alike."""
        data, begin = np.zeros(count, np.float32), time.monotonic()
        all_reduce(data, ReduceOp.SUM, algorithm)
        took = np.array([time.monotonic() - begin], np.float32)
        all_reduce(took, ReduceOp.MAX, "auto")
        return float(took[0])

    long_s = limits.MEASURING_NS / limits.SECOND
    # A path carries 2 / N of the bytes: enough for two samples. Of smaller tensors peers report nothing.
    count = max(world_size * limits.RATE_SAMPLE_BYTES, limits.SPEED_TENSOR_BYTES) // 4
    try:
        while seconds_of(count, "direct") < long_s and 16 * count <= limits.MEASURING_BYTES_MAX:
            count *= 4
        for _ in range(limits.MEASURING_PLANS_MAX):
            if seconds_of(count, "auto") >= 2 * long_s:
                break
    except (PeerLost, TooFewPeers, CollectiveMismatch):
        pass  # A peer was lost, and its group perhaps was counted with and without it. All others end here, too.
