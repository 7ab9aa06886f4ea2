"""Elects the shared state of a sync: a pure function of what the members of a group offer.

1. The revision. Let E be the revision of the last completed sync plus one. If any peer offers E, E is elected, unless
   only others than participants of the last sync offer E, and participants are above it: a joiner with an older state
   must not refuse them. Otherwise the revision above E that most participants of the last sync offer is elected (ties:
   the higher). If there is none, the highest offered one is elected, for example when all sync the same revision again.
   RECEIVE_ONLY peers offer nothing. A peer that offers a higher revision is refused; a peer that offers a lower one
   receives.
2. The key set. Keys, dtypes, counts and the digest function must agree. The set that most peers have is elected; peers
   that differ from it are refused.
3. The contents, that is, the digests of all keys that do not allow inequality. Among peers at the elected revision, the
   contents that most of them hold are elected (ties: those of the peer that comes first in ring order). SEND_ONLY peers
   at that revision win over all others. They are refused if they differ from each other; so are SEND_ONLY peers at a
   lower revision, since they never receive.
4. The fetches. A peer at the elected revision fetches the keys in which it differs from the elected contents, except
   keys that allow inequality. A peer at a lower revision fetches every key in which it differs. Holders are the peers
   with the elected contents that have everything that any peer fetches. A peer with the elected contents is no holder
   if its value of a key that allows inequality differs from the winner's and some peer fetches that key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from zpccl.errors import Result
from zpccl.protocol.messages import FetchEntry, StateEntry, SyncSpec, name_of
from zpccl.types import DataType, DigestKind, SharedStateSyncStrategy

PeerT = TypeVar("PeerT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be equal in all offers: the digest function, and each tensor's key, datatype, count and whether it
    allows inequality."""

    digest_kind: int
    tensors: tuple[tuple[str, int, int, bool], ...]


@dataclass
class Election(Generic[PeerT]):
    """The outcome of an election.

    Attributes:
        revision: the revision of every participant after the sync.
        holders: peers that hold all that any peer fetches, in ring order.
        fetch: for each peer that is not refused, the entries that it must fetch.
        refused: result and reason for each peer that cannot take part.
        votes: the voters grouped by contents, the elected group first, the others by size.
        why_nobody: why no state is elected; "" if one is.
        restarted: there was a sync before, and no participant of it is at a revision that continues it.
    """

    revision: int = 0
    holders: list[PeerT] = field(default_factory=list)
    fetch: dict[PeerT, tuple[FetchEntry, ...]] = field(default_factory=dict)
    refused: dict[PeerT, tuple[Result, str]] = field(default_factory=dict)
    votes: list[list[PeerT]] = field(default_factory=list)
    why_nobody: str = ""
    restarted: bool = False


def elect(
    offers: Mapping[PeerT, SyncSpec], last_revision: int | None, completed_last: frozenset[PeerT]
) -> Election[PeerT]:
    """Elects the shared state.

    Args:
        offers: what each member of the group offers, in ring order.
        last_revision: revision of the last completed sync, None before the first.
        completed_last: the peers that took part in it.
    """
    election: Election[PeerT] = Election()
    standing = dict(offers)  # The peers that are not refused, in ring order.

    def refuse(peer: PeerT, result: Result, reason: str) -> None:
        del standing[peer]
        election.refused[peer] = (result, reason)

    candidates = _candidates(standing)
    if not candidates:
        return _refuse_all(election, standing, "all peers are RECEIVE_ONLY")
    revision, election.restarted = choose_revision(
        {peer: offer.revision for peer, offer in candidates.items()}, last_revision, completed_last
    )
    election.revision = revision
    for peer, offer in candidates.items():
        if offer.revision > revision:
            reason = f"revision {offer.revision} is ahead of the run's {revision}; load the state of that revision"
            refuse(peer, Result.INVALID_USAGE, reason)
        elif offer.revision < revision and offer.strategy == SharedStateSyncStrategy.SEND_ONLY:
            where = f"SEND_ONLY at revision {offer.revision}, but the run is at {revision}"
            reason = f"{where}: this peer would have to receive"
            refuse(peer, Result.INVALID_USAGE, reason)

    shape = _elect_shape(standing, revision)
    for peer, offer in list(standing.items()):
        if _shape(offer) != shape:
            refuse(peer, Result.INVALID_ARGUMENT, describe_shape_difference(shape, _shape(offer)))

    senders = [p for p, o in _candidates(standing).items() if o.strategy == SharedStateSyncStrategy.SEND_ONLY]
    if len({_contents(standing[peer]) for peer in senders}) > 1:
        for peer in senders:
            refuse(peer, Result.INVALID_USAGE, "SEND_ONLY peers hold different contents; let one of them send")
        senders = []

    voters = senders or [peer for peer, offer in _candidates(standing).items() if offer.revision == revision]
    if not voters:
        return _refuse_all(election, standing, f"every peer that offers revision {revision} is refused")
    camps: dict[tuple[bytes, ...], list[PeerT]] = {}
    for peer in voters:
        camps.setdefault(_contents(standing[peer]), []).append(peer)
    winner = max(voters, key=lambda peer: len(camps[_contents(standing[peer])]))  # The first of the most popular.
    elected = standing[winner]
    election.votes = sorted(camps.values(), key=lambda camp: (-len(camp), winner not in camp))
    for peer, offer in standing.items():
        election.fetch[peer] = _entries_to_fetch(offer, elected, revision)
    fetched = {entry for entries in election.fetch.values() for entry in entries}
    election.holders = [
        peer
        for peer in voters
        if _contents(standing[peer]) == _contents(elected) and fetched <= _holdings(standing[peer])
    ]
    return election


def choose_revision(
    offered: Mapping[PeerT, int], last_revision: int | None, completed_last: frozenset[PeerT]
) -> tuple[int, bool]:
    """The revision by rule 1, and whether there was a sync before that no participant of it continues."""
    if last_revision is None:
        return max(offered.values()), False
    expected = last_revision + 1
    continued = Counter(revision for peer, revision in offered.items() if peer in completed_last)
    ahead = Counter({revision: votes for revision, votes in continued.items() if revision > expected})
    if expected in (continued if ahead else offered.values()):
        return expected, False
    if ahead:
        return max(ahead, key=lambda revision: (ahead[revision], revision)), False
    highest = max(offered.values())
    return highest, not any(offered.get(peer) == highest for peer in completed_last)


def entries_to_fetch(offer: SyncSpec, elected: SyncSpec, revision: int) -> tuple[FetchEntry, ...] | None:
    """What a peer must fetch if `elected` won the election of `revision`; None if the shapes of the two differ."""
    return _entries_to_fetch(offer, elected, revision) if _shape(offer) == _shape(elected) else None


def free_contents(offer: SyncSpec, fetch: Iterable[FetchEntry]) -> dict[str, bytes]:
    """The contents that a peer has after its fetch of the keys that allow inequality: digests by key."""
    held = {entry.key: entry.digest for entry in offer.entries if entry.allow_content_inequality}
    held.update({entry.key: entry.digest for entry in fetch if entry.key in held})
    return held


def describe_shape_difference(expected: Shape, found: Shape) -> str:
    """The difference between an offer's shape and the elected one, as a text."""
    if expected.digest_kind != found.digest_kind:
        here, there = (name_of(DigestKind, shape.digest_kind).lower() for shape in (found, expected))
        return f"the shared state uses another digest function than that of most peers: {here} here, {there} there"
    wanted, own = {field[0]: field for field in expected.tensors}, {field[0]: field for field in found.tensors}
    missing, extra = sorted(wanted.keys() - own.keys()), sorted(own.keys() - wanted.keys())
    if missing or extra:
        texts = [f"keys missing here: {missing[:8]}"] * bool(missing) + [f"keys only here: {extra[:8]}"] * bool(extra)
        return "the shared state has other keys than that of most peers; " + "; ".join(texts)
    for key in sorted(wanted):
        if wanted[key] != own[key]:
            names = ("key", "datatype", "count", "allow_content_inequality")
            rows = zip(names, _texts(*own[key]), _texts(*wanted[key]), strict=True)
            texts = [f"{n} {o} here, {w} there" for n, o, w in rows if o != w]
            return f"tensor {key!r} differs from that of most peers: {', '.join(texts)}"
    return "the shared state is equal"


def _texts(key: str, datatype: int, count: int, allows_inequality: bool) -> tuple[str, ...]:
    return key, name_of(DataType, datatype), str(count), str(allows_inequality)


def _shape(offer: SyncSpec) -> Shape:
    tensors = tuple((e.key, e.datatype, e.count, e.allow_content_inequality) for e in offer.entries)
    return Shape(offer.digest_kind, tensors)


def _contents(offer: SyncSpec) -> tuple[bytes, ...]:
    return tuple(entry.digest for entry in offer.entries if not entry.allow_content_inequality)


def _holdings(offer: SyncSpec) -> set[FetchEntry]:
    return {FetchEntry(entry.key, entry.digest) for entry in offer.entries}


def _candidates(offers: Mapping[PeerT, SyncSpec]) -> dict[PeerT, SyncSpec]:
    return {p: offer for p, offer in offers.items() if offer.strategy != SharedStateSyncStrategy.RECEIVE_ONLY}


def _elect_shape(offers: Mapping[PeerT, SyncSpec], revision: int) -> Shape:
    """The most popular key set among possible senders: SEND_ONLY peers first, then peers at the revision."""
    candidates = {p: o for p, o in _candidates(offers).items() if o.revision == revision}
    senders = {p: o for p, o in candidates.items() if o.strategy == SharedStateSyncStrategy.SEND_ONLY}
    shapes = [_shape(offer) for offer in (senders or candidates or offers).values()]
    return Counter(shapes).most_common(1)[0][0] if shapes else Shape(0, ())


def _entries_to_fetch(offer: SyncSpec, elected: SyncSpec, revision: int) -> tuple[FetchEntry, ...]:
    if offer.strategy == SharedStateSyncStrategy.SEND_ONLY:
        return ()
    is_behind = offer.revision != revision
    return tuple(
        FetchEntry(theirs.key, theirs.digest)
        for own, theirs in zip(offer.entries, elected.entries, strict=True)
        if own.digest != theirs.digest and (is_behind or not own.allow_content_inequality)
    )


def _refuse_all(election: Election[PeerT], standing: dict[PeerT, SyncSpec], reason: str) -> Election[PeerT]:
    for peer in standing:
        election.refused[peer] = (Result.NO_SHARED_STATE_AVAILABLE, reason)
    election.why_nobody = reason
    return election


def validate_entries(entries: tuple[StateEntry, ...]) -> str:
    """The fault in the entries of an offer as a text, or "". They must be sorted by key, without duplicates."""
    for one, other in pairwise(entries):
        if one.key >= other.key:
            return f"keys {one.key!r} and {other.key!r} are not in order"
    return ""
