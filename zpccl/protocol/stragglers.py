"""Who is waited for: members that do not vote in an operation while others do.

An operation needs the votes of all members in its scope: a collective and a sync those of one group, a topology call
those of all. Whoever has not voted for one for STRAGGLER_WARNING is named in the log, again after twice that time, and
so on; with a timeout it is removed when that has passed. Who is in another operation itself is held up there, and is
no straggler here: whom that one waits for is. Its time begins when that one is over. are_peers_pending() is no excuse,
since collectives may run beside it: of peers that wait there for others who wait for them in a collective, these hold
all up.

Operations may also wait for each other: of peers that are in calls with different tags, or in batches that overlap in
part. Such a knot is a set of operations of which each lacks votes of peers that are in calls of the set, and in no
others. Who is in a call that still goes on, or in none, may yet vote, so nothing that waits for it is in a knot. Once
one of the operations has waited for STRAGGLER_WARNING the log says who waits in what; with a timeout, when the knot has
lasted that long, all its operations are ended for all their voters. Nobody is removed for it. What waits for peers in a
knot that do not wait for it is not ended.

Operations are looked at when the next of these times may have come, not at every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """Whether the vote of a peer is missing, later on."""
    refuse: Callable[[str], None]
    """Ends it for all voters, with a reason."""
    holds_up: bool = True
    """False for are_peers_pending: collectives may run beside it."""

    def stragglers(self) -> dict[Peer, int]:
        """Those of the missing who are not in another operation, and since when each is waited for."""
        idle = [peer for peer in self.missing if not _calls_that_hold_up(peer)]
        return {peer: max(self.since_ns, peer.answered_ns) for peer in idle}


@dataclass(frozen=True, slots=True)
class Knot:
    """Operations that wait for each other."""

    waits: Sequence[Wait]
    since_ns: int
    """When it was tied: the last vote in it, or answer to a call beside it."""

    def describe(self) -> str:
        """Who waits in what, and for whom."""
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
    """What was said about an operation, and when it is said again."""

    wait: Wait
    named: list[Peer]
    """Who is named in the log and not yet taken back; nobody where the operation was only counted."""
    next_ns: int


class Stragglers:
    """The peers that others wait for."""

    def __init__(self, registry: Registry, outbox: Outbox, operations: Operations) -> None:
        self._registry = registry
        self._outbox = outbox
        self._operations = operations
        self._warnings: dict[tuple[str, int], _Warning] = {}  # By operation and begin.
        self._knots: dict[frozenset[tuple[str, int]], int] = {}  # When each is named again, by its operations.
        self._look_ns: int | None = None
        self._newest_ns = -1  # When the last vote or answer was given that is arranged for: it may have tied a knot.
        self._epoch = -1  # And the member list: so may a loss.

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
        facts = (operation.title, operation.begun_ns, operation.voted_ns, voters, missing, still_lacks, refuse)
        return Wait(*facts, holds_up=operation.key.function != PENDING)

    def stragglers(self, now_ns: int) -> tuple[tuple[str, str, int], ...]:
        """Who has been waited for longer than STRAGGLER_WARNING: name, operation, and for how long in nanoseconds."""
        return tuple(
            (peer.name, wait.operation, now_ns - since_ns)
            for wait in self.waits()
            for peer, since_ns in wait.stragglers().items()
            if now_ns - since_ns >= limits.STRAGGLER_WARNING_NS
        )

    def settle(self, now_ns: int, timeout_ns: int | None) -> None:
        """To be called after every event: arranges a look at what has begun, and tells of who has voted after all."""
        newest_ns = self._operations.voted_ns if self._operations.pending else -1
        soonest_ns = now_ns + min(limits.STRAGGLER_WARNING_NS, timeout_ns or limits.STRAGGLER_WARNING_NS)
        if newest_ns < 0:
            self._look_ns = None
        elif max(newest_ns, self._outbox.answered_ns) > self._newest_ns or self._registry.epoch != self._epoch:
            self._look_ns = soonest_ns if self._look_ns is None else min(self._look_ns, soonest_ns)
        elif self._look_ns is None and any(wait.missing for wait in self.waits()):  # A vote was withdrawn.
            self._look_ns = soonest_ns
        self._newest_ns = max(self._newest_ns, newest_ns, self._outbox.answered_ns)
        self._epoch = self._registry.epoch
        self._recall()

    def tick(self, now_ns: int, timeout_ns: int | None) -> list[tuple[Peer, str]]:
        """Warns. Returns who must go, and why; without a timeout nobody."""
        if self._look_ns is None or now_ns < self._look_ns:
            return []
        self._look_ns = None
        overdue: dict[Peer, str] = {}
        waits = [wait for wait in self.waits() if wait.missing]
        knots = find_knots(waits)
        self._untie(knots, now_ns, timeout_ns)
        tied = {_key(wait) for knot in knots for wait in knot.waits}
        waits = [wait for wait in waits if _key(wait) not in tied]
        self._warn_of([wait for wait in waits if self._warn_ns(wait) <= now_ns], now_ns)
        known = tied.union(_key(wait) for wait in waits)
        self._warnings = {key: warning for key, warning in self._warnings.items() if key in known}
        for wait in waits:
            next_ns = self._warn_ns(wait)
            stragglers = wait.stragglers()
            if timeout_ns is not None:
                late = [peer for peer, since_ns in stragglers.items() if now_ns - since_ns >= timeout_ns]
                for peer in late:
                    overdue.setdefault(peer, f"{_describe(wait, now_ns)}, and it did not vote")
                due_ns = [since_ns + timeout_ns for peer, since_ns in stragglers.items() if peer not in late]
                next_ns = min(next_ns, now_ns + timeout_ns, *due_ns)  # Who is held up now may be late no sooner.
            self._look_no_later(next_ns)
        return list(overdue.items())

    def deadline_ns(self) -> int | None:
        """When tick() has something to do."""
        return self._look_ns

    def _look_no_later(self, next_ns: int) -> None:
        self._look_ns = next_ns if self._look_ns is None else min(self._look_ns, next_ns)

    def _untie(self, knots: list[Knot], now_ns: int, timeout_ns: int | None) -> None:
        """Says who waits in what. Ends the operations of knots that have lasted too long."""
        named: dict[frozenset[tuple[str, int]], int] = {}
        for place, knot in enumerate(knots):
            key = frozenset(_key(wait) for wait in knot.waits)
            began_ns = min(wait.since_ns for wait in knot.waits)
            next_ns = self._knots.get(key, began_ns + limits.STRAGGLER_WARNING_NS)
            # Of those who are away one may know that something was decided.
            may_end = timeout_ns is not None and self._registry.have_all_reported
            is_over = may_end and now_ns - knot.since_ns >= (timeout_ns or 0)
            if (is_over or next_ns <= now_ns) and place < limits.STRAGGLER_LINES_MAX:
                how = "; their calls are ended" if is_over else ""
                text = f"{knot.describe()}; since {(now_ns - began_ns) // limits.SECOND} s{how}"
                self._outbox.log(Level.WARNING, text[: limits.TEXT_CHARS_MAX])
            if is_over:
                for wait in knot.waits:
                    wait.refuse(knot.describe())
                continue
            if next_ns <= now_ns:
                next_ns = now_ns + max(now_ns - began_ns, limits.STRAGGLER_WARNING_NS)
            named[key] = next_ns
            self._look_no_later(next_ns)
            if timeout_ns is not None:
                self._look_no_later(knot.since_ns + timeout_ns if may_end else now_ns + timeout_ns)
        self._knots = named

    def _warn_ns(self, wait: Wait) -> int:
        """When the next warning of an operation is due."""
        known = self._warnings.get(_key(wait))
        return known.next_ns if known is not None else wait.since_ns + limits.STRAGGLER_WARNING_NS

    def _warn_of(self, waits: list[Wait], now_ns: int) -> None:
        for place, wait in enumerate(waits):
            waited_ns = now_ns - wait.since_ns
            shortest_ns = min(waited_ns, limits.STRAGGLER_WARNING_NS)
            late = [peer for peer, since_ns in wait.stragglers().items() if now_ns - since_ns >= shortest_ns]
            is_said = place < limits.STRAGGLER_LINES_MAX
            if is_said:
                who = names(late) if late else f"{names(wait.missing)}, busy in other calls"
                text = f"waiting for {who}: {_describe(wait, now_ns)}"
                self._outbox.log(Level.WARNING, text[: limits.TEXT_CHARS_MAX])
            named = (late or list(wait.missing)) if is_said else []
            self._warnings[_key(wait)] = _Warning(wait, named, now_ns + waited_ns)
        if len(waits) > limits.STRAGGLER_LINES_MAX:
            self._outbox.log(Level.WARNING, f"{len(waits) - limits.STRAGGLER_LINES_MAX} more operations lack votes")

    def _recall(self) -> None:
        """Says of whom it has warned and who is not waited for any more."""
        for warning in self._warnings.values():
            released = [peer for peer in warning.named if not warning.wait.still_lacks(peer)]
            if released:
                warning.named = [peer for peer in warning.named if peer not in released]
                present = [peer for peer in released if self._registry.peers.get(peer.peer_id) is peer]
                if present:
                    text = f"no longer waiting for {names(present)} in {warning.wait.operation}"
                    self._outbox.log(Level.INFO, text[: limits.TEXT_CHARS_MAX])


def find_knots(waits: Sequence[Wait]) -> list[Knot]:
    """The operations that wait for each other, and for nobody else."""
    lacked: dict[Peer, set[Peer]] = {}  # By voter: whom its calls wait for.
    vote_counts: dict[Peer, int] = {}
    for wait in waits:
        for peer in wait.voters if wait.holds_up else ():
            vote_counts[peer] = vote_counts.get(peer, 0) + 1
            lacked.setdefault(peer, set()).update(wait.missing)
    stuck = {peer for peer, count in vote_counts.items() if count == _calls_that_hold_up(peer)}
    lacking: dict[Peer, set[Peer]] = {}  # By whom others wait for: these.
    for peer in stuck:
        for other in lacked[peer]:
            lacking.setdefault(other, set()).add(peer)
    free = [peer for peer in lacking if peer not in stuck]
    while free:  # Who waits for one that may yet vote may vote after it.
        released = lacking.get(free.pop(), set()) & stuck
        stuck -= released
        free += released
    lacked = {peer: lacked[peer] for peer in stuck}
    lacking = {peer: others & stuck for peer, others in lacking.items() if peer in stuck}
    knots = []
    while stuck:
        peer = next(iter(stuck))
        while further := _reach(peer, lacked) - _reach(peer, lacking):
            peer = further.pop()
        members = _reach(peer, lacked)
        stuck -= _reach(peer, lacking)
        places = [i for i, wait in enumerate(waits) if wait.holds_up and not members.isdisjoint(wait.voters)]
        times = [waits[place].voted_ns for place in places] + [peer.answered_ns for peer in members]
        knots.append((places[0], Knot([waits[place] for place in places], max(times))))
    return [knot for _, knot in sorted(knots, key=lambda item: item[0])]


def _reach(peer: Peer, edges: Mapping[Peer, set[Peer]]) -> set[Peer]:
    """A peer, and all to whom edges lead from it."""
    found, added = {peer}, [peer]
    while added:
        news = edges.get(added.pop(), set()) - found
        found |= news
        added += news
    return found


def _calls_that_hold_up(peer: Peer) -> int:
    """How many calls a peer waits in that keep it from others."""
    return sum(key != Key(PENDING) for key in peer.open_calls.values())


def _key(wait: Wait) -> tuple[str, int]:
    return wait.operation, wait.since_ns


def _describe(wait: Wait, now_ns: int) -> str:
    return f"{names(wait.voters)} called {wait.operation} {(now_ns - wait.since_ns) // limits.SECOND} s ago"
