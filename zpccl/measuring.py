"""Measures the paths of a group for `optimize_topology`, with all-reduces of dummy data.

Peers report the bytes that each path carried in an all-reduce, and the master plans by these reports
(protocol/plans.py). So the data travels as in training: first in direct exchanges, which use every path, then by the
master's plans. Exchanges grow until one takes long enough to show the rates of the paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from zpccl import limits
from zpccl.errors import CollectiveMismatch, PeerLost, TooFewPeers
from zpccl.types import ReduceOp


def measure_paths(all_reduce: Callable[[np.ndarray, ReduceOp, str], object], world_size: int) -> None:
    """Sends over all paths between the members of a group. All of them must call it.

    If a peer is lost, all others end it; the measurements made so far stay.

    Args:
        all_reduce: reduces a float32 array in place with an algorithm ("auto" or "direct").
        world_size: members of the group.
    """

    def seconds_of(count: int, algorithm: str) -> float:
        """Seconds that an all-reduce of `count` elements takes: the maximum over all peers, so all decide alike."""
        data, begin = np.zeros(count, np.float32), time.monotonic()
        all_reduce(data, ReduceOp.SUM, algorithm)
        took = np.array([time.monotonic() - begin], np.float32)
        all_reduce(took, ReduceOp.MAX, "auto")
        return float(took[0])

    long_s = limits.MEASURING_NS / limits.SECOND
    # A path carries 2 / N of the bytes: enough for two samples. Peers do not report paths for smaller tensors.
    count = max(world_size * limits.RATE_SAMPLE_BYTES, limits.SPEED_TENSOR_BYTES) // 4
    try:
        while seconds_of(count, "direct") < long_s and 16 * count <= limits.MEASURING_BYTES_MAX:
            count *= 4
        for _ in range(limits.MEASURING_PLANS_MAX):
            if seconds_of(count, "auto") >= 2 * long_s:
                break
    except (PeerLost, TooFewPeers, CollectiveMismatch):
        pass  # A peer was lost, and peers may have counted the group with and without it. All others end here, too.
