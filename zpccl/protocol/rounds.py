"""Calls that a peer makes one at a time and that wait for all others: topology votes and syncs.

A round is complete when every member in its scope has made the same call: topology votes have all members of all
groups in scope, a sync the members of one group. Members in one scope that wait in different calls would wait for each
other for ever; so would a member that waits for another's vote on a collective while that one waits for it here. Such
calls are refused, naming who called what. are_peers_pending() is the exception: collectives may run beside it.

Rounds of topology votes are numbered. A vote says which round its sender knows to be complete; where a later one is, by
the word of a peer that had its answer from a former master, the vote gets the value of that round. A vote for an
earlier round is of a peer that the former master had removed (History.left_behind): it gets no value of another round.

Pending peers that fetch state ahead do not count until they are ready: nobody is told of them, and nobody waits.

update_topology() admits the pending peers whose links to all members of their group are up, in order of registration.
It waits for links that are being set up, for ADMISSION_WAIT at most. Who still lacks some then is admitted where the
others allow a ring with it, and else stays pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.collective import Collectives
from zpccl.protocol.effects import Level
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import Answer, SyncOffer, TopologyKind
from zpccl.protocol.paths import Paths

SYNC = "sync_shared_state"
FUNCTION_NAMES = {
    TopologyKind.UPDATE: "update_topology",
    TopologyKind.OPTIMIZE: "optimize_topology",
    TopologyKind.PENDING: "are_peers_pending",
}
PENDING = FUNCTION_NAMES[TopologyKind.PENDING]


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits for the others: its function, and the offer if it is a sync."""

    call_id: int
    function: str
    offer: SyncOffer | None = None
    after_round: int | None = None
    """Of a topology vote: the last round that its sender knew to be complete."""
    since_ns: int = field(default=0, compare=False)


class Rounds:
    """The waiting calls of all members, and the topology rounds among them."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        paths: Paths,
        collectives: Collectives,
        admit: Callable[[list[Peer], int], None],
        admission_wait_ns: int,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._paths = paths
        self._collectives = collectives
        self._admit = admit
        self._admission_wait_ns = admission_wait_ns
        self.calls: dict[Peer, WaitingCall] = {}
        self._update_agreed_ns: int | None = None  # When all had voted UPDATE, while joiners are waited for.

    def vote(self, peer: Peer, call: WaitingCall) -> bool:
        """A member makes a call. False if it is known already, or was refused."""
        if call.call_id in peer.answers:
            self._outbox.send(peer, peer.answers[call.call_id])
            return False
        earlier = self.calls.get(peer)
        if earlier is not None:
            if earlier.call_id != call.call_id:
                reason = f"this peer waits in {earlier.function} already"
                self._outbox.answer(peer, Answer(call.call_id, Result.INVALID_USAGE, reason=reason))
            return False
        self.calls[peer] = call
        return not self.answer_missed()

    def forget(self, peer: Peer, call_id: int) -> None:
        """A call counts no more: a former master has answered it."""
        if peer in self.calls and self.calls[peer].call_id == call_id:
            del self.calls[peer]

    def answer_missed(self) -> bool:
        """Answers votes for a round that is complete already. True if there were any."""
        number, value = self._registry.round, self._registry.round_value
        votes = [(peer, call) for peer, call in self.calls.items() if call.after_round is not None]
        missed = {peer: call for peer, call in votes if call.after_round == number - 1}
        for peer, call in missed.items():
            del self.calls[peer]
            self._outbox.answer(peer, Answer(call.call_id, Result.SUCCESS, value=value, round=number))
        return bool(missed)

    def refuse(self, function: str, group: int | None, reason: str) -> None:
        """Ends all waiting calls of a function, of one group or of all, with INVALID_USAGE."""
        waiting = [peer for peer, call in self.calls.items() if call.function == function]
        calls = [(peer, self.calls.pop(peer).call_id) for peer in waiting if group is None or peer.group == group]
        self._collectives.refuse(calls, Result.INVALID_USAGE, reason)

    def withdraw(self, peer: Peer, call_id: int) -> bool:
        """A member takes a call back. False if it is not one of ours."""
        call = self.calls.get(peer)
        if call is None or call.call_id != call_id:
            return False
        del self.calls[peer]
        self._outbox.answer(peer, Answer(call_id, Result.RANK_CONNECTION_LOST, reason="withdrawn"))
        return True

    def evaluate(self, now_ns: int) -> None:
        """Answers the topology round that is complete, and refuses calls that wait for each other."""
        if not self.calls:  # As after every event of a collective.
            self._update_agreed_ns = None
            return
        for peer in [peer for peer in self.calls if self._registry.peers.get(peer.peer_id) is not peer]:
            del self.calls[peer]
        if not self._registry.is_committed:
            self._update_agreed_ns = None
            return
        if self._registry.have_all_reported:  # Else one may have heard what became of them.
            self._refuse_conflicts()
        members = self._registry.members()
        functions = {call.function for call in self.calls.values()}
        if not members or len(self.calls) < len(members) or len(functions) != 1:
            self._update_agreed_ns = None
            return
        function = functions.pop()
        if function == FUNCTION_NAMES[TopologyKind.UPDATE]:
            self._update(now_ns)
        elif function == PENDING:
            self._answer_all(int(bool(self._registry.joiners())))
        elif function == FUNCTION_NAMES[TopologyKind.OPTIMIZE]:
            self._answer_all()

    def sync_offers(self, group: int) -> dict[Peer, SyncOffer] | None:
        """The offers of the group's members in ring order, once all have made one."""
        offers: dict[Peer, SyncOffer] = {}
        for peer in self._registry.members(group):
            call = self.calls.get(peer)
            if call is None or call.offer is None:
                return None
            offers[peer] = call.offer
        return offers

    def take_sync(self, group: int) -> None:
        """The sync of a group has begun: its calls wait here no more."""
        for peer in self._registry.members(group):
            del self.calls[peer]

    def tick(self, now_ns: int) -> None:
        """Stops waiting for joiners whose time is up."""
        self.evaluate(now_ns)

    def deadline_ns(self) -> int | None:
        """When tick() has something to do."""
        return None if self._update_agreed_ns is None else self._update_agreed_ns + self._admission_wait_ns

    def _update(self, now_ns: int) -> None:
        if self._update_agreed_ns is None:
            self._update_agreed_ns = now_ns
        ready = self._linked_joiners()
        waited = now_ns - self._update_agreed_ns >= self._admission_wait_ns
        if len(ready) < len(self._registry.joiners()) and not waited:
            return
        if waited:
            ready += self._partly_linked_joiners(ready)
        self._update_agreed_ns = None
        voters, self.calls = self.calls, {}
        self._count_round(len(ready))
        if ready:
            self._outbox.log(Level.INFO, f"epoch {self._registry.epoch + 1}: admitting {names(ready)}")
            self._admit(ready, now_ns)
        self._succeed(voters)

    def _linked_joiners(self) -> list[Peer]:
        ready: list[Peer] = []
        for joiner in self._registry.joiners():
            others = self._registry.members(joiner.group) + [peer for peer in ready if peer.group == joiner.group]
            if joiner.connection is not None and all(self._registry.are_linked(joiner, other) for other in others):
                ready.append(joiner)
        return ready

    def _partly_linked_joiners(self, ready: list[Peer]) -> list[Peer]:
        """Those that can be admitted beside the ready ones although they lack links."""
        found: list[Peer] = []
        for joiner in self._registry.joiners():
            if joiner.connection is None or joiner in ready:
                continue
            others = [peer for peer in [*ready, *found] if peer.group == joiner.group]
            if self._paths.can_join(self._registry.members(joiner.group) + others, joiner):
                found.append(joiner)
        return found

    def _answer_all(self, value: int = 0) -> None:
        voters, self.calls = self.calls, {}
        self._count_round(value)
        self._succeed(voters)

    def _count_round(self, value: int) -> None:
        self._registry.round += 1
        self._registry.round_value = value

    def _succeed(self, voters: dict[Peer, WaitingCall]) -> None:
        number, value = self._registry.round, self._registry.round_value
        for peer, call in voters.items():
            self._outbox.answer(peer, Answer(call.call_id, Result.SUCCESS, value=value, round=number))

    def _refuse_conflicts(self) -> None:
        if not self._collectives.ballots and len({call.function for call in self.calls.values()}) <= 1:
            return
        for peer, call in list(self.calls.items()):
            rivals = [
                other
                for other, its_call in self.calls.items()
                if its_call.function != call.function
                and (other.group == peer.group or SYNC not in (call.function, its_call.function))
            ]
            if rivals:
                return self._refuse([peer, *rivals], ())
            if call.function != PENDING:
                for tag, voters in self._collectives.undecided(peer.group).items():
                    if peer not in voters:
                        return self._refuse([peer], ((peer.group, tag, voters),))

    def _refuse(self, peers: list[Peer], collectives: tuple[tuple[int, int, list[Peer]], ...]) -> None:
        """Refuses the calls of `peers`, all that wait with them, and the voting for `collectives`."""
        functions = {self.calls[peer].function for peer in peers}
        groups = {peer.group for peer in peers}
        refused = {
            peer: call
            for peer, call in self.calls.items()
            if call.function in functions and (call.function != SYNC or peer.group in groups)
        }
        texts = [
            f"{function} by {names(peer for peer, call in refused.items() if call.function == function)}"
            for function in sorted(functions)
        ]
        ballots = self._collectives.ballots
        texts += [f"{ballots[group, tag].title} by {names(voters)}" for group, tag, voters in collectives]
        reason = f"peers wait for each other in different calls: {'; '.join(texts)}"[: limits.TEXT_CHARS_MAX]
        self._outbox.log(Level.WARNING, reason)
        calls = [(peer, self.calls.pop(peer).call_id) for peer in refused]
        for group, tag, _ in collectives:
            calls += self._collectives.take_votes(group, tag)
        self._collectives.refuse(calls, Result.INVALID_USAGE, reason)
        self._refuse_conflicts()

    def validate(self) -> None:
        """States what always holds."""
        assert all(peer.is_member for peer in self.calls)
        assert all((call.function == SYNC) == (call.offer is not None) for call in self.calls.values())
