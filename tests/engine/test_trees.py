"""Lanes of trees in the C engine: results, links, windows, lost connections, aborts, hostile peers.

The direct exchange is one star for each rank. test_engine.py tests what it has in common with other algorithms, and
quantised results.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_mesh import (
    ALL_GATHER,
    FLOATING,
    REDUCE_SCATTER,
    Case,
    Frame,
    Mesh,
    Three,
    check_hostile_frames,
    make_plan,
    peer_id,
    raises_errno,
    random_inputs,
    read_exactly,
    receive_frame,
    run,
    storage,
    to_bfloat16,
    to_float64,
    until,
    wait_done,
    wait_events,
    wait_failure,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reference_results import check_result
from tree_lanes import Parents, any_lanes, binary, chain, count_of, cut, expected, mixed, star, stars

from zpccl.engine.engine import ConnectionLost, Engine, EngineEvent, LinkLost, ReduceDone, TreeLane
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

DIRECT = Algorithm.DIRECT
WORLD_SIZES = (2, 3, 5, 8)
WINDOW_BYTES = 24 << 20
"""The engine's buffers for one attempt (ZP__TREES_WINDOW_BYTES)."""


def needs_stars(case: Case) -> bool:
    return case.op is ReduceOp.AVG and case.datatype not in FLOATING and case.datatype.itemsize < 8


def lanes_for(case: Case, size: int, count: int) -> tuple[TreeLane, ...]:
    if needs_stars(case):
        return cut(count, [star(size, root) for root in (0, size - 1, 1)], (5, 0, 2))
    return mixed(size, count)


def check_bits(mesh: Mesh, case: Case, inputs: Sequence[np.ndarray]) -> None:
    result = run(mesh, case, inputs)[0]
    assert result.tobytes() == expected(case, case.lanes, inputs).tobytes(), case


# --- Results (S1: equal bit for bit, and right) -----------------------------------------------------------------------


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("datatype", DataType)
def test_parity(meshes: dict[int, Mesh], datatype: DataType, op: ReduceOp) -> None:
    """Chains, binary trees and stars of any length with several roots: every dtype and op, in place and not."""
    rng = np.random.default_rng([datatype, op])
    for size, mesh in meshes.items():
        for in_place, restore, count in (False, True, 4099), (True, True, 4099), (True, False, 4099), (False, True, 7):
            case = Case(datatype, op, in_place=in_place, restore=restore, frame_bytes=1000, algorithm=DIRECT)
            case = replace(case, lanes=lanes_for(case, size, count))
            inputs = random_inputs(rng, case, count, size)
            check_bits(mesh, case, inputs)
            check_result(case, inputs, expected(case, case.lanes, inputs))


@hypothesis_settings(max_examples=150)
@given(
    data=st.data(),
    size=st.sampled_from(WORLD_SIZES),
    case=st.builds(
        Case,
        st.sampled_from(DataType),
        st.sampled_from(ReduceOp),
        frame_bytes=st.integers(64, 5000),
        in_place=st.booleans(),
        restore=st.booleans(),
        algorithm=st.just(DIRECT),
    ),
)
def test_any_lanes(meshes: dict[int, Mesh], data: st.DataObject, size: int, case: Case) -> None:
    """Any trees, of any roots and lengths: the result is that of numpy, bit for bit."""
    lanes = data.draw(any_lanes(size, stars_only=needs_stars(case)))
    case = replace(case, lanes=lanes)
    check_bits(meshes[size], case, random_inputs(np.random.default_rng(case.frame_bytes), case, count_of(lanes), size))


@pytest.mark.parametrize("datatype", [DataType.FLOAT, DataType.BFLOAT16, DataType.UINT16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_equal_stars_are_the_direct_exchange(meshes: dict[int, Mesh], datatype: DataType, op: ReduceOp) -> None:
    case = Case(datatype, op, frame_bytes=1000, algorithm=DIRECT)
    for size, mesh in meshes.items():
        inputs = random_inputs(np.random.default_rng(size), case, 4099, size)
        named = run(mesh, replace(case, lanes=stars(size, 4099)), inputs)[0]
        assert named.tobytes() == run(mesh, case, inputs)[0].tobytes()


@hypothesis_settings(max_examples=60)
@given(
    size=st.sampled_from(WORLD_SIZES),
    count=st.integers(1, 9000),
    datatype=st.sampled_from([DataType.FLOAT16, DataType.BFLOAT16]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_16_bit_types_are_folded_in_float(
    meshes: dict[int, Mesh], size: int, count: int, datatype: DataType, op: ReduceOp, in_place: bool, seed: int
) -> None:
    """Any bits: the direct exchange folds them in float32 in order of rank, and rounds once."""
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(0, 1 << 16, count, np.uint16).view(storage(datatype)) for _ in range(size)]
    case = Case(datatype, op, in_place=in_place, frame_bytes=6000, algorithm=DIRECT)
    with np.errstate(all="ignore"):
        wide = [to_float64(x, datatype).astype(np.float32) for x in inputs]
        total = (np.multiply if op is ReduceOp.PROD else np.add).reduce(wide)
        mean = total / np.float32(size) if op is ReduceOp.AVG else total
        expected = to_bfloat16(mean) if datatype is DataType.BFLOAT16 else mean.astype(np.float16)
    is_number = ~np.isnan(mean)
    result = run(meshes[size], case, inputs)[0]
    assert result[is_number].tobytes() == expected[is_number].tobytes()
    assert np.isnan(to_float64(result, datatype)[~is_number]).all()


def test_quantised_shares_of_sixteen_peers() -> None:
    case = Case(quantization=QuantizationAlgorithm.MIN_MAX, block_elements=256, frame_bytes=8192, algorithm=DIRECT)
    inputs = random_inputs(np.random.default_rng(16), case, 40_000, 16)
    with closing(Mesh(16)) as mesh:
        check_result(case, inputs, run(mesh, case, inputs)[0])


@pytest.mark.parametrize("tree", [chain(range(8)), binary(range(8)), chain((3, 1, 4, 0, 5, 2, 6, 7))])
def test_a_mean_of_float16_does_not_overflow_on_the_way(meshes: dict[int, Mesh], tree: Parents) -> None:
    """The sum of 40,000 and 40,000 does not fit into float16."""
    inputs = [np.full(1000, 40_000, np.float16) for _ in range(8)]
    case = Case(DataType.FLOAT16, ReduceOp.AVG, algorithm=DIRECT, lanes=(TreeLane(1000, tree),))
    for quantization in (QuantizationAlgorithm.NONE, QuantizationAlgorithm.MIN_MAX):
        assert (run(meshes[8], replace(case, quantization=quantization), inputs)[0] == 40_000).all()


@pytest.mark.parametrize("datatype", [DataType.FLOAT16, DataType.BFLOAT16])
def test_a_mean_of_means_counts_each_input_once(meshes: dict[int, Mesh], datatype: DataType) -> None:
    """The mean of seven zeros and a one, wherever they are in the tree, is about an eighth."""
    lanes = cut(40, (chain(range(8)), binary(range(8)), star(8, 3)), (1, 1, 1))
    case = Case(datatype, ReduceOp.AVG, algorithm=DIRECT, lanes=lanes)
    for rank in range(8):
        values = [np.full(40, float(other == rank), np.float32) for other in range(8)]
        inputs = [to_bfloat16(v) if datatype is DataType.BFLOAT16 else v.astype(np.float16) for v in values]
        np.testing.assert_allclose(to_float64(run(meshes[8], case, inputs)[0], datatype), 1 / 8, rtol=0.02)


# --- Windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_more_than_the_window_quantised(meshes: dict[int, Mesh], in_place: bool) -> None:
    """B1: blocks of one element take 9 bytes on the wire, so small tensors are larger than the windows of all lanes. A
    rank with another window than its neighbours would violate their rules, and lose its links."""
    lanes = mixed(5, 5 * (WINDOW_BYTES // 9 // 9 + 50_000))
    case = Case(
        DataType.FLOAT16,
        ReduceOp.AVG,
        QuantizationAlgorithm.MIN_MAX,
        block_elements=1,
        frame_bytes=1 << 15,
        in_place=in_place,
        algorithm=DIRECT,
        lanes=lanes,
    )
    inputs = random_inputs(np.random.default_rng(3), case, count_of(lanes), 5)
    check_result(case, inputs, run(meshes[5], case, inputs)[0])


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_more_than_the_window(meshes: dict[int, Mesh], in_place: bool) -> None:
    """B1: the same without quantisation, where shares of inner ranks are in the buffers of their children's shares."""
    case = Case(frame_bytes=1 << 18, in_place=in_place, algorithm=DIRECT, lanes=mixed(5, 20_000_003))
    check_bits(meshes[5], case, random_inputs(np.random.default_rng(2), case, 20_000_003, 5))


# --- Links ------------------------------------------------------------------------------------------------------------


def test_only_parents_and_children_need_a_link() -> None:
    """Four peers in a row: lanes along it have any root; a lane without elements may have any tree."""
    row = range(4)
    lanes = (
        TreeLane(3000, chain(row)),
        TreeLane(0, star(4, 0)),
        TreeLane(1999, (1, 1, 1, 2)),
        TreeLane(1001, chain(row[::-1])),
    )
    with closing(Mesh(4, pairs=itertools.pairwise(row))) as mesh:
        case = Case(algorithm=DIRECT, frame_bytes=1000, lanes=lanes)
        check_bits(mesh, case, random_inputs(np.random.default_rng(1), case, 6000, 4))
        case = replace(case, lanes=(*lanes, TreeLane(1, star(4, 1))))
        data, output = np.ones(6001, np.float32), np.empty(6001, np.float32)
        attempt_id = mesh.next_id()
        for rank, engine in enumerate(mesh.engines):  # Rank 3 would be a child of 1.
            plan = make_plan(case, attempt_id, rank, 4, data, output)
            if rank in (1, 3):
                with raises_errno(errno.ENOTCONN):
                    engine.start_reduce(plan)
            engine.end_reduce(attempt_id, commit=False)


STAR, CHAIN = star(3, 0), chain(range(3))
ROWS = {"kind": CollectiveKind.ALL_GATHER, "count": 99, "owners": (0, 1, 2)}
PARTS = {"kind": CollectiveKind.REDUCE_SCATTER, "owners": (0, 1, 2)}
BROADCAST = {"kind": CollectiveKind.BROADCAST, "owners": (0,)}
UINT8_MEAN: dict[str, Any] = {"datatype": DataType.UINT8, "op": ReduceOp.AVG}
INVALID: dict[str, tuple[tuple[TreeLane, ...], dict[str, Any]]] = {
    "too few elements": ((TreeLane(99, STAR),), {}),
    "too many elements": ((TreeLane(99, STAR), TreeLane(2, STAR)), {}),
    "elements beyond all bounds": ((TreeLane(2**64 - 1, STAR), TreeLane(101, STAR)), {}),
    "no root": ((TreeLane(100, (1, 2, 0)),), {}),
    "two roots": ((TreeLane(100, (0, 1, 0)),), {}),
    "a cycle beside the root": ((TreeLane(100, (0, 2, 1)),), {}),
    "a parent that is no rank": ((TreeLane(100, (0, 0, 3)),), {}),
    "a cycle in a lane without elements": ((TreeLane(0, (1, 0, 2)), TreeLane(100, STAR)), {}),
    "a partial sum of small integers": ((TreeLane(50, STAR), TreeLane(50, CHAIN)), UINT8_MEAN),
    "more lanes than may be": ((TreeLane(100, STAR), *[TreeLane(0, STAR)] * 256), {}),
    "a ring": ((TreeLane(100, STAR),), {"algorithm": Algorithm.RING}),
    "an all-to-all": ((TreeLane(99, STAR),), {"kind": CollectiveKind.ALL_TO_ALL, "count": 99}),
    "a row from another root": (tuple(TreeLane(99, star(3, rank)) for rank in (0, 2, 1)), ROWS),
    "a row too few": ((TreeLane(99, STAR), TreeLane(99, star(3, 1))), ROWS),
    "a row too long": ((TreeLane(99, STAR), TreeLane(100, star(3, 1)), TreeLane(98, star(3, 2))), ROWS),
    "a part too short": ((TreeLane(33, STAR), TreeLane(34, star(3, 1)), TreeLane(33, star(3, 2))), PARTS),
    "a broadcast from somebody else": ((TreeLane(50, STAR), TreeLane(50, star(3, 1))), BROADCAST),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_plan(three: Three, name: str) -> None:
    lanes, changes = INVALID[name]
    data = np.ones(100, np.float32)
    plan = replace(make_plan(Case(algorithm=DIRECT, lanes=lanes), 1, 0, 3, data, np.empty_like(data)), **changes)
    with raises_errno(errno.EINVAL):
        three.engine.start_reduce(plan)


def test_a_tree_has_all_peers(three: Three) -> None:
    data = np.ones(100, np.float32)
    with pytest.raises(ValueError, match="the trees of 3 peers have"):
        three.engine.start_reduce(
            make_plan(Case(algorithm=DIRECT, lanes=(TreeLane(100, star(2, 0)),)), 1, 0, 3, data, data)
        )


# --- Lost connections, aborts, stalls ---------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with closing(Mesh(5, connections=3, copies=True)) as made:
        yield made


def end_of_attempt(engine: Engine) -> ReduceDone:
    """The end of the one running attempt; connections may be lost before it."""
    events: list[EngineEvent] = []

    def is_there() -> bool:
        events.extend(engine.poll())
        return any(isinstance(event, ReduceDone) for event in events)

    until(is_there)
    (done,) = (event for event in events if not isinstance(event, ConnectionLost))
    assert isinstance(done, ReduceDone)
    return done


@pytest.mark.parametrize("quantization", [QuantizationAlgorithm.NONE, QuantizationAlgorithm.ZERO_POINT_SCALE])
@pytest.mark.parametrize("seed", range(3))
def test_frames_of_lost_connections_are_sent_again(mesh: Mesh, seed: int, quantization: QuantizationAlgorithm) -> None:
    """Shares, partial shares and results, including forwarded ones: every link loses two connections meanwhile."""
    rng = random.Random(seed)
    case = Case(
        quantization=quantization,
        quantized=QuantizedDataType.INT8,
        in_place=True,
        frame_bytes=4096,
        algorithm=DIRECT,
        lanes=mixed(5, 1_000_003),
    )
    inputs = random_inputs(np.random.default_rng(seed), case, 1_000_003, 5)
    buffers = [x.copy() for x in inputs]
    for rank, engine in enumerate(mesh.engines):
        engine.start_reduce(make_plan(case, 1, rank, 5, buffers[rank], buffers[rank]))
    for share in (0.1, 0.3):
        wanted = int(share * 1_000_003 * (1 if quantization else 4))
        rank = rng.randrange(5)
        until(lambda rank=rank, wanted=wanted: mesh.received_bytes(rank) >= wanted)  # type: ignore[misc]
        for copies in mesh.copies.values():
            with copies.pop(rng.randrange(len(copies))) as copy:
                copy.shutdown(socket.SHUT_RDWR)
    done = [end_of_attempt(engine) for engine in mesh.engines]
    assert [event.status for event in done] == [0] * 5
    assert len({event.digest for event in done}) == 1
    for engine in mesh.engines:
        engine.end_reduce(1, commit=True)
    assert all(buffer.tobytes() == buffers[0].tobytes() for buffer in buffers)
    check_result(case, inputs, buffers[0])


@pytest.mark.parametrize("quantization", [QuantizationAlgorithm.NONE, QuantizationAlgorithm.MIN_MAX])
def test_aborts_at_any_moment_restore_the_input(mesh: Mesh, quantization: QuantizationAlgorithm) -> None:
    """S2, S4: some ranks have results, some only partial ones, some are done. Then another attempt completes."""
    rng = random.Random(1)
    case = Case(quantization=quantization, in_place=True, frame_bytes=2048, algorithm=DIRECT, lanes=mixed(5, 200_003))
    inputs = random_inputs(np.random.default_rng(1), case, 200_003, 5)
    for _ in range(30):
        buffers = [x.copy() for x in inputs]
        attempt_id = mesh.next_id()
        before = [mesh.received_bytes(rank) for rank in range(5)]
        for rank, engine in enumerate(mesh.engines):
            engine.start_reduce(make_plan(case, attempt_id, rank, 5, buffers[rank], buffers[rank]))
        watched, wanted = rng.randrange(5), rng.randrange(300_000 if quantization else 1_000_000)
        until(lambda w=watched, n=wanted, b=before: mesh.received_bytes(w) - b[w] >= n)  # type: ignore[misc]
        for rank in rng.sample(range(5), 5):
            mesh.engines[rank].end_reduce(attempt_id, commit=False)
            assert buffers[rank].tobytes() == inputs[rank].tobytes()
    check_result(case, inputs, run(mesh, case, inputs)[0])


COUNT = 1024
"""Number of elements of a lane: a frame of 4 KiB."""
INNER = (1, 1, 0)
"""A tree in which rank 0 is the child of 1 and the parent of 2."""


def frame(kind: int, lane: int, value: float, offset: int = 0) -> Frame:
    return Frame(kind, 1, lane, offset, np.full(COUNT, value, np.float32).tobytes())


@pytest.mark.parametrize("steps", range(5))
def test_an_inner_rank_step_by_step(three: Three, steps: int) -> None:
    """It adds its input to its child's share, sends the sum up, and sends the result down unchanged. S2: if the attempt
    is given up after any of these steps, the input is as before."""
    case = Case(in_place=True, frame_bytes=4 * COUNT, algorithm=DIRECT, lanes=(TreeLane(COUNT, INNER),))
    buffer = np.arange(COUNT, dtype=np.float32)
    before = buffer.tobytes()
    three.engine.start_reduce(make_plan(case, 1, 0, 3, buffer, buffer))
    if steps >= 1:
        three.ends[2].sendall(frame(REDUCE_SCATTER, 0, 5).encode())
    if steps >= 2:
        share = receive_frame(three.ends[1])
        assert (share.kind, share.chunk, share.offset) == (REDUCE_SCATTER, 0, 0)
        assert share.body == (np.arange(COUNT, dtype=np.float32) + 5).tobytes()
    if steps >= 3:
        three.ends[1].sendall(frame(ALL_GATHER, 0, 7).encode())
    if steps >= 4:
        assert receive_frame(three.ends[2]) == frame(ALL_GATHER, 0, 7)
        assert wait_done(three.engine).status == 0
        assert (buffer == 7).all()
    three.engine.end_reduce(1, commit=False)
    assert buffer.tobytes() == before
    for rank in (1, 2):  # Late frames are dropped.
        three.ends[rank].sendall(frame(REDUCE_SCATTER, 0, 9).encode() + frame(ALL_GATHER, 0, 9).encode())
        sent = 2 * len(frame(ALL_GATHER, 0, 9).encode())
        until(lambda rank=rank, sent=sent: sum(three.engine.link_state(peer_id(rank)).rx_bytes) >= sent)  # type: ignore[misc]
    assert buffer.tobytes() == before


@pytest.mark.parametrize("rank", [1, 2])
def test_the_loss_of_parent_or_child_fails_the_attempt_and_names_the_peer(three: Three, rank: int) -> None:
    data = np.ones(COUNT, np.float32)
    case = Case(in_place=True, algorithm=DIRECT, lanes=(TreeLane(COUNT, INNER),))
    three.engine.start_reduce(make_plan(case, 1, 0, 3, data, data))
    three.ends[rank].close()
    done, _ = wait_failure(three.engine)
    assert done.status < 0 and done.fault == peer_id(rank)
    three.engine.end_reduce(1, commit=False)
    assert (data == 1).all()


def test_who_is_no_neighbour_may_go(three: Three) -> None:
    """Rank 2 is not a neighbour of rank 0: the attempt does not use its link."""
    data = np.ones(COUNT, np.float32)
    output = np.empty_like(data)
    case = Case(frame_bytes=4 * COUNT, algorithm=DIRECT, lanes=(TreeLane(COUNT, (1, 1, 1)),))
    three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
    three.ends[2].close()
    (lost,) = wait_events(three.engine, 1)
    assert isinstance(lost, LinkLost) and lost.peer == peer_id(2)
    assert receive_frame(three.ends[1]) == frame(REDUCE_SCATTER, 0, 1)
    three.ends[1].sendall(frame(ALL_GATHER, 0, 3).encode())
    assert wait_done(three.engine).status == 0
    assert (output == 3).all()


def test_a_parent_that_takes_nothing_is_at_fault_for_the_stall() -> None:
    count = 256 * COUNT
    case = Case(frame_bytes=4 * COUNT, algorithm=DIRECT, lanes=(TreeLane(count, INNER),))
    data, output = np.ones(count, np.float32), np.empty(count, np.float32)
    shares = b"".join(frame(REDUCE_SCATTER, 0, 1, offset).encode() for offset in range(0, count, COUNT))
    with closing(Three(stall_timeout_ms=200, buffer_bytes=4096)) as three:
        three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
        three.ends[2].sendall(shares)
        done = wait_done(three.engine)
        assert (done.status, done.fault) == (-errno.ETIMEDOUT, peer_id(1))


def test_of_two_peers_the_one_that_takes_nothing_is_at_fault_for_the_stall() -> None:
    case = Case(frame_bytes=1 << 18, algorithm=DIRECT)
    data, output = np.ones(3 << 20, np.float32), np.empty(3 << 20, np.float32)
    with closing(Three(stall_timeout_ms=200, buffer_bytes=4096)) as three:
        three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
        read_exactly(three.ends[1], (1 << 20) * 4 + 16 * len(Frame(REDUCE_SCATTER, 1, 1, 0, b"").encode()))
        done = wait_done(three.engine)
        assert (done.status, done.fault) == (-errno.ETIMEDOUT, peer_id(2))


# --- When frames are sent ---------------------------------------------------------------------------------------------


def test_results_do_not_wait_for_shares_that_are_due_later() -> None:
    """Shares are ready first. Results that are ready while these wait are sent in their places among them."""
    shares, results, elements = 600, 10, 1024
    lanes = (TreeLane(shares * elements, star(3, 1)), TreeLane(results * elements, star(3, 0)))
    case = Case(frame_bytes=4 * elements, algorithm=DIRECT, lanes=lanes, pace_us=1)
    data = np.ones((shares + results) * elements, np.float32)
    output = np.empty_like(data)
    offsets = range(shares * elements, data.size, elements)
    inputs = [Frame(REDUCE_SCATTER, 1, 1, offset - offsets[0], bytes(4 * elements)) for offset in offsets]
    with closing(Three(buffer_bytes=4096)) as three:
        three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
        for end in three.ends.values():
            end.sendall(b"".join(each.encode() for each in inputs))
        sent_bytes = len(inputs) * len(inputs[0].encode())
        until(lambda: all(sum(three.engine.link_state(peer_id(rank)).rx_bytes) >= sent_bytes for rank in three.ends))
        kinds = [receive_frame(three.ends[1]).kind for _ in range(shares + results)]
        three.engine.end_reduce(1, commit=False)
    places = [place for place, kind in enumerate(kinds) if kind == ALL_GATHER]
    assert len(places) == results
    for number in range(results // 2, results):  # The others may have been ready too late for their places.
        before = sum((2 * share + 1) * results <= (2 * number + 1) * shares for share in range(shares))
        assert places[number] == before + number


@pytest.mark.parametrize("pace_us", [0, 1, 200_000])
def test_frames_are_not_sent_before_their_time(meshes: dict[int, Mesh], pace_us: int) -> None:
    """In equal steps, which end one step before the time is over. The result is the same."""
    size, frames = 3, 20
    lanes = cut(frames * COUNT, [chain(range(size)), star(size, 2)], (1, 3))
    case = Case(frame_bytes=4 * COUNT, algorithm=DIRECT, lanes=lanes, pace_us=pace_us)
    inputs = random_inputs(np.random.default_rng(3), case, frames * COUNT, size)
    begin = time.monotonic()
    check_bits(meshes[size], case, inputs)
    assert time.monotonic() - begin >= pace_us / 1e6 * (frames // 4 - 1) / (frames // 4)


# --- Hostile peers ----------------------------------------------------------------------------------------------------

LANES = cut(5 * COUNT, (INNER, star(3, 0), (1, 1, 1), chain(range(3)), star(3, 2), (2, 2, 2)), (1, 1, 1, 1, 0, 1))
"""Rank 0 is an inner rank, a root, a leaf of 1, the root of 1, which is the parent of 2, and a leaf of 2; lane 4 is
empty."""

HOSTILE = {
    "a share from the parent": (1, [frame(REDUCE_SCATTER, 0, 1)]),
    "a result from a child": (2, [frame(ALL_GATHER, 0, 1)]),
    "a share twice": (2, [frame(REDUCE_SCATTER, 0, 1)] * 2),
    "a share twice, to a root": (1, [frame(REDUCE_SCATTER, 1, 1)] * 2),
    "a result before our share": (1, [frame(ALL_GATHER, 0, 1)]),
    "a result for the root": (1, [frame(ALL_GATHER, 1, 1)]),
    "a share for a leaf": (1, [frame(REDUCE_SCATTER, 2, 1)]),
    "a result twice": (1, [frame(ALL_GATHER, 2, 1)] * 2),
    "a result from one that is not the parent": (2, [frame(ALL_GATHER, 2, 1)]),
    "a share from a child's child": (2, [frame(REDUCE_SCATTER, 3, 1)]),
    "a lane without elements": (2, [frame(ALL_GATHER, 4, 1)]),
    "a lane that is not there": (1, [frame(REDUCE_SCATTER, 6, 1)]),
    "a frame between slots": (1, [frame(REDUCE_SCATTER, 1, 1, offset=1)]),
    "a frame past the end": (1, [frame(REDUCE_SCATTER, 1, 1, offset=COUNT)]),
    "a short share": (1, [Frame(REDUCE_SCATTER, 1, 1, 0, bytes(4 * COUNT - 4))]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_close_their_link_and_the_buffer_is_restored(three: Three, name: str) -> None:
    rank, frames = HOSTILE[name]
    case = Case(in_place=True, frame_bytes=4 * COUNT, algorithm=DIRECT, lanes=LANES)
    check_hostile_frames(three.engine, case, count_of(LANES), 3, rank, three.ends[rank], frames)


@pytest.mark.parametrize("tree", [INNER, STAR])
def test_a_share_beyond_the_window_is_a_violation(three: Three, tree: Parents) -> None:
    """Leaves wait for results: otherwise a leaf could overwrite shares that are not reduced yet. The window has half of
    this lane at most."""
    count = 2 * WINDOW_BYTES // 4
    case = Case(frame_bytes=1 << 18, algorithm=DIRECT, lanes=(TreeLane(count, tree), TreeLane(1000, STAR)))
    data = np.zeros(count + 1000, np.float32)
    output = np.empty_like(data)
    three.engine.start_reduce(make_plan(case, 1, 0, 3, data, output))
    middle = count // 2 // (1 << 16) * (1 << 16)
    three.ends[2].sendall(Frame(REDUCE_SCATTER, 1, 0, middle, b"", length=1 << 18).encode())
    done, _ = wait_failure(three.engine)
    assert (done.status, done.fault) == (-errno.EPROTO, peer_id(2))
