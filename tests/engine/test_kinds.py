"""The C engine: all kinds of collectives except the all-reduce, which `test_engine.py` tests."""

from __future__ import annotations

import errno
from collections.abc import Sequence
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
    HandMadePeer,
    Mesh,
    make_plan,
    peer_id,
    raises_errno,
    random_inputs,
    unaligned,
    until,
    wait_done,
    wait_events,
)
from reference_results import check_result
from tree_lanes import expected, lanes_of_owners

from zpccl.engine.engine import LinkLost, ReduceDone, ReducePlan
from zpccl.types import Algorithm, CollectiveKind, DataType, ReduceOp

WORLD_SIZES = range(2, 9)
OWNERS: dict[CollectiveKind, Sequence[int]] = {
    CollectiveKind.ALL_REDUCE: (),
    CollectiveKind.BROADCAST: (2,),
    CollectiveKind.ALL_TO_ALL: (),
}
"""Kinds in which not every rank owns exactly one row or part."""


WAYS = pytest.mark.parametrize("over_trees", (False, True), ids=("ring", "trees"))


def part_of(count: int, size: int, part: int) -> slice:
    """The elements of one part: the first parts are one element longer."""
    short, long_count = divmod(count, size)
    start = part * short + min(part, long_count)
    return slice(start, start + short + (part < long_count))


def plan_of(
    kind: CollectiveKind,
    case: Case,
    attempt_id: int,
    rank: int,
    owners: Sequence[int],
    size: int,
    source: np.ndarray,
    target: np.ndarray,
) -> ReducePlan:
    is_ring = kind is not CollectiveKind.ALL_TO_ALL and not case.lanes
    algorithm = Algorithm.RING if is_ring else Algorithm.DIRECT
    plan = make_plan(case, attempt_id, rank, size, source, target)
    return replace(plan, kind=kind, owners=tuple(owners), algorithm=algorithm)


def run(
    mesh: Mesh,
    kind: CollectiveKind,
    case: Case,
    owners: Sequence[int],
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
) -> list[int]:
    """Runs an attempt on all engines to its end. Returns the digests."""
    attempt_id = mesh.next_id()
    for rank, engine in enumerate(mesh.engines):
        engine.start_reduce(plan_of(kind, case, attempt_id, rank, owners, mesh.size, sources[rank], targets[rank]))
    done = [wait_done(engine) for engine in mesh.engines]
    for engine in mesh.engines:
        engine.end_reduce(attempt_id, commit=True)
    assert all(event.status == 0 and event.attempt_id == attempt_id for event in done), done
    assert sum(event.tx_bytes for event in done) == sum(event.rx_bytes for event in done) > 0
    return [event.digest for event in done]


def with_lanes(
    case: Case, rng: np.random.Generator, kind: CollectiveKind, size: int, count: int, owners: Sequence[int]
) -> Case:
    """The case over any trees of which its owners may be the roots."""
    are_wide = case.op is ReduceOp.AVG and case.datatype not in FLOATING and case.datatype.itemsize < 8
    return replace(case, lanes=lanes_of_owners(rng, kind, size, count, owners, stars_only=are_wide))


def counts_of(size: int) -> tuple[int, ...]:
    return 1, size - 1, size + 1, 257, 4099


# --- Results ----------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("datatype", DataType)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_all_gather(meshes: dict[int, Mesh], size: int, datatype: DataType, over_trees: bool) -> None:
    """S1: everyone has every row at the index that the plan gives it, whatever the order of the ring or the trees."""
    rng = np.random.default_rng([size, datatype])
    case = Case(datatype, frame_bytes=1000)
    for count in counts_of(size):
        owners = rng.permutation(size).tolist()
        inputs = random_inputs(rng, case, count, size)
        sources = [unaligned(x, rank % 3) for rank, x in enumerate(inputs)]
        targets = [unaligned(np.zeros(size * count, x.dtype), rank % 2) for rank, x in enumerate(inputs)]
        if over_trees:
            case = with_lanes(case, rng, CollectiveKind.ALL_GATHER, size, count, owners)
        digests = run(meshes[size], CollectiveKind.ALL_GATHER, case, owners, sources, targets)
        expected = np.concatenate([inputs[owner] for owner in owners]).tobytes()
        assert all(target.tobytes() == expected for target in targets)
        assert all(s.tobytes() == x.tobytes() for s, x in zip(sources, inputs, strict=True))
        assert len(set(digests)) == 1


@WAYS
@pytest.mark.parametrize("restore", (True, False))
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_broadcast(meshes: dict[int, Mesh], size: int, restore: bool, over_trees: bool) -> None:
    """S1: everyone has the root's tensor, whatever the root's position in the ring or the trees."""
    rng = np.random.default_rng(size)
    for root in range(size):
        for count in counts_of(size):
            case = Case(DataType.DOUBLE, frame_bytes=1000, restore=restore)
            inputs = random_inputs(rng, case, count, size)
            tensors = [unaligned(x, rank % 3) for rank, x in enumerate(inputs)]
            if over_trees:
                case = with_lanes(case, rng, CollectiveKind.BROADCAST, size, count, [root])
            digests = run(meshes[size], CollectiveKind.BROADCAST, case, [root], tensors, tensors)
            assert all(tensor.tobytes() == inputs[root].tobytes() for tensor in tensors)
            assert len(set(digests)) == 1


@WAYS
@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("datatype", (DataType.UINT8, DataType.INT64, *FLOATING))
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_reduce_scatter(meshes: dict[int, Mesh], size: int, datatype: DataType, op: ReduceOp, over_trees: bool) -> None:
    """S1: each has its part of the result; the parts together are the whole. Inputs do not change."""
    rng = np.random.default_rng([size, datatype, op])
    case = Case(datatype, op, frame_bytes=1000)
    for count in counts_of(size):
        owners = rng.permutation(size).tolist()
        inputs = random_inputs(rng, case, count, size)
        sources = [unaligned(x, rank % 3) for rank, x in enumerate(inputs)]
        parts = [part_of(count, size, owners.index(rank)) for rank in range(size)]
        targets = [np.zeros(part.stop - part.start, inputs[0].dtype) for part in parts]
        if over_trees:
            case = with_lanes(case, rng, CollectiveKind.REDUCE_SCATTER, size, count, owners)
        digests = run(meshes[size], CollectiveKind.REDUCE_SCATTER, case, owners, sources, targets)
        whole = np.concatenate([targets[owner] for owner in owners])
        assert whole.size == count
        if over_trees:
            assert whole.tobytes() == expected(case, case.lanes, inputs).tobytes()
        else:
            check_result(case, inputs, whole)
        assert all(s.tobytes() == x.tobytes() for s, x in zip(sources, inputs, strict=True))
        assert set(digests) == {0}


@pytest.mark.parametrize("datatype", DataType)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_all_to_all(meshes: dict[int, Mesh], size: int, datatype: DataType) -> None:
    """S1: row i of the result is the row of rank i for this rank. Inputs do not change."""
    rng = np.random.default_rng([size, datatype])
    case = Case(datatype, frame_bytes=1000)
    for count in counts_of(size):
        inputs = random_inputs(rng, case, size * count, size)
        sources = [unaligned(x, rank % 3) for rank, x in enumerate(inputs)]
        targets = [unaligned(np.zeros_like(x), rank % 2) for rank, x in enumerate(inputs)]
        digests = run(meshes[size], CollectiveKind.ALL_TO_ALL, case, (), sources, targets)
        for rank, target in enumerate(targets):
            row = slice(rank * count, (rank + 1) * count)
            assert target.tobytes() == np.concatenate([x[row] for x in inputs]).tobytes()
        assert all(s.tobytes() == x.tobytes() for s, x in zip(sources, inputs, strict=True))
        assert set(digests) == {0}


def test_digests_tell_results_apart(meshes: dict[int, Mesh]) -> None:
    """S1: a result that differs in one bit, or has two rows exchanged, has a different digest."""
    case, mesh = Case(DataType.UINT8, frame_bytes=64), meshes[2]
    rows = [np.arange(200, dtype=np.uint8), np.arange(200, dtype=np.uint8)[::-1].copy()]
    seen = set()
    for owners in ((0, 1), (1, 0)):
        targets = [np.zeros(400, np.uint8) for _ in rows]
        seen.update(run(mesh, CollectiveKind.ALL_GATHER, case, owners, rows, targets))
    for flipped in (0, 1):
        tensors = [rows[0] ^ np.uint8(flipped), rows[1]]
        seen.update(run(mesh, CollectiveKind.BROADCAST, case, (0,), tensors, tensors))
    assert len(seen) == 4


def test_kinds_at_the_same_time(meshes: dict[int, Mesh]) -> None:
    """Attempts of all kinds share the links; a frame of one never counts for another."""
    mesh, size, count = meshes[4], 4, 5004
    case = Case(DataType.INT32, frame_bytes=512)
    rng = np.random.default_rng(4)
    ids = {kind: mesh.next_id() for kind in CollectiveKind if kind is not CollectiveKind.BARRIER}
    inputs = random_inputs(rng, case, count, size)
    targets: dict[CollectiveKind, list[np.ndarray]] = {
        CollectiveKind.ALL_REDUCE: [np.zeros_like(x) for x in inputs],
        CollectiveKind.BROADCAST: [x.copy() for x in inputs],
        CollectiveKind.ALL_GATHER: [np.zeros(size * count, x.dtype) for x in inputs],
        CollectiveKind.REDUCE_SCATTER: [
            np.zeros(len(range(count)[part_of(count, size, rank)]), x.dtype) for rank, x in enumerate(inputs)
        ],
        CollectiveKind.ALL_TO_ALL: [np.zeros_like(x) for x in inputs],
    }
    for rank, engine in enumerate(mesh.engines):
        for kind, attempt_id in ids.items():
            owners = OWNERS.get(kind, range(size))
            target = targets[kind][rank]
            source = target if kind is CollectiveKind.BROADCAST else inputs[rank]
            engine.start_reduce(plan_of(kind, case, attempt_id, rank, owners, size, source, target))
    for engine in mesh.engines:
        assert all(isinstance(e, ReduceDone) and e.status == 0 for e in wait_events(engine, len(ids)))
        for attempt_id in ids.values():
            engine.end_reduce(attempt_id, commit=True)
    total = np.add.reduce(inputs, dtype=np.int32)
    for rank in range(size):
        np.testing.assert_array_equal(targets[CollectiveKind.ALL_REDUCE][rank], total)
        np.testing.assert_array_equal(targets[CollectiveKind.BROADCAST][rank], inputs[2])
        np.testing.assert_array_equal(targets[CollectiveKind.ALL_GATHER][rank], np.concatenate(inputs))
        part = part_of(count, size, rank)
        np.testing.assert_array_equal(targets[CollectiveKind.REDUCE_SCATTER][rank], total[part])
        exchanged = np.concatenate([x[part] for x in inputs])
        np.testing.assert_array_equal(targets[CollectiveKind.ALL_TO_ALL][rank], exchanged)


# --- Cancelling (S2) --------------------------------------------------------------------------------------------------


def test_a_cancelled_broadcast_restores_the_buffer(peer: HandMadePeer) -> None:
    """S2: the frames that have arrived are undone, although others have not arrived."""
    tensor = np.arange(1000, dtype=np.int64)
    before = tensor.tobytes()
    case = Case(DataType.INT64, frame_bytes=800)
    peer.engine.start_reduce(plan_of(CollectiveKind.BROADCAST, case, 1, 0, (1,), 2, tensor, tensor))
    for offset in (0, 300, 700):
        peer.send(Frame(ALL_GATHER, 1, 0, offset, bytes(800)))
    until(lambda: bool((tensor[700:800] == 0).all() and (tensor[300:400] == 0).all() and (tensor[:100] == 0).all()))
    peer.engine.end_reduce(1, commit=False)
    assert tensor.tobytes() == before


def test_a_cancelled_reduce_scatter_leaves_the_input_alone(peer: HandMadePeer) -> None:
    """S2."""
    source, target = np.arange(1000, dtype=np.int64), np.zeros(500, np.int64)
    case = Case(DataType.INT64, frame_bytes=800)
    peer.engine.start_reduce(plan_of(CollectiveKind.REDUCE_SCATTER, case, 1, 0, (0, 1), 2, source, target))
    peer.send(Frame(REDUCE_SCATTER, 1, 0, 100, np.full(100, 7, np.int64).tobytes()))
    until(lambda: bool((target[100:200] == np.arange(107, 207)).all()))
    peer.engine.end_reduce(1, commit=False)
    np.testing.assert_array_equal(source, np.arange(1000))


# --- Hostile peers and bad plans --------------------------------------------------------------------------------------

VIOLATIONS = {
    "a share where nothing is reduced": (CollectiveKind.ALL_GATHER, (0, 1), Frame(REDUCE_SCATTER, 1, 1, 0, bytes(64))),
    "a row of ours": (CollectiveKind.ALL_GATHER, (0, 1), Frame(ALL_GATHER, 1, 0, 0, bytes(64))),
    "a row too many": (CollectiveKind.ALL_GATHER, (0, 1), Frame(ALL_GATHER, 1, 2, 0, bytes(64))),
    "a result to the root": (CollectiveKind.BROADCAST, (0,), Frame(ALL_GATHER, 1, 0, 0, bytes(64))),
    "a chunk too many": (CollectiveKind.BROADCAST, (1,), Frame(ALL_GATHER, 1, 1, 0, bytes(64))),
    "a share in a broadcast": (CollectiveKind.BROADCAST, (1,), Frame(REDUCE_SCATTER, 1, 0, 0, bytes(64))),
    "a result where only shares travel": (CollectiveKind.REDUCE_SCATTER, (0, 1), Frame(ALL_GATHER, 1, 1, 0, bytes(32))),
    "a share of what begins here": (CollectiveKind.REDUCE_SCATTER, (0, 1), Frame(REDUCE_SCATTER, 1, 1, 0, bytes(32))),
    "a share in an all-to-all": (CollectiveKind.ALL_TO_ALL, (), Frame(REDUCE_SCATTER, 1, 0, 0, bytes(32))),
    "a row for another peer": (CollectiveKind.ALL_TO_ALL, (), Frame(ALL_GATHER, 1, 1, 0, bytes(32))),
    "a row that is too long": (CollectiveKind.ALL_TO_ALL, (), Frame(ALL_GATHER, 1, 0, 0, bytes(64))),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_frames_that_are_not_in_the_plan_close_the_link(peer: HandMadePeer, name: str) -> None:
    """S4."""
    kind, owners, frame = VIOLATIONS[name]
    source = np.full(64, 5, np.uint8)
    target = source if kind is CollectiveKind.BROADCAST else np.full(128, 6, np.uint8)
    before = source.tobytes()
    peer.engine.start_reduce(plan_of(kind, Case(DataType.UINT8), 1, 0, owners, 2, source, target))
    peer.send(frame)
    done, lost = sorted(wait_events(peer.engine, 2), key=lambda event: not isinstance(event, ReduceDone))
    assert isinstance(lost, LinkLost) and lost.status == -errno.EPROTO
    assert isinstance(done, ReduceDone)
    if name != "a result to the root":  # That peer may have sent all, and needs nothing from others.
        assert done.status == -errno.EPROTO and done.fault == peer_id(1)
    peer.engine.end_reduce(1, commit=False)
    assert source.tobytes() == before


@pytest.mark.parametrize("kind, owners, chunk", [("ALL_GATHER", (0, 1), 1), ("ALL_TO_ALL", (), 0)])
def test_a_second_copy_of_a_row_is_a_violation(
    peer: HandMadePeer, kind: str, owners: tuple[int, ...], chunk: int
) -> None:
    """S1: a peer that has reported a row must not change it."""
    target = np.zeros(128, np.uint8)
    source = np.full(64 if owners else 128, 5, np.uint8)
    peer.engine.start_reduce(plan_of(CollectiveKind[kind], Case(DataType.UINT8), 1, 0, owners, 2, source, target))
    for value in (7, 8):
        peer.send(Frame(ALL_GATHER, 1, chunk, 0, bytes([value] * 64)))
    wait_events(peer.engine, 2)
    assert (target[64:] == 7).all()
    peer.engine.end_reduce(1, commit=False)


BAD: dict[str, dict[str, Any]] = {
    "no such kind": {"kind": CollectiveKind.BARRIER},
    "no owners": {"owners": ()},
    "a rank twice": {"owners": (0, 0)},
    "no such rank": {"owners": (0, 2)},
    "quantised": {"quantization": 1},
    "without a ring": {"algorithm": 2},
    "in place": {"output_address": None},
    "owners of an all-reduce": {"kind": CollectiveKind.ALL_REDUCE},
    "a broadcast out of place": {"kind": CollectiveKind.BROADCAST},
    "an all-to-all around a ring": {"kind": CollectiveKind.ALL_TO_ALL, "owners": ()},
    "owners of an all-to-all": {"kind": CollectiveKind.ALL_TO_ALL, "algorithm": 2},
    "rows that differ in length": {"kind": CollectiveKind.ALL_TO_ALL, "algorithm": 2, "owners": (), "count": 99},
    "overlap": {"output_address": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_plans_are_refused(meshes: dict[int, Mesh], name: str) -> None:
    memory = np.zeros(1000, np.float32)
    source, target = memory[:100], memory[500:700]
    plan = plan_of(CollectiveKind.ALL_GATHER, Case(), meshes[2].next_id(), 0, (0, 1), 2, source, target)
    changes = dict(BAD[name])
    if "output_address" in changes:
        changes["output_address"] = source.ctypes.data + (changes["output_address"] or 0) * 396
    with raises_errno(errno.EINVAL):
        meshes[2].engines[0].start_reduce(replace(plan, **changes))
