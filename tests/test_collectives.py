"""Broadcast, all-gather, reduce-scatter and barrier by the public API, with several communicators in this process."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from e2e.harness import until
from e2e.local import Run, failure, finish, local_run

import zpccl
from zpccl import arguments
from zpccl.arguments import Collective
from zpccl.collectives import _wait_with_retry, _windows
from zpccl.control.calls import part_of
from zpccl.engine.engine import ReducePlan
from zpccl.errors import Result
from zpccl.protocol.messages import CollectiveSpec
from zpccl.protocol.paths import Paths
from zpccl.types import DataType, ReduceOp

pytestmark = pytest.mark.e2e

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[int, Run]]:
    """Two, three and four members. Every test leaves them idle and complete."""
    with local_run(2) as two, local_run(3) as three, local_run(4) as four:
        yield {2: two, 3: three, 4: four}


@pytest.fixture
def trio(runs: dict[int, Run]) -> Run:
    return runs[3]


@pytest.fixture
def single() -> Iterator[zpccl.Communicator]:
    with local_run(1) as run:
        yield run.comms[0]


def array_of(run: Run, comm: zpccl.Communicator, count: int = 1001, dtype: Any = np.float64) -> Array:
    """The tensor of a member, with other numbers than those of all others."""
    return (np.arange(count) % 100 + run.comms.index(comm)).astype(dtype)


def by_id(run: Run) -> list[zpccl.Communicator]:
    """The members in order of ids."""
    return sorted(run.comms, key=lambda comm: comm.peer_id)


def still_works(run: Run) -> bool:
    return all((r == len(run.comms)).all() for r in run.all(lambda comm: comm.all_reduce(np.ones(9), tag=2**64 - 1)))


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("dtype", (np.uint8, np.float16, np.int64))
def test_broadcast(runs: dict[int, Run], size: int, dtype: Any) -> None:
    """S1: from each root, with any shapes; the root's tensor may be read-only."""
    run = runs[size]
    for root in run.comms:

        def send(comm: zpccl.Communicator, root: zpccl.Communicator = root) -> tuple[Array, int]:
            tensor = array_of(run, comm, dtype=dtype).reshape(7, -1 if comm is root else 143)
            tensor.setflags(write=comm is not root)
            info = comm.broadcast(tensor, is_root=np.bool_(comm is root), tag=3)  # type: ignore[arg-type]
            return tensor, info.local_world_size

        for tensor, world_size in run.all(send):
            np.testing.assert_array_equal(tensor.ravel(), array_of(run, root, dtype=dtype))
            assert world_size == size


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("room", (None, 0, 5))
def test_all_gather(runs: dict[int, Run], size: int, room: int | None) -> None:
    """S1: the same rows on all, in order of ids; `send` does not change; more room than needed does no harm."""
    run = runs[size]
    order = by_id(run)
    names = tuple(f"peer{run.comms.index(comm)}" for comm in order)

    def gather(comm: zpccl.Communicator) -> tuple[zpccl.GatherResult, Any]:
        send = array_of(run, comm).reshape(13, 77)
        send.setflags(write=False)
        recv = None if room is None else np.full(send.size * size + room, 7.0)
        return comm.all_gather(send, recv), recv

    for comm, (result, recv) in zip(run.comms, run.all(gather), strict=True):
        assert result.tensor.shape == (size, 13, 77) and result.info.local_world_size == size
        assert result.peer_ids == tuple(other.peer_id for other in order) and result.peers == names
        assert order[result.row] is comm
        for row, other in zip(result.tensor, order, strict=True):
            np.testing.assert_array_equal(row.ravel(), array_of(run, other))
        if recv is not None:
            assert np.shares_memory(result.tensor, recv) and (recv[result.tensor.size :] == 7).all()


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("op", (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX))
@pytest.mark.parametrize("count", (1, 3, 1001))
def test_reduce_scatter(runs: dict[int, Run], size: int, op: ReduceOp, count: int) -> None:
    """S1: parts are in order of ids, together the result of an all-reduce; with few elements some are empty."""
    run = runs[size]

    def scatter(comm: zpccl.Communicator) -> tuple[zpccl.ScatterResult, Array]:
        send = array_of(run, comm, count, np.int32)
        return comm.reduce_scatter(send, op=op), comm.all_reduce(send, op=op)

    order = by_id(run)
    seen = []
    for comm, (result, whole) in zip(run.comms, run.all(scatter), strict=True):
        assert order[result.index] is comm and result.part == part_of(count, size, result.index)
        np.testing.assert_array_equal(result.tensor, whole[result.part])
        seen += list(range(count)[result.part])
    assert sorted(seen) == list(range(count))


def test_parts_that_are_gathered_are_the_whole(trio: Run) -> None:
    """Parts and rows have the same order: reduce-scatter, work on a part, all-gather."""

    def both(comm: zpccl.Communicator) -> bool:
        send = array_of(trio, comm, 3 * 50)
        part = comm.reduce_scatter(send)
        rows = comm.all_gather(part.tensor)
        return bool((rows.tensor.ravel() == comm.all_reduce(send, op=ReduceOp.SUM)).all())

    assert trio.all(both) == [True] * 3


@pytest.mark.parametrize("is_whole", (True, False))
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("room", (None, 0, 5))
def test_all_to_all(
    runs: dict[int, Run], size: int, room: int | None, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: row i goes to peer i in order of ids, and row i of the result comes from peer i; `send` does not change.

    This holds also if a link is missing.
    """
    run = runs[size]
    order = by_id(run)
    if not is_whole:
        monkeypatch.setattr(Paths, "broken", lambda self, members, now_ns: [tuple(members[:2])])

    def rows_of(comm: zpccl.Communicator) -> Array:
        return array_of(run, comm, size * 6006).reshape(size, 77, 78)

    def exchange(comm: zpccl.Communicator) -> tuple[zpccl.GatherResult, Any]:
        send = rows_of(comm)
        send.setflags(write=False)
        recv = None if room is None else np.full(send.size + room, 7.0)
        return comm.all_to_all(send, recv, tag=int(is_whole)), recv  # So that no plan from before is left.

    for comm, (result, recv) in zip(run.comms, run.all(exchange), strict=True):
        assert result.peer_ids == comm.peer_ids == tuple(other.peer_id for other in order)
        assert order[result.row] is comm
        assert result.info.algorithm is (zpccl.Algorithm.DIRECT if is_whole else zpccl.Algorithm.RING)
        np.testing.assert_array_equal(result.tensor, [rows_of(other)[result.row] for other in order])
        if recv is not None:
            assert np.shares_memory(result.tensor, recv) and (recv[result.tensor.size :] == 7).all()


def test_rows_for_a_peer_that_is_lost(trio: Run) -> None:
    """S1, L1: no peer gets rows that were made for another one. The program makes new rows and calls again."""
    with pytest.raises(zpccl.PeerLost, match="rows for 4 peers, but the group has only 3"):
        trio.comms[0].all_to_all(np.ones((4, 2)))

    def exchange(comm: zpccl.Communicator) -> None:
        call = arguments.all_to_all(np.ones((4, 3)), None, 0, 4)  # Made before a fourth peer was lost.
        comm._run(call, None)

    for error in trio.errors(exchange):
        assert isinstance(error, zpccl.PeerLost) and "rows for 4 peers, but the group has only 3" in str(error)
    assert still_works(trio)


def test_rows_of_a_peer_that_is_in_no_group() -> None:
    """L1: no peer was lost, so a program must not make new rows and call again."""
    comm = zpccl.Communicator("127.0.0.1:1")
    for call in (comm.all_to_all, comm.all_to_all_async):
        with pytest.raises(zpccl.InvalidUsage, match="not connected"):
            call(np.ones((3, 2)))
    with pytest.raises(zpccl.InvalidUsage, match="not connected"):
        comm.all_gather(np.ones(3), np.empty(3))
    comm.close()
    with pytest.raises(zpccl.InvalidUsage, match="closed"):
        comm.all_to_all(np.ones((3, 2)))


def test_reduce_scatter_into_the_callers_memory(trio: Run) -> None:
    """The parts have 4, 3 and 3 elements. If there is more room than the part needs, the rest does not change."""

    def scatter(comm: zpccl.Communicator) -> bool:
        recv = np.full(6, -1.0)
        result = comm.reduce_scatter(np.ones(10), recv)
        count = result.part.stop - result.part.start
        return bool(np.shares_memory(result.tensor, recv) and (recv == [3.0] * count + [-1.0] * (6 - count)).all())

    assert trio.all(scatter) == [True] * 3


def test_a_result_in_a_matrix_has_the_shape_of_any_other(trio: Run) -> None:
    """S1: the result exists, so nobody gets an error. A matrix always has two dimensions."""
    size = len(trio.comms)

    def collectives(comm: zpccl.Communicator) -> list[tuple[int, ...]]:
        recv = np.zeros((size, 2 * size)).view(np.matrix)
        results = comm.all_gather(np.ones(2), recv), comm.reduce_scatter(np.ones(size), recv)
        return [result.tensor.shape for result in results]

    assert trio.all(collectives) == [[(size, 2), (1,)]] * size


def test_bfloat16_as_uint16_is_scattered(trio: Run) -> None:
    operand = zpccl.ReduceOperandDescriptor(DataType.BFLOAT16)
    one, three = 0x3F80, 0x4040

    def scatter(comm: zpccl.Communicator) -> list[int]:
        result = comm.reduce_scatter(np.full(6, one, np.uint16), operand_descriptor=operand)
        return [int(x) for x in result.tensor]

    assert trio.all(scatter) == [[three, three]] * 3


def test_a_barrier_holds_until_the_last_comes(trio: Run) -> None:
    """S1."""
    came: list[int] = []
    late = threading.Event()

    def pass_it(comm: zpccl.Communicator) -> int:
        if comm is trio.comms[2]:
            assert late.wait(20)
        came.append(trio.comms.index(comm))
        info = comm.barrier(tag=8)
        assert len(came) == 3, "it let somebody through before all had come"
        return info.local_world_size

    futures = [trio.start(pass_it, comm) for comm in trio.comms]
    until(lambda: all(comm._loop is not None and comm._loop._calls for comm in trio.comms[:2]))
    assert not any(future.done() for future in futures)
    late.set()
    assert [finish(future) for future in futures] == [3] * 3


def test_all_kinds_at_once_by_handles(trio: Run) -> None:
    """Each has its own tag, in another order on each peer."""

    def launch(comm: zpccl.Communicator) -> bool:
        place = trio.comms.index(comm)
        sent = array_of(trio, comm, 300)
        tensor = sent.copy()
        starts: list[Callable[[], zpccl.AsyncReduceHandle]] = [
            lambda: comm.all_reduce_async(sent, op=ReduceOp.SUM, tag=1),
            lambda: comm.broadcast_async(tensor, is_root=place == 1, tag=2),
            lambda: comm.all_gather_async(sent, tag=3),
            lambda: comm.reduce_scatter_async(sent, tag=4),
            lambda: comm.barrier_async(tag=5),
            lambda: comm.all_to_all_async(sent.reshape(3, 100), tag=6),
        ]
        turn = place % len(starts)
        handles = {i: starts[i]() for i in (*range(turn, len(starts)), *range(turn))}
        outcomes = {i: handles[i].wait() for i in reversed(range(len(starts)))}
        assert all(ok and info.local_world_size == 3 for ok, _, info in outcomes.values()), outcomes
        total = handles[0].result
        scattered, gathered = handles[3].result, handles[2].result
        assert handles[4].result.local_world_size == 3
        return bool(
            (tensor == array_of(trio, trio.comms[1], 300)).all()
            and (gathered.tensor.sum(axis=0) == total).all()
            and (scattered.tensor == total[scattered.part]).all()
        )

    assert trio.all(launch) == [True] * 3


# --- Refusals ---------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[zpccl.Communicator], Any]] = {
    "broadcast": lambda comm: comm.broadcast(np.ones(4), is_root=True),
    "broadcast_async": lambda comm: comm.broadcast_async(np.ones(4), is_root=True),
    "all_gather": lambda comm: comm.all_gather(np.ones(4)),
    "all_gather_async": lambda comm: comm.all_gather_async(np.ones(4)),
    "all_to_all": lambda comm: comm.all_to_all(np.ones((1, 4))),
    "all_to_all_async": lambda comm: comm.all_to_all_async(np.ones((1, 4))),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(4)),
    "reduce_scatter_async": lambda comm: comm.reduce_scatter_async(np.ones(4)),
    "barrier": lambda comm: comm.barrier(),
    "barrier_async": lambda comm: comm.barrier_async(),
}


@pytest.mark.parametrize("name", CALLS)
def test_alone_is_told_at_once(single: zpccl.Communicator, name: str) -> None:
    """As with all_reduce: a program that goes on alone should know it."""
    with pytest.raises(zpccl.TooFewPeers) as caught:
        CALLS[name](single)
    assert caught.value.result == Result.TOO_FEW_PEERS and f"Communicator.{name}:" in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_calls_before_connect_are_refused(name: str) -> None:
    with pytest.raises(zpccl.InvalidUsage, match="connect"):
        CALLS[name](zpccl.Communicator("127.0.0.1:1"))


@pytest.mark.parametrize("roots", ((), (0, 2), (0, 1, 2)))
def test_not_just_one_root(trio: Run, roots: tuple[int, ...]) -> None:
    """S2: the error tells everybody which peers said that they are root. All tensors are as before."""

    def send(comm: zpccl.Communicator) -> zpccl.CollectiveMismatch:
        place, tensor = trio.comms.index(comm), array_of(trio, comm)
        with pytest.raises(zpccl.CollectiveMismatch) as caught:
            comm.broadcast(tensor, is_root=place in roots, tag=6)
        assert (tensor == array_of(trio, comm)).all()
        return caught.value

    for error in trio.all(send):
        assert (error.field, error.tag) == ("is_root", 6)
        assert all(f"peer{i}" in " ".join(v for v in error.values if v.startswith(str(i in roots))) for i in range(3))
    assert still_works(trio)


def test_calls_that_differ_are_named(trio: Run) -> None:
    calls: list[Callable[[zpccl.Communicator], Any]] = [
        lambda comm: comm.barrier(tag=7),
        lambda comm: comm.all_gather(np.ones(3), tag=7),
        lambda comm: comm.all_reduce(np.ones(3), tag=7),
    ]
    for error in trio.errors(lambda comm: calls[trio.comms.index(comm)](comm)):
        assert isinstance(error, zpccl.CollectiveMismatch) and error.field == "kind"
        assert set(error.values) == {"BARRIER from peer0", "ALL_GATHER from peer1", "ALL_REDUCE from peer2"}
    assert still_works(trio)


BAD: dict[str, tuple[Callable[[zpccl.Communicator, Array], Any], str]] = {
    "root by rank": (lambda comm, x: comm.broadcast(x, is_root=0), "is_root"),  # type: ignore[arg-type]
    "a list": (lambda comm, x: comm.broadcast([1.0], is_root=True), "tensor is a list"),
    "read-only": (lambda comm, x: comm.broadcast(np.broadcast_to(x[:1], 1), is_root=False), "read-only"),
    "strided": (lambda comm, x: comm.all_gather(x[::2]), "contiguous"),
    "no room for rows": (lambda comm, x: comm.all_gather(x, np.ones(3 * x.size - 1)), "recv has 29 elements"),
    "recv of another dtype": (lambda comm, x: comm.all_gather(x, np.ones(30, np.float32)), "FLOAT"),
    "recv is send": (lambda comm, x: comm.all_gather(x, x), "share"),
    "too few rows": (lambda comm, x: comm.all_to_all(x[:2]), "3 peers need a row each"),
    "no rows": (lambda comm, x: comm.all_to_all(np.array(1.0)), "3 peers need a row each"),
    "no room for rows from all": (lambda comm, x: comm.all_to_all(x[:3], np.ones(2)), "recv has 2 elements"),
    "recv overlaps": (lambda comm, x: comm.reduce_scatter(x, x[:4]), "share"),
    "no room for a part": (lambda comm, x: comm.reduce_scatter(x, np.ones(3)), "recv has 3 elements"),
    "no op": (lambda comm, x: comm.reduce_scatter(x, op=9), "op"),  # type: ignore[arg-type]
    "operand": (lambda comm, x: comm.reduce_scatter(x, operand_descriptor=DataType.DOUBLE), "operand_descriptor"),  # type: ignore[arg-type]
    "tag": (lambda comm, x: comm.barrier(tag=-1), "tag"),
    "tag of a broadcast": (lambda comm, x: comm.broadcast(x, is_root=True, tag="a"), "tag"),  # type: ignore[arg-type]
    "timeout": (lambda comm, x: comm.barrier(timeout=-1), "timeout"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_before_anything_begins(trio: Run, name: str) -> None:
    call, text = BAD[name]
    with pytest.raises(zpccl.InvalidArgument, match=text):
        call(trio.comms[0], np.ones(10))
    assert trio.comms[0]._loop is not None and not trio.comms[0]._loop._calls


def test_a_timeout_ends_each_kind_of_call(trio: Run) -> None:
    """S2, L1: nobody else called."""
    comm, tensor = trio.comms[0], np.arange(50.0)
    calls: list[Callable[[], Any]] = [
        lambda: comm.broadcast(tensor, is_root=False, timeout=0.01),
        lambda: comm.all_gather(tensor, timeout=0.01),
        lambda: comm.reduce_scatter(tensor, timeout=0.01),
        lambda: comm.all_to_all(tensor[:48].reshape(3, 16), timeout=0.01),
        lambda: comm.barrier(timeout=0.01),
    ]
    for call in calls:
        with pytest.raises(zpccl.OperationTimeout):
            call()
    assert (tensor == np.arange(50.0)).all()
    assert still_works(trio)


@pytest.mark.parametrize("kind", ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
def test_a_handle_without_a_result(trio: Run, kind: str) -> None:
    """There is no result before the end, nor after a failure."""
    handle: zpccl.AsyncReduceHandle = getattr(trio.comms[0], f"{kind}_async")(np.ones(3))
    with pytest.raises(zpccl.InvalidUsage, match="no result"):
        _ = handle.result
    assert handle.wait(timeout=0)[:2] == (False, Result.RANK_CONNECTION_LOST)
    with pytest.raises(zpccl.InvalidUsage, match="no result"):
        _ = handle.result
    assert still_works(trio)


def test_no_memory_for_the_result_fails_the_attempt_for_all(trio: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: everybody gets an error, and no peer's loop breaks."""

    def refuse(like: Any, shape: tuple[int, ...], datatype: DataType) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("zpccl.arguments.new_tensor", refuse)
    errors = trio.errors(lambda comm: comm.all_gather(np.ones(5)))
    assert all(isinstance(error, zpccl.InternalError) and "no room" in str(error) for error in errors), errors
    monkeypatch.undo()
    assert still_works(trio)


def test_a_peer_that_cannot_start_does_not_retry(trio: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: it hears why, and the others try again until it calls again."""

    def refuse(plan: ReducePlan) -> None:
        raise OSError(errno.EINVAL, "refused")

    def reduce(comm: zpccl.Communicator) -> zpccl.ReduceInfo:
        tensor = np.ones(100, np.float32)
        operand = zpccl.ReduceOperandDescriptor(DataType.FLOAT, zpccl.DistributionHint.NONE)
        how = zpccl.ReduceDescriptor(tensor.size, ReduceOp.SUM, 1, operand)
        return comm.all_reduce_multiple_with_retry([zpccl.ReduceOpDescriptor.from_numpy(tensor, tensor, how)])

    loop = trio.comms[0]._loop
    assert loop is not None
    monkeypatch.setattr(loop.engine, "start_reduce", refuse)
    first, *others = [trio.start(reduce, comm) for comm in trio.comms]
    error = failure(first)
    assert isinstance(error, zpccl.InternalError) and "peer0 cannot start: refused" in str(error)
    assert not any(future.done() for future in others)
    monkeypatch.undo()
    for future in (trio.start(reduce, trio.comms[0]), *others):
        assert finish(future).local_world_size == 3


def test_a_link_that_was_lost_before_the_call_began(trio: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: all hear which peer has lost a link, and may call again."""

    def refuse(plan: ReducePlan) -> None:
        raise OSError(errno.ENOTCONN, "refused")

    loop = trio.comms[0]._loop
    assert loop is not None
    monkeypatch.setattr(loop.engine, "start_reduce", refuse)
    errors = trio.errors(lambda comm: comm.all_reduce(np.ones(100), tag=77))
    assert all(isinstance(error, zpccl.PeerLost) for error in errors), errors
    assert all(str(error).endswith("peer0 has just lost a link that the call needs") for error in errors), errors
    monkeypatch.undo()
    assert still_works(trio)


class Votes:
    """Replaces a loop. Records the calls that begin, and ends each as told."""

    def __init__(self, *ends: tuple[int, Exception | None]) -> None:
        self.begun: list[list[int]] = []
        self._ends = list(ends)
        self._open: dict[int, Collective] = {}

    def call(self, calls: list[Collective]) -> None:
        tags = [call.spec.tag for call in calls if isinstance(call.spec, CollectiveSpec)]
        self.begun.append(tags)
        self._open.update(zip(tags, calls, strict=True))
        while self._ends and self._ends[0][0] in self._open:
            tag, error = self._ends.pop(0)
            future = self._open.pop(tag).future
            future.set_exception(error) if error is not None else future.set_result(1)


@pytest.mark.parametrize("first_is_last", [False, True])
def test_what_is_tried_again_is_waited_for_first(first_is_last: bool) -> None:
    """L1: a member whose window ends elsewhere reaches the next tags only when this one repeats the failed ones."""
    lost = zpccl.PeerLost("lost")
    ends = [(2, None), (0, lost), (1, lost), (3, lost)]
    ends = ends[::-1] if first_is_last else ends
    votes = Votes(*ends, (1, lost), (0, None), (3, None), (1, lost), (1, None))
    calls = [arguments.barrier(tag) for tag in range(4)]
    votes.call(calls)
    _wait_with_retry(votes, calls)  # type: ignore[arg-type]
    assert votes.begun == [[0, 1, 2, 3], [0, 1, 3], [1], [1]]
    assert all(call.future.exception() is None for call in calls)


def test_another_error_is_told_when_nobody_uses_the_memory_any_more() -> None:
    votes = Votes((1, zpccl.TooFewPeers("alone")), (0, zpccl.PeerLost("lost")), (0, zpccl.TooFewPeers("alone")))
    calls = [arguments.barrier(tag) for tag in range(2)]
    votes.call(calls)
    _wait_with_retry(votes, calls)  # type: ignore[arg-type]
    assert [type(call.future.exception()) for call in calls] == [zpccl.TooFewPeers] * 2


def test_windows_follow_the_group() -> None:
    """L3: half of the calls that a peer may have in flight."""
    made = [arguments.barrier(tag) for tag in range(7)]
    sizes = iter([3, 3, 3, 2, 2, 2, 2])
    assert [len(window) for window in _windows(made, 4, lambda: next(sizes))] == [3, 2, 2]


def test_a_handle_tells_that_it_has_ended(trio: Run) -> None:
    one, *others = trio.comms
    handle, ended = one.barrier_async(), threading.Event()
    handle.add_done_callback(ended.set)
    assert not handle.done() and not ended.is_set()
    with pytest.raises(zpccl.InvalidUsage):
        _ = handle.peer_ids
    for other in [other.barrier_async() for other in others]:
        other.wait()
    assert ended.wait(30) and handle.done()
    ended.clear()
    handle.add_done_callback(ended.set)
    assert ended.is_set()


def test_what_a_callback_raises_is_logged_whoever_runs_it(trio: Run, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        ended.set()
        raise ValueError("of the callback")

    one, *others = trio.comms
    handle, ended = one.barrier_async(), threading.Event()
    with pytest.raises(zpccl.InvalidArgument, match="a int cannot be called"):
        handle.add_done_callback(5)  # type: ignore[arg-type]
    handle.add_done_callback(fail)
    for other in [other.barrier_async() for other in others]:
        other.wait()
    assert ended.wait(30) and handle.wait()[0]
    handle.add_done_callback(fail)
    until(lambda: len(caplog.records) >= 2, "both are logged")
    assert [record.name for record in caplog.records if "callback" in record.getMessage()] == ["zpccl.peer"] * 2


def test_a_callback_must_not_wait(trio: Run) -> None:
    """L1: it runs in the thread that answers all calls, which would wait for itself, whatever the timeout."""
    one, *others = trio.comms
    x, state = np.ones(1), zpccl.SharedState([zpccl.TensorInfo.from_numpy(np.ones(1), "x")])
    operand = zpccl.ReduceOperandDescriptor(DataType.DOUBLE)
    descriptor = zpccl.ReduceOpDescriptor(x, x, zpccl.ReduceDescriptor(1, ReduceOp.SUM, 3, operand))
    waits: list[Callable[[], object]] = [
        lambda: one.barrier(tag=1, timeout=1),
        one.topology,
        one.barrier_async(tag=2).wait,
        lambda: one.sync_shared_state(state),
        lambda: one.all_reduce_multiple_with_retry([descriptor]),
    ]
    refused: list[str] = []

    def callback() -> None:
        assert handle.wait()[0]  # It has ended.
        for wait in waits:
            try:
                wait()
            except zpccl.InvalidUsage as error:
                refused.append(error.message)
        ended.set()

    handle, ended = one.barrier_async(), threading.Event()
    handle.add_done_callback(callback)
    for other in [other.barrier_async() for other in others]:
        other.wait()
    assert ended.wait(30)
    assert [text.partition(";")[0] for text in refused] == [
        "the callback of a collective must not wait for a call"
    ] * len(waits)


def test_a_handle_tells_who_took_part(trio: Run) -> None:
    def reduce(comm: zpccl.Communicator) -> tuple[str, ...]:
        handle = comm.all_reduce_async(np.ones(3))
        handle.wait()
        return handle.peer_ids

    assert trio.all(reduce) == [trio.comms[0].peer_ids] * 3
