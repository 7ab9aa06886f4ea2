"""Stragglers and deadlocks: operations that lack votes.

An operation needs the votes of all members in its scope: a collective and a sync those of one group, a topology call
those of all members. A straggler is a member whose vote an operation lacks and that is in no other operation. The log
names it after STRAGGLER_WARNING, again after twice that time, and so on. With a timeout, it is removed when the timeout
has passed, unless it is disconnected or has just come back. A member that is in another operation is held up there; its
time as a straggler begins when that operation ends. are_peers_pending() does not hold a member up, because collectives
may run at the same time. If some members wait in it and others wait for these in a collective, the members in
are_peers_pending() are the stragglers.

Operations may also wait for each other, if peers are in calls with different tags, or in batches that overlap in part.
A deadlock is a set of operations that all lack votes, and only of peers that are in calls of the set and in no others.
A peer that is in a running call, or in none, may still vote, so no operation that waits for it is in a deadlock. Once
an operation of the set has waited for STRAGGLER_WARNING, the log names the peers and their operations. With a timeout,
a deadlock that has lasted that long ends: all its operations are refused to all their voters, and nobody is removed. An
operation outside the set that waits for peers in it is not refused.

If voters have started an attempt ahead, the missing peers may start it too, and all may commit it among themselves. So
the master announces the member list anew before it refuses the operations, which voids plans ahead. A peer that has
acknowledged this list can no longer start the attempt. If it started it before, its vote has already come.

The master checks operations when the next of these times may have come, not at every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.membership import Outbox, Peer, Registry, names, some_names
from zpccl.protocol.operation import PENDING, Key, Operation, Operations


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that lacks votes."""

    operation: str
    since_ns: int
    voted_ns: int
    """When the last vote came."""
    voters: Sequence[Peer]
    missing: Sequence[Peer]
    still_lacks: Callable[[Peer], bool]
    """True if the vote of a peer is missing at the time of the call."""
    refuse: Callable[[str], None]
    """Refuses the operation to all voters, with a reason."""
    is_ahead: bool
    """True if voters have started an attempt that was planned ahead."""
    holds_up: bool = True
    """False for are_peers_pending: collectives may run at the same time."""

    def stragglers(self) -> dict[Peer, int]:
        """The missing peers that are in no other operation, and since when the operation waits for each."""
        idle = [peer for peer in self.missing if not _calls_that_hold_up(peer)]
        return {peer: max(self.since_ns, peer.answered_ns) for peer in idle}


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Operations that wait for each other."""

    waits: Sequence[Wait]
    since_ns: int
    """When it arose: at the last vote in it, or the last answer that one of its peers got."""

    def describe(self) -> str:
        """Names the peers in each operation, and the peers that it waits for."""
        texts = [
            f"{some_names(wait.voters, _NAMES_BYTES_MAX)} in {wait.operation}, "
            f"which waits for {some_names(wait.missing, _NAMES_BYTES_MAX)}"
            for wait in self.waits[: limits.STRAGGLER_LINES_MAX]
        ]
        if len(self.waits) > len(texts):
            texts.append(f"and {len(self.waits) - len(texts)} more operations")
        return f"peers wait for each other: {'; '.join(texts)}"


_NAMES_BYTES_MAX = limits.TEXT_CHARS_MAX // (4 * limits.STRAGGLER_LINES_MAX)


@dataclass(slots=True)
class _Warning:
    """A warning in the log about an operation, and when it is repeated."""

    wait: Wait
    named: list[Peer]
    """Peers that the log names as waited for; empty where the log only counted the operation."""
    next_ns: int


_Group: TypeAlias = "frozenset[tuple[str, int]]"
"""The operations of a deadlock, each with its start."""


class Stragglers:
    """Finds stragglers and deadlocks among all operations."""

    def __init__(self, registry: Registry, outbox: Outbox, operations: Operations) -> None:
        self._registry = registry
        self._outbox = outbox
        self._operations = operations
        self._warnings: dict[tuple[str, int], _Warning] = {}  # By operation and its start.
        self._deadlocks: dict[_Group, int] = {}  # When each is logged again, by its operations.
        # By deadlock: the epoch that voids plans ahead, and the peers that have to acknowledge it.
        self._awaited: dict[_Group, tuple[int, set[Peer]]] = {}
        self._check_ns: int | None = None
        # The latest vote or answer, and the epoch, for which a check is scheduled: newer ones may cause a deadlock.
        self._newest_ns = -1
        self._epoch = -1

    def waits(self) -> Iterator[Wait]:
        """All operations that lack votes."""
        for operation in self._operations.pending.values():
            if operation.agreed_ns is None:
                yield self._wait_of(operation)

    def _wait_of(self, operation: Operation) -> Wait:
        operations, members = self._operations, self._operations.members_of(operation.key)

        def still_lacks(peer: Peer) -> bool:
            is_open = operations.pending.get(operation.key) is operation and operation.agreed_ns is None
            return is_open and peer not in operation.votes

        def refuse(reason: str) -> None:
            operations.refuse(operation.key, Result.INVALID_USAGE, reason)

        voters = [peer for peer in members if peer in operation.votes]
        missing = [peer for peer in members if peer not in operation.votes]
        is_ahead = any(vote.ahead for vote in operation.votes.values())
        facts = (operation.title, operation.begun_ns, operation.voted_ns, voters, missing, still_lacks, refuse)
        return Wait(*facts, is_ahead, holds_up=operation.key.function != PENDING)

    def stragglers(self, now_ns: int) -> tuple[tuple[str, str, int], ...]:
        """Peers that others have waited for at least STRAGGLER_WARNING: name, operation, time waited in nanoseconds."""
        return tuple(
            (peer.name, wait.operation, now_ns - since_ns)
            for wait in self.waits()
            for peer, since_ns in wait.stragglers().items()
            if now_ns - since_ns >= limits.STRAGGLER_WARNING_NS
        )

    def settle(self, now_ns: int, timeout_ns: int | None) -> None:
        """To be called after every event. Schedules a check of new operations, and logs stragglers that have voted."""
        newest_ns = self._operations.voted_ns if self._operations.pending else -1
        soonest_ns = now_ns + min(limits.STRAGGLER_WARNING_NS, timeout_ns or limits.STRAGGLER_WARNING_NS)
        if newest_ns < 0:
            self._check_ns = None
        elif max(newest_ns, self._outbox.answered_ns) > self._newest_ns or self._registry.epoch != self._epoch:
            self._check_ns = soonest_ns if self._check_ns is None else min(self._check_ns, soonest_ns)
        elif self._check_ns is None and any(wait.missing for wait in self.waits()):  # A vote was withdrawn.
            self._check_ns = soonest_ns
        self._newest_ns = max(self._newest_ns, newest_ns, self._outbox.answered_ns)
        self._epoch = self._registry.epoch
        self._log_released()

    def tick(self, now_ns: int, timeout_ns: int | None) -> list[tuple[Peer, str]]:
        """Logs warnings. Returns the peers to remove, with reasons; without a timeout, none."""
        if self._check_ns is None or now_ns < self._check_ns:
            return []
        self._check_ns = None
        overdue: dict[Peer, str] = {}
        waits = [wait for wait in self.waits() if wait.missing]
        deadlocks = find_deadlocks(waits)
        self._end_deadlocks(deadlocks, now_ns, timeout_ns)
        in_deadlock = {_key(wait) for deadlock in deadlocks for wait in deadlock.waits}
        waits = [wait for wait in waits if _key(wait) not in in_deadlock]
        self._warn_of([wait for wait in waits if self._warn_ns(wait) <= now_ns], now_ns)
        known = in_deadlock.union(_key(wait) for wait in waits)
        self._warnings = {key: warning for key, warning in self._warnings.items() if key in known}
        for wait in waits:
            next_ns = self._warn_ns(wait)
            stragglers = wait.stragglers()
            if timeout_ns is not None:  # A member that is still to report may have voted: losses.py judges it.
                here = {peer: since_ns for peer, since_ns in stragglers.items() if peer.has_reported}
                late_ns = {peer: _late_ns(peer, since_ns + timeout_ns, now_ns) for peer, since_ns in here.items()}
                for peer in (peer for peer in here if now_ns >= late_ns[peer]):
                    overdue.setdefault(peer, f"{_describe(wait, now_ns)}, and this peer did not vote")
                due_ns = [late for late in late_ns.values() if now_ns < late]
                next_ns = min(next_ns, now_ns + timeout_ns, *due_ns)  # Peers held up now are not late before that.
            self._check_no_later(next_ns)
        return list(overdue.items())

    def deadline_ns(self) -> int | None:
        """When tick() has something to do."""
        return self._check_ns

    def _check_no_later(self, next_ns: int) -> None:
        self._check_ns = next_ns if self._check_ns is None else min(self._check_ns, next_ns)

    def _end_deadlocks(self, deadlocks: list[Deadlock], now_ns: int, timeout_ns: int | None) -> None:
        """Logs deadlocks, and refuses the operations of those that have lasted too long."""
        named: dict[_Group, int] = {}
        awaited: dict[_Group, tuple[int, set[Peer]]] = {}
        for index, deadlock in enumerate(deadlocks):
            key = frozenset(_key(wait) for wait in deadlock.waits)
            began_ns = min(wait.since_ns for wait in deadlock.waits)
            next_ns = self._deadlocks.get(key, began_ns + limits.STRAGGLER_WARNING_NS)
            # A member that has not reported may know a decision.
            may_end = timeout_ns is not None and self._registry.have_all_reported
            is_over = may_end and now_ns - deadlock.since_ns >= (timeout_ns or 0)
            if is_over and any(wait.is_ahead for wait in deadlock.waits):
                awaited[key] = self._await_void_plans(key, deadlock)
                is_over = not awaited[key][1]
            elif key in self._awaited:
                awaited[key] = self._awaited[key]  # That list is not committed yet.
            if (is_over or next_ns <= now_ns) and index < limits.STRAGGLER_LINES_MAX:
                how = "; the master ends their calls" if is_over else ""
                text = f"{deadlock.describe()}; since {(now_ns - began_ns) // limits.SECOND} s{how}"
                self._outbox.log(Level.WARNING, text[: limits.TEXT_CHARS_MAX])
            if is_over:
                for wait in deadlock.waits:
                    wait.refuse(deadlock.describe())
                continue
            if next_ns <= now_ns:
                next_ns = now_ns + max(now_ns - began_ns, limits.STRAGGLER_WARNING_NS)
            named[key] = next_ns
            self._check_no_later(next_ns)
            if timeout_ns is not None:  # If it is over already, acknowledgements and the commit schedule a check.
                due_ns = deadlock.since_ns + timeout_ns
                self._check_no_later(due_ns if may_end and due_ns > now_ns else now_ns + timeout_ns)
        self._deadlocks, self._awaited = named, awaited

    def _await_void_plans(self, key: _Group, deadlock: Deadlock) -> tuple[int, set[Peer]]:
        """Announces the member list anew, once for each deadlock. Returns its epoch and who must acknowledge it."""
        missing = {peer for wait in deadlock.waits for peer in wait.missing}
        if key not in self._awaited:
            self._registry.renew()
            return self._registry.epoch, missing
        epoch, peers = self._awaited[key]
        return epoch, peers & missing

    def on_acknowledged(self, peer: Peer, epoch: int) -> None:
        """A member has accepted a list."""
        for void_epoch, peers in self._awaited.values():
            if epoch >= void_epoch and peer in peers:
                peers.remove(peer)
                if not peers:
                    self._check_no_later(self._outbox.now_ns)

    def on_committed(self) -> None:
        """The member list is committed."""
        if any(not peers for _, peers in self._awaited.values()):
            self._check_no_later(self._outbox.now_ns)

    def _warn_ns(self, wait: Wait) -> int:
        """When the next warning of an operation is due."""
        known = self._warnings.get(_key(wait))
        return known.next_ns if known is not None else wait.since_ns + limits.STRAGGLER_WARNING_NS

    def _warn_of(self, waits: list[Wait], now_ns: int) -> None:
        for index, wait in enumerate(waits):
            waited_ns = now_ns - wait.since_ns
            shortest_ns = min(waited_ns, limits.STRAGGLER_WARNING_NS)
            late = [peer for peer, since_ns in wait.stragglers().items() if now_ns - since_ns >= shortest_ns]
            is_logged = index < limits.STRAGGLER_LINES_MAX
            if is_logged:
                who = names(late) if late else f"{names(wait.missing)}, busy in other calls"
                text = f"waiting for {who}: {_describe(wait, now_ns)}"
                self._outbox.log(Level.WARNING, text[: limits.TEXT_CHARS_MAX])
            named = (late or list(wait.missing)) if is_logged else []
            self._warnings[_key(wait)] = _Warning(wait, named, now_ns + waited_ns)
        if len(waits) > limits.STRAGGLER_LINES_MAX:
            self._outbox.log(Level.WARNING, f"{len(waits) - limits.STRAGGLER_LINES_MAX} more operations lack votes")

    def _log_released(self) -> None:
        """Logs peers that a warning has named and that are no longer waited for."""
        for warning in self._warnings.values():
            released = [peer for peer in warning.named if not warning.wait.still_lacks(peer)]
            if released:
                warning.named = [peer for peer in warning.named if peer not in released]
                present = [peer for peer in released if self._registry.peers.get(peer.peer_id) is peer]
                if present:
                    text = f"no longer waiting for {names(present)} in {warning.wait.operation}"
                    self._outbox.log(Level.INFO, text[: limits.TEXT_CHARS_MAX])


def find_deadlocks(waits: Sequence[Wait]) -> list[Deadlock]:
    """The sets of operations that wait for each other, and for nobody else."""
    lacked: dict[Peer, set[Peer]] = {}  # By voter: the peers that its calls wait for.
    vote_counts: dict[Peer, int] = {}
    for wait in waits:
        for peer in wait.voters if wait.holds_up else ():
            vote_counts[peer] = vote_counts.get(peer, 0) + 1
            lacked.setdefault(peer, set()).update(wait.missing)
    stuck = {peer for peer, count in vote_counts.items() if count == _calls_that_hold_up(peer)}
    lacking: dict[Peer, set[Peer]] = {}  # By peer: the voters whose calls wait for it.
    for peer in stuck:
        for other in lacked[peer]:
            lacking.setdefault(other, set()).add(peer)
    free = [peer for peer in lacking if peer not in stuck]
    while free:  # If a peer can still vote, a peer that waits for it can vote after it.
        released = lacking.get(free.pop(), set()) & stuck
        stuck -= released
        free += released
    lacked = {peer: lacked[peer] for peer in stuck}
    lacking = {peer: others & stuck for peer, others in lacking.items() if peer in stuck}
    deadlocks = []
    while stuck:
        peer = next(iter(stuck))
        while further := _reach(peer, lacked) - _reach(peer, lacking):
            peer = further.pop()
        members = _reach(peer, lacked)
        stuck -= _reach(peer, lacking)
        indexes = [i for i, wait in enumerate(waits) if wait.holds_up and not members.isdisjoint(wait.voters)]
        times = [waits[index].voted_ns for index in indexes] + [peer.answered_ns for peer in members]
        deadlocks.append((indexes[0], Deadlock([waits[index] for index in indexes], max(times))))
    return [deadlock for _, deadlock in sorted(deadlocks, key=lambda item: item[0])]


def _reach(peer: Peer, edges: Mapping[Peer, set[Peer]]) -> set[Peer]:
    """All peers that can be reached from a peer along edges, itself included."""
    found, added = {peer}, [peer]
    while added:
        news = edges.get(added.pop(), set()) - found
        found |= news
        added += news
    return found


def _calls_that_hold_up(peer: Peer) -> int:
    """How many of a peer's open calls keep it from making others."""
    return sum(key != Key(PENDING) for key in peer.open_calls.values())


def _key(wait: Wait) -> tuple[str, int]:
    return wait.operation, wait.since_ns


def _describe(wait: Wait, now_ns: int) -> str:
    return f"{names(wait.voters)} called {wait.operation} {(now_ns - wait.since_ns) // limits.SECOND} s ago"


def _late_ns(peer: Peer, due_ns: int, now_ns: int) -> int:
    """When a straggler is removed. One that is away, or just back, may have voted: once it is back, it says so again.

    One that comes and goes must not hold up the others for ever.
    """
    away_ns = now_ns if peer.connection is None else peer.back_ns
    if away_ns is None:
        return due_ns
    return max(due_ns, min(away_ns + limits.CUT_OFF_SPREAD_NS, due_ns + limits.AWAY_EXCUSE_MAX_NS))
