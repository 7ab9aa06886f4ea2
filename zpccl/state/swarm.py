"""Source and block selection of one fetch: pure, without threads, sockets or a clock. The terms are BitTorrent's.

The units are blocks of tensors and lists of block digests (`Place`). A seed (a complete source) has all of them; a
partial seed fetches the same state and has the blocks that it announces.

    waiting ---- ask() ----> asked ---- on_arrived() ----> checking ---- on_checked(right) ----> done
       ^                       |                              |
       +-- its source dropped -+------------------------------+ wrong: its source is dropped

Each source has a request window in bytes: the bytes that it delivers in two of its shortest response times. So long
paths and slow peers are used fully, and a source that dies costs little. All windows together hold what arrives in a
few seconds: behind one slow path, many sources with a block each would all be silent for too long. Seeds are asked for
the rarest blocks first, that is, those that no partial seed has. Fetchers begin at different positions, so that they
soon have much to exchange.
Endgame: when no block is waiting, an idle source is asked for blocks that a slow one has not delivered (at most two
sources per block).

A source is dropped if it sends wrong bytes, or nothing for too long, or its link is lost; the blocks requested from it
wait again. A source that many fetch from needs long for each block: it has more time if its link brings bytes. The
fetch fails when no source is left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from zpccl import limits

Place: TypeAlias = tuple[int, int]
"""Index of a key, and index of one of its blocks, or LIST."""
LIST = -1
"""In place of the index of a block: the list of the digests of all blocks."""

HAS_NOTHING = "it has none of the missing blocks"
"""Reason for dropping a partial seed that waits like its fetcher: neither it nor the link to it is at fault."""

_ASKERS_MAX = 2
_WINDOWS_NS = limits.STATE_SOURCE_TIMEOUT_NS // 2
"""All outstanding requests together should take this time."""
_LOOK_NS = limits.STATE_SOURCE_TIMEOUT_NS // 2
"""Time without a delivery after which it is noted whether anything comes over the link to a source."""
_RATE_INTERVAL_NS = 500 * limits.MS
"""Time constant of the measured rates."""
_GAP_KEPT = 0.9
"""Factor by which the longest gap between deliveries decays with each delivery."""
_GAPS_STUCK = 4
"""A source that is silent for this multiple of that gap counts as stuck."""


@dataclass
class _Source:
    """The state of one source: its blocks, requests and measurements."""

    peer: bytes
    is_complete: bool
    held: set[Place] = field(default_factory=set)  # Blocks announced by a partial seed.
    offered: OrderedDict[Place, None] = field(default_factory=OrderedDict)  # Those that may still be waiting.
    asked: OrderedDict[Place, int] = field(default_factory=OrderedDict)  # Outstanding requests, with their times.
    asked_bytes: int = 0
    moved_ns: int = 0
    """Time of its last delivery, or of the first request after it had no outstanding ones."""
    link_bytes: int | None = None
    """Bytes that its link has brought, when that was last looked at since then; None: not looked at."""
    heard_ns: int = 0
    """Time when that was last found to have grown."""
    latency_ns: int | None = None
    """Its shortest response time."""
    sample_bytes: float = 0.0  # Decaying sums: bytes delivered, time with requests outstanding.
    sample_ns: float = 0.0
    gap_ns: float = 0.0
    """The longest recent gap between deliveries while requests were outstanding; decays."""

    def has(self, place: Place) -> bool:
        return self.is_complete or place in self.held

    @property
    def rate(self) -> float | None:
        """Delivery rate in bytes per second while requests are outstanding; None: not measured yet."""
        return self.sample_bytes * limits.SECOND / max(self.sample_ns, 1.0) if self.sample_bytes else None

    def window_bytes(self) -> int:
        """The request window."""
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
            self.link_bytes = None
        self.asked[place] = now_ns
        self.asked_bytes += size

    def deliver(self, place: Place, size: int, now_ns: int) -> None:
        latency_ns = now_ns - self.asked.pop(place)
        gap_ns = now_ns - self.moved_ns
        self.asked_bytes -= size
        self.moved_ns = now_ns
        self.link_bytes = None
        self.latency_ns = latency_ns if self.latency_ns is None else min(self.latency_ns, latency_ns)
        self.gap_ns = max(self.gap_ns * _GAP_KEPT, gap_ns)
        self.sample_bytes += size
        self.sample_ns += gap_ns
        if self.sample_ns > _RATE_INTERVAL_NS:  # Exponential decay of older samples.
            self.sample_bytes /= 2
            self.sample_ns /= 2

    def look(self, link_bytes: int, now_ns: int) -> None:
        """Notes how many bytes its link has brought."""
        if self.link_bytes is None:
            self.link_bytes = link_bytes
        elif link_bytes - self.link_bytes >= limits.STATE_HEARD_MIN_BYTES:
            self.link_bytes = link_bytes
            self.heard_ns = now_ns

    def owes_ns(self, size: int, now_ns: int) -> int:
        """Expected time until it has delivered `size` outstanding bytes; grows with the silence of a stuck source."""
        silent_ns = now_ns - self.moved_ns
        rate = self.rate
        if rate is None:
            return silent_ns
        return max(int(size * limits.SECOND / rate), silent_ns if silent_ns > _GAPS_STUCK * self.gap_ns else 0)

    def takes_ns(self, size: int) -> int:
        """Expected time for delivering `size` further bytes, after its outstanding ones."""
        rate = self.rate
        if rate is None or self.latency_ns is None:
            return limits.STATE_STEAL_FIRST_NS
        return self.latency_ns + int((self.asked_bytes + size) * limits.SECOND / rate)


class Swarm:
    """One fetch.

    Args:
        sources: the seeds, best first.
        partial_seeds: fetchers of the same state.
        begin: relative start position, from 0 to 1; differs between fetchers.
        now_ns: the time.

    Attributes:
        dropped: the dropped sources, and why.
        bytes_done, bytes_expected: bytes of verified blocks, and of all blocks added so far.
    """

    def __init__(self, sources: Iterable[bytes], partial_seeds: Iterable[bytes], begin: float, now_ns: int) -> None:
        self._sources = {peer: _Source(peer, is_complete=True, moved_ns=now_ns) for peer in sources}
        for peer in partial_seeds:
            self._sources.setdefault(peer, _Source(peer, is_complete=False, moved_ns=now_ns))
        self._begin = begin
        self._moved_ns = now_ns  # Time of the last delivery by any source, or of the last drop.
        self._sizes: dict[Place, int] = {}
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._rare: OrderedDict[Place, None] = OrderedDict()  # Of these, blocks that no partial seed has.
        self._askers: dict[Place, list[bytes]] = {}
        self._checking: set[Place] = set()
        self._open: set[Place] = set()  # Blocks and lists that are not done.
        self._asked_bytes = 0
        self._arrived_bytes = 0
        self._began_ns = now_ns
        self.dropped: dict[bytes, str] = {}
        self.bytes_done = 0
        self.bytes_expected = 0

    @property
    def is_done(self) -> bool:
        """True if all blocks and lists added so far are verified."""
        return not self._open

    @property
    def has_failed(self) -> bool:
        """True if something is missing and no source is left."""
        return bool(self._open) and not self._sources

    def add(self, places: Iterable[tuple[Place, int]]) -> None:
        """Adds blocks and lists to fetch, with their sizes. Each may be added once."""
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

    # --- Events -----------------------------------------------------------------------------------------------------

    def on_have(self, peer: bytes, places: Iterable[Place], *, is_complete: bool = False) -> None:
        """A source announces further blocks."""
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
        """A block or list has arrived. True: it was requested from this peer and must be verified."""
        source = self._sources.get(peer)
        if source is None or place not in source.asked:
            return False
        size = self._sizes[place]
        source.deliver(place, size, now_ns)
        self._asked_bytes -= size
        self._arrived_bytes += size
        self._moved_ns = now_ns
        self._forget(place, peer)
        if place in self._checking or place not in self._open:
            return False
        self._checking.add(place)
        self._waiting.pop(place, None)
        self._rare.pop(place, None)
        return True

    def on_checked(self, peer: bytes, place: Place, wrong: str = "") -> None:
        """A block or list was verified. `wrong` not empty: it failed for this reason, and its source is dropped."""
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
        """Drops a source; its outstanding blocks wait for other sources."""
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
        if not source.is_complete:  # Some of its blocks may be rare now.
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

    # --- Requests ---------------------------------------------------------------------------------------------------

    def ask(self, now_ns: int) -> dict[bytes, list[Place]]:
        """The requests to send now, by source. They count as sent."""
        asks: dict[bytes, list[Place]] = {}
        # Partial seeds first, to relieve the seeds; of each kind, those that owe least: if all together may owe little,
        # none of them must idle while another one owes several blocks.
        turns = deque(sorted(self._sources.values(), key=lambda source: (source.is_complete, source.asked_bytes)))
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
        """Requests blocks for one message from a source. False: nothing more can be requested from it now."""
        size = 0
        for place in self._choose(source, now_ns):
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

    def _has_room(self, source: _Source, size: int, now_ns: int) -> bool:
        usual = self._arrived_bytes * _WINDOWS_NS // max(now_ns - self._began_ns, 1)
        bound = min(max(usual, limits.STATE_IN_FLIGHT_FIRST_BYTES), limits.STATE_IN_FLIGHT_BYTES_MAX)
        return source.has_room(size) and (not self._asked_bytes or self._asked_bytes + size <= bound)

    def _choose(self, source: _Source, now_ns: int) -> Iterator[Place]:
        """Waiting blocks that this source has, while they fit into its window."""
        while True:
            queues = (self._rare, self._waiting) if source.is_complete else (source.offered,)
            queue = next((queue for queue in queues if queue), None)
            if queue is None:
                return
            place = next(iter(queue))
            if place not in self._waiting:  # Requested from another source meanwhile.
                del queue[place]
                continue
            if not self._has_room(source, self._sizes[place], now_ns):
                return
            if not source.is_complete:
                del queue[place]
            yield place

    def _steal(self, source: _Source, now_ns: int) -> Iterator[Place]:
        """Endgame: outstanding blocks that this idle source would deliver much sooner, the latest first."""
        for other in sorted(self._sources.values(), key=lambda other: other.moved_ns):
            left = other.asked_bytes  # Outstanding bytes up to and including a block: it delivers in order.
            for place in reversed(other.asked) if other is not source else ():
                size = self._sizes[place]
                left, its_ns = left - size, other.owes_ns(left, now_ns)
                is_due = place in self._open and place not in self._checking
                if not is_due or len(self._askers[place]) >= _ASKERS_MAX or not source.has(place):
                    continue
                if its_ns <= 2 * source.takes_ns(size) + limits.STATE_STEAL_MARGIN_NS:
                    break
                if not self._has_room(source, size, now_ns):
                    break
                yield place

    def check(self, now_ns: int, link_bytes: Callable[[bytes], int] = lambda peer: 0) -> None:
        """Drops sources that are silent for too long, finally the last one.

        Args:
            now_ns: the time.
            link_bytes: the bytes that the link to a peer has brought so far. While they grow, a block may be on its
                way, however slowly.
        """
        if self.is_done:
            return
        complete = sum(source.is_complete for source in self._sources.values())
        # Of several, the one that is spared is the last to have delivered, or the best if none has.
        best_first = sorted(self._sources.values(), key=lambda source: source.moved_ns, reverse=True)
        for source in reversed(best_first):
            is_last = complete - source.is_complete == 0
            silent_ns = now_ns - source.moved_ns if source.asked else 0
            if silent_ns >= _LOOK_NS and not is_last:
                source.look(link_bytes(source.peer), now_ns)
            is_heard = source.heard_ns > max(source.moved_ns, now_ns - limits.STATE_SOURCE_TIMEOUT_NS)
            if source.asked and silent_ns >= _timeout_ns(is_last or is_heard):
                self.drop(source.peer, "it has sent none of the requested blocks for too long")
                complete -= source.is_complete
                self._moved_ns = now_ns  # The others have not been asked for its blocks yet.
        is_idle = not self._checking and not any(source.asked for source in self._sources.values())
        if is_idle and now_ns - self._moved_ns >= limits.STATE_STALL_TIMEOUT_NS:
            for peer in list(self._sources):
                self.drop(peer, HAS_NOTHING)

    def deadline_ns(self, now_ns: int) -> int | None:
        """When to call check() or ask() without an event; None: not needed."""
        if self.is_done or not self._sources:
            return None
        owing = [source for source in self._sources.values() if source.asked]
        waits_ns = (_LOOK_NS, limits.STATE_SOURCE_TIMEOUT_NS)
        deadlines = [source.moved_ns + wait_ns for source in owing for wait_ns in waits_ns]
        if not owing and not self._checking:
            deadlines = [self._moved_ns + limits.STATE_STALL_TIMEOUT_NS]
        if owing and len(owing) < len(self._sources) and not self._waiting:
            deadlines.append(now_ns + limits.STATE_STEAL_INTERVAL_NS)
        # A deadline in the past belongs to a source that is silent, but not dropped yet.
        return min((d if d > now_ns else now_ns + limits.SECOND for d in deadlines), default=None)


def _timeout_ns(is_spared: bool) -> int:
    return limits.STATE_STALL_TIMEOUT_NS if is_spared else limits.STATE_SOURCE_TIMEOUT_NS
