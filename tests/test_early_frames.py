"""L2, bounded memory: frames of attempts that were planned ahead, and that their receiver never begins."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from e2e.harness import loop_of, until
from e2e.local import Run, finish, local_run

import zpccl

pytestmark = pytest.mark.e2e


def plan_ahead(run: Run, tensor: Any, tags: int) -> None:
    """Calls all tags until each has a plan ahead at all peers."""
    while not all(len(loop_of(comm)._machine._ahead) >= tags for comm in run.comms):
        for handles in run.all(lambda comm: begin(comm, tensor, range(tags))):
            assert all(handle.wait()[0] for handle in handles)
        until(lambda: not any(loop_of(comm)._machine.calls for comm in run.comms))


def begin(comm: zpccl.Communicator, tensor: Any, tags: range) -> list[zpccl.AsyncReduceHandle]:
    return [comm.all_reduce_async(tensor, np.empty_like(tensor), tag=tag) for tag in tags]


@pytest.mark.parametrize(
    ("count", "tags", "at_once"), [(1 << 16, 700, 175), (5 << 19, 20, 1)], ids=["small tensors", "large tensors"]
)
def test_calls_that_were_given_up_do_not_block_a_link(count: int, tags: int, at_once: int) -> None:
    """One peer gives up calls that it has started ahead. The other makes none of them, but calls another tag.

    The frames of all these calls are more than the receiver keeps of early ones.
    """
    tensor = np.ones(count, np.float32)
    with local_run(2) as run:
        plan_ahead(run, tensor, tags)
        for first in range(0, tags, at_once):
            handles = begin(run.comms[0], tensor, range(first, first + at_once))
            for handle in handles:
                with contextlib.suppress(zpccl.OperationTimeout):
                    handle.wait(timeout=0.3 if handle is handles[0] else 0)
        small = np.ones(1 << 16, np.float32)
        assert all((result == 2).all() for result in run.all(lambda comm: comm.all_reduce(small, tag=10_000)))


def test_another_order_of_calls_does_not_block_a_link() -> None:
    """One peer first makes a call that the others make last, and gets the frames of all the others' calls before it.

    The sums of narrow integers are four times as large as the integers while they travel around the ring.
    """
    narrow, small = np.ones(1 << 18, np.int8), np.ones(1 << 16, np.float32)

    def begin_all(comm: zpccl.Communicator) -> list[zpccl.AsyncReduceHandle]:
        return [comm.reduce_scatter_async(narrow, op=zpccl.ReduceOp.AVG, tag=tag) for tag in range(300)]

    with local_run(3) as run:
        first, second, other = run.comms
        while not all(len(loop_of(comm)._machine._ahead) == 300 for comm in run.comms):
            for handles in run.all(begin_all):
                assert all(handle.wait()[0] for handle in handles)
            until(lambda: not any(loop_of(comm)._machine.calls for comm in run.comms))
        begun = [begin_all(first), begin_all(second)]
        last = [run.start(comm.all_reduce, small, tag=10_000) for comm in (first, second)]
        until(lambda: all(len(loop_of(comm)._machine.calls) == 301 for comm in (first, second)))
        assert (other.all_reduce(small, tag=10_000) == 3).all()
        assert all((finish(result) == 3).all() for result in last)
        begun.append(begin_all(other))
        assert all(handle.wait()[0] for handles in begun for handle in handles)
