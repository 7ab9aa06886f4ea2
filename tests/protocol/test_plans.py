"""Plans that follow the network: what reports say about paths, and how plans change with it (L2, S3)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.matrix import Sample
from zpccl.protocol.messages import (
    Lane,
    Linked,
    Measurements,
    MeasurementsRequest,
    PathSample,
    Plan,
    Reducing,
    Running,
    TopologyKind,
    decode_master_message,
    encode,
)
from zpccl.protocol.network import frame_bytes
from zpccl.protocol.rings import neighbours_of, plan_edges
from zpccl.types import Algorithm, CollectiveKind, DataType, ReduceOp

from .harness import MasterBench, pid, pids, spec
from .takeover import TakeOver

NAMES = "abcd"
COUNT = 2**23
"""Number of elements: 32 MiB."""
MBIT = 10**6 // 8
FAST, MIDDLE, SLOW = 1000 * MBIT, 300 * MBIT, 50 * MBIT
PAIRS = {"ab": FAST, "cd": FAST, "ac": MIDDLE, "bd": MIDDLE, "ad": SLOW, "bc": SLOW}
"""Rates by path: each peer has three different ones."""


class Run(MasterBench):
    """All-reduces in a network with these rates."""

    def __init__(self, rates: Mapping[str, int]) -> None:
        super().__init__()
        self.members(NAMES)
        self.rates = dict(rates)
        self.busy_seconds: dict[str, int] = {}
        self.calls = 0

    def plan(self, **changes: Any) -> Reducing:
        """All vote. Returns the plan."""
        self.calls += 1
        root = changes.pop("root", None)
        for name in self.names():
            arguments = {"count": COUNT, "algorithm": Algorithm.AUTO, "is_root": name == root} | changes
            self.begin(name, self.calls, spec(**arguments))
        return list(self.plans.values())[-1]

    def end(self, **changes: Any) -> None:
        """All succeed, and report what their paths have carried."""
        attempt_id, how = list(self.plans.items())[-1]
        for name in self.names():
            beside = sorted(neighbours_of(how, pid(name)))
            paths = tuple(self.sample(name, other) for other in self.names() if pid(other) in beside)
            self.finish(name, self.calls, attempt_id, paths=paths, **changes)
        self.tick(limits.ROUTE_KEPT_NS)

    def sample(self, one: str, other: str) -> PathSample:
        """A sample of one second, or of `busy_seconds`, at the rate of the path, which was the limit."""
        pair = "".join(sorted(one + other))
        seconds = self.busy_seconds.get(pair, 1)
        return PathSample(pid(other), seconds * self.rates[pair], seconds * 1_000_000, 20_000, is_limited=True)

    def settle(self, count: int = 6) -> Reducing:
        """Runs some all-reduces. Returns the plan of the next one."""
        for _ in range(count):
            self.plan()
            self.end()
        return self.plan()


def settled(rates: Mapping[str, int]) -> Run:
    """All-reduces have shown the rates of the paths, and none runs."""
    run = Run(rates)
    run.settle()
    run.end()
    return run


def shares_of(how: Reducing) -> dict[frozenset[str], float]:
    """The part of the tensor that each path carries in each direction, by the names of its two ends."""
    total, found = sum(lane.share for lane in how.lanes), dict.fromkeys(map(frozenset, PAIRS), 0.0)
    names = {pid(name): name for name in NAMES}
    for lane in how.lanes:
        one = Reducing(how.order, how.frame_bytes, how.algorithm, (lane,))
        for edge in plan_edges(one):
            found[frozenset(names[peer_id] for peer_id in edge)] += lane.share / total
    return found


def test_before_anything_is_known_no_path_carries_most_of_the_tensor() -> None:
    """128 MiB between eight hosts in three regions took 490 s around a ring, and 100 s with shares by rate. A ring is
    the quickest between hosts that are near each other, where no path is the limit."""
    run = Run(PAIRS)
    assert run.plan().algorithm == Algorithm.DIRECT
    attempt_id = list(run.plans)[-1]
    for name in NAMES:
        paths = tuple(
            replace(run.sample(name, other), round_trip_us=100, is_limited=False) for other in NAMES if other != name
        )
        run.finish(name, 1, attempt_id, paths=paths)
    run.tick(limits.ROUTE_KEPT_NS)
    assert run.plan().algorithm == Algorithm.RING


def test_paths_are_used_by_their_rates() -> None:
    """700 Mbit/s can cross between the fast pairs; a ring gets at most 300 of them."""
    how = Run(PAIRS).settle()
    assert how.algorithm == Algorithm.TREES and how.order == pids(NAMES)
    shares = shares_of(how)
    needed = {frozenset(pair): share * 4 * COUNT / PAIRS[pair] for pair in PAIRS for share in [shares[frozenset(pair)]]}
    assert max(needed.values()) < 0.5, "seconds: a ring would take 1.34"


def test_frames_suit_the_slowest_path_in_use() -> None:
    """A peer passes a frame on once it has the whole of it, and many frames are in flight at the same time."""
    assert Run(PAIRS).settle().frame_bytes == limits.SLOW_FRAME_BYTES
    assert Run(dict.fromkeys(PAIRS, FAST)).settle().frame_bytes > limits.SLOW_FRAME_BYTES


def test_who_has_a_slow_uplink_adds_nothing_for_others() -> None:
    """It is a leaf of every tree, and sends and receives the tensor once."""
    how = Run({pair: SLOW if "a" in pair else FAST for pair in PAIRS}).settle()
    assert how.algorithm == Algorithm.TREES
    rank = how.order.index(pid("a"))
    assert all(lane.root != rank and lane.parents.count(rank) == 0 for lane in how.lanes)


def test_an_even_network_has_a_simple_plan() -> None:
    assert Run(dict.fromkeys(PAIRS, MIDDLE)).settle().algorithm in (Algorithm.RING, Algorithm.DIRECT)


def seconds_of(how: Reducing, rates: Mapping[str, int]) -> float:
    """The time of the slowest path."""
    shares = shares_of(how)
    return max(shares[frozenset(pair)] * 4 * COUNT / rates[pair] for pair in rates)


@pytest.mark.parametrize("percent", [3, 10, 40, 80])
@pytest.mark.parametrize("fallen", PAIRS)
def test_a_path_that_falls_costs_little_within_three_calls(fallen: str, percent: int) -> None:
    run, rates = Run(PAIRS), PAIRS | {fallen: PAIRS[fallen] * percent // 100}
    run.settle()
    run.rates = rates
    best_s = seconds_of(Run(rates).settle(), rates)
    for _ in range(3):
        run.end()
        how = run.plan()
    assert seconds_of(how, rates) <= 1.3 * best_s


def test_plans_stay_while_rates_waver() -> None:
    """The rates vary by a fifth."""
    rng, run, plans = random.Random(1), Run(PAIRS), []
    run.settle()
    for _ in range(40):
        run.rates = {pair: int(rate * rng.uniform(0.8, 1.2)) for pair, rate in PAIRS.items()}
        run.end()
        plans.append(run.plan())
    assert sum(one != other for one, other in itertools.pairwise(plans)) <= 2
    assert seconds_of(plans[-1], PAIRS) <= 1.3 * seconds_of(Run(PAIRS).settle(), PAIRS)


def test_a_slow_network_is_not_taken_for_slow_work() -> None:
    """Otherwise the first plan that follows the network, based on little knowledge, would be the last one."""
    run = Run(PAIRS)
    for _ in range(3):
        run.plan()
        run.end(duration_us=10_000_000)
    assert run.machine.collectives.planner.speeds == {}


def test_plans_are_kept_for_a_while() -> None:
    """Planning costs the master time."""
    run = Run(PAIRS)
    run.plan()
    attempt_id = list(run.plans)[-1]
    for name in NAMES:
        run.finish(name, 1, attempt_id, paths=tuple(run.sample(name, other) for other in NAMES if other != name))
    assert run.plan().algorithm == Algorithm.DIRECT
    run.end()
    assert run.plan().algorithm == Algorithm.TREES


def test_what_is_not_measured_again_is_planned_anew_in_time() -> None:
    """A slow path is avoided and so gives no samples: it is tried again later."""
    run = settled(PAIRS)
    run.plan()
    (known,) = run.machine.collectives.planner._planned.values()
    run.tick(4 * limits.RATE_DOUBLING_NS)
    run.calls += 1
    run.begin(NAMES, run.calls, spec(1, count=COUNT, algorithm=Algorithm.AUTO))
    (later,) = run.machine.collectives.planner._planned.values()
    rates = [planned.network.path_bytes_per_second[0][3] or 0 for planned in (known, later)]
    assert rates[1] >= 8 * rates[0] > 0


def test_a_link_that_breaks_is_planned_around_at_once() -> None:
    run = Run(PAIRS)
    before = run.settle()
    run.end()
    edge = before.order[before.lanes[0].root], next(iter(neighbours_of(before, before.order[before.lanes[0].root])))
    one, other = (name for name in NAMES if pid(name) in edge)
    run.say(one, Linked(pids(name for name in NAMES if name not in one + other)))
    after = run.plan()
    assert set(edge) not in [set(found) for found in plan_edges(after)]


def test_means_of_narrow_integers_are_summed_where_all_are_heard() -> None:
    run = settled(PAIRS)
    how = run.plan(datatype=DataType.INT32, op=ReduceOp.AVG)
    assert how.algorithm in (Algorithm.DIRECT, Algorithm.TREES) and not any(lane.parents for lane in how.lanes)


RINGS = [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.BROADCAST, CollectiveKind.ALL_REDUCE]
QUICKEST = {frozenset(pids(pair)) for pair in ("ab", "bd", "cd", "ac")}
"""In order of admission, the ring would have both slow paths."""


def of_kind(kind: CollectiveKind, root: str = "c") -> dict[str, Any]:
    """Fields of each peer's spec. One of these collectives is an all-reduce that asks for a ring."""
    return {"kind": kind, "algorithm": Algorithm.RING if kind is CollectiveKind.ALL_REDUCE else Algorithm.AUTO} | (
        {"root": root} if kind is CollectiveKind.BROADCAST else {}
    )


def edges_of(how: Reducing) -> set[frozenset[bytes]]:
    return set(map(frozenset, plan_edges(how)))


@pytest.mark.parametrize("kind", RINGS)
def test_rings_use_quick_paths(kind: CollectiveKind) -> None:
    """They do so at once, with the rates that other collectives have shown."""
    run = settled(PAIRS)
    how = run.plan(**of_kind(kind))
    assert how.algorithm == Algorithm.RING and edges_of(how) == QUICKEST
    assert how.frame_bytes == frame_bytes(MIDDLE)
    if kind is CollectiveKind.BROADCAST:
        assert how.order[0] == pid("c"), "S1: the root sends"


@pytest.mark.parametrize("kind", RINGS)
def test_rings_show_the_network_themselves(kind: CollectiveKind) -> None:
    """A path that no ring has used counts like the median of the others."""
    run = Run(PAIRS)
    for _ in range(4):
        run.plan(**of_kind(kind))
        run.end()
    assert edges_of(run.plan(**of_kind(kind))) == QUICKEST


def test_each_root_has_a_ring_of_its_own() -> None:
    run = Run(PAIRS)
    for root in NAMES * 3:
        assert run.plan(**of_kind(CollectiveKind.BROADCAST, root)).order[0] == pid(root)
        run.end()
    known = run.machine.collectives.planner._planned
    assert len(known) == 4 and all(edges_of(planned.how) == QUICKEST for planned in known.values())


@pytest.mark.parametrize("kind", RINGS)
def test_rings_stay_while_rates_waver(kind: CollectiveKind) -> None:
    """They vary by a fifth. One change is for paths unused until then. If rates differ by more, the ring follows."""
    for seed in range(4):
        rng, run, orders = random.Random(seed), Run(dict.fromkeys(PAIRS, MIDDLE)), []
        for _ in range(40):
            run.rates = {pair: int(MIDDLE * rng.uniform(0.8, 1.2)) for pair in PAIRS}
            orders.append(run.plan(**of_kind(kind)).order)
            run.end()
        assert sum(one != other for one, other in itertools.pairwise(orders)) <= 1
    run.rates = dict(PAIRS)
    for _ in range(8):
        run.plan(**of_kind(kind))
        run.end()
    assert edges_of(run.plan(**of_kind(kind))) == QUICKEST


def test_all_to_alls_use_all_paths() -> None:
    run = settled(PAIRS)
    how = run.plan(kind=CollectiveKind.ALL_TO_ALL)
    assert how.algorithm == Algorithm.DIRECT and how.order == pids(NAMES)


def test_a_ring_planned_ahead_is_the_one_that_would_be_planned() -> None:
    """S3: if another ring is planned, the plans ahead are void."""
    small = of_kind(CollectiveKind.ALL_GATHER) | {"count": limits.PLAN_AHEAD_BYTES_MAX // 4, "datatype": DataType.FLOAT}
    run = Run(PAIRS)
    run.plan(**small)
    run.end()
    assert len(run.machine.collectives._ahead) == 1
    for _ in range(4):
        run.plan(tag=1, **of_kind(CollectiveKind.ALL_GATHER))
        run.end()
    how = run.plan(**small)
    assert edges_of(how) == QUICKEST
    attempt_id = list(run.plans)[-1]
    run.finish(run.names(), run.calls, attempt_id)
    (ahead,) = run.machine.collectives._ahead.values()
    assert ahead.how == how


def test_who_is_lost_is_forgotten() -> None:
    """B1: the others go on with what is known about them."""
    run = settled(PAIRS)
    run.lose("d")
    assert {peer.name for peer in run.machine.collectives.planner._measured} == set("abc")
    assert run.plan().order == pids("abc")


def test_another_master_goes_on_with_the_same_lanes() -> None:
    """L3, S3: a reports the attempt; b never got the plan."""
    lanes = Lane(3, 0), Lane(1, 1, (1, 1, 0))
    how = Reducing(pids("abc"), 65536, Algorithm.TREES, lanes)
    bench = TakeOver()
    bench.report("a", "abc", running=(Running(Plan(7, (3, 4, 5), how), spec()),))
    told = bench.report("b", "abc") + bench.report("c", "abc")
    assert ("b1", Plan(7, (3, 4, 5), how)) in told


def test_samples_of_strangers_are_ignored() -> None:
    """A report may name anybody."""
    run = Run(PAIRS)
    run.plan()
    attempt_id = list(run.plans)[-1]
    false = PathSample(b"x" * 16, 10**9, 10**6, is_limited=True)
    for name in NAMES:
        run.finish(name, 1, attempt_id, paths=(false, PathSample(pid(name), 10**9, 1)))
    run.tick(limits.ROUTE_KEPT_NS)
    assert run.machine.collectives.planner.matrix.changes == 0


# --- optimize_topology ------------------------------------------------------------------------------------------------


def optimise(run: Run) -> int:
    """All call optimize_topology. Returns how many shall measure their paths to all; all get the same answer."""
    run.calls += 1
    run.vote(run.names(), TopologyKind.OPTIMIZE, run.calls)
    (value,) = {run.decision(name, run.calls).value for name in run.names()}
    return value


def test_what_collectives_have_shown_is_measured_once_more() -> None:
    """It is less exact."""
    run = settled(PAIRS)
    assert optimise(run) == 3
    probe(run)
    assert optimise(run) == 0
    how = run.plan(count=2 * COUNT)
    assert how.algorithm == Algorithm.TREES
    run.end()
    run.tick(limits.RATE_DOUBLING_NS)
    assert optimise(run) == 3, "it is old"


def test_what_cannot_be_measured_is_not_asked_for_again() -> None:
    """Members without a link show nothing. Others may."""
    run = Run(PAIRS)
    assert [optimise(run), optimise(run)] == [3, 0]
    run.tick(limits.RATE_DOUBLING_NS)
    assert [optimise(run), optimise(run)] == [3, 0]
    run.lose("d")
    assert [optimise(run), optimise(run)] == [2, 0]


def test_a_path_that_falls_is_measured_again() -> None:
    """L2: within the hour, too, but only once for each fall: a path without a link cannot be measured."""
    run = Run(PAIRS)
    assert optimise(run) == 3
    probe(run)
    assert optimise(run) == 0
    run.rates, run.busy_seconds = {pair: rate // 10 for pair, rate in PAIRS.items()}, {"ac": 11}
    for _ in range(2):
        run.tick(limits.SECOND)
        run.plan(count=2 * COUNT)
        run.end(duration_us=16_000_000)
        assert [optimise(run), optimise(run)] == [2, 0], "the later end of the path, and those after it"
    probe(run)
    assert optimise(run) == 0


def test_only_newcomers_are_measured() -> None:
    run = Run(PAIRS)
    optimise(run)
    probe(run)
    run.lose("a")
    assert optimise(run) == 0, "the others know all of their paths"
    run.members("e")
    assert optimise(run) == 1
    run.members("f")
    assert optimise(run) == 2


UPLINK = 240 * MBIT


def probe(run: Run) -> None:
    """All report what they have sent: to each other peer alone, and to all others at once."""
    for turn in range(len(NAMES)):
        run.plan(count=4)
        attempt_id = list(run.plans)[-1]
        for name in run.names():
            others = [other for other in run.names() if other != name]
            to = others[turn : turn + 1] or others
            found = [replace(run.sample(name, other), is_probe=True) for other in to]
            if to == others:
                found = [replace(sample, sent_bytes=UPLINK // len(to)) for sample in found]
            run.finish(name, run.calls, attempt_id, paths=tuple(found))
        run.tick(limits.ROUTE_KEPT_NS)


def test_probes_show_paths_and_hosts_at_once() -> None:
    """The first plan of any size follows them, and attempts that take about as long as it says change nothing."""
    run = Run(PAIRS)
    probe(run)
    how = run.plan(count=2 * COUNT)
    planner = run.machine.collectives.planner
    known, matrix = list(planner._planned.values())[-1], planner.matrix
    assert set(known.network.host_bytes_per_second) == {UPLINK * limits.HOST_USED_PERCENT // 100}
    used = {one: known.network.path_bytes_per_second[0][one] for one in (1, 2, 3)}
    parts = {place: rate * limits.PATH_USED_PERCENT // 100 for place, rate in ((1, FAST), (2, MIDDLE), (3, SLOW))}
    assert used == parts, "what is left lets links catch up"
    before = matrix.changes
    run.rates, run.busy_seconds = dict.fromkeys(PAIRS, SLOW // 4), dict.fromkeys(PAIRS, 10)
    run.end(duration_us=(2 * known.route.time_ns - limits.MS) // limits.US)
    network = matrix.network(known.peers, lambda one, other: True, run.now_ns, limits.PATH_USED_PERCENT)
    assert network.path_bytes_per_second == known.network.path_bytes_per_second
    assert network.host_bytes_per_second == known.network.host_bytes_per_second
    assert matrix.changes > before, "round trips count"
    assert run.plan(count=2 * COUNT) == how
    run.end(duration_us=(2 * known.route.time_ns + limits.MS) // limits.US)
    network = matrix.network(known.peers, lambda one, other: True, run.now_ns, limits.PATH_USED_PERCENT)
    assert network.path_bytes_per_second != known.network.path_bytes_per_second, "something has fallen"


def test_only_plans_for_measured_paths_have_a_pace() -> None:
    """Else links would keep to rates that only look like those of their paths."""
    run = Run(PAIRS)
    assert run.settle().algorithm == Algorithm.TREES
    assert run.plan(count=2 * COUNT).pace_us == 0
    run = Run(PAIRS)
    probe(run)
    how = run.plan(count=2 * COUNT)
    known = list(run.machine.collectives.planner._planned.values())[-1]
    assert how.algorithm == Algorithm.TREES
    assert known.route.time_ns // limits.US * 0.9 < how.pace_us <= known.route.time_ns // limits.US
    run.end()
    run.tick(limits.RATE_DOUBLING_NS)
    assert run.plan(count=2 * COUNT).pace_us == 0, "the paths are no longer known"


def test_a_path_that_falls_leaves_the_others_measured() -> None:
    """L2: attempts of 32 MiB among eight hosts took 1.4 times the bound after such a fall, and now 1.2 times: the plan
    and its pace follow what was measured. In the attempt of the fall all links are slow, as they wait for the path."""
    run = Run(PAIRS)
    probe(run)
    run.plan(count=2 * COUNT)
    planner, (a, b, c, _) = run.machine.collectives.planner, run.machine.registry.order
    run.rates, run.busy_seconds = {pair: rate // 10 for pair, rate in PAIRS.items()}, {"ab": 11, "ac": 9}
    run.end(duration_us=20_000_000)
    known = {(sender, receiver): rate for sender, receiver, rate, _, _ in planner.matrix.paths()}
    assert known[a, b] == known[b, a] == FAST // 10
    assert known[a, c] == MIDDLE and planner.matrix.host_rate(a, is_sending=True) == UPLINK
    assert not planner.matrix.is_probed(a, b, run.now_ns) and planner.matrix.is_probed(a, c, run.now_ns)
    how = run.plan(count=2 * COUNT)
    assert how.pace_us and shares_of(how)[frozenset("ab")]
    network = list(planner._planned.values())[-1].network
    assert network.path_bytes_per_second[0][1] == FAST // 10, "attempts show no more of it than they could use"
    assert network.path_bytes_per_second[0][2] == MIDDLE * limits.PATH_USED_PERCENT // 100


def test_a_pace_that_holds_attempts_back_is_hastened() -> None:
    """An attempt that takes less than the measured rates allow shows that they are too low: the next one is quicker."""
    run = Run(PAIRS)
    probe(run)
    how = run.plan(count=2 * COUNT)
    run.end(duration_us=how.pace_us * 104 // 100)
    assert run.plan(count=2 * COUNT) == how, "the paths were the limit"
    paces = [how.pace_us]
    for _ in range(5):
        run.end(duration_us=paces[-1] * 101 // 100)
        faster = run.plan(count=2 * COUNT)
        assert replace(faster, pace_us=how.pace_us) == how
        paces.append(faster.pace_us)
    for before, after in itertools.pairwise(paces):
        assert after == pytest.approx(before * 1.01 / 1.03, rel=1e-3)
    run.end(duration_us=paces[-1] * 104 // 100)
    assert run.plan(count=2 * COUNT).pace_us == paces[-1]


def test_a_probe_without_some_paths_shows_nothing_of_the_host() -> None:
    """Paths within a host have no rate, so the others are not all that it sends."""
    run = Run(PAIRS)
    run.plan(count=4)
    attempt_id = list(run.plans)[-1]
    for name in NAMES:
        found = [replace(run.sample(name, other), is_probe=True) for other in NAMES if other != name]
        run.finish(name, 1, attempt_id, paths=tuple(found[:2]))
    run.tick(limits.ROUTE_KEPT_NS)
    matrix = run.machine.collectives.planner.matrix
    assert not list(matrix.paths()) and matrix.host_rate(run.peer("a"), is_sending=True) is None


def ask(run: MasterBench, name: str) -> Any:
    """The master's answer to a member that asks about the network."""
    ((connection, told),) = run.say(name, MeasurementsRequest())
    assert connection == run.peer(name).connection
    return told


def test_members_are_told_what_was_measured() -> None:
    run = settled(PAIRS)
    told = ask(run, "b")
    assert [member.name for member in told.members] == list(NAMES)
    rates = {(path.sender, path.receiver): path.bytes_per_second for path in told.paths}
    assert {rates[0, 1], rates[1, 0]} == {FAST} and rates[0, 2] == MIDDLE
    ages = {(path.sender, path.receiver): path.age_ms for path in told.paths}
    assert ages[0, 1] == limits.ROUTE_KEPT_NS // limits.MS
    assert all(path.round_trip_us == 20_000 for path in told.paths)


def test_the_same_is_told_for_a_while() -> None:
    """B2: a member that asks all the time only costs the master the sending of its answers."""
    run = Run(PAIRS)
    empty = ask(run, "a")
    assert not empty.paths
    run.plan()
    run.end()
    assert limits.ROUTE_KEPT_NS < limits.MEASUREMENTS_KEPT_NS
    assert ask(run, "b") is empty
    run.tick(limits.MEASUREMENTS_KEPT_NS)
    assert ask(run, "b").paths
    run.lose("d")
    assert [member.name for member in ask(run, "b").members] == list("abc")


def test_only_members_are_told() -> None:
    run = Run(PAIRS)
    run.register("e")
    assert not any(isinstance(message, Measurements) for _, message in run.say("e", MeasurementsRequest()))


def test_what_is_told_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: whatever peers report, the answer can be encoded. If there are many paths, it has the latest ones."""
    run = settled(dict.fromkeys(PAIRS, 2**63))
    told = ask(run, "a")
    assert max(path.bytes_per_second or 0 for path in told.paths) == limits.RATE_TOLD_MAX
    assert decode_master_message(encode(told)) == told
    monkeypatch.setattr(limits, "PATHS_TOLD_MAX", 2)
    run.tick(limits.MEASUREMENTS_KEPT_NS)
    matrix, (a, _, c, _) = run.machine.collectives.planner.matrix, run.machine.registry.order
    matrix.observe(c, a, 10**9, limits.SECOND, run.now_ns)
    latest, _ = ask(run, "b").paths
    assert (latest.sender, latest.receiver, latest.age_ms) == (2, 0, 0)


def test_the_rates_of_hosts_are_told() -> None:
    """When a sends, all its paths are slower at once: together they carry what a can send."""
    run = Run(PAIRS)
    matrix, (a, *others) = run.machine.collectives.planner.matrix, run.machine.registry.order
    for rate in (FAST, MIDDLE):
        matrix.observe_attempt([Sample(a, other, rate, limits.SECOND, True) for other in others], run.now_ns)
    (slow,) = [host for host in ask(run, "b").hosts if host.member == 0]
    assert slow.sent_per_second == len(others) * MIDDLE
