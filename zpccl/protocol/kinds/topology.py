"""Topology calls: calls that all members of all groups make together.

Rounds of topology votes are numbered. A vote carries the last round that its sender knows to be complete. If the next
round is complete, too, because a former master had answered another peer in it, the vote gets the value of that round.
A vote for an even earlier round is from a peer that the former master had removed (History.parted), and does not get
the value of another round.

A pending peer that fetches state ahead does not count as a joiner until it is ready: no call reports or awaits it. Nor
does one that has lacked links for ADMISSION_WAIT, until it has them: it may never have any, and a program may make no
step while a joiner is reported.

update_topology() admits the pending peers whose links to all members of their group are up, in order of registration.
It waits at most ADMISSION_WAIT for links that are being set up. A pending peer that still lacks links after that is
admitted if it has a link to one member, since most operations need no more (paths.py); else it stays pending. Peers of
one host are admitted together, or all stay pending.

optimize_topology() tells the members how many of them, from the end of the list, should measure their paths to all
others. All do so afterwards (zpccl/measuring.py), and meet in all-reduces, whose reports bring the results.
"""

from __future__ import annotations

from collections.abc import Callable

from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import Decision, TopologySpec, Vote
from zpccl.protocol.operation import PENDING, TOPOLOGY, UPDATE, Attempt, Key, Kind, Operation, Operations
from zpccl.protocol.paths import Paths


class Rounds(Kind[Attempt]):
    """The rounds of topology votes."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        paths: Paths,
        operations: Operations,
        admit: Callable[[list[Peer], int], None],
        unmeasured: Callable[[int], int],
        admission_wait_ns: int,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._paths = paths
        self._operations = operations
        self._admit = admit
        self._unmeasured = unmeasured
        self.wait_ns = admission_wait_ns
        operations.add_kind(self, *TOPOLOGY.values())

    def on_voted(self, operation: Operation, now_ns: int) -> None:
        """The vote may be for a round that is complete."""
        del operation, now_ns
        self.answer_missed()

    def answer_missed(self) -> None:
        """Answers votes for a round that is already complete."""
        number, value = self._registry.round, self._registry.round_value
        for function in TOPOLOGY.values():
            operation = self._operations.pending.get(Key(function))
            for peer, vote in list(operation.votes.items()) if operation is not None else ():
                assert isinstance(vote.spec, TopologySpec)
                if vote.spec.after_round == number - 1:
                    self._operations.forget(peer, vote.call_id)
                    self._outbox.answer(peer, Decision(vote.call_id, Result.SUCCESS, value=value, round=number))

    def evaluate(self, now_ns: int) -> None:
        """Answers the calls for which all have voted, unless they still wait for the links of joiners."""
        for function in TOPOLOGY.values():
            operation = self._operations.pending.get(Key(function))
            if operation is None:
                continue
            if not self._registry.is_committed or not self._operations.is_complete(operation):
                operation.agreed_ns = None
            elif function == UPDATE:
                self._update(operation, now_ns)
            elif function == PENDING:
                self._complete(operation, int(bool(self._joiners(now_ns))))
            else:
                self._complete(operation, self._unmeasured(now_ns))

    def _update(self, operation: Operation, now_ns: int) -> None:
        if operation.agreed_ns is None:
            operation.agreed_ns = now_ns
        joiners = self._joiners(now_ns)
        waited = now_ns - operation.agreed_ns >= self.wait_ns
        ready = self._linked_joiners(joiners)
        if len(ready) < len(joiners) and not waited:
            return
        while waited:  # Repeated without hosts that cannot be admitted whole: others may be linked to these only.
            ready += self._partly_linked_joiners(joiners, ready)
            whole = self._registry.whole_hosts(ready)
            if len(whole) == len(ready):
                break
            joiners = [peer for peer in joiners if peer in whole or (peer not in ready and not peer.host)]
            ready = self._linked_joiners(joiners)
        votes = self._take(operation, len(ready))
        if ready:
            self._outbox.log(Level.INFO, f"epoch {self._registry.epoch + 1}: admitting {names(ready)}")
            self._admit(ready, now_ns)
        self._succeed(votes)

    def _joiners(self, now_ns: int) -> list[Peer]:
        """The joiners that calls report and await."""
        return self._registry.whole_hosts(
            peer
            for peer in self._registry.joiners()
            if peer.unlinked_ns is None or now_ns - peer.unlinked_ns < self.wait_ns
        )

    def _linked_joiners(self, joiners: list[Peer]) -> list[Peer]:
        ready: list[Peer] = []
        for joiner in joiners:
            others = self._registry.members(joiner.group) + [peer for peer in ready if peer.group == joiner.group]
            if joiner.connection is not None and all(self._registry.are_linked(joiner, other) for other in others):
                ready.append(joiner)
        return ready

    def _partly_linked_joiners(self, joiners: list[Peer], ready: list[Peer]) -> list[Peer]:
        """Joiners that can be admitted along with the ready ones although they lack links."""
        found: list[Peer] = []
        for joiner in joiners:
            if joiner.connection is None or joiner in ready:
                continue
            others = [peer for peer in [*ready, *found] if peer.group == joiner.group]
            if self._paths.can_join(self._registry.members(joiner.group) + others, joiner):
                found.append(joiner)
        return found

    def _complete(self, operation: Operation, value: int) -> None:
        self._succeed(self._take(operation, value))

    def _take(self, operation: Operation, value: int) -> dict[Peer, Vote]:
        """Completes the round, and returns its votes."""
        self._registry.round += 1
        self._registry.round_value = value
        return self._operations.take(operation.key)

    def _succeed(self, votes: dict[Peer, Vote]) -> None:
        number, value = self._registry.round, self._registry.round_value
        for peer, vote in votes.items():
            self._outbox.answer(peer, Decision(vote.call_id, Result.SUCCESS, value=value, round=number))
