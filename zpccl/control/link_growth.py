"""How many connections a far link grows to, by what its transfers measure. Pure: no clock, no sockets.

The round trip alone (connection_count.py) does not tell how many are best: that depends on what the path loses, on the
kernels at both ends and on the path's rate. So the side that dialled a link watches what it carries and tries more:

    WATCH    full windows of time are gathered in which the connections were the bottleneck: all the time most of them
      |  ^   had something to send, or received something. Those in which they were not, because little was sent or
      |  |   because processors or other links held it up, say nothing.
      |  |   after LINK_GROWTH_WINDOW_COUNT of them: more connections are asked for
      v  |
    GROWING  waits until they are open and warm, then compares: at the first window that carries enough more, the next
      |      ones are asked for, or it watches on if the connections are the bottleneck no more
      v      after LINK_GROWTH_TRIES_MAX windows that did not carry more, at the bound, or if they cannot be had
    SETTLED  for as long as the link lives; without the connections that did not help, which only fill the path's queues

Growth is by half of what is there. "Enough more" is a part of what as many connections would carry if none took
anything from the others; so a path that is full is found out at the first step beyond it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zpccl import limits


@dataclass(frozen=True)
class Look:
    """What a link has done since the last look at it; something was being moved by this peer all the while.

    Attributes:
        elapsed_ns: since then.
        tx_bytes: sent since then.
        rx_bytes: received since then.
        open_count: connections that are open now.
        sending_count: those of them that have part of a frame to send now.
        receiving_count: those that received something since then.
    """

    elapsed_ns: int
    tx_bytes: int
    rx_bytes: int
    open_count: int
    sending_count: int
    receiving_count: int


class Phase(enum.Enum):
    """See above."""

    WATCH = enum.auto()
    GROWING = enum.auto()
    SETTLED = enum.auto()


@dataclass
class _Window:
    """Looks at a link, added up."""

    elapsed_ns: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0
    open_count: int = 0
    sending_count: int = 0
    receiving_count: int = 0

    def add(self, look: Look) -> None:
        self.elapsed_ns += look.elapsed_ns
        self.tx_bytes += look.tx_bytes
        self.rx_bytes += look.rx_bytes
        self.open_count += look.open_count
        self.sending_count += look.sending_count
        self.receiving_count += look.receiving_count

    @property
    def bytes_per_second(self) -> int:
        """Both directions."""
        return (self.tx_bytes + self.rx_bytes) * limits.SECOND // max(1, self.elapsed_ns)

    @property
    def is_bottleneck(self) -> bool:
        """Most connections were at work. What is sent tells more of that, unless little is."""
        is_sender = 2 * self.tx_bytes >= self.rx_bytes
        at_work = self.sending_count if is_sender else self.receiving_count
        return self.tx_bytes + self.rx_bytes > 0 and 100 * at_work >= limits.LINK_GROWTH_BUSY_PERCENT * self.open_count


class LinkGrowth:
    """The growth of one link.

    Args:
        count: connections that it begins with.
        round_trip_ns: of its path.
    """

    def __init__(self, count: int, round_trip_ns: int) -> None:
        self.count = count
        """Connections that it has, or will have once those that were asked for are open."""
        self.phase = Phase.WATCH
        self.bits_per_second = 0
        """The most that a window carried so far, in the direction that carried more."""
        self._warm_up_ns = min(limits.LINK_GROWTH_WARM_ROUND_TRIPS_MAX * round_trip_ns, limits.LINK_GROWTH_WARM_MAX_NS)
        self._cold_ns = self._warm_up_ns  # Left until the connections are warm.
        self._awaited_ns = 0  # How long connections that were asked for have not been open.
        self._window = _Window()
        self._rates: list[int] = []  # Of the windows of this phase that count, bytes per second.
        self._rate_wanted = 0  # With those that were added.
        self._added = 0  # Last.

    def look(self, look: Look) -> int:
        """Takes a look into account; returns how many connections are to be added, or, negative, removed now.

        What is added gets the next places of the link, and what is removed are those that were added last.
        """
        if self.phase is Phase.SETTLED:
            return 0
        if look.open_count != self.count:
            return self._wait(look)
        if self._cold_ns > 0:
            self._cold_ns -= look.elapsed_ns
            return 0
        self._awaited_ns = 0
        self._window.add(look)
        if self._window.elapsed_ns < limits.LINK_GROWTH_WINDOW_NS:
            return 0
        window, self._window = self._window, _Window()
        return self._judge(window)

    def _wait(self, look: Look) -> int:
        """Connections are being added, or dialled again: what the others carry meanwhile says nothing."""
        self._window = _Window()
        self._cold_ns = self._warm_up_ns
        self._awaited_ns += look.elapsed_ns
        if self.phase is Phase.GROWING and self._awaited_ns >= limits.LINK_GROWTH_WAIT_NS:
            return self._shrink()
        return 0

    def _judge(self, window: _Window) -> int:
        most = 8 * max(window.tx_bytes, window.rx_bytes) * limits.SECOND // window.elapsed_ns
        self.bits_per_second = max(self.bits_per_second, most)
        is_bottleneck, rate = window.is_bottleneck, window.bytes_per_second
        if self.phase is Phase.GROWING and rate >= self._rate_wanted:
            self._rates = [rate]
            if is_bottleneck:
                return self._grow()
            self.phase = Phase.WATCH
        elif self.phase is Phase.GROWING:
            self._rates.append(rate)
            if len(self._rates) >= limits.LINK_GROWTH_TRIES_MAX:
                return self._shrink()
        elif is_bottleneck:
            self._rates.append(rate)
            if len(self._rates) >= limits.LINK_GROWTH_WINDOW_COUNT:
                return self._grow()
        return 0

    def _grow(self) -> int:
        more = min(max(self.count // 2, 1), limits.LINK_CONNECTIONS_GROWN_MAX - self.count)
        if 100 * more < limits.LINK_GROWTH_STEP_PERCENT * self.count:
            self.phase = Phase.SETTLED
            return 0
        self.phase = Phase.GROWING
        before = max(self._rates)
        self._rate_wanted = before + before * more * limits.LINK_GROWTH_GAIN_PERCENT // (100 * self.count)
        self._rates = []
        self._added = more
        self.count += more
        return more

    def _shrink(self) -> int:
        """What was added last is no help, or cannot be had."""
        self.phase = Phase.SETTLED
        self.count -= self._added
        return -self._added
