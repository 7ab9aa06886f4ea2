"""How a server encodes blocks, by what the link to a fetcher lets through."""

from __future__ import annotations

from typing import Any

import numpy as np

from zpccl.dataplane.coding_choice import Group
from zpccl.dataplane.serving import Served, Server, TokenBucket
from zpccl.dataplane.swarm import Place
from zpccl.limits import MIB, MS, SECOND
from zpccl.types import DataType

PEER = b"p" * 16
WINDOW = 8
"""Blocks that the fetcher asks for at a time."""


class Numbers:
    """Contents whose blocks count up, and so shrink a lot; or are random."""

    def __init__(self, is_random: bool) -> None:
        rng = np.random.default_rng(0)
        self.block = rng.bytes(MIB) if is_random else np.arange(MIB // 4, dtype=np.int32).tobytes()

    def size_of(self, place: Place) -> int:
        return MIB

    def list_of(self, key: int) -> bytes | None:
        return None

    def group_of(self, key: int) -> Group:
        return Group(DataType.INT32, key)

    def block_of(self, place: Place) -> tuple[memoryview, int] | None:
        return memoryview(self.block), 4


class Link:
    """A link of so many bytes per second, a fetcher at its end that keeps asking, and time that passes as said."""

    def __init__(self, rate: float, *, is_random: bool = False, bucket: TokenBucket | None = None) -> None:
        self.rate = rate
        self.now_ns = 1
        self.posted = 0
        self.arrived = 0.0
        self.messages: list[int] = []
        self._waiting: list[int] = []  # What of each message has not arrived.
        self._asked = 0
        self._results: list[Served] = []
        self.server = Server(
            Numbers(is_random), self._post, self._unconfirmed, lambda job: job(), self._results.append, bucket, 4
        )

    def _post(self, peer: bytes, head: Any, body: Any) -> bool:
        self.messages.append(len(head) + len(body))
        self._waiting.append(self.messages[-1])
        self.posted += self.messages[-1]
        return True

    def _unconfirmed(self, peer: bytes) -> int:
        """Messages are confirmed when they have arrived whole."""
        return sum(self.messages[len(self.messages) - len(self._waiting) :])

    def run(self, blocks: int, step_ns: int = 1 * MS) -> list[int]:
        """Until so many blocks more were sent; their sizes."""
        begin = len(self.messages)
        while len(self.messages) < begin + blocks:
            while self._asked - len(self.messages) + len(self._waiting) < WINDOW:
                self.server.on_request(PEER, [(0, self._asked)])
                self._asked += 1
            self.server.pump(self.now_ns)
            results, self._results[:] = list(self._results), []
            for result in results:
                self.server.on_served(result, self.now_ns)
            self.now_ns += step_ns
            room = self.rate * step_ns / SECOND
            while self._waiting and room > 0:
                done = min(room, self._waiting[0])
                room -= done
                self._waiting[0] -= int(done)
                if self._waiting[0] <= 0:
                    del self._waiting[0]
        return self.messages[begin : begin + blocks]


def test_blocks_for_a_slow_link_get_smaller_once_its_rate_is_known() -> None:
    sizes = Link(12_500_000).run(100)
    assert min(sizes[:WINDOW]) > MIB and max(sizes[3 * WINDOW :]) < MIB // 2


def test_blocks_get_smaller_where_the_upload_limit_is_what_is_slow() -> None:
    sizes = Link(1e15, bucket=TokenBucket(10 * MIB)).run(100)
    assert max(sizes[WINDOW:]) < MIB // 2


def test_what_does_not_shrink_goes_as_it_is() -> None:
    assert min(Link(12_500_000, is_random=True).run(60)) > MIB


def test_blocks_for_a_link_that_is_never_waited_for_go_as_they_are() -> None:
    assert min(Link(1e15).run(300)) > MIB
