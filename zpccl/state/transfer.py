"""State transfer: one peer's part in one sync.

A `StateTransfer` belongs to the user's thread that called sync_shared_state: that thread runs `run()` and decides what
to request from which source and what to serve next. It takes the messages of other peers from the engine itself. The
peer's loop only puts the plan, lost links and the end into its mailbox. Worker threads verify blocks before they are
sent and after they were received; their results go to the mailbox, too. They have ended when `run()` returns or raises,
so no thread accesses the tensors after that.

A fetcher requests the lists of block digests, verifies each list against the elected digest, and requests the blocks
that differ from its own; `swarm.py` chooses the sources. Received blocks are verified and staged in memory, and written
to the tensors when the sync is committed: all or nothing. Blocks of zeros are recognised by their digest and not sent.
A fetcher serves verified blocks to the other fetchers (as a partial seed); `serving.py` schedules that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from zpccl import limits
from zpccl.engine.engine import Body, Engine, MessageReceived, Writable
from zpccl.engine.mailbox import Mailbox
from zpccl.state.codec import DamagedBlock
from zpccl.state.contents import Arrival, Contents
from zpccl.state.messages import (
    BlockList,
    Have,
    MalformedMessage,
    Request,
    Want,
    decode,
    encode,
    has_blocks,
    in_messages,
    parse_blocks,
    places_in,
    ranges_of,
)
from zpccl.state.regions import Region
from zpccl.state.serving import MemoryChanged, Served, Server, TokenBucket
from zpccl.state.swarm import HAS_NOTHING, LIST, Place, Swarm
from zpccl.state.workers import Workers, despite_interrupts, worker_count
from zpccl.types import DigestKind

logger = logging.getLogger("zpccl.state")

LINK_LOST = "the link to it was lost"
OFFER_ENDED = "its offer has ended"
"""Reason for dropping a source that has done nothing wrong."""

_INLINE_BYTES = 64 * limits.KIB
"""Shorter messages are verified at once, which is faster than passing them to a worker."""


Post: TypeAlias = Callable[[bytes, int, Any, Any, int], bool]
"""Posts (peer, channel, head, body, bound of the queue in bytes). False: the queue is full, Writable follows; OSError:
no link, or the channel is closed."""
Report: TypeAlias = Callable[[int, str, "bytes | None", "tuple[tuple[bytes, str], ...]"], None]
"""Reports (attempt id, error or "", the peer at fault, dropped sources with reasons) to the machine."""


@dataclass(frozen=True)
class _Start:
    attempt_id: int
    sources: tuple[bytes, ...]
    partial_seeds: tuple[bytes, ...]
    fetch: dict[str, bytes]
    begin: float
    engine: Engine | None


@dataclass(frozen=True)
class _LinkLost:
    peer: bytes
    reason: str


@dataclass(frozen=True)
class _Checked:
    """Result of a verification: the right blocks. `wrong` says why others are wrong, `error` what failed locally."""

    peer: bytes
    right: Sequence[Arrival]
    others: Sequence[Arrival] = ()
    wrong: str = ""
    error: Exception | None = None


@dataclass(frozen=True)
class _End:
    commit: bool


_Item: TypeAlias = "_Start | MessageReceived | _LinkLost | Writable | _Checked | Served | _End"


class StateTransfer:
    """One peer's part in one sync.

    Args:
        regions: the shared state by key.
        post: sends messages.
        report: called when the fetch has succeeded or failed, or the memory of this peer has changed.
        kind: kind of the digests.
        own_id: id of this peer.
        upload: the upload limit, or None.
        is_local: True if a peer is on this host.
        on_moved: called in the user's thread with the bytes that have arrived and the bytes known to differ.
        may_differ: keys that may hold any contents unless they are fetched.

    Attributes:
        digests: the digest of each tensor, computed by the constructor.
        own_id: id of this peer.
        mailbox: takes the messages of the channel.
        has_changed: True once a tensor was found to be modified since it was digested.
        is_written: True once the sync was committed and the tensors hold the elected contents.
        tx_bytes, rx_bytes: bytes sent and received.
    """

    def __init__(
        self,
        regions: Mapping[str, Region],
        post: Post,
        report: Report,
        kind: DigestKind = DigestKind.BLAKE3,
        own_id: bytes = b"",
        upload: TokenBucket | None = None,
        is_local: Callable[[bytes], bool] = lambda peer: False,
        on_moved: Callable[[int, int], None] | None = None,
        may_differ: Container[str] = (),
    ) -> None:
        self._contents = Contents(regions, kind)
        self.digests = self._contents.digests
        self._post_message = post
        self._report = report
        self.own_id = own_id
        self._on_moved = on_moved
        self._may_differ = may_differ
        self.mailbox = Mailbox()
        self._plan: _Start | None = None
        self._swarm: Swarm | None = None
        self._is_reported = False
        self.has_changed = False
        self._logged = 0  # Number of dropped sources that were logged.
        self._followers: set[bytes] = set()  # Fetchers that have sent Want.
        self._news: list[Place] = []  # Blocks not announced to them yet.
        self._told_ns = 0
        self._workers = Workers(worker_count())
        self._server = Server(
            self._contents,
            self._post,
            is_local,
            self._workers.submit,
            self.mailbox.put,
            upload,
            jobs_max=2 * self._workers.count,
        )
        self._serve_again_ns: int | None = None
        self._count_lock = threading.Lock()
        self.is_written = False
        self.tx_bytes = 0
        self.rx_bytes = 0

    # --- For the peer's loop ----------------------------------------------------------------------------------------

    def start(
        self,
        attempt_id: int,
        sources: tuple[bytes, ...],
        partial_seeds: tuple[bytes, ...],
        fetch: dict[str, bytes],
        begin: float = 0.0,
        engine: Engine | None = None,
    ) -> None:
        """Begins the transfer that a plan describes.

        Args:
            attempt_id: the channel.
            sources: seeds, best first.
            partial_seeds: the other fetchers.
            fetch: the elected digests of the keys to fetch. Empty: only serve.
            begin: relative start position, from 0 to 1. It differs between fetchers, so that they have more to
                exchange.
            engine: the engine of the channel, unless the mailbox listens to all its channels already.
        """
        self.mailbox.put(_Start(attempt_id, sources, partial_seeds, fetch, begin, engine))

    def lose_link(self, peer: bytes, reason: str = LINK_LOST) -> None:
        """Another peer can no longer be reached, for this reason: its outstanding blocks will not come."""
        self.mailbox.put(_LinkLost(peer, reason))

    def end(self, commit: bool) -> None:
        """The sync is over: `run()` returns, after writing the fetched blocks if `commit`."""
        self.mailbox.put(_End(commit))

    # --- For the thread of the user ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Fetches and serves until the sync is over."""
        items: deque[_Item] = deque()
        try:
            end: _End | None = None
            while end is None:
                items.extend(self._wait())
                end = self._handle_all(items)
                if end is None:
                    self._go_on(time.monotonic_ns())
            if end.commit:
                self._write()
        finally:
            self._workers.close()
            for item in items:  # A kept traceback would keep them, and the engine bounds their bytes.
                if isinstance(item, MessageReceived):
                    item.body.release()
            self._contents.forget()  # For the same reason.
            del self._server  # It refers to this object: the cycle would keep it until garbage collection.

    def _wait(self) -> list[_Item]:
        """Waits for the mailbox or the next deadline; returns the items."""
        now_ns = time.monotonic_ns()
        deadlines = [now_ns + limits.SIGNAL_CHECK_INTERVAL_NS]
        if self._swarm is not None and not self._is_reported:
            deadlines.append(self._swarm.deadline_ns(now_ns) or deadlines[0])
        if self._serve_again_ns is not None:
            deadlines.append(self._serve_again_ns)
        if self._news and self._followers:
            deadlines.append(self._told_ns + limits.STATE_ANNOUNCE_INTERVAL_NS)
        return self.mailbox.take(min(deadlines))

    def _handle_all(self, items: deque[_Item]) -> _End | None:
        """Takes the items and handles them, up to the end of the sync."""
        while items:
            item = items.popleft()
            if isinstance(item, _End):
                return item
            if isinstance(item, _Start):
                self._begin(item)
            elif isinstance(item, MessageReceived):
                self._on_delivery(item.peer, item.body)
            elif isinstance(item, _Checked):
                self._on_checked(item)
            elif isinstance(item, Served):
                self._on_served(item)
            elif isinstance(item, Writable):
                self._server.on_writable()
            else:
                self._server.lose_link(item.peer)
                self._followers.discard(item.peer)
                self._drop(item.peer, item.reason)
        return None

    def _go_on(self, now_ns: int) -> None:
        """Sends requests, announcements and blocks after all items were handled."""
        swarm = self._swarm
        if swarm is not None and not self._is_reported:
            swarm.check(now_ns, self.mailbox.link_bytes)
            self._ask(swarm, now_ns)
            if self._on_moved is not None:
                self._on_moved(swarm.bytes_done, swarm.bytes_expected)
            self._log_dropped(swarm)
            self._finish_fetch(swarm)
        self._announce(now_ns)
        self._serve_again_ns = self._server.pump(now_ns)

    def _write(self) -> None:
        """Writes the fetched blocks completely, even if a signal comes meanwhile: the others have written theirs."""

        def write() -> None:
            self._workers.close()  # First: they may still read the tensors to serve them.
            self._contents.write()
            self.is_written = True

        despite_interrupts(write)

    # --- Messages ---------------------------------------------------------------------------------------------------

    def _post(self, peer: bytes, head: Any, body: Any, queued_max: int = limits.STATE_SEND_QUEUE_BYTES_MAX) -> bool:
        """Posts a message, from any thread."""
        assert self._plan is not None
        if not self._post_message(peer, self._plan.attempt_id, head, body, queued_max):
            return False
        with self._count_lock:
            self.tx_bytes += len(head) + len(body)
        return True

    def _tell(self, peer: bytes, message: Want | Have | Request) -> bool:
        """Posts a message without blocks. False: it cannot be posted."""
        try:
            return self._post(peer, encode(message), b"", limits.DATA_MESSAGES_QUEUED_BYTES_MAX)
        except OSError:
            return False

    def _on_delivery(self, peer: bytes, body: Body) -> None:
        self.rx_bytes += len(body)
        is_kept = False
        try:
            with body.held(), body.view() as view:
                if has_blocks(view):
                    is_kept = self._on_blocks(peer, body, view)
                else:
                    self._on_message(peer, decode(view))
        except MalformedMessage as error:
            self._drop(peer, error.message)
        except OSError:
            pass  # The engine is closed: end() will follow.
        if not is_kept:  # After Ctrl-C a worker may still have it: then the last one that drops it releases it.
            body.release()

    def _on_message(self, peer: bytes, message: Want | Have | Request | BlockList) -> None:
        counts = self._contents.counts
        if isinstance(message, Request):
            self._server.on_request(peer, places_in(message.ranges, counts))
        elif isinstance(message, Want):
            self._on_want(peer)
        elif isinstance(message, BlockList):
            self._on_list(peer, message)
        elif self._swarm is not None:
            named = islice(places_in(message.ranges, counts), sum(counts) + len(counts))
            places = (place for place in named if place[0] in self._contents.wanted)
            self._swarm.on_have(peer, places, is_complete=message.is_complete)

    # --- Fetching ---------------------------------------------------------------------------------------------------

    def _begin(self, plan: _Start) -> None:
        self._plan = plan
        if plan.engine is not None:
            self.mailbox.listen(plan.engine, plan.attempt_id)
        if not plan.fetch:
            return
        self._swarm = Swarm(plan.sources, plan.partial_seeds, plan.begin, time.monotonic_ns())
        self._add(self._swarm, self._contents.want(plan.fetch))
        for peer in plan.partial_seeds:
            if not self._tell(peer, Want()):
                self._drop(peer, "requests cannot be sent to it")

    def _add(self, swarm: Swarm, places: Iterable[Place]) -> None:
        swarm.add((place, self._contents.size_of(place)) for place in places)

    def _ask(self, swarm: Swarm, now_ns: int) -> None:
        for peer, places in swarm.ask(now_ns).items():
            for ranges in in_messages(ranges_of(places)):
                if not self._tell(peer, Request(ranges)):
                    self._drop(peer, "requests cannot be sent to it")
                    break

    def _drop(self, peer: bytes, reason: str) -> None:
        """Drops a source; no effect if the peer is not one."""
        if self._swarm is not None and not self._is_reported:
            self._swarm.drop(peer, reason)

    def _log_dropped(self, swarm: Swarm) -> None:
        for peer, reason in list(swarm.dropped.items())[self._logged :]:
            level = logging.INFO if reason == OFFER_ENDED else logging.WARNING
            logger.log(level, "no longer requesting state from peer %s: %s", peer.hex(), reason)
            self._logged += 1

    def _on_list(self, peer: bytes, message: BlockList) -> None:
        swarm, place = self._swarm, (message.key, LIST)
        if swarm is None or not swarm.on_arrived(peer, place, time.monotonic_ns()):
            return
        places = self._contents.take_list(message.key, message.digests)
        if places is None:
            wrong = f"{self._contents.name_of(place)} that it sent does not match the digest that was elected"
            return swarm.on_checked(peer, place, wrong)
        self._add(swarm, places)
        swarm.on_checked(peer, place)
        missing = set(places)
        self._news += [
            here
            for here in places_in(((*place, 1), (message.key, 0, 2**32 - 1)), self._contents.counts)
            if here not in missing
        ]

    def _on_blocks(self, peer: bytes, body: Body, view: memoryview) -> bool:
        """Starts the verification of the blocks of a message. True: a worker owns the body now."""
        swarm = self._swarm
        if swarm is None or self._is_reported:
            return False
        now_ns = time.monotonic_ns()
        arrivals: list[Arrival] = []
        for place, begin, end in parse_blocks(view):
            if swarm.on_arrived(peer, place, now_ns):
                try:
                    missing = swarm.bytes_expected - swarm.bytes_done
                    arrivals.append(self._contents.expect(place, begin, end, missing))
                except (OSError, MemoryError):
                    self._fail("not enough memory for the fetched state")
                    return False
        if arrivals and len(view) > _INLINE_BYTES:
            self._workers.submit(lambda: self.mailbox.put(self._check_body(peer, body, arrivals)))
            return True
        if arrivals:
            self._on_checked(self._check(peer, view, arrivals))
        return False

    def _check_body(self, peer: bytes, body: Body, arrivals: Sequence[Arrival]) -> _Checked:
        """Runs in a worker: verifies the blocks of a message and releases it."""
        try:
            with body.held(), body.view() as view:
                return self._check(peer, view, arrivals)
        except Exception as error:  # noqa: BLE001 - handed to the user's thread
            return _Checked(peer, (), arrivals, error=error)
        finally:
            body.release()

    def _check(self, peer: bytes, view: memoryview, arrivals: Sequence[Arrival]) -> _Checked:
        for number, arrival in enumerate(arrivals):
            try:
                self._contents.check(arrival, view)
            except DamagedBlock as error:
                wrong = f"{self._contents.name_of(arrival.place)} that it sent is wrong: {error.message}"
                return _Checked(peer, arrivals[:number], arrivals[number:], wrong)
        return _Checked(peer, arrivals)

    def _on_checked(self, result: _Checked) -> None:
        assert self._swarm is not None
        for arrival in result.right:
            self._contents.keep(arrival)
            self._swarm.on_checked(result.peer, arrival.place)
            self._news.append(arrival.place)
        if result.error is not None:
            return self._fail(f"the received blocks cannot be verified: {result.error!r}")
        for arrival in result.others:
            self._swarm.on_checked(result.peer, arrival.place, result.wrong)
        return None

    def _finish_fetch(self, swarm: Swarm) -> None:
        """Reports a fetch that has succeeded or failed."""
        assert self._plan is not None
        dropped = tuple(swarm.dropped.items())
        if swarm.is_done:
            self._is_reported = True
            conflict = self._contents.conflict(self._may_differ)
            self._report(self._plan.attempt_id, conflict, self.own_id if conflict else None, dropped)
        elif swarm.has_failed:
            self._is_reported = True
            fault, reason = dropped[-1] if dropped else (None, HAS_NOTHING)
            if reason == HAS_NOTHING:
                fault, reason = None, "no remaining source has the missing blocks"
            self._report(self._plan.attempt_id, reason, fault, dropped)

    def _fail(self, reason: str) -> None:
        """Reports that this peer's part has failed."""
        assert self._plan is not None
        if not self._is_reported:
            self._is_reported = True
            self._report(self._plan.attempt_id, reason, self.own_id, ())

    # --- Serving ----------------------------------------------------------------------------------------------------

    def _on_served(self, result: Served) -> None:
        assert self._plan is not None
        self._server.on_served(result, time.monotonic_ns())
        if isinstance(result.error, MemoryChanged):
            if self.has_changed:
                return
            self.has_changed = True
            self._report(self._plan.attempt_id, result.error.message, self.own_id, ())
        elif result.error is not None:
            self._fail(f"state cannot be sent: {result.error!r}")

    def _on_want(self, peer: bytes) -> None:
        """Announces all blocks of this peer to a fetcher that has sent Want; new ones follow in _announce()."""
        if self._plan is None or peer in self._followers:  # No plan yet: peers that know of this one ask later.
            return
        if self._swarm is None or self._swarm.is_done:
            self._tell(peer, Have(True, ()))
        elif self._tell_ranges(peer, list(self._contents.here())):
            self._followers.add(peer)

    def _tell_ranges(self, peer: bytes, ranges: Sequence[tuple[int, int, int]]) -> bool:
        return all(self._tell(peer, Have(False, some)) for some in in_messages(ranges))

    def _announce(self, now_ns: int) -> None:
        """Announces new blocks to other fetchers, at most every STATE_ANNOUNCE_INTERVAL."""
        if self._swarm is None or not self._followers:
            self._news = []
        elif self._swarm.is_done:
            for peer in self._followers:
                self._tell(peer, Have(True, ()))
            self._followers = set()
        elif self._news and now_ns - self._told_ns >= limits.STATE_ANNOUNCE_INTERVAL_NS:
            self._told_ns = now_ns
            ranges = ranges_of(sorted(self._news))
            self._news = []
            self._followers = {peer for peer in self._followers if self._tell_ranges(peer, ranges)}
