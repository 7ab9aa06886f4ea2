"""Which rings the links allow, and which failures count against links."""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.protocol import paths
from zpccl.protocol.membership import Peer, PeerPhase, Registry
from zpccl.protocol.paths import Paths
from zpccl.protocol.rings import ring_edges

from .harness import peer, pids

NOW = 1_000


class Net:
    """Peers with one-letter names, all linked except for `down`."""

    def __init__(self, names: str, *down: str) -> None:
        self.registry = Registry()
        self.peers = {name: peer(name) for name in names}
        for one in self.peers.values():
            self.registry.add(one)
        self.registry.admit(self.peers.values())
        for name, one in self.peers.items():
            others = (n for n in names if n != name and {n, name} not in map(set, down))
            one.linked = self.registry.link_bits(pids(others))
        self.paths = Paths(self.registry)

    def of(self, names: str) -> list[Peer]:
        return [self.peers[name] for name in names]

    def order(self, names: str, now_ns: int = NOW) -> str | None:
        found = self.paths.order(self.of(names), now_ns)
        return "".join(one.name for one in found) if found is not None else None

    def blame(self, pair: str, cost_ns: int = 0, count: int = 8, now_ns: int = NOW) -> None:
        one, other = self.of(pair)
        self.paths.blame(one, other, cost_ns, count, now_ns)


def test_a_link_counts_only_while_both_ends_say_so() -> None:
    net = Net("abcd")
    net.peers["a"].linked = net.registry.link_bits(pids("cd"))
    assert net.order("abcd") == "acbd"


def test_the_order_is_looked_for_again_when_links_change() -> None:
    net = Net("abcd", "ab", "ac")
    assert net.order("abcd") is None
    net.peers["c"].linked |= net.registry.link_bits(pids("a"))
    net.peers["a"].linked |= net.registry.link_bits(pids("c"))
    assert net.order("abcd") == "acbd"
    assert net.order("abd") is None


@pytest.mark.parametrize(
    "down, joiner_links, can_join, makes_ring",
    [
        ((), "abc", True, True),
        ((), "ab", True, True),
        ((), "a", True, False),
        ((), "", False, False),
        (("ab",), "ab", True, True),  # The joiner closes the gap: there was no ring without it.
        (("ab",), "bc", True, False),
    ],
)
def test_can_join(
    monkeypatch: pytest.MonkeyPatch, down: tuple[str, ...], joiner_links: str, can_join: bool, makes_ring: bool
) -> None:
    """L2: one link is enough. In a large group only if there is a ring."""
    missing = tuple(f"j{name}" for name in "abc" if name not in joiner_links)
    net = Net("abcj", *down, *missing)
    assert net.paths.can_join(net.of("abc"), net.peers["j"]) is can_join
    monkeypatch.setattr(limits, "DIRECT_PEERS_MAX", 3)
    assert net.paths.can_join(net.of("abc"), net.peers["j"]) is makes_ring


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("links", ["", "a", "ac", "abcd"])
def test_what_a_joiner_lacks(monkeypatch: pytest.MonkeyPatch, links: str, is_large: bool) -> None:
    """S6: a master of a thousand peers does not search rings for new joiners at each report of a link."""
    if is_large:
        monkeypatch.setattr(limits, "DIRECT_PEERS_MAX", 2)
    net = Net("abcdj", *(f"j{name}" for name in "abcd" if name not in links))
    registry, joiner = net.registry, net.peers["j"]
    registry.remove(joiner)
    joiner.phase = PeerPhase.READY
    registry.add(joiner)
    for one in net.of("abcd"):
        one.linked |= registry.link_bits(pids("j")) if one.name in links else 0
    if len(links) < 2:
        monkeypatch.setattr(paths, "find_order", None)
    expected = not links or (is_large and len(links) < 2)
    assert net.paths.lacks_links(joiner) is expected
    if len(links) >= 2:
        assert bool(net.paths.missing(joiner)) is expected


@pytest.mark.parametrize("links", ["", "a"])
def test_links_that_only_a_joiner_claims_cost_no_search(monkeypatch: pytest.MonkeyPatch, links: str) -> None:
    """S6: it could send such reports without end, and a search in a large group takes 100 ms and more."""
    monkeypatch.setattr(limits, "DIRECT_PEERS_MAX", 4)
    monkeypatch.setattr(paths, "find_order", None)
    net = Net("abcdj", *(f"j{name}" for name in "abcd" if name not in links))
    registry, joiner = net.registry, net.peers["j"]
    registry.remove(joiner)
    joiner.phase, joiner.linked = PeerPhase.READY, registry.link_bits(pids("abcd"))
    registry.add(joiner)
    for one in net.of(links):
        one.linked |= registry.link_bits(pids("j"))
    assert net.paths.lacks_links(joiner)


@pytest.mark.parametrize("members", ["", "a"])
def test_can_join_few(members: str) -> None:
    net = Net("aj")
    assert net.paths.can_join(net.of(members), net.peers["j"])


def test_sources_are_linked_and_the_blameless_come_first() -> None:
    net = Net("abcd", "ad")
    net.blame("bd")
    assert net.paths.sources(net.peers["d"], net.of("abc"), NOW) == net.of("cb")
    assert net.paths.sources(net.peers["d"], net.of("abc"), NOW + limits.LINK_SUSPECT_NS) == net.of("bc")


@pytest.mark.parametrize(
    "down, surplus",
    [
        ([], []),
        (["ab"], []),
        (["ab", "ac", "ad"], []),
        (["ab", "ac", "ad", "ae"], [("a", "bcde")]),
        (["ab", "ac", "ad", "bc", "bd", "be"], [("b", "acde")]),
        (["de", "ce", "be", "cd", "bd", "ad"], [("d", "abce")]),
        (["ac", "ad", "ae", "bc", "bd", "be"], [("a", "cde"), ("b", "cde")]),
        (
            ["ac", "ad", "ae", "bc", "bd", "be", "ce", "de"],
            [("c", "ab"), ("d", "ab"), ("e", "ab")],
        ),  # Of two alike, that of the first member.
        (
            ["ab", "ac", "ad", "ae", "bc", "bd", "be", "cd", "ce", "de"],
            [("b", "a"), ("c", "a"), ("d", "a"), ("e", "a")],
        ),
    ],
)
def test_surplus(down: list[str], surplus: list[tuple[str, str]]) -> None:
    """L2: a peer that links connect to the others stays, with or without a ring."""
    net = Net("abcde", *down)
    found = net.paths.surplus(net.of("abcde"), NOW)
    assert [(one.name, "".join(other.name for other in others)) for one, others in found] == surplus


@pytest.mark.parametrize(
    "down, surplus",
    [
        ([], []),
        (["ab"], []),
        (["ab", "ac", "ad"], [("a", "bcd")]),
        (["ab", "ac", "ad", "bc", "bd", "be"], [("b", "acde"), ("a", "cd")]),
        (["ac", "ad", "ae", "bc", "bd", "be"], [("a", "cde"), ("b", "cde")]),
    ],
)
def test_surplus_of_a_large_group(
    monkeypatch: pytest.MonkeyPatch, down: list[str], surplus: list[tuple[str, str]]
) -> None:
    """L2: a large group has no trees, so a peer that fits in no ring is removed."""
    monkeypatch.setattr(limits, "DIRECT_PEERS_MAX", 2)
    net = Net("abcde", *down)
    found = net.paths.surplus(net.of("abcde"), NOW)
    assert [(one.name, "".join(other.name for other in others)) for one, others in found] == surplus


def test_a_link_that_goes_on_failing_makes_surplus() -> None:
    net = Net("abc", "ac")
    net.blame("bc", limits.LINK_FAILING_MAX_NS - 1)
    assert net.paths.surplus(net.of("abc"), NOW) == []
    net.blame("bc", 1, now_ns=NOW + 1)
    assert net.paths.surplus(net.of("abc"), NOW + 1) == [(net.peers["c"], net.of("ab"))]


def test_attempts_that_fail_side_by_side_count_once() -> None:
    """L2: the network of all was away and broke everything that was under way; the links are open again."""
    net = Net("ab")
    for later_ns in range(5):
        net.blame("ab", limits.LINK_FAILING_MAX_NS // 2, now_ns=NOW + later_ns)
    assert net.paths.surplus(net.of("ab"), NOW + 5) == []


def test_groups_that_are_gone_are_forgotten() -> None:
    """B1: peers come with one group after the other, and some of their links are down."""
    net = Net("a")
    for group in range(1, 9):
        three = [peer(name, group) for name in "xyz"]
        for one in three:
            net.registry.add(one)
        net.registry.admit(three)
        assert net.paths.order(three, NOW) is None
        for one in three:
            net.registry.remove(one)
    assert len(net.paths._known) == 1


def test_time_that_a_link_costs_adds_up_until_it_is_trusted() -> None:
    net = Net("abc")
    half_ns = limits.LINK_FAILING_MAX_NS // 2
    net.blame("ab", half_ns)
    net.blame("ab", half_ns, now_ns=NOW + half_ns)
    assert net.order("abc", NOW + half_ns) is None
    net.paths.trust(ring_edges(net.of("abc")), 7)
    assert net.order("abc", NOW + half_ns) is None
    net.paths.trust(ring_edges(net.of("abc")), 8)
    assert net.order("abc", NOW + half_ns) == "abc"
    net.blame("ab", half_ns, now_ns=NOW + 2 * half_ns)
    assert net.order("abc", NOW + 2 * half_ns) == "abc"


def test_only_the_links_of_the_ring_are_trusted() -> None:
    net = Net("abcd")
    net.blame("ab")
    net.paths.trust(ring_edges(net.of("acbd")), 8)
    assert net.order("abcd") == "acbd"


def test_many_suspects_are_no_reason_to_give_up() -> None:
    """There are more than the search tries one by one."""
    net = Net("abcdef")
    for one in "abcdef":
        for other in "abcdef":
            if one < other:
                net.blame(one + other, now_ns=NOW + ord(one) + ord(other))
    assert net.order("abcdef", NOW + 1000) is not None


def doubt(net: Net, names: str, now_ns: int) -> None:
    net.paths.doubt(ring_edges(net.of(names)), now_ns, 8, now_ns)


@pytest.mark.parametrize("names", ["abcde", "abcdef", "abcdefghijklm"])
def test_links_of_a_doubtful_ring_are_avoided(names: str) -> None:
    net = Net(names)
    doubt(net, names, NOW)
    assert net.order(names) == names
    doubt(net, names, NOW + 1)
    order = net.order(names, NOW + 1)
    assert order is not None
    pairs = {frozenset(pair) for pair in zip(names, names[1:] + names[0], strict=True)}
    assert pairs.isdisjoint(frozenset(pair) for pair in zip(order, order[1:] + order[0], strict=True))
    assert net.order(names, NOW + 1 + limits.LINK_SUSPECT_NS) == names


def test_a_link_that_was_named_is_worse_than_any_doubt() -> None:
    net = Net("abcd")
    for step in range(5):
        for names in ("abcd", "acbd"):
            doubt(net, names, NOW + step)
    net.blame("ac", now_ns=NOW)
    assert net.order("abcd", NOW + 4) == "abcd"


def test_doubts_make_no_surplus() -> None:
    net = Net("abc")
    for step in range(100):
        doubt(net, "abc", NOW + step)
    assert net.order("abc", NOW + 100) == "abc"
    assert net.paths.surplus(net.of("abc"), NOW + 100) == []


def test_a_doubtful_source_is_as_good_as_others() -> None:
    net = Net("abcd")
    doubt(net, "abcd", NOW)
    assert net.paths.sources(net.peers["d"], net.of("abc"), NOW) == net.of("abc")
