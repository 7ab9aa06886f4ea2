"""Serving state to fetchers: scheduling, flow control and the upload limit.

One thread owns and calls a `Server`. Worker threads run its jobs; the results come back through that thread's mailbox.
Each fetcher has a bounded queue of requested blocks; fetchers take turns. A job reads some blocks, verifies that they
still have the offered digests (this detects that a source's memory has changed), compresses them for a fetcher on
another host, and posts them. If the link queue of a fetcher is full, its job and queue wait until the engine reports
that it is writable.

The upload limit is a token bucket, which one message may overdraw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from zpccl import limits
from zpccl.errors import PCCLError
from zpccl.state.codec import encode as encode_block
from zpccl.state.messages import BLOCKS_PER_MESSAGE_MAX, BlockList, blocks_head
from zpccl.state.messages import encode as encode_message
from zpccl.state.swarm import LIST, Place
from zpccl.state.workers import Job

if TYPE_CHECKING:
    from zpccl.state.contents import Contents

Post: TypeAlias = Callable[[bytes, Any, Any], bool]
"""Posts (peer, head, body). False: the queue is full, on_writable() follows; OSError: the link is lost or the sync
over."""

_BURST_NS = 50 * limits.MS
"""Capacity of the bucket, as time at the limited rate."""


class MemoryChanged(PCCLError):
    """The memory of a tensor has changed since it was offered."""


class TokenBucket:
    """Limits the rate of sending. Several threads may use it. There is no lock, which a signal handler could keep held,
    so if two threads take at the very same time, one of the charges may be lost.

    Args:
        bytes_per_second: the rate.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self.bytes_per_second = bytes_per_second
        self._tokens = 0.0
        self._filled_ns: int | None = None

    def ready_ns(self, now_ns: int) -> int:
        """The earliest time at which sending is allowed."""
        self._fill(now_ns)
        return now_ns if self._tokens >= 0 else now_ns + int(-self._tokens * limits.SECOND / self.bytes_per_second) + 1

    def take(self, size: int, now_ns: int) -> None:
        """Charges `size` bytes; negative: refunds bytes that were not sent."""
        self._fill(now_ns)
        self._tokens -= size

    def _fill(self, now_ns: int) -> None:
        if self._filled_ns is not None:
            self._tokens += (now_ns - self._filled_ns) * self.bytes_per_second / limits.SECOND
        self._tokens = min(self._tokens, self.bytes_per_second * _BURST_NS / limits.SECOND)
        self._filled_ns = now_ns


@dataclass(frozen=True)
class Served:
    """The result of a job.

    Attributes:
        left: messages that the full queue did not accept.
        rooms: number of on_writable() calls for this fetcher before the job was made.
        charged_bytes: bytes charged to the upload limit in advance.
    """

    peer: bytes
    left: tuple[tuple[Any, Any], ...] = ()
    sent_bytes: int = 0
    rooms: int = 0
    charged_bytes: int = 0
    error: Exception | None = None


@dataclass
class _Fetcher:
    peer: bytes
    is_local: bool
    queue: deque[Place] = field(default_factory=deque)
    parcels: deque[tuple[Any, Any]] = field(default_factory=deque)  # Packed; the queue was full.
    is_blocked: bool = False


@dataclass(frozen=True)
class _Job:
    """Work for one fetcher: post packed messages again, or pack blocks."""

    fetcher: _Fetcher
    parcels: tuple[tuple[Any, Any], ...]
    places: Sequence[Place]
    rooms: int


class Server:
    """Serves the fetchers of one state.

    Args:
        contents: the served contents. Worker threads read them.
        post: sends messages.
        is_local: True if a fetcher is on this host.
        submit: queues a job for a worker.
        done: called in the worker with the result of a job; the owner then calls on_served().
        bucket: the upload limit, or None.
        jobs_max: maximum number of jobs that are queued or running.
    """

    def __init__(
        self,
        contents: Contents,
        post: Post,
        is_local: Callable[[bytes], bool],
        submit: Callable[[Job], None],
        done: Callable[[Served], None],
        bucket: TokenBucket | None,
        jobs_max: int,
    ) -> None:
        self._contents, self._post, self._is_local, self._submit, self._done = contents, post, is_local, submit, done
        self._bucket = bucket
        self._jobs_max = jobs_max
        self._jobs = 0
        self._rooms = 0  # Number of on_writable() calls.
        self._fetchers: dict[bytes, _Fetcher] = {}
        self._turns: deque[_Fetcher] = deque()

    def on_request(self, peer: bytes, places: Iterable[Place]) -> None:
        """Queues the request of a fetcher. Blocks beyond the bound of its queue are dropped."""
        fetcher = self._fetchers.get(peer)
        if fetcher is None:
            fetcher = self._fetchers[peer] = _Fetcher(peer, self._is_local(peer))
            self._turns.append(fetcher)
        for place in places:
            if len(fetcher.queue) >= limits.STATE_REQUESTS_QUEUED_MAX:
                return
            fetcher.queue.append(place)

    def lose_link(self, peer: bytes) -> None:
        """The link to a fetcher is lost."""
        fetcher = self._fetchers.pop(peer, None)
        if fetcher is not None:
            self._turns.remove(fetcher)

    def on_writable(self) -> None:
        """Some link is writable again: the server tries all."""
        self._rooms += 1
        for fetcher in self._turns:
            fetcher.is_blocked = False

    def on_served(self, result: Served, now_ns: int) -> None:
        """A job is done."""
        self._jobs -= 1
        if self._bucket is not None:
            self._bucket.take(result.sent_bytes - result.charged_bytes, now_ns)
        fetcher = self._fetchers.get(result.peer)
        if fetcher is None:
            return
        if result.left:
            fetcher.parcels.extend(result.left)
            fetcher.is_blocked = self._rooms == result.rooms  # If not, a link became writable meanwhile.

    def pump(self, now_ns: int) -> int | None:
        """Starts as many jobs as allowed. Returns when to call it again without an event, or None."""
        while self._jobs < self._jobs_max:
            fetcher = self._next()
            if fetcher is None:
                return None
            if self._bucket is not None:
                ready_ns = self._bucket.ready_ns(now_ns)
                if ready_ns > now_ns:
                    return ready_ns
            self._start(fetcher, now_ns)
        return None

    def _next(self) -> _Fetcher | None:
        """The first fetcher that can be served. Its turn is over when its job starts."""
        for _ in range(len(self._turns)):
            fetcher = self._turns[0]
            if not fetcher.is_blocked and (fetcher.parcels or fetcher.queue):
                return fetcher
            self._turns.rotate(-1)
        return None

    def _start(self, fetcher: _Fetcher, now_ns: int) -> None:
        self._turns.rotate(-1)
        parcels, places = tuple(fetcher.parcels), []
        fetcher.parcels.clear()
        if not parcels:
            places = self._batch(fetcher.queue)
        charged = sum(len(head) + len(body) for head, body in parcels)
        charged += sum(self._contents.size_of(place) for place in places)
        if self._bucket is not None:  # An estimate; on_served() corrects it.
            self._bucket.take(charged, now_ns)
        self._jobs += 1
        job = _Job(fetcher, parcels, places, self._rooms)
        self._submit(lambda: self._done(replace(self._serve(job), charged_bytes=charged)))

    def _batch(self, queue: deque[Place]) -> list[Place]:
        """Takes the blocks of one message from a queue: one block or list, or several small blocks."""
        places = [queue.popleft()]
        size = self._contents.size_of(places[0])
        while queue and LIST not in (places[0][1], queue[0][1]) and len(places) < BLOCKS_PER_MESSAGE_MAX:
            size += self._contents.size_of(queue[0])
            if size > limits.STATE_BATCH_BYTES:
                break
            places.append(queue.popleft())
        return places

    # --- In a worker ------------------------------------------------------------------------------------------------

    def _serve(self, job: _Job) -> Served:
        sent, peer, rooms = 0, job.fetcher.peer, job.rooms
        try:
            left = deque(job.parcels or self._pack(job))
            while left:
                head, body = left[0]
                if not self._post(peer, head, body):
                    break
                sent += len(head) + len(body)
                left.popleft()
        except OSError:  # The link is lost, or the sync is over.
            return Served(peer, (), sent, rooms)
        except Exception as error:  # noqa: BLE001 - handed to the owner
            return Served(peer, (), sent, rooms, error=error)
        return Served(peer, tuple(left), sent, rooms)

    def _pack(self, job: _Job) -> list[tuple[Any, Any]]:
        places = job.places
        if places[0][1] == LIST:
            digests = self._contents.list_of(places[0][0])
            return [] if digests is None else [(encode_message(BlockList(places[0][0], digests)), b"")]
        entries: list[tuple[Place, int]] = []
        pieces: list[Any] = []
        for place in places:
            found = self._contents.block_of(place)
            if found is not None:
                payload = encode_block(*found, compress=not job.fetcher.is_local)
                entries.append((place, sum(map(len, payload))))
                pieces += payload
        if not entries:
            return []
        return [(b"".join((blocks_head(entries), *pieces[:-1])), pieces[-1])]
