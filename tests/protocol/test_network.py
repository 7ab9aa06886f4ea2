"""The model of an all-reduce's time over known paths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol.network import Model, Network, Route, Speeds, Tensor, Tree, connections_in_use, frame_bytes
from zpccl.types import Algorithm

MB = 10**6
RING, DIRECT, ONE_SHOT, TREES = Algorithm.RING, Algorithm.DIRECT, Algorithm.ONE_SHOT, Algorithm.TREES
ENDLESS = Speeds(0, 10**15, 10**15, 10**15)
"""Work takes no time."""


def made_of(rates: list[list[int | None]], *, round_trip_ns: int | None = None, hosts: list[int | None]) -> Network:
    return Network(tuple(map(tuple, rates)), ((round_trip_ns,) * len(rates),) * len(rates), tuple(hosts))


def even(count: int, rate: int | None, *, round_trip_ns: int | None = None, host: int | None = None) -> Network:
    return made_of([[rate] * count] * count, round_trip_ns=round_trip_ns, hosts=[host] * count)


def time_ns(network: Network, wire_bytes: int, route: Route, speeds: Speeds = ENDLESS) -> int | None:
    return Model(network, Tensor(wire_bytes), speeds).time_ns(route)


def star(count: int, middle: int, share: int = 1) -> Tree:
    return Tree(share, (middle,) * count)


# --- Trees ------------------------------------------------------------------------------------------------------------


def test_a_tree_knows_its_root_its_edges_and_its_depths() -> None:
    tree = Tree(1, (1, 3, 3, 3))
    assert tree.root == 3 and tree.edges == [(0, 1), (1, 3), (2, 3)] and tree.depths() == [2, 1, 1, 0]
    assert tree.depths([1, 13, 23, 99]) == [14, 13, 23, 0]


def test_a_circle_is_no_tree() -> None:
    with pytest.raises(ValueError, match="cycle"):
        Tree(1, (1, 0, 2, 2)).depths()


# --- Times ------------------------------------------------------------------------------------------------------------


def test_latencies() -> None:
    """Half a round trip for each hop, and the hop's work."""
    network, speeds = even(4, None, round_trip_ns=20 * limits.MS), Speeds(limits.MS)
    times_ms = {
        route.algorithm: (time_ns(network, 0, route, speeds) or 0) / limits.MS
        for route in [Route(algorithm, (0, 1, 2, 3), (star(4, 0),)) for algorithm in (RING, DIRECT, ONE_SHOT, TREES)]
    }
    assert times_ms == {RING: 66, DIRECT: 22, ONE_SHOT: 11, TREES: 22}


def test_the_work_of_a_hop_has_defaults() -> None:
    route = Route(DIRECT, (0, 1, 2))
    assert time_ns(even(3, None), 0, route, Speeds()) == 2 * limits.HOP_LATENCY_NS
    known = even(3, None, round_trip_ns=2 * limits.MS)
    assert time_ns(known, 0, route, Speeds()) == 2 * (limits.MS + limits.HOP_WORK_NS)


def test_what_slow_paths_cost() -> None:
    """One path of 10 MB/s among paths of 100 MB/s: 400 MB among four peers."""
    rates: list[list[int | None]] = [[100 * MB] * 4 for _ in range(4)]
    rates[0][1] = rates[1][0] = 10 * MB
    network = made_of(rates, hosts=[None] * 4)
    second = limits.SECOND
    assert time_ns(network, 400 * MB, Route(RING, (0, 1, 2, 3))) == 60 * second
    assert time_ns(network, 400 * MB, Route(RING, (0, 2, 1, 3))) == 6 * second
    assert time_ns(network, 400 * MB, Route(DIRECT, (0, 1, 2, 3))) == 20 * second
    assert time_ns(network, 400 * MB, Route(ONE_SHOT, (0, 1, 2, 3))) == 40 * second
    trees = (star(4, 2, 3), star(4, 3, 1))
    assert time_ns(network, 400 * MB, Route(TREES, (0, 1, 2, 3), trees)) == 4 * second, (
        "both load the path between them"
    )


def test_what_slow_hosts_cost() -> None:
    network = made_of([[None] * 4] * 4, hosts=[10 * MB, None, 100 * MB, None])
    second = limits.SECOND
    assert time_ns(network, 400 * MB, Route(RING, (0, 1, 2, 3))) == 60 * second
    assert time_ns(network, 400 * MB, Route(DIRECT, (0, 1, 2, 3))) == 60 * second
    assert time_ns(network, 400 * MB, Route(ONE_SHOT, (0, 1, 2, 3))) == 120 * second
    assert time_ns(network, 400 * MB, Route(TREES, (0, 1, 2, 3), (star(4, 1),))) == 40 * second
    assert time_ns(network, 400 * MB, Route(TREES, (0, 1, 2, 3), (star(4, 0),))) == 120 * second


def test_a_missing_path_rules_out_what_needs_it() -> None:
    network = even(4, None).without([(1, 0)])
    assert not network.is_usable(0, 1) and network.is_usable(0, 2)
    assert time_ns(network, MB, Route(RING, (0, 2, 1, 3))) is not None
    assert time_ns(network, MB, Route(TREES, (0, 1, 2, 3), (star(4, 2),))) is not None
    for route in [
        Route(RING, (0, 1, 2, 3)),
        Route(RING, (1, 2, 3, 0)),
        Route(DIRECT, (0, 1, 2, 3)),
        Route(ONE_SHOT, (0, 1, 2, 3)),
        Route(TREES, (0, 1, 2, 3), (star(4, 2), star(4, 0))),
    ]:
        assert time_ns(network, MB, route) is None
        assert Model(network, Tensor(MB), Speeds()).with_time(route) is None


def test_frames_fill_the_way_of_a_deep_tree() -> None:
    """At each hop beyond the root's, as many frames as a link uses connections; or the whole part, if that is less."""
    rate, chain = 8 * MB, Route(TREES, (0, 1, 2), (Tree(1, (0, 0, 1)),))
    filling_ns = 2 * limits.SLOW_FRAME_BYTES * limits.SECOND // rate
    model = Model(even(3, rate), Tensor(100 * MB), ENDLESS)
    assert model.latency_ns(chain) == 2 * filling_ns
    assert model.latency_ns(Route(TREES, (0, 1, 2), (star(3, 0),))) == 0
    small = Model(even(3, rate), Tensor(8000), ENDLESS)
    assert small.latency_ns(chain) == 2 * limits.MS
    slow = Model(even(3, rate // 10), Tensor(100 * MB), ENDLESS)
    assert slow.latency_ns(chain) == 10 * filling_ns, "one connection carries ten times less"
    far = Model(even(3, rate, round_trip_ns=limits.LINK_FAR_ROUND_TRIP_NS), Tensor(100 * MB), ENDLESS)
    assert (far.latency_ns(chain) or 0) > 2 * filling_ns + 2 * limits.LINK_FAR_ROUND_TRIP_NS


def test_connections_in_use() -> None:
    """As many as have what is in flight between them; near by as if the round trip were longer."""
    second, window = limits.SECOND, 64 * limits.KIB
    assert connections_in_use(0, second, window) == 1
    assert connections_in_use(window, second, window) == 1
    assert connections_in_use(window + 1, second, window) == 2
    assert connections_in_use(10 * window, second // 2, window) == 5
    assert connections_in_use(10 * window, 0, window) == 1
    assert connections_in_use(250 * window, limits.LINK_SENDER_ROUND_TRIP_NS // 9, window) == 3


def test_roundings() -> None:
    """A ring rounds the sum at each hop. The other algorithms round once for each level. All round the result."""
    model = Model(Network.unknown(5), Tensor(MB, is_quantised=True), Speeds())
    order = (0, 1, 2, 3, 4)
    assert model.roundings(Route(RING, order)) == 5
    assert model.roundings(Route(DIRECT, order)) == 2
    assert model.roundings(Route(TREES, order, (star(5, 0),))) == 2
    assert model.roundings(Route(TREES, order, (star(5, 0), Tree(1, (0, 0, 1, 2, 3))))) == 5


# --- Speeds -----------------------------------------------------------------------------------------------------------

ORDER = (0, 1, 2, 3)
UNKNOWN = Network.unknown(4)


def test_small_tensors_show_the_work_of_a_hop() -> None:
    small = Tensor(limits.SMALL_TENSOR_BYTES)
    learnt = Speeds().learn(Route(RING, ORDER), UNKNOWN, small, 6_000_000)
    assert learnt == Speeds(1_000_000)
    assert learnt.learn(Route(DIRECT, ORDER), UNKNOWN, Tensor(8), 10_000_000) == Speeds(2_000_000), "a quarter of 5 ms"


def test_the_path_is_no_part_of_the_work() -> None:
    network = even(4, None, round_trip_ns=20 * limits.MS)
    assert Speeds().learn(Route(DIRECT, ORDER), network, Tensor(8), 24 * limits.MS) == Speeds(2 * limits.MS)
    assert Speeds().learn(Route(DIRECT, ORDER), network, Tensor(8), 4 * limits.MS) == Speeds(1)


@pytest.mark.parametrize("size", [limits.SMALL_TENSOR_BYTES + 1, limits.SPEED_TENSOR_BYTES - 1])
def test_tensors_between_show_nothing(size: int) -> None:
    assert Speeds().learn(Route(DIRECT, ORDER), UNKNOWN, Tensor(size), 10**9) == Speeds()


@pytest.mark.parametrize(("size", "count"), [(8, 1), (limits.SMALL_TENSOR_BYTES + 1, 0)])
def test_learning_costs_little(size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit learns, and among 128 peers a model takes milliseconds of the master's time."""
    made: list[Model] = []

    def make(*facts: Any) -> Model:
        made.append(Model(*facts))
        return made[-1]

    monkeypatch.setattr("zpccl.protocol.network.Model", make)
    Speeds().learn(Route(DIRECT, ORDER), UNKNOWN, Tensor(size), limits.SECOND)
    assert len(made) == count


@pytest.mark.parametrize("algorithm", [RING, DIRECT, TREES])
def test_large_ones_show_the_rate_of_their_algorithm(algorithm: Algorithm) -> None:
    route = Route(algorithm, ORDER, tuple(star(4, one) for one in ORDER))
    latency_ns = (6 if algorithm is RING else 2) * limits.MS
    learnt = Speeds(limits.MS).learn(route, UNKNOWN, Tensor(400 * MB), limits.SECOND + latency_ns)
    assert learnt.rate(algorithm) == 600 * MB
    assert [learnt.rate(other) for other in (RING, DIRECT) if other is not algorithm] == [
        Speeds().rate(other) for other in (RING, DIRECT) if other is not algorithm
    ]


def test_a_slow_network_says_nothing_about_work() -> None:
    """The network explains the time, so the algorithm can do at least as much work."""
    network, route, tensor = even(4, 3 * MB), Route(RING, ORDER), Tensor(8 * MB)
    assert Speeds().learn(route, network, tensor, 4 * limits.SECOND) == Speeds()
    known = Speeds(ring_bytes_per_second=MB)
    assert known.learn(route, network, tensor, 4 * limits.SECOND + 6 * limits.MS).rate(RING) == 3 * MB
    assert Speeds().learn(route, network, tensor, 12 * limits.SECOND).rate(RING) < 1.01 * MB, "not explained"


def test_a_route_that_the_network_does_not_allow_shows_nothing() -> None:
    network = UNKNOWN.without([(0, 1)])
    assert Speeds().learn(Route(DIRECT, ORDER), network, Tensor(400 * MB), limits.SECOND) == Speeds()


@given(
    st.sampled_from([RING, DIRECT, ONE_SHOT, TREES]),
    st.integers(0, 2**44),
    st.integers(0, 2**60),
    st.none() | st.integers(0, 10**12),
    st.none() | st.integers(1, 10**12),
)
def test_whatever_is_reported_rates_stay_rates(
    algorithm: Algorithm, wire_bytes: int, duration_ns: int, hop_ns: int | None, rate: int | None
) -> None:
    """Peers may report anything."""
    route = Route(algorithm, ORDER, (star(4, 1),))
    for network in (UNKNOWN, even(4, rate, round_trip_ns=1000, host=rate)):
        learnt = Speeds(hop_ns, rate, rate, rate).learn(route, network, Tensor(wire_bytes), duration_ns)
        assert learnt.rate(algorithm) > 0
        model = Model(network, Tensor(wire_bytes), learnt)
        assert (model.time_ns(route) or 0) >= 0


@pytest.mark.parametrize(
    ("mega_bytes_per_second", "kib"), [(1000, 512), (263, 512), (262, 256), (62, 64), (66, 128), (1, 16)]
)
def test_frames_are_what_is_sent_in_a_short_time(mega_bytes_per_second: int, kib: int) -> None:
    assert frame_bytes(mega_bytes_per_second * MB) == kib * limits.KIB
