"""What each path carries while attempts run, as TCP counts it.

A path's rate is what was acknowledged over the time in which a connection of the link had something to send, or to be
acknowledged. If there was more to send all the time, that is what the path can carry; if not, it can carry at least so
much. Small tensors measure nothing, nor do links within a host.

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
        engine: whose links.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: dict[int, dict[bytes, LinkFlow]] = {}  # By attempt and peer: when it began.
        self.queued_us: dict[bytes, int] = {}
        """By peer: how long packets waited in the queues of its path at the end of the last attempt."""

    def begin(self, attempt_id: int, peers: Iterable[bytes]) -> None:
        """An attempt on a large tensor begins, with these peers beside this one in its plan."""
        self._begun[attempt_id] = {peer: flow for peer in peers if (flow := self._flow(peer)) is not None}

    def end(self, attempt_id: int) -> tuple[PathSample, ...]:
        """An attempt has its result, or has failed. Returns what was measured, once."""
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
        """An attempt has ended without a result, or nobody wants to know."""
        self._begun.pop(attempt_id, None)

    def _flow(self, peer: bytes) -> LinkFlow | None:
        with contextlib.suppress(EngineError):  # No link, or none any more.
            return self._engine.link_flow(peer)
        return None


def measure(peer: bytes, before: LinkFlow, after: LinkFlow | None) -> PathSample | None:
    """The difference of two measurements of a link. None: the link is another one, or too little was sent on it."""
    if after is None or after.link_id != before.link_id:
        return None
    sent = [new - old for old, new in zip(before.acked_bytes, after.acked_bytes, strict=True)]
    busy = [new - old for old, new in zip(before.busy_us, after.busy_us, strict=True)]
    places = [place for place in range(len(sent)) if sent[place] > 0 and busy[place] > 0]  # Else it was replaced.
    total, busy_us = sum(sent[place] for place in places), max((busy[place] for place in places), default=0)
    if total < limits.RATE_SAMPLE_BYTES:
        return None
    limited = sum(sent[place] for place in places if after.is_limited[place])
    return PathSample(peer, total, busy_us, after.round_trip_us or 0, 2 * limited >= total)
