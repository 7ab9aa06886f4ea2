"""The sources of each peer: properties of any answer. test_sync.py has the named cases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zpccl.protocol import sources
from zpccl.protocol.election import elect
from zpccl.protocol.membership import Peer
from zpccl.protocol.messages import FetchEntry, SyncSpec
from zpccl.protocol.sources import Sources, find_sources, left_out

from .harness import entry, sync_spec

NAMES = "abcde"
PAIRS = [one + other for one in NAMES for other in NAMES if one < other]


def offer(revision: int, free: str, contents: str, strategy: int = 0) -> SyncSpec:
    return sync_spec(revision, entry("free", free, free=True), entry("w", contents), strategy=strategy)


offers_strategy = st.lists(
    st.builds(
        offer,
        st.sampled_from([0, 1, 1]),
        st.sampled_from("xyz"),
        st.sampled_from("xy"),
        st.sampled_from([0, 0, 0, 1, 2]),
    ),
    min_size=2,
    max_size=5,
)


def peers_of(count: int) -> list[Peer]:
    return [Peer(name.encode(), 0, name, (), b"", None) for name in NAMES[:count]]


def find(peers: list[Peer], offers: dict[Peer, SyncSpec], down: frozenset[str]) -> Sources:
    election = elect(offers, None, frozenset())
    present = [peer for peer in peers if peer in election.fetch]

    def linked(peer: Peer, others: Sequence[Peer]) -> list[Peer]:
        return [other for other in others if "".join(sorted(peer.name + other.name)) not in down]

    return find_sources(present, election.holders, election.fetch, offers, linked)


def contents(peer: Peer, offers: dict[Peer, SyncSpec], found: Sources) -> dict[str, bytes]:
    """The contents that a peer has in the end."""
    own = {e.key: e.digest for e in offers[peer].entries}
    return own | {e.key: e.digest for e in found.fetch[peer]}


SATISFIED = [offer(0, "x", "x"), offer(1, "x", "y"), offer(0, "x", "x", 2), offer(1, "y", "x"), offer(0, "y", "y")]
"""With the values of d, e needs nothing more, and e is the only one that a reaches."""


@given(offers_strategy, st.frozensets(st.sampled_from(PAIRS)))
@example(SATISFIED, frozenset(("ab", "ad", "be")))
def test_whoever_is_named_has_what_is_fetched(made: list[SyncSpec], down: frozenset[str]) -> None:
    """S5, L2: a source has it and fetches nothing, a partial seed has it in the end. Both have a link to the peer."""
    peers = peers_of(len(made))
    offers = dict(zip(peers, made, strict=True))
    found = find(peers, offers, down)
    for peer, entries in found.fetch.items():
        wanted = {e.key: e.digest for e in entries}
        sources, partial_seeds = found.sources.get(peer, ()), found.partial_seeds.get(peer, ())
        assert not set(sources) & set(partial_seeds) and peer not in sources + partial_seeds
        for source in sources:
            assert found.fetch[source] == ()
        for other in sources + partial_seeds:
            assert "".join(sorted(peer.name + other.name)) not in down
            theirs = contents(other, offers, found)
            assert not wanted or {key: theirs[key] for key in wanted} == wanted
        for partial_seed in partial_seeds:
            assert found.fetch[partial_seed] and partial_seed not in found.without
    fetchers = {peer for peer, entries in found.fetch.items() if entries and peer not in found.without}
    done = [peer for peer, entries in found.fetch.items() if not entries]
    assert not left_out(fetchers, done, lambda peer: found.sources.get(peer, ()) + found.partial_seeds[peer])


@given(offers_strategy, st.frozensets(st.sampled_from(PAIRS)))
def test_nobody_is_without_who_reaches_a_holder(made: list[SyncSpec], down: frozenset[str]) -> None:
    """L2: it may reach the holder through any other peers."""
    peers = peers_of(len(made))
    offers = dict(zip(peers, made, strict=True))
    found, holders = find(peers, offers, down), elect(offers, None, frozenset()).holders
    reached, frontier = set(holders), list(holders)
    while frontier:
        one = frontier.pop()
        near = {p for p in found.fetch if p not in reached and "".join(sorted(p.name + one.name)) not in down}
        reached |= near
        frontier += [peer for peer in near if found.fetch[peer]]  # A peer that fetches nothing passes nothing on.
    assert not reached & set(found.without)


def test_who_can_finish() -> None:
    suppliers = {"a": "b", "b": "c", "c": "d", "e": "f", "f": "e"}.__getitem__
    assert left_out("abc", "d", suppliers) == set()
    assert left_out("", "", suppliers) == set()
    assert left_out("abc", "", suppliers) == set("abc")
    assert left_out("aef", "b", suppliers) == set("ef"), "two that wait for each other"


def test_many_peers_with_many_keys_are_compared_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: 64 peers with 4,000 keys that may differ kept the master busy for more than 5 s."""
    made: list[str] = []

    def fetch_entry(key: str, digest: bytes) -> FetchEntry:
        made.append(key)
        return FetchEntry(key, digest)

    keys = [f"k{number:02}" for number in range(50)]
    peers = [Peer(bytes([number]), 0, str(number), (), b"", None) for number in range(20)]
    offers = {
        peer: sync_spec(int(peer is peers[0]), *(entry(key, f"{key} of {peer.name}", free=True) for key in keys))
        for peer in peers
    }
    election = elect(offers, None, frozenset())
    monkeypatch.setattr(sources, "FetchEntry", fetch_entry)
    found = find_sources(peers, election.holders, election.fetch, offers, lambda _, others: list(others))
    assert all(found.sources[peer] == (peers[0],) and len(found.partial_seeds[peer]) == 18 for peer in peers[1:])
    assert not made
