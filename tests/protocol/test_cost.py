"""The model of the time of an all-reduce."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol.cost import Speeds, choose, estimate_ns, frame_bytes, hop_count, sent_bytes
from zpccl.types import Algorithm

RING, DIRECT, ONE_SHOT = Algorithm.RING, Algorithm.DIRECT, Algorithm.ONE_SHOT
FAST_RING = Speeds(100_000, 2_000_000_000, 1_000_000_000)

speeds = st.builds(
    Speeds,
    st.none() | st.integers(0, 10 * limits.SECOND),
    st.none() | st.integers(1, 10**12),
    st.none() | st.integers(1, 10**12),
)
sizes = st.integers(0, 2**44)
worlds = st.integers(3, limits.DIRECT_PEERS_MAX)


def test_hops_and_bytes() -> None:
    assert [hop_count(RING, peers) for peers in (2, 3, 8)] == [2, 4, 14]
    assert [hop_count(DIRECT, peers) for peers in (2, 3, 8)] == [2, 2, 2]
    assert [hop_count(ONE_SHOT, peers) for peers in (2, 3, 8)] == [1, 1, 1]
    assert [sent_bytes(RING, peers, 1000) for peers in (2, 4)] == [1000, 1500]
    assert [sent_bytes(ONE_SHOT, peers, 1000) for peers in (2, 4)] == [1000, 3000]


def test_the_estimate_is_hops_and_bytes() -> None:
    assert estimate_ns(RING, 4, 4_000_000_000, FAST_RING) == 6 * 100_000 + 3 * limits.SECOND
    assert estimate_ns(DIRECT, 4, 4_000_000_000, FAST_RING) == 2 * 100_000 + 6 * limits.SECOND


def test_two_peers_use_a_ring_for_what_is_not_small() -> None:
    assert choose(2, 4096, True, Speeds(1, 1, 10**12)) is RING
    assert choose(2, limits.ONE_SHOT_BYTES_MAX + 1, False, Speeds(1, 1, 10**12)) is RING


@pytest.mark.parametrize("peers", [2, 3, 16])
def test_small_tensors_take_one_hop(peers: int) -> None:
    """Unless the rate is so low that the bytes take longer than the second hop. What is quantised is not small."""
    most = limits.ONE_SHOT_BYTES_MAX // (peers - 1)
    assert choose(peers, most, False, Speeds()) is ONE_SHOT
    assert choose(peers, most + 1, False, Speeds()) is not ONE_SHOT
    assert choose(peers, most, True, Speeds()) is not ONE_SHOT
    assert choose(16, limits.ONE_SHOT_BYTES_MAX // 15, False, Speeds(limits.MS, 1_000_000, 1_000_000)) is DIRECT


@given(worlds, sizes)
def test_where_nothing_is_known(peers: int, wire_bytes: int) -> None:
    """Small tensors, and what is quantised, are exchanged directly, large ones go around the ring."""
    assert choose(peers, limits.MIB, False, Speeds()) is DIRECT
    assert choose(peers, wire_bytes, True, Speeds()) is DIRECT
    assert choose(peers, 2**40, False, Speeds()) is RING


@given(worlds, sizes, sizes, st.booleans(), speeds)
def test_the_larger_the_tensor_the_more_the_rates_count(
    peers: int, one: int, other: int, is_quantised: bool, known: Speeds
) -> None:
    """From some size on the choice is the same."""
    small, large = sorted((one, other))
    if choose(peers, small, is_quantised, known) is RING:
        assert choose(peers, large, is_quantised, known) is RING


@given(worlds, sizes, speeds)
def test_what_is_quantised_is_exchanged_directly_where_the_rest_is(peers: int, wire_bytes: int, known: Speeds) -> None:
    if choose(peers, wire_bytes, False, known) is DIRECT:
        assert choose(peers, wire_bytes, True, known) is DIRECT


def test_fewer_roundings_are_worth_half_of_the_time() -> None:
    large = 2**40
    assert choose(4, large, False, Speeds(1, 1000, 700)) is RING
    assert choose(4, large, True, Speeds(1, 1000, 700)) is DIRECT
    assert choose(4, large, True, Speeds(1, 1000, 600)) is RING


def test_small_tensors_show_the_latency() -> None:
    learnt = Speeds().learn(RING, 4, limits.SMALL_TENSOR_BYTES, 6_000_000)
    assert learnt == Speeds(1_000_000, None, None)
    assert learnt.learn(DIRECT, 4, 8, 10_000_000) == Speeds(2_000_000, None, None)  # A quarter of 5 ms.


@pytest.mark.parametrize("size", [limits.SMALL_TENSOR_BYTES + 1, limits.SPEED_TENSOR_BYTES - 1])
def test_those_between_show_nothing(size: int) -> None:
    assert Speeds().learn(DIRECT, 4, size, 10**9) == Speeds()


def test_large_ones_show_the_rate_of_their_algorithm() -> None:
    known = Speeds(1_000_000)
    assert known.learn(DIRECT, 4, 400_000_000, limits.SECOND + 2_000_000) == Speeds(1_000_000, None, 600_000_000)
    assert known.learn(RING, 4, 400_000_000, limits.SECOND + 6_000_000) == Speeds(1_000_000, 600_000_000, None)


def test_a_latency_that_was_disturbed_does_not_make_the_rate_boundless() -> None:
    assert Speeds(limits.SECOND).learn(DIRECT, 4, 400_000_000, limits.SECOND).rate(DIRECT) == 1_200_000_000


@given(speeds, st.sampled_from([RING, DIRECT]), worlds, sizes, st.integers(0, 2**60))
def test_whatever_is_reported_there_is_a_choice(
    known: Speeds, algorithm: Algorithm, peers: int, wire_bytes: int, duration_ns: int
) -> None:
    """Peers may say anything."""
    learnt = known.learn(algorithm, peers, wire_bytes, duration_ns)
    assert learnt.rate(algorithm) > 0 and learnt.hop_ns >= 0
    assert choose(peers, wire_bytes, False, learnt) in (RING, DIRECT, ONE_SHOT)
    assert learnt.learn(algorithm, peers, wire_bytes, duration_ns).rate(algorithm) > 0


@pytest.mark.parametrize(
    ("mega_bytes_per_second", "kib"), [(1000, 512), (263, 512), (262, 256), (62, 64), (66, 128), (1, 64)]
)
def test_frames_are_what_is_sent_in_a_short_time(mega_bytes_per_second: int, kib: int) -> None:
    known = Speeds(ring_bytes_per_second=mega_bytes_per_second * 10**6)
    assert frame_bytes(RING, known) == kib * limits.KIB
    assert frame_bytes(DIRECT, known) == limits.FRAME_BYTES_DEFAULT, "nothing is known of it"


@given(st.sampled_from([RING, DIRECT]), speeds)
def test_frames_have_bounds(algorithm: Algorithm, known: Speeds) -> None:
    size = frame_bytes(algorithm, known)
    assert limits.SLOW_FRAME_BYTES <= size <= limits.FRAME_BYTES_DEFAULT and size.bit_count() == 1
