"""Operations: what members do together, from their votes until all have voted.

    voting --all in scope voted--> planned or answered, by its kind (collective.py, rounds.py, statesync.py)
       |
       | withdrawn, refused
       v
    answered

Members that make the same call are in one operation, known by its key. The scope of a collective and of a sync are the
members of one group, that of a topology call all members. Collectives of a member are told apart by their tags; of the
other calls it has one at a time. Members in one scope that wait in different ones would wait for each other for ever;
so would a member that waits for another's vote on a collective while that one waits for it elsewhere. Such calls are
refused, naming who called what. are_peers_pending() is the exception: collectives may run beside it.

A vote keeps its call id, so it may come twice. Who is lost is no longer waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import Answer, CollectiveSpec, SyncOffer, TopologyKind, TopologyVote
from zpccl.types import CollectiveKind

Call: TypeAlias = CollectiveSpec | TopologyVote | SyncOffer

COLLECTIVE = "collective"
SYNC = "sync_shared_state"
UPDATE = "update_topology"
OPTIMIZE = "optimize_topology"
PENDING = "are_peers_pending"
TOPOLOGY = {TopologyKind.UPDATE: UPDATE, TopologyKind.OPTIMIZE: OPTIMIZE, TopologyKind.PENDING: PENDING}


class Key(NamedTuple):
    """What tells operations apart: the function, its scope (a group, or None for all members) and the tag."""

    function: str
    group: int | None = None
    tag: int = 0


def key_of(peer: Peer, call: Call) -> Key:
    """The operation that a peer votes for by a call."""
    if isinstance(call, CollectiveSpec):
        return Key(COLLECTIVE, peer.group, call.tag)
    return Key(SYNC, peer.group) if isinstance(call, SyncOffer) else Key(TOPOLOGY[call.kind])


class Vote(NamedTuple):
    """A member's call."""

    call_id: int
    call: Call


@dataclass(slots=True, eq=False)
class Operation:
    """The votes for one operation."""

    key: Key
    begun_ns: int
    """When the first came."""
    voted_ns: int
    """When the last came."""
    votes: dict[Peer, Vote] = field(default_factory=dict)
    agreed_ns: int | None = None
    """When all had voted the same, where it waits for links or for joiners."""

    @property
    def name(self) -> str:
        """What the first voter calls, for people."""
        call = next(iter(self.votes.values())).call
        if not isinstance(call, CollectiveSpec):
            return self.key.function
        known = call.kind in set(CollectiveKind)
        kind = CollectiveKind(call.kind).name.lower() if known else str(call.kind)
        return f"{kind} at tag {call.tag}"

    @property
    def title(self) -> str:
        """The same with its scope."""
        return self.name if self.key.group is None else f"{self.name} of group {self.key.group}"


class Operations:
    """All operations for which votes are missing, or that wait for links or joiners.

    Args:
        next_attempt_id: gives ids that grow and never repeat.
    """

    def __init__(self, registry: Registry, outbox: Outbox, next_attempt_id: Callable[[], int]) -> None:
        self._registry = registry
        self._outbox = outbox
        self._next_attempt_id = next_attempt_id
        self.pending: dict[Key, Operation] = {}
        self.voted_ns = -1
        """When the last vote came."""
        self._exclusive: dict[Peer, Operation] = {}  # In which a peer waits: those that it may be in one at a time.

    def of(self, function: str) -> list[Operation]:
        """The operations of a function."""
        return [operation for key, operation in self.pending.items() if key.function == function]

    def members_of(self, key: Key) -> list[Peer]:
        """Whose votes an operation needs, in ring order."""
        return self._registry.members(key.group)

    def is_complete(self, operation: Operation) -> bool:
        """True once all have voted."""
        group = operation.key.group
        needed = len(self._registry.order) if group is None else self._registry.member_count(group)
        return len(operation.votes) >= needed

    def vote(self, peer: Peer, call_id: int, call: Call, now_ns: int) -> bool:
        """A member makes a call. False if it is known already, or was refused."""
        key = key_of(peer, call)
        if key.function == COLLECTIVE:
            earlier, busy = self.pending.get(key), f"tag {key.tag} is in use by another call of this peer"
        else:
            earlier = self._exclusive.get(peer)
            busy = f"this peer waits in {earlier.key.function} already" if earlier is not None else ""
        known = earlier.votes.get(peer) if earlier is not None else None
        if known is not None:
            if known.call_id != call_id:
                self._outbox.answer(peer, Answer(call_id, Result.INVALID_USAGE, reason=busy))
            return False
        operation = self.pending.setdefault(key, Operation(key, now_ns, now_ns))
        operation.voted_ns = self.voted_ns = now_ns
        operation.votes[peer] = Vote(call_id, call)
        if key.function != COLLECTIVE:
            self._exclusive[peer] = operation
        return True

    def take(self, key: Key) -> dict[Peer, Vote]:
        """Ends the voting: who had voted. All of these calls are then to be answered, or planned for."""
        votes = self.pending.pop(key).votes
        if key.function != COLLECTIVE:
            for peer in votes:
                del self._exclusive[peer]
        return votes

    def forget(self, peer: Peer, call_id: int) -> Vote | None:
        """A vote counts no more. Returns it, None if there is none."""
        for operation in self.pending.values():
            vote = operation.votes.get(peer)
            if vote is not None and vote.call_id == call_id:
                self._remove(operation, peer)
                return vote
        return None

    def withdraw(self, peer: Peer, call_id: int) -> bool:
        """A member takes a vote back. False if there is none."""
        if self.forget(peer, call_id) is None:
            return False
        self._outbox.answer(peer, Answer(call_id, Result.RANK_CONNECTION_LOST, reason="withdrawn"))
        return True

    def forget_lost(self) -> None:
        """The member list has changed: votes of those who are gone count no more."""
        for operation in list(self.pending.values()):
            for peer in [peer for peer in operation.votes if self._registry.peers.get(peer.peer_id) is not peer]:
                self._remove(operation, peer)

    def refuse(self, key: Key, result: Result, reason: str, field: str = "", values: tuple[str, ...] = ()) -> None:
        """Ends the voting, all with the same answer."""
        self._outbox.refuse(self._take_calls(key), self._next_attempt_id, result, reason, field, values)

    def _take_calls(self, key: Key) -> list[tuple[Peer, int]]:
        return [(peer, vote.call_id) for peer, vote in self.take(key).items()]

    def _remove(self, operation: Operation, peer: Peer) -> None:
        del operation.votes[peer]
        operation.agreed_ns = None
        if operation.key.function != COLLECTIVE:
            del self._exclusive[peer]
        if not operation.votes:
            del self.pending[operation.key]

    # --- Calls that wait for each other -----------------------------------------------------------------------------

    def refuse_conflicts(self) -> None:
        """Refuses calls that wait for each other, once all members have reported: one may have heard their end."""
        if not self._exclusive or len(self.pending) <= 1 or not self._registry.have_all_reported:
            return
        while (keys := self._find_conflict()) is not None:
            self._refuse_conflict(keys)

    def _find_conflict(self) -> list[Key] | None:
        """Operations that wait for each other."""
        for peer, own in self._exclusive.items():
            rivals = [other.key for other in self.pending.values() if self._are_rivals(peer, own, other)]
            if rivals:
                return [own.key, *rivals]
            if own.key.function == PENDING:
                continue
            for other in self.pending.values():
                is_collective = other.key.function == COLLECTIVE and other.key.group == peer.group
                if is_collective and other.agreed_ns is None and peer not in other.votes:
                    return [own.key, other.key]
        return None

    @staticmethod
    def _are_rivals(peer: Peer, own: Operation, other: Operation) -> bool:
        """True for two calls one of which a member makes at a time, where somebody in one scope makes the other."""
        if other is own or other.key.function == COLLECTIVE:
            return False
        need_all = SYNC not in (own.key.function, other.key.function)
        return need_all or any(voter.group == peer.group for voter in other.votes)

    def _refuse_conflict(self, keys: Sequence[Key]) -> None:
        texts = [f"{self.pending[key].name} by {names(self.pending[key].votes)}" for key in sorted(keys, key=_place)]
        reason = f"peers wait for each other in different calls: {'; '.join(texts)}"[: limits.TEXT_CHARS_MAX]
        self._outbox.log(Level.WARNING, reason)
        calls = [call for key in keys for call in self._take_calls(key)]
        self._outbox.refuse(calls, self._next_attempt_id, Result.INVALID_USAGE, reason)

    def validate(self) -> None:
        """States what always holds."""
        for key, operation in self.pending.items():
            assert operation.key == key and operation.votes
            for peer, vote in operation.votes.items():
                assert peer.is_member and self._registry.peers.get(peer.peer_id) is peer
                assert key_of(peer, vote.call) == key
                assert key.function == COLLECTIVE or self._exclusive[peer] is operation
        assert all(peer in operation.votes for peer, operation in self._exclusive.items())


def _place(key: Key) -> tuple[bool, Key]:
    return key.function == COLLECTIVE, key
