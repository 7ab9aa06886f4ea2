"""Who can give a peer the shared state that was elected, by what each has and by the links between them.

Sources have all of it now: holders, else others with the elected contents, which may differ from the holders' in keys
that allow it; who fetches from those gets their values of these keys. Fellows fetch the same: whatever one of them has
checked it can pass on. Who has no link to any source fetches from fellows that have one, or from their fellows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from zpccl.protocol.membership import Peer
from zpccl.protocol.messages import FetchEntry, SyncSpec

WhoT = TypeVar("WhoT", bound=Hashable)
Entries: TypeAlias = tuple[FetchEntry, ...]
Linked: TypeAlias = Callable[[Peer, Sequence[Peer]], list[Peer]]
"""Those of some peers to whom one has a link, the best first."""


@dataclass(slots=True)
class Sources:
    """What each fetches, and from whom.

    Attributes:
        sources: who has all of it now, the best first.
        fellows: who fetches the same.
        fetch: what it must fetch, with the values of those.
        without: those who can fetch from nobody.
    """

    sources: dict[Peer, tuple[Peer, ...]] = field(default_factory=dict)
    fellows: dict[Peer, tuple[Peer, ...]] = field(default_factory=dict)
    fetch: dict[Peer, Entries] = field(default_factory=dict)
    without: list[Peer] = field(default_factory=list)


def find_sources(
    present: Sequence[Peer],
    holders: Sequence[Peer],
    fetch: dict[Peer, Entries],
    offers: dict[Peer, SyncSpec],
    linked: Linked,
) -> Sources:
    """Finds them for all who fetch.

    Args:
        present: all who take part.
        holders: those of them that were elected.
        fetch: what each must fetch, with the values of the holders.
        offers: what each has.
        linked: who reaches whom.
    """
    free = _FreeKeys(offers)
    found = Sources(fetch=dict(fetch), without=[peer for peer in present if fetch[peer]])
    others = [peer for peer in present if not fetch[peer] and peer not in holders]
    levels = [list(holders), others]
    for depth, level in enumerate(levels):
        reached: list[Peer] = []
        for peer in found.without:
            near = linked(peer, level)
            same, entries = free.agreeing(peer, near, found.fetch)
            if same:
                found.fetch[peer] = entries
                reached.append(peer)
                if depth < 2:
                    found.sources[peer] = tuple(same)
        found.without = [peer for peer in found.without if peer not in reached]
        if reached and found.without:
            levels.append(reached)
    fetchers = [peer for peer in present if found.fetch[peer] and peer not in found.without]
    for peer in fetchers:
        near = linked(peer, [other for other in fetchers if other is not peer])
        found.fellows[peer] = tuple(fellow for fellow in near if free.have_same(fellow, peer, found.fetch))
    return found


def can_all_finish(
    fetchers: Collection[WhoT], done: Collection[WhoT], suppliers: Callable[[WhoT], Collection[WhoT]]
) -> bool:
    """True if all who fetch can get all from those who are done, or from each other after that.

    Args:
        fetchers: who is there and not done.
        done: who is there and has all.
        suppliers: from whom each may fetch.
    """
    supplied, left = set(done), set(fetchers)
    while left:
        reached = {peer for peer in left if not supplied.isdisjoint(suppliers(peer))}
        if not reached:
            return False
        supplied |= reached
        left -= reached
    return True


class _FreeKeys:
    """The keys in which those may differ who have the elected contents."""

    def __init__(self, offers: dict[Peer, SyncSpec]) -> None:
        self._own = {
            peer: {entry.key: entry.digest for entry in offer.entries if entry.allow_content_inequality}
            for peer, offer in offers.items()
        }

    def agreeing(self, peer: Peer, near: Sequence[Peer], fetch: dict[Peer, Entries]) -> tuple[list[Peer], Entries]:
        """Those of some sources that have the same, the elected values if any has; and what the peer then fetches."""
        entries = {source: self.entries_from(source, peer, fetch) for source in near}
        wanted = fetch[peer] if fetch[peer] in entries.values() or not near else entries[near[0]]
        return [source for source in near if entries[source] == wanted], wanted

    def have_same(self, fellow: Peer, peer: Peer, fetch: dict[Peer, Entries]) -> bool:
        """True if a fellow will have just what a peer must fetch."""
        entries = self.entries_from(fellow, peer, fetch)
        return entries is fetch[peer] or entries == fetch[peer]

    def entries_from(self, source: Peer, peer: Peer, fetch: dict[Peer, Entries]) -> Entries:
        """What a peer must fetch, with the values that the source has, or will have."""
        own = self._own[peer]
        if not own:
            return fetch[peer]
        held = self._own[source] | {entry.key: entry.digest for entry in fetch[source] if entry.key in own}
        entries = (FetchEntry(entry.key, held[entry.key]) if entry.key in own else entry for entry in fetch[peer])
        return tuple(entry for entry in entries if entry.key not in own or entry.digest != own[entry.key])
