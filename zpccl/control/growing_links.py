"""Looks at the links that may grow, while something is moved over any, and asks for the connections that they need.

Belongs to the thread of a peer's loop; owns nothing but what it remembers of links that are open.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from zpccl import limits
from zpccl.control.link_growth import LinkGrowth, Look, Phase
from zpccl.control.links import LinkBroker, NewLink
from zpccl.dataplane.engine import Engine, LinkStats

logger = logging.getLogger("zpccl.links")


@dataclass
class _Growing:
    """A link that is not settled."""

    number: int
    growth: LinkGrowth
    seen: LinkStats | None = None  # When something was moved and it was last looked at.


class GrowingLinks:
    """The links of a peer that it may add connections to.

    Args:
        engine: has the links.
        broker: dials connections.
        name_of: what people call a peer.
    """

    def __init__(
        self,
        engine: Engine,
        broker: LinkBroker,
        name_of: Callable[[bytes], str],
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._name_of = name_of
        self._links: dict[bytes, _Growing] = {}
        self._looked_ns: int | None = None  # None: nothing was being moved.

    def open(self, link: NewLink) -> None:
        """A link is open."""
        if link.round_trip_ns:
            growth = LinkGrowth(len(link.sockets), link.round_trip_ns)
            self._links[link.peer_id] = _Growing(link.number, growth)

    def close(self, peer_id: bytes) -> None:
        """The link to a peer is closed or lost."""
        self._links.pop(peer_id, None)

    @property
    def is_settled(self) -> bool:
        """No link may still grow."""
        return not self._links

    @property
    def deadline_ns(self) -> int | None:
        """When `attend` is to be called at the latest."""
        return None if self._looked_ns is None else self._looked_ns + limits.LINK_GROWTH_LOOK_NS

    def attend(self, now_ns: int, *, is_moving: bool) -> None:
        """Looks at the links if it is time.

        Args:
            now_ns: the time.
            is_moving: an attempt or a sync runs.
        """
        if not is_moving or not self._links:
            self._looked_ns = None
        elif self._looked_ns is None:
            self._looked_ns = now_ns
            for link in self._links.values():
                link.seen = None
        elif now_ns >= self._looked_ns + limits.LINK_GROWTH_LOOK_NS:
            elapsed_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
            for peer_id in list(self._links):
                self._look(peer_id, elapsed_ns)

    def _look(self, peer_id: bytes, elapsed_ns: int) -> None:
        link = self._links[peer_id]
        try:
            state = self._engine.link_state(peer_id)
        except OSError:  # Lost a moment ago: its event is on the way.
            return self.close(peer_id)
        before, link.seen = link.seen, state
        if before is None:
            return
        received = _differences(before.rx_bytes, state.rx_bytes)
        look = Look(
            elapsed_ns,
            tx_bytes=sum(_differences(before.tx_bytes, state.tx_bytes)),
            rx_bytes=sum(received),
            open_count=state.open_count,
            sending_count=state.sending_count,
            receiving_count=sum(count > 0 for count in received),
        )
        first = link.growth.count
        more = link.growth.look(look)
        for index in range(first, first + more):
            self._broker.redial(peer_id, link.number, index, 0)
        if more < 0:
            self._remove(peer_id, link.number, state.link_id, range(first + more, first))
        if link.growth.phase is Phase.SETTLED:
            mbit = link.growth.bits_per_second // 10**6
            logger.info("link to %s: %d connections, %d Mbit/s", self._name_of(peer_id), link.growth.count, mbit)
            self.close(peer_id)

    def _remove(self, peer_id: bytes, number: int, link_id: int, indexes: range) -> None:
        self._broker.stop_dialling(peer_id, number, indexes)
        for index in indexes:
            with contextlib.suppress(OSError):  # It is not open, or lost a moment ago.
                self._engine.remove_connection(peer_id, link_id, index)


def _differences(before: list[int], now: list[int]) -> list[int]:
    """By place in the link; there may be more places now."""
    return [count - earlier for count, earlier in zip(now, before + [0] * (len(now) - len(before)), strict=True)]
