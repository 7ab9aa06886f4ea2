"""zpccl under torchft's Manager, and with torchft's own checks of process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from e2e.harness import HANG_SECONDS

import zpccl

torch = pytest.importorskip("torch")
torchft = pytest.importorskip("torchft")
pytest.importorskip("torchft.coordination")
groups = pytest.importorskip("pytorch.groups", exc_type=ImportError)
zpccl_torch = pytest.importorskip("zpccl.torch", exc_type=ImportError)

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

PATIENCE = timedelta(seconds=HANG_SECONDS)
SIZE = 3


@pytest.fixture(scope="module")
def store() -> Any:
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Ranks:
    """Groups of torchft in threads, configured by addresses of a store, as its Manager does."""

    def __init__(self, store: Any) -> None:
        self._address = f"127.0.0.1:{store.port}"
        self._threads = ThreadPoolExecutor(SIZE)
        self.groups = [zpccl_torch.TorchftProcessGroup(timeout=PATIENCE) for _ in range(SIZE)]

    def each(self, who: list[int], function: Callable[[Any, int], Any]) -> list[Any]:
        found: list[Any] = groups.at_once(self._threads, lambda i: function(self.groups[i], i), who)
        return found

    def configure(self, who: list[int], prefix: str) -> None:
        self.each(who, lambda group, i: group.configure(f"{self._address}/{prefix}", str(i), who.index(i), len(who)))

    def close(self) -> None:
        self.each(list(range(SIZE)), lambda group, _: group.shutdown())
        self._threads.shutdown()


@pytest.fixture
def ranks(store: Any) -> Iterator[Ranks]:
    made = Ranks(store)
    yield made
    made.close()


def test_the_checks_of_torchft(ranks: Ranks) -> None:
    """The checks that torchft makes of its own groups, for all collectives."""
    checks = pytest.importorskip("torchft.process_group_test")
    assert ranks.groups[0].getBackendName() == "torchft-zpccl"
    ranks.configure([0, 1, 2], "checks")
    for name, check in checks._COLLECTIVE_TO_FUNC.items():

        def run(group: Any, i: int, check: Any = check) -> None:
            check(group, i, torch.tensor([i + 1]))

        ranks.each([0, 1, 2], run)
        assert all(group.errored() is None for group in ranks.groups), name
    ranks.configure([0], "alone")
    checks._test_pg(ranks.groups[0])


def test_a_lost_rank_and_the_next_quorum(ranks: Ranks) -> None:
    """S2, L1: a failure shows in `errored`. The remaining and new ranks work after the next configuration."""
    ranks.configure([0, 1, 2], "first")
    ranks.groups[2].abort()
    tensors = [torch.ones(3), torch.ones(3)]

    def reduce(group: Any, i: int) -> Any:
        return groups.failure(lambda: group.allreduce([tensors[i]], torch.distributed.ReduceOp.SUM).wait())

    errors = ranks.each([0, 1], reduce)
    assert all(isinstance(error, zpccl.PCCLError) for error in errors)
    assert all(ranks.groups[i].errored() is not None for i in (0, 1)) and ranks.groups[2].errored() is None
    assert all((tensor == 1).all() for tensor in tensors)
    ranks.configure([1, 0], "second")
    assert ranks.each([0, 1], reduce) == [None, None]
    assert all((tensor == 2).all() for tensor in tensors)
    assert all(ranks.groups[i].errored() is None and ranks.groups[i].size() == 2 for i in (0, 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # These come from torchft, and each would end a step.
def test_under_the_manager() -> None:
    """S2: a replica is lost in a step; the others discard that step together, and go on without it."""
    lighthouse = torchft.coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=int(HANG_SECONDS * 1000), heartbeat_timeout_ms=5000
    )
    all_are_known = threading.Barrier(SIZE, timeout=HANG_SECONDS)
    discarded: list[int] = []

    def replica(number: int) -> list[tuple[int, float]]:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        weights = {"steps": 0}
        group = zpccl_torch.TorchftProcessGroup(timeout=PATIENCE)
        manager = torchft.Manager(
            pg=group,
            load_state_dict=weights.update,
            state_dict=lambda: dict(weights),
            min_replica_size=2,
            replica_id=f"replica{number}",
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse.address(),
            timeout=PATIENCE,
        )
        done: list[tuple[int, float]] = []
        all_are_known.wait()  # Known to the lighthouse, which waits for all that it knows.
        while weights["steps"] < 6:
            manager.start_quorum()
            if number == 2 and weights["steps"] == 3:
                manager.wait_quorum()
                group.abort()
                break
            gradient = torch.full((4,), float(number))
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights["steps"] += 1
                done.append((manager.num_participants(), float(gradient[0])))
            else:
                assert gradient[0] == number, manager.errored()
                discarded.append(number)
        manager.shutdown(wait=False)
        return done

    try:
        with ThreadPoolExecutor(SIZE) as threads:
            futures = [threads.submit(replica, number) for number in range(SIZE)]
            one, other, lost = (future.result(2 * HANG_SECONDS) for future in futures)
    finally:
        lighthouse.shutdown()
    assert one == other and len(one) == 6
    assert lost == one[:3] and one[3:] == [(2, 0.5)] * 3 and sorted(discarded) == [0, 1]
