"""The masters that a peer knows, and to which of them it turns.

A peer is connected to one at a time. It goes on to the next when one does not answer, or when it answers and does not
lead the run for some time. It stays longest at the first, so that all meet there if they can; and each peer for a time
of its own, or two could miss each other for ever.
"""

from __future__ import annotations

import zlib

from zpccl import limits

_NO_ID = bytes(16)


class MasterList:
    """Where a peer stands in its list.

    Args:
        addresses: the masters, the first one first.
        peer_id: of the peer; makes its times its own.

    Attributes:
        index: the master that it is connected to, or tries to reach.
        stay_ns: how long it waits there for that one to lead the run; None if it does, or is not connected.
        go_on_ns: when it turns to the next one; None if nothing speaks for it.
    """

    def __init__(self, addresses: tuple[str, ...], peer_id: bytes) -> None:
        self.addresses = addresses
        self._peer_id = peer_id
        self.index = 0
        self.stay_ns: int | None = None
        self.go_on_ns: int | None = None
        self._failures = 0  # Tries since a master led the run.
        self._without_run: set[int] = set()  # Masters that have said so, since the first one did.
        self._first_run_id = _NO_ID  # Of the run that the first one would begin.
        self._stay_count = 0

    @property
    def has_others(self) -> bool:
        """True if there is another one to turn to."""
        return len(self.addresses) > 1

    @property
    def address(self) -> str:
        """Of the master of the moment."""
        return self.addresses[self.index]

    @property
    def begins(self) -> bytes:
        """The run that a newcomer may begin here, for none of the others leads one; zeros if it may not."""
        is_to_begin = self.index == 0 and len(self._without_run) == len(self.addresses)
        return self._first_run_id if is_to_begin else _NO_ID

    @property
    def is_leaving(self) -> bool:
        """True if it is about to turn to the next one."""
        return self.go_on_ns is not None

    def on_connected(self) -> None:
        """This one answers, so it is heard first."""
        self.go_on_ns = None

    def on_disconnected(self) -> None:
        """Nothing is waited for here."""
        self.stay_ns = None

    def on_led(self) -> None:
        """This one leads the run."""
        self._failures, self.stay_ns, self.go_on_ns = 0, None, None

    def on_no_run(self, run_id: bytes, now_ns: int) -> None:
        """This one leads no run and knows of none; `run_id` is what it would begin."""
        if self.index == 0:
            self._without_run.clear()
            self._first_run_id = run_id
        self._without_run.add(self.index)
        self.fail(now_ns)

    def forget_answers(self) -> None:
        """What masters have said of runs is old."""
        self._without_run.clear()

    def on_no_answer(self) -> None:
        """This one may lead a run, as far as a newcomer knows."""
        self._without_run.discard(self.index)

    def stay(self, now_ns: int) -> None:
        """Begins to wait for this one to lead the run, unless it waits already."""
        if self.has_others and self.stay_ns is None:
            self._stay_count += 1
            time_ns = limits.MASTER_STAY_NS if self.index else limits.MASTER_STAY_FIRST_NS
            salt = zlib.crc32(self._peer_id + self._stay_count.to_bytes(8, "big"))
            self.stay_ns = now_ns + time_ns + salt % limits.MASTER_STAY_SPREAD_NS

    def fail(self, now_ns: int) -> None:
        """Something speaks for the next one: it is turned to soon, or after a pause once all were tried."""
        count = len(self.addresses)
        if self.has_others and self.go_on_ns is None:
            self._failures += 1
            pause_ns = limits.RECONNECT_INTERVAL_NS << min(self._failures // count, 8)
            is_last = self._failures % count == 0
            self.go_on_ns = now_ns + (min(pause_ns, limits.RECONNECT_INTERVAL_MAX_NS) if is_last else 0)

    def is_due(self, now_ns: int) -> bool:
        """True if it is time to turn to the next one."""
        return any(due_ns is not None and now_ns >= due_ns for due_ns in (self.stay_ns, self.go_on_ns))

    def go_on(self) -> int:
        """Turns to the next one: its index."""
        self.stay_ns = self.go_on_ns = None
        self.index = (self.index + 1) % len(self.addresses)
        return self.index

    def clear(self) -> None:
        """Nothing is waited for any more."""
        self.stay_ns = self.go_on_ns = None
