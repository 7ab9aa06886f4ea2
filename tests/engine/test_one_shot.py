"""The one-shot exchange of the C engine: results in one hop, its bound, aborts, hostile peers.

test_engine.py tests what it has in common with the other algorithms.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest
from engine_mesh import (
    ALL_GATHER,
    FLOATING,
    REDUCE_SCATTER,
    Case,
    Frame,
    HandMadePeer,
    Mesh,
    check_hostile_frames,
    make_plan,
    raises_errno,
    random_inputs,
    run,
    wait_done,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reference_results import check_result

from zpccl import limits
from zpccl.types import Algorithm, DataType, QuantizationAlgorithm, ReduceOp

ONE_SHOT = Algorithm.ONE_SHOT


# --- Results ----------------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=150)
@given(
    size=st.sampled_from([2, 3, 5, 8]),
    count=st.integers(1, 1100),
    case=st.builds(
        Case,
        st.sampled_from(DataType),
        st.sampled_from(ReduceOp),
        in_place=st.booleans(),
        restore=st.booleans(),
        frame_bytes=st.sampled_from([64, 1000, 1 << 18]),
        algorithm=st.just(ONE_SHOT),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_results(meshes: dict[int, Mesh], size: int, count: int, case: Case, seed: int) -> None:
    """S1: results are equal bit for bit, and right; in place even while the input is still being sent to others."""
    inputs = random_inputs(np.random.default_rng(seed), case, count, size)
    check_result(case, inputs, run(meshes[size], case, inputs)[0])


def test_each_sends_its_tensor_once_to_each_of_the_others(meshes: dict[int, Mesh]) -> None:
    """One hop: each sends nothing else."""
    mesh = meshes[3]
    attempt_id, data = mesh.next_id(), np.ones(1000, np.float32)
    targets = [np.zeros_like(data) for _ in mesh.engines]
    for rank, engine in enumerate(mesh.engines):
        engine.start_reduce(make_plan(Case(algorithm=ONE_SHOT), attempt_id, rank, 3, data, targets[rank]))
    for engine in mesh.engines:
        done = wait_done(engine)
        assert 2 * data.nbytes < done.tx_bytes < 2 * data.nbytes + 100
        engine.end_reduce(attempt_id, commit=True)
    assert all((target == 3).all() for target in targets)


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5])
def test_what_each_sends_is_bounded(meshes: dict[int, Mesh], size: int) -> None:
    """B1: this bounds what each receives too. The planner has the same bound."""
    mesh = meshes[size]
    most = limits.ONE_SHOT_BYTES_MAX // (size - 1) // 4
    inputs = [np.ones(most, np.float32) for _ in range(size)]
    assert (run(mesh, Case(algorithm=ONE_SHOT), inputs)[0] == size).all()
    large = np.ones(most + 1, np.float32)
    with raises_errno(errno.EINVAL):
        mesh.engines[0].start_reduce(make_plan(Case(algorithm=ONE_SHOT), mesh.next_id(), 0, size, large, large))


def test_nothing_is_quantised(meshes: dict[int, Mesh]) -> None:
    case, data = Case(quantization=QuantizationAlgorithm.MIN_MAX, algorithm=ONE_SHOT), np.ones(100, np.float32)
    assert case.datatype in FLOATING
    with raises_errno(errno.EINVAL):
        meshes[2].engines[0].start_reduce(make_plan(case, meshes[2].next_id(), 0, 2, data, data))


# --- Aborts and hostile peers -----------------------------------------------------------------------------------------

COUNT = 2048
CASE = Case(in_place=True, frame_bytes=4096, algorithm=ONE_SHOT)
"""Two frames."""


def share(offset: int = 0, elements: int = 1024, kind: int = REDUCE_SCATTER, chunk: int = 0) -> Frame:
    return Frame(kind, 1, chunk, offset, np.ones(elements, np.float32).tobytes())


def test_the_input_is_sent_though_the_result_has_taken_its_place(peer: HandMadePeer) -> None:
    """In place, all shares of others may have arrived before the own one is sent."""
    buffer = np.arange(COUNT, dtype=np.float32)
    for offset in (0, 1024):
        peer.send(share(offset))
    peer.start(CASE, 1, buffer, buffer)
    assert wait_done(peer.engine).status == 0
    assert (buffer == np.arange(COUNT) + 1).all()
    frames = sorted((peer.receive() for _ in range(2)), key=lambda frame: frame.offset)
    assert [frame.offset for frame in frames] == [0, 1024]
    assert b"".join(frame.body for frame in frames) == np.arange(COUNT, dtype=np.float32).tobytes()
    peer.engine.end_reduce(1, commit=True)
    assert (buffer == np.arange(COUNT) + 1).all()


@pytest.mark.parametrize("offsets", [[], [1024], [0, 1024]])
def test_an_abort_restores_the_input(peer: HandMadePeer, offsets: list[int]) -> None:
    """S2: before, between and after the frames that complete it."""
    buffer = np.arange(COUNT, dtype=np.float32)
    before = buffer.tobytes()
    peer.start(CASE, 1, buffer, buffer)
    for offset in offsets:
        peer.send(share(offset))
    if len(offsets) == 2:
        assert wait_done(peer.engine).status == 0
    peer.engine.end_reduce(1, commit=False)
    assert buffer.tobytes() == before


HOSTILE = {
    "a share twice": [share(), share()],
    "a result": [share(kind=ALL_GATHER)],
    "a chunk that is not there": [share(chunk=1)],
    "a short share": [share(elements=1023)],
    "a share between frames": [share(offset=1, elements=1023)],
    "a share beyond the end": [share(offset=2048)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_close_their_link_and_the_buffer_is_restored(peer: HandMadePeer, name: str) -> None:
    check_hostile_frames(peer.engine, CASE, COUNT, 2, 1, peer.socket, HOSTILE[name])
