"""Whom to ask for what: the decisions of one fetch, without threads, sockets or a clock.

What is fetched are places: blocks of tensors, and the lists of their digests. A source that is complete has all of
them; a fellow fetches the same, and has what it announces.

    waiting ---- ask() ----> asked ---- on_arrived() ----> checking ---- on_checked(right) ----> done
       ^                       |                              |
       +-- its source dropped -+------------------------------+ wrong: its source is dropped

A source has a window of bytes that are asked of it: what it delivers in two of its shortest answers, so that neither a
long path nor a slow peer matters, and little is lost with a source that dies. Complete sources are asked for places
first that no fellow has, and fellows who begin at different places soon have much for each other. When nothing is
waiting, a source that is idle is asked for what a slow one owes (at most two are asked for the same).

A source that sends wrong bytes, or nothing for too long, or is lost, is dropped. What it owed waits again. The fetch
has failed when no source is left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from zpccl import limits

Place: TypeAlias = tuple[int, int]
"""Number of a key, and number of one of its blocks, or LIST."""
LIST = -1
"""In place of the number of a block: the digests of all blocks."""

_ASKERS_MAX = 2
_RATE_INTERVAL_NS = 500 * limits.MS
"""Rates are measured over about this time."""
_GAP_KEPT = 0.9
"""Of the longest gap between two deliveries, with each that follows."""
_GAPS_STUCK = 4
"""A source that has been silent for so many times that gap is stuck."""


@dataclass
class _Source:
    """What is known of a source, and what is asked of it."""

    peer: bytes
    is_complete: bool
    held: set[Place] = field(default_factory=set)  # Announced by one that is not complete.
    offered: OrderedDict[Place, None] = field(default_factory=OrderedDict)  # Of these, what may still be waiting.
    asked: OrderedDict[Place, int] = field(default_factory=OrderedDict)  # And when.
    asked_bytes: int = 0
    moved_ns: int = 0
    """When it delivered something, or was asked while it owed nothing."""
    latency_ns: int | None = None
    """How long its quickest answer took."""
    sample_bytes: float = 0.0  # Delivered of late, and in what time while something was owed.
    sample_ns: float = 0.0
    gap_ns: float = 0.0
    """The longest time of late in which nothing came of what it owed."""

    def has(self, place: Place) -> bool:
        return self.is_complete or place in self.held

    @property
    def rate(self) -> float | None:
        """Bytes that it delivers in a second, while it owes some; None: not known yet."""
        return self.sample_bytes * limits.SECOND / max(self.sample_ns, 1.0) if self.sample_bytes else None

    def window_bytes(self) -> int:
        """How much may be asked of it at a time."""
        rate = self.rate
        if rate is None or self.latency_ns is None:
            return limits.STATE_WINDOW_FIRST_BYTES
        wanted = int(rate * (2 * self.latency_ns + limits.STATE_WINDOW_SLACK_NS) / limits.SECOND)
        return min(max(wanted, limits.STATE_WINDOW_MIN_BYTES), limits.STATE_WINDOW_BYTES_MAX)

    def has_room(self, size: int) -> bool:
        if not self.asked:
            return True
        return len(self.asked) < limits.STATE_REQUESTS_IN_FLIGHT_MAX and self.asked_bytes + size <= self.window_bytes()

    def ask(self, place: Place, size: int, now_ns: int) -> None:
        if not self.asked:
            self.moved_ns = now_ns
        self.asked[place] = now_ns
        self.asked_bytes += size

    def deliver(self, place: Place, size: int, now_ns: int) -> None:
        latency_ns = now_ns - self.asked.pop(place)
        gap_ns = now_ns - self.moved_ns
        self.asked_bytes -= size
        self.moved_ns = now_ns
        self.latency_ns = latency_ns if self.latency_ns is None else min(self.latency_ns, latency_ns)
        self.gap_ns = max(self.gap_ns * _GAP_KEPT, gap_ns)
        self.sample_bytes += size
        self.sample_ns += gap_ns
        if self.sample_ns > _RATE_INTERVAL_NS:  # What was before counts for ever less.
            self.sample_bytes /= 2
            self.sample_ns /= 2

    def owes_ns(self, size: int, now_ns: int) -> int:
        """How long it will take to deliver so much of what it owes. Those that are stuck take ever longer."""
        silent_ns = now_ns - self.moved_ns
        rate = self.rate
        if rate is None:
            return silent_ns
        return max(int(size * limits.SECOND / rate), silent_ns if silent_ns > _GAPS_STUCK * self.gap_ns else 0)

    def takes_ns(self, size: int) -> int:
        """How long it would take to deliver so much, beside what it owes."""
        rate = self.rate
        if rate is None or self.latency_ns is None:
            return limits.STATE_STEAL_FIRST_NS
        return self.latency_ns + int((self.asked_bytes + size) * limits.SECOND / rate)


class Swarm:
    """One fetch.

    Args:
        sources: who have all of it, the best first.
        fellows: who fetch it too.
        begin: where to begin, from 0 to 1: fellows begin at different places.
        now_ns: the time, as in all calls that take it.

    Attributes:
        dropped: the sources that were dropped, and why.
        bytes_done, bytes_expected: of blocks that are checked, and of all that are known of.
    """

    def __init__(self, sources: Iterable[bytes], fellows: Iterable[bytes], begin: float, now_ns: int) -> None:
        self._sources = {peer: _Source(peer, is_complete=True, moved_ns=now_ns) for peer in sources}
        for peer in fellows:
            self._sources.setdefault(peer, _Source(peer, is_complete=False, moved_ns=now_ns))
        self._begin = begin
        self._moved_ns = now_ns  # When anybody delivered something, or was given up.
        self._sizes: dict[Place, int] = {}
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._rare: OrderedDict[Place, None] = OrderedDict()  # Of these, what no fellow has.
        self._askers: dict[Place, list[bytes]] = {}
        self._checking: set[Place] = set()
        self._open: set[Place] = set()  # Places that are not done.
        self._asked_bytes = 0
        self.dropped: dict[bytes, str] = {}
        self.bytes_done = 0
        self.bytes_expected = 0

    @property
    def is_done(self) -> bool:
        """Everything that is known of is here and right."""
        return not self._open

    @property
    def has_failed(self) -> bool:
        """Something is missing and nobody is left to ask."""
        return bool(self._open) and not self._sources

    def is_source(self, peer: bytes) -> bool:
        """True for those that are not dropped."""
        return peer in self._sources

    def add(self, places: Iterable[tuple[Place, int]]) -> None:
        """Places to fetch, and their bytes. Each may be added once."""
        added = list(places)
        first = int(len(added) * self._begin) % max(len(added), 1)
        held = [source for source in self._sources.values() if source.held]
        for place, size in added[first:] + added[:first]:
            assert place not in self._sizes, place
            self._sizes[place] = size
            self._open.add(place)
            if place[1] != LIST:
                self.bytes_expected += size
            self._wait(place, held)

    # --- What comes -------------------------------------------------------------------------------------------------

    def on_have(self, peer: bytes, places: Iterable[Place], *, is_complete: bool = False) -> None:
        """A source tells what it has now, beside what it told before."""
        source = self._sources.get(peer)
        if source is None or source.is_complete:
            return
        if is_complete:
            source.is_complete = True
            source.held, source.offered = set(), OrderedDict()
            return
        for place in places:
            if place not in source.held:
                source.held.add(place)
                if place in self._waiting:
                    source.offered[place] = None
                    self._rare.pop(place, None)

    def on_arrived(self, peer: bytes, place: Place, now_ns: int) -> bool:
        """Something came. True: it was asked of this peer and is to be checked."""
        source = self._sources.get(peer)
        if source is None or place not in source.asked:
            return False
        size = self._sizes[place]
        source.deliver(place, size, now_ns)
        self._asked_bytes -= size
        self._moved_ns = now_ns
        self._forget(place, peer)
        if place in self._checking or place not in self._open:
            return False
        self._checking.add(place)
        self._waiting.pop(place, None)
        self._rare.pop(place, None)
        return True

    def on_checked(self, peer: bytes, place: Place, wrong: str = "") -> None:
        """What came of a place is right, or wrong: then it says why, and its source is dropped."""
        self._checking.discard(place)
        if wrong:
            if place not in self._askers:
                self._wait(place, self._incomplete())
            return self.drop(peer, wrong)
        self._open.remove(place)
        if place[1] != LIST:
            self.bytes_done += self._sizes[place]
        return None

    def drop(self, peer: bytes, reason: str) -> None:
        """A source is of no use any more: what it owes is to be asked of others."""
        source = self._sources.pop(peer, None)
        if source is None:
            return
        self.dropped[peer] = reason
        self._asked_bytes -= source.asked_bytes
        held = self._incomplete()
        for place in reversed(source.asked):
            self._forget(place, peer)
            if place not in self._askers and place not in self._checking and place in self._open:
                self._wait(place, held, first=True)
        if not source.is_complete:  # Some of what it had may be with nobody but the complete now.
            for place in source.offered:
                if place in self._waiting and not any(place in other.held for other in held):
                    self._rare[place] = None

    def _incomplete(self) -> list[_Source]:
        return [source for source in self._sources.values() if source.held]

    def _wait(self, place: Place, held: list[_Source], *, first: bool = False) -> None:
        self._waiting[place] = None
        offering = [source for source in held if place in source.held]
        for source in offering:
            source.offered[place] = None
        if not offering:
            self._rare[place] = None
        if first:
            self._waiting.move_to_end(place, last=False)
            if not offering:
                self._rare.move_to_end(place, last=False)

    def _forget(self, place: Place, peer: bytes) -> None:
        askers = self._askers[place]
        askers.remove(peer)
        if not askers:
            del self._askers[place]

    # --- What to do -------------------------------------------------------------------------------------------------

    def ask(self, now_ns: int) -> dict[bytes, list[Place]]:
        """What to ask now, of whom. It counts as asked."""
        asks: dict[bytes, list[Place]] = {}
        # Fellows first, to relieve those that are complete.
        turns = deque(sorted(self._sources.values(), key=lambda source: source.is_complete))
        while turns:
            source = turns.popleft()
            if self._take_turn(source, now_ns, asks):
                turns.append(source)
        if not self._waiting and self._askers:
            for source in self._sources.values():
                if not source.asked:
                    for place in self._steal(source, now_ns):
                        self._note(source, place, now_ns, asks)
        return asks

    def _take_turn(self, source: _Source, now_ns: int, asks: dict[bytes, list[Place]]) -> bool:
        """Asks a source for what may go into one message. False: it is asked for no more now."""
        size = 0
        for place in self._choose(source):
            self._note(source, place, now_ns, asks)
            size += self._sizes[place]
            if size >= limits.STATE_BATCH_BYTES:
                return True
        return False

    def _note(self, source: _Source, place: Place, now_ns: int, asks: dict[bytes, list[Place]]) -> None:
        source.ask(place, self._sizes[place], now_ns)
        self._asked_bytes += self._sizes[place]
        self._waiting.pop(place, None)
        self._rare.pop(place, None)
        self._askers.setdefault(place, []).append(source.peer)
        asks.setdefault(source.peer, []).append(place)

    def _choose(self, source: _Source) -> Iterator[Place]:
        """What waits and this source has, while its window has room."""
        while True:
            queues = (self._rare, self._waiting) if source.is_complete else (source.offered,)
            queue = next((queue for queue in queues if queue), None)
            if queue is None:
                return
            place = next(iter(queue))
            if place not in self._waiting:  # Asked of another meanwhile.
                del queue[place]
                continue
            size = self._sizes[place]
            in_flight = self._asked_bytes + size
            if not source.has_room(size) or (self._asked_bytes and in_flight > limits.STATE_IN_FLIGHT_BYTES_MAX):
                return
            if not source.is_complete:
                del queue[place]
            yield place

    def _steal(self, source: _Source, now_ns: int) -> Iterator[Place]:
        """What an idle source would deliver much sooner than those it is asked of, the latest first."""
        for other in sorted(self._sources.values(), key=lambda other: other.moved_ns):
            left = other.asked_bytes  # Of what it owes, up to and with a place: it delivers in order.
            for place in reversed(other.asked) if other is not source else ():
                size = self._sizes[place]
                left, its_ns = left - size, other.owes_ns(left, now_ns)
                is_due = place in self._open and place not in self._checking
                if not is_due or len(self._askers[place]) >= _ASKERS_MAX or not source.has(place):
                    continue
                if its_ns <= 2 * source.takes_ns(size) + limits.STATE_STEAL_MARGIN_NS or not source.has_room(size):
                    break
                yield place

    def check(self, now_ns: int) -> None:
        """Drops those that have owed something for too long. Gives up when nobody has anything for too long."""
        if self.is_done:
            return
        complete = sum(source.is_complete for source in self._sources.values())
        for source in list(self._sources.values()):
            is_spared = complete - source.is_complete == 0
            if source.asked and now_ns - source.moved_ns >= _timeout_ns(is_spared):
                self.drop(source.peer, "nothing that it was asked for has come for too long")
                self._moved_ns = now_ns  # The others have not been asked for it yet.
        is_idle = not self._checking and not any(source.asked for source in self._sources.values())
        if is_idle and now_ns - self._moved_ns >= limits.STATE_STALL_TIMEOUT_NS:
            for peer in list(self._sources):
                self.drop(peer, "it has nothing of what is missing")

    def deadline_ns(self, now_ns: int) -> int | None:
        """When check(), or ask(), has something to do though nothing has come."""
        if self.is_done or not self._sources:
            return None
        owing = [source for source in self._sources.values() if source.asked]
        deadlines = [source.moved_ns + limits.STATE_SOURCE_TIMEOUT_NS for source in owing]
        if not owing and not self._checking:
            deadlines = [self._moved_ns + limits.STATE_STALL_TIMEOUT_NS]
        if owing and len(owing) < len(self._sources) and not self._waiting:
            deadlines.append(now_ns + limits.STATE_STEAL_INTERVAL_NS)
        # A deadline that has passed is that of a source which is spared, as long as it is the last.
        return min((d if d > now_ns else now_ns + limits.SECOND for d in deadlines), default=None)


def _timeout_ns(is_last: bool) -> int:
    return limits.STATE_STALL_TIMEOUT_NS if is_last else limits.STATE_SOURCE_TIMEOUT_NS
