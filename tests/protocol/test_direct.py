"""Plans of direct exchanges: when the master makes them, and what it learns from links that fail in them."""

from __future__ import annotations

from typing import Any

import pytest

from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol.effects import Send, StartReduce
from zpccl.protocol.messages import Linked, Plan, Reducing, Refusal, Refused, Report
from zpccl.protocol.rings import plan_edges
from zpccl.types import Algorithm, DataType, ReduceOp

from .harness import FIRST_ATTEMPT, MasterBench, PeerBench, bench_of, pid, pids, reducing, running_attempt, spec
from .takeover import TakeOver

NAMES = "abcd"


MEDIUM = 2**18
"""Number of elements: 1 MiB, too much for one hop."""
LARGE = 2**28
"""Number of elements: 1 GiB."""


def planned(
    bench: MasterBench, call_id: int = 1, algorithm: Algorithm = Algorithm.AUTO, count: int = MEDIUM, **changes: int
) -> Algorithm:
    """All vote: the algorithm of the plan."""
    bench.begin(bench.names(), call_id, spec(algorithm=algorithm, count=count, **changes))
    return Algorithm(list(bench.plans.values())[-1].algorithm)


def last_attempt(bench: MasterBench) -> int:
    return int(list(bench.plans)[-1])


def finish(bench: MasterBench, call_id: int, duration_us: int = 0) -> None:
    bench.finish(bench.names(), call_id, last_attempt(bench), duration_us=duration_us)


def fail(bench: MasterBench, call_id: int, one: str, fault: str | None, after_ns: int = limits.PATH_TIMEOUT_NS) -> None:
    bench.tick(after_ns)
    attempt_id = last_attempt(bench)
    bench.finish(one, call_id, attempt_id, ok=False, digest=0, fault=None if fault is None else pid(fault))


@pytest.mark.parametrize("names", ["ab", NAMES])
def test_small_tensors_take_one_hop_where_links_allow(names: str) -> None:
    assert planned(bench_of(names), count=8) is Algorithm.ONE_SHOT
    assert planned(bench_of(names), algorithm=Algorithm.RING, count=8) is Algorithm.RING
    bench = bench_of(names)
    bench.say("a", Linked(pids(names[2:])))
    bench.say(names[1], Linked(pids(names[2:])))
    if len(names) > 2:
        assert planned(bench, count=8) is Algorithm.TREES


def test_those_that_are_not_small_are_exchanged_directly() -> None:
    assert planned(bench_of(NAMES)) is Algorithm.DIRECT


def test_two_peers_use_a_ring_unless_told_otherwise() -> None:
    assert planned(bench_of("ab")) is Algorithm.RING
    assert planned(bench_of("ab"), algorithm=Algorithm.DIRECT) is Algorithm.DIRECT


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT])
@pytest.mark.parametrize("count", [8, 2**32])
def test_one_can_be_forced(algorithm: Algorithm, count: int) -> None:
    assert planned(bench_of(NAMES), algorithm=algorithm, count=count) is algorithm


NARROW = DataType.INT32, ReduceOp.AVG


@pytest.mark.parametrize("datatype, op", [NARROW, (DataType.INT64, ReduceOp.AVG), (DataType.INT32, ReduceOp.SUM)])
def test_means_of_narrow_integers_are_exchanged_directly_where_links_allow(datatype: DataType, op: ReduceOp) -> None:
    """Around a ring their sums travel in a wider type. If a link is missing, some peers still reach all others."""
    is_narrow = (datatype, op) == NARROW
    tensor: dict[str, Any] = {"count": 2**32, "datatype": datatype, "op": op}
    bench = bench_of(NAMES)
    assert planned(bench, 1, **tensor) is Algorithm.DIRECT
    finish(bench, 1, duration_us=1_000_000_000)
    bench.tick(limits.ROUTE_KEPT_NS)
    assert planned(bench, 2, **tensor) is (Algorithm.DIRECT if is_narrow else Algorithm.RING)
    assert planned(bench_of(NAMES), algorithm=Algorithm.RING, **tensor) is Algorithm.RING
    assert planned(bench_of("ab"), **tensor) is Algorithm.RING
    bench = bench_of(NAMES)
    bench.say("a", Linked(pids("bd")))
    assert planned(bench, **tensor) is (Algorithm.TREES if is_narrow else Algorithm.RING)


def test_means_of_integers_teach_nothing() -> None:
    """They may send more than the tensor."""
    bench = bench_of(NAMES)
    assert planned(bench, 1, Algorithm.RING, count=LARGE, datatype=DataType.UINT8, op=ReduceOp.AVG) is Algorithm.RING
    finish(bench, 1, duration_us=1_000_000_000)
    assert bench.machine.collectives.planner.speeds == {}


@pytest.mark.parametrize("algorithm", [Algorithm.AUTO, Algorithm.DIRECT])
@pytest.mark.parametrize("liar", ["a", "c"])
@pytest.mark.parametrize(("count", "instead"), [(MEDIUM, Algorithm.TREES), (LARGE, Algorithm.RING)])
def test_plans_do_without_a_missing_link(algorithm: Algorithm, liar: str, count: int, instead: Algorithm) -> None:
    """L2: either a or c may report that their link is down. If hops cost most, the plan has stars around the peers that
    reach all; otherwise it has the ring in order of admission.
    """
    bench = bench_of(NAMES)
    bench.say(liar, Linked(pids(name for name in NAMES if name not in "ac")))
    assert planned(bench, algorithm=algorithm, count=count) is instead
    how = list(bench.plans.values())[-1]
    assert {pid("a"), pid("c")} not in [set(edge) for edge in plan_edges(how)]


@pytest.mark.parametrize("algorithm", [Algorithm.AUTO, Algorithm.DIRECT])
def test_a_link_that_failed_is_not_used_for_a_while(algorithm: Algorithm) -> None:
    """L2: a peer may blame any link of an exchange, not only the links of a ring in that order."""
    bench = bench_of(NAMES)
    assert planned(bench, 1, algorithm) is Algorithm.DIRECT
    fail(bench, 1, "a", "c")
    assert planned(bench, 2, algorithm) is Algorithm.TREES
    assert {pid("a"), pid("c")} not in [set(edge) for edge in plan_edges(list(bench.plans.values())[-1])]
    finish(bench, 2)
    bench.tick(limits.LINK_SUSPECT_NS)
    assert planned(bench, 3, algorithm) is Algorithm.DIRECT


def test_stalls_without_a_culprit_make_rings() -> None:
    bench = bench_of(NAMES)
    for call_id in range(1, limits.LINK_DOUBTS_MAX + 1):
        assert planned(bench, call_id) is Algorithm.DIRECT
        fail(bench, call_id, "a", None, limits.STALL_TIMEOUT_NS)
    assert planned(bench, limits.LINK_DOUBTS_MAX + 1) is Algorithm.RING
    assert bench.names() == NAMES


def test_a_success_takes_doubts_of_all_links_away() -> None:
    bench = bench_of(NAMES)
    for call_id in range(1, 9, 2):
        assert planned(bench, call_id) is Algorithm.DIRECT
        fail(bench, call_id, "a", None, limits.STALL_TIMEOUT_NS)
        assert planned(bench, call_id + 1) is Algorithm.DIRECT
        finish(bench, call_id + 1)


def test_a_success_looks_at_no_link_while_none_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the links takes milliseconds of the master's time among 128 peers."""
    bench = bench_of(NAMES)
    planned(bench, 1)
    monkeypatch.delattr("zpccl.protocol.kinds.collective.plan_edges")
    finish(bench, 1)


def test_a_success_with_less_on_each_link_proves_nothing() -> None:
    """A link of an exchange carries only a part of what a link of a ring carries."""
    bench = bench_of("abc")
    for call_id, algorithm in ((1, Algorithm.RING), (3, Algorithm.RING)):
        assert planned(bench, call_id, algorithm, count=8) is algorithm
        fail(bench, call_id, "a", None, limits.STALL_TIMEOUT_NS)
        expected = Algorithm.DIRECT if call_id == 1 else Algorithm.RING
        assert planned(bench, call_id + 1, Algorithm.DIRECT, count=8) is expected
        finish(bench, call_id + 1)


def test_those_who_are_not_in_a_ring_beside_each_other_cannot_blame_each_other() -> None:
    bench = bench_of(NAMES)
    assert planned(bench, 1, Algorithm.RING) is Algorithm.RING
    fail(bench, 1, "a", "c")
    assert planned(bench, 2, Algorithm.DIRECT) is Algorithm.DIRECT


def test_many_peers_use_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIRECT_PEERS_MAX", 3)
    assert planned(bench_of("abc")) is Algorithm.DIRECT
    assert planned(bench_of(NAMES), algorithm=Algorithm.DIRECT) is Algorithm.RING


# --- What is learnt ---------------------------------------------------------------------------------------------------


def test_an_algorithm_that_is_slow_here_gives_way() -> None:
    """It takes sixty times as long as the model expects. The other one is tried, and kept if it is better."""
    bench = bench_of(NAMES)
    assert planned(bench, 1, count=LARGE) is Algorithm.DIRECT
    finish(bench, 1, duration_us=100_000_000)
    bench.tick(limits.ROUTE_KEPT_NS)
    assert planned(bench, 2, count=LARGE) is Algorithm.RING
    finish(bench, 2, duration_us=50_000_000)
    bench.tick(limits.ROUTE_KEPT_NS)
    assert planned(bench, 3, count=LARGE) is Algorithm.RING


def test_of_two_slow_ones_the_quicker_is_kept() -> None:
    bench = bench_of(NAMES)
    assert planned(bench, 1, count=LARGE) is Algorithm.DIRECT
    finish(bench, 1, duration_us=50_000_000)
    bench.tick(limits.ROUTE_KEPT_NS - 1)
    assert planned(bench, 2, count=LARGE) is Algorithm.DIRECT
    finish(bench, 2, duration_us=50_000_000)
    bench.tick(1)
    assert planned(bench, 3, count=LARGE) is Algorithm.RING
    finish(bench, 3, duration_us=100_000_000)
    bench.tick(limits.ROUTE_KEPT_NS)
    assert planned(bench, 4, count=LARGE) is Algorithm.DIRECT


def test_what_was_learnt_is_of_these_peers() -> None:
    bench = bench_of(NAMES)
    assert planned(bench, 1, count=LARGE) is Algorithm.DIRECT
    finish(bench, 1, duration_us=100_000_000)
    bench.lose("d")
    assert planned(bench, 2, count=LARGE) is Algorithm.DIRECT


def test_slow_paths_get_small_frames_and_an_attempt_keeps_its_own() -> None:
    """S1: all participants cut the tensor alike, even one that asks again after the master has learnt more."""

    def frames_of(answers: list[tuple[Any, Any]]) -> list[int]:
        return [
            message.how.frame_bytes
            for _, message in answers
            if isinstance(message, Plan) and isinstance(message.how, Reducing)
        ]

    bench = bench_of(NAMES)
    first = [bench.begin(name, 1, spec(tag=1, count=LARGE)) for name in NAMES][-1]
    assert frames_of(first) == [limits.FRAME_BYTES_DEFAULT] * len(NAMES)
    assert planned(bench, 2, Algorithm.RING, tag=2, count=LARGE) is Algorithm.RING
    finish(bench, 2, duration_us=1_000_000_000)
    assert frames_of(bench.begin("b", 1, spec(tag=1, count=LARGE))) == [limits.FRAME_BYTES_DEFAULT]
    bench.tick(limits.ROUTE_KEPT_NS)
    slow = [bench.begin(name, 3, spec(tag=3, count=LARGE, algorithm=Algorithm.RING)) for name in NAMES][-1]
    assert frames_of(slow) == [limits.SLOW_FRAME_BYTES] * len(NAMES)


def test_it_is_forgotten_with_the_group() -> None:
    """So groups that come and go cost nothing."""
    bench = bench_of(NAMES, others="xy")
    bench.begin("xy", 1)
    bench.finish("xy", 1, last_attempt(bench), duration_us=1000)
    for name in "xy":
        bench.lose(name)
    assert planned(bench, 1, count=LARGE) is Algorithm.DIRECT
    finish(bench, 1, duration_us=1000)
    assert list(bench.machine.collectives.planner.speeds) == [0]


def test_reports_without_a_duration_teach_nothing() -> None:
    bench = bench_of(NAMES)
    assert planned(bench, 1, count=LARGE) is Algorithm.DIRECT
    for name in NAMES:
        bench.finish(name, 1, last_attempt(bench), duration_us=0 if name == "b" else 100_000_000)
    assert planned(bench, 2, count=LARGE) is Algorithm.DIRECT


def test_a_peer_reports_how_long_its_data_plane_took() -> None:
    peer = PeerBench().running()
    peer.now_ns += 3 * limits.MS
    reported = peer.handle(events.ReduceDone(FIRST_ATTEMPT, 7))[-1]
    assert reported == Send(Report(10, FIRST_ATTEMPT, True, digest=7, duration_us=3000, count=2))


# --- The peer, and taking over ----------------------------------------------------------------------------------------


def test_a_peer_does_what_the_plan_says_and_tells_another_master() -> None:
    """L3, S3."""
    peer = PeerBench().calling("abc")
    plan = Plan(FIRST_ATTEMPT, (10, 10, 10), reducing("abc", Algorithm.DIRECT, 65536))
    assert peer.hear(plan) == [
        StartReduce(10, FIRST_ATTEMPT, reducing("abc", Algorithm.DIRECT, 65536), tells_digest=True)
    ]
    running = running_attempt(FIRST_ATTEMPT, "abc", (10, 10, 10), spec(), Algorithm.DIRECT, 65536)
    (report,) = [effect.message for effect in peer.hear(Refused(Refusal.REPORT, "", term=77))]
    assert report.running == (running,)


def test_another_master_goes_on_with_the_same_plan() -> None:
    """L3, S3: a reports, b never got the plan."""
    bench = TakeOver()
    bench.report("a", running=(running_attempt(7, "ab", (3, 4), spec(), Algorithm.DIRECT, 65536),))
    told = bench.report("b")
    assert ("b1", Plan(7, (3, 4), reducing("ab", Algorithm.DIRECT, 65536))) in told
