"""The commit between peers: who has the digests of all participants returns, and the master hears of it behind time.

A peer that has its result tells its digest to the other participants, over the links, and reports to the master as in
any attempt. Who has the digests of all, all equal to its own, commits. So nobody commits before all have their results.
Who has told its digest is bound: only the master, or the digests of all, end the attempt for it (peer.py).

    - It does not report a failure, nor release the call while a master leads it. If the user gives the call up, it is
      withdrawn only if another participant will not commit the attempt, since that has given it up first.
    - Who has withdrawn, failed or released first tells no digest.

The master commits if all survivors have their results, and aborts if one of them has failed or has withdrawn. So it
never aborts what a peer has committed: all of its participants are bound, and report their results, to a new master
again. Where one is lost, the master waits for the reports of the others instead of aborting at once.

The same holds for attempts that are planned ahead. All participants have started one that is committed, so their votes
name it. If those of all survivors do, no master plans anew before one of them reports a failure.

Who has made the commit names it in its run report as an outcome, with the calls of all, for a digest comes with the
call of its sender: so the others need not wait for all reports, and the run is known to have decided something.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from zpccl import limits
from zpccl.protocol.messages import CollectiveSpec
from zpccl.types import CollectiveKind


def tells_digests(spec: CollectiveSpec, count: int) -> bool:
    """True if `count` participants of a collective tell each other their digests.

    Only where nobody has a result before all have started: else who has one would be bound to those that have not.
    """
    needs_all = spec.count > 0 and spec.kind not in (CollectiveKind.BROADCAST, CollectiveKind.BARRIER)
    has_empty_parts = spec.kind == CollectiveKind.REDUCE_SCATTER and spec.count < count  # Their owners wait for nobody.
    return needs_all and not has_empty_parts and count <= limits.COMMIT_PEERS_MAX


class Told(NamedTuple):
    """What a participant tells the others: the call of its own, and the digest of its result."""

    call_id: int
    digest: int


class Digests:
    """What other peers have told this one, in attempts that it may not have heard of yet.

    Of each peer the latest DIGESTS_KEPT_MAX are kept.
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
        """The calls of some peers in an attempt, if all of them have told this digest; else None."""
        calls = {}
        for peer_id in peers:
            told = self._of.get(peer_id, {}).get(attempt_id)
            if told is None or told.digest != digest:
                return None
            calls[peer_id] = told.call_id
        return calls

    def other_than(self, attempt_id: int, digest: int, peers: Iterable[bytes]) -> int | None:
        """Another digest than this one that one of some peers has told in an attempt, or None."""
        told = (self._of.get(peer_id, {}).get(attempt_id) for peer_id in peers)
        return next((one.digest for one in told if one is not None and one.digest != digest), None)

    def forget(self, attempt_id: int) -> None:
        """An attempt has ended."""
        for kept in self._of.values():
            kept.pop(attempt_id, None)

    def forget_peer(self, peer_id: bytes) -> None:
        """There is no link to a peer any more."""
        self._of.pop(peer_id, None)
