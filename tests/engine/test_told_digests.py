"""The C engine tells the digest of a result to the other peers, until the caller forbids it."""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from engine_mesh import Case, Mesh, make_plan, peer_id, until

from zpccl.engine.engine import DIGEST_CHANNEL, Engine, MessageReceived, ReduceDone
from zpccl.types import Algorithm

WAIT_S = 30
CALLS = (10, 20, 30)
INPUT = np.arange(3000, dtype=np.float32)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with closing(Mesh(3)) as made:
        for engine in made.engines:
            engine.open_channel(DIGEST_CHANNEL)
        yield made


def start(mesh: Mesh, rank: int, target: np.ndarray, algorithm: Algorithm = Algorithm.RING) -> None:
    case = Case(algorithm=algorithm)
    plan = make_plan(case, 1, rank, mesh.size, INPUT, target)
    mesh.engines[rank].start_reduce(replace(plan, digest_channel=DIGEST_CHANNEL, call=CALLS[rank]))


class Heard:
    """The events of one engine: the end of the attempt, and the digests that others have told."""

    def __init__(self, engine: Engine) -> None:
        self.done: ReduceDone | None = None
        self.told: dict[bytes, tuple[int, ...]] = {}
        self._engine = engine

    def until_done(self, told_count: int = 0) -> Heard:
        while self.done is None or len(self.told) < told_count:
            assert select.select([self._engine.fileno()], [], [], WAIT_S)[0], "no event comes"
            for event in self._engine.poll():
                if isinstance(event, MessageReceived):
                    assert event.channel_id == DIGEST_CHANNEL
                    self.told[event.peer] = struct.unpack(">QQQ", event.body.read())
                elif isinstance(event, ReduceDone):
                    self.done = event
        return self


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT, Algorithm.ONE_SHOT])
def test_the_digest_goes_to_all_others_with_the_call_of_its_sender(mesh: Mesh, algorithm: Algorithm) -> None:
    targets = [np.empty_like(INPUT) for _ in range(3)]
    for rank, target in enumerate(targets):
        start(mesh, rank, target, algorithm)
    for rank, engine in enumerate(mesh.engines):
        heard = Heard(engine).until_done(2)
        assert heard.done is not None and heard.done.has_told and heard.done.status == 0
        others = [other for other in range(3) if other != rank]
        assert heard.told == {peer_id(other): (1, CALLS[other], heard.done.digest) for other in others}
        engine.end_reduce(1, commit=True)


def test_what_is_withheld_is_not_told(mesh: Mesh) -> None:
    targets = [np.empty_like(INPUT) for _ in range(3)]
    for rank, target in enumerate(targets[:2]):
        start(mesh, rank, target)
    assert not mesh.engines[0].withhold_digest(1)
    assert not mesh.engines[0].withhold_digest(99), "there is no such attempt"
    start(mesh, 2, targets[2])
    heard = Heard(mesh.engines[0]).until_done(2)
    assert heard.done is not None and heard.done.status == 0 and not heard.done.has_told
    mesh.engines[0].post_message(peer_id(1), DIGEST_CHANNEL, struct.pack(">QQQ", 0, 0, 0), b"", WAIT_S)
    assert Heard(mesh.engines[1]).until_done(2).told[peer_id(0)] == (0, 0, 0), "it is the first message of this peer"


def test_what_was_told_is_said_until_the_end_of_the_attempt_was_polled() -> None:
    with closing(Mesh(2)) as mesh:
        engine, other = mesh.engines
        other.open_channel(DIGEST_CHANNEL)
        targets = [np.empty_like(INPUT) for _ in range(2)]
        for rank, target in enumerate(targets):
            start(mesh, rank, target)
        Heard(other).until_done(1)
        until(lambda: bool(select.select([engine.fileno()], [], [], 0)[0]))
        assert engine.withhold_digest(1) and engine.withhold_digest(1)
        done = Heard(engine).until_done().done
        assert done is not None and done.has_told
        assert not engine.withhold_digest(1)


def test_a_failed_attempt_tells_nothing(mesh: Mesh) -> None:
    targets = [np.empty_like(INPUT) for _ in range(3)]
    for rank, target in enumerate(targets[:2]):
        start(mesh, rank, target)
    mesh.engines[2].close()
    for engine in mesh.engines[:2]:
        done = Heard(engine).until_done().done
        assert done is not None and done.status < 0 and not done.has_told
