"""How optimize_topology measures paths."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_mesh import Hosts, Mesh, peer_id, until

from zpccl import limits
from zpccl.engine.engine import LinkFlow
from zpccl.errors import CollectiveMismatch, PCCLError, PeerLost, TooFewPeers
from zpccl.measuring import Prober, _samples, measure_paths, rounds
from zpccl.protocol.messages import PathSample

SIZES = (2, 3, 4, 5, 8, 13, 63, 64)


def peers_of(count: int) -> list[bytes]:
    return [peer_id(rank) for rank in range(count)]


# --- Rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", SIZES)
def test_first_all_pairs_meet_alone(count: int) -> None:
    """Each pair once each way, as many pairs as possible at a time. A peer that sends receives nothing meanwhile."""
    found = [targets for targets in rounds(peers_of(count), ()) if all(len(to) == 1 for to in targets.values())]
    assert len(found) == 2 * (count - 1 + count % 2)
    met = [(one, other) for targets in found for one, (other,) in targets.items()]
    assert sorted(met) == sorted(itertools.permutations(peers_of(count), 2))
    for targets in found:
        assert len(targets) == count // 2 and not targets.keys() & {other for (other,) in targets.values()}


@pytest.mark.parametrize("count", SIZES)
def test_then_each_host_sends_to_all_others(count: int) -> None:
    """In a large group some at a time, as this takes long. With two peers it would show nothing new."""
    found = [targets for targets in rounds(peers_of(count), ()) if any(len(to) > 1 for to in targets.values())]
    senders = Counter(one for targets in found for one in targets)
    assert senders == (Counter(peers_of(count)) if count > 2 else Counter())
    assert all({one, *to} == set(peers_of(count)) for targets in found for one, to in targets.items())
    assert len(found) <= limits.PROBE_HOST_ROUNDS_MAX
    assert all(len(targets) == 1 for targets in found) or count > limits.PROBE_HOST_ROUNDS_MAX


@pytest.mark.parametrize("count", SIZES[1:])
@pytest.mark.parametrize("new", [1, 2])
def test_newcomers_are_measured_alone(count: int, new: int) -> None:
    """With all others, which do not repeat what they know."""
    peers = peers_of(count)
    known, newcomers = peers[:-new], peers[-new:]
    found = list(rounds(peers, known))
    met = [(one, other) for targets in found for one, to in targets.items() if len(to) == 1 for other in to]
    assert sorted(met) == sorted(
        (one, other) for one, other in itertools.permutations(peers, 2) if not {one, other} <= set(known)
    )
    hosts = newcomers if len(known) > 2 else peers
    assert sorted(one for targets in found for one, to in targets.items() if len(to) > 1) == hosts
    assert len(found) <= 2 * count + len(hosts)
    assert list(rounds(peers, peers)) == [], "nothing is new"


def test_large_groups_are_not_measured() -> None:
    """All meet once nonetheless: a member that was just lost may have made the group small for others."""
    assert list(rounds(peers_of(limits.DIRECT_PEERS_MAX + 1), ())) == []
    met: list[int] = []

    def meet(round_count: int, samples: tuple[PathSample, ...]) -> None:
        met.append(round_count)

    measure_paths(peers_of(limits.DIRECT_PEERS_MAX + 1), (), peer_id(0), lambda to: (), meet)
    assert met == [0]


def test_measurements_are_told_before_the_next_round() -> None:
    """And the last ones before the call returns."""
    told: list[tuple[PathSample, ...]] = []
    probed: list[Sequence[bytes]] = []

    def probe(to: Sequence[bytes]) -> tuple[PathSample, ...]:
        assert len(told) == len(probed) + 1
        probed.append(to)
        return tuple(PathSample(peer, len(probed), 1) for peer in to)

    def meet(round_count: int, samples: tuple[PathSample, ...]) -> None:
        assert round_count == 9, "who counts other members, and so other rounds, makes another call"
        told.append(samples)

    a, b, c = peers_of(3)
    measure_paths([a, b, c], (), b, probe, meet)
    assert Counter(map(len, probed)) == {0: 6, 1: 2, 2: 1}, "six paths, and three hosts"
    assert told == [()] + [tuple(PathSample(peer, turn, 1) for peer in to) for turn, to in enumerate(probed, 1)]


@pytest.mark.parametrize("error", [PeerLost, TooFewPeers, CollectiveMismatch])
def test_the_loss_of_a_peer_ends_it(error: type[PCCLError]) -> None:
    """S1: for all others, since all get the same outcome."""
    probed: list[Sequence[bytes]] = []

    def meet(round_count: int, samples: tuple[PathSample, ...]) -> None:
        if len(probed) == 2:
            raise error("lost")

    def probe(to: Sequence[bytes]) -> tuple[PathSample, ...]:
        probed.append(to)
        return ()

    measure_paths(peers_of(3), (), peer_id(0), probe, meet)
    assert len(probed) == 2


# --- Probes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three engines that treat each other as other hosts."""
    with contextlib.closing(Hosts(3)) as mesh:
        yield mesh


def test_each_path_has_its_rate(hosts: Hosts) -> None:
    """What comes is dropped, and nothing is left in a queue."""
    begin = time.monotonic()
    samples = Prober(hosts.engines[0], 0).probe(peers_of(3)[1:])
    took = time.monotonic() - begin
    assert [sample.peer_id for sample in samples] == peers_of(3)[1:]
    for sample in samples:
        assert sample.is_probe and sample.is_limited
        assert 0 < sample.busy_us < took * 1e6
        assert sample.sent_bytes > limits.PROBE_MESSAGE_BYTES and sample.round_trip_us > 0
    assert [engine.poll() for engine in hosts.engines] == [[], [], []]
    assert Prober(hosts.engines[0], 0).probe(peers_of(3)[1:]), "the channel is free again"


@pytest.mark.parametrize("chooses_senders", [False, True])
def test_a_number_of_connections_that_the_user_sets_is_used_as_it_is(chooses_senders: bool) -> None:
    """Nothing would use the others again. A number that is chosen begins small, and grows with the rate."""
    with contextlib.closing(Hosts(2, connections=8)) as mesh:
        engine = mesh.engines[0]
        used: list[int] = []
        set_senders = engine.set_senders

        def note(peer: bytes, senders: int) -> None:
            used.append(senders)
            set_senders(peer, senders)

        engine.set_senders = note  # type: ignore[method-assign]
        assert Prober(engine, 0, chooses_senders=chooses_senders).probe([peer_id(1)])
        assert used[:1] == ([limits.LINK_CONNECTIONS_DEFAULT] if chooses_senders else [])
        assert chooses_senders or engine.link_state(peer_id(1)).senders >= 8


def flow(link_id: int, *acked_bytes: int) -> LinkFlow:
    """What TCP counts for a link that always has bytes to send."""
    count = len(acked_bytes)
    return LinkFlow(link_id, 20_000, 0, list(acked_bytes), [0] * count, [True] * count)


def test_a_rate_does_not_hang_on_the_first_and_last_count() -> None:
    """L2: acknowledgements come in bursts. One of 10 % of the bytes, at the end, moves the rate by 3 %."""
    a, b = peers_of(2)
    taken = [(turn * limits.PROBE_SAMPLE_NS, {a: flow(1, turn * 6000, turn * 4000)}) for turn in range(21)]
    (even,) = _samples([a, b], taken)
    assert even == PathSample(a, 200_000, 1_000_000, 20_000, True, True)
    taken[-1] = (limits.SECOND, {a: flow(1, 132_000, 88_000)})
    (burst,) = _samples([a, b], taken)
    assert 200_000 < burst.sent_bytes < 206_000 and burst.busy_us == even.busy_us


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_connection_that_is_lost_makes_no_path_slow(is_replaced: bool) -> None:
    """L2: the rate holds for hours, and what attempts show does not raise it. One of two connections is lost, and sent
    half of the bytes until then; it is replaced at once, or the other one sends the rest as fast as both did."""
    a = peer_id(0)
    taken = []
    for turn in range(21):
        late = max(0, turn - 10)
        one = turn * 5000 if turn < 10 else late * 5000 * is_replaced
        other = turn * 5000 + (0 if is_replaced else late * 5000)
        taken.append((turn * limits.PROBE_SAMPLE_NS, {a: flow(1, 10**9 * (turn < 10) + one, other)}))
    (sample,) = _samples([a], taken)
    assert 190_000 < sample.sent_bytes < 210_000


def test_a_link_that_is_replaced_shows_nothing() -> None:
    a, b = peers_of(2)
    taken = [(turn * limits.PROBE_SAMPLE_NS, {a: flow(turn // 5, turn * 6000)}) for turn in range(10)]
    assert list(_samples([a, b], taken)) == [] and list(_samples([a, b], taken[:1])) == []


def test_both_ends_send_at_the_same_time(hosts: Hosts) -> None:
    """Each on the channel of its rank, which the other has not opened."""

    def probe(rank: int) -> tuple[PathSample, ...]:
        return Prober(hosts.engines[rank], rank).probe([peer_id(1 - rank)])

    with ThreadPoolExecutor(2) as executor:
        found = [samples[0].peer_id for samples in executor.map(probe, (0, 1))]
    assert found == [peer_id(1), peer_id(0)]


def test_links_that_are_lost_show_nothing(hosts: Hosts) -> None:
    """L2: and hold nobody up."""
    one, other = peers_of(3)[1:]
    thread = threading.Timer(limits.PROBE_SAMPLE_NS / limits.SECOND, hosts.engines[2].close)
    prober = Prober(hosts.engines[0], 0)
    thread.start()
    assert [sample.peer_id for sample in prober.probe([one, other])] in ([one], [one, other])
    thread.join()
    until(lambda: not prober.probe([other]))
    assert prober.probe([]) == ()
    hosts.engines[0].close()
    assert prober.probe([one]) == ()


def test_links_within_a_host_are_no_limit() -> None:
    with contextlib.closing(Mesh(2)) as mesh:
        begin = time.monotonic()
        assert Prober(mesh.engines[0], 0).probe([peer_id(1)]) == (PathSample(peer_id(1), 0, 1, is_probe=True),)
        assert time.monotonic() - begin < limits.PROBE_NS / limits.SECOND
