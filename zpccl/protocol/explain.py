"""Explains an election of shared state in a few lines, for the log of the master.

Lines stay short for any number of peers and tensors: some are named, the rest is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from zpccl import limits
from zpccl.protocol.election import Election, PeerT
from zpccl.protocol.messages import SyncSpec
from zpccl.types import DataType, SharedStateSyncStrategy


def explain(
    election: Election[PeerT],
    offers: Mapping[PeerT, SyncSpec],
    last_revision: int | None,
    name_of: Callable[[PeerT], str],
) -> list[str]:
    """The offers, the revision and contents that won and why, and how much each peer receives from which holders.

    A refused peer gets the reason in its decision; these lines do not repeat it.

    Args:
        election: the outcome.
        offers: what each peer offered.
        last_revision: of the last completed sync, None before the first.
        name_of: the name of a peer.
    """

    def candidate(peer: PeerT) -> str:
        offer = offers[peer]
        strategy = SharedStateSyncStrategy(offer.strategy)
        is_plain = strategy is SharedStateSyncStrategy.ENFORCE_POPULAR
        return f"{name_of(peer)} at {offer.revision}" + ("" if is_plain else f" ({strategy.name})")

    def names(peers: Iterable[PeerT]) -> str:
        return _some([name_of(peer) for peer in peers])

    lines = [f"offers: {_some([candidate(peer) for peer in offers])}"]
    if not election.fetch:
        return [*lines, f"no state is elected: {election.why_nobody}"]
    first, *others = [f"{len(camp)} ({names(camp)})" for camp in election.votes]
    over = f", over {_some(others)}" if others else ""
    why = _why_revision(election, last_revision)
    lines.append(f"revision {election.revision}, {why}; the contents of {first} are elected{over}")
    receivers = {peer: entries for peer, entries in election.fetch.items() if entries}
    if not receivers:
        return [*lines, "all peers hold these contents; no peer fetches anything"]
    texts = []
    for peer, entries in receivers.items():
        sizes = {e.key: _size(e.datatype) * e.count for e in offers[peer].entries}
        texts.append(f"{name_of(peer)} ({len(entries)} tensors of {sum(sizes[e.key] for e in entries):,} bytes)")
    return [*lines, f"holders: {names(election.holders)}; receivers: {_some(texts)}"]


def _why_revision(election: Election[PeerT], last_revision: int | None) -> str:
    if last_revision is None:
        return "the highest offered in the first sync"
    if election.revision == last_revision + 1:
        return f"the next after {last_revision}"
    if election.restarted:
        return f"the highest offered, as no peer continues from {last_revision}"
    if election.revision > last_revision:
        return f"the revision of most peers that completed {last_revision}"
    return f"the highest offered, and none is above {last_revision}"


def _some(texts: list[str]) -> str:
    shown, rest = texts[: limits.EXPLAINED_PEERS_MAX], len(texts) - limits.EXPLAINED_PEERS_MAX
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _size(datatype: int) -> int:
    """Bytes of an element; 0 for an unknown datatype, which a peer may send."""
    return DataType(datatype).itemsize if datatype in tuple(DataType) else 0
