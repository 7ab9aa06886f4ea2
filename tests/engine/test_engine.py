"""The C engine through `zpccl.engine.engine`: results, sharing of connections, cancelling, hostile peers."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_mesh import (
    ALL_GATHER,
    FLOATING,
    MESSAGE,
    REDUCE_SCATTER,
    WAIT_S,
    Case,
    Frame,
    HandMadePeer,
    Mesh,
    Three,
    make_plan,
    peer_id,
    raises_errno,
    random_inputs,
    run,
    send,
    socket_pair,
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
from tree_lanes import mixed

from zpccl import limits
from zpccl.engine.engine import (
    FREE_CHANNEL,
    Engine,
    EngineError,
    LinkLost,
    MessageReceived,
    ReduceDone,
    default_threads,
)
from zpccl.types import Algorithm, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

WORLD_SIZES = (2, 3, 5, 8)
ALGORITHMS = (Algorithm.RING, Algorithm.DIRECT)
QUANTISED = (QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE)


# --- Results (S1: equal bit for bit, and right) -----------------------------------------------------------------------


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (7, 1), (8, 2), (15, 3), (16, 4), (256, 4)])
def test_default_threads(cpus: int, threads: int) -> None:
    assert default_threads(cpus) == threads


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("datatype", DataType)
def test_parity(meshes: dict[int, Mesh], datatype: DataType, op: ReduceOp, algorithm: Algorithm) -> None:
    """S1, B1: every dtype and op, in place and not, any alignment, odd counts and counts below the number of peers."""
    rng = np.random.default_rng([datatype, op])
    for size in WORLD_SIZES:
        for in_place, restore, count in (
            (False, True, 4099),
            (True, True, 4099),
            (True, False, 4099),
            (False, True, size - 1),
        ):
            case = Case(datatype, op, in_place=in_place, restore=restore, frame_bytes=1000, algorithm=algorithm)
            inputs = random_inputs(rng, case, count, size)
            check_result(case, inputs, run(meshes[size], case, inputs)[0])


@pytest.mark.parametrize("way", ("ring", "stars", "any trees"))
@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("quantization", QUANTISED)
@pytest.mark.parametrize("datatype", FLOATING)
def test_quantised_parity(
    meshes: dict[int, Mesh], datatype: DataType, quantization: QuantizationAlgorithm, op: ReduceOp, way: str
) -> None:
    """S1: the engine's results have the bits that the kernels give, so the bounds of test_quantiser.py hold."""
    rng = np.random.default_rng([datatype, quantization, op])
    algorithm = Algorithm.RING if way == "ring" else Algorithm.DIRECT
    case = Case(datatype, op, quantization, 65, frame_bytes=1000, algorithm=algorithm)
    for size in WORLD_SIZES:
        for in_place, restore, count, quantized in (
            (False, True, 4099, QuantizedDataType.UINT8),
            (False, True, 4097, QuantizedDataType.INT4),
            (True, True, 4099, QuantizedDataType.INT8),
            (True, False, 777, QuantizedDataType.UINT4),
            (True, True, size - 1, QuantizedDataType.UINT8),
        ):
            lanes = mixed(size, count) if way == "any trees" else ()
            case = replace(case, in_place=in_place, restore=restore, quantized=quantized, lanes=lanes)
            inputs = random_inputs(rng, case, count, size)
            check_result(case, inputs, run(meshes[size], case, inputs)[0])


@hypothesis_settings(max_examples=60)
@given(
    size=st.sampled_from(WORLD_SIZES),
    count=st.integers(1, 5000),
    case=st.builds(
        Case,
        st.sampled_from([DataType.UINT8, DataType.INT32, DataType.INT64, DataType.FLOAT16, DataType.DOUBLE]),
        st.sampled_from([ReduceOp.SUM, ReduceOp.AVG]),
        block_elements=st.integers(1, 300),
        frame_bytes=st.integers(64, 9000),
        in_place=st.booleans(),
        restore=st.booleans(),
        algorithm=st.sampled_from(ALGORITHMS),
    ),
    quantised=st.sampled_from([None, *QuantizedDataType]),
)
def test_any_shape(
    meshes: dict[int, Mesh], size: int, count: int, case: Case, quantised: QuantizedDataType | None
) -> None:
    if quantised is not None and case.datatype in FLOATING:
        case = replace(case, quantization=QuantizationAlgorithm.MIN_MAX, quantized=quantised)
    inputs = random_inputs(np.random.default_rng(count), case, count, size)
    check_result(case, inputs, run(meshes[size], case, inputs)[0])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("algorithm", "count"), [(Algorithm.DIRECT, 50_021), (Algorithm.ONE_SHOT, 2000)])
def test_exchanges_combine_in_order_of_rank(
    meshes: dict[int, Mesh], algorithm: Algorithm, count: int, in_place: bool
) -> None:
    """In whatever order the shares arrive: the sum is ((x0 + x1) + x2) + ..., bit for bit."""
    rng = np.random.default_rng(1)
    inputs = [(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32) for _ in range(5)]
    expected = inputs[0]
    for x in inputs[1:]:
        expected = expected + x
    case = Case(in_place=in_place, frame_bytes=1024, algorithm=algorithm)
    assert run(meshes[5], case, inputs)[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.ONE_SHOT])
def test_exchanges_round_bfloat16_once(meshes: dict[int, Mesh], algorithm: Algorithm) -> None:
    """If it were rounded after each share, 256 + 1 would be 256 again."""
    inputs = [to_bfloat16(np.full(100, 256 if rank == 0 else 1, np.float32)) for rank in range(8)]
    result = run(meshes[8], Case(DataType.BFLOAT16, algorithm=algorithm), inputs)[0]
    assert (to_float64(result, DataType.BFLOAT16) == 264).all()


def test_many_attempts_at_a_time(meshes: dict[int, Mesh]) -> None:
    """Attempts of all sizes share the links; each gets its own result and its own event."""
    mesh, rng = meshes[3], np.random.default_rng(1)
    jobs = []
    for number in range(24):
        case = Case(DataType.INT32, ReduceOp.SUM, in_place=number % 2 == 0, algorithm=ALGORITHMS[number // 2 % 2])
        inputs = random_inputs(rng, case, int(rng.integers(1, 60_000)), 3)
        sources = [x.copy() for x in inputs]
        targets = sources if case.in_place else [np.zeros_like(x) for x in sources]
        jobs.append((mesh.next_id(), case, inputs, sources, targets))
    for rank, engine in enumerate(mesh.engines):
        for attempt_id, case, _, sources, targets in jobs:
            engine.start_reduce(make_plan(case, attempt_id, rank, 3, sources[rank], targets[rank]))
    for engine in mesh.engines:
        done = wait_events(engine, len(jobs))
        assert {event.attempt_id for event in done if isinstance(event, ReduceDone) and event.status == 0} == {
            job[0] for job in jobs
        }
    for attempt_id, case, inputs, _, targets in jobs:
        for engine in mesh.engines:
            engine.end_reduce(attempt_id, commit=True)
        for target in targets:
            check_result(case, inputs, target)


def test_one_reduce_uses_all_connections() -> None:
    with closing(Mesh(2, connections=4)) as mesh:
        case = Case(frame_bytes=64 * 1024)
        run(mesh, case, random_inputs(np.random.default_rng(2), case, 2_000_000, 2))
        for rank, engine in enumerate(mesh.engines):
            state = engine.link_state(peer_id(1 - rank))
            assert len(state.tx_bytes) == len(state.rx_bytes) == 4
            assert min(state.tx_bytes) > case.frame_bytes and min(state.rx_bytes) > case.frame_bytes, state


@pytest.mark.parametrize("senders", [1, 2])
def test_within_a_host_some_connections_stand_by(senders: int) -> None:
    """All reduces and messages use the first connections of the link. The others may carry headers without a body, that
    is acknowledgements and announcements, while the first ones are busy."""
    with closing(Mesh(2, connections=4, local_senders_max=senders)) as mesh:
        case = Case(frame_bytes=16 * 1024)
        channel_id = mesh.next_id()
        for engine in mesh.engines:
            engine.open_channel(channel_id)
        for _ in range(3):
            run(mesh, case, random_inputs(np.random.default_rng(2), case, 500_000, 2))
        for rank, engine in enumerate(mesh.engines):
            send(engine, peer_id(1 - rank), channel_id, b"in turn")
        for rank, engine in enumerate(mesh.engines):
            (event,) = wait_events(engine, 1)
            assert isinstance(event, MessageReceived) and event.body.read() == b"in turn"
            state = engine.link_state(peer_id(1 - rank))
            for carried in (state.tx_bytes, state.rx_bytes):
                assert min(carried[:senders]) > case.frame_bytes, carried
                assert not any(count % 40 for count in carried[senders:]), carried
                assert max(carried[senders:]) < case.frame_bytes, carried


def test_connections_of_a_link_stand_by_from_one_attempt_to_the_next() -> None:
    with closing(Mesh(2, connections=4, local_senders_max=0)) as mesh:
        case = Case(frame_bytes=16 * 1024)
        carried = np.zeros(4, np.int64)
        for senders in (4, 1, 3):
            mesh.engines[0].set_senders(peer_id(1), senders)
            assert mesh.engines[0].link_state(peer_id(1)).senders == senders
            run(mesh, case, random_inputs(np.random.default_rng(2), case, 500_000, 2))
            now = np.array(mesh.engines[0].link_state(peer_id(1)).tx_bytes)
            sent, carried = now - carried, now
            assert (sent[:senders] > case.frame_bytes).all(), (senders, sent)
            assert (sent[senders:] < case.frame_bytes).all(), (senders, sent)
        with raises_errno(errno.EINVAL):
            mesh.engines[0].set_senders(peer_id(1), 0)
        with raises_errno(errno.ENOTCONN):
            mesh.engines[0].set_senders(peer_id(7), 1)


def test_a_peer_with_the_same_address_is_local() -> None:
    with Engine() as engine:
        ends = []
        for rank, host in ((1, "127.0.0.1"), (2, "127.0.0.2")):
            near, far = socket_pair(near_host=host)
            engine.open_link(peer_id(rank), [near.detach()])
            ends.append(far)
        assert [engine.is_local(peer_id(rank)) for rank in (1, 2, 3)] == [True, False, False]
    for end in ends:
        end.close()


def test_a_blocked_connection_holds_up_only_its_own_frame() -> None:
    """Nobody reads one of the two connections: all frames except those in it use the other one."""
    with closing(HandMadePeer(connections=2, buffer_bytes=4096)) as peer:
        case = Case(frame_bytes=32 * 1024)
        mine = np.ones(1_000_000, np.float32)
        peer.start(case, 1, mine, np.empty_like(mine))
        open_end = peer.sockets[1]
        total = 0
        while total < mine.nbytes // 2 - 32 * case.frame_bytes:
            total += len(open_end.recv(1 << 20))
        blocked, taken = peer.engine.link_state(peer_id(1)).tx_bytes
        assert blocked < taken


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("datatype", [t for t in DataType if t.itemsize < 4 or t in (DataType.UINT32, DataType.INT32)])
def test_a_mean_lies_between_its_inputs(meshes: dict[int, Mesh], datatype: DataType, algorithm: Algorithm) -> None:
    """This holds even if their sum does not fit into the type."""
    rng = np.random.default_rng(datatype)
    case = Case(datatype, ReduceOp.AVG, frame_bytes=1000, algorithm=algorithm)
    for size in WORLD_SIZES:
        if datatype in FLOATING:
            limit = 60000.0 if datatype is DataType.FLOAT16 else 1e37
            values = [rng.uniform(0.5, 1, 4099).astype(np.float32) * np.float32(limit) for _ in range(size)]
            inputs = [to_bfloat16(v) if datatype is DataType.BFLOAT16 else v.astype(np.float16) for v in values]
        else:
            inputs = random_inputs(rng, case, 4099, size)
        mean = to_float64(run(meshes[size], case, inputs)[0], datatype)
        wide = [to_float64(x, datatype) for x in inputs]
        assert (np.minimum.reduce(wide) <= mean).all() and (mean <= np.maximum.reduce(wide)).all()


# --- Cancelling (S2, S4) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(quantization=QuantizationAlgorithm.MIN_MAX),
        Case(DataType.INT8, ReduceOp.AVG),
    ],
    ids=["as it is", "quantised", "wide sums"],
)
def test_cancel_restores_an_in_place_buffer(case: Case, algorithm: Algorithm) -> None:
    """S2: results have already arrived on all peers; a cancel restores every bit."""
    mesh, rng = Mesh(3), np.random.default_rng(3)
    case = replace(case, in_place=True, frame_bytes=16 * 1024, algorithm=algorithm)
    inputs = random_inputs(rng, case, 300_000, 3)
    buffers = [x.copy() for x in inputs]
    for rank, engine in enumerate(mesh.engines):
        engine.start_reduce(make_plan(case, 1, rank, 3, buffers[rank], buffers[rank]))
    for rank, engine in enumerate(mesh.engines):
        if rank == 0:  # Rank 0 ends it when it is done; the others end it wherever they are.
            assert wait_done(engine).status == 0
        engine.end_reduce(1, commit=False)
    for rank in range(3):
        assert buffers[rank].tobytes() == inputs[rank].tobytes()
    mesh.last_id = 1
    check_result(case, inputs, run(mesh, case, inputs)[0])
    mesh.close()


def test_cancel_in_the_middle_of_a_transfer(peer: HandMadePeer) -> None:
    """S2, S4: some results have arrived, others in part. After end_reduce the buffer is as before, and stays so."""
    case = Case(in_place=True, frame_bytes=4096)
    original = np.arange(8192, dtype=np.float32)
    buffer = original.copy()
    peer.start(case, 1, buffer, buffer)
    first = peer.receive()
    assert (first.kind, first.chunk) == (REDUCE_SCATTER, 0)
    result = Frame(ALL_GATHER, 1, 0, first.offset, bytes(4096)).encode()
    share = Frame(REDUCE_SCATTER, 1, 1, 0, bytes(4096)).encode()
    peer.socket.sendall(result + share + Frame(REDUCE_SCATTER, 1, 1, 1024, b"x" * 4096).encode()[:2000])
    until(lambda: peer.received_bytes() == len(result) + len(share) + 2000)
    until(lambda: not buffer[:1024].any())
    peer.engine.end_reduce(1, commit=False)
    assert buffer.tobytes() == original.tobytes()
    peer.socket.sendall(Frame(REDUCE_SCATTER, 1, 1, 1024, b"x" * 4096).encode()[2000:])
    peer.send(Frame(REDUCE_SCATTER, 1, 1, 2048, b"y" * 4096))
    until(lambda: peer.received_bytes() == len(result) + 3 * len(share))
    assert buffer.tobytes() == original.tobytes()
    # The stream stays in step: frames in flight at the end arrive whole, then those of the next attempt.
    mine, theirs = np.ones(100, np.float32), np.arange(100, dtype=np.float32)
    assert (peer.reduce(case, 2, mine, theirs) == mine + theirs).all()


def test_a_half_written_frame_is_finished_from_a_copy() -> None:
    """S4: half a frame is sent when the attempt ends. The rest has the old bytes, not the caller's new ones."""
    with closing(HandMadePeer(buffer_bytes=4096)) as peer:
        case = Case(in_place=True, frame_bytes=4 * 1024 * 1024)
        buffer = np.arange(2 * 1024 * 1024, dtype=np.float32)
        original = buffer.copy()
        peer.start(case, 1, buffer, buffer)
        until(lambda: peer.sent_bytes() > 40)
        peer.engine.end_reduce(1, commit=False)
        assert peer.sent_bytes() < case.frame_bytes
        buffer[:] = -1
        frame = peer.receive()  # checks the checksums
        assert frame.body == original[: len(frame.body) // 4].tobytes()
        mine, theirs = np.ones(100, np.float32), np.arange(100, dtype=np.float32)
        assert (peer.reduce(case, 2, mine, theirs) == mine + theirs).all()


def test_end_withdraws_the_event_and_refuses_a_commit(meshes: dict[int, Mesh]) -> None:
    mesh = meshes[2]
    attempt_id = mesh.next_id()
    data, output = np.ones((2, 10), np.float32)
    mesh.engines[0].start_reduce(make_plan(Case(), attempt_id, 0, 2, data, output))
    with raises_errno(errno.EINVAL):
        mesh.engines[0].end_reduce(attempt_id, commit=True)
    mesh.engines[0].end_reduce(attempt_id, commit=False)
    mesh.engines[1].end_reduce(attempt_id, commit=False)
    assert mesh.engines[0].poll() == []


def test_stale_frames_are_dropped(peer: HandMadePeer) -> None:
    """S4: frames of an attempt that has ended touch nothing and harm nobody."""
    case = Case()
    mine, theirs = np.ones(100, np.float32), np.arange(100, dtype=np.float32)
    peer.reduce(case, 5, mine, theirs)
    for old in (1, 4, 5):
        peer.send(Frame(REDUCE_SCATTER, old, 1, 0, bytes(200)))
        peer.send(Frame(ALL_GATHER, old, 0, 0, bytes(200_000)))
    assert (peer.reduce(case, 6, mine, theirs) == mine + theirs).all()


# --- What others may do to us -----------------------------------------------------------------------------------------

GOOD = Frame(REDUCE_SCATTER, 1, 1, 0, bytes(4096))
"""The first frame that rank 1 sends for 8192 floats in frames of 4096 bytes: chunks of 4096 elements, 4 frames each."""

HOSTILE = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", errno.EPROTO),
    "other version": (replace(GOOD, magic=b"ZPF1").encode(), errno.EPROTO),
    "damaged header": (replace(GOOD, header_checksum=1).encode(), errno.EBADMSG),
    "damaged body": (replace(GOOD, body_checksum=1).encode(), errno.EBADMSG),
    "unknown kind": (replace(GOOD, kind=9).encode(), errno.EPROTO),
    "lane": (replace(GOOD, lane=1).encode(), errno.EPROTO),
    "no such chunk": (replace(GOOD, chunk=2).encode(), errno.EPROTO),
    "huge chunk": (replace(GOOD, chunk=2**32 - 1).encode(), errno.EPROTO),
    "our own chunk": (replace(GOOD, chunk=0).encode(), errno.EPROTO),
    "offset past the chunk": (replace(GOOD, offset=4096).encode(), errno.EPROTO),
    "huge offset": (replace(GOOD, offset=2**64 - 1024).encode(), errno.EPROTO),
    "offset between frames": (replace(GOOD, offset=1).encode(), errno.EPROTO),
    "short": (replace(GOOD, body=bytes(4092)).encode(), errno.EPROTO),
    "long": (replace(GOOD, body=bytes(4100)).encode(), errno.EPROTO),
    "endless": (replace(GOOD, body=b"", length=2**32 - 1).encode(), errno.EPROTO),
    "twice": (GOOD.encode() * 2, errno.EPROTO),
    "result that we own": (replace(GOOD, kind=ALL_GATHER).encode(), errno.EPROTO),
    "message too long": (Frame(MESSAGE, 1, 0, 0, b"", length=2**31).encode(), errno.EPROTO),
    "message with an offset": (Frame(MESSAGE, 1, 0, 8, b"").encode(), errno.EPROTO),
    "end of the stream in a header": (GOOD.encode()[:17], errno.ECONNRESET),
    "end of the stream in a body": (GOOD.encode()[:700], errno.ECONNRESET),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_close_the_link_and_write_nothing_out_of_place(peer: HandMadePeer, name: str) -> None:
    data, expected = HOSTILE[name]
    case = Case(in_place=True, frame_bytes=4096)
    guarded = np.full(3 * 8192, 7, np.float32)
    buffer = guarded[8192:16384]
    buffer[:] = np.arange(8192)
    before = guarded.tobytes()
    peer.start(case, 1, buffer, buffer)
    peer.socket.sendall(data)
    if expected == errno.ECONNRESET:
        peer.socket.close()
    done, lost = wait_failure(peer.engine)
    assert (done.status, done.fault) == (-expected, peer_id(1))
    assert (lost.status, lost.peer, lost.link_id) == (-expected, peer_id(1), peer.link_id)
    peer.engine.end_reduce(1, commit=False)
    assert guarded.tobytes() == before
    with pytest.raises(EngineError, match="zp_link_get_stats"):
        peer.engine.link_state(peer_id(1))


def test_a_frame_from_the_wrong_side_of_a_ring_is_a_violation(three: Three) -> None:
    """Frames come from the previous peer only."""
    data, output = np.ones((2, 300), np.float32)
    three.engine.start_reduce(make_plan(Case(), 1, 0, 3, data, output))
    three.ends[1].sendall(Frame(REDUCE_SCATTER, 1, 2, 0, bytes(400)).encode())
    done, lost = wait_failure(three.engine)
    assert (done.status, done.fault, lost.peer) == (-errno.EPROTO, peer_id(1), peer_id(1))


def test_a_result_before_its_share_fails_the_attempt_only(three: Three) -> None:
    """B2. Rank 0 must have forwarded chunk 2 before its result can arrive. The peer that passes it on may be honest."""
    data, output = np.ones((2, 300), np.float32)
    three.engine.start_reduce(make_plan(Case(), 1, 0, 3, data, output))
    three.ends[2].sendall(Frame(ALL_GATHER, 1, 2, 0, bytes(400)).encode())
    (done,) = wait_events(three.engine, 1)
    assert isinstance(done, ReduceDone) and (done.status, done.fault) == (-errno.EPROTO, None)
    assert three.engine.link_state(peer_id(2)).open_count == 1


def test_the_last_lost_connection_loses_the_link() -> None:
    with closing(HandMadePeer(connections=3)) as peer:
        data = np.ones(1000, np.float32)
        peer.start(Case(), 1, data, np.empty_like(data))
        for connection in peer.sockets:
            connection.close()
        done, lost = wait_failure(peer.engine)
        assert done.status == lost.status < 0 and done.fault == lost.peer == peer_id(1)
        with raises_errno(errno.ENOTCONN):
            peer.start(Case(), 2, data, np.empty_like(data))


def test_a_lost_peer_is_noticed_while_its_frames_wait(peer: HandMadePeer) -> None:
    """The connection is parked, so nobody reads it. The engine must still notice its end."""
    peer.send(Frame(MESSAGE, 9, 0, 0, bytes(400)))
    until(lambda: peer.received_bytes() == 40)
    peer.socket.close()
    (lost,) = wait_events(peer.engine, 1)
    assert isinstance(lost, LinkLost) and lost.status == -errno.ECONNRESET


def test_closing_a_link_fails_its_attempts_without_an_event_of_its_own(peer: HandMadePeer) -> None:
    data = np.ones(1000, np.float32)
    peer.start(Case(), 1, data, np.empty_like(data))
    assert peer.engine.close_link(peer_id(1))
    done = wait_done(peer.engine)
    assert (done.status, done.fault) == (-errno.ECONNABORTED, peer_id(1))
    assert not peer.engine.close_link(peer_id(1))
    assert peer.engine.poll() == []
    near, far = socket_pair()
    peer.engine.open_link(peer_id(1), [near.detach()])
    far.close()


# --- Stalls (L1) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elements", "sent", "settings", "fault"),
    [
        # The missing data may be held up anywhere in the ring.
        pytest.param(1000, b"", {}, None, id="it takes everything"),
        pytest.param(4_000_000, b"", {"buffer_bytes": 4096}, peer_id(1), id="it takes nothing"),
        pytest.param(8192, GOOD.encode()[:500], {}, peer_id(1), id="it stops in the middle of a frame"),
    ],
)
def test_who_is_at_fault_for_the_stall_of_a_peer(
    elements: int, sent: bytes, settings: dict[str, int], fault: bytes | None
) -> None:
    data = np.ones(elements, np.float32)
    with closing(HandMadePeer(stall_timeout_ms=200, **settings)) as peer:
        peer.start(Case(), 1, data, np.empty_like(data))
        peer.socket.sendall(sent)
        done = wait_done(peer.engine)
        assert (done.status, done.fault) == (-errno.ETIMEDOUT, fault)


def test_stalls_that_are_held_wait_for_a_whole_timeout_after_that() -> None:
    """L3: without a master others may lack the plan, and that is no stall."""
    held, clock = HandMadePeer(stall_timeout_ms=200), HandMadePeer(stall_timeout_ms=200)
    data, results = np.ones(1000, np.float32), np.empty((3, 1000), np.float32)
    held.engine.hold_stalls(True)
    held.start(Case(), 1, data, results[0])
    for attempt_id in (1, 2):  # One begins together with `held`, the other when `held` would have stalled.
        clock.start(Case(), attempt_id, data, results[attempt_id])
        assert wait_done(clock.engine).status == -errno.ETIMEDOUT
    assert held.engine.poll() == []
    held.engine.hold_stalls(False)
    assert held.engine.poll() == []
    assert wait_done(held.engine).status == -errno.ETIMEDOUT
    held.close()
    clock.close()


def test_a_peer_that_stops_in_the_middle_of_an_early_frame_is_at_fault_for_the_stall() -> None:
    """The frame takes memory that no attempt has yet, so its link is lost too."""
    with closing(HandMadePeer(stall_timeout_ms=200)) as peer:
        data = np.ones(8192, np.float32)
        peer.socket.sendall(GOOD.encode()[:500])
        until(lambda: peer.received_bytes() == 500)
        peer.start(Case(), 1, data, np.empty_like(data))
        done, lost = wait_failure(peer.engine)
        assert (done.status, done.fault) == (-errno.ETIMEDOUT, peer_id(1))
        assert (lost.status, lost.peer) == (-errno.ETIMEDOUT, peer_id(1))


def test_a_peer_that_sends_a_byte_now_and_then_stalls() -> None:
    """B2: a byte is not progress; a frame is."""
    with closing(HandMadePeer(stall_timeout_ms=500)) as peer:
        data = np.ones(8192, np.float32)
        peer.start(Case(), 1, data, np.empty_like(data))
        peer.socket.sendall(GOOD.encode()[:100])
        for _ in range(100):
            peer.socket.sendall(b"x")
            if select.select([peer.engine.fileno()], [], [], 0.1)[0]:
                break
        else:
            pytest.fail("the attempt goes on")
        done = wait_done(peer.engine)
        assert (done.status, done.fault) == (-errno.ETIMEDOUT, peer_id(1))


def copy_slowly(source: socket.socket, sink: socket.socket, bytes_per_second: float) -> None:
    with suppress(OSError):  # Until the other end of one of them is closed.
        while piece := source.recv(1 << 14):
            time.sleep(len(piece) / bytes_per_second)  # This sets the rate of the link; nothing else to wait for.
            sink.sendall(piece)


def test_attempts_that_take_turns_on_a_slow_link_do_not_stall() -> None:
    """L1: one turn of all attempts takes longer than the time after which an attempt stalls."""
    engines = [Engine(stall_timeout_ms=1000) for _ in range(2)]
    pairs = [socket_pair(1 << 16) for _ in engines]
    (_, left), (_, right) = pairs
    copying = [threading.Thread(target=copy_slowly, args=(*ends, 5e6)) for ends in ((left, right), (right, left))]
    for thread in copying:
        thread.start()
    for rank, (engine, (near, _)) in enumerate(zip(engines, pairs, strict=True)):
        engine.open_link(peer_id(1 - rank), [near.detach()])
    case, attempts = Case(frame_bytes=1 << 19), range(1, 17)
    data = np.ones(1 << 18, np.float32)
    results = [{attempt: np.empty_like(data) for attempt in attempts} for _ in engines]
    for rank, engine in enumerate(engines):
        for attempt in attempts:
            engine.start_reduce(make_plan(case, attempt, rank, 2, data, results[rank][attempt]))
    ended = [event for engine in engines for event in wait_events(engine, len(attempts))]
    for engine in engines:
        engine.close()
    for thread in copying:
        thread.join(WAIT_S)
    left.close()
    right.close()
    assert {event.status for event in ended if isinstance(event, ReduceDone)} == {0}
    assert all((result == 2).all() for of_rank in results for result in of_rank.values())


def test_an_attempt_behind_the_rest_of_an_ended_one_does_not_stall() -> None:
    """L1: a frame that was half sent when its attempt ended is sent to its end. That counts as progress of the link."""
    with closing(HandMadePeer(buffer_bytes=4096, stall_timeout_ms=300)) as peer:
        case = Case(frame_bytes=4 * 1024 * 1024)
        large, data = np.ones(2 * 1024 * 1024, np.float32), np.ones(100, np.float32)
        peer.start(case, 1, large, np.empty_like(large))
        until(lambda: peer.sent_bytes() > 2 * 40)
        peer.engine.end_reduce(1, commit=False)
        peer.start(case, 2, data, np.empty_like(data))
        for _ in range(32):
            peer.read_exactly(case.frame_bytes // 33)
            assert not select.select([peer.engine.fileno()], [], [], 0.05)[0], peer.engine.poll()


# --- Messages ---------------------------------------------------------------------------------------------------------


def test_messages_wait_for_their_channel_and_are_dropped_after_it(pair: Mesh) -> None:
    a, b = pair.engines
    for channel_id in (3, 4):
        a.open_channel(channel_id)
    send(a, peer_id(1), 3, b"early")
    b.open_channel(3)
    (event,) = wait_events(b, 1)
    assert isinstance(event, MessageReceived) and (event.peer, event.channel_id) == (peer_id(0), 3)
    assert event.body.read() == b"early"
    before = pair.received_bytes(1)
    send(a, peer_id(1), 3, b"unread")
    until(lambda: pair.received_bytes(1) == before + 40 + len(b"unread"))
    b.close_channel(3)
    assert b.poll() == []
    b.open_channel(4)
    send(a, peer_id(1), 3, b"late")
    send(a, peer_id(1), 4, b"next")
    (event,) = wait_events(b, 1)
    assert isinstance(event, MessageReceived) and event.channel_id == 4 and event.body.read() == b"next"


def test_message_queues_are_bounded_and_push_back() -> None:
    """B1: the receiver does not poll, so the sender's queue fills up. Afterwards everything arrives."""
    queue_bytes_max = 310_000  # Three messages, including the overhead of each.
    a, b = (Engine(message_bytes_max=100_000, messages_queued_bytes_max=queue_bytes_max) for _ in range(2))
    near, far = socket_pair(buffer_bytes=4096)
    a.open_link(peer_id(1), [near.detach()])
    b.open_link(peer_id(0), [far.detach()])
    for engine in (a, b):
        engine.open_channel(1)
    sent = 0

    def is_full() -> bool:
        nonlocal sent
        while a.post_message(peer_id(1), 1, b"", bytes([sent]) * 100_000, queue_bytes_max):
            sent += 1
        return sum(b.link_state(peer_id(0)).rx_bytes) >= 300_000

    until(is_full)
    assert 3 <= sent < 50
    got: list[int] = []
    while len(got) < sent:
        assert select.select([b.fileno()], [], [], WAIT_S)[0]
        got += [event.body.read()[0] for event in b.poll() if isinstance(event, MessageReceived)]
    assert got == list(range(sent))
    with raises_errno(errno.EMSGSIZE):
        send(a, peer_id(1), 1, bytes(100_001))
    a.close()
    b.close()


def test_a_body_is_lent_until_it_is_released_or_the_engine_closed(pair: Mesh) -> None:
    """S4: nobody reads memory that the engine has freed."""
    a, b = pair.engines
    for engine in pair.engines:
        engine.open_channel(3)
    for text in (b"one", b"two", b"three"):
        send(a, peer_id(1), 3, text)
    one, two, three = (event.body for event in wait_events(b, 3) if isinstance(event, MessageReceived))
    with one.held(), one.view() as view:
        assert bytes(view) == b"one" and len(one) == 3 and view.readonly
    one.release()
    one.release()
    with two.held(), two.view() as view:
        b.close()
        assert bytes(view) == b"two", "the engine was freed though it has a reader"
    with raises_errno(errno.ESHUTDOWN), three.held():
        pass
    two.release()
    three.release()


def test_free_channels_are_outside_the_order(pair: Mesh) -> None:
    """Messages that arrive before a channel is open are dropped. Those of a later attempt wait for it alone."""
    a, b = pair.engines
    for channel_id in (FREE_CHANNEL, 3):
        a.open_channel(channel_id)
    b.open_channel(FREE_CHANNEL + 1)
    send(a, peer_id(1), 3, b"waits")
    send(a, peer_id(1), FREE_CHANNEL, b"dropped")
    # With the announcement of channel 3.
    until(lambda: pair.received_bytes(1) == 2 * 40 + len(b"dropped"))
    b.open_channel(FREE_CHANNEL)
    b.open_channel(3)
    (event,) = wait_events(b, 1)
    assert isinstance(event, MessageReceived) and (event.channel_id, event.body.read()) == (3, b"waits")


# --- Arguments, closing, forking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"peers": (peer_id(0),)},
        {"algorithm": 0},
        {"algorithm": 4},
        {"rank": 2},
        {"count": 0},
        {"count": 2**41},
        {"frame_bytes": 1},
        {"frame_bytes": 2**30},
        {"input_address": 0},
        {"output_address": 0},
        {"datatype": 12},
        {"op": 5},
        {"quantization": 3},
        {"quantization": 1, "datatype": DataType.INT32},
        {"quantization": 1, "block_elements": 0},
        {"quantization": 1, "quantized_datatype": DataType.UINT16},
        {"quantization": 1, "block_elements": 1_000_000},
    ],
)
def test_bad_plans_are_refused(meshes: dict[int, Mesh], changes: dict[str, Any]) -> None:
    data = np.ones(100, np.float32)
    plan = replace(make_plan(Case(), meshes[2].last_id + 1, 0, 2, data, np.empty_like(data)), **changes)
    with raises_errno(errno.EINVAL):
        meshes[2].engines[0].start_reduce(plan)


def test_overlapping_buffers_are_refused(meshes: dict[int, Mesh]) -> None:
    data = np.ones(101, np.float32)
    with raises_errno(errno.EINVAL):
        meshes[2].engines[0].start_reduce(make_plan(Case(), meshes[2].last_id + 1, 0, 2, data[:100], data[1:]))


def test_links_are_refused_without_taking_the_sockets() -> None:
    near, far = socket_pair()
    with Engine() as engine:
        engine.open_link(peer_id(1), [near.detach()])
        another, far2 = socket_pair()
        for peer, fds, expected in (
            (peer_id(1), [another.fileno()], errno.EEXIST),
            (peer_id(2), [], errno.EINVAL),
            (peer_id(2), [another.fileno()] * (limits.LINK_CONNECTIONS_MAX + 1), errno.EINVAL),
            (peer_id(2), [engine.fileno()], errno.ENOTSOCK),
            (peer_id(2), [another.fileno(), another.fileno()], errno.EEXIST),
        ):
            with raises_errno(expected):
                engine.open_link(peer, fds)
        another.setblocking(True)
        far2.sendall(b"still ours")
        assert another.recv(10) == b"still ours"
        with pytest.raises(ValueError, match="16 bytes"):
            engine.open_link(b"short", [another.fileno()])
        another.close()
        far2.close()
    far.close()


def test_closing_restores_what_runs_and_later_calls_raise(peer: HandMadePeer) -> None:
    """S2, S4: a close during an attempt acts as a cancel."""
    original = np.arange(8192, dtype=np.float32)
    buffer = original.copy()
    peer.start(Case(in_place=True), 1, buffer, buffer)
    first = peer.receive()
    peer.send(Frame(ALL_GATHER, 1, 0, first.offset, bytes(4096)))
    until(lambda: not buffer[:1024].any())
    peer.engine.close()
    peer.engine.close()
    assert buffer.tobytes() == original.tobytes()
    for call in (peer.engine.poll, lambda: peer.engine.end_reduce(1, commit=False), peer.received_bytes):
        with raises_errno(errno.ESHUTDOWN):
            call()


def test_bad_configuration_is_refused() -> None:
    for arguments in ({"threads": 0}, {"threads": 1000}, {"stall_timeout_ms": 0}, {"messages_queued_bytes_max": 1}):
        with raises_errno(errno.EINVAL):
            Engine(**arguments)


def test_the_interpreter_may_end_while_an_attempt_runs() -> None:
    """S4: no thread uses tensors that the interpreter frees when it ends."""
    program = """
import numpy as np
from engine_mesh import Case, HandMadePeer, REDUCE_SCATTER, Frame, until
peer = HandMadePeer()
buffer = np.ones(1 << 20, np.float32)
peer.start(Case(in_place=True), 1, buffer, buffer)
peer.send(Frame(REDUCE_SCATTER, 1, 1, 0, bytes(4096)))
until(lambda: not peer.engine.poll() and peer.received_bytes() == 4136)
print("ready")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_a_forked_child_gets_an_error_and_not_the_sockets(pair: Mesh) -> None:
    engine = pair.engines[0]
    near, far = socket_pair()
    link_fd = near.detach()
    engine.open_link(peer_id(7), [link_fd])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # About forking with threads, which is the point.
        child = os.fork()
    if child == 0:
        verdict = 1
        try:
            engine.poll()
        except EngineError as error:
            verdict = 2 if error.errno == errno.ECHILD else 3
        try:
            os.fstat(link_fd)
        except OSError:
            verdict += 10
        engine.close()
        os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    case = Case()
    inputs = random_inputs(np.random.default_rng(6), case, 1000, 2)
    check_result(case, inputs, run(pair, case, inputs)[0])
    far.close()
