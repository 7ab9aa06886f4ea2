"""Process groups that get other ranks, again and again, as torch 2.14 does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.harness import HANG_SECONDS

import zpccl

torch = pytest.importorskip("torch")
dist = torch.distributed
groups = pytest.importorskip("pytorch.groups", exc_type=ImportError)
process_group = pytest.importorskip("zpccl.torch.process_group", exc_type=ImportError)
programs = pytest.importorskip("pytorch.programs")

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

PATIENCE = timedelta(seconds=HANG_SECONDS)


class Groups:
    """Process groups in threads of one process, made without ranks."""

    def __init__(self, count_of: int) -> None:
        self.all = [process_group.ProcessGroup(0, 1, PATIENCE, None) for _ in range(count_of)]
        self.handles = [group.get_reconfigure_handle() for group in self.all]
        self._threads = ThreadPoolExecutor(count_of)
        self._numbers = count(1 << 62)

    def each(self, who: list[int], function: Callable[[Any], Any]) -> list[Any]:
        found: list[Any] = groups.at_once(self._threads, lambda i: function(self.all[i]), who)
        return found

    def configure(self, who: list[int], handles: Any = None, timeout: timedelta | None = None) -> list[Any]:
        """Makes these groups the ranks of one configuration. Returns their errors.

        Args:
            who: the groups.
            handles: handles of the ranks; by default those of the groups, in their order.
            timeout: timeout of the meeting.
        """
        handles = handles or [self.handles[i] for i in who]
        options = SimpleNamespace(uuid=next(self._numbers), handles=handles, timeout=timeout, hints={})
        return self.each(who, lambda group: groups.failure(lambda: group.reconfigure(options).wait()))

    def sums(self, who: list[int]) -> list[float]:
        """The result of each in an all-reduce of its 2 ** rank, which shows which ranks took part."""

        def reduce(group: Any) -> float:
            tensor = torch.tensor([2.0 ** group.rank()])
            group.allreduce([tensor]).wait()
            return float(tensor)

        return self.each(who, reduce)

    def close(self) -> None:
        self.each(list(range(len(self.all))), lambda group: group.shutdown())
        self._threads.shutdown()


@pytest.fixture
def four() -> Iterator[Groups]:
    made = Groups(4)
    yield made
    made.close()


def test_ranks_come_and_go(four: Groups) -> None:
    """Ranks are those of the list. All collectives are among them, and so are messages of two ranks."""
    assert all(group.supports_reconfigure for group in four.all)
    for who in ([0, 1], [2, 1, 0], [3], [3, 0, 1, 2]):
        assert four.configure(who) == [None] * len(who)
        assert [(four.all[i].rank(), four.all[i].size()) for i in who] == [(i, len(who)) for i in range(len(who))]
        assert four.sums(who) == [2.0 ** len(who) - 1] * len(who)
        if len(who) > 1:
            four.each(who[:2], exchange)


def exchange(group: Any) -> None:
    """Ranks 0 and 1 send each other a message."""
    tensor = torch.zeros(3)
    sent = group.send([torch.full((3,), float(group.rank()))], 1 - group.rank(), 0)
    assert group.recv([tensor], 1 - group.rank(), 0).wait() and sent.wait()
    assert tensor.tolist() == [1.0 - group.rank()] * 3


def test_a_set_of_handles_gives_all_the_same_order(four: Groups) -> None:
    four.configure([0, 1, 2], set(four.handles[:3]))
    assert sorted(four.all[i].rank() for i in range(3)) == [0, 1, 2]
    assert four.sums([0, 1, 2]) == [7.0] * 3


@pytest.mark.parametrize("size", [1, 2])
def test_without_ranks_nothing_is_issued(size: int) -> None:
    group = process_group.ProcessGroup(0, size, PATIENCE, None)
    for call in (lambda: group.allreduce([torch.ones(1)]), group.barrier, lambda: group.send([torch.ones(1)], 1, 0)):
        with pytest.raises((zpccl.InvalidUsage, zpccl.InvalidArgument)):
            call()
    group.shutdown()
    assert not group.supports_reconfigure


def test_a_lost_rank_and_a_new_one(four: Groups) -> None:
    """S2, L1: calls in flight fail, with their inputs as before, and they stay failed while the next ranks work."""
    four.configure([0, 1, 2])
    tensors = [torch.ones(5), torch.ones(5)]
    works = [four.all[i].allreduce([tensors[i]]) for i in (0, 1)]
    four.all[2].abort()
    errors = [groups.failure(work.wait) for work in works]
    assert isinstance(errors[0], zpccl.PeerLost) and isinstance(errors[1], zpccl.PCCLError)
    assert all((tensor == 1).all() for tensor in tensors)
    assert four.all[0].get_error() == torch._C._distributed_c10d.ErrorType.REMOTE_ERROR
    four.configure([1, 0, 3])
    assert four.sums([0, 1, 3]) == [7.0] * 3
    assert four.all[0].get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    assert [type(groups.failure(work.wait)) for work in works] == [type(error) for error in errors]
    assert all(four.all[i].error is None for i in (0, 1, 3))
    assert four.sums([0, 1, 3]) == [7.0] * 3


def test_what_is_in_flight_when_the_ranks_change_fails(four: Groups) -> None:
    four.configure([0, 1])
    tensor = torch.ones(5)
    work = four.all[0].allreduce([tensor])
    four.configure([0, 1, 2])
    with pytest.raises(zpccl.PCCLError):
        work.wait()
    assert (tensor == 1).all() and four.sums([0, 1, 2]) == [7.0] * 3


def test_a_rank_that_does_not_come(four: Groups) -> None:
    """L1: the others get an error in time, whether its process lives or not, and try again without it."""
    gone = process_group.ProcessGroup(0, 1, PATIENCE, None)
    handle = gone.get_reconfigure_handle()
    gone.shutdown()
    del gone
    for missing in (four.handles[3], handle):
        for handles in ([four.handles[0], four.handles[1], missing], [missing, four.handles[0], four.handles[1]]):
            errors = four.configure([0, 1], handles, timedelta(seconds=1))
            assert [type(error) for error in errors] == [zpccl.OperationTimeout] * 2
    four.configure([0, 1])
    assert four.sums([0, 1]) == [3.0] * 2


def test_wrong_handles(four: Groups) -> None:
    own, group = four.handles[0], four.all[0]

    def reconfigure(*handles: str, number: int = 1) -> Any:
        return group.reconfigure(SimpleNamespace(uuid=number, handles=list(handles), timeout=None, hints={}))

    with pytest.raises(zpccl.InvalidArgument, match="include"):
        reconfigure(four.handles[1])
    with pytest.raises(zpccl.InvalidArgument, match="different"):
        reconfigure(own, own)
    for wrong in ("", "gloo:0", "127.0.0.1:1"):
        with pytest.raises(zpccl.InvalidArgument, match="handle"):
            reconfigure(wrong, own)
    reconfigure(own, number=7)
    with pytest.raises(zpccl.InvalidUsage, match="already used"):
        reconfigure(own, number=7)


def test_a_group_of_a_launcher_has_its_ranks() -> None:
    with groups.local_ranks(1) as ranks:
        assert not ranks.groups[0].supports_reconfigure
        with pytest.raises(zpccl.InvalidUsage, match="enable_reconfigure"):
            ranks.groups[0].get_reconfigure_handle()


# Each line of input has a number and the handles of all ranks that take part. They then sum until a sum fails.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import zpccl

dist.init_process_group("zpccl", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
print(dist._get_reconfigure_handle(), flush=True)
for line in sys.stdin:
    number, *handles = line.split()
    dist._reconfigure(uuid=int(number), handles=handles).wait()
    tensor = torch.ones(1000)
    try:
        while True:
            dist.all_reduce(tensor)
            assert (tensor == dist.get_world_size()).all()
            print("sum", dist.get_rank(), dist.get_world_size(), flush=True)
            tensor.fill_(1)
            if not sys.stdin.readline().strip():
                break
    except zpccl.PCCLError as error:
        assert (tensor == 1).all()
        print("lost", type(error).__name__, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has no reconfigure before 2.14")
def test_processes_by_torch_itself() -> None:
    """L1, S2: with torch's own functions, without an import of zpccl.torch. One process is killed, another comes."""
    with programs.Processes(PROGRAM, 4) as run:
        handles = [run.line(rank) for rank in range(4)]

        def configure(number: int, who: list[int]) -> None:
            for rank in who:
                run.tell(rank, " ".join([str(number), *(handles[each] for each in who)]))
            assert [run.line(rank) for rank in who] == [f"sum {i} {len(who)}" for i in range(len(who))]

        configure(1, [0, 1, 2])
        for rank in (1, 2):
            run.tell(rank, "again")
        run.ranks[0].kill()
        assert [run.line(rank).split()[0] for rank in (1, 2)] == ["lost"] * 2
        configure(2, [2, 1, 3])
        for rank in (1, 2, 3):
            run.tell(rank)
            run.ranks[rank].stdin.close()
            run.ranks[rank].stdin = None
            run.end(rank)


# Rank 2 is killed; the others shrink the group.
SHRINKING = """
import sys
import torch
import torch.distributed as dist
import zpccl

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()

def check():
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.full((5,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and (tensor == sum(range(size))).all()
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part.tolist() for part in parts] == [[i, i] for i in range(size)]
    output = torch.zeros(1)
    dist.reduce_scatter_single(output, torch.arange(float(size)))
    assert output.item() == rank * size
    dist.all_to_all_single(output := torch.zeros(size), torch.arange(float(size)))
    assert (output == rank).all()
    sent = dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % size)
    received = dist.P2POp(dist.irecv, three := torch.zeros(3), (rank - 1) % size)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    assert three.sum() == 3
    dist.broadcast_object_list(found := [rank])
    assert found == [0]
    dist.barrier()
    print("checked", size, flush=True)

check()
sys.stdin.readline()
tensor = torch.ones(5)
try:
    dist.all_reduce(tensor)
    print("not lost", flush=True)
except zpccl.PCCLError as error:
    print(type(error).__name__, tensor.sum().item(), flush=True)
dist.shrink_group([2])
check()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch takes no backends in Python before 2.14")
@pytest.mark.parametrize("backend", ["zpccl", "cpu:zpccl,meta:gloo"])
def test_shrinking(backend: str) -> None:
    """L1, S2: as the only backend, and as the backend of one of two devices, where errors have their own type too."""
    with programs.Processes(SHRINKING, 3, backend) as run:
        assert [run.line(rank) for rank in range(3)] == ["checked 3"] * 3
        run.ranks[2].kill()
        for rank in (0, 1):
            run.tell(rank)
        assert [run.line(rank) for rank in (0, 1)] == ["PeerLost 5.0"] * 2
        assert [run.line(rank) for rank in (0, 1)] == ["checked 2"] * 2
        for rank in (0, 1):
            run.end(rank)


def test_a_group_that_cannot_be_shrunk_says_so() -> None:
    """torch asks before it calls `shrink`, and then names what is missing."""
    with groups.local_ranks(3) as ranks:
        if not ranks.groups[0].supports_shrinking:
            pytest.skip("torch takes no backends in Python before 2.14")
        for backend in ranks.some([0, 1], lambda group, _: group.shrink([2])):
            assert backend.group.getSize() == 2
            backend.group.abort()
