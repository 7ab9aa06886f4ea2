"""Chooses the algorithm of an all-reduce by a cost model, whose latency and rates it learns from attempts.

    time = hops * latency + bytes that a peer sends / rate

              hops         bytes that a peer sends                       rate
    ring      2 (N - 1)    2 (N - 1) / N of the tensor, as on the wire   of a ring
    direct    2            the same                                      of a direct exchange
    one-shot  1            N - 1 tensors, of ONE_SHOT_BYTES_MAX at most  of a direct exchange

Small tensors use the one-shot exchange, unless they are quantised. Ring and direct exchange send the same number of
bytes: for large tensors it depends on the rates. These differ: a ring uses N of the paths, each for all the bytes, and
adds in the cache; an exchange uses all paths, each for a few bytes, and adds data that has waited in memory. With two
peers both send the same frames, and the ring is used.

A quantised tensor is rounded once per hop, thus fewer times in an exchange, which may therefore take longer than the
ring by a bounded factor.

Latency and rates are the defaults of limits.py until attempts of the same peers are measured: small tensors measure the
latency, large ones the rate of their algorithm. An algorithm that has not been tried yet has its default rate, so it is
tried once the other one is slower than that.

The rate also determines the frame size. Small frames take more processor time, which matters at high rates. Large ones
add delay at low rates, because each is sent over a single connection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zpccl import limits
from zpccl.types import Algorithm


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measurements of the paths between the peers of a group; None: not measured yet."""

    latency_ns: int | None = None
    """Latency of one hop: path, processing, waiting for a processor."""
    ring_bytes_per_second: int | None = None
    """Send rate of a peer while a ring moves a large tensor."""
    direct_bytes_per_second: int | None = None
    """Send rate of a peer while a direct exchange moves one."""

    @property
    def hop_ns(self) -> int:
        """The latency, or its default."""
        return limits.HOP_LATENCY_NS if self.latency_ns is None else self.latency_ns

    def rate(self, algorithm: Algorithm) -> int:
        """Rate of an algorithm in bytes per second, or its default."""
        if algorithm is not Algorithm.RING:
            known, default = self.direct_bytes_per_second, limits.DIRECT_BYTES_PER_SECOND
        else:
            known, default = self.ring_bytes_per_second, limits.RING_BYTES_PER_SECOND
        return default if known is None else known

    def learn(self, algorithm: Algorithm, peers: int, wire_bytes: int, duration_ns: int) -> Speeds:
        """The speeds after an attempt of this duration."""
        latency_ns = hop_count(algorithm, peers) * self.hop_ns
        if wire_bytes <= limits.SMALL_TENSOR_BYTES:
            return replace(self, latency_ns=_blend(self.latency_ns, duration_ns // hop_count(algorithm, peers)))
        if wire_bytes < limits.SPEED_TENSOR_BYTES:
            return self
        # A latency that was measured too high must not make the rate unbounded.
        moving_ns = max(duration_ns - latency_ns, duration_ns // 2, 1)
        rate = sent_bytes(algorithm, peers, wire_bytes) * limits.SECOND // moving_ns
        if algorithm is Algorithm.DIRECT:
            return replace(self, direct_bytes_per_second=_blend(self.direct_bytes_per_second, rate))
        return replace(self, ring_bytes_per_second=_blend(self.ring_bytes_per_second, rate))


def hop_count(algorithm: Algorithm, peers: int) -> int:
    """Hops in a row that the slowest chunk takes."""
    return {Algorithm.ONE_SHOT: 1, Algorithm.DIRECT: 2}.get(algorithm, 2 * (peers - 1))


def sent_bytes(algorithm: Algorithm, peers: int, wire_bytes: int) -> int:
    """Bytes that each peer sends for a tensor of `wire_bytes` on the wire."""
    return (peers - 1) * wire_bytes if algorithm is Algorithm.ONE_SHOT else 2 * (peers - 1) * wire_bytes // peers


def estimate_ns(algorithm: Algorithm, peers: int, wire_bytes: int, speeds: Speeds) -> int:
    """Estimated duration of an all-reduce in nanoseconds."""
    moving_ns = sent_bytes(algorithm, peers, wire_bytes) * limits.SECOND // max(1, speeds.rate(algorithm))
    return hop_count(algorithm, peers) * speeds.hop_ns + moving_ns


def choose(peers: int, wire_bytes: int, is_quantised: bool, speeds: Speeds) -> Algorithm:
    """The algorithm for an all-reduce among peers that all have links to each other.

    Args:
        peers: number of participants.
        wire_bytes: size of the whole tensor on the wire.
        is_quantised: fewer roundings are worth some time.
        speeds: of the paths between the peers.
    """
    times_ns = {
        algorithm: estimate_ns(algorithm, peers, wire_bytes, speeds)
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING)
    }
    if is_quantised:
        times_ns[Algorithm.RING] = times_ns[Algorithm.RING] * limits.QUANTIZED_DIRECT_PERCENT_MAX // 100
    if is_quantised or sent_bytes(Algorithm.ONE_SHOT, peers, wire_bytes) > limits.ONE_SHOT_BYTES_MAX:
        del times_ns[Algorithm.ONE_SHOT]
    if peers <= 2:
        del times_ns[Algorithm.DIRECT]
    return min(times_ns, key=times_ns.__getitem__)


def frame_bytes(algorithm: Algorithm, speeds: Speeds) -> int:
    """Tensor bytes per frame of an attempt: a power of two."""
    wanted = speeds.rate(algorithm) * limits.FRAME_DURATION_NS // limits.SECOND
    rounded = 1 << max(0, wanted.bit_length() - 1)
    return min(max(rounded, limits.SLOW_FRAME_BYTES), limits.FRAME_BYTES_DEFAULT)


def _blend(before: int | None, now: int) -> int:
    """Moving average in which a new measurement has weight 1/4: a single outlier does not change the choice."""
    return max(1, now if before is None else (3 * before + now) // 4)
