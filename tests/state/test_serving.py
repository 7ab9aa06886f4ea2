"""Which requests are served next, and how fast."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from zpccl import limits
from zpccl.limits import MIB, MS, SECOND
from zpccl.state import messages
from zpccl.state.serving import MemoryChanged, Served, Server, TokenBucket
from zpccl.state.swarm import LIST, Place

A, B = b"a" * 16, b"b" * 16


class Contents:
    """Blocks of one key with a given size: random bytes, or a block of numbers that compresses well."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.numbers: memoryview | None = None
        self.changed: set[Place] = set()
        self.missing: set[Place] = set()

    def size_of(self, place: Place) -> int:
        return 320 if place[1] == LIST else self.size

    def list_of(self, key: int) -> bytes | None:
        return bytes(320) if key == 0 else None

    def block_of(self, place: Place) -> tuple[memoryview, int] | None:
        if place in self.changed:
            raise MemoryChanged("changed")
        if place in self.missing:
            return None
        return self.numbers or memoryview(random.Random(place[1]).randbytes(self.size)), 4


class Bench:
    """A server whose jobs finish when a test says so, and links with room for a number of messages."""

    def __init__(self, size: int = MIB, bucket: TokenBucket | None = None, jobs_max: int = 4) -> None:
        self.contents = Contents(size)
        self.jobs: list[Any] = []
        self.results: list[Served] = []
        self.sent: list[tuple[bytes, bytes]] = []
        self.room: dict[bytes, int] = {}
        self.gone: set[bytes] = set()
        self.local: set[bytes] = set()
        contents: Any = self.contents
        self.server = Server(
            contents, self.post, self.local.__contains__, self.jobs.append, self.results.append, bucket, jobs_max
        )

    def post(self, peer: bytes, head: Any, body: Any) -> bool:
        if peer in self.gone:
            raise OSError(107, "no link")
        if self.room.get(peer, 1) == 0:
            return False
        self.room[peer] = self.room.get(peer, 10**9) - 1
        self.sent.append((peer, bytes(head) + bytes(body)))
        return True

    def work(self) -> None:
        """Does the submitted jobs, and tells the server."""
        jobs = self.jobs[:]
        self.jobs.clear()
        for job in jobs:
            job()
        self.tell()

    def tell(self) -> None:
        for result in self.results:
            self.server.on_served(result, 0)
        self.results.clear()

    def run(self, now_ns: int = 0) -> None:
        while True:
            self.server.pump(now_ns)
            if not self.jobs:
                return
            self.work()

    def blocks(self) -> list[tuple[bytes, int]]:
        """The peers and the blocks that they got."""
        found = []
        for peer, data in self.sent:
            view = memoryview(data)
            if messages.has_blocks(view):
                found += [(peer, place[1]) for place, _, _ in messages.parse_blocks(view)]
        return found


def places(indexes: Iterable[int]) -> list[Place]:
    return [(0, index) for index in indexes]


def test_what_was_asked_for_is_sent_in_order() -> None:
    bench = Bench()
    bench.server.on_request(A, places(range(3)))
    bench.run()
    assert bench.blocks() == [(A, 0), (A, 1), (A, 2)]
    assert [len(data) for _, data in bench.sent] == [4 + 12 + 1 + MIB] * 3


def test_blocks_shrink_on_their_way_to_another_host() -> None:
    bench = Bench()
    bench.contents.numbers = memoryview(np.arange(MIB // 4, dtype=np.int32).tobytes())
    bench.local.add(A)
    bench.server.on_request(A, places([0]))
    bench.server.on_request(B, places([0]))
    bench.run()
    near, far = bench.sent
    assert near[0] == A and len(near[1]) > MIB
    assert far[0] == B and len(far[1]) < MIB // 2


def test_fetchers_take_turns() -> None:
    bench = Bench()
    bench.server.on_request(A, places(range(4)))
    bench.server.on_request(B, places(range(4)))
    bench.run()
    assert [peer for peer, _ in bench.blocks()] == [A, B] * 4


def test_only_so_many_jobs_are_made_at_a_time() -> None:
    bench = Bench(jobs_max=2)
    bench.server.on_request(A, places(range(9)))
    bench.server.pump(0)
    assert len(bench.jobs) == 2
    bench.run()
    assert len(bench.blocks()) == 9


def test_small_blocks_travel_together() -> None:
    bench = Bench(size=100)
    bench.server.on_request(A, places(range(3000)))
    bench.run()
    assert [index for _, index in bench.blocks()] == list(range(3000))
    assert len(bench.sent) == -(-3000 // messages.BLOCKS_PER_MESSAGE_MAX)


def test_lists_are_sent() -> None:
    bench = Bench()
    bench.server.on_request(A, [(0, 5), (0, LIST), (7, LIST), (0, 6)])
    bench.run()
    assert bench.blocks() == [(A, 5), (A, 6)]
    lists = [messages.decode(memoryview(data)) for _, data in bench.sent if data[0] != 0xC1]
    assert lists == [messages.BlockList(0, bytes(320))]


def test_what_is_not_here_is_not_sent() -> None:
    bench = Bench(size=100)
    bench.contents.missing = {(0, 1), (0, 2)}
    bench.server.on_request(A, places(range(4)))
    bench.server.on_request(B, places([1]))
    bench.run()
    assert bench.blocks() == [(A, 0), (A, 3)]


def test_memory_that_changed_is_told() -> None:
    bench = Bench()
    bench.contents.changed = {(0, 0)}
    bench.server.on_request(A, places(range(2)))
    bench.server.pump(0)
    for job in bench.jobs:
        job()
    assert isinstance(bench.results[0].error, MemoryChanged) and bench.results[1].error is None
    assert bench.blocks() == [(A, 1)]


def test_a_full_link_holds_up_only_its_fetcher() -> None:
    bench = Bench(jobs_max=1)
    bench.room[A] = 2
    bench.server.on_request(A, places(range(5)))
    bench.server.on_request(B, places(range(5)))
    bench.run()
    assert sorted(bench.blocks()) == [(A, 0), (A, 1)] + [(B, index) for index in range(5)]
    bench.room[A] = 100
    bench.run()
    assert len(bench.blocks()) == 7, "nobody has told of room"
    bench.server.on_writable()
    bench.run()
    assert [index for peer, index in bench.blocks() if peer == A] == [0, 1, 2, 3, 4]


def test_room_that_is_told_of_before_the_job_came_back_is_not_forgotten() -> None:
    bench = Bench(jobs_max=1)
    bench.room[A] = 0
    bench.server.on_request(A, places([0]))
    bench.server.pump(0)
    bench.jobs.pop()()
    bench.room[A] = 1
    bench.server.on_writable()
    bench.tell()
    bench.run()
    assert bench.blocks() == [(A, 0)]


def test_a_fetcher_that_is_gone_costs_nothing_more() -> None:
    bench = Bench(jobs_max=1)
    bench.server.on_request(A, places(range(5)))
    bench.server.pump(0)
    bench.gone.add(A)
    bench.server.lose_link(A)
    bench.server.lose_link(A)
    bench.run()
    assert bench.blocks() == [] and not bench.jobs
    bench.server.on_writable()


def test_requests_beyond_the_bound_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: a fetcher that asks and does not read costs the holder only a list of bounded length."""
    monkeypatch.setattr(limits, "STATE_REQUESTS_QUEUED_MAX", 10)
    bench = Bench(size=1)
    for _ in range(2):
        bench.server.on_request(A, places(range(9)))
    bench.run()
    assert [index for _, index in bench.blocks()] == [*range(9), 0]


def test_the_upload_limit_is_kept() -> None:
    """In 10 s, 10 MiB/s allow 100 MiB and one burst."""
    bench = Bench(bucket=TokenBucket(10 * MIB))
    bench.server.on_request(A, places(range(1000)))
    now = 0
    while now < 10 * SECOND:
        again = bench.server.pump(now)
        bench.work()
        assert again is None or again > now
        now = again or now
    assert 100 <= len(bench.blocks()) <= 103


@pytest.mark.parametrize("count", [2, 3, 12])
def test_fetchers_share_the_upload_limit(count: int) -> None:
    """Waiting for the limit costs nobody its turn."""
    bench = Bench(bucket=TokenBucket(10 * MIB))
    fetchers = [bytes([number]) * 16 for number in range(count)]
    for fetcher in fetchers:
        bench.server.on_request(fetcher, places(range(1000)))
    now = 0
    while now < 10 * SECOND:
        now = bench.server.pump(now) or now
        bench.work()
    shares = [sum(peer == fetcher for peer, _ in bench.blocks()) for fetcher in fetchers]
    assert max(shares) - min(shares) <= 1, shares


def test_what_was_not_sent_is_not_charged() -> None:
    """The server tries a full link again and again; the limit counts only bytes that leave."""
    bench = Bench(bucket=TokenBucket(10 * MIB))
    bench.room[A] = 0
    bench.server.on_request(A, places([0]))
    for _ in range(50):
        bench.server.on_writable()
        assert bench.server.pump(0) is None
        bench.work()
    bench.server.on_request(B, places([1]))
    assert bench.server.pump(0) is None
    bench.work()
    assert bench.blocks() == [(B, 1)]


def test_a_bucket_does_not_save_up() -> None:
    bucket = TokenBucket(100 * MIB)
    assert bucket.ready_ns(0) == 0
    bucket.take(MIB, 3600 * SECOND)
    assert bucket.ready_ns(3600 * SECOND) == 3600 * SECOND, "a burst of 50 ms"
    bucket.take(9 * MIB, 3600 * SECOND)
    wait_ns = bucket.ready_ns(3600 * SECOND) - 3600 * SECOND
    assert 49 * MS < wait_ns < 51 * MS
