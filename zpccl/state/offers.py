"""Offers: members serve a state while they train, and joiners prefetch it before they are admitted.

They are announced on channel 0, which is open between any two peers with a link:

    joiner                                   member
       |---- ASK ------------------------------->|
       |<--- TOLD: number of the offer, catalog -|    number 0: it offers nothing
       |<==== the channel of that number =======>|    messages of messages.py, as in a sync
       |<--- GONE: the number -------------------|    this offer has ended; there may be another one

Both sides use a `StateTransfer`. The member's transfer only serves, in its own thread; the joiner's runs in the user's
thread that called connect(). Each takes the messages of its channels itself. Only messages on channel 0 pass through
the loop of the peer, which never blocks.

A member serves the tensors themselves until before_write() is called for one of them; from then on it serves a copy of
that one; a block that was read from the tensor meanwhile is read again. If a tensor is modified without before_write(),
its digest no longer matches the offer, and the offer ends.

There is one lock, that of the peer's loop. A signal handler may close the communicator in a thread that holds it:
waiting for the end of the loop, or of the thread that serves, lets go of it. What workers use has no lock.
"""

from __future__ import annotations

import enum
import logging
import mmap
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from zpccl import limits
from zpccl.engine.engine import DIGEST_CHANNEL, FREE_CHANNEL, Body, Engine
from zpccl.errors import InternalError, InvalidArgument, InvalidUsage, PCCLError, public
from zpccl.observe.logs import BoundedLog
from zpccl.state.digests import DIGEST_BYTES
from zpccl.state.regions import Region
from zpccl.state.serving import TokenBucket
from zpccl.state.transfer import LINK_LOST, OFFER_ENDED, StateTransfer
from zpccl.state.workers import End, start_thread, wait_for_end
from zpccl.types import DigestKind

logger = logging.getLogger("zpccl.state")

CHANNEL = 0
"""The channel on which offers are announced."""


class MessageKind(enum.IntEnum):
    """Kinds of messages."""

    ASK = 0
    TOLD = 1
    GONE = 2


_HEAD = struct.Struct(">BQ")
"""Kind of the message, and number of the offer, which is a free channel of the engine."""


class CatalogEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One offered tensor."""

    key: Annotated[str, msgspec.Meta(max_length=limits.KEY_CHARS_MAX)]
    datatype: int
    count: int
    may_differ: bool
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Catalog(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All tensors that a member offers, in order of keys."""

    revision: Annotated[int, msgspec.Meta(ge=0, le=limits.REVISION_MAX)]
    digest_kind: int
    entries: Annotated[tuple[CatalogEntry, ...], msgspec.Meta(min_length=1, max_length=limits.STATE_ENTRIES_MAX)]


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Catalog] = msgspec.msgpack.Decoder(Catalog)


def _say(engine: Engine, peer: bytes, kind: MessageKind, number: int, body: bytes = b"") -> None:
    with suppress(OSError):  # The peer is gone, or the engine is closed.
        engine.post_message(peer, CHANNEL, _HEAD.pack(kind, number), body, limits.DATA_MESSAGES_QUEUED_BYTES_MAX)


def _listen(engine: Engine, transfer: StateTransfer, numbers: Iterable[int]) -> None:
    """Opens the channels of these offers for a transfer."""
    with suppress(OSError):  # The engine is closed: end() will follow.
        for number in numbers:
            engine.open_channel(number, transfer.mailbox.fileno())
            transfer.mailbox.listen(engine, number)


def _close(engine: Engine, numbers: Iterable[int]) -> None:
    with suppress(OSError):  # The engine is closed.
        for number in numbers:
            engine.close_channel(number)


# --- Members ----------------------------------------------------------------------------------------------------------


class CopyPool:
    """Reuses the memory of tensor copies for the next offer. Each step on it is atomic, so there is no lock."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # By size.
        self._is_closed = False

    def take(self, size: int) -> mmap.mmap:
        """Takes memory of `size` bytes: returned memory of exactly this size, or new memory.

        Raises:
            InternalError: the system has no such memory.
        """
        with suppress(KeyError, IndexError):
            return self._free[size].pop()
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            text = f"the system has no {size:,} bytes of memory for the copy of a tensor: {error.strerror}"
            raise InternalError(text) from error
        with suppress(OSError):  # The kernel has no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def give(self, memory: mmap.mmap) -> None:
        """Returns memory that is not used any more."""
        self._free.setdefault(len(memory), []).append(memory)
        if self._is_closed:
            self.clear()

    def trim(self, sizes: Iterable[int]) -> None:
        """Unmaps memory that tensors of these sizes cannot use."""
        wanted = Counter(sizes)
        self._free = {size: free[: wanted[size]] for size, free in self._free.copy().items() if wanted[size]}

    def clear(self) -> None:
        """Unmaps all memory that is not in use."""
        self._free.clear()

    def close(self) -> None:
        """Unmaps all memory that is not in use, and what is returned later."""
        self._is_closed = True
        self.clear()


class LentRegion(Region):
    """An offered tensor: its own memory until `detach`, a copy from then on (copy on write).

    Args:
        region: the tensor.
        pool: provides memory for the copy.
    """

    def __init__(self, region: Region, pool: CopyPool) -> None:
        super().__init__(region.name, region.datatype, region.count)
        self._region = region
        self._pool = pool
        self._copy: dict[str, mmap.mmap] = {}  # One or none.

    def detach(self) -> None:
        """Copies the tensor unless it has been copied; when this returns, the tensor may be written."""
        if not self._copy:
            memory = self._copied()
            if self._copy.setdefault("", memory) is not memory:
                self._pool.give(memory)  # Another thread was faster.

    def _copied(self) -> mmap.mmap:
        memory = self._pool.take(self.nbytes)
        target = np.frombuffer(memory, np.uint8)
        begin = 0
        for piece in self._region.pieces(0, self.nbytes, limits.STATE_STAGING_BYTES):
            np.copyto(target[begin : begin + len(piece)], np.frombuffer(piece, np.uint8))  # Releases the GIL.
            begin += len(piece)
        return memory

    def give_back(self) -> None:
        """Returns the memory of the copy to the pool; the region must not be read any more."""
        while self._copy:
            self._pool.give(self._copy.popitem()[1])

    def read(self, offset: int, size: int) -> memoryview:
        """While the tensor itself is offered this returns a copy, since the user may write the tensor a moment
        later."""
        if not self._copy:
            block = bytes(self._region.read(offset, size))
            if not self._copy:  # Otherwise the user may have written some of it meanwhile.
                return memoryview(block)
        return memoryview(self._copy[""])[offset : offset + size]

    def write(self, offset: int, data: Any) -> None:
        """Never called: an offer is not written."""
        raise AssertionError("an offer is never written to")

    def address_range(self) -> tuple[str, int, int]:
        """The memory range of the tensor, not of the copy."""
        return self._region.address_range()


class Offer:
    """A state that this peer offers to joiners, made by `Communicator.offer_state`. The next offer replaces it.

    Attributes:
        revision: revision of the state.
        error: why the offer has ended, if nobody has ended it: for example, the offered memory was modified without
            `before_write`; else "".
    """

    def __init__(
        self,
        number: int,
        revision: int,
        regions: Mapping[str, LentRegion],
        may_differ: Collection[str],
        kind: DigestKind,
        engine: Engine,
        upload: TokenBucket | None,
        lock: threading.RLock,
    ) -> None:
        self.number = number
        self.revision = revision
        self.error = ""
        self._regions = regions
        self._at: dict[tuple[str, int, int], list[LentRegion]] = {}  # By memory: tied tensors have the same.
        for lent in regions.values():
            self._at.setdefault(lent.address_range(), []).append(lent)
        self._may_differ = may_differ
        self._kind = kind
        self._engine = engine
        self._upload = upload
        self._lock = lock
        self._transfer: StateTransfer | None = None  # From the digests to the end: it refers to this object.
        self._catalog = b""
        self._askers: dict[bytes, None] = {}  # Peers that have asked: they get the catalog, then the end.
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="zpccl-offer", daemon=True)
        self._ended = End(lock)  # Of the thread.

    # --- For users --------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True until the offer is withdrawn or replaced, or has ended for the reason in `error`."""
        return not self._is_over

    @public
    def before_write(self, names: Iterable[str] | str | None = None) -> None:
        """Copies tensors that are about to be written, so that the offer keeps their present contents.

        Does nothing for tensors that this method or `offer_state` has copied before. Of tensors that are the same
        memory, one name is enough.

        Args:
            names: names of the tensors, or the name of one; None: all.

        Raises:
            InvalidArgument: the offer has no tensor of that name.
            InternalError: there is no memory for a copy. Withdraw the offer before you write the tensors.
        """
        if isinstance(names, str):
            names = [names]
        for name in self._regions if names is None else names:
            if name not in self._regions:
                raise InvalidArgument(f"no tensor {name!r} is offered")
            for lent in self._at[self._regions[name].address_range()]:
                if not self._is_over:
                    lent.detach()

    def withdraw(self) -> None:
        """Ends the offer. When this returns, the tensors are no longer read. May be called twice."""
        self.end()
        wait_for_end(self._thread, self._ended)

    # --- In its thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the serving thread."""
        start_thread(self._thread)

    def _serve(self) -> None:
        try:
            engine = self._engine
            transfer = StateTransfer(
                self._regions,
                engine.post_message,
                self._report,
                self._kind,
                upload=self._upload,
                is_local=engine.is_local,
            )
            entries = tuple(
                CatalogEntry(key, region.datatype, region.count, key in self._may_differ, transfer.digests[key])
                for key, region in sorted(self._regions.items())
            )
            _listen(engine, transfer, (self.number,))
            transfer.start(self.number, (), (), {})
            with self._lock:
                self._catalog = _encode(Catalog(self.revision, self._kind, entries))
                self._transfer = transfer
                if self._is_over:
                    transfer.end(commit=False)
                askers = tuple(self._askers)
            for peer in askers:
                _say(engine, peer, MessageKind.TOLD, self.number, self._catalog)
            transfer.run()
        except PCCLError as error:
            self._report(self.number, error.message)
        except Exception as error:
            self.error = repr(error)
            logger.exception("an offer of state failed; this is a bug in zpccl")
        finally:
            try:
                self.end()
                _close(self._engine, (self.number,))
                for region in self._regions.values():
                    region.give_back()
            finally:
                self._transfer = None  # Only now: a signal handler in the midst of end() may end the offer once more.
                self._ended.set()

    def _report(
        self, attempt_id: int, error: str, fault: bytes | None = None, dropped: Sequence[tuple[bytes, str]] = ()
    ) -> None:
        self.error = error
        advice = "; call before_write() first" if self._transfer is not None and self._transfer.has_changed else ""
        logger.error("the offer of revision %d is withdrawn: %s%s", self.revision, error, advice)
        self.end()

    # --- For the loop -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the offer and sends GONE to the peers that have asked."""
        with self._lock:
            self._is_over = True
            transfer = self._transfer
            askers, self._askers = self._askers, {}
        if transfer is not None:
            transfer.end(commit=False)
        for peer in askers:
            _say(self._engine, peer, MessageKind.GONE, self.number)

    def on_ask(self, peer: bytes) -> bool:
        """A peer asks for the offer. False: it has ended."""
        with self._lock:
            if self._is_over:
                return False
            self._askers[peer] = None
            is_ready = self._transfer is not None
        if is_ready:
            _say(self._engine, peer, MessageKind.TOLD, self.number, self._catalog)
        return True

    def lose_link(self, peer: bytes) -> None:
        """The link to a joiner is lost."""
        with self._lock:
            self._askers.pop(peer, None)
            transfer = self._transfer
        if transfer is not None:
            transfer.lose_link(peer)


# --- Joiners ----------------------------------------------------------------------------------------------------------


class Prefetch:
    """Fetches the state that members offer. The user's thread calls `run`, the loop all other methods.

    Args:
        regions: the state by key.
        may_differ: keys whose contents may differ between peers.
        kind: kind of the digests.
        deadline_ns: when it gives up, on the monotonic clock.
        engine: sends messages.
        on_moved: called in the user's thread with the bytes that have arrived, also of offers that have ended, and
            those with the bytes that are known to be missing.
        lock: as in `Offers`.
    """

    def __init__(
        self,
        regions: Mapping[str, Region],
        may_differ: Collection[str],
        kind: DigestKind,
        deadline_ns: int,
        engine: Engine,
        on_moved: Callable[[int, int], None] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self._regions = regions
        self._may_differ = frozenset(may_differ)
        self._kind = kind
        self._deadline_ns = deadline_ns
        self._engine = engine
        self._tell_moved = on_moved
        # It guards everything below. Take it directly, not through the condition, which is written in Python: Ctrl-C
        # could leave that locked for ever, and the thread of the loop would wait for it.
        self._lock = threading.RLock() if lock is None else lock
        self._changed = threading.Condition(self._lock)
        self._peers: set[bytes] | None = None  # Peers that may offer; None: not known yet.
        self._linked: set[bytes] = set()
        self._told: dict[bytes, tuple[int, Catalog | None]] = {}
        self._useless: set[bytes] = set()  # Peers that sent wrong data, or nothing.
        self._answers_due_ns = deadline_ns
        self._transfer: StateTransfer | None = None
        self._numbers: dict[bytes, int] = {}  # By peer: number of the offer that is fetched.
        self._gone: dict[bytes, int] = {}  # By peer: number of its last offer that has ended.
        self._lines = BoundedLog(logger, "LOG_LINES_MAX")
        self._is_stopped = False
        self._dropped: tuple[tuple[bytes, str], ...] = ()
        self._moved_bytes = 0  # In all transfers: there is another one after that of the free keys, or for a new offer.
        self.revision: int | None = None  # The result of `run`, even if it is interrupted after everything was written.

    # --- For the loop -----------------------------------------------------------------------------------------------

    def on_peers(self, peers: Iterable[bytes]) -> None:
        """Sets the peers that may offer something; each is asked as soon as there is a link to it."""
        with self._lock:
            if self._peers is None:
                self._answers_due_ns = min(self._deadline_ns, time.monotonic_ns() + limits.OFFER_ANSWER_TIMEOUT_NS)
            self._peers = set(peers)
            for peer in sorted(self._linked & self._peers):
                self._ask(peer)
            self._changed.notify_all()

    def on_link_up(self, peer: bytes) -> None:
        """The link to another peer is up."""
        with self._lock:
            self._linked.add(peer)
            if self._peers is not None and peer in self._peers:
                self._ask(peer)

    def lose_link(self, peer: bytes) -> None:
        """The link to another peer is lost."""
        self._forget(peer, LINK_LOST)
        with self._lock:
            self._linked.discard(peer)

    def on_peer_gone(self, peer: bytes) -> None:
        """Another peer has left the run."""
        self.lose_link(peer)
        with self._lock:
            if self._peers is not None:
                self._peers.discard(peer)
            self._changed.notify_all()

    def asks(self, peer: bytes) -> bool:
        """True for a member. What others tell counts for nothing."""
        with self._lock:
            return self._peers is not None and peer in self._peers

    def on_told(self, peer: bytes, number: int, catalog: Catalog | None) -> None:
        """A member has sent the catalog of its offer; None: it offers nothing."""
        with self._lock:
            if catalog is not None and not self._suits(catalog):
                text = f"peer {peer.hex()} offers a state with other keys, types, sizes or options"
                self._lines.write(logging.WARNING, text, time.monotonic_ns())
                catalog = None
            if peer not in self._linked:  # The engine tells of the end of a link before what has come over it.
                return None
            if self._gone.get(peer) == number:  # The end of this offer has come before its catalog.
                return None
            self._told[peer] = (number, catalog)
            return self._changed.notify_all()

    def on_gone(self, peer: bytes, number: int) -> None:
        """An offer of a member has ended. The member may have another one."""
        with self._lock:
            self._gone[peer] = number
            told, _ = self._told.get(peer, (0, None))  # 0: nothing yet, or no offer.
            is_news = told in (0, number) or self._numbers.get(peer) == number
        if is_news:
            self._forget(peer, OFFER_ENDED)
            with self._lock:
                self._ask(peer)

    def _forget(self, peer: bytes, reason: str) -> None:
        """Forgets what a peer offers, and asks it for no more blocks."""
        with self._lock:
            self._told.pop(peer, None)
            self._numbers.pop(peer, None)
            transfer = self._transfer
            self._changed.notify_all()
        if transfer is not None:
            transfer.lose_link(peer, reason)

    def stop(self) -> None:
        """Makes `run` return soon."""
        with self._lock:
            self._is_stopped = True
            transfer = self._transfer
            self._changed.notify_all()
        if transfer is not None:
            transfer.end(commit=False)

    def _ask(self, peer: bytes) -> None:
        if peer not in self._useless:
            _say(self._engine, peer, MessageKind.ASK, 0)

    def _suits(self, catalog: Catalog) -> bool:
        offered = {entry.key: (entry.datatype, entry.count) for entry in catalog.entries}
        own = {key: (int(region.datatype), region.count) for key, region in self._regions.items()}
        free = frozenset(entry.key for entry in catalog.entries if entry.may_differ)
        return (offered, free) == (own, self._may_differ) and catalog.digest_kind == int(self._kind)

    # --- For the thread of the user ---------------------------------------------------------------------------------

    def run(self) -> int | None:
        """Fetches an offer. Returns its revision; None: there was no offer, or the fetch was given up.

        If it returns None, the tensors are unchanged, but keys that may differ may hold another peer's contents.
        """
        while (sources := self._choose()) is not None:
            first, *_ = sources.values()
            free = {entry.key: entry.digest for entry in first.entries if entry.key in self._may_differ}
            rest = {entry.key: entry.digest for entry in first.entries if entry.key not in self._may_differ}
            alike = [peer for peer, catalog in sources.items() if catalog.entries == first.entries]
            is_here = not free or self._fetch(alike, free, self._regions)  # The other keys may be fetched after it.
            if is_here and self._fetch(list(sources), rest, self._may_differ, first.revision):
                return first.revision
        self._explain()
        return None

    def _explain(self) -> None:
        """Logs why nothing is fetched, if the log does not say so yet."""
        with self._lock:
            members = set() if self._is_stopped else (self._peers or set()) - self._useless
            is_answered = members <= self._told.keys()
        if not is_answered:
            logger.warning("the prefetch is given up: no member has offered a state in time; the next sync fetches it")
        elif members:
            logger.info("no member offers a state; the next sync fetches it")

    def _choose(self) -> dict[bytes, Catalog] | None:
        """Of the peers with the highest offered revision, the largest set with equal contents. None: no offer until the
        deadline."""
        with self._lock:
            while not self._is_stopped:
                now_ns = time.monotonic_ns()
                if now_ns >= self._deadline_ns:
                    return None
                silent = (self._peers or set()) - self._useless - self._told.keys()
                due_ns = self._answers_due_ns
                if now_ns >= due_ns or (self._peers is not None and not silent):
                    best = self._best()
                    due_ns += limits.OFFER_MAKING_TIMEOUT_NS  # A member that makes an offer answers only after that.
                    if best is not None or not silent & self._linked or now_ns >= due_ns:
                        return best
                due_ns = min(due_ns, self._deadline_ns, now_ns + limits.SIGNAL_CHECK_INTERVAL_NS)
                self._changed.wait((due_ns - now_ns) / limits.SECOND)
            return None

    def _best(self) -> dict[bytes, Catalog] | None:
        groups: dict[tuple[int, tuple[tuple[str, bytes], ...]], dict[bytes, Catalog]] = {}
        for peer, (_, catalog) in sorted(self._told.items()):
            if catalog is not None and peer in self._linked and peer not in self._useless:
                contents = tuple((entry.key, entry.digest) for entry in catalog.entries if not entry.may_differ)
                groups.setdefault((catalog.revision, contents), {})[peer] = catalog
        best = max(groups.items(), key=lambda group: (group[0][0], len(group[1])), default=None)
        if best is None:
            return None
        self._numbers = {peer: self._told[peer][0] for peer in best[1]}
        return best[1]

    def _fetch(
        self, sources: list[bytes], wanted: dict[str, bytes], may_differ: Container[str], revision: int | None = None
    ) -> bool:
        """Fetches these keys. False: the fetch failed. `revision`: set it on success, as these are the last keys."""
        on_moved = partial(self._on_moved, self._moved_bytes)
        transfer = StateTransfer(
            self._regions, self._post, self._report, self._kind, on_moved=on_moved, may_differ=may_differ
        )
        missing = {key: digest for key, digest in wanted.items() if transfer.digests[key] != digest}
        with self._lock:
            sources = [peer for peer in sources if peer in self._numbers]
            if missing and (self._is_stopped or not sources):
                transfer.end(commit=False)
            numbers = {self._numbers[peer] for peer in sources}
            self._dropped = ()
            self._transfer = transfer
        try:
            _listen(self._engine, transfer, numbers)
            transfer.start(CHANNEL, tuple(sources), (), missing)
            if not missing:
                transfer.end(commit=True)
            transfer.run()
        finally:
            if transfer.is_written:
                self.revision = revision
            _close(self._engine, numbers)
            with self._lock:
                self._transfer = None
        if not transfer.is_written:
            with self._lock:
                self._useless.update(dict(self._dropped).keys() & self._numbers.keys())
                self._ask_again()
        return transfer.is_written

    def _ask_again(self) -> None:
        """Asks the peers for new offers after a fetch has failed."""
        self._told.clear()
        self._numbers.clear()
        self._answers_due_ns = min(self._deadline_ns, time.monotonic_ns() + limits.OFFER_ANSWER_TIMEOUT_NS)
        for peer in sorted(self._linked & (self._peers or set())):
            self._ask(peer)

    def _on_moved(self, before: int, done: int, expected: int) -> None:
        self._moved_bytes = before + done
        if self._tell_moved is not None:
            self._tell_moved(self._moved_bytes, before + expected)
        if time.monotonic_ns() >= self._deadline_ns:
            logger.warning("the prefetch of the members' state timed out; the next sync fetches it")
            self.stop()

    def _report(self, attempt_id: int, error: str, fault: bytes | None, dropped: Sequence[tuple[bytes, str]]) -> None:
        with self._lock:
            self._dropped = tuple(dropped)
            transfer = self._transfer
        assert transfer is not None
        if fault == transfer.own_id:  # This peer is at fault, whichever source is used.
            logger.warning("the prefetch is given up: %s", error)
            self.stop()
        transfer.end(commit=not error)

    def _post(self, peer: bytes, channel: int, head: Any, body: Any, queue_max: int) -> bool:
        with self._lock:
            number = self._numbers.get(peer)
        if number is None:
            raise ConnectionError("the offer has ended")
        return self._engine.post_message(peer, number, head, body, queue_max)


# --- The loop's side --------------------------------------------------------------------------------------------------


class Offers:
    """The offer and the prefetch of a peer: dispatches messages of channel 0 to them.

    Args:
        engine: sends messages.
        is_local: whether a peer is on this host.
        last_number: the number before the first offer; random, so that offers of different processes are not confused.
        lock: a reentrant lock, which a thread that waits for the end of the peer's loop lets go of. None: a new one.
    """

    def __init__(self, engine: Engine, last_number: int, lock: threading.RLock | None = None) -> None:
        self._engine = engine
        self._last_number = last_number
        engine.open_channel(CHANNEL)
        self._lock = threading.RLock() if lock is None else lock
        self._calls = threading.RLock()  # Serialises offer() and withdraw().
        self._offer: Offer | None = None
        self._prefetch: Prefetch | None = None
        self._waiting: dict[bytes, None] | None = None  # Peers that asked while an offer is being made.
        self._is_closed = False
        self._malformed: set[bytes] = set()  # Peers whose malformed messages are in the log.
        self._lines = BoundedLog(logger, "LOG_LINES_MAX")  # For the loop's thread; a peer may come back all the time.
        self._pool = CopyPool()

    # --- For users' threads -----------------------------------------------------------------------------------------

    def offer(
        self,
        revision: int,
        regions: Mapping[str, Region],
        may_differ: Collection[str],
        kind: DigestKind,
        upload: TokenBucket | None,
        *,
        copy: bool,
    ) -> Offer:
        """Replaces the offer by a new one, which reuses the memory of its copies."""
        with self._calls, self._renewing():
            self._replace(None)
            self._pool.trim(region.nbytes for region in regions.values())
            lent = {key: LentRegion(region, self._pool) for key, region in regions.items()}
            if copy:
                for region in lent.values():
                    region.detach()
            self._last_number = (self._last_number + 1) % FREE_CHANNEL + FREE_CHANNEL
            offer = Offer(self._last_number, revision, lent, may_differ, kind, self._engine, upload, self._lock)
            self._replace(offer)
            try:
                offer.start()
            except BaseException:  # Ctrl-C, or no thread can be started: joiners would wait for an answer.
                self._replace(None)
                raise
            return offer

    @contextmanager
    def _renewing(self) -> Iterator[None]:
        """Defers answers while the offer is replaced, so that no joiner hears that there is none."""
        with self._lock:
            self._waiting = {}
        try:
            yield
        finally:
            with self._lock:
                waiting, self._waiting = self._waiting or {}, None
            for peer in waiting:
                self._on_ask(peer)

    def withdraw(self) -> None:
        """Ends the offer and unmaps the memory of copies."""
        with self._calls:
            self._replace(None)
            self._pool.clear()

    def _replace(self, offer: Offer | None) -> None:
        former = self._offer
        if former is not None:
            former.withdraw()  # Before it is forgotten: if a signal ends the wait, the next call goes on with it.
        with self._lock:
            if self._is_closed and offer is not None:
                raise InvalidUsage("the communicator is closed")
            self._offer = offer

    def make_prefetch(
        self,
        regions: Mapping[str, Region],
        may_differ: Collection[str],
        kind: DigestKind,
        deadline_ns: int,
        on_moved: Callable[[int, int], None] | None = None,
    ) -> Prefetch:
        """Makes a prefetch, which gets the messages of the channel from now on."""
        prefetch = Prefetch(regions, may_differ, kind, deadline_ns, self._engine, on_moved, self._lock)
        with self._lock:
            self._prefetch = prefetch
        return prefetch

    def end_prefetch(self) -> None:
        """Detaches the prefetch."""
        with self._lock:
            self._prefetch = None

    # --- For the loop -----------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, body: Body) -> None:
        """Handles a message on the channel."""
        catalog: Catalog | None = None
        prefetch = self._prefetch
        if prefetch is not None and not prefetch.asks(peer):
            prefetch = None
        try:
            data = body.read()
            kind, number = _HEAD.unpack_from(data)
            if kind == MessageKind.TOLD and number and prefetch is not None:  # Decoding may take 70 ms.
                catalog = _decoder.decode(data[_HEAD.size :])
                number |= FREE_CHANNEL  # A peer must not make this one open any other channel.
            if number == DIGEST_CHANNEL:
                raise struct.error("not the number of an offer")
        except (struct.error, msgspec.DecodeError, UnicodeDecodeError):
            if peer not in self._malformed:
                self._malformed.add(peer)
                text = f"malformed message about offers from peer {peer.hex()}"
                self._lines.write(logging.WARNING, text, time.monotonic_ns())
            return None
        except OSError:
            return None  # The engine is closed.
        if kind == MessageKind.ASK:
            self._on_ask(peer)
        elif prefetch is not None and kind == MessageKind.TOLD:
            prefetch.on_told(peer, number, catalog)
        elif prefetch is not None and kind == MessageKind.GONE:
            prefetch.on_gone(peer, number)
        return None

    def _on_ask(self, peer: bytes) -> None:
        with self._lock:
            offer = self._offer
            if self._waiting is not None:
                self._waiting[peer] = None
                return
        if offer is None or not offer.on_ask(peer):
            _say(self._engine, peer, MessageKind.TOLD, 0)

    def on_peers(self, peers: Iterable[bytes]) -> None:
        """Sets the peers that may offer something."""
        prefetch = self._prefetch
        if prefetch is not None:
            prefetch.on_peers(peers)

    def on_link_up(self, peer: bytes) -> None:
        """The link to another peer is up."""
        prefetch = self._prefetch
        if prefetch is not None:
            prefetch.on_link_up(peer)

    def lose_link(self, peer: bytes, *, is_gone: bool = False) -> None:
        """The link to another peer is lost, or (`is_gone`) the peer has left the run."""
        self._malformed.discard(peer)
        offer, prefetch = self._offer, self._prefetch
        if offer is not None:
            offer.lose_link(peer)
        if prefetch is not None and is_gone:
            prefetch.on_peer_gone(peer)
        elif prefetch is not None:
            prefetch.lose_link(peer)

    def close(self) -> None:
        """Ends the offer and the prefetch; called when the peer's loop ends."""
        with self._lock:
            self._is_closed = True
            offer, prefetch = self._offer, self._prefetch
        self._pool.close()  # The loop, with all that it refers to, may wait long for a collection of garbage.
        if offer is not None:
            offer.end()
        if prefetch is not None:
            prefetch.stop()
