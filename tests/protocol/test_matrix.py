"""What samples show about paths and hosts."""

from __future__ import annotations

import random

import pytest

from zpccl import limits
from zpccl.protocol.matrix import Matrix, Sample
from zpccl.protocol.network import Network, Route, Tensor
from zpccl.protocol.routes import plan
from zpccl.types import Algorithm

MB = 10**6
SECOND = limits.SECOND
PEERS = "abcd"
USED = 17 * MB * limits.HOST_USED_PERCENT // 100
"""What plans use of a host that has sent 17 MB/s on purpose. The rest is for acknowledgements."""


def network(matrix: Matrix[str], now_ns: int = 0, peers: str = PEERS) -> Network:
    return matrix.network(peers, lambda one, other: True, now_ns)


def rate(matrix: Matrix[str], one: str, other: str, now_ns: int = 0) -> int | None:
    return network(matrix, now_ns, one + other).path_bytes_per_second[0][1]


def host(matrix: Matrix[str], peer: str, now_ns: int = 0) -> int | None:
    return network(matrix, now_ns, peer).host_bytes_per_second[0]


def test_nothing_is_known_at_first() -> None:
    assert network(Matrix()) == Network.unknown(4)


# --- Probes -----------------------------------------------------------------------------------------------------------


def probe(matrix: Matrix[str], sender: str, now_ns: int = 0, **rates: int) -> None:
    """What a peer has sent to others at the same time, on purpose, in MB/s."""
    samples = [Sample(sender, other, mega_bytes * MB // 2, SECOND // 2, True) for other, mega_bytes in rates.items()]
    matrix.observe_probe(sender, samples, now_ns)


def attempt(matrix: Matrix[str], now_ns: int = 0, *, trusted_ns: float = SECOND) -> None:
    """All of a's links have bytes waiting for a second, and that to b carries 2 MB/s."""
    samples = [
        Sample("a", other, mega_bytes * MB, SECOND, True) for other, mega_bytes in (("b", 2), ("c", 9), ("d", 9))
    ]
    matrix.observe_attempt(samples, now_ns, trusted_ns=trusted_ns)


def test_a_probe_of_a_pair_shows_its_path() -> None:
    """Both ways, and however little it carries."""
    matrix: Matrix[str] = Matrix()
    probe(matrix, "a", b=10)
    matrix.observe_probe("b", [Sample("b", "a", 1000, SECOND, True)], 0)
    assert rate(matrix, "a", "b") == 1000 and host(matrix, "a") is None
    assert matrix.is_probed("a", "b", 0) and not matrix.is_probed("a", "b", limits.RATE_DOUBLING_NS)
    matrix.observe("a", "c", MB, SECOND, 0)
    matrix.observe("c", "a", MB, SECOND, 0)
    assert not matrix.is_probed("a", "c", 0)


def test_a_path_within_a_host_is_no_limit() -> None:
    """And leaves unknown what the host sends to others."""
    matrix: Matrix[str] = Matrix()
    within = [Sample("a", "b", 0, SECOND, False), Sample("b", "a", 0, SECOND, False)]
    for sample in within:
        matrix.observe_probe(sample.sender, [sample], 0)
    probe(matrix, "a", c=10)
    matrix.observe_probe("a", [within[0], Sample("a", "c", 10 * MB, SECOND, True)], 0)
    assert matrix.is_probed("a", "b", 0) and rate(matrix, "a", "b") is None and host(matrix, "a") is None


def test_a_probe_of_a_host_shows_what_it_sends_in_all() -> None:
    """The paths keep the rates that they have alone. What was believed before does not count."""
    matrix: Matrix[str] = Matrix()
    matrix._observe_host("a", False, 1, 0, True)
    for other in "bcd":
        probe(matrix, "a", **{other: 10})
    probe(matrix, "a", b=5, c=5, d=7)
    assert host(matrix, "a") == USED and matrix.host_rate("a", is_sending=True) == 17 * MB
    assert [rate(matrix, "a", other) for other in "bcd"] == [10 * MB] * 3


def test_what_was_probed_holds_while_attempts_take_the_time_of_their_plans() -> None:
    """L2: a host that sends little in an attempt looks like one that can send no more, and links that share a host's
    line look like slow paths."""
    matrix: Matrix[str] = Matrix()
    for other in "bcd":
        probe(matrix, "a", **{other: 10})
    probe(matrix, "a", b=5, c=5, d=7)
    attempt(matrix)
    assert host(matrix, "a") == USED and rate(matrix, "a", "b") == 10 * MB
    late_ns = limits.RATE_DOUBLING_NS - 1
    attempt(matrix, late_ns)
    assert rate(matrix, "a", "b", 2 * late_ns) == 10 * MB, "confirmed"
    attempt(matrix, 3 * late_ns)
    assert rate(matrix, "a", "b", 3 * late_ns) == 2 * MB, "not confirmed within the hour"


def test_what_was_probed_holds_no_more_if_attempts_take_long() -> None:
    """L2: some path has fallen."""
    matrix: Matrix[str] = Matrix()
    for other in "bcd":
        probe(matrix, "a", **{other: 10})
        matrix.observe_probe(other, [Sample(other, "a", 10 * MB, SECOND, True)], 0)
    attempt(matrix, trusted_ns=SECOND - 1)
    assert rate(matrix, "a", "b") == 2 * MB
    assert not matrix.is_probed("a", "b", 0) and matrix.was_probed("a", "b", 0)
    matrix.observe_attempt([Sample("a", "b", 3 * MB, SECOND, True)], 0, trusted_ns=SECOND)
    assert rate(matrix, "a", "b") != 2 * MB, "later attempts count as well"
    assert not matrix.was_probed("a", "b", limits.RATE_DOUBLING_NS)


def test_what_was_probed_holds_for_paths_that_only_waited_for_a_late_one() -> None:
    """L2: after the fall of one path, the next plan is as good as the measurement. If two paths of a host are late, or
    more, it is the host that has fallen."""
    late = [Sample("a", other, 2 * MB, 2 * SECOND, True) for other in "bc"]
    beside = Sample("a", "d", 2 * MB, SECOND, True)
    for samples, path_rate, host_rate in (([late[0], beside], 1, USED), ([*late, beside], 10, 4 * MB)):
        matrix: Matrix[str] = Matrix()
        for other in "bcd":
            probe(matrix, "a", **{other: 10})
        probe(matrix, "a", b=5, c=5, d=7)
        matrix.observe_attempt(samples, 0, trusted_ns=SECOND)
        assert [rate(matrix, "a", other) for other in "bcd"] == [path_rate * MB, 10 * MB, 10 * MB]
        assert host(matrix, "a") == host_rate


# --- Paths ------------------------------------------------------------------------------------------------------------


def test_the_first_sample_is_the_rate() -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe("a", "b", 10 * MB, SECOND // 2, 0)
    assert rate(matrix, "a", "b") == rate(matrix, "b", "a") == 20 * MB
    assert host(matrix, "a") is None


def test_the_slower_direction_counts() -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe("a", "b", 10 * MB, SECOND, 0)
    matrix.observe("b", "a", 3 * MB, SECOND, 0)
    assert rate(matrix, "a", "b") == 3 * MB


@pytest.mark.parametrize(
    ("now", "seen"), [(10, [10, 10, 10]), (50, [50, 50, 50]), (60, [88, 80, 74]), (160, [112.5, 123, 131])]
)
def test_large_falls_count_at_once_and_small_changes_by_and_by(now: int, seen: list[float]) -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe("a", "b", 100 * MB, SECOND, 0)
    for expected in seen:
        matrix.observe("a", "b", now * MB, SECOND, 0)
        assert rate(matrix, "a", "b") == pytest.approx(expected * MB, rel=0.01)


def test_what_was_not_limited_shows_a_lower_bound() -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe("a", "b", 10 * MB, SECOND, 0, is_limited=False)
    assert rate(matrix, "a", "b") is None, "it has never been the limit"
    matrix.observe("a", "b", 40 * MB, SECOND, 0)
    matrix.observe("a", "b", 10 * MB, SECOND, 0, is_limited=False)
    assert rate(matrix, "a", "b") == 40 * MB
    matrix.observe("a", "b", 90 * MB, SECOND, 0, is_limited=False)
    assert rate(matrix, "a", "b") == 60 * MB


def test_little_shows_nothing() -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe("a", "b", limits.RATE_SAMPLE_BYTES - 1, SECOND, 0)
    matrix.observe("a", "b", MB, 0, 0)
    assert network(matrix) == Network.unknown(4) and matrix.changes == 0


def test_a_few_round_trips_show_a_lower_bound() -> None:
    """TCP's window has not opened by then."""
    matrix: Matrix[str] = Matrix()
    matrix.observe_round_trip("a", "b", 100 * limits.MS)
    matrix.observe("a", "b", MB, 399 * limits.MS, 0)
    assert rate(matrix, "a", "b") is None
    matrix.observe("a", "b", MB, 400 * limits.MS, 0)
    assert rate(matrix, "a", "b") == 2_500_000


def test_paths_that_were_never_used_are_like_the_others() -> None:
    """They count as the median of the paths that have been the limit. Paths that have not count as unlimited."""
    matrix: Matrix[str] = Matrix()
    for other, mega_bytes in (("b", 10), ("c", 30), ("d", 90)):
        matrix.observe("a", other, mega_bytes * MB, SECOND, 0)
    matrix.observe("b", "c", MB, SECOND, 0, is_limited=False)
    found = matrix.network(PEERS, lambda one, other: {one, other} != {"c", "d"}, 0)
    assert [row[: i + 1] for i, row in enumerate(found.path_bytes_per_second)] == [
        (None,),
        (10 * MB, None),
        (30 * MB, None, None),
        (90 * MB, 30 * MB, 0, None),
    ]
    assert network(matrix, peers="bd") == Network.unknown(2), "nothing is known of the paths of these"
    assert network(matrix, peers="acd").path_bytes_per_second[1][2] == 90 * MB, "the upper one of two"


def test_what_is_not_renewed_counts_more_and_more() -> None:
    """So a slow path is tried again at some time."""
    matrix: Matrix[str] = Matrix()
    matrix.observe("a", "b", MB, SECOND, 0)
    hours = [rate(matrix, "a", "b", hour * limits.RATE_DOUBLING_NS) for hour in (0, 1, 2, 3)]
    assert hours == [MB, 2 * MB, 4 * MB, 8 * MB]
    matrix.observe("a", "b", MB, SECOND, 4 * limits.RATE_DOUBLING_NS)
    assert rate(matrix, "a", "b", 4 * limits.RATE_DOUBLING_NS) == MB
    matrix.observe("a", "b", 3 * MB, SECOND, 0, is_limited=False)
    assert (rate(matrix, "a", "b", 10**30) or 0) > 0


def test_round_trips_are_averaged() -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe_round_trip("a", "b", 100)
    matrix.observe_round_trip("b", "a", 20)
    assert network(matrix, peers="ab").round_trip_ns == ((None, 80), (80, None))


# --- Hosts ------------------------------------------------------------------------------------------------------------


def samples(one: str, mega_bytes_per_second: dict[str, int], *, is_limited: bool = True) -> list[Sample[str]]:
    """All samples have the same time."""
    return [Sample(one, other, each * MB, SECOND, is_limited) for other, each in mega_bytes_per_second.items()]


def with_paths_of_90() -> Matrix[str]:
    matrix: Matrix[str] = Matrix()
    for other in "bcd":
        matrix.observe("a", other, 90 * MB, SECOND, 0)
    return matrix


def test_paths_that_are_all_slower_at_once_show_their_host() -> None:
    matrix = with_paths_of_90()
    matrix.observe_attempt(samples("a", {"b": 30, "c": 40, "d": 30}), 0)
    assert host(matrix, "a") == 100 * MB
    assert [rate(matrix, "a", other) for other in "bcd"] == [90 * MB] * 3
    matrix.observe_attempt(samples("a", {"b": 70, "c": 80, "d": 75}), 0)
    assert host(matrix, "a") == 150 * MB, "it has risen, halfway"


def test_a_host_that_receives_is_shown_by_its_senders() -> None:
    matrix: Matrix[str] = Matrix()
    for sender in "bcd":
        matrix.observe(sender, "a", 90 * MB, SECOND, 0)
    matrix.observe_attempt([Sample(sender, "a", 20 * MB, SECOND, True) for sender in "bcd"], 0)
    assert host(matrix, "a") == 60 * MB and rate(matrix, "b", "a") == 90 * MB


def test_a_host_is_as_quick_as_its_slower_direction() -> None:
    matrix = with_paths_of_90()
    matrix.observe_attempt(samples("a", {"b": 30, "c": 40, "d": 30}), 0)
    for sender in "bcd":
        matrix.observe(sender, "a", 90 * MB, SECOND, 0)
    matrix.observe_attempt([Sample(sender, "a", 20 * MB, SECOND, True) for sender in "bcd"], 0)
    assert host(matrix, "a") == 60 * MB


def test_a_peer_that_is_forgotten_leaves_nothing() -> None:
    matrix = with_paths_of_90()
    matrix.observe_attempt(samples("a", {"b": 30, "c": 40, "d": 30}), 0)
    matrix.observe_round_trip("a", "b", 100)
    before = matrix.changes
    matrix.forget("b")
    assert rate(matrix, "a", "b") is None and rate(matrix, "a", "c") == 90 * MB and host(matrix, "a") == 100 * MB
    assert network(matrix, peers="ab").round_trip_ns[0][1] is None
    matrix.forget("a")
    assert rate(matrix, "a", "c") is None and host(matrix, "a") is None
    assert matrix.changes > before


def test_one_path_that_falls_is_not_its_host() -> None:
    matrix = with_paths_of_90()
    for _ in range(3):
        matrix.observe_attempt(samples("a", {"b": 90, "c": 9, "d": 90}), 0)
    assert host(matrix, "a") is None
    assert (rate(matrix, "a", "c") or 0) < 14 * MB and rate(matrix, "a", "b") == 90 * MB


def test_one_path_that_falls_more_than_its_host() -> None:
    matrix = with_paths_of_90()
    matrix.observe_attempt(samples("a", {"b": 45, "c": 9, "d": 45}), 0)
    assert host(matrix, "a") == 99 * MB
    assert rate(matrix, "a", "c") == 9 * MB and rate(matrix, "a", "b") == 90 * MB


def test_links_that_wait_for_others_show_neither() -> None:
    matrix = with_paths_of_90()
    matrix.observe_attempt(samples("a", {"b": 10, "c": 10, "d": 10}, is_limited=False), 0)
    assert host(matrix, "a") is None and rate(matrix, "a", "b") == 90 * MB


def test_where_paths_are_new_they_are_what_they_show() -> None:
    matrix: Matrix[str] = Matrix()
    matrix.observe_attempt(samples("a", {"b": 10, "c": 20}), 0)
    assert host(matrix, "a") is None and rate(matrix, "a", "b") == 10 * MB


# --- With plans -------------------------------------------------------------------------------------------------------


def test_a_wavering_network_keeps_its_plan() -> None:
    """Each path varies by a fifth, and their rates differ anyway."""
    rng, matrix, tensor = random.Random(5), Matrix[str](), Tensor(256 * MB)
    true_rates = {(one, other): rng.choice([10, 30, 100]) * MB for one in "abcdefgh" for other in "abcdefgh"}
    route: Route | None = None
    changes = 0
    for turn in range(40):
        observed = [
            Sample(one, other, int(each * rng.uniform(0.8, 1.2)), SECOND, True)
            for (one, other), each in true_rates.items()
            if one != other
        ]
        matrix.observe_attempt(observed, turn)
        before, route = route, plan(network(matrix, turn, "abcdefgh"), tensor, None, route)
        assert route is not None and route.algorithm is Algorithm.TREES
        changes += before is not None and before.trees != route.trees
    assert changes <= 2


def test_a_path_that_breaks_down_changes_the_plan() -> None:
    matrix, tensor = Matrix[str](), Tensor(256 * MB)

    def observed(slow: int) -> list[Sample[str]]:
        return [
            Sample(one, other, (slow if {one, other} == {"a", "b"} else 50) * MB, SECOND, True)
            for one in PEERS
            for other in PEERS
            if one != other
        ]

    matrix.observe_attempt(observed(50), 0)
    first = plan(network(matrix), tensor)
    assert first is not None and first.algorithm is Algorithm.DIRECT
    for _ in range(3):
        matrix.observe_attempt(observed(5), 0)
    second = plan(network(matrix), tensor, None, first)
    assert second is not None and second.algorithm is Algorithm.TREES
