"""The registry of the master: peers, member list and links; and its outbox.

A peer is pending from its Hello to its admission, and a member from then to its loss. The epoch is the number of the
member list; every new list has a higher one. Ring order is the order of admission. A link counts as up only while both
ends report it as up.

    event              of no peer         PREFETCHING     READY       ABSENT         REPORTED    FOLLOWING
    Hello, not ready   PREFETCHING        -               -           is to report   -           -
    Hello, ready       READY              READY           -           is to report   -           -
    Ready              -                  READY           -           -              -           -
    admitted           -                  FOLLOWING [1]   FOLLOWING   -              -           -
    run adopted        ABSENT             -               -           -              -           -
    RunReport          as a Hello [2]     -               -           REPORTED       -           -
    Acknowledgement    -                  -               -           -              FOLLOWING   -
    lost, removed      -                  forgotten, whatever its phase

    PREFETCHING and READY are the phases of pending peers, the others those of members. [1] Into a run without members.
    [2] A peer that only the former master knew as a member is admitted with its report.

Peers of a host that has a name are admitted together once all are here, and removed together once one is lost.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zpccl import limits
from zpccl.protocol.counts import Counts
from zpccl.protocol.effects import Broadcast, Level, Log, MasterEffect
from zpccl.protocol.messages import Decision, MasterMessage, Member, Members, Neighbour

if TYPE_CHECKING:
    from zpccl.protocol.operation import Key


class Standing(enum.Enum):
    """What the master knows of the peer at the other end of a connection. The value appears in the log."""

    STRANGER = "stranger"
    EXPECTED = "peer that is to report"
    """It waits for a recovering master, was asked for a RunReport, or has yet to acknowledge its removal."""
    PENDING = "pending peer"
    MEMBER = "member"


class PeerPhase(enum.Enum):
    """Where a peer stands in the run."""

    PREFETCHING = "prefetching"
    """Pending, and it fetches state ahead: it is not admitted, and no operation waits for it."""
    READY = "ready"
    """Pending, and it may be admitted."""
    ABSENT = "absent"
    """A member of an adopted run that is still to report: the master does not know yet what it has received."""
    REPORTED = "reported"
    """A member that has reported and acknowledged no list since: it may switch to another master."""
    FOLLOWING = "following"
    """A member that follows this master."""


_OF_MEMBERS = (
    PeerPhase.FOLLOWING,
    PeerPhase.REPORTED,
    PeerPhase.ABSENT,
)  # The most common phase is first, so it is found at once.


@dataclass(slots=True, eq=False)
class Peer:
    """What the master knows of one peer."""

    peer_id: bytes
    group: int
    name: str
    addresses: tuple[str, ...]
    token: bytes
    connection: Hashable | None
    connection_count: int = 0
    """Number of its latest connection; the peer counts them."""
    phase: PeerPhase = PeerPhase.READY
    disconnected_ns: int | None = None
    host: str = ""
    """The host, whose peers are admitted and removed together; empty: the peer comes and goes by itself."""
    host_size: int = 0
    """How many peers the host has."""
    registered_ns: int = 0
    """When it registered, as a pending peer."""
    apart_ns: int | None = None
    """From when it waits for its host, at a master that is not the first of its list; None once the host was whole."""
    is_left_over: bool = False
    """Its host has lost a pending peer, so it is removed as soon as it is connected."""
    handshake_ms: int = 0
    """How long a handshake of the peer with this master takes; 0: not known."""
    slot: int = 0
    """The number of its bit in `linked` of other peers; unique among registered peers."""
    linked: int = 0
    """The peers to which it reports a link, one bit each: sets of ids would take too much memory in large groups."""
    unlinked_ns: int | None = None
    """Since when a pending peer has lacked links without which it cannot join; starts again when a member of its group
    reports a new link to it. None if it lacks none."""
    since: int = 0
    """The epoch of the list by which it was admitted, at whatever master; 0: it is pending."""
    oldest_call_id: int = 0
    acknowledged: int = 0
    """The epoch of the last list of this master that it has accepted."""
    answered_ns: int = 0
    """When its last call was answered; after a take-over, when it reported; after an outage, when all were back."""
    witnesses: dict[bytes, int] = field(default_factory=dict)
    """Members that have lost their link to this peer since its last report of its links, and when they lost it."""
    back_ns: int | None = None
    """When it last connected again, or reported to this master; None: it has been connected since it registered."""
    open_calls: dict[int, Key] = field(default_factory=dict)
    """Calls that wait for their answer, by call id: the operation of each."""
    answers: dict[int, Decision] = field(default_factory=dict)
    """Answers that the peer may not have received, by call id, the oldest first."""

    @property
    def is_member(self) -> bool:
        """True from its admission on."""
        return self.phase in _OF_MEMBERS

    @property
    def has_reported(self) -> bool:
        """False for a member of an adopted run that is still to report."""
        return self.phase is not PeerPhase.ABSENT

    def may_have(self, token: bytes) -> bool:
        """True if the peer may have this token. After a take-over, its token is known from its first message on."""
        return self.token in (b"", token)

    def was_away(self, since_ns: int) -> bool:
        """True if it is disconnected, or was after this time: then the master may lack what it has said."""
        return self.connection is None or (self.back_ns is not None and self.back_ns > since_ns)

    def on_ready(self) -> None:
        """A pending peer no longer fetches state ahead."""
        if self.phase is PeerPhase.PREFETCHING:
            self.phase = PeerPhase.READY


def have_reported(peers: Iterable[Peer]) -> bool:
    """True if none of the peers is still to report."""
    absent = PeerPhase.ABSENT  # Looked up once: a lookup for each peer, at each report, costs as much as the rest.
    return all(peer.phase is not absent for peer in peers)


class Registry:
    """All peers of the run, the member list and its epoch.

    Args:
        link_seed: from which the keys of links are derived; empty in a run without a secret.
    """

    def __init__(self, link_seed: bytes = b"") -> None:
        self._link_seed = link_seed
        self.peers: dict[bytes, Peer] = {}  # In order of registration.
        self.by_connection: dict[Hashable, Peer] = {}
        self.order: list[Peer] = []  # Members, in ring order.
        self.epoch = 0
        self.round = 0
        self.round_value = 0
        """`round` is the number of the last complete round of topology votes, `round_value` its value."""
        self.parent = 0
        """The epoch of the last committed list when the current one was proposed."""
        self.old_members: tuple[bytes, ...] = ()
        """The members of the parent while the member list is not committed; otherwise empty (see leadership.py)."""
        self._slots: list[Peer | None] = []
        self._pending: dict[bytes, Peer] = {}  # In order of registration.
        self._member_counts: dict[int, int] = {}  # By group.
        self.may_have_broken_hosts = False
        """True if peers came, went or reported, or the list was committed, since hosts were last checked."""

    @property
    def is_committed(self) -> bool:
        """False while another master could be elected without learning of the member list: nothing is decided then."""
        return not self.old_members

    @property
    def have_all_reported(self) -> bool:
        """True if the member list is committed and no member of an adopted run is still to report."""
        return self.is_committed and have_reported(self.order)

    def members(self, group: int | None = None) -> list[Peer]:
        """Members in ring order, of one group or of all."""
        return [peer for peer in self.order if group is None or peer.group == group]

    def member_count(self, group: int) -> int:
        """How many members a group has."""
        return self._member_counts.get(group, 0)

    def pending(self) -> list[Peer]:
        """Pending peers in order of registration."""
        return list(self._pending.values())

    def joiners(self) -> list[Peer]:
        """Pending peers that may be admitted, in order of registration."""
        return self.whole_hosts(peer for peer in self._pending.values() if peer.phase is PeerPhase.READY)

    def first_joiners(self) -> list[Peer]:
        """The peers that begin a run: the pending peer that came first, with its host."""
        found = self.whole_hosts(self.connected_pending())
        return [peer for peer in found if peer is found[0] or (peer.host and peer.host == found[0].host)]

    def connected_pending(self) -> list[Peer]:
        """Pending peers that are connected, in order of registration."""
        return [peer for peer in self._pending.values() if peer.connection is not None]

    def pending_of(self, host: str) -> list[Peer]:
        """Pending peers of a host."""
        return [peer for peer in self._pending.values() if peer.host == host]

    def host_missing(self, peer: Peer) -> int:
        """How many peers of the host of a pending peer have not registered, or are away."""
        here = [other for other in self.pending_of(peer.host) if other.connection is not None]
        return max(0, peer.host_size - len(here)) if peer.host and not peer.is_member else 0

    def whole_hosts(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those of these pending peers whose whole host is among them and has no members, or that have no host."""
        found = list(peers)
        if not any(peer.host for peer in found):
            return found
        counts = Counter(peer.host for peer in found)
        taken = {peer.host for peer in self.order}
        return [
            peer for peer in found if not peer.host or (counts[peer.host] == peer.host_size and peer.host not in taken)
        ]

    def apart(self) -> list[tuple[Peer, int]]:
        """Pending peers whose host is incomplete here, each with `apart_ns`. The rest may be at an earlier master."""
        return [
            (peer, peer.apart_ns)
            for peer in self.connected_pending()
            if peer.apart_ns is not None and not peer.is_left_over
        ]

    def namesakes(self) -> list[Peer]:
        """Connected pending peers of a host with the name of another one, of which all peers are connected members."""
        pending = [peer for peer in self.connected_pending() if peer.host]
        if not pending:
            return []
        here = [peer for peer in self.order if peer.host and peer.connection is not None]
        counts = Counter(peer.host for peer in here)
        hosts = {peer.host for peer in here if counts[peer.host] == peer.host_size}
        return [peer for peer in pending if peer.host in hosts]

    def misfit_of_host(self, host: str, host_size: int) -> str:
        """Why a new peer does not fit the connected pending peers of its host; empty if it does."""
        others = [peer for peer in self.connected_pending() if host and peer.host == host]
        sizes = {peer.host_size for peer in others} - {host_size}
        if sizes:
            return f"peers of host {host} differ in host_size: {host_size} and {sizes.pop()}"
        if host and len(others) >= host_size:
            return f"all {host_size} peers of host {host} are already waiting; use another host= name for another host"
        return ""

    def members_of_broken_hosts(self) -> list[Peer]:
        """Members of hosts that have lost other peers; none until all have reported to which host they belong."""
        if not self.have_all_reported:
            return []
        counts = Counter(peer.host for peer in self.order)
        return [peer for peer in self.order if peer.host and counts[peer.host] < peer.host_size]

    def pending_of_broken_hosts(self) -> list[Peer]:
        """Connected pending peers of hosts that have lost others. A disconnected one is told when it is back."""
        return [peer for peer in self.connected_pending() if peer.is_left_over]

    def add(self, peer: Peer) -> None:
        """Registers a peer as pending."""
        assert peer.peer_id not in self.peers
        self.may_have_broken_hosts = True
        peer.slot = next((slot for slot, user in enumerate(self._slots) if user is None), len(self._slots))
        self._slots[peer.slot : peer.slot + 1] = [peer]
        self.peers[peer.peer_id] = peer
        self._pending[peer.peer_id] = peer
        if peer.connection is not None:
            self.by_connection[peer.connection] = peer
        self._note_whole_host(peer)

    def bind(self, peer: Peer, connection: Hashable | None) -> None:
        """Sets the connection of `peer`; None after the old one broke."""
        self.may_have_broken_hosts = True
        if peer.connection is not None:
            self.by_connection.pop(peer.connection, None)
        peer.connection = connection
        if connection is not None:
            self.by_connection[connection] = peer
            self._note_whole_host(peer)

    def _note_whole_host(self, peer: Peer) -> None:
        """Once all peers of a pending host are connected, none is sent on. Others may be its former processes."""
        if peer.host and not peer.is_member and not self.host_missing(peer):
            for other in self.pending_of(peer.host):
                other.apart_ns = None if other.connection is not None else other.apart_ns

    def admit(self, peers: Iterable[Peer]) -> None:
        """Makes pending peers members, at the end of the ring, in a new epoch."""
        for peer in peers:
            assert not peer.is_member and self.peers[peer.peer_id] is peer
            peer.phase, peer.since = PeerPhase.FOLLOWING, self.epoch + 1
            del self._pending[peer.peer_id]
            self._member_counts[peer.group] = self.member_count(peer.group) + 1
            self.order.append(peer)
        self.epoch += 1

    def renew(self) -> None:
        """Begins a new epoch with the same members, which voids plans ahead."""
        self.epoch += 1

    def remove(self, peer: Peer, *, is_sent_on: bool = False) -> None:
        """Removes a peer; if it was a member, a new epoch begins. `is_sent_on`: its host meets at another master."""
        del self.peers[peer.peer_id]
        self.bind(peer, None)
        self._pending.pop(peer.peer_id, None)
        self._slots[peer.slot] = None
        for other in self.peers.values():
            other.linked &= ~(1 << peer.slot)
        if peer.is_member:
            self.order.remove(peer)
            self._member_counts[peer.group] -= 1
            if not self._member_counts[peer.group]:
                del self._member_counts[peer.group]
            self.epoch += 1
        elif peer.host and not (peer.is_left_over or is_sent_on):
            for other in self.pending_of(peer.host):  # Not its new processes, which registered after this one was gone.
                if peer.disconnected_ns is None or other.registered_ns <= peer.disconnected_ns:
                    other.is_left_over = True

    def are_linked(self, one: Peer, other: Peer) -> bool:
        """True if both ends report that their link is up."""
        return bool(one.linked >> other.slot & other.linked >> one.slot & 1)

    def link_bits(self, peer_ids: Iterable[bytes]) -> int:
        """The bits of peers, as in `Peer.linked`; ids that are not registered are ignored."""
        return sum(1 << peer.slot for peer in map(self.peers.get, set(peer_ids)) if peer is not None)

    def peers_of_bits(self, bits: int) -> list[Peer]:
        """The peers that have these bits."""
        return [peer for peer in self._slots if peer is not None and bits >> peer.slot & 1]

    def member_list(self) -> Members:
        """The member list as a message."""
        members = tuple(Member(peer.peer_id, peer.group, peer.name, peer.since) for peer in self.order)
        return Members(self.epoch, members, self.round, self.round_value, self.old_members, self.parent)

    def neighbours_of(self, peer: Peer) -> tuple[Neighbour, ...]:
        """All other peers of the group, pending ones included. Of a pair the one that registered later dials first."""
        neighbours = []
        dials = True
        for other in self.peers.values():
            if other is peer:
                dials = False
            elif other.group == peer.group:
                neighbours.append(self.as_neighbour(other, peer, dial=dials))
        return tuple(neighbours)

    def as_neighbour(self, peer: Peer, receiver: Peer, *, dial: bool) -> Neighbour:
        """What the receiver needs to know about a peer to which it must have a link."""
        link_key = self._link_key(peer, receiver)
        return Neighbour(peer.peer_id, peer.name, peer.addresses, dial, link_key, peer.is_member)

    def _link_key(self, one: Peer, other: Peer) -> bytes:
        """The key of a link: known to its two ends only, so that no peer can impersonate another."""
        if not self._link_seed:
            return b""
        pair = b"".join(sorted((one.peer_id, other.peer_id)))
        return hashlib.blake2b(pair, digest_size=32, key=self._link_seed).digest()

    def validate(self) -> None:
        """Asserts what always holds."""
        ids: list[bytes] = []
        counts: dict[int, int] = {}
        for peer in self.order:
            assert peer.is_member and self.peers.get(peer.peer_id) is peer
            assert peer.has_reported or peer.connection is None
            ids.append(peer.peer_id)
            counts[peer.group] = counts.get(peer.group, 0) + 1
        assert len(set(ids)) == len(ids)
        assert self._member_counts == counts
        used = 0
        for peer in self.peers.values():
            assert self._slots[peer.slot] is peer
            used |= 1 << peer.slot
        assert len(self.peers) == len(self._slots) - self._slots.count(None)
        pending: list[Peer] = []
        for peer in self.peers.values():
            assert peer.linked & ~used == 0
            if not peer.is_member:
                pending.append(peer)
        assert self.pending() == pending and len(self.peers) == len(pending) + len(ids)
        for connection, peer in self.by_connection.items():
            assert peer.connection == connection and self.peers.get(peer.peer_id) is peer


class Outbox:
    """Collects the effects of one step, in order, and counts events in `counts`. `now_ns` is the time of the step."""

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts if counts is not None else Counts()
        self._effects: list[MasterEffect] = []
        self.now_ns = 0
        self.answered_ns = -1
        """When the last answer to a call was sent."""
        self.refused_ns = -1
        """When the last withdrawn or refused call ended."""

    def send(self, peer: Peer, message: MasterMessage, *, may_wait: bool = False) -> None:
        """Sends to one peer, if it is connected."""
        if peer.connection is not None:
            self._effects.append(Broadcast((peer.connection,), message, may_wait))

    def reply(self, connection: Hashable | None, message: MasterMessage) -> None:
        """Sends on a connection, even if no peer is registered on it; None: it has been closed."""
        if connection is not None:
            self._effects.append(Broadcast((connection,), message))

    def broadcast(self, peers: Iterable[Peer], message: MasterMessage) -> None:
        """Sends one message to each of several peers."""
        connections = tuple(peer.connection for peer in peers if peer.connection is not None)
        if connections:
            self._effects.append(Broadcast(connections, message))

    def answer(self, peer: Peer, message: Decision, kept: Decision | None = None, *, may_wait: bool = False) -> None:
        """Sends the answer to a call and keeps it, or `kept`, to send it again if it gets lost."""
        assert message.call_id not in peer.answers
        peer.open_calls.pop(message.call_id, None)
        peer.answered_ns = self.answered_ns = self.now_ns
        if not message.round and not message.is_of_attempt:
            self.refused_ns = self.now_ns
        peer.answers[message.call_id] = kept or message
        if len(peer.answers) > limits.ANSWERS_KEPT_MAX:
            del peer.answers[next(iter(peer.answers))]
        self.send(peer, message, may_wait=may_wait)

    def log(self, level: Level, text: str, *, of_stranger: bool = False) -> None:
        """Writes a line to the log."""
        self._effects.append(Log(level, text, of_stranger))

    def take(self) -> list[MasterEffect]:
        """Returns the effects so far and empties the outbox."""
        effects, self._effects = self._effects, []
        return effects


def names(peers: Iterable[Peer]) -> str:
    """The names of peers, for the log."""
    return ", ".join(peer.name for peer in peers) or "nobody"


def some_names(peers: Sequence[Peer], bytes_max: int) -> str:
    """The names of as many peers as fit, for the log; the others are counted."""
    shown, room = 0, bytes_max - len(" and 9999 others")
    for peer in peers:
        room -= len(peer.name.encode()) + len(", ")
        if shown and room < 0:
            break
        shown += 1
    rest = len(peers) - shown
    return names(peers[:shown]) + (f" and {rest} others" if rest else "")
