"""The rate of each path while attempts run, from TCP's counters.

A path's rate is the number of bytes acknowledged, divided by the time in which a connection of the link had data to
send or unacknowledged. If there was more to send all that time, this is the capacity of the path; if not, the capacity
is at least this. Small tensors and links within a host give no measurement.

The thread of the peer's loop alone uses a meter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from zpccl import limits
from zpccl.engine.engine import Engine, EngineError, LinkFlow
from zpccl.protocol.messages import PathSample


class RateMeter:
    """Measures the paths of the attempts that run.

    Args:
        engine: the engine whose links are measured.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: dict[int, dict[bytes, LinkFlow]] = {}  # By attempt and peer: the counters at its start.
        self.queued_us: dict[bytes, int] = {}
        """How long packets waited in the queues of the path at the end of the last attempt, by peer."""

    def begin(self, attempt_id: int, peers: Iterable[bytes]) -> None:
        """An attempt on a large tensor begins; `peers` are this peer's neighbours in its plan."""
        self._begun[attempt_id] = {peer: flow for peer in peers if (flow := self._flow(peer)) is not None}

    def end(self, attempt_id: int) -> tuple[PathSample, ...]:
        """An attempt has its result, or has failed. Returns its measurements, once."""
        begun = self._begun.pop(attempt_id, {})
        samples = []
        for peer, before in begun.items():
            after = self._flow(peer)
            sample = measure(peer, before, after)
            if after is not None and sample is not None:
                samples.append(sample)
                self.queued_us[peer] = after.queued_us
        return tuple(samples)

    def forget(self, attempt_id: int) -> None:
        """An attempt has ended without a result, or nobody needs its measurements."""
        self._begun.pop(attempt_id, None)

    def _flow(self, peer: bytes) -> LinkFlow | None:
        with contextlib.suppress(EngineError):  # There is no link, or it was lost.
            return self._engine.link_flow(peer)
        return None


def measure(peer: bytes, before: LinkFlow, after: LinkFlow | None) -> PathSample | None:
    """The difference of two measurements of a link. None: it is another link by now, or too little was sent."""
    if after is None or after.link_id != before.link_id:
        return None
    sent = [new - old for old, new in zip(before.acked_bytes, after.acked_bytes, strict=True)]
    busy = [new - old for old, new in zip(before.busy_us, after.busy_us, strict=True)]
    places = [place for place in range(len(sent)) if sent[place] > 0 and busy[place] > 0]  # Else replaced, or idle.
    total, busy_us = sum(sent[place] for place in places), max((busy[place] for place in places), default=0)
    if total < limits.RATE_SAMPLE_BYTES:
        return None
    limited = sum(sent[place] for place in places if after.is_limited[place])
    return PathSample(peer, total, busy_us, after.round_trip_us or 0, 2 * limited >= total)
