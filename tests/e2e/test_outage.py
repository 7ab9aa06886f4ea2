"""L3: the master is away for a while, and calls have timeouts: they end in time, and the members stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.local import Run, local_run

pytestmark = pytest.mark.e2e


def come_back(run: Run) -> None:
    """Starts another master at the same address."""
    run.master = zpccl.MasterNode(run.master.address, recovery_grace=0.05)
    run.master.run()


def summed(comm: zpccl.Communicator, timeout: float | None = None) -> float:
    array = np.full(1000, 2, np.float32)
    try:
        comm.all_reduce(array, array, timeout=timeout)
    except zpccl.OperationTimeout:
        assert np.array_equal(array, np.full(1000, 2, np.float32))
        raise
    return float(array[0])


def use_up_plans(run: Run) -> None:
    """Makes the calls that are planned ahead, which succeed without a master. Afterwards no plan is left."""
    while not any(run.errors(interrupted)):
        pass


def interrupted(comm: zpccl.Communicator) -> Any:
    return summed(comm, timeout=0.2)


@pytest.mark.parametrize("times", [1, 3])
def test_timeouts_while_the_master_is_away(times: int) -> None:
    """Calls with the same tag end again and again, before the master has heard of the first one."""
    with local_run(3) as run:
        assert run.all(summed) == [6.0] * 3
        run.master.interrupt()
        use_up_plans(run)
        for _ in range(times):
            errors = run.errors(interrupted)
            assert [type(error) for error in errors] == [zpccl.OperationTimeout] * 3
        come_back(run)
        assert run.all(summed) == [6.0] * 3
        assert [comm.world_size for comm in run.comms] == [3] * 3


def test_one_gives_up_and_the_others_wait() -> None:
    """The first peer makes its call again, and that one joins the call in which the others wait."""
    with local_run(3) as run:
        run.master.interrupt()
        others = [run.start(summed, comm) for comm in run.comms[1:]]
        (error,) = [run.start(interrupted, run.comms[0]).exception()]
        assert isinstance(error, zpccl.OperationTimeout)
        come_back(run)
        assert summed(run.comms[0]) == 6.0
        assert [other.result() for other in others] == [6.0] * 2


def test_another_call_after_the_timeout() -> None:
    """The other call may not run beside the first: the peer holds it back until the first one is settled."""
    with local_run(3) as run:
        run.master.interrupt()
        assert {type(error) for error in run.errors(interrupted)} == {zpccl.OperationTimeout}
        updates = [run.start(comm.update_topology) for comm in run.comms]
        come_back(run)
        for update in updates:
            update.result()
        assert run.all(summed) == [6.0] * 3
