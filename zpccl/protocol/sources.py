"""Chooses the peers from which each fetcher of a sync gets the elected state, by what each peer has and by the links.

Sources (seeds) have the whole state now. They are the holders or, for a fetcher without a link to a holder, other peers
with the elected contents. They may have other values of keys that allow inequality; the fetcher then gets those.
Partial seeds fetch the same as the fetcher, and serve what they have verified. A fetcher without a link to any source
fetches from partial seeds that reach one, directly or through other partial seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from zpccl.protocol.membership import Peer
from zpccl.protocol.messages import FetchEntry, SyncSpec

WhoT = TypeVar("WhoT", bound=Hashable)
Entries: TypeAlias = tuple[FetchEntry, ...]
Linked: TypeAlias = Callable[[Peer, Sequence[Peer]], list[Peer]]
"""Selects from some peers those to which one peer has a link, the best first."""


@dataclass(slots=True)
class Sources:
    """What each peer fetches, and from which peers.

    Attributes:
        sources: by fetcher, the peers that have all of it now, the best first.
        partial_seeds: by fetcher, the peers that fetch the same.
        fetch: by peer, what it must fetch, with the values of its sources.
        without: fetchers that no source reaches, even through partial seeds.
    """

    sources: dict[Peer, tuple[Peer, ...]] = field(default_factory=dict)
    partial_seeds: dict[Peer, tuple[Peer, ...]] = field(default_factory=dict)
    fetch: dict[Peer, Entries] = field(default_factory=dict)
    without: list[Peer] = field(default_factory=list)


def find_sources(
    present: Sequence[Peer],
    holders: Sequence[Peer],
    fetch: dict[Peer, Entries],
    offers: dict[Peer, SyncSpec],
    linked: Linked,
) -> Sources:
    """Finds sources and partial seeds for all fetchers.

    Args:
        present: all participants.
        holders: the participants that hold the elected state.
        fetch: what each must fetch, with the values of the holders.
        offers: what each has.
        linked: which peers have links.
    """
    free = _FreeKeys(offers)
    found = Sources(fetch=dict(fetch), without=[peer for peer in present if fetch[peer]])
    others = [peer for peer in present if not fetch[peer] and peer not in holders]
    levels = [list(holders), others]
    for level in levels:
        reached: list[Peer] = []
        for peer in found.without:
            near = linked(peer, level)
            same, entries = free.agreeing(peer, near, found.fetch)
            if same:
                found.fetch[peer] = entries
                reached.append(peer)
                # With the values of its own source a peer may need nothing any more: then it has everything now.
                complete = tuple(source for source in same if not found.fetch[source])
                if complete:
                    found.sources[peer] = complete
        found.without = [peer for peer in found.without if peer not in reached]
        if reached and found.without:
            levels.append(reached)
    fetchers = [peer for peer in present if found.fetch[peer] and peer not in found.without]
    for peer in fetchers:
        near = linked(peer, [other for other in fetchers if other is not peer])
        found.partial_seeds[peer] = tuple(other for other in near if free.have_same(other, peer, found.fetch))
    return found


def left_out(
    fetchers: Collection[WhoT], done: Collection[WhoT], suppliers: Callable[[WhoT], Iterable[WhoT]]
) -> set[WhoT]:
    """The fetchers that cannot get everything from peers that are done, neither directly nor through other fetchers.

    Args:
        fetchers: peers that are not done.
        done: peers that have everything.
        suppliers: the peers from which a fetcher may fetch.
    """
    supplied, left = set(done), set(fetchers)
    while left:
        reached = {peer for peer in left if not supplied.isdisjoint(suppliers(peer))}
        if not reached:
            break
        supplied |= reached
        left -= reached
    return left


class _FreeKeys:
    """The keys that allow inequality: peers with the elected contents may have different values of them.

    Many pairs of peers are compared, each with many keys: so most comparisons end at the first key, or need no key.
    """

    def __init__(self, offers: dict[Peer, SyncSpec]) -> None:
        self._own = {
            peer: {entry.key: entry.digest for entry in offer.entries if entry.allow_content_inequality}
            for peer, offer in offers.items()
        }
        self._held: dict[Peer, dict[str, bytes]] = {}
        self._alike: dict[frozenset[tuple[str, bytes]], dict[str, bytes]] = {}

    def agreeing(self, peer: Peer, near: Sequence[Peer], fetch: dict[Peer, Entries]) -> tuple[list[Peer], Entries]:
        """Sources with equal values, and what the peer fetches from them: the elected values if a source has these."""
        same = [source for source in near if self._has(source, peer, fetch[peer], fetch)]
        if same or not near:
            return same, fetch[peer]
        wanted = self._entries_from(near[0], peer, fetch)
        return [source for source in near if self._entries_from(source, peer, fetch) == wanted], wanted

    def have_same(self, other: Peer, peer: Peer, fetch: dict[Peer, Entries]) -> bool:
        """True if `other` will hold, after its own fetch, exactly what a peer must fetch."""
        return self._held_by(other, fetch) is self._held_by(peer, fetch) or self._has(other, peer, fetch[peer], fetch)

    def _held_by(self, source: Peer, fetch: dict[Peer, Entries]) -> dict[str, bytes]:
        """The values that a source has after its own fetch, which is final. Equal values are one object."""
        held = self._held.get(source)
        if held is None:
            own = self._own[source]
            held = own | {entry.key: entry.digest for entry in fetch[source] if entry.key in own}
            held = self._held[source] = self._alike.setdefault(frozenset(held.items()), held)
        return held

    def _has(self, source: Peer, peer: Peer, wanted: Entries, fetch: dict[Peer, Entries]) -> bool:
        """True if a source has, after its own fetch, the values that a peer wants."""
        own = self._own[peer]
        if not own:
            return True
        held = self._held_by(source, fetch)
        return all(held[entry.key] == entry.digest for entry in wanted if entry.key in own)

    def _entries_from(self, source: Peer, peer: Peer, fetch: dict[Peer, Entries]) -> Entries:
        """What a peer must fetch, with the values that the source has now or after its own fetch."""
        own, held = self._own[peer], self._held_by(source, fetch)
        entries = (FetchEntry(entry.key, held[entry.key]) if entry.key in own else entry for entry in fetch[peer])
        return tuple(entry for entry in entries if entry.key not in own or entry.digest != own[entry.key])
