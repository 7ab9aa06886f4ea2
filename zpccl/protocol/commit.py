"""The commit between peers: a peer that has the digests of all participants returns; the master hears of it later.

A peer that has its result tells its digest to the other participants, over the links, and reports to the master as in
any attempt. A peer that has the digests of all participants, all equal to its own, commits. So no peer commits before
all have their results. A peer that has told its digest is bound: only the master or the digests of all participants end
the attempt for it (peer.py).

    - A bound peer does not report a failure, and does not release the call while a master leads it. If its user gives
      the call up, the call is withdrawn only if another participant will not commit the attempt, having given it up
      before.
    - A peer that has withdrawn or released the call before, or failed in it, tells no digest.

The master commits if all survivors have their results, and aborts if one of them has failed or withdrawn. So it never
aborts an attempt that a peer has committed: all its participants are bound, and report their results, to a new master
again. If a participant is lost, the master waits for the reports of the others instead of aborting at once.

The same holds for attempts that are planned ahead. All participants of a committed attempt have started it, so their
votes name it. If the votes of all survivors name it, no master plans anew before one of them reports a failure.

A peer that has made the commit names it in its run report as an outcome, with the calls of all participants, which it
knows because each digest comes with the call of its sender. So a new master can answer the others before all have
reported, and knows that the run has decided something.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from zpccl import limits
from zpccl.protocol.messages import CollectiveSpec
from zpccl.types import CollectiveKind


def tells_digests(spec: CollectiveSpec, count: int) -> bool:
    """True if `count` participants of a collective tell each other their digests.

    Only if no peer has a result before all have started: otherwise a peer with a result would be bound to peers that
    may never start.
    """
    needs_all = spec.count > 0 and spec.kind not in (CollectiveKind.BROADCAST, CollectiveKind.BARRIER)
    has_empty_parts = spec.kind == CollectiveKind.REDUCE_SCATTER and spec.count < count  # Their owners wait for nobody.
    return needs_all and not has_empty_parts and count <= limits.COMMIT_PEERS_MAX


class Told(NamedTuple):
    """What a participant tells the others: its own call, and the digest of its result."""

    call_id: int
    digest: int


class Digests:
    """What other peers have told this one, perhaps in attempts that it has not heard of yet.

    It keeps the latest DIGESTS_KEPT_MAX of each peer.
    """

    def __init__(self) -> None:
        self._of: dict[bytes, dict[int, Told]] = {}  # By peer and attempt, the oldest first.

    def add(self, peer_id: bytes, attempt_id: int, told: Told) -> None:
        """A peer has told its digest."""
        kept = self._of.setdefault(peer_id, {})
        kept[attempt_id] = told
        if len(kept) > limits.DIGESTS_KEPT_MAX:
            del kept[next(iter(kept))]

    def calls_of(self, attempt_id: int, digest: int, peers: Collection[bytes]) -> dict[bytes, int] | None:
        """The calls of the given peers in an attempt, if all of them have told this digest; else None."""
        calls = {}
        for peer_id in peers:
            told = self._of.get(peer_id, {}).get(attempt_id)
            if told is None or told.digest != digest:
                return None
            calls[peer_id] = told.call_id
        return calls

    def other_than(self, attempt_id: int, digest: int, peers: Iterable[bytes]) -> int | None:
        """A digest that differs from this one and that one of the given peers has told in an attempt, or None."""
        told = (self._of.get(peer_id, {}).get(attempt_id) for peer_id in peers)
        return next((one.digest for one in told if one is not None and one.digest != digest), None)

    def forget(self, attempt_id: int) -> None:
        """An attempt has ended."""
        for kept in self._of.values():
            kept.pop(attempt_id, None)

    def forget_peer(self, peer_id: bytes) -> None:
        """There is no link to a peer any more."""
        self._of.pop(peer_id, None)
