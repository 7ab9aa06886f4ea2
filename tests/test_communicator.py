"""The public API, with several communicators in this process. Real sockets, a single process."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import inspect
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import FrameType
from typing import Any

import numpy as np
import pytest
from e2e.harness import HANG_SECONDS, loop_of, until
from e2e.local import Run, failure, finish, local_run
from interpreter import tracing, without_collector

import zpccl
from zpccl import communicator, limits
from zpccl.caller import checked_seconds
from zpccl.control.calls import PendingCall
from zpccl.control.peer_loop import PeerLoop
from zpccl.engine.engine import DIGEST_CHANNEL, Engine
from zpccl.errors import Result
from zpccl.protocol.messages import PathSample
from zpccl.protocol.peer import State
from zpccl.types import DataType, QuantizationAlgorithm, QuantizationOptions, QuantizedDataType, ReduceOp

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def trio() -> Iterator[Run]:
    """Three members. Every test leaves them idle and complete, as it found them."""
    with local_run(3) as run:
        yield run


@pytest.fixture
def pair() -> Iterator[Run]:
    with local_run(2) as run:
        yield run


@pytest.fixture
def single() -> Iterator[zpccl.Communicator]:
    with local_run(1) as run:
        yield run.comms[0]


def ones(count: int = 100, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.ones(count, dtype)


def still_works(run: Run) -> bool:
    """Makes a reduce of all members, after the events of the test."""
    return [float(r[0]) for r in run.all(lambda comm: comm.all_reduce(ones(), tag=2**64 - 1))] == [
        float(len(run.comms))
    ] * len(run.comms)


def is_waiting(comm: zpccl.Communicator) -> bool:
    """True once this member has made a call."""
    assert comm._loop is not None
    return bool(comm._loop._calls)


def vote(run: Run, index: int, function: Callable[[zpccl.Communicator], Any]) -> futures.Future[Any]:
    """One member makes a call. Waits until the call is made."""
    future = run.start(function, run.comms[index])
    until(lambda: is_waiting(run.comms[index]) or future.done())
    return future


# --- Plans ahead ----------------------------------------------------------------------------------------------------


def plan_ahead(pair: Run, count: int) -> list[PeerLoop]:
    """Makes calls until the next ones are planned ahead: the first may change the master's knowledge of the link."""
    loops = [loop_of(comm) for comm in pair.comms]
    while not all(loop._machine._ahead for loop in loops):
        pair.all(lambda comm: comm.all_reduce(ones(count)))
        until(lambda: not any(loop._machine.calls for loop in loops))
    return loops


def hold_back_restores(loop: PeerLoop, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Inputs are restored only once the returned event is set."""
    go_on, submit = threading.Event(), loop._restorer.submit
    monkeypatch.setattr(
        loop._restorer, "submit", lambda job: submit(lambda: job() if go_on.wait(HANG_SECONDS) else None)
    )
    return go_on


@pytest.mark.parametrize("count", [1000, 1 << 20], ids=["small", "large"])
def test_a_call_that_has_started_ahead_gets_another_plan(
    pair: Run, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1, S2: the attempt that one peer has started ends, and its input is restored, before the next attempt begins."""
    tensors = [np.full(count, value, np.float32) for value in (1, 2)]
    early, late = plan_ahead(pair, count)
    put_back = hold_back_restores(early, monkeypatch)
    late._machine._ahead.clear()
    first = pair.start(lambda comm: comm.all_reduce(tensors[0], tensors[0]), pair.comms[0])
    until(lambda: any(call.ahead for call in list(early._machine.calls.values())))
    second = pair.start(lambda comm: comm.all_reduce(tensors[1], tensors[1]), pair.comms[1])
    if count > 1000:
        until(lambda: any(call.start is not None for call in list(early._calls.values())))
    put_back.set()
    finish(first), finish(second)
    assert all((tensor == 3).all() for tensor in tensors)
    assert still_works(pair)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("count", [1000, 1 << 18], ids=["small", "large"])
def test_a_second_attempt_at_a_call_has_its_input_without_restore(
    trio: Run, count: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: a peer gives a call up that it has started ahead. The others have its data when it calls again: they begin
    anew, with their inputs. They begin the attempt before they hear that it was given up.
    """

    tensors = {comm: np.empty(count, np.float32) for comm in trio.comms}

    def reduce(comm: zpccl.Communicator, value: int, timeout: float | None = None) -> np.ndarray[Any, Any]:
        tensor = tensors[comm]
        tensor[:] = value
        comm.all_reduce(tensor, tensor, tag=19, algorithm=algorithm, restore=False, timeout=timeout)
        return tensor

    def is_ahead(comm: zpccl.Communicator) -> bool:
        return any(call.ahead for call in [*loop_of(comm)._machine.calls.values()])

    def is_partly_summed(comms: list[zpccl.Communicator]) -> bool:
        return any(bool((tensors[comm] > 1).any()) for comm in comms)

    loops = [loop_of(comm) for comm in trio.comms]
    for loop in loops:
        monkeypatch.setattr(loop, "_tell_ended", lambda *arguments: None)
    for hasty in trio.comms:
        trio.all(lambda comm: reduce(comm, 1))
        while not all(19 in loop._machine._ahead for loop in loops):
            trio.all(lambda comm: reduce(comm, 1))
            until(lambda: not any(loop._machine.calls for loop in loops))
        with pytest.raises(zpccl.OperationTimeout):
            reduce(hasty, 100, timeout=0.2)
        others = [comm for comm in trio.comms if comm is not hasty]
        started = [trio.start(reduce, comm, 1) for comm in others]
        for comm in others:
            until(functools.partial(is_ahead, comm))
        until(functools.partial(is_partly_summed, others))
        results = [reduce(hasty, 100), *map(finish, started)]
        assert all((result == 102).all() for result in results)
    assert still_works(trio)


def test_a_peer_that_is_far_ahead_does_not_block_a_link_when_the_members_change() -> None:
    """L2: its frames of attempts that the other peer has never started would fill the bound on early frames."""
    tensors = [ones(1 << 16) for _ in range(900)]

    def reduce_all(comm: zpccl.Communicator) -> list[tuple[bool, int, zpccl.ReduceInfo]]:
        results = [np.empty_like(tensor) for tensor in tensors]
        handles = [comm.all_reduce_async(t, r, tag=i) for i, (t, r) in enumerate(zip(tensors, results, strict=True))]
        return [handle.wait() for handle in handles]

    with local_run(3) as run:
        early, late, lost = run.comms
        for _ in range(3):
            assert all(ok for results in run.all(reduce_all) for ok, *_ in results)
            until(lambda: not any(loop_of(comm)._machine.calls for comm in run.comms))
        first = run.start(reduce_all, early)
        until(lambda: len(loop_of(early)._machine.calls) == len(tensors))
        lost.close()
        until(lambda: late.world_size == 2)
        assert all(ok for results in (first, run.start(reduce_all, late)) for ok, *_ in finish(results))


def test_a_peer_that_is_far_ahead_does_not_block_a_link_when_another_begins_at_the_end() -> None:
    """L2: the last calls do not wait behind frames of the first ones, which the other peer has no room for."""
    tensors = [ones(1 << 16) for _ in range(700)]

    def begin_all(comm: zpccl.Communicator) -> list[zpccl.AsyncReduceHandle]:
        return [comm.all_reduce_async(tensor, np.empty_like(tensor), tag=i) for i, tensor in enumerate(tensors)]

    with local_run(2) as run:
        early, late = run.comms
        for _ in range(3):
            assert all(handle.wait()[0] for handles in run.all(begin_all) for handle in handles)
            until(lambda: not any(loop_of(comm)._machine.calls for comm in run.comms))
        handles = finish(run.start(begin_all, early))
        until(lambda: len(loop_of(early)._machine.calls) == len(tensors))
        for i in reversed(range(len(tensors))):
            late.all_reduce(tensors[i], np.empty_like(tensors[i]), tag=i)
        assert all(handle.wait()[0] for handle in handles)


def test_who_gives_up_before_its_input_is_back_gets_it_back(pair: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2, S4: a second attempt at its call waits for the restore, and never begins."""
    tensor = np.full(1 << 20, 7, np.float32)
    early, late = plan_ahead(pair, 1 << 20)
    put_back = hold_back_restores(early, monkeypatch)
    late._machine._ahead.clear()
    first = pair.start(lambda comm: comm.all_reduce(tensor, tensor, timeout=3), pair.comms[0])
    until(lambda: any(call.ahead for call in list(early._machine.calls.values())))
    second = pair.start(lambda comm: comm.all_reduce(ones(1 << 20)), pair.comms[1])
    until(lambda: any(call.error is not None for call in early._restoring))
    assert not first.done()
    put_back.set()
    assert isinstance(failure(first), zpccl.OperationTimeout)
    assert isinstance(failure(second), zpccl.PeerLost)
    assert (tensor == 7).all() and still_works(pair)


def test_calls_return_without_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: a call that all know to be done needs no master, and neither do the next calls, which are planned ahead."""
    with local_run(3) as run:
        loops = plan_ahead(run, 1000)
        run.master.interrupt()
        for _ in range(limits.PLANS_AHEAD_AT_TAG_MAX):
            assert all((result == 3).all() for result in run.all(lambda comm: comm.all_reduce(ones(1000))))
        assert all(len(loop._machine.calls) == limits.PLANS_AHEAD_AT_TAG_MAX for loop in loops)


def test_without_a_master_no_attempt_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: the others may lack its plan, which only another master can send to them."""
    held: list[bool] = []
    monkeypatch.setattr(Engine, "hold_stalls", lambda engine, hold: held.append(hold))
    with local_run(1) as run:
        assert held == [True, False]
        run.master.interrupt()
        until(lambda: len(held) == 3)
    assert held[2]


# --- What PCCL promises (test_types.py and test_errors.py have its enums) -------------------------------------------

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = {
    # Positional parameters with defaults, then keyword-only ones. Our own parameters may follow PCCL's.
    "Communicator": ([("address", ...), ("peer_group", 0), ("p2p_connection_pool_size", 0)], []),
    "Communicator.connect": ([("n_attempts", 5)], []),
    "Communicator.get_attribute": ([("attribute", REQUIRED)], []),
    "Communicator.update_topology": ([], []),
    "Communicator.are_peers_pending": ([], []),
    "Communicator.optimize_topology": ([], []),
    "Communicator.sync_shared_state": (
        [("state", REQUIRED), ("strategy", zpccl.SharedStateSyncStrategy.ENFORCE_POPULAR)],
        [],
    ),
    "Communicator.all_reduce": (
        [("send", REQUIRED), ("recv", ...)],
        [("op", ...), ("tag", 0), ("operand_descriptor", None), ("quantization_options", None)],
    ),
    "Communicator.all_reduce_async": (
        [("send", REQUIRED), ("recv", ...)],
        [("op", ...), ("tag", 0), ("operand_descriptor", None), ("quantization_options", None)],
    ),
    "Communicator.all_reduce_multiple_with_retry": ([("descriptors", REQUIRED)], [("max_in_flight", 4)]),
    "AsyncReduceHandle.wait": ([], []),
    "TensorInfo.from_torch": ([("tensor", REQUIRED), ("name", REQUIRED)], [("allow_content_inequality", False)]),
    "TensorInfo.from_numpy": ([("tensor", REQUIRED), ("name", REQUIRED)], [("allow_content_inequality", False)]),
    "SharedState": ([("tensor_infos", REQUIRED)], []),
    "SharedState.push_revision": ([], []),
    "ReduceOperandDescriptor": ([("datatype", REQUIRED), ("distribution_hint", zpccl.DistributionHint.NONE)], []),
    "QuantizationOptions": ([("quantized_datatype", DataType.UINT8), ("algorithm", QuantizationAlgorithm.MIN_MAX)], []),
    "ReduceDescriptor": (
        [
            ("count", REQUIRED),
            ("op", REQUIRED),
            ("tag", REQUIRED),
            ("operand_descriptor", REQUIRED),
            ("quantization_options", ...),
        ],
        [],
    ),
    "ReduceOpDescriptor.from_torch": ([("send", REQUIRED), ("recv", REQUIRED), ("reduce_descriptor", REQUIRED)], []),
    "ReduceOpDescriptor.from_numpy": ([("send", REQUIRED), ("recv", REQUIRED), ("reduce_descriptor", REQUIRED)], []),
    "MasterNode": ([("listen_address", REQUIRED)], []),
    "MasterNode.run": ([], []),
    "MasterNode.interrupt": ([], []),
    "DeviceType.from_torch_device_type": ([("device_type", REQUIRED)], []),
    "cuda.is_available": ([], []),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_pccl(name: str) -> None:
    found: Any = zpccl
    for part in name.split("."):
        found = getattr(found, part)
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = [(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]
    for expected, seen in zip(SIGNATURES[name], (positional, keyword_only), strict=True):
        assert len(seen) >= len(expected)
        for (want, default), (got, got_default) in zip(expected, seen, strict=False):
            assert want == got and default in (..., got_default)
        assert all(default is not REQUIRED for _, default in seen[len(expected) :]), "ours must be optional"


def test_members_that_are_not_functions_exist() -> None:
    assert zpccl.cuda.is_available() is False
    assert {f.name for f in __import__("dataclasses").fields(zpccl.ReduceInfo)} == {
        "local_world_size",
        "tx_bytes",
        "rx_bytes",
        "algorithm",
    }


# --- Collectives ----------------------------------------------------------------------------------------------------


def test_reduces_in_place_out_of_place_and_into_a_new_array(trio: Run) -> None:
    def out_of_place(comm: zpccl.Communicator) -> Any:
        send, recv = ones(7), np.zeros(7, np.float32)
        info = comm.all_reduce(send, recv, op=ReduceOp.SUM)
        assert (send == 1).all() and info.local_world_size == 3 and info.tx_bytes > 0 and info.rx_bytes > 0
        return recv

    def in_place(comm: zpccl.Communicator) -> Any:
        send = ones(7)
        assert isinstance(comm.all_reduce(send, send, op=ReduceOp.SUM), zpccl.ReduceInfo)
        return send

    def new(comm: zpccl.Communicator) -> Any:
        return comm.all_reduce(ones(6).reshape(2, 3), op=ReduceOp.SUM)

    for function in (out_of_place, in_place, new):
        assert all((result == 3).all() for result in trio.all(function))
    assert trio.all(new)[0].shape == (2, 3)


SAMPLE = [
    ("uint8", ReduceOp.SUM, None),
    ("int64", ReduceOp.MIN, None),
    ("float16", ReduceOp.AVG, None),
    ("float64", ReduceOp.PROD, None),
    ("float32", ReduceOp.MAX, None),
    ("float32", ReduceOp.SUM, QuantizationAlgorithm.MIN_MAX),
    ("float64", ReduceOp.AVG, QuantizationAlgorithm.ZERO_POINT_SCALE),
]


@pytest.mark.parametrize("path", ["ring", "direct"])
@pytest.mark.parametrize(("dtype", "op", "algorithm"), SAMPLE)
def test_results_are_equal_bit_for_bit_and_right(
    trio: Run, dtype: str, op: ReduceOp, algorithm: Any, path: str
) -> None:
    """S1, through the whole stack; the engine's tests have the full table."""
    inputs = [(np.random.default_rng(i).random(1001) * 5 + 1).astype(dtype) for i in range(3)]
    options = QuantizationOptions(algorithm=algorithm) if algorithm else None
    results = trio.all(
        lambda comm: comm.all_reduce(
            inputs[trio.comms.index(comm)], op=op, quantization_options=options, algorithm=path
        )
    )
    assert all(np.array_equal(result, results[0]) for result in results)
    wide = np.stack(inputs).astype(np.float64)
    functions: dict[ReduceOp, Any] = {
        ReduceOp.SUM: np.sum,
        ReduceOp.AVG: np.mean,
        ReduceOp.PROD: np.prod,
        ReduceOp.MAX: np.max,
        ReduceOp.MIN: np.min,
    }
    # A code is off by half a step at each of three quantisations; a step is the range of the partial sums over 255.
    atol = 3 * 15 / 255 if algorithm else 0
    assert np.allclose(results[0].astype(np.float64), functions[op](wide, axis=0), rtol=5e-3, atol=atol)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_an_algorithm_can_be_forced(trio: Run, algorithm: str) -> None:
    """Each call can name its own; the info says which one was used."""

    def reduce(comm: zpccl.Communicator) -> list[Any]:
        arrays = [ones(100) for _ in range(3)]
        infos = [comm.all_reduce(arrays[0], arrays[0], algorithm=algorithm)]
        infos.append(comm.all_reduce_async(arrays[1], arrays[1], algorithm=algorithm).wait()[2])
        infos.append(comm.all_reduce_multiple_with_retry(descriptors(arrays[2:]), algorithm=algorithm))
        return infos

    for infos in trio.all(reduce):
        assert [info.algorithm for info in infos] == [zpccl.Algorithm.parse(algorithm)] * 3


@pytest.mark.parametrize("count, algorithm", [(10, "ONE_SHOT"), (1 << 16, "DIRECT")])
def test_the_plan_chooses_by_size(trio: Run, count: int, algorithm: str) -> None:
    for info in trio.all(lambda comm: comm.all_reduce(ones(count), np.empty_like(ones(count)))):
        assert info.algorithm is zpccl.Algorithm[algorithm]


@pytest.mark.parametrize("kind", ["all_reduce", "in place", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_of_no_elements_is_one_like_any_other(trio: Run, kind: str) -> None:
    """S1: the members agree on it, and it counts as a collective, also beside others."""

    def call(comm: zpccl.Communicator) -> tuple[int, ...]:
        if kind == "broadcast":
            comm.broadcast(ones(0), is_root=comm.rank == 0)
            return (0,)
        if kind == "all_to_all":
            return tuple(comm.all_to_all(np.empty((3, 0), np.float32)).tensor.shape)
        if kind == "all_gather":
            return tuple(comm.all_gather(np.empty((2, 0), np.float32)).tensor.shape)
        if kind == "reduce_scatter":
            return tuple(comm.reduce_scatter(ones(0)).tensor.shape)
        if kind == "in place":
            comm.all_reduce(array := ones(0), array)
            return (0,)
        return tuple(comm.all_reduce(ones(0)).shape)

    shape = {"all_gather": (3, 2, 0), "all_to_all": (3, 0)}.get(kind, (0,))
    assert trio.all(call) == [shape] * 3
    assert all((result == 3).all() for result in trio.all(lambda comm: comm.all_reduce(ones())))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
@pytest.mark.parametrize(("dtype", "value"), [("float16", 40000), ("uint8", 200), ("int8", -100), ("uint32", 2**31)])
def test_a_mean_does_not_overflow_where_the_sum_does(trio: Run, dtype: str, value: int, algorithm: str) -> None:
    """Neither in an all-reduce with any algorithm nor in a reduce-scatter."""
    send = np.full(100, value, dtype)

    def mean(comm: zpccl.Communicator) -> list[Any]:
        part = comm.reduce_scatter(send, op=ReduceOp.AVG).tensor
        return [part, comm.all_reduce(send, op=ReduceOp.AVG, algorithm=algorithm)]

    for results in trio.all(mean):
        assert all((result == value).all() for result in results)


def test_a_direct_exchange_rounds_bfloat16_once(trio: Run) -> None:
    """256 + 1 is 256 in bfloat16."""
    descriptor = zpccl.ReduceOperandDescriptor(DataType.BFLOAT16)

    def reduce(comm: zpccl.Communicator) -> Any:
        raw = (np.full(9, 1 if comm.rank else 256, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return comm.all_reduce(raw, op=ReduceOp.SUM, operand_descriptor=descriptor, algorithm="direct")

    for result in trio.all(reduce):
        assert ((result.astype(np.uint32) << 16).view(np.float32) == 258).all()


def test_bfloat16_as_uint16_with_a_descriptor(trio: Run) -> None:
    raw = (np.ones(9, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    descriptor = zpccl.ReduceOperandDescriptor(DataType.BFLOAT16)
    for result in trio.all(lambda comm: comm.all_reduce(raw, op=ReduceOp.SUM, operand_descriptor=descriptor)):
        assert ((result.astype(np.uint32) << 16).view(np.float32) == 3).all()


def test_many_tags_at_once_from_other_threads(trio: Run) -> None:
    """Any thread may launch handles and wait for them, and they return the same value every time."""

    def launch(comm: zpccl.Communicator) -> list[tuple[bool, int, float]]:
        arrays = [np.full(500 + tag, tag + 1, np.float64) for tag in range(40)]
        handles = [comm.all_reduce_async(a, a, op=ReduceOp.SUM, tag=t) for t, a in enumerate(arrays)]
        with futures.ThreadPoolExecutor(40) as executor:
            waited = list(executor.map(lambda handle: handle.wait(), reversed(handles)))[::-1]
        assert [handle.wait() for handle in handles] == waited
        assert all(handle.exception() is None for handle in handles)
        return [(ok, status, float(array[-1])) for (ok, status, _), array in zip(waited, arrays, strict=True)]

    for outcomes in trio.all(launch):
        assert outcomes == [(True, 0, 3.0 * (tag + 1)) for tag in range(40)]


def test_the_same_tag_twice_is_refused(trio: Run) -> None:
    def twice(comm: zpccl.Communicator) -> Result:
        handle = comm.all_reduce_async(ones(), tag=5)
        with pytest.raises(zpccl.InvalidUsage, match="tag") as caught:
            comm.all_reduce(ones(), tag=5)
        barrier.wait()
        comm.all_reduce(ones(), tag=6)
        assert handle.wait()[0]
        return caught.value.result

    barrier = threading.Barrier(3)

    def first(comm: zpccl.Communicator) -> Result:
        if comm is trio.comms[0]:
            return twice(comm)
        barrier.wait()  # Tag 5 is in flight until then.
        for tag in (5, 6):
            comm.all_reduce(ones(), tag=tag)
        return Result.INVALID_USAGE

    assert trio.all(first) == [Result.INVALID_USAGE] * 3


def test_alone_is_told_at_once(single: zpccl.Communicator) -> None:
    for function in (single.all_reduce, single.all_reduce_async):
        with pytest.raises(zpccl.TooFewPeers) as caught:
            function(ones())
        assert caught.value.result == Result.TOO_FEW_PEERS
        assert function.__name__ in str(caught.value)
    assert single.update_topology() is None and single.are_peers_pending() is False


def test_other_operations_wait_for_collectives(trio: Run) -> None:
    """They raise PENDING_ASYNC_OPS; are_peers_pending is allowed."""
    one = trio.comms[0]
    handle = one.all_reduce_async(ones(), tag=1)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(ones(), "x")])
    for function in (one.update_topology, one.optimize_topology, lambda: one.sync_shared_state(state)):
        with pytest.raises(zpccl.PendingAsyncOps) as caught:
            function()
        assert caught.value.result == Result.PENDING_ASYNC_OPS
    assert trio.all(lambda comm: comm.are_peers_pending()) == [False] * 3
    others = [trio.start(comm.all_reduce, ones(), tag=1) for comm in trio.comms[1:]]
    assert handle.wait()[0] and all((finish(other) == 3).all() for other in others)


def test_optimize_topology_measures_paths_once(trio: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All know whether they must measure, and meet before and after each round: for six paths and three hosts."""
    met: list[int] = []
    meet = zpccl.Communicator._meet

    def recorded(comm: zpccl.Communicator, round_count: int, measured: tuple[PathSample, ...]) -> None:
        met.append(round_count)
        assert all(path.is_probe and not path.is_limited for path in measured), "links within a host are no limit"
        meet(comm, round_count, measured)

    monkeypatch.setattr(zpccl.Communicator, "_meet", recorded)
    assert trio.all(lambda comm: comm.optimize_topology()) == [None] * 3
    assert met == [9] * 3 * 10
    assert trio.all(lambda comm: comm.optimize_topology()) == [None] * 3
    assert len(met) == 3 * 10


def test_members_that_count_the_group_differently_end_their_measurement(trio: Run) -> None:
    """L1: a member was lost as they began. Without this they would wait for each other in different calls."""
    small = trio.start(trio.comms[0]._meet, 2, ())
    others = [trio.start(comm._meet, 3, ()) for comm in trio.comms[1:]]
    for handle in (small, *others):
        with pytest.raises(zpccl.CollectiveMismatch):
            finish(handle)


def test_a_collective_during_another_operation_is_refused(trio: Run) -> None:
    waiting = vote(trio, 0, lambda comm: comm.update_topology())
    with pytest.raises(zpccl.InvalidUsage):
        trio.comms[0].all_reduce(ones())
    others = [trio.start(comm.update_topology) for comm in trio.comms[1:]]
    assert [finish(future) for future in (waiting, *others)] == [None] * 3


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "count": ({"send": ones(10)}, {"send": ones(11)}),
    "datatype": ({"send": ones(10)}, {"send": ones(10, np.int32)}),
    "op": ({"send": ones(10), "op": ReduceOp.SUM}, {"send": ones(10), "op": ReduceOp.MAX}),
    "quantization": ({"send": ones(10)}, {"send": ones(10), "quantization_options": QuantizationOptions()}),
    "algorithm": ({"send": ones(10), "algorithm": "ring"}, {"send": ones(10), "algorithm": "direct"}),
    "block_size": (
        {"send": ones(10), "quantization_options": QuantizationOptions(block_size=64)},
        {"send": ones(10), "quantization_options": QuantizationOptions(block_size=128)},
    ),
    "quantized_datatype": (
        {"send": ones(10), "quantization_options": QuantizationOptions(QuantizedDataType.UINT4)},
        {"send": ones(10), "quantization_options": QuantizationOptions(QuantizedDataType.INT4)},
    ),
}


@pytest.mark.parametrize("field", MISMATCHES)
def test_peers_that_differ_are_all_told_of_it(trio: Run, field: str) -> None:
    usual, odd = MISMATCHES[field]

    def differ(comm: zpccl.Communicator) -> Any:
        arguments = dict(odd if comm is trio.comms[1] else usual)
        comm.all_reduce(arguments.pop("send"), tag=77, **arguments)

    for error in trio.errors(differ):
        assert isinstance(error, zpccl.CollectiveMismatch)
        assert error.result == Result.INVALID_USAGE
        assert (error.field, error.tag) == (field, 77)
        assert len(error.values) == 2
        assert sorted(name for name in ("peer0", "peer1", "peer2") if any(name in v for v in error.values)) == [
            "peer0",
            "peer1",
            "peer2",
        ]
    assert still_works(trio)


def test_unused_quantisation_options_do_not_matter(trio: Run) -> None:
    """Fields that NONE does not use are neither compared nor sent."""

    def options(comm: zpccl.Communicator) -> Any:
        index = trio.comms.index(comm)
        odd = QuantizationOptions(DataType(index), QuantizationAlgorithm.NONE, block_size=-index)
        return comm.all_reduce(ones(), quantization_options=odd)

    assert all((result == 3).all() for result in trio.all(options))


# --- Timeouts -------------------------------------------------------------------------------------------------------


def test_a_timeout_ends_a_call_and_restores_its_buffer(trio: Run) -> None:
    """S2, L1: no other peer called; the others go on as if nothing had happened."""
    one = trio.comms[0]
    send = np.arange(1000, dtype=np.float32)
    with pytest.raises(zpccl.OperationTimeout) as caught:
        one.all_reduce(send, send, op=ReduceOp.SUM, tag=3, timeout=0.05)
    assert caught.value.result == Result.RANK_CONNECTION_LOST and isinstance(caught.value, TimeoutError)
    assert np.array_equal(send, np.arange(1000, dtype=np.float32))
    handle = one.all_reduce_async(send, tag=3)
    ok, status, _ = handle.wait(timeout=0)
    assert (ok, status) == (False, Result.RANK_CONNECTION_LOST) == handle.wait()[:2]
    assert isinstance(handle.exception(), zpccl.OperationTimeout)
    assert still_works(trio)


@pytest.mark.parametrize("timeout", ["1", -1, float("nan"), float("inf"), [], 1j])
def test_bad_timeouts_are_refused_before_anything_begins(trio: Run, timeout: Any) -> None:
    one = trio.comms[0]
    with pytest.raises(zpccl.InvalidArgument, match="timeout"):
        one.all_reduce(ones(), timeout=timeout)
    assert not is_waiting(one)


def test_a_withdrawn_vote_does_not_hold_up_others(trio: Run) -> None:
    """L2: a member that gave up may call the same tag again, and then takes part."""
    futures_ = [vote(trio, index, lambda comm: comm.all_reduce(ones(), tag=4)) for index in (1, 2)]
    with pytest.raises(zpccl.OperationTimeout):
        trio.comms[0].all_reduce(ones(), tag=9, timeout=0.01)
    assert not any(future.done() for future in futures_)
    assert (trio.comms[0].all_reduce(ones(), tag=4) == 3).all()
    assert all((finish(future) == 3).all() for future in futures_)


# --- Many with retry ------------------------------------------------------------------------------------------------


def descriptors(arrays: list[np.ndarray[Any, Any]]) -> list[zpccl.ReduceOpDescriptor]:
    return [
        zpccl.ReduceOpDescriptor.from_numpy(
            array,
            array,
            zpccl.ReduceDescriptor(
                array.size,
                ReduceOp.SUM,
                tag,
                zpccl.ReduceOperandDescriptor(DataType.FLOAT),
                QuantizationOptions(algorithm=QuantizationAlgorithm.NONE),
            ),
        )
        for tag, array in enumerate(arrays)
    ]


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> dict[PeerLoop, list[int]]:
    """The number of calls that each peer has made together, each time."""
    made: dict[PeerLoop, list[int]] = {}
    call = PeerLoop.call

    def counting(loop: PeerLoop, calls: Any) -> None:
        made.setdefault(loop, []).append(len(calls))
        call(loop, calls)

    monkeypatch.setattr(PeerLoop, "call", counting)
    return made


SMALL, LARGE = 100, limits.SMALL_TENSOR_BYTES // 4


@pytest.mark.parametrize(
    ("sizes", "voted"),
    [
        ([SMALL] * 100, [100]),
        ([LARGE] * 10, [3, 3, 3, 1]),
        ([SMALL, LARGE, LARGE, SMALL, LARGE, SMALL, LARGE, SMALL], [6, 2]),
    ],
    ids=["small", "large", "mixed"],
)
def test_many_reduces_with_a_bound_on_those_in_flight(
    trio: Run, votes: dict[PeerLoop, list[int]], sizes: list[int], voted: list[int]
) -> None:
    def reduce(comm: zpccl.Communicator) -> tuple[int, list[float]]:
        arrays = [np.full(size, tag + 1, np.float32) for tag, size in enumerate(sizes)]
        info = comm.all_reduce_multiple_with_retry(descriptors(arrays), max_in_flight=3)
        assert info.tx_bytes > sum(array.nbytes for array in arrays)
        return info.local_world_size, [float(array[0]) for array in arrays]

    assert trio.all(reduce) == [(3, [3.0 * (tag + 1) for tag in range(len(sizes))])] * 3
    assert list(votes.values()) == [voted] * 3


def test_a_window_leaves_room_for_other_calls(trio: Run, votes: dict[PeerLoop, list[int]]) -> None:
    count = limits.CALLS_IN_FLIGHT_MAX // 2 + 1

    def reduce(comm: zpccl.Communicator) -> int:
        return comm.all_reduce_multiple_with_retry(descriptors([ones() for _ in range(count)])).local_world_size

    assert trio.all(reduce) == [3] * 3
    assert list(votes.values()) == [[count - 1, 1]] * 3


def test_a_bad_descriptor_is_refused_before_the_first_begins(trio: Run) -> None:
    one = trio.comms[0]
    good = descriptors([ones() for _ in range(6)])
    bad = zpccl.ReduceOpDescriptor.from_numpy(ones(), ones(), good[0].reduce_descriptor)
    wrong_count = zpccl.ReduceDescriptor(99, ReduceOp.SUM, 100, zpccl.ReduceOperandDescriptor(DataType.FLOAT))
    with pytest.raises(zpccl.InvalidArgument, match="different tags"):
        one.all_reduce_multiple_with_retry([*good, bad])
    with pytest.raises(zpccl.InvalidArgument, match="99 elements"):
        one.all_reduce_multiple_with_retry([*good, zpccl.ReduceOpDescriptor.from_numpy(ones(), ones(), wrong_count)])
    for in_flight in (0, -1, 1.5, True, "4"):
        with pytest.raises(zpccl.InvalidArgument, match="max_in_flight"):
            one.all_reduce_multiple_with_retry(good, max_in_flight=in_flight)  # type: ignore[arg-type]
    no_descriptor = zpccl.ReduceOpDescriptor(ones(), ones(), None)  # type: ignore[arg-type]
    for wrong in (None, 5, [5], [ones()], [no_descriptor]):
        with pytest.raises(zpccl.InvalidArgument, match=r"Descriptor|descriptors"):
            one.all_reduce_multiple_with_retry(wrong)  # type: ignore[arg-type]
    assert one.all_reduce_multiple_with_retry([]).tx_bytes == 0
    assert not is_waiting(one)


def test_descriptors_that_write_the_same_memory_are_refused(trio: Run) -> None:
    """They run at the same time: all peers would get the same wrong numbers, and no error."""
    one, tensor, other = trio.comms[0], ones(), ones()
    halves, shifted = [tensor[:50], tensor[50:]], [tensor[:60], tensor[40:]]
    for sends, recvs in (
        (shifted, shifted),
        ([tensor, tensor], [tensor, tensor]),
        ([other, other], [tensor, tensor]),
        (halves, [other[:50], tensor[:50]]),
    ):
        given = [replace(each, send=send) for each, send in zip(descriptors(recvs), sends, strict=True)]
        with pytest.raises(zpccl.InvalidArgument, match="same memory"):
            one.all_reduce_multiple_with_retry(given)
    assert not is_waiting(one)


def test_descriptors_may_send_the_same_memory_and_write_parts_of_a_tensor(trio: Run) -> None:
    def reduce(comm: zpccl.Communicator) -> np.ndarray[Any, Any]:
        send, whole = np.ones(50, np.float32), np.zeros(100, np.float32)
        given = [replace(each, send=send) for each in descriptors([whole[:50], whole[50:]])]
        comm.all_reduce_multiple_with_retry(given)
        return whole

    assert all((whole == 3).all() for whole in trio.all(reduce))


def test_descriptors_may_come_from_a_generator(trio: Run) -> None:
    arrays = {comm: ones() for comm in trio.comms}
    trio.all(lambda comm: comm.all_reduce_multiple_with_retry(each for each in descriptors([arrays[comm]])))  # type: ignore[arg-type]
    assert all((array == 3).all() for array in arrays.values())


def test_numbers_of_numpy_are_numbers(trio: Run) -> None:
    def reduce(comm: zpccl.Communicator) -> Any:
        return comm.all_reduce(ones(), op=np.int64(ReduceOp.SUM), tag=np.uint8(3), timeout=np.float32(60))

    assert all((result == 3).all() for result in trio.all(reduce))
    assert checked_seconds(Fraction(10**400)) == checked_seconds(10**400) == threading.TIMEOUT_MAX
    comm = zpccl.Communicator(heartbeat_timeout=np.int64(5), upload_limit=np.float32(5e6))
    assert comm._heartbeat_timeout_ns == 5 * limits.SECOND


def test_a_communicator_stays_in_its_process(trio: Run) -> None:
    for function in (pickle.dumps, copy.copy):
        with pytest.raises(zpccl.InvalidUsage, match="one in each process"):
            function(trio.comms[0])


def test_numbers_for_enums_in_a_sync(pair: Run) -> None:
    """PCCL accepts them too."""

    def sync(comm: zpccl.Communicator) -> None:
        state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(ones(), "w")])
        for strategy in (0, np.int64(0)):
            comm.sync_shared_state(state, strategy)  # type: ignore[arg-type]
            state.push_revision()

    pair.all(sync)


def test_a_communicator_is_entered_after_a_connect_that_failed() -> None:
    """It connects again."""
    with zpccl.MasterNode("127.0.0.1:0", daemon=True) as node:
        address = node.address
    comm = zpccl.Communicator(address)
    with pytest.raises(zpccl.MasterUnreachable):
        comm.connect(n_attempts=1)
    with zpccl.MasterNode(address, daemon=True), comm:
        assert comm.world_size == 1
        own = comm.peer_id
        with comm:
            assert comm.peer_id == own, "connected already"


def test_a_closed_communicator_is_not_entered(pair: Run) -> None:
    pair.comms[1].close()
    with pytest.raises(zpccl.InvalidUsage, match="closed"), pair.comms[1]:
        pytest.fail("entered")


# --- Arguments ------------------------------------------------------------------------------------------------------


class FakeCuda:
    """Looks like a tensor on a GPU, without a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (1,), "typestr": "<f4", "data": (1, False), "version": 3}


def read_only() -> np.ndarray[Any, Any]:
    array = ones()
    array.flags.writeable = False
    return array


shared = np.ones(200, np.float32)
too_large = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (limits.ELEMENTS_MAX + 1,))  # Never read.
BAD_TENSORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "a list": (([1.0, 2.0],), "list"),
    "None": ((None,), "NoneType"),
    "bytes": ((b"abcd",), "bytes"),
    "on a GPU": ((FakeCuda(),), "FakeCuda"),
    "not contiguous": ((np.ones((4, 4), np.float32).T[1:],), "contiguous"),
    "every other": ((np.ones(10, np.float32)[::2],), "contiguous"),
    "recv not contiguous": ((ones(5), np.ones(10, np.float32)[::2]), "recv is not contiguous"),
    "read-only recv": ((ones(), read_only()), "recv is read-only"),
    "masked": ((np.ma.masked_less(ones(), 0),), "masked array"),
    "bool": ((ones(4, bool),), "bool"),
    "complex": ((ones(4, complex),), "complex"),
    "object": ((np.array([None]),), "object"),
    "text": ((np.array(["a"]),), "not supported"),
    "other byte order": ((ones(4, ">f4"),), "native order"),
    "records": ((np.zeros(3, "i4,f4"),), "not supported"),
    "recv too short": ((ones(5), ones(4)), "recv has 4 elements, send has 5"),
    "recv of another dtype": ((ones(5), ones(5, np.int32)), "INT32, but send has FLOAT"),
    "overlapping": ((shared[:100], shared[50:150]), "share"),
    "too large": ((too_large, too_large), "too large"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_cannot_be_used_are_refused(trio: Run, case: str) -> None:
    tensors, text = BAD_TENSORS[case]
    for function in (trio.comms[0].all_reduce, trio.comms[0].all_reduce_async):
        with pytest.raises(zpccl.InvalidArgument, match=text) as caught:
            function(*tensors, op=ReduceOp.SUM)
        assert caught.value.result == Result.INVALID_ARGUMENT
    assert not is_waiting(trio.comms[0])


def test_a_read_only_send_is_fine_unless_in_place(trio: Run) -> None:
    assert all((result == 3).all() for result in trio.all(lambda comm: comm.all_reduce(read_only())))
    array = read_only()
    with pytest.raises(zpccl.InvalidArgument, match="read-only"):
        trio.comms[0].all_reduce(array, array, op=ReduceOp.SUM)


class OtherOp(enum.Enum):
    """Like torch.distributed.ReduceOp: its MIN has the number of our MAX, and compares equal to it."""

    MIN = 3

    def __eq__(self, other: object) -> bool:
        return other == self.value

    def __hash__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


BAD_KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"op": "sum"}, "ReduceOp"),
    ({"op": 9}, "ReduceOp"),
    ({"op": [1]}, "ReduceOp"),
    ({"op": None}, "ReduceOp"),
    ({"op": np.ones(2, int)}, "ReduceOp"),
    ({"op": OtherOp.MIN}, "ReduceOp"),
    ({"tag": np.ones(2, int)}, "tag"),
    ({"timeout": "1"}, "timeout"),
    ({"timeout": np.float32("inf")}, "timeout"),
    ({"timeout": Decimal(1)}, "timeout"),
    ({"tag": -1}, "tag"),
    ({"tag": 2**64}, "tag"),
    ({"tag": 1.0}, "tag"),
    ({"tag": "1"}, "tag"),
    ({"tag": True}, "tag"),
    ({"operand_descriptor": DataType.FLOAT}, "not a ReduceOperandDescriptor"),
    ({"operand_descriptor": zpccl.ReduceOperandDescriptor(DataType.DOUBLE)}, "its descriptor says DOUBLE"),
    ({"operand_descriptor": zpccl.ReduceOperandDescriptor(np.float32)}, "not a zpccl.DataType"),  # type: ignore[arg-type]
    ({"operand_descriptor": zpccl.ReduceOperandDescriptor("float32")}, "not a zpccl.DataType"),  # type: ignore[arg-type]
    ({"restore": None}, "restore"),
    ({"restore": "no"}, "restore"),
    ({"quantization_options": QuantizationAlgorithm.MIN_MAX}, "not QuantizationOptions"),
    ({"quantization_options": QuantizationOptions(DataType.UINT16)}, "UINT8, INT8, UINT4, INT4"),
    ({"quantization_options": QuantizationOptions(block_size=0)}, "block_size"),
    ({"quantization_options": QuantizationOptions(block_size=2**31)}, "block_size"),
    ({"quantization_options": QuantizationOptions(algorithm=7)}, "QuantizationAlgorithm"),  # type: ignore[arg-type]
    ({"quantization_options": QuantizationOptions(algorithm=[])}, "QuantizationAlgorithm"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("keywords", "text"), BAD_KEYWORDS)
def test_keywords_that_cannot_be_right_are_refused(trio: Run, keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(zpccl.InvalidArgument, match=text):
        trio.comms[0].all_reduce(ones(), **{"op": ReduceOp.SUM, **keywords})
    assert not is_waiting(trio.comms[0])


def test_integers_cannot_be_quantised(trio: Run) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="floating"):
        trio.comms[0].all_reduce(ones(4, np.int32), quantization_options=QuantizationOptions())


BAD_CONSTRUCTIONS: list[tuple[dict[str, Any], str]] = [
    ({"address": "nonsense"}, "master address"),
    ({"address": "host:99999"}, "master address"),
    ({"address": "host:"}, "master address"),
    ({"address": "host:0"}, "no port"),
    ({"address": 5}, "master address"),
    ({"address": "::1:5000"}, "master address"),
    ({"address": "tcp://h:1"}, "master address"),
    ({"peer_group": -1}, "peer_group"),
    ({"peer_group": 2**32}, "peer_group"),
    ({"peer_group": "0"}, "peer_group"),
    ({"peer_group": 1.0}, "peer_group"),
    ({"peer_group": True}, "peer_group"),
    ({"peer_group": None}, "peer_group"),
    ({"p2p_connection_pool_size": limits.LINK_CONNECTIONS_MAX + 1}, "connections"),
    ({"p2p_connection_pool_size": -1}, "connections"),
    ({"connections": "4"}, "connections"),
    ({"advertise": "a b"}, "advertise"),
    ({"advertise": "a" * 300}, "advertise"),  # The master would refuse it, and seem to be absent.
    ({"advertise": 5}, None),  # type: ignore[list-item]  # "5" is a host.
    ({"listen": "host:x"}, "listen"),
    ({"listen": "host:9-5"}, "listen"),
    ({"name": 5}, "name"),
    ({"heartbeat_timeout": 0}, "heartbeat_timeout"),
    ({"heartbeat_timeout": 0.5}, "heartbeat_timeout"),
    ({"heartbeat_timeout": "1"}, "heartbeat_timeout"),
    ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout"),
    ({"master_timeout": -1}, "master_timeout"),
]


@pytest.mark.parametrize(("keywords", "text"), BAD_CONSTRUCTIONS)
def test_constructions_that_cannot_be_right_are_refused(keywords: dict[str, Any], text: str | None) -> None:
    expected = contextlib.nullcontext() if text is None else pytest.raises(zpccl.InvalidArgument, match=text)
    with expected:
        zpccl.Communicator(**{"address": "127.0.0.1:1", **keywords})


def test_the_environment_says_the_same_as_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_run(0) as run:
        monkeypatch.setenv("ZPCCL_MASTER", run.master.address)
        monkeypatch.setenv("ZPCCL_NAME", "by environment \udcff")
        monkeypatch.setenv("ZPCCL_CONNECTIONS", "2")
        with zpccl.Communicator() as comm:
            assert comm.members == ("by environment ?",)
            assert comm._connections == 2
        for name in ("NAME", "CONNECTIONS", "LISTEN", "ADVERTISE", "UPLOAD_LIMIT", "ENCRYPT", "LOCAL_SOCKETS"):
            monkeypatch.setenv(f"ZPCCL_{name}", "")  # The same as unset.
        comm = zpccl.Communicator()
        assert (comm._connections, comm._upload) == (0, None)
    for name, value in [("ZPCCL_CONNECTIONS", "x"), ("ZPCCL_CONNECTIONS", "²"), ("ZPCCL_SECRET", "s")]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(zpccl.InvalidArgument, match=name):
                zpccl.Communicator()


# --- Phases ---------------------------------------------------------------------------------------------------------


def operations(comm: zpccl.Communicator) -> list[Callable[[], Any]]:
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(ones(), "x")])
    return [
        lambda: comm.all_reduce(ones()),
        lambda: comm.all_reduce_async(ones()),
        lambda: comm.all_reduce_multiple_with_retry(descriptors([ones()])),
        lambda: comm.sync_shared_state(state),
        comm.update_topology,
        comm.are_peers_pending,
        comm.optimize_topology,
        lambda: comm.get_attribute(zpccl.Attribute.GLOBAL_WORLD_SIZE),
    ]


def results(comm: zpccl.Communicator) -> list[Result]:
    found = []
    for operation in operations(comm):
        try:
            operation()
        except zpccl.PCCLError as error:
            assert error.function, error
            found.append(error.result)
    return found


def test_calls_before_connect_and_after_close() -> None:
    with local_run(0) as run:
        comm = zpccl.Communicator(run.master.address)
        assert results(comm) == [Result.INVALID_USAGE] * 8
        assert (comm.rank, comm.world_size, comm.epoch, comm.members) == (-1, 0, 0, ())
        comm.connect()
        with pytest.raises(zpccl.InvalidUsage, match="already"):
            comm.connect()
        assert (comm.rank, comm.world_size) == (0, 1)
        comm.close()
        comm.close()
        assert results(comm) == [Result.INVALID_USAGE] * 8
        with pytest.raises(zpccl.InvalidUsage, match="closed"):
            comm.connect()


def test_calls_while_pending_are_refused(pair: Run) -> None:
    joiner = zpccl.Communicator(pair.master.address)
    connecting = pair.start(joiner.connect)
    until(lambda: joiner._loop is not None and joiner._loop.view.state.value == "pending")
    assert results(joiner) == [Result.INVALID_USAGE] * 8
    joiner.close()
    assert isinstance(failure(connecting), zpccl.InvalidUsage)
    assert still_works(pair)


def test_closing_ends_calls_in_flight(pair: Run) -> None:
    """L1: another thread calls close(). The waiting call raises, its buffer is as before, and a handle reports it."""
    one, other = pair.comms
    array = ones()
    waiting = vote(pair, 0, lambda comm: comm.all_reduce(array, array, op=ReduceOp.SUM))
    handle = one.all_reduce_async(ones(), tag=1)
    one.close()
    assert isinstance(failure(waiting), zpccl.InvalidUsage) and (array == 1).all()
    assert handle.wait()[:2] == (False, Result.INVALID_USAGE)
    with pytest.raises(zpccl.TooFewPeers):
        other.all_reduce(ones())
    assert other.world_size == 1


def test_fewer_than_are_needed_change_nothing() -> None:
    """S2: one calls before the third peer leaves, the other calls afterwards. With a newcomer they go on."""
    with local_run(3, min_world_size=3) as run:
        one, other, leaver = run.comms
        assert one.min_world_size == 3
        arrays = [ones(), ones()]
        early = one.all_reduce_async(arrays[0], arrays[0], op=ReduceOp.SUM)
        leaver.close()
        with pytest.raises(zpccl.TooFewPeers, match="2 peers are in the group, and min_world_size is 3"):
            other.all_reduce(arrays[1], arrays[1], op=ReduceOp.SUM)
        assert early.wait()[:2] == (False, Result.TOO_FEW_PEERS)
        assert all((array == 1).all() for array in arrays)
        run.comms[2] = zpccl.Communicator(run.master.address, min_world_size=3)
        joined = run.start(run.comms[2].connect)
        while one.world_size < 3:
            for call in [run.start(comm.update_topology) for comm in (one, other)]:
                finish(call)
        finish(joined)
        assert all((array == 3).all() for array in run.all(lambda comm: comm.all_reduce(ones(), op=ReduceOp.SUM)))


def test_a_bad_attribute_is_refused(single: zpccl.Communicator) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="Attribute"):
        single.get_attribute(17)  # type: ignore[arg-type]


def test_errors_do_not_pile_up_on_one_object(pair: Run) -> None:
    """Many calls raise the error of a closed communicator; none of them may hold the frames of the others."""
    one = pair.comms[0]
    pair.master.interrupt()
    one.close()
    seen = []
    for _ in range(2):
        with pytest.raises(zpccl.InvalidUsage) as caught:
            one.all_reduce(ones())
        seen.append(caught.value)
    assert seen[0] is not seen[1]


def test_a_forked_child_gets_an_error(pair: Run) -> None:
    """Calls and close() in the child do not reach the run. Waiting on an inherited handle raises too."""
    one = pair.comms[0]
    handle = one.all_reduce_async(ones(), tag=8)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        found: Any = []
        try:
            found = results(one)
            try:
                handle.wait()
            except zpccl.PCCLError as error:
                found.append(error.result)
            one.close()
        finally:
            os.write(writing, repr([int(result) for result in found]).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == repr([int(Result.INVALID_USAGE)] * 9)
    assert os.waitpid(pid, 0)[1] == 0
    assert (pair.comms[1].all_reduce(ones(), tag=8) == 2).all() and handle.wait()[0]
    assert still_works(pair)


def test_dropping_a_communicator_leaves_the_run(pair: Run) -> None:
    comm = pair.comms.pop(0)
    loop = comm._loop
    assert loop is not None
    del comm
    until(lambda: pair.comms[0].world_size == 1)
    loop._thread.join(HANG_SECONDS)
    assert not loop._thread.is_alive()


def test_the_port_of_a_communicator_that_was_dropped_is_free_again() -> None:
    """A program that tries again with a new communicator at its one port drops the old one."""
    listen = ""
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as master:
        for _ in range(3):
            comm = zpccl.Communicator(master.address, listen=listen or "127.0.0.1")
            comm.connect()
            listen = listen or loop_of(comm).options.addresses[0]
            del comm


def test_a_communicator_may_be_dropped_while_another_one_waits_for_those_before() -> None:
    """L2: another thread drops it, or the garbage collector runs in the middle."""
    comms = [zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1") for _ in range(20)]
    for comm in comms:
        comm._loop = comm._make_loop()
    loops = [loop_of(comm) for comm in comms]
    del comm, comms[:3]

    def drop_one(frame: FrameType, event: str, argument: Any) -> Any:
        if "weakref" in frame.f_code.co_filename and event == "line" and comms:
            comms.pop()
        return drop_one if "weakref" in frame.f_code.co_filename else None

    with (
        zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as master,
        contextlib.closing(zpccl.Communicator(master.address)) as last,
    ):
        with tracing(drop_one):
            last.connect()
        comms.clear()
        assert last.world_size == 1
    assert all(loop.view.state is State.CLOSED for loop in loops)


def test_connecting_does_not_wait_for_ever_for_one_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: a user's callback keeps its thread busy."""
    monkeypatch.setattr(limits, "PEER_LOOP_TIMEOUT_NS", limits.MS)
    is_busy, is_over = threading.Event(), threading.Event()

    def keep_busy(_: object) -> None:
        is_busy.set()
        is_over.wait(2 * HANG_SECONDS)

    with futures.ThreadPoolExecutor(1) as executor, zpccl.MasterNode("127.0.0.1:0") as master:
        dropped = zpccl.Communicator(master.address, listen="127.0.0.1")
        dropped.connect()
        loop = loop_of(dropped)
        loop.ask_measurements().add_done_callback(keep_busy)
        assert is_busy.wait(HANG_SECONDS)
        del dropped
        try:
            with (
                zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as other,
                contextlib.closing(zpccl.Communicator(other.address)) as comm,
            ):
                executor.submit(comm.connect).result(HANG_SECONDS)
        finally:
            is_over.set()
        loop._thread.join(HANG_SECONDS)


def test_a_communicator_connects_while_others_are_collected() -> None:
    """L2: no thread gets an object that the collector is taking apart."""
    found: list[PeerLoop] = []

    comm = zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1")
    loop = comm._loop = comm._make_loop()
    comm.close()
    loop.itself, loop.array = [comm, loop], ones()  # type: ignore[attr-defined]
    # The collector ignores arrays: this one is freed with everything that the loop holds, and not before.
    weakref.finalize(loop.array, lambda: found.extend(communicator._loops.all()))  # type: ignore[attr-defined]
    gone = weakref.ref(loop)
    with without_collector():
        del comm, loop
        gc.collect()
    assert gone() is None and all(hasattr(each, "view") for each in found)


def test_ctrl_c_while_the_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: Python counts the thread as running, but there is none."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    comm = zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1")
    loop = comm._loop = comm._make_loop()
    call = PendingCall()
    name = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), comm._giving_up(loop, [call]):
        patch.setattr(threading, name, interrupt)
        loop.start(call, 1)
    assert loop.view.state is State.CLOSED and call.future.done()
    closing = threading.Thread(target=comm.close, daemon=True)
    closing.start()
    closing.join(HANG_SECONDS)
    assert not closing.is_alive()
    del threading._limbo[loop._thread]  # type: ignore[attr-defined]


@pytest.mark.parametrize("thread", ["zpccl-links", "zpccl-state", "zpccl-peer"])
def test_a_communicator_is_dropped_in_a_thread_of_its_own(pair: Run, thread: str) -> None:
    """L1: the collector drops objects that refer to each other in any thread, and must not wait for another one."""
    loop = loop_of(pair.comms[0])
    cycle: dict[str, Any] = {"comm": pair.comms.pop(0)}
    cycle["itself"] = cycle
    with without_collector():
        del cycle
        if thread == "zpccl-links":
            loop._broker._call(gc.collect)
        elif thread == "zpccl-state":
            loop._restorer.submit(gc.collect)  # type: ignore[arg-type]  # Nobody needs its result.
        else:
            loop.ask_measurements().add_done_callback(lambda _: gc.collect())
        loop._thread.join(HANG_SECONDS)
    assert not loop._thread.is_alive() and not loop._broker._thread.is_alive()
    until(lambda: pair.comms[0].world_size == 1)


def interrupted(number: int, functions: Sequence[Callable[..., Any]], call: Callable[[], Any]) -> BaseException | None:
    """Makes a call, with Ctrl-C before the line with this number among those that run in some functions.

    It does not come before a line that runs again, as that of a `with` does: at its end Python looks for no signals.
    """
    codes, seen = {function.__code__ for function in functions}, set[tuple[str, int]]()

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            line = frame.f_code.co_name, frame.f_lineno
            if line not in seen and len(seen) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
            seen.add(line)
        return interrupt

    try:
        with tracing(interrupt):
            call()
    except (KeyboardInterrupt, zpccl.PCCLError) as error:
        return error
    return None


def test_ctrl_c_while_a_call_is_made(pair: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: at whatever line it comes, the call was made and is withdrawn, or it was not made."""
    monkeypatch.setattr(limits, "PEER_LOOP_TIMEOUT_NS", 0)
    one, send = pair.comms[0], ones()
    for number in itertools.count():
        error = interrupted(number, (PeerLoop.call, PeerLoop._post), lambda: one.all_reduce(send, send, timeout=0))
        if not isinstance(error, KeyboardInterrupt):
            break
    assert isinstance(error, zpccl.OperationTimeout) and number > 10
    assert still_works(pair)


def test_ctrl_c_before_connecting_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: the same communicator may connect again."""
    monkeypatch.setattr(limits, "PEER_LOOP_TIMEOUT_NS", 0)
    connect = zpccl.Communicator.connect.__wrapped__  # type: ignore[attr-defined]
    error: BaseException | None = KeyboardInterrupt()
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as master:
        for number in itertools.count():
            with contextlib.closing(zpccl.Communicator(master.address)) as comm:
                error = interrupted(number, (connect, PeerLoop.start), comm.connect)
                if error is None:
                    break
                assert isinstance(error, KeyboardInterrupt)
                if comm._loop is None or comm._loop.view.state is State.CLOSED:  # Otherwise it was connected by then.
                    comm.connect()
                assert comm.world_size == 1
    assert number > 15


def test_another_call_while_connecting_begins_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: another thread's call comes too early and is given up. That does not end connect()."""
    start = PeerLoop.start

    def start_late(loop: PeerLoop, call: PendingCall, connect_tries: int) -> None:
        early = executor.submit(comm.all_reduce, ones(), timeout=0)
        until(lambda: len(loop._inbox) == 2)  # The call, and its withdrawal.
        start(loop, call, connect_tries)
        errors.append(early.exception(HANG_SECONDS))

    monkeypatch.setattr(PeerLoop, "start", start_late)
    errors: list[BaseException | None] = []
    with (
        futures.ThreadPoolExecutor(1) as executor,
        zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as master,
        contextlib.closing(zpccl.Communicator(master.address)) as comm,
    ):
        comm.connect()
        assert comm.world_size == 1
    assert isinstance(errors[0], zpccl.PCCLError)


def test_too_many_in_flight_are_refused(single: zpccl.Communicator, pair: Run) -> None:
    one = pair.comms[0]
    handles = [one.all_reduce_async(ones(1), tag=tag) for tag in range(limits.CALLS_IN_FLIGHT_MAX)]
    with pytest.raises(zpccl.InvalidUsage, match="in flight"):
        one.all_reduce(ones(1), tag=5000)
    arrays = [ones(1) for _ in handles]
    others = [pair.comms[1].all_reduce_async(a, a, tag=tag) for tag, a in enumerate(arrays)]
    waited = futures.wait([pair.start(handle.wait) for handle in handles + others], HANG_SECONDS)
    assert all(future.result()[0] for future in waited.done) and not waited.not_done


# --- The network ----------------------------------------------------------------------------------------------------


def test_topology_names_peers_and_links(caplog: pytest.LogCaptureFixture) -> None:
    """Each link says which interface it uses, once in the log."""
    with caplog.at_level("INFO", "zpccl.peer"), local_run(3, local_sockets=False) as run:
        topology = run.comms[0].topology()
        assert [peer.name for peer in topology.peers] == list(run.comms[0].members)
        assert {peer.peer_id for peer in topology.peers} == set(run.comms[0].peer_ids)
        assert not topology.paths, "nothing was measured"
        assert sorted(link.peer.name for link in topology.links) == ["peer1", "peer2"]
        assert {link.ends.interface for link in topology.links} == {"lo"}
        assert {link.ends.connections for link in topology.links} == {limits.LINK_CONNECTIONS_DEFAULT}
        assert "links of this peer" in str(topology)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("link to ")]
    assert len(lines) == 6 and all("127.0.0.1" in line and "(lo)" in line for line in lines)


def test_links_within_a_host_in_the_topology(pair: Run) -> None:
    (link,) = pair.comms[0].topology().links
    assert link.ends.is_local and "Unix" in str(link.ends)


def test_topology_in_many_threads(pair: Run) -> None:
    found = [pair.start(comm.topology) for comm in pair.comms for _ in range(50)]
    assert all(len(finish(future).peers) == 2 for future in found)


def test_topology_while_the_master_is_away(pair: Run) -> None:
    """L1: it raises in time, and the answer of a later master is not lost."""
    address = pair.master.address
    pair.master.interrupt()
    with pytest.raises(zpccl.MasterUnreachable) as caught:
        pair.comms[0].topology(timeout=0.1)
    assert caught.value.address == address and "Communicator.topology" in str(caught.value)
    waiting = pair.start(pair.comms[0].topology, HANG_SECONDS)
    pair.master = zpccl.MasterNode(address, recovery_grace=0.05)
    pair.master.run()
    assert len(finish(waiting).peers) == 2


def test_topology_ends_with_the_communicator(pair: Run) -> None:
    comm = pair.comms[0]
    pair.master.interrupt()
    waiting = pair.start(comm.topology, HANG_SECONDS)
    until(lambda: loop_of(comm)._measurements)
    comm.close()
    assert isinstance(failure(waiting), zpccl.InvalidUsage)
    with pytest.raises(zpccl.InvalidUsage):
        comm.topology()


def test_topology_before_connecting() -> None:
    with pytest.raises(zpccl.InvalidUsage):
        zpccl.Communicator("127.0.0.1:1").topology()


def test_a_member_cannot_fill_the_log_of_another(
    pair: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOG_LINES_MAX", 3)
    hostile, other = pair.comms
    engine, other_id = loop_of(hostile).engine, bytes.fromhex(other.peer_id)
    for _ in range(8):
        engine.post_message(other_id, DIGEST_CHANNEL, b"no digest", b"", limits.MIB)
    until(lambda: engine.link_state(other_id).message_bytes == 0)
    pair.all(lambda comm: comm.are_peers_pending())  # The loop of the other one hears the messages first.
    assert 0 < sum("malformed digest" in record.getMessage() for record in caplog.records) <= 3
