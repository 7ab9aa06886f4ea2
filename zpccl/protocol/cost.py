"""Which algorithm an all-reduce is planned with: a model of its time, and what is learnt about the paths.

    time = hops * latency + bytes that a peer sends / rate

              hops         bytes that a peer sends                       rate
    ring      2 (N - 1)    2 (N - 1) / N of the tensor, as on the wire   of a ring
    direct    2            the same                                      of a direct exchange

Both send as much, so small tensors are exchanged directly, and of large ones it depends on the rates. These differ: a
ring uses N of the paths, each for all the bytes, and sums in the cache; an exchange uses all of them, each for a few
bytes, and sums what has waited in memory. Two peers send each other the same frames either way, and use the ring.

What is quantised is rounded once a hop, so in an exchange fewer times: there it may take longer, by a bounded factor.

Latency and rates are those of limits.py until attempts of the same peers have shown better ones: small tensors show the
latency, large ones the rate of the algorithm that they were reduced with. An algorithm that was not tried yet counts
with its default, so it gets its turn where the other one turns out to be slower than that.

The rate says how large frames are, too. Small ones take more processor time, which matters where the rate is high.
Where it is low, large ones are waited for, each on the one connection that it goes over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zpccl import limits
from zpccl.types import Algorithm


@dataclass(frozen=True, slots=True)
class Speeds:
    """What is known of the paths between the peers of a group; None: nothing yet."""

    latency_ns: int | None = None
    """Of one hop: path, processing, waiting for a processor."""
    ring_bytes_per_second: int | None = None
    """That a peer sends, while a ring moves a large tensor."""
    direct_bytes_per_second: int | None = None
    """The same, while one is exchanged directly."""

    @property
    def hop_ns(self) -> int:
        """The latency, or its default."""
        return limits.HOP_LATENCY_NS if self.latency_ns is None else self.latency_ns

    def rate(self, algorithm: Algorithm) -> int:
        """Bytes per second of an algorithm, or its default."""
        if algorithm is Algorithm.DIRECT:
            known, default = self.direct_bytes_per_second, limits.DIRECT_BYTES_PER_SECOND
        else:
            known, default = self.ring_bytes_per_second, limits.RING_BYTES_PER_SECOND
        return default if known is None else known

    def learn(self, algorithm: Algorithm, peers: int, wire_bytes: int, duration_ns: int) -> Speeds:
        """What is known after an attempt that took so long."""
        latency_ns = hop_count(algorithm, peers) * self.hop_ns
        if wire_bytes <= limits.SMALL_TENSOR_BYTES:
            return replace(self, latency_ns=_blend(self.latency_ns, duration_ns // hop_count(algorithm, peers)))
        if wire_bytes < limits.SPEED_TENSOR_BYTES:
            return self
        # A latency that was measured at a bad moment must not make the rate boundless.
        moving_ns = max(duration_ns - latency_ns, duration_ns // 2, 1)
        rate = sent_bytes(peers, wire_bytes) * limits.SECOND // moving_ns
        if algorithm is Algorithm.DIRECT:
            return replace(self, direct_bytes_per_second=_blend(self.direct_bytes_per_second, rate))
        return replace(self, ring_bytes_per_second=_blend(self.ring_bytes_per_second, rate))


def hop_count(algorithm: Algorithm, peers: int) -> int:
    """Paths that a byte of the slowest chunk takes one after the other."""
    return 2 if algorithm is Algorithm.DIRECT else 2 * (peers - 1)


def sent_bytes(peers: int, wire_bytes: int) -> int:
    """What each peer sends of a tensor that takes `wire_bytes` on the wire."""
    return 2 * (peers - 1) * wire_bytes // peers


def estimate_ns(algorithm: Algorithm, peers: int, wire_bytes: int, speeds: Speeds) -> int:
    """How long an all-reduce takes, in nanoseconds."""
    moving_ns = sent_bytes(peers, wire_bytes) * limits.SECOND // max(1, speeds.rate(algorithm))
    return hop_count(algorithm, peers) * speeds.hop_ns + moving_ns


def choose(peers: int, wire_bytes: int, is_quantised: bool, speeds: Speeds) -> Algorithm:
    """The algorithm for an all-reduce among peers who all reach each other.

    Args:
        peers: that take part.
        wire_bytes: of the whole tensor, as it is sent.
        is_quantised: fewer roundings are worth some time.
        speeds: of the paths between them.
    """
    if peers <= 2:
        return Algorithm.RING
    ring_ns = estimate_ns(Algorithm.RING, peers, wire_bytes, speeds)
    direct_ns = estimate_ns(Algorithm.DIRECT, peers, wire_bytes, speeds)
    if is_quantised:
        ring_ns = ring_ns * limits.QUANTIZED_DIRECT_PERCENT_MAX // 100
    return Algorithm.DIRECT if direct_ns <= ring_ns else Algorithm.RING


def frame_bytes(algorithm: Algorithm, speeds: Speeds) -> int:
    """Tensor bytes of the frames of an attempt: a power of two."""
    wanted = speeds.rate(algorithm) * limits.FRAME_DURATION_NS // limits.SECOND
    rounded = 1 << max(0, wanted.bit_length() - 1)
    return min(max(rounded, limits.SLOW_FRAME_BYTES), limits.FRAME_BYTES_DEFAULT)


def _blend(before: int | None, now: int) -> int:
    """A new measurement counts for a quarter: one that was disturbed does not turn the choice."""
    return max(1, now if before is None else (3 * before + now) // 4)
