"""How fast a link carries what one peer serves over it, measured while the link is what the rest waits for. Pure."""

from __future__ import annotations

from zpccl import limits


class LinkRate:
    """The rate of a link.

    Messages are confirmed one by one, and those of several connections at about the same time, so a measurement is of
    some MiB at least. It is given up where nothing is on its way, or coders are behind: that is not the link's doing.

    Attributes:
        bytes_per_second: None while it is not known.
    """

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self._begin: tuple[int, int] | None = None  # When, and what had arrived by then.

    def note(self, arrived_bytes: int, on_its_way_bytes: int, coders_are_behind: bool, now_ns: int) -> None:
        """What the link looks like now.

        Args:
            arrived_bytes: of all that was sent.
            on_its_way_bytes: the rest of it.
            coders_are_behind: blocks wait to be encoded, though the link has room for them.
            now_ns: time.
        """
        if on_its_way_bytes == 0 or coders_are_behind:
            self._begin = None
            return
        if self._begin is None:
            self._begin = (now_ns, arrived_bytes)
            return
        elapsed_ns, size = now_ns - self._begin[0], arrived_bytes - self._begin[1]
        if elapsed_ns >= limits.STATE_RATE_INTERVAL_NS and size >= limits.STATE_RATE_BYTES:
            rate, old = size * limits.SECOND / elapsed_ns, self.bytes_per_second
            self.bytes_per_second = rate if old is None else (old + rate) / 2
            self._begin = (now_ns, arrived_bytes)
