"""The counters of a master."""

from __future__ import annotations

from collections import Counter

import pytest

from zpccl.protocol.counts import AbortReason, LossReason

from .harness import MasterBench, bench_of, entry, offer, pid, spec
from .takeover import TakeOver


@pytest.fixture
def bench() -> MasterBench:
    return bench_of("abc")


def start(bench: MasterBench) -> None:
    for number, name in enumerate("abc"):
        bench.begin(name, number, spec())
    assert len(bench.machine.operations.running) == 1


def test_a_commit(bench: MasterBench) -> None:
    start(bench)
    for number, name in enumerate("abc"):
        bench.finish(name, number)
        bench.finish(name, number)  # The repeated report counts once.
    counts = bench.machine.counts
    assert (counts.plans, counts.commits, counts.aborts) == (1, 1, Counter())


@pytest.mark.parametrize("reason", list(AbortReason))
def test_aborts_by_reason(bench: MasterBench, reason: AbortReason) -> None:
    start(bench)
    if reason is AbortReason.FAILED:
        bench.finish("b", 1, ok=False, fault=pid("c"), reason="reset by peer")
    elif reason is AbortReason.PEER_LOST:
        bench.lose("c")
        bench.finish("a", 0, ok=False, fault=pid("c"), reason="reset by peer")
    elif reason is AbortReason.WITHDRAWN:
        bench.withdraw("a", 0)
    else:
        for number, name in enumerate("abc"):
            bench.finish(name, number, digest=number)
    counts = bench.machine.counts
    assert (counts.plans, counts.commits, counts.aborts) == (1, 0, Counter([reason]))


def test_losses_by_reason(bench: MasterBench) -> None:
    bench.leave("a")
    assert bench.machine.counts.losses == Counter([LossReason.LEFT])
    bench.disconnect("b")
    assert bench.machine.counts.losses == Counter([LossReason.LEFT]), "it may come back"
    bench.tick_at_deadline()
    assert bench.machine.counts.losses == Counter([LossReason.LEFT, LossReason.DISCONNECTED])


def test_a_joiner_without_links_is_kicked(bench: MasterBench) -> None:
    bench.register("d")
    bench.tick_at_deadline()
    assert bench.machine.counts.losses == Counter([LossReason.KICKED])


@pytest.mark.parametrize("is_committed", [True, False])
def test_syncs(bench: MasterBench, is_committed: bool) -> None:
    for number, name in enumerate("abc"):
        bench.say(name, offer(number, 1 if name == "a" else 0, entry("w", name)))
    counts = bench.machine.counts
    assert (counts.syncs_committed, counts.syncs_aborted) == (0, 0)
    bench.fetched("b", 1)
    bench.fetched("c", 2, ok=is_committed)
    assert (counts.syncs_committed, counts.syncs_aborted) == (is_committed, not is_committed)


def test_a_takeover_and_members_that_do_not_come() -> None:
    bench = TakeOver()
    bench.report("a")
    bench.tick_at_deadline()
    assert bench.machine.counts.takeovers == 1
    bench.tick_at_deadline()
    assert bench.names() == "a" and bench.machine.counts.losses == Counter([LossReason.ABSENT])
