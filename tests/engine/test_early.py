"""Frames that arrive before their attempt has begun (native/early.c): B2, no attempt waits for frames of another."""

from __future__ import annotations

import errno
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_mesh import (
    OPENED,
    REDUCE_SCATTER,
    STARTED,
    Case,
    Frame,
    HandMadePeer,
    Mesh,
    lose_connection,
    make_plan,
    peer_id,
    until,
    wait_done,
    wait_events,
    wait_failure,
)

from zpccl.engine.ciphers import Cipher, available
from zpccl.engine.engine import LinkLost, ReduceDone, TreeLane
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm

COMMON, LATE = 1, 2
ID_WINDOW = 65536
"""ZP__ID_WINDOW of native/bounds.h."""
LARGE = np.arange(4 << 20, dtype=np.float32) % 1000
"""Half of it goes to the other end: more than one end sends before it knows that the other has begun."""
SMALL = LARGE[:5000]


class Pair(Mesh):
    """Two engines. The second begins its attempts when a test says so."""

    def __init__(self, case: Case, connections: int, cipher: Cipher | None = None) -> None:
        super().__init__(2, connections=connections, cipher=cipher, copies=True, threads=None, stall_timeout_ms=60_000)
        self.case = case
        self.results: dict[tuple[int, int], np.ndarray] = {}

    def start(self, rank: int, attempt_id: int, data: np.ndarray) -> None:
        self.results[rank, attempt_id] = target = data.copy() if self.case.in_place else np.empty_like(data)
        source = target if self.case.in_place else data
        self.engines[rank].start_reduce(make_plan(self.case, attempt_id, rank, 2, source, target))

    def check(self, attempt_id: int, data: np.ndarray) -> None:
        """Waits for the end of an attempt at both engines."""
        ends = [next(e for e in wait_events(engine, 1) if isinstance(e, ReduceDone)) for engine in self.engines]
        assert {(end.attempt_id, end.status) for end in ends} == {(attempt_id, 0)}
        assert ends[0].digest == ends[1].digest
        for rank, engine in enumerate(self.engines):
            engine.end_reduce(attempt_id, commit=True)
            np.testing.assert_array_equal(self.results[rank, attempt_id], 2 * data)


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("cipher", [None, next(iter(available()))])
@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT])
def test_attempts_do_not_wait_for_one_that_its_receiver_has_not_begun(
    algorithm: Algorithm, cipher: Cipher | None, connections: int
) -> None:
    case = Case(algorithm=algorithm, frame_bytes=1 << 18, in_place=connections == 3)
    with closing(Pair(case, connections, cipher)) as pair:
        for attempt_id in (COMMON, LATE):
            pair.start(0, attempt_id, LARGE)
        until(lambda: pair.received_bytes(1) >= 4 << 20)
        pair.start(1, COMMON, LARGE)
        pair.check(COMMON, LARGE)
        # Before it has begun, 4 MiB and a frame of the other attempt arrive; half a MiB is for headers and records.
        assert pair.received_bytes(1) < LARGE.nbytes + (4 << 20) + case.frame_bytes + (1 << 19)
        # This end has kept the announcement of the other. Otherwise it would wait for it after 4 MiB.
        pair.start(1, LATE, LARGE)
        pair.check(LATE, LARGE)


def test_frames_without_a_body_do_not_fill_the_receiver() -> None:
    """Each costs the receiver 4 KiB. A broadcast down a tree has one for each frame of its tensor."""
    tensors, common = np.zeros((2, 64 * 20_000), np.uint8), np.ones(1000, np.float32)
    case = Case(DataType.UINT8, frame_bytes=64, in_place=True, algorithm=Algorithm.DIRECT)
    case = replace(case, lanes=(TreeLane(tensors[0].size, (1, 1)),))
    with closing(Pair(Case(), 1)) as pair:
        plans = [make_plan(case, 1000, rank, 2, own, own) for rank, own in enumerate(tensors)]
        plans = [replace(plan, kind=CollectiveKind.BROADCAST, owners=(1,)) for plan in plans]
        pair.engines[0].start_reduce(plans[0])
        until(lambda: pair.received_bytes(1) >= 40 * 1000)
        for attempt_id in range(1, 101):
            pair.start(0, attempt_id, common)
            pair.start(1, attempt_id, common)
            pair.check(attempt_id, common)
        assert pair.received_bytes(1) < 40 * 1100 + 100 * (common.nbytes + 1000)
        pair.engines[1].start_reduce(plans[1])
        assert [wait_done(engine).status for engine in pair.engines] == [0, 0]


def test_many_senders_do_not_fill_the_receiver() -> None:
    """Each fills half of an equal share of what the receiver keeps. By default this limits peers of 9 links or more."""
    results = [np.empty_like(LARGE) for _ in range(6)]
    bounds: dict[str, Any] = {"message_bytes_max": 1 << 20, "messages_queued_bytes_max": 8 << 20}
    with closing(Mesh(5, connections=1, threads=None, stall_timeout_ms=60_000, **bounds)) as mesh:

        def start(attempt_id: int, engine: int, rank: int, sender: int, result: np.ndarray) -> None:
            plan = make_plan(Case(frame_bytes=1 << 18), attempt_id, rank, 2, LARGE, result)
            mesh.engines[engine].start_reduce(replace(plan, peers=(peer_id(sender), peer_id(4))))

        for sender in range(4):
            start(LATE + sender, sender, 0, sender, results[sender])
        until(lambda: mesh.received_bytes(4) >= 4 * 3 << 18)
        start(COMMON, 0, 0, 0, results[4])
        start(COMMON, 4, 1, 0, results[5])
        for engine in (mesh.engines[0], mesh.engines[4]):
            assert (done := wait_done(engine)).status == 0 and done.attempt_id == COMMON


def test_small_attempts_are_sent_and_kept_without_an_announcement() -> None:
    data = np.ones(10_000, np.float32)
    with closing(Pair(Case(frame_bytes=1 << 13), 2)) as pair:
        for attempt_id in range(1, 101):
            pair.start(0, attempt_id, data)
        until(lambda: pair.received_bytes(1) >= 100 * data.nbytes // 2)
        for attempt_id in range(1, 101):
            pair.start(1, attempt_id, data)
            pair.check(attempt_id, data)


def test_what_was_kept_survives_its_connection() -> None:
    """Kept frames are not sent again; frames that were lost on the way are."""
    case = Case(frame_bytes=1 << 16)
    with closing(Pair(case, 3)) as pair:
        pair.start(0, LATE, LARGE)
        until(lambda: pair.received_bytes(1) >= 1 << 20)
        for index in (0, 2):
            lose_connection(pair, index)
        pair.start(1, LATE, LARGE)
        pair.check(LATE, LARGE)


def test_quantised_frames_are_kept_too() -> None:
    case = Case(quantization=QuantizationAlgorithm.MIN_MAX, algorithm=Algorithm.DIRECT, frame_bytes=1 << 14)
    data = np.ones(1 << 20, np.float32)
    with closing(Pair(case, 1)) as pair:
        pair.start(0, LATE, data)
        until(lambda: pair.received_bytes(1) > data.nbytes // 8)
        pair.start(1, LATE, data)
        pair.check(LATE, data)


def test_frames_of_attempts_that_never_begin_are_dropped() -> None:
    """Their memory is free once they end or are far behind: in total more arrives than the bound; nothing parks."""
    with closing(HandMadePeer(messages_queued_bytes_max=1 << 20)) as peer:
        body, sent = bytes(100_000), 0
        for never, ended in ((1, 1), (9, 9), (5, 5), (12, 12 + ID_WINDOW), (13, 13 + 3 * ID_WINDOW)):
            for offset in range(9):
                peer.send(Frame(REDUCE_SCATTER, never, 1, offset * 25_000, body))
            sent += 9 * (40 + len(body))
            until(lambda sent=sent: peer.received_bytes() == sent)  # type: ignore[misc]
            peer.engine.end_reduce(ended, commit=False)
        mine, theirs = np.ones(100, np.float32), np.arange(100, dtype=np.float32)
        assert (peer.reduce(Case(), ended + 1, mine, theirs) == mine + theirs).all()


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT])
def test_attempts_begin_in_any_order(algorithm: Algorithm, data: np.ndarray) -> None:
    """Each end begins them in another order. When an end begins an attempt, it knows whether the other has begun it."""
    with closing(Pair(Case(algorithm=algorithm, frame_bytes=1 << 18), 2)) as pair:
        base = 5 * ID_WINDOW
        orders = (9, 3, 7, 8, 1), (3, 9, 1, 7, 8)
        for offset in orders[0]:
            pair.start(0, base + offset, data)
        for offset in orders[1]:
            pair.start(1, base + offset, data)
            pair.check(base + offset, data)


def test_an_announcement_survives_its_connection() -> None:
    """STARTED has no acknowledgement: it is sent again when a connection of its link is lost, read or not."""
    with closing(Pair(Case(frame_bytes=1 << 18), 3)) as pair:
        pair.start(1, LATE, LARGE)
        for index in (0, 2):
            lose_connection(pair, index)
        pair.start(0, LATE, LARGE)
        pair.check(LATE, LARGE)


@pytest.mark.parametrize("kind", [OPENED, STARTED])
@pytest.mark.parametrize("wrong", [{"body": b"x"}, {"chunk": 1}, {"offset": 1}, {"lane": 1}, {"id": 2**63}], ids=str)
def test_an_announcement_with_more_in_it_is_a_violation(peer: HandMadePeer, kind: int, wrong: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"id": LATE, "chunk": 0, "offset": 0, "body": b""} | wrong
    peer.send(Frame(kind, **fields))
    (lost,) = wait_events(peer.engine, 1)
    assert isinstance(lost, LinkLost) and lost.status == -errno.EPROTO


def test_frames_beyond_the_bound_wait_for_their_attempt() -> None:
    """A peer that sends more than it should uses no more memory than messages may."""
    with closing(HandMadePeer(messages_queued_bytes_max=1 << 20)) as peer:
        body = bytes(100_000)
        for offset in range(12):
            peer.send(Frame(REDUCE_SCATTER, LATE, 1, offset * 25_000, body))
        until(lambda: peer.received_bytes() == 10 * (40 + len(body)) + 40)
        data = np.ones(600_000, np.float32)
        peer.start(Case(frame_bytes=100_000), LATE, data, np.empty_like(data))
        until(lambda: peer.received_bytes() == 12 * (40 + len(body)))


def test_an_early_frame_twice_is_a_violation(peer: HandMadePeer) -> None:
    for _ in range(2):
        peer.send(Frame(REDUCE_SCATTER, LATE, 1, 0, bytes(2000)))
    until(lambda: peer.received_bytes() == 2 * 2040)
    data = np.ones(1000, np.float32)
    peer.start(Case(), LATE, data, np.empty_like(data))
    done, lost = wait_failure(peer.engine)
    assert (done.status, done.fault, lost.peer) == (-errno.EPROTO, peer_id(1), peer_id(1))
