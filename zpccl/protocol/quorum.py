"""The quorum rule: which part of a run may go on, where peers know several masters.

Two masters may each be reached by a part of the members. Only a quorum of the newest member list goes on; any two
quorums of one list share a member. A list changes, so the rule needs care where one follows another:

    committed --loss, admission, takeover: propose()--> proposed --quorums of old and new acknowledge--> committed

Until a list is committed, a master elsewhere may not know of it, and may find a quorum of the list before, the old
members. So no list is left for another one before the members that go on are a quorum of the old ones; and a master
that takes over from a list that is not committed needs a quorum of both.
"""

from __future__ import annotations

from collections.abc import Collection, Container


def is_quorum(present: Container[bytes], members: Collection[bytes]) -> bool:
    """True if those present are a majority of the members, or half of them with the lowest id; also of no members."""
    count = sum(peer_id in present for peer_id in members)
    return 2 * count > len(members) or (2 * count == len(members) and (not members or min(members) in present))


class Quorum:
    """What a master knows of the quorums behind its member list.

    Args:
        members: of the list that is established now.

    Attributes:
        old_members: members of the last established list; empty while the present one is established.
    """

    def __init__(self, members: Collection[bytes] = ()) -> None:
        self.old_members: frozenset[bytes] = frozenset()
        self._members = frozenset(members)
        self._seen: set[bytes] = set()
        self._consenting: set[bytes] = set()

    def propose(self, members: Collection[bytes], old_members: Collection[bytes] = ()) -> None:
        """The list changes. `old_members`: of a list that is taken over and may not have been established."""
        if not self.old_members:
            self.old_members = frozenset(old_members) or self._members
        self._members = frozenset(members)
        self._seen.clear()

    def acknowledge(self, peer_id: bytes) -> bool:
        """A member has the list. True if it is established by that."""
        self._seen.add(peer_id)
        return self._establish()

    def add_consent(self, peer_id: bytes) -> bool:
        """A member leaves of its own accord: it goes on nowhere else. True if the list is established by that."""
        self._consenting.add(peer_id)
        return self._establish()

    def _establish(self) -> bool:
        known = self._seen | self._consenting
        if not self.old_members or not is_quorum(known, self.old_members) or not is_quorum(known, self._members):
            return False
        self.old_members = frozenset()
        self._consenting.clear()
        return True

    def may_go_on(self, present: Collection[bytes]) -> bool:
        """True if those present may go on without the others."""
        return is_quorum(self._consenting.union(present), self.old_members or self._members)
