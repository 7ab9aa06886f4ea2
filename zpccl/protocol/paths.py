"""Which paths between members work, as far as the master can tell, and the rings and direct exchanges that they allow.

Some pairs can never connect, such as two peers behind different firewalls. A group can go on while its links connect
all its members, because an all-reduce and a sync need no more. So a newcomer that reaches one member is admitted, and
only members that are cut off from most others are removed. A group of more than DIRECT_PEERS_MAX has no trees, and
needs a ring.

A link is unusable unless both ends report it up. A link that made an attempt fail is suspected for a while, because
some paths carry only small packets: the link comes up again and fails again. A ring uses suspected links only if no
order avoids them. A suspected link counts as down once its failures have cost LINK_FAILING_MAX and no attempt has
succeeded on it since.

A direct exchange needs all links, and is not used if one is suspected.

If an attempt stalls and no peer can name the link, every link of its ring is in doubt. After a few such attempts these
links are all suspected, but less than a link that a peer has named. Links in several stalled rings are suspected more
than others. So the next attempt tries another ring, until one works. A link that is only in doubt never counts as down,
so that no peer is removed because of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zpccl import limits
from zpccl.protocol.membership import Peer, Registry
from zpccl.protocol.rings import find_order, mesh_edges, ring_edges

Edge: TypeAlias = frozenset[Peer]


@dataclass(slots=True)
class Fault:
    """The record of a link's failures."""

    seen_ns: int
    """When it failed last."""
    cost_ns: int
    """Total duration of the attempts that it made fail."""
    count: int
    """Element count of the largest of these attempts: the success of a smaller one proves nothing."""
    is_named: bool = False
    """True if a peer at one of its ends has reported it as failed."""
    doubts: int = 0
    """Number of consecutive attempts with this link that stalled without any peer naming a link."""

    @property
    def is_suspect(self) -> bool:
        """True if rings should avoid the link."""
        return self.is_named or self.doubts >= limits.LINK_DOUBTS_MAX


def cost_of(edge: Edge, begun_ns: int | None, now_ns: int) -> int:
    """What the failure of a link has cost an attempt, in time. The attempt also took time before the link broke."""
    if begun_ns is None or any(end.back_ns is not None and end.back_ns >= begun_ns for end in edge):
        return 0  # An end was away meanwhile: what cut it off from the master may have broken the link, too.
    return min(now_ns - begun_ns, limits.STALL_TIMEOUT_NS)


class Paths:
    """The links of all groups, as edges of rings."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._faults: dict[Edge, Fault] = {}
        self._known: dict[int, tuple[object, list[Peer] | None]] = {}  # The last order found, by group.

    def order(self, members: Sequence[Peer], now_ns: int) -> list[Peer] | None:
        """A ring of members of one group, with suspected links only if needed; None if the links allow no ring."""
        faults, down = self._live_faults(now_ns), self.down(now_ns)
        suspects = [edge for edge, fault in faults.items() if fault.is_suspect and edge not in down]
        suspects.sort(key=lambda edge: _weight(faults[edge]))
        if not suspects and not down and self._is_ring(members):
            return list(members)
        facts = (tuple(members), tuple(peer.linked for peer in members), down, tuple(suspects))
        group = members[0].group if members else 0
        if group not in self._known:  # Groups without members make room.
            self._known = {other: kept for other, kept in self._known.items() if self._registry.member_count(other)}
        if self._known.get(group, (None,))[0] != facts:
            self._known[group] = facts, self._find(members, down, suspects)
        return self._known[group][1]

    def avoided(self, now_ns: int) -> frozenset[Edge]:
        """The links that failed recently. A plan uses them only if it must."""
        return frozenset(edge for edge, fault in self._live_faults(now_ns).items() if fault.is_suspect)

    def down(self, now_ns: int) -> frozenset[Edge]:
        """The suspected links that have failed for so long that no plan may use them."""
        return frozenset(
            edge for edge, fault in self._live_faults(now_ns).items() if fault.cost_ns >= limits.LINK_FAILING_MAX_NS
        )

    def _is_ring(self, members: Sequence[Peer]) -> bool:
        return all(self._registry.are_linked(one, other) for one, other in ring_edges(members))

    def _find(self, members: Sequence[Peer], down: frozenset[Edge], suspects: list[Edge]) -> list[Peer] | None:
        tried = min(len(suspects), limits.LINK_SUSPECTS_TRIED_MAX)
        for count in sorted({*range(tried + 1), len(suspects)}):  # With none of them, with the best one, ..., with all.
            order = self._find_without(members, down.union(suspects[count:]))
            if order is not None:
                return order
        return None

    def _find_without(self, members: Sequence[Peer], avoided: frozenset[Edge]) -> list[Peer] | None:
        return find_order(
            members, lambda one, other: self._registry.are_linked(one, other) and frozenset((one, other)) not in avoided
        )

    def is_mesh(self, members: Sequence[Peer], now_ns: int) -> bool:
        """True if every two of these members have a link that is not suspected."""
        bits = sum(1 << peer.slot for peer in members)
        if any(bits & ~peer.linked & ~(1 << peer.slot) for peer in members):
            return False
        everyone = frozenset(members)
        return not any(edge <= everyone for edge in self.avoided(now_ns))

    def broken(self, members: Sequence[Peer], now_ns: int) -> list[tuple[Peer, Peer]]:
        """The pairs of these members that have no usable link."""
        if self.is_mesh(members, now_ns):
            return []  # Most groups are a mesh, so most calls need not check each pair.
        faults = self._live_faults(now_ns)
        return [(one, other) for one, other in mesh_edges(members) if not self._is_usable(one, other, faults)]

    def can_join(self, members: Sequence[Peer], joiner: Peer) -> bool:
        """True if these members can go on with the joiner: it reaches one of them. A large group needs a ring."""
        if len(members) < limits.DIRECT_PEERS_MAX:
            return not members or any(self._registry.are_linked(joiner, other) for other in members)
        if sum(self._registry.are_linked(joiner, other) for other in members) < 2:
            return False  # A search would take 100 ms to find that out, at every report of a joiner's links.
        for one, other in ring_edges(members):
            if self._registry.are_linked(joiner, one) and self._registry.are_linked(joiner, other):
                if self._is_ring(members):
                    return True
                break
        return find_order([*members, joiner], self._registry.are_linked) is not None

    def lacks_links(self, joiner: Peer) -> bool:
        """True if there are `missing` links. If the peer has too few links in all, that needs no search."""
        count = self._registry.member_count(joiner.group)
        needed = min(count, 1 if count < limits.DIRECT_PEERS_MAX else 2)
        return joiner.linked.bit_count() < needed or bool(self.missing(joiner))

    def missing(self, joiner: Peer) -> list[Peer]:
        """The members of its group to which a pending peer has no link; none if it can join without these links."""
        members = self._registry.members(joiner.group)
        found = [other for other in members if not self._registry.are_linked(joiner, other)]
        return found if found and not self.can_join(members, joiner) else []

    def sources(self, receiver: Peer, holders: Sequence[Peer], now_ns: int) -> list[Peer]:
        """The holders to which a receiver has a link, those with suspected links last, without those that fail always.

        Otherwise a fetcher whose links come up but carry nothing would make every sync fail, and never be removed.
        """
        faults, failing_max_ns = self._live_faults(now_ns), limits.LINK_FAILING_SYNCS_MAX_NS
        linked = [holder for holder in holders if self._is_usable(receiver, holder, faults, failing_max_ns)]
        if not faults:
            return linked

        def is_suspect(holder: Peer) -> bool:
            fault = faults.get(frozenset((receiver, holder)))
            return fault is not None and fault.is_suspect

        return sorted(linked, key=is_suspect)

    def surplus(self, members: Sequence[Peer], now_ns: int) -> list[tuple[Peer, list[Peer]]]:
        """Members to remove so that the others can go on, each with the members that it does not reach.

        The largest set of members that links connect stays (ties: the set with the earliest member). In a large group,
        the member with the fewest links to the others is then removed (ties: the latest) until there is a ring.
        """
        faults = self._live_faults(now_ns)
        bits = {  # By member: one bit for each other member that it reaches.
            peer: sum(
                1 << other.slot for other in members if other is not peer and self._is_usable(peer, other, faults)
            )
            for peer in members
        }
        rest = _largest_part(members, bits)
        found = [(peer, list(rest)) for peer in members if peer not in rest]
        while len(rest) > limits.DIRECT_PEERS_MAX and self.order(rest, now_ns) is None:
            worst = min(reversed(rest), key=lambda peer: bits[peer].bit_count())
            rest.remove(worst)
            found.append((worst, [other for other in rest if not bits[worst] >> other.slot & 1]))
            for other in rest:
                bits[other] &= ~(1 << worst.slot)
        return found

    def _is_usable(
        self, one: Peer, other: Peer, faults: dict[Edge, Fault], failing_max_ns: int = limits.LINK_FAILING_MAX_NS
    ) -> bool:
        if not self._registry.are_linked(one, other):
            return False
        fault = faults.get(frozenset((one, other))) if faults else None
        return fault is None or fault.cost_ns < failing_max_ns

    # --- Faults -----------------------------------------------------------------------------------------------------

    def blame(self, one: Peer, other: Peer, cost_ns: int, count: int, now_ns: int) -> None:
        """The link between two peers made an attempt with `count` elements fail, after `cost_ns`.

        If several attempts fail at the same time for one reason, their time counts once.
        """
        fault = self._live_faults(now_ns).setdefault(frozenset((one, other)), Fault(now_ns - cost_ns, 0, 0))
        fault.cost_ns += min(cost_ns, now_ns - fault.seen_ns)
        fault.seen_ns, fault.count = now_ns, max(fault.count, count)
        fault.is_named = True

    def doubt(self, edges: Sequence[tuple[Peer, Peer]], begun_ns: int, count: int, now_ns: int) -> None:
        """An attempt with `count` elements, begun at `begun_ns`, stalled on one of these links; no peer knows which.

        Attempts that stall at the same time count once, as they have one cause.
        """
        faults = self._live_faults(now_ns)
        for one, other in edges:
            fault = faults.setdefault(frozenset((one, other)), Fault(-1, 0, 0))
            if fault.seen_ns <= begun_ns:
                fault.doubts += 1
            fault.seen_ns, fault.count = now_ns, max(fault.count, count)

    @property
    def has_faults(self) -> bool:
        """False if there is nothing that `trust` could clear."""
        return bool(self._faults)

    def trust(self, edges: Sequence[tuple[Peer, Peer]], count: int) -> None:
        """An attempt with `count` elements succeeded on these links."""
        for one, other in edges:
            fault = self._faults.get(frozenset((one, other)))
            if fault is not None and fault.count <= count:
                del self._faults[frozenset((one, other))]

    def _live_faults(self, now_ns: int) -> dict[Edge, Fault]:
        """Faults that have not expired, of links whose ends have not been lost."""
        peers = self._registry.peers
        for edge, fault in list(self._faults.items()):
            is_old = now_ns - fault.seen_ns >= limits.LINK_SUSPECT_NS
            if is_old or any(peers.get(peer.peer_id) is not peer for peer in edge):
                del self._faults[edge]
        return self._faults


def _largest_part(members: Sequence[Peer], bits: dict[Peer, int]) -> list[Peer]:
    """The largest set of members that are connected by their links, in order; the first of several such sets."""
    left: list[Peer] = list(members)
    largest: list[Peer] = []
    while len(left) > len(largest):
        reached, added = 0, 1 << left[0].slot
        while added:
            reached |= added
            added = ~reached & functools.reduce(
                operator.or_, (bits[peer] for peer in left if added >> peer.slot & 1), 0
            )
        part = [peer for peer in left if reached >> peer.slot & 1]
        left = [peer for peer in left if not reached >> peer.slot & 1]
        largest = max(largest, part, key=len)
    return largest


def _weight(fault: Fault) -> tuple[bool, int, int, int]:
    """Sort key of suspected links: the links to avoid most are greatest."""
    return fault.is_named, fault.cost_ns, fault.doubts, fault.seen_ns
