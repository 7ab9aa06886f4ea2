"""The direct exchange of the C engine: window, roundings, hostile and lost peers.

test_engine.py tests what it has in common with other algorithms.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest
from engine_mesh import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Case,
    Frame,
    Mesh,
    Three,
    check_hostile_frames,
    make_plan,
    peer_id,
    random_inputs,
    run,
    storage,
    to_bfloat16,
    to_float64,
    until,
    wait_done,
    wait_events,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reference_results import check_result

from zpccl.engine.engine import EngineError, ReduceDone
from zpccl.types import Algorithm, DataType, QuantizationAlgorithm, ReduceOp

WINDOW_BYTES = 24 << 20
"""The engine's buffer for shares and quantised results of one attempt (ZP__TREES_WINDOW_BYTES)."""


@pytest.fixture
def mesh(meshes: dict[int, Mesh]) -> Mesh:
    return meshes[5]


# --- Results ----------------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=60)
@given(
    size=st.sampled_from([2, 3, 5, 8]),
    count=st.integers(1, 9000),
    datatype=st.sampled_from([DataType.FLOAT16, DataType.BFLOAT16]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_16_bit_types_are_folded_in_float(
    meshes: dict[int, Mesh], size: int, count: int, datatype: DataType, op: ReduceOp, in_place: bool, seed: int
) -> None:
    """For any bits, the result is the fold in float32 in order of rank, rounded once."""
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(0, 1 << 16, count, np.uint16).view(storage(datatype)) for _ in range(size)]
    case = Case(datatype, op, in_place=in_place, frame_bytes=6000, algorithm=Algorithm.DIRECT)
    with np.errstate(all="ignore"):
        wide = [to_float64(x, datatype).astype(np.float32) for x in inputs]
        total = (np.multiply if op is ReduceOp.PROD else np.add).reduce(wide)
        mean = total / np.float32(size) if op is ReduceOp.AVG else total
        expected = to_bfloat16(mean) if datatype is DataType.BFLOAT16 else mean.astype(np.float16)
    is_number = ~np.isnan(mean)
    result = run(meshes[size], case, inputs)[0]
    assert result[is_number].tobytes() == expected[is_number].tobytes()
    assert np.isnan(to_float64(result, datatype)[~is_number]).all()


@pytest.mark.slow
def test_more_than_the_window(mesh: Mesh) -> None:
    """B1: a chunk is larger than what is in flight at a time. Two attempts at once compete for the connections."""
    count = 5 * (WINDOW_BYTES // 4 + (1 << 20)) // 4
    rng = np.random.default_rng(2)
    jobs = []
    for in_place in (False, True):
        case = Case(in_place=in_place, frame_bytes=1 << 18, algorithm=Algorithm.DIRECT)
        inputs = random_inputs(rng, case, count, 5)
        sources = [x.copy() for x in inputs]
        targets = sources if in_place else [np.empty_like(x) for x in inputs]
        jobs.append((mesh.next_id(), case, inputs, sources, targets))
    for rank, engine in enumerate(mesh.engines):
        for attempt_id, case, _, sources, targets in jobs:
            engine.start_reduce(make_plan(case, attempt_id, rank, 5, sources[rank], targets[rank]))
    for engine in mesh.engines:
        assert all(isinstance(event, ReduceDone) and event.status == 0 for event in wait_events(engine, 2))
    for attempt_id, case, inputs, _, targets in jobs:
        for engine in mesh.engines:
            engine.end_reduce(attempt_id, commit=True)
        check_result(case, inputs, targets[0])
        assert all(target.tobytes() == targets[0].tobytes() for target in targets)


@pytest.mark.parametrize("in_place", [False, True])
def test_more_than_the_window_quantised(mesh: Mesh, in_place: bool) -> None:
    """Blocks of one element take 9 bytes on the wire, so even a small tensor is larger than the window."""
    case = Case(
        DataType.FLOAT16,
        ReduceOp.AVG,
        QuantizationAlgorithm.MIN_MAX,
        block_elements=1,
        frame_bytes=1 << 15,
        in_place=in_place,
        algorithm=Algorithm.DIRECT,
    )
    count = 5 * (WINDOW_BYTES // 9 // 9 + 50_000)
    inputs = random_inputs(np.random.default_rng(3), case, count, 5)
    check_result(case, inputs, run(mesh, case, inputs)[0])


@pytest.mark.parametrize("size", [2, 5, 16])
def test_two_roundings_whatever_the_number_of_peers(size: int) -> None:
    """The error is that of N - 1 shares, each rounded once, and of one result: nothing is rounded again."""
    mesh = Mesh(size)
    case = Case(
        quantization=QuantizationAlgorithm.MIN_MAX, block_elements=256, frame_bytes=8192, algorithm=Algorithm.DIRECT
    )
    rng = np.random.default_rng(size)
    inputs = [rng.uniform(-1, 1, 40_000).astype(np.float32) for _ in range(size)]
    result = run(mesh, case, inputs)[0]
    mesh.close()
    exact = np.sum(np.stack(inputs), axis=0, dtype=np.float64)
    shares_error = (size - 1) * 2 / 510
    result_error = (float(np.ptp(exact)) + 2 * shares_error) / 510
    assert np.max(np.abs(result - exact)) <= (shares_error + result_error) * (1 + 2**-10)


# --- Hostile peers ----------------------------------------------------------------------------------------------------


COUNT = 3 * 1024
"""Number of elements: a chunk of 4 KiB, in one frame."""
CASE = Case(in_place=True, frame_bytes=4096, algorithm=Algorithm.DIRECT)
SHARE = Frame(REDUCE_SCATTER, 1, 0, 0, bytes(4096))

HOSTILE = {
    "a share twice": [SHARE, SHARE],
    "a share of a chunk that is not ours": [Frame(REDUCE_SCATTER, 1, 1, 0, bytes(4096))],
    "a result of our chunk": [Frame(ALL_GATHER, 1, 0, 0, bytes(4096))],
    "a result of another's chunk": [Frame(ALL_GATHER, 1, 2, 0, bytes(4096))],
    "a chunk that is not there": [Frame(REDUCE_SCATTER, 1, 3, 0, bytes(4096))],
    "a short share": [Frame(REDUCE_SCATTER, 1, 0, 0, bytes(4092))],
    "a share between frames": [Frame(REDUCE_SCATTER, 1, 0, 4, bytes(4092))],
    "a result twice": [Frame(ALL_GATHER, 1, 1, 0, bytes(4096))] * 2,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_close_their_link_and_the_buffer_is_restored(three: Three, name: str) -> None:
    check_hostile_frames(three.engine, CASE, COUNT, 3, 1, three.ends[1], HOSTILE[name])


def test_a_share_beyond_the_window_is_a_violation(three: Three) -> None:
    """Senders wait for results: otherwise a sender could overwrite shares that are not combined yet."""
    window = WINDOW_BYTES // 2
    count = 3 * (window // 4 + 300_000)
    data = np.zeros(count, np.float32)
    case = Case(frame_bytes=1 << 18, algorithm=Algorithm.DIRECT)
    output = np.empty_like(data)
    three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
    three.ends[1].sendall(Frame(REDUCE_SCATTER, 1, 0, window // 4, b"", length=1 << 18).encode())
    done = next(event for event in wait_events(three.engine, 2) if isinstance(event, ReduceDone))
    assert (done.status, done.fault) == (-errno.EPROTO, peer_id(1))


# --- Lost links and stalls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2])
def test_the_loss_of_any_link_fails_the_attempt_and_names_the_peer(three: Three, rank: int) -> None:
    data = np.ones(COUNT, np.float32)
    three.engine.start_reduce(make_plan(CASE, 1, 0, 3, data, data))
    three.ends[rank].close()
    done = next(event for event in wait_events(three.engine, 2) if isinstance(event, ReduceDone))
    assert done.status < 0 and done.fault == peer_id(rank)
    three.engine.end_reduce(1, commit=False)
    assert (data == 1).all()


def test_it_needs_a_link_to_everyone(three: Three) -> None:
    data = np.ones(COUNT, np.float32)
    with pytest.raises(EngineError) as error:
        three.engine.start_reduce(make_plan(CASE, 1, 0, 4, data, data))
    assert error.value.errno == errno.ENOTCONN


def test_a_peer_that_takes_nothing_is_at_fault_for_the_stall() -> None:
    three = Three(stall_timeout_ms=200, buffer_bytes=4096)
    case = Case(frame_bytes=1 << 18, algorithm=Algorithm.DIRECT)
    data, output = np.ones(3 << 20, np.float32), np.empty(3 << 20, np.float32)
    three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
    left = (1 << 20) * 4 + 16 * len(Frame(REDUCE_SCATTER, 1, 1, 0, b"").encode())
    while left:  # One peer sends its whole share, the other nothing.
        left -= len(three.ends[1].recv(min(left, 1 << 20)))
    done = wait_done(three.engine)
    assert (done.status, done.fault) == (-errno.ETIMEDOUT, peer_id(2))
    three.close()


def test_cancel_with_half_of_the_shares(three: Three) -> None:
    """S2, S4: frames that arrive after the end are dropped, and the links go on."""
    buffer = np.arange(COUNT, dtype=np.float32)
    before = buffer.tobytes()
    three.engine.start_reduce(make_plan(CASE, 1, 0, 3, buffer, buffer))
    three.ends[1].sendall(SHARE.encode())
    three.ends[2].sendall(SHARE.encode()[:1000])
    until(lambda: sum(three.engine.link_state(peer_id(2)).rx_bytes) == 1000)
    three.engine.end_reduce(1, commit=False)
    assert buffer.tobytes() == before
    three.ends[2].sendall(SHARE.encode()[1000:] + SHARE.encode())
    until(lambda: sum(three.engine.link_state(peer_id(2)).rx_bytes) == 2 * len(SHARE.encode()))
    assert buffer.tobytes() == before
    assert three.engine.poll() == []
