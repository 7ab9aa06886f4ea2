"""Collectives of the torch backend: they do what torch expects, and fail as specified when ranks are lost."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.harness import until
from e2e.local import local_run
from fake_device import FakeDevice
from interpreter import handling, raising

import zpccl
from zpccl import limits

torch = pytest.importorskip("torch")
dist = torch.distributed
groups = pytest.importorskip("pytorch.groups", exc_type=ImportError)
gpus = pytest.importorskip("pytorch.gpu", exc_type=ImportError)
process_group = pytest.importorskip("zpccl.torch.process_group", exc_type=ImportError)
rendezvous = pytest.importorskip("zpccl.torch.rendezvous", exc_type=ImportError)
pairs = pytest.importorskip("zpccl.torch.pairs", exc_type=ImportError)
configurations = pytest.importorskip("zpccl.torch.configuration", exc_type=ImportError)
tags = pytest.importorskip("zpccl.torch.tags", exc_type=ImportError)
works = pytest.importorskip("zpccl.torch.work", exc_type=ImportError)

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    with groups.local_ranks(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def trio() -> Iterator[Any]:
    with groups.local_ranks(3) as made:
        yield made


def with_options(kind: Any, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def summed(op: Any = dist.ReduceOp.SUM) -> Any:
    return with_options(dist.AllreduceOptions, reduceOp=op)


OPERATIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "SUM": (dist.ReduceOp.SUM, lambda rows: rows.sum(0)),
    "AVG": (dist.ReduceOp.AVG, lambda rows: rows.mean(0)),
    "MIN": (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    "MAX": (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    "PRODUCT": (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
    "PREMUL_SUM": (dist._make_nccl_premul_sum(0.5), lambda rows: (rows * 0.5).sum(0)),
}


def rows_of(size: int, *shape: int) -> Any:
    """One tensor for each rank, with small whole numbers, so that sums are exact in any order."""
    return torch.randint(1, 5, (size, *shape), generator=torch.Generator().manual_seed(size)).double()


@pytest.mark.parametrize("name", OPERATIONS)
def test_reductions(ranks: Any, name: str) -> None:
    """S1, S2 of all_reduce, reduce, and both forms of reduce_scatter."""
    op, reference = OPERATIONS[name]
    size = ranks.size
    rows = rows_of(size, size, 7)
    expected = reference(rows)

    def reduce(group: Any, rank: int) -> None:
        tensor = rows[rank].clone()
        work = group.allreduce([tensor], summed(op))
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        torch.testing.assert_close(tensor, expected)

        gaps = torch.empty(7, size).double().t().copy_(rows[rank])
        assert not gaps.is_contiguous() or size == 1
        group.allreduce([gaps], summed(op)).wait()
        torch.testing.assert_close(gaps, expected)

        tensor = rows[rank].clone()
        group.reduce([tensor], with_options(dist.ReduceOptions, reduceOp=op, rootRank=size - 1)).wait()
        torch.testing.assert_close(tensor, expected if rank == size - 1 else rows[rank])

        options = with_options(dist.ReduceScatterOptions, reduceOp=op)
        tensor, output = rows[rank].clone(), torch.zeros(7).double()
        group.reduce_scatter([output], [list(tensor)], options).wait()
        torch.testing.assert_close(output, expected[rank])
        output.zero_()
        group.reduce_scatter_single(output, tensor, options).wait()
        torch.testing.assert_close(output, expected[rank])
        assert torch.equal(tensor, rows[rank])

    ranks.all(reduce)


def test_coalesced(ranks: Any) -> None:
    rows = rows_of(ranks.size, ranks.size, 5)

    def run(group: Any, rank: int) -> None:
        tensors = [rows[rank].clone(), rows[rank, 0].float(), torch.ones(3, dtype=torch.int32)]
        group.allreduce_coalesced(tensors, with_options(dist.AllreduceCoalescedOptions)).wait()
        assert torch.equal(tensors[0], rows.sum(0)) and torch.equal(tensors[1], rows.sum(0)[0].float())
        assert tensors[2].tolist() == [ranks.size] * 3
        outputs = [torch.zeros(5).double(), torch.zeros(5)]
        group.reduce_scatter_single_coalesced(outputs, [rows[rank], rows[rank].float()]).wait()
        assert torch.equal(outputs[0], rows.sum(0)[rank]) and torch.equal(outputs[1].double(), outputs[0])
        gathered = [torch.zeros_like(rows), torch.zeros_like(rows).float()]
        group.all_gather_single_coalesced(gathered, [rows[rank], rows[rank].float()]).wait()
        assert torch.equal(gathered[0], rows) and torch.equal(gathered[1].double(), rows)
        lists = [[torch.zeros(ranks.size, 5).double(), torch.zeros(1)] for _ in range(ranks.size)]
        group.allgather_coalesced(lists, [rows[rank], torch.ones(1) * rank]).wait()
        assert all(torch.equal(found[0], row) for found, row in zip(lists, rows, strict=True))
        assert [float(found[1]) for found in lists] == list(range(ranks.size))

    ranks.all(run)


MOVED = [torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.uint64]


@pytest.mark.parametrize("dtype", MOVED)
def test_what_is_moved_may_have_any_dtype(ranks: Any, dtype: Any) -> None:
    size = ranks.size
    rows = rows_of(size, 3, 2).sub(2).to(dtype)

    def same(one: Any, other: Any) -> Any:
        return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

    def move(group: Any, rank: int) -> None:
        for tensor in (rows[rank].clone(), rows[rank].clone().t().contiguous().t()):
            group.broadcast([tensor], with_options(dist.BroadcastOptions, rootRank=size - 1)).wait()
            assert same(tensor, rows[size - 1])
        outputs = [torch.zeros(3, 2).to(dtype) for _ in range(size)]
        group.allgather([outputs], [rows[rank].t().contiguous().t()]).wait()
        assert all(same(output, row) for output, row in zip(outputs, rows, strict=True))
        output = torch.zeros(size * 3, 2).to(dtype)
        group.all_gather_single(output, rows[rank]).wait()
        assert same(output, rows.view(-1, 2))
        outputs = [torch.zeros(3, 2).to(dtype) for _ in range(size)]
        options = with_options(dist.GatherOptions, rootRank=size - 1)
        group.gather([outputs] if rank == size - 1 else [], [rows[rank]], options).wait()
        assert rank != size - 1 or all(same(output, row) for output, row in zip(outputs, rows, strict=True))
        output = torch.zeros(size * 3, 2).to(dtype)
        group.gather_single(output if rank == size - 1 else None, rows[rank], options).wait()
        assert rank != size - 1 or same(output, rows.view(-1, 2))
        output = torch.zeros(3, 2).to(dtype)
        options = with_options(dist.ScatterOptions, rootRank=size - 1)
        group.scatter([output], [list(rows)] if rank == size - 1 else [], options).wait()
        assert same(output, rows[rank])

    ranks.all(move)


def test_all_to_all(ranks: Any) -> None:
    size = ranks.size

    def exchange(group: Any, rank: int) -> None:
        # Rank s sends (s + d) % 3 rows, each of the value 10 s + d, to rank d.
        mine = [torch.full(((rank + to) % 3, 2), 10.0 * rank + to) for to in range(size)]
        expected = [torch.full(((source + rank) % 3, 2), 10.0 * source + rank) for source in range(size)]
        outputs = [torch.zeros_like(tensor) for tensor in expected]
        group.alltoall(outputs, mine).wait()
        assert all(torch.equal(output, tensor) for output, tensor in zip(outputs, expected, strict=True))
        output = torch.zeros_like(torch.cat(expected))
        group.all_to_all_single(output, torch.cat(mine), [len(t) for t in expected], [len(t) for t in mine]).wait()
        assert torch.equal(output, torch.cat(expected))
        output = torch.zeros(2 * size)
        group.all_to_all_single(output, torch.arange(2.0 * size) + 100 * rank, [], []).wait()
        assert torch.equal(output.view(size, 2)[:, 0], torch.arange(size) * 100.0 + 2 * rank)

    ranks.all(exchange)


def test_booleans_are_reduced_as_torch_does(ranks: Any) -> None:
    def reduce(group: Any, rank: int) -> tuple[list[bool], ...]:
        found = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            tensor = torch.tensor([True, False, rank == 0])
            group.allreduce([tensor], summed(op)).wait()
            found.append(tensor.tolist())
        return tuple(found)

    any_of, all_of = [True, False, True], [True, False, ranks.size == 1]
    assert ranks.all(reduce) == [(any_of, all_of, any_of, all_of)] * ranks.size


def test_empty_tensors_and_barrier(ranks: Any) -> None:
    def run(group: Any, rank: int) -> None:
        group.allreduce([torch.zeros(0)], summed()).wait()
        group.allgather([[torch.zeros(0) for _ in range(ranks.size)]], [torch.zeros(0)]).wait()
        assert group.barrier().wait()

    ranks.all(run)


def test_ranks_have_a_store_in_common(trio: Any) -> None:
    """For the program: torch's `get_group_store`."""

    def run(group: Any, rank: int) -> list[bytes]:
        store = group.get_group_store()
        store.set(str(rank), f"of {rank}")
        return [store.get(str(other)) for other in range(3)]

    assert trio.all(run) == [[b"of 0", b"of 1", b"of 2"]] * 3


def test_many_equal_collectives_in_flight(trio: Any) -> None:
    """B1: more than there are tags for at one time, and waited for in another order."""

    def run(group: Any, rank: int) -> None:
        tensors = [torch.full((3,), float(i)) for i in range(100)]
        works = [group.allreduce([tensor], summed()) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        assert all(tensor.tolist() == [3.0 * i] * 3 for i, tensor in enumerate(tensors))

    trio.all(run)


def test_more_signatures_than_have_tags(trio: Any) -> None:
    def run(group: Any, rank: int) -> None:
        tensors = [torch.ones(i + 1) for i in range(150)]
        for work in [group.allreduce([tensor], summed()) for tensor in tensors]:
            work.wait()
        assert all(torch.equal(tensor, torch.full_like(tensor, 3)) for tensor in tensors)

    trio.all(run)


def test_futures(trio: Any) -> None:
    """Callbacks may wait for other collectives."""

    def run(group: Any, rank: int) -> list[float]:
        def again(future: Any) -> Any:
            return group.allreduce(future.value(), summed()).get_future().wait()

        future = group.allreduce([torch.ones(4)], summed()).get_future()
        (tensor,) = future.then(again).wait()
        return list(tensor.tolist())

    assert trio.all(run) == [[9.0] * 4] * 3


# --- send and recv --------------------------------------------------------------------------------------------------


def test_messages_around_a_ring(trio: Any) -> None:
    """L1: all receive before they send, as a pipeline does. Bytes arrive with any dtype and shape."""

    def run(group: Any, rank: int) -> None:
        for dtype in (torch.float32, torch.bool, torch.complex64):
            mine = torch.arange(6).add(rank).to(dtype).view(2, 3)
            tensor = torch.zeros(3, 2, dtype=dtype).t()
            received = group.recv([tensor], (rank - 1) % 3, 0)
            group.send([mine], (rank + 1) % 3, 0).wait()
            assert received.wait() and received.result()[0] is tensor
            assert torch.equal(tensor, torch.arange(6).add((rank - 1) % 3).to(dtype).view(2, 3))
        group.send([torch.ones(0)], (rank + 1) % 3, 0).wait()

    trio.all(run)


def test_messages_are_told_apart_by_tag_and_arrive_in_order(trio: Any) -> None:
    """There are more than travel at one time, received in another order of tags, in both directions at once."""
    count = 50

    def run(group: Any, rank: int) -> None:
        sent = [group.send([torch.full((2,), float(i))], 1 - rank, i % 2) for i in range(count)]
        for tag in (1, 0):
            for i in range(tag, count, 2):
                tensor = torch.zeros(2)
                group.recv([tensor], 1 - rank, tag).wait()
                assert tensor.tolist() == [float(i)] * 2
        for work in sent:
            assert work.wait() and work.is_completed()

    trio.some([0, 1], run)


def test_a_message_waits_for_no_other_rank() -> None:
    """L1: a rank that has not come for its first message yet delays only that message."""
    with groups.local_ranks(3) as ranks:
        early = ranks.groups[0].recv([torch.zeros(1)], 2, 0)
        ranks.some([0, 1], lambda group, rank: (group.send, group.recv)[rank]([torch.ones(1)], 1 - rank, 0).wait())
        assert not early.is_completed()
        ranks.groups[2].send([torch.ones(1)], 0, 0).wait()
        early.wait()


def test_what_cannot_be_sent(trio: Any) -> None:
    def run(group: Any, rank: int) -> None:
        with pytest.raises(zpccl.InvalidArgument, match="not another rank"):
            group.send([torch.ones(1)], rank, 0)
        with pytest.raises(zpccl.InvalidArgument, match="meta"):
            group.send([torch.ones(1, device="meta")], (rank + 1) % 3, 0)
        with pytest.raises(zpccl.InvalidUsage, match="source"):
            group.recv_anysource([torch.ones(1)], 0)
        group.barrier().wait()

    trio.all(run)


@pytest.mark.parametrize("have_met", [False, True])
def test_a_lost_rank_fails_messages(have_met: bool) -> None:
    """L1: messages with that rank fail, and so do messages among the others, which may not be issued any more."""
    with groups.local_ranks(3) as ranks:
        if have_met:
            ranks.some(
                [0, 2], lambda group, rank: (group.send, group.recv)[rank // 2]([torch.ones(1)], 2 - rank, 0).wait()
            )
        works = [ranks.groups[0].recv([torch.ones(1)], other, 1) for other in (1, 2)]
        ranks.groups[2].abort()
        errors = ranks.some([0, 1], lambda group, rank: groups.failure(late(group)))
        assert all(isinstance(error, zpccl.PCCLError) for error in errors)
        for work in works[::-1] if have_met else []:
            assert isinstance(groups.failure(work.wait), zpccl.PCCLError)
        for group in ranks.groups:
            assert isinstance(groups.failure(lambda group=group: group.send([torch.ones(1)], 0, 0)), zpccl.PCCLError)


def test_a_first_message_fails_when_the_other_rank_is_lost() -> None:
    """L1: not only at the timeout of the group."""
    with groups.local_ranks(3) as ranks:
        work = ranks.groups[0].recv([torch.ones(1)], 2, 0)
        ranks.groups[2].communicator.close()
        assert type(groups.failure(work.wait)) is zpccl.PeerLost


def test_no_thread_waits_for_a_first_message_when_the_group_has_ended() -> None:
    with groups.local_ranks(2) as ranks:
        work = ranks.groups[0].recv([torch.ones(1)], 1, 0)
        thread = ranks.groups[0]._configuration.pair(1, groups.TIMEOUT).thread
    thread.join(groups.TIMEOUT.total_seconds() / 2)
    assert not thread.is_alive() and work.exception() is not None


def test_more_messages_than_a_peer_may_have_calls() -> None:
    """L1: they have as many tags, so that none of them waits for another one of the same tag."""
    count = limits.CALLS_IN_FLIGHT_MAX + 50
    with groups.local_ranks(2) as ranks:

        def run(group: Any, rank: int) -> list[float]:
            tensors = [torch.full((1,), float(i * (1 - rank))) for i in range(count)]
            works = [(group.recv if rank else group.send)([each], 1 - rank, i) for i, each in enumerate(tensors)]
            assert all(work.wait() for work in works)
            return [float(tensor) for tensor in tensors]

        assert ranks.all(run) == [[float(i) for i in range(count)]] * 2


def test_a_message_that_nobody_receives() -> None:
    """L1: `wait` ends at its timeout, and the group with it."""
    with groups.local_ranks(2) as ranks:
        work = ranks.groups[0].send([torch.ones(1)], 1, 0)
        assert not work.is_completed()
        with pytest.raises(zpccl.OperationTimeout, match="has not come"):
            work.wait(timedelta(milliseconds=50))
        assert isinstance(ranks.groups[0].error, zpccl.OperationTimeout)


# --- GPUs -----------------------------------------------------------------------------------------------------------


def every_collective(group: Any, rank: int, place: Callable[[Any], Any]) -> list[Any]:
    """Makes each call with small whole numbers, in tensors that `place` moves to a device. Returns the outputs."""
    size = group.size()
    rows = rows_of(size, 6)
    mine = rows[rank]

    def room(*shape: int) -> Any:
        return place(torch.zeros(*shape).double())

    options = with_options(dist.ReduceOptions, reduceOp=dist.ReduceOp.SUM, rootRank=size - 1)
    to_first = with_options(dist.GatherOptions, rootRank=0)
    premul = summed(dist._make_nccl_premul_sum(0.5))
    works = [
        group.allreduce([place(mine.clone())], summed()),
        group.allreduce([place(mine.clone())], premul),
        group.allreduce([place(mine.clone().view(2, 3)).t()], summed()),
        group.reduce([place(mine.clone())], options),
        group.reduce_scatter([room(2)], [[place(row[:2]) for row in rows]]),
        group.reduce_scatter_single(room(6), place(rows)),
        group.broadcast([place(mine.clone())], with_options(dist.BroadcastOptions, rootRank=size - 1)),
        group.broadcast([place(mine.to(torch.complex64))], with_options(dist.BroadcastOptions, rootRank=0)),
        group.broadcast([place(mine.clone().view(2, 3)).t()], with_options(dist.BroadcastOptions, rootRank=0)),
        group.scatter(
            [room(6)],
            [[place(row) for row in rows]] if rank == 0 else [],
            with_options(dist.ScatterOptions, rootRank=0),
        ),
        group.allgather([[room(6) for _ in range(size)]], [place(mine)]),
        group.all_gather_single(room(size, 6), place(mine)),
        group.gather([[room(6) for _ in range(size)]] if rank == 0 else [], [place(mine)], to_first),
        group.all_to_all_single(room(size, 6), place(rows * rank), [], []),
        group.alltoall([room(1 + rank) for _ in range(size)], [place(row[: 1 + i]) for i, row in enumerate(rows)]),
        group.barrier(),
    ]
    if size > 1:
        received = room(6)
        works.append(group.recv([received], (rank - 1) % size, 0))
        works.append(group.send([place(mine)], (rank + 1) % size, 0))
        works.append(group.recv([place(torch.zeros(6).double().view(2, 3)).t()], (rank - 1) % size, 1))
        works.append(group.send([place(mine)], (rank + 1) % size, 1))
    assert all(work.wait() for work in works)
    return [work.result() for work in works]


def test_tensors_on_a_gpu(ranks: Any, gpu: FakeDevice) -> None:
    """S1: everything is as on the CPU, the outputs stay where they were, and no copy is in progress."""

    def on_cpu(value: Any) -> Any:
        return [on_cpu(each) for each in value] if isinstance(value, list) else gpus.on_cpu(value)

    expected = ranks.all(lambda group, rank: every_collective(group, rank, lambda tensor: tensor))
    assert not gpu.log
    found = ranks.all(lambda group, rank: on_cpu(every_collective(group, rank, gpus.on_gpu)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert gpu.under_way == 0
    marks = [entry[1] for entry in gpu.log if entry[0] == "behind"]
    assert len(set(marks)) == len(marks), "each finishes behind the mark of its own call"
    assert marks and "wait" in [entry[0] for entry in gpu.log], "and is waited for"


def test_one_element_with_gaps_on_a_gpu(gpu: FakeDevice) -> None:
    """S1: a column of one row, which torch calls contiguous for any strides."""
    with groups.local_ranks(2) as ranks:

        def run(group: Any, rank: int) -> Any:
            column = gpus.on_gpu(torch.full((1, 7), float(rank + 1)))[:, 3]
            assert column.is_contiguous() and column.stride() == (7,)
            group.allreduce([column]).wait()
            outputs = [gpus.on_gpu([0.0]) for _ in range(2)]
            group.allgather([outputs], [column]).wait()
            return [gpus.on_cpu(each).tolist() for each in (column, *outputs)]

        assert ranks.all(run) == [[[3.0]] * 3] * 2


@pytest.mark.parametrize("gpu_rank", [0, 1])
def test_a_gpu_and_a_cpu_meet(gpu: FakeDevice, gpu_rank: int) -> None:
    with groups.local_ranks(2) as ranks:

        def run(group: Any, rank: int) -> list[float]:
            tensor = torch.full((4,), float(rank + 1))
            if rank == gpu_rank:
                tensor = gpus.on_gpu(tensor)
            group.allreduce([tensor], summed()).wait()
            return [float(value) for value in tensor.as_subclass(torch.Tensor)]

        assert ranks.all(run) == [[3.0] * 4] * 2


def test_what_fails_leaves_a_tensor_on_a_gpu_alone(gpu: FakeDevice) -> None:
    """S4"""
    with groups.local_ranks(2) as ranks:
        tensor = gpus.on_gpu([1.0, 2.0])
        work = ranks.groups[0].allreduce([tensor], summed())
        ranks.groups[1].abort()
        assert isinstance(groups.failure(work.wait), zpccl.PCCLError)
        assert gpus.on_cpu(tensor).tolist() == [1.0, 2.0]
        assert "in" not in [entry[0] for entry in gpu.log]


@pytest.mark.parametrize("what", ["reduces", "sends"])
def test_an_error_of_torch_is_one_of_the_group(gpu: FakeDevice, what: str) -> None:
    """L1: no thread dies of it, and no other rank waits."""
    gpu.fail_at = 0
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "reduces": lambda group, tensor: group.allreduce([tensor], summed()),
        "sends": lambda group, tensor: (group.send, group.recv)[group.rank()]([tensor], 1 - group.rank(), 0),
    }
    with groups.local_ranks(2) as ranks:

        def run(group: Any, rank: int) -> Any:
            tensor = torch.ones(1) if rank else gpus.on_gpu([1.0])
            return groups.failure(lambda: calls[what](group, tensor).wait())

        error, other = ranks.all(run)
        assert isinstance(error, zpccl.InternalError) and "fell off" in str(error)
        assert isinstance(other, zpccl.PCCLError) and all(group.error is not None for group in ranks.groups)


def test_a_future_knows_the_gpus_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses tensors on other GPUs."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.futures, "Future", lambda devices: asked.append(devices))
    for value in (torch.ones(1), gpus.on_gpu(1), [[torch.ones(1)], [gpus.on_gpu(1), gpus.on_gpu(1)]], []):
        works.new_future(value)
    gpu = torch.device("cuda:0")
    assert asked == [[], [gpu], [gpu], []]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_collectives_on_a_gpu(ranks: Any) -> None:
    """Each runs after the work queued before it. Later users of an output see it on any stream."""

    def run(group: Any, rank: int) -> None:
        found = every_collective(group, rank, lambda tensor: tensor.cuda())
        expected = every_collective(group, rank, lambda tensor: tensor)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, check_device=False)
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.zeros(10_000_001, device="cuda")
            for _ in range(100):
                tensor += 1
            (output,) = group.allreduce([tensor], summed()).get_future().wait()
        assert bool((output == 100 * ranks.size).all())

    ranks.all(run)


def test_a_wrong_tensor_is_refused_and_the_group_goes_on(trio: Any) -> None:
    def run(group: Any, rank: int) -> None:
        for tensors, op in (
            ([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.SUM),
            ([torch.ones(2, device="meta")], dist.ReduceOp.SUM),
            ([torch.ones(2)], dist.ReduceOp.BXOR),
            ([torch.ones(2).bool()], dist.ReduceOp.AVG),
        ):
            with pytest.raises(zpccl.InvalidArgument):
                group.allreduce(tensors, summed(op))
        with pytest.raises(zpccl.InvalidArgument, match="2 output tensors, and 3"):
            group.allgather([[torch.ones(2)] * 2], [torch.ones(2)])
        group.barrier().wait()

    trio.all(run)


def test_of_a_coalesced_collective_all_is_refused_or_nothing(trio: Any) -> None:
    """S4: the valid part is not reduced after the call has raised."""

    def run(group: Any, rank: int) -> None:
        tensor, gathered = torch.ones(4), torch.zeros(12)
        wrong = torch.ones(2, dtype=torch.complex64)
        with pytest.raises(zpccl.InvalidArgument, match="complex64"):
            group.allreduce_coalesced([tensor, wrong])
        with pytest.raises(zpccl.InvalidArgument, match="complex64"):
            group.reduce_scatter_single_coalesced([torch.zeros(4), wrong], [torch.ones(12), wrong.repeat(3)])
        with pytest.raises(zpccl.InvalidArgument, match="output elements"):
            group.all_gather_single_coalesced([gathered, torch.zeros(1)], [tensor, tensor])
        for _ in range(3):
            group.barrier().wait()
        assert tensor.tolist() == [1.0] * 4 and gathered.tolist() == [0.0] * 12

    trio.all(run)


WRONG_SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "outputs that are shorter": lambda group, _: group.allgather([[torch.zeros(2)] * 3], [torch.ones(3)]),
    "outputs that are longer": lambda group, _: group.allgather([[torch.zeros(4)] * 3], [torch.ones(3)]),
    "coalesced outputs": lambda group, _: group.allgather_coalesced([[torch.zeros(2)]] * 3, [torch.ones(3)]),
    "gathered outputs": lambda group, rank: group.gather(
        [[torch.zeros(2)] * 3], [torch.ones(3)], with_options(dist.GatherOptions, rootRank=rank)
    ),
    "parts to scatter": lambda group, rank: group.scatter(
        [torch.zeros(2)],
        [[torch.ones(1), torch.ones(2), torch.ones(3)]],
        with_options(dist.ScatterOptions, rootRank=rank),
    ),
    "parts to reduce": lambda group, _: group.reduce_scatter(
        [torch.zeros(2)], [[torch.ones(1), torch.ones(2), torch.ones(3)]]
    ),
    "dtypes of all_gather_single": lambda group, _: group.all_gather_single(torch.zeros(6).double(), torch.ones(2)),
    "dtypes of reduce_scatter_single": lambda group, _: group.reduce_scatter_single(
        torch.zeros(2).int(), torch.ones(6)
    ),
    "dtypes of reduce_scatter": lambda group, _: group.reduce_scatter([torch.zeros(2).int()], [[torch.ones(2)] * 3]),
    "dtypes of all_to_all_single": lambda group, _: group.all_to_all_single(
        torch.zeros(3).int(), torch.ones(3), [], []
    ),
    "dtypes of all_to_all": lambda group, _: group.alltoall([torch.zeros(1).int()] * 3, [torch.ones(1)] * 3),
    "an average of booleans": lambda group, _: group.reduce_scatter_single(
        torch.zeros(1).bool(), torch.ones(3).bool(), with_options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.AVG)
    ),
    "a sparse tensor": lambda group, _: group.allreduce([torch.eye(2).to_sparse()]),
    "a sparse output": lambda group, _: group.all_gather_single(torch.eye(3).to_sparse(), torch.ones(3)),
    "an expanded tensor": lambda group, _: group.allreduce([expanded()]),
    "an expanded output of all_gather": lambda group, _: group.allgather([[expanded()] * 3], [torch.ones(3)]),
    "an expanded output of all_gather_single": lambda group, _: group.all_gather_single(expanded(), torch.ones(1)),
    "an expanded output of reduce_scatter_single": lambda group, _: group.reduce_scatter_single(
        expanded(), torch.ones(9)
    ),
    "an expanded output of all_to_all_single": lambda group, _: group.all_to_all_single(
        expanded(), torch.ones(3), [], []
    ),
    "an expanded output of all_to_all": lambda group, _: group.alltoall([expanded()] * 3, [torch.ones(3)] * 3),
    "an expanded tensor to receive": lambda group, rank: group.recv([expanded()], (rank + 1) % 3, 0),
}


def expanded() -> Any:
    return torch.zeros(1).expand(3)


@pytest.mark.parametrize("what", WRONG_SHAPES)
def test_tensors_that_do_not_fit_are_refused(trio: Any, what: str) -> None:
    """As by other backends: nothing is truncated, converted or misinterpreted. This holds in any order of peer ids."""

    def run(group: Any, rank: int) -> None:
        with pytest.raises(zpccl.InvalidArgument):
            WRONG_SHAPES[what](group, rank).wait()
        group.barrier().wait()

    trio.all(run)


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_is_no_rank_is_refused(trio: Any, root: int) -> None:
    """Otherwise nobody would get the result of a reduce or a gather."""

    def run(group: Any, rank: int) -> None:
        one = torch.ones(1)
        calls: list[Callable[[], Any]] = [
            lambda: group.broadcast([one], with_options(dist.BroadcastOptions, rootRank=root)),
            lambda: group.reduce([one], with_options(dist.ReduceOptions, rootRank=root)),
            lambda: group.gather([], [one], with_options(dist.GatherOptions, rootRank=root)),
            lambda: group.gather_single(None, one, with_options(dist.GatherOptions, rootRank=root)),
            lambda: group.scatter([one], [], with_options(dist.ScatterOptions, rootRank=root)),
        ]
        for call in calls:
            with pytest.raises(zpccl.InvalidArgument, match="not a rank"):
                call()
        group.barrier().wait()

    trio.all(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("expected", [1, 3])
def test_parts_of_other_lengths_than_expected_are_refused(trio: Any, dtype: Any, expected: int) -> None:
    """On all ranks, by all_to_all with split sizes: nothing is truncated or filled up. Rank 0 sends two to rank 1."""

    def run(group: Any, rank: int) -> None:
        to, source = [[1, 2, 1], [4, 1, 1], [1, 1, 1]][rank], [[1, 4, 1], [expected, 1, 1], [1, 1, 1]][rank]
        tensors = torch.ones(sum(source), dtype=dtype), torch.ones(sum(to), dtype=dtype)
        with pytest.raises(zpccl.InvalidArgument, match=f"rank 0 sends 2 elements to rank 1, which expects {expected}"):
            group.all_to_all_single(*tensors, source, to).wait()
        group.barrier().wait()

    trio.all(run)


def test_no_rank_gets_half_a_complex_number() -> None:
    """Complex numbers travel as bytes, which could be divided evenly."""
    with groups.local_ranks(2) as ranks:

        def run(group: Any, rank: int) -> None:
            tensor = torch.ones(3, dtype=torch.complex64)
            with pytest.raises(zpccl.InvalidArgument, match="equal parts"):
                group.all_to_all_single(torch.zeros_like(tensor), tensor, [], [])

        ranks.all(run)


# --- Faults ---------------------------------------------------------------------------------------------------------


def test_a_lost_rank_fails_what_is_pending_and_what_comes() -> None:
    """L1, S2: including calls that the lost rank had not issued, and for any way to wait."""
    with groups.local_ranks(3) as ranks:
        assert ranks.all(lambda group, _: group.communicator.min_world_size) == [3] * 3
        ranks.all(lambda group, _: group.barrier().wait())
        tensors = {rank: torch.ones(5) for rank in (0, 1)}
        works = ranks.some([0, 1], lambda group, rank: group.allreduce([tensors[rank]], summed()))
        later = ranks.groups[0].barrier()
        future = later.get_future()
        ranks.groups[2].abort()
        errors = [groups.failure(work.wait) for work in (*works, later)]
        assert all(isinstance(error, zpccl.PCCLError) for error in errors), errors
        assert isinstance(errors[0], zpccl.PeerLost)
        assert all((tensor == 1).all() for tensor in tensors.values())
        with pytest.raises(RuntimeError):
            future.wait()
        assert all(work.is_completed() and not work.is_success() and work.exception() for work in works)
        for group in ranks.groups:
            assert isinstance(groups.failure(group.barrier), zpccl.PCCLError)
            assert isinstance(group.error, zpccl.PCCLError)


def test_an_output_that_cannot_be_written_fails_its_work() -> None:
    """L1: for any way to ask, and on this rank alone: the others have their outputs."""
    with groups.local_ranks(2) as ranks:
        outputs = [torch.zeros(3)[::2], torch.zeros(2)]
        works = ranks.all(lambda group, rank: group.allreduce([outputs[rank]]))
        outputs[0].resize_(3)
        assert works[1].wait() and works[1].is_success()
        assert isinstance(groups.failure(works[0].wait), zpccl.InternalError)
        assert works[0].is_completed() and not works[0].is_success()
        assert isinstance(works[0].exception(), zpccl.InternalError)
        with pytest.raises(RuntimeError, match="invalid for input of size 2"):
            works[0].get_future().wait()
        assert isinstance(groups.failure(ranks.groups[0].barrier), zpccl.InternalError)


def test_ranks_that_issue_different_collectives_are_told() -> None:
    with groups.local_ranks(2) as ranks:
        works = ranks.all(lambda group, rank: group.allreduce([torch.ones(3, dtype=(torch.int8, torch.int16)[rank])]))
        errors = ranks.all(lambda group, rank: groups.failure(works[rank].wait))
    assert {type(error) for error in errors} <= {zpccl.CollectiveMismatch, zpccl.PeerLost, zpccl.InvalidUsage}
    assert zpccl.CollectiveMismatch in {type(error) for error in errors}


def test_a_rank_that_does_not_come_in_time() -> None:
    """L1: `wait` ends at its timeout. This rank leaves, so that the others do not wait for it either."""
    with groups.local_ranks(3) as ranks:
        works = ranks.some([0, 1], lambda group, _: group.barrier())
        with pytest.raises(zpccl.OperationTimeout):
            works[0].wait(timedelta(milliseconds=50))
        errors = ranks.some([1, 2], lambda group, rank: groups.failure((works[1].wait, late(group))[rank - 1]))
        assert all(isinstance(error, zpccl.PCCLError) for error in errors)


def late(group: Any) -> Callable[[], Any]:
    return lambda: group.barrier().wait()


def test_a_rank_that_never_calls_fails_a_future() -> None:
    """L1: a future has no timeout of its own; the group's timeout ends it."""
    with groups.local_ranks(2, timedelta(seconds=1)) as ranks:
        done = threading.Event()
        future = ranks.groups[0].barrier().get_future()
        future.add_done_callback(lambda _: done.set())
        assert done.wait(60)
        with pytest.raises(RuntimeError):
            future.wait()


def test_a_group_may_wait_longer_than_a_master() -> None:
    """A master waits at most a day for a rank. Programs that want no timeout set a long one."""
    master = rendezvous._publish_master(dist.HashStore(), timedelta(days=300), is_default=False)
    master.interrupt()


def test_not_all_ranks_come() -> None:
    """L1: the present ranks get an error."""
    with pytest.raises(zpccl.OperationTimeout, match="not all of 2 ranks"):
        rendezvous.meet(dist.HashStore(), 0, 2, timedelta(milliseconds=200), is_default=False)


def test_a_store_that_ends_is_not_taken_for_a_rank_that_does_not_come() -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", stores[0].port, timeout=groups.TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(rendezvous.meet, client, 1, 2, groups.TIMEOUT, is_default=False)
        stores[0].wait(["here/1"], groups.TIMEOUT)
        stores.clear()
        assert type(meeting.exception(groups.TIMEOUT.total_seconds())) is zpccl.PeerLost


def test_the_same_ranks_meet_in_the_same_store_again() -> None:
    """After destroy_process_group and init_process_group in a job of torchrun. Messages work again too."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        for meeting in range(3):

            def meet_and_leave(rank: int, number: int = meeting) -> tuple[list[float], float]:
                group = process_group.ProcessGroup.of_all(store, rank, 2, timedelta(seconds=20))
                outputs, message = [torch.zeros(1), torch.zeros(1)], torch.full((1,), float(number * (1 - rank)))
                group.allgather([outputs], [torch.full((1,), 10.0 * number + rank)]).wait()
                (group.recv if rank else group.send)([message], 1 - rank, 0).wait()
                group.shutdown()
                return [float(output) for output in outputs], float(message)

            assert (
                groups.at_once(threads, meet_and_leave, range(2))
                == [([10.0 * meeting, 10.0 * meeting + 1], float(meeting))] * 2
            )


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_ranks_meet_at_any_loopback_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both versions of IP."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no address {host}")
    monkeypatch.setenv("MASTER_ADDR", host)
    store = dist.HashStore()

    def come_and_go(rank: int) -> None:
        rendezvous.meet(store, rank, 2, groups.TIMEOUT, is_default=True).leave(is_orderly=True)

    with ThreadPoolExecutor(2) as threads:
        groups.at_once(threads, come_and_go, range(2))


def test_others_get_the_name_of_a_host_that_knows_itself_by_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the /etc/hosts of Debian. The master then listens on all interfaces."""
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    monkeypatch.setattr(rendezvous, "source_towards", lambda _: "127.0.1.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert [rendezvous.own_host(dist.HashStore(), is_default=each) for each in (True, False)] == ["alpha", "alpha"]
    assert rendezvous.loopback_or_all("alpha") == ""


def test_without_a_launcher_the_host_of_the_store_is_that_of_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    store = dist.TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False)
    assert (
        rendezvous.own_host(dist.PrefixStore("inner", dist.PrefixStore("outer", store)), is_default=True) == "127.0.0.2"
    )


def test_a_rank_that_came_in_vain_is_forgotten() -> None:
    """The next one waits for it, and does not look for the earlier master."""
    store = dist.HashStore()
    for rank in range(2):
        with pytest.raises(zpccl.OperationTimeout, match="not all of 2 ranks"):
            rendezvous.meet(store, rank, 2, timedelta(milliseconds=100), is_default=False)


def test_a_rank_may_leave_as_soon_as_the_group_is_made() -> None:
    """The others may not have read the list of members by then."""
    for _ in range(20):
        with ThreadPoolExecutor(2) as threads:
            store = dist.HashStore()

            def come_and_go(rank: int, store: Any = store) -> tuple[int, ...]:
                found = rendezvous.meet(store, rank, 2, groups.TIMEOUT, is_default=False)
                found.leave(is_orderly=True)
                ranks: tuple[int, ...] = found.ranks
                return ranks

            one, other = threads.map(come_and_go, range(2))
        assert one == other and sorted(one) == [0, 1]


def test_a_silent_host_of_the_store_does_not_keep_a_rank_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: torch's store then does not end a wait at its timeout."""
    monkeypatch.setattr(limits, "TORCH_LEAVE_TIMEOUT_NS", limits.SECOND // 10)
    answer, master = threading.Event(), zpccl.MasterNode("127.0.0.1:0")
    store = SimpleNamespace(set=lambda *_: None, wait=lambda *_: answer.wait())
    communicator = SimpleNamespace(peer_ids=("a", "b"), close=lambda: None)
    members = rendezvous.Membership(0, 2, communicator, (0, 1), master, store, ("a", "b"))
    leaving = threading.Thread(target=members.leave, kwargs={"is_orderly": True}, daemon=True)
    leaving.start()
    leaving.join(groups.TIMEOUT.total_seconds())
    assert not leaving.is_alive()
    answer.set()


def test_a_rank_does_not_wait_for_a_lost_one_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: though it has issued no collective since, and has the master."""
    monkeypatch.setattr(limits, "TORCH_LEAVE_TIMEOUT_NS", int(groups.TIMEOUT.total_seconds()) * limits.SECOND)
    with groups.local_ranks(3) as ranks:
        lost, one = ranks.groups[1].communicator, ranks.groups[0]
        lost.close()  # Without a word to the others.
        until(lambda: one.communicator.world_size == 2, "the loss is known")
        before = time.monotonic()
        ranks.some([0, 2], lambda group, _: group.shutdown())
        assert time.monotonic() - before < groups.TIMEOUT.total_seconds() / 2


def test_a_master_with_other_members_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: in any order in which they are admitted."""
    with local_run(1) as run, ThreadPoolExecutor(3) as threads:
        monkeypatch.setenv("ZPCCL_MASTER", run.master.address)
        store = dist.HashStore()
        meeting = [
            threads.submit(rendezvous.meet, store, rank, 2, groups.TIMEOUT, is_default=True) for rank in range(2)
        ]
        while not all(future.done() for future in meeting):
            run.comms[0].update_topology()
        errors = [future.exception() for future in meeting]
        assert all(isinstance(error, zpccl.InvalidUsage) and "peer0" in str(error) for error in errors), errors


def test_members_that_admit_nobody_do_not_delay_the_meeting_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: the members of another job train on, and never ask for newcomers."""
    monkeypatch.setattr(limits, "TORCH_MASTER_TIMEOUT_NS", 1)
    with local_run(1) as run:
        monkeypatch.setenv("ZPCCL_MASTER", run.master.address)
        store, timeout = dist.HashStore(), timedelta(seconds=1)
        meeting = [run.start(rendezvous.meet, store, rank, 2, timeout, is_default=True) for rank in range(2)]
        for future in meeting:
            error = future.exception(groups.TIMEOUT.total_seconds())
            assert isinstance(error, zpccl.OperationTimeout) and "master of its own" in str(error), error


def test_a_rank_that_arrives_and_does_not_join_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master is of this job alone: it would be wrong to advise another one."""
    monkeypatch.setattr(limits, "TORCH_MASTER_TIMEOUT_NS", limits.SECOND // 10)
    monkeypatch.setattr(limits, "TORCH_JOIN_INTERVAL_NS", 2 * limits.SECOND)  # Time runs out between two looks.
    store = dist.HashStore()
    store.set("here/1", "")
    with pytest.raises(zpccl.OperationTimeout, match="only 1 of 2 ranks have joined"):
        rendezvous.meet(store, 0, 2, timedelta(seconds=1), is_default=True)


@contextlib.contextmanager
def interrupted_soon() -> Iterator[None]:
    """Code that a signal handler ends with an exception."""
    with pytest.raises(TimeoutError, match="the job ends"), raising(TimeoutError("the job ends")):
        yield


def test_a_signal_handler_that_raises_is_not_taken_for_the_end_of_the_time() -> None:
    """L1: in a message that waits for the other rank. Futures raise TimeoutError too."""
    with interrupted_soon():
        pairs.Message().wait(20)
    assert pairs.Message().wait(0.01)[0] is False


def test_an_interrupted_collective_ends_the_group() -> None:
    """L1: no other rank waits for the call that this one has given up."""
    with groups.local_ranks(2) as ranks:
        group, other = ranks.groups
        work = group.allreduce([torch.ones(1)])
        with interrupted_soon():
            work.wait()
        assert isinstance(groups.failure(lambda: other.allreduce([torch.ones(1)]).wait()), zpccl.PeerLost)
        assert isinstance(groups.failure(group.barrier), zpccl.InvalidUsage)


def test_nothing_is_received_after_an_interruption() -> None:
    """S4: the other rank comes for the first time after that."""
    with groups.local_ranks(2) as ranks:
        group, other = ranks.groups
        tensor = torch.zeros(1)
        work = group.recv([tensor], 1, 0)
        with interrupted_soon():
            work.wait()
        assert isinstance(groups.failure(lambda: other.send([torch.ones(1)], 0, 0).wait()), zpccl.PCCLError)
        assert tensor.item() == 0


def test_an_interruption_between_the_calls_of_a_collective_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: otherwise the rest of it on other ranks meets the next calls of this one, which may look the same."""
    with groups.local_ranks(2) as ranks:
        group, other = ranks.groups
        issue = configurations.Configuration.issue

        def issue_and_end(self: Any, *arguments: Any) -> None:
            issue(self, *arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(configurations.Configuration, "issue", issue_and_end)
            group.allreduce_coalesced([torch.ones(4), torch.ones(8)])
        assert isinstance(groups.failure(lambda: group.allreduce([torch.ones(8)])), zpccl.InvalidUsage)
        tensors = [torch.ones(4), torch.ones(8)]
        assert isinstance(groups.failure(lambda: other.allreduce_coalesced(tensors).wait()), zpccl.PeerLost)


def test_a_handler_leaves_while_a_collective_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: as programs do at SIGTERM. Meanwhile the peer's thread ends the calls in flight."""
    with groups.local_ranks(2) as ranks:
        group = ranks.groups[0]
        work = group.allreduce([torch.ones(1)])
        next_tag = tags.Tags.next

        def next_tag_and_signal(self: Any, signature: Any) -> Any:
            tag = next_tag(self, signature)
            signal.raise_signal(signal.SIGUSR1)
            return tag

        monkeypatch.setattr(tags.Tags, "next", next_tag_and_signal)
        with handling(signal.SIGUSR1, lambda *_: group.shutdown()):
            assert isinstance(groups.failure(lambda: group.allreduce([torch.ones(2)])), zpccl.InvalidUsage)
        assert isinstance(groups.failure(work.wait), zpccl.PCCLError)


def test_a_store_that_hangs_keeps_no_rank_that_came_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: its host does not respond, and torch waits for the answer without end."""
    answers = threading.Event()

    class Hangs(dist.PrefixStore):  # type: ignore[misc, name-defined]
        def delete_key(self, key: str) -> bool:
            return answers.wait(20)

    monkeypatch.setattr(rendezvous.limits, "TORCH_LEAVE_TIMEOUT_NS", 10**8)
    began = time.monotonic()
    with pytest.raises(zpccl.OperationTimeout, match="not all of 2 ranks"):
        rendezvous.meet(Hangs("x", dist.HashStore()), 1, 2, timedelta(milliseconds=100), is_default=False)
    assert time.monotonic() - began < 10
    answers.set()
