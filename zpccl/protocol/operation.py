"""Operations: what members do together, from their votes to the decision.

    voting --all in scope voted--> running, an attempt with a plan --judged--> committed
       |                              |
       | refused, withdrawn           | failed, a peer lost, withdrawn
       v                              v
    answered                       aborted

A kind supplies what differs: when votes agree, the plan, how an attempt ends (kinds/collective.py, kinds/sync.py). A
topology call has no plan (kinds/topology.py).

Members that make the same call are in one operation, identified by its key. The scope of a collective or a sync is the
members of one group; the scope of a topology call is all members. A member may be in several collectives, told apart by
their tags, but in only one of the other calls at a time. Two members of one scope that make different calls, neither of
them a collective, would wait for each other for ever. So would a member in such a call and one in a collective that
needs the vote of the first. The master refuses calls that wait for each other, and the reason names who called what.
are_peers_pending() is the exception: collectives may run at the same time.

A vote carries its call id, so duplicates do no harm. Operations do not wait for lost members.

A master that takes over the run continues the attempts that peers report. The former master may have decided an
attempt, and perhaps only a member that has not reported yet knows how. So the new master decides an attempt only after
all its remaining participants have reported. No master decides anything while its member list is not committed
(leadership.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.membership import Outbox, Peer, Registry, have_reported, names
from zpccl.protocol.messages import (
    CollectiveSpec,
    Decision,
    PeerMessage,
    Reducing,
    Report,
    Running,
    Spec,
    SyncSpec,
    TopologyKind,
    Vote,
    Votes,
    Withdraw,
)
from zpccl.types import CollectiveKind

COLLECTIVE = "collective"
SYNC = "sync_shared_state"
UPDATE = "update_topology"
OPTIMIZE = "optimize_topology"
PENDING = "are_peers_pending"
TOPOLOGY = {TopologyKind.UPDATE: UPDATE, TopologyKind.OPTIMIZE: OPTIMIZE, TopologyKind.PENDING: PENDING}


class Key(NamedTuple):
    """Identifies an operation: the function, its scope (a group, or None for all members) and the tag."""

    function: str
    group: int | None = None
    tag: int = 0

    @property
    def title(self) -> str:
        """The operation as named in the log."""
        what = f"{self.function} at tag {self.tag}" if self.function == COLLECTIVE else self.function
        return what if self.group is None else f"{what} of group {self.group}"


def key_of(peer: Peer, spec: Spec) -> Key:
    """The key of the operation that a call belongs to."""
    if isinstance(spec, CollectiveSpec):
        return Key(COLLECTIVE, peer.group, spec.tag)
    return Key(SYNC, peer.group) if isinstance(spec, SyncSpec) else Key(TOPOLOGY[spec.kind])


class Verdict(NamedTuple):
    """The result of an attempt: SUCCESS commits it, anything else aborts it.

    Attributes:
        blamed: to whom a failure is attributed.
        is_known: the participants have told each other their results, so nobody waits for the master's decision.
    """

    result: Result = Result.SUCCESS
    reason: str = ""
    blamed: tuple[Peer, ...] = ()
    is_known: bool = False

    @property
    def is_commit(self) -> bool:
        """True if the attempt is committed."""
        return self.result == Result.SUCCESS


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One try at an operation for which all have voted."""

    attempt_id: int
    key: Key
    calls: dict[Peer, int]
    """The participants in the order of the plan, lost ones included, with the call of each."""
    begun_ns: int | None = None
    """When this master planned it; None for an attempt of a former master."""
    agreed_ns: int | None = None
    """While its plan waits for links: when all votes had come. Else None."""
    has_plan_everywhere: bool = True
    """False if a peer may get the decision without ever getting the plan: then the decision lists the participants."""

    @property
    def order(self) -> tuple[Peer, ...]:
        """The participants in the order of the plan."""
        return tuple(self.calls)


AttemptT = TypeVar("AttemptT", bound=Attempt)


class Kind(Generic[AttemptT]):
    """What differs between operations. A kind without attempts only determines when its votes suffice.

    Attributes:
        wait_ns: how long an operation waits for links or joiners once all have voted.
    """

    wait_ns: int

    def refusal_of(self, peer: Peer, vote: Vote, running: Attempt | None) -> Decision | None:
        """The refusal of an invalid call, None for a valid one. `running`: the running attempt at its operation."""
        del peer, vote, running
        return None

    def on_voted(self, operation: Operation, now_ns: int) -> None:
        """A member has sent a vote, for the first time or again."""

    def on_vote_again(self, attempt: AttemptT, peer: Peer, vote: Vote) -> None:
        """A participant of an attempt votes again, so it may lack the plan."""

    def evaluate(self, now_ns: int) -> None:
        """Plans or answers operations whose votes suffice. Called after every event."""

    def on_members_changed(self, now_ns: int) -> None:
        """The member list has changed: operations stop waiting for lost members."""

    def on_links_changed(self, now_ns: int) -> None:
        """A link came up or went down: plans that wait for links are tried again."""

    def tick(self, now_ns: int) -> None:
        """The deadline has passed."""

    def overdue(self, now_ns: int) -> list[int | None]:
        """The groups in which plans have waited too long for links: members that are cut off are to be removed."""
        del now_ns
        return []

    def wait_again(self, now_ns: int) -> None:
        """The members that are cut off must stay: restarts the wait of all plans that wait for links."""

    def judge(self, attempt: AttemptT, survivors: list[Peer]) -> Verdict | None:
        """The verdict on an attempt with these survivors; None while it continues. Changes nothing."""
        raise NotImplementedError

    def on_report(self, attempt: AttemptT, peer: Peer, report: Report) -> None:
        """A peer has done its part of an attempt, or failed."""
        raise NotImplementedError

    def on_late_report(self, peer: Peer, report: Report) -> None:
        """A peer reports on an attempt that has ended. The report may say why the attempt failed."""

    def restore(self, running: Running, reporter: Peer, calls: dict[Peer, int]) -> None:
        """Continues an attempt of a former master, as a participant reports it. Other participants may report it, too.

        `calls`: the participants in the order of the plan, lost ones included, with the call of each.
        """
        raise NotImplementedError

    def plan_ahead(self, attempt: AttemptT) -> tuple[int, ...] | None:
        """Plans the next attempts like a committed one.

        Returns:
            The ids of those that the participants do not know; None if the next plan is another one.
        """
        del attempt
        return ()

    def value_of(self, attempt: AttemptT) -> int:
        """The value that the callers get."""
        raise NotImplementedError

    def on_ended(self, attempt: AttemptT, verdict: Verdict, survivors: list[Peer]) -> None:
        """An attempt has ended, and its decision is about to be sent. Updates counts and statistics.

        A kind may answer calls by itself: it removes them from the attempt.
        """

    def validate(self) -> None:
        """Asserts the invariants."""


@dataclass(slots=True, eq=False)
class Operation:
    """The votes for one operation."""

    key: Key
    begun_ns: int
    """When the first vote came."""
    voted_ns: int
    """When the last vote came."""
    votes: dict[Peer, Vote] = field(default_factory=dict)
    reports: dict[Peer, Report] = field(default_factory=dict)
    """Of voters that have started an attempt ahead of the votes of others."""
    agreed_ns: int | None = None
    """While the operation waits for links or joiners: when all votes had come and agreed. Else None."""
    void_epoch: int = 0
    """The epoch of a list that voids what is planned ahead, so that voters can withdraw; 0: none is needed for that."""

    @property
    def name(self) -> str:
        """The call of the first voter, as named in the log."""
        spec = next(iter(self.votes.values())).spec
        if not isinstance(spec, CollectiveSpec):
            return self.key.function
        known = spec.kind in set(CollectiveKind)
        kind = CollectiveKind(spec.kind).name.lower() if known else str(spec.kind)
        return f"{kind} at tag {spec.tag}"

    @property
    def title(self) -> str:
        """The same with its scope."""
        return self.name if self.key.group is None else f"{self.name} of group {self.key.group}"


class Operations:
    """All operations of the run: the calls of its members, from their votes to their ends.

    Every message may come twice. Calls are recognised by their ids: the sender gets the same answer or plan again.

    Args:
        kick: removes a peer that exceeds the bounds on its calls, with a result, a reason and the time.

    Attributes:
        next_attempt_id: returns ids that increase and never repeat.
        kinds: all kinds.
        pending: operations that lack votes, or wait for links or joiners.
        running: the running attempts, by id.
        voted_ns: when the last vote of all operations came.
    """

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        next_attempt_id: Callable[[], int],
        kick: Callable[[Peer, Result, str, int], object],
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._kick = kick
        self.next_attempt_id = next_attempt_id
        self.pending: dict[Key, Operation] = {}
        self.running: dict[int, Attempt] = {}
        self._running_at: dict[Key, Attempt] = {}
        self.kinds: list[Kind[Any]] = []
        self._kinds: dict[str, Kind[Any]] = {}  # By function.
        self.voted_ns = -1
        self._exclusive: dict[Peer, Operation] = {}  # A peer's operation that is not a collective.
        self._early: dict[Key, list[tuple[Peer, Vote | Report]]] = {}  # On calls that follow those in `pending`.
        self._again: list[tuple[Peer, Vote | Report]] = []  # On such calls that may take their place now.
        self._withdrawals: dict[bytes, dict[int, Withdraw]] = {}  # Those that cannot be answered yet.

    def of(self, function: str) -> list[Operation]:
        """The pending operations of a function."""
        return [operation for key, operation in self.pending.items() if key.function == function]

    def members_of(self, key: Key) -> list[Peer]:
        """The members whose votes an operation needs, in ring order."""
        return self._registry.members(key.group)

    def is_complete(self, operation: Operation) -> bool:
        """True once all members of its scope have voted."""
        group = operation.key.group
        needed = len(self._registry.order) if group is None else self._registry.member_count(group)
        return len(operation.votes) >= needed

    # --- Messages of members ----------------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: PeerMessage, now_ns: int) -> None:
        """A member makes calls, reports on attempts, or withdraws a call."""
        self._repeat(now_ns)  # What came before this message counts before it.
        if isinstance(message, Votes):
            self._forget_answers(peer, message.oldest_call_id)
            for vote in message.votes:
                key = key_of(peer, vote.spec)
                if self._is_open(peer, vote.call_id, key, now_ns):
                    self._on_vote(peer, vote, key, now_ns)
        elif isinstance(message, Report):
            self._on_report(peer, message, now_ns)
        elif isinstance(message, Withdraw):
            self._on_withdraw(peer, message)

    @staticmethod
    def _forget_answers(peer: Peer, oldest_call_id: int) -> None:
        if oldest_call_id > peer.oldest_call_id:
            peer.oldest_call_id = oldest_call_id
            for call_id in [call_id for call_id in peer.answers if call_id < oldest_call_id]:
                del peer.answers[call_id]

    def _is_open(self, peer: Peer, call_id: int, key: Key, now_ns: int) -> bool:
        """False for an answered call, whose answer is sent again, and for a peer over its bounds, which is removed."""
        if peer.peer_id not in self._registry.peers or call_id < peer.oldest_call_id:
            return False
        if call_id in peer.answers:
            self._outbox.send(peer, peer.answers[call_id])
            return False
        member_count = self._registry.member_count(peer.group)
        calls_max = limits.calls_open_max(member_count)
        if call_id not in peer.open_calls and len(peer.open_calls) >= calls_max:
            reason = f"more than {calls_max} calls without an answer, in a group of {member_count}"
        elif peer.open_calls.setdefault(call_id, key) != key:
            reason = f"call id {call_id} was used for two calls"
        else:
            return True
        self._kick(peer, Result.INVALID_USAGE, reason, now_ns)
        return False

    def _on_vote(self, peer: Peer, vote: Vote, key: Key, now_ns: int) -> None:
        kind, running = self._kinds[key.function], self._running_at.get(key)
        if running is not None and running.calls.get(peer) == vote.call_id:
            return kind.on_vote_again(running, peer, vote)
        refusal = kind.refusal_of(peer, vote, running)
        if refusal is not None:
            self.forget(peer, vote.call_id)  # A former master may have accepted the vote.
            return self._outbox.answer(peer, refusal)
        self._count(peer, vote, key, now_ns)
        operation = self.pending.get(key)
        return kind.on_voted(operation, now_ns) if operation is not None else None

    def _on_report(self, peer: Peer, report: Report, now_ns: int) -> None:
        """A peer reports on an attempt. If that has been decided, the peer missed the decision and gets it again."""
        attempt = self.running.get(report.attempt_id)
        if attempt is not None and attempt.calls.get(peer) == report.call_id:
            return self._kinds[attempt.key.function].on_report(attempt, peer, report)
        if self._on_early_report(peer, report, now_ns):
            return None
        for kind in self.kinds:
            kind.on_late_report(peer, report)
        if report.call_id in peer.answers:
            self._outbox.send(peer, peer.answers[report.call_id])
        else:
            self._outbox.log(Level.DEBUG, f"{peer.name} reports on unknown attempt {report.attempt_id}")
        return None

    def _on_early_report(self, peer: Peer, report: Report, now_ns: int) -> bool:
        """Keeps a report on an attempt that its sender has started ahead, if that attempt is not running yet."""
        key = peer.open_calls.get(report.call_id)
        operation = self.pending.get(key) if key is not None else None
        if key is None or operation is None:
            return False
        vote = operation.votes.get(peer)
        if vote is not None and (vote.call_id, vote.ahead) == (report.call_id, report.attempt_id):
            operation.reports[peer] = report
            self._kinds[key.function].on_voted(operation, now_ns)
            return True
        return self._find_early(peer, report.call_id) is not None and self._keep_early(key, peer, report)

    def _keep_early(self, key: Key, peer: Peer, message: Vote | Report) -> bool:
        """Keeps a message on the call that follows the one in `pending`, until the pending one is decided."""
        early, call_id = self._early.setdefault(key, []), message.call_id
        for index, (who, known) in enumerate(early):
            if who is peer and type(known) is type(message) and known.call_id == call_id:
                early[index] = peer, message  # A report may say more than before.
                return True
        early.append((peer, message))
        return True

    def _find_early(self, peer: Peer, call_id: int) -> Vote | None:
        kept = (item for items in (*self._early.values(), self._again) for item in items)
        return next((m for who, m in kept if who is peer and isinstance(m, Vote) and m.call_id == call_id), None)

    def _on_withdraw(self, peer: Peer, message: Withdraw) -> None:
        call_id = message.call_id
        if message.is_bound and call_id not in peer.open_calls:
            return  # It was answered; or its vote is sent again, followed by this message.
        if not self._is_known(peer, call_id) or (message.is_bound and self._may_commit(peer, call_id)):
            waiting = self._withdrawals.setdefault(peer.peer_id, {})
            if len(waiting) < limits.CALLS_IN_FLIGHT_MAX:  # The vote may come after the withdrawal: keep any call id.
                waiting[call_id] = message
            return
        if call_id in peer.answers:
            self._outbox.send(peer, peer.answers[call_id])
        elif call_id in peer.open_calls:
            self._withdraw(peer, call_id)
        elif call_id >= peer.oldest_call_id:  # Its vote was lost, and is not sent again.
            self._outbox.answer(peer, Decision(call_id, Result.RANK_CONNECTION_LOST, reason="withdrawn"))

    def _is_known(self, peer: Peer, call_id: int) -> bool:
        """False while a member that may know how a call ended has yet to report: one whose vote the call needed."""
        key = peer.open_calls.get(call_id)
        members = self._registry.order if key is None else self.members_of(key)
        return self._registry.is_committed and have_reported(members)

    def _may_commit(self, peer: Peer, call_id: int) -> bool:
        """True if the participants may still commit the attempt that a call has started ahead, as far as is known.

        They cannot once a participant has voted otherwise, or has not voted and accepts a later list: that voids what
        is planned ahead, and if the participant had started the attempt, its vote would have come before.
        """
        key = peer.open_calls[call_id]
        operation = self.pending.get(key)
        vote = operation.votes.get(peer) if operation is not None else None
        if operation is None or vote is None or vote.call_id != call_id:
            return True  # It runs, or follows a call that does.
        if any(other.ahead != vote.ahead for other in operation.votes.values()):
            return False
        missing = [member for member in self.members_of(key) if member not in operation.votes]
        if missing and not operation.void_epoch:
            operation.void_epoch = self._registry.epoch + 1
        return not any(member.acknowledged >= operation.void_epoch for member in missing)

    @property
    def needs_new_list(self) -> bool:
        """True if a withdrawal waits for a list after the current one, which voids what is planned ahead."""
        epoch, waiting = self._registry.epoch, self._withdrawals
        return bool(waiting) and any(operation.void_epoch > epoch for operation in self.pending.values())

    def answer_withdrawals(self) -> None:
        """Answers waiting withdrawals, as far as the outcomes of their calls are known by now."""
        if self._withdrawals and self._registry.is_committed:
            withdrawals, self._withdrawals = self._withdrawals, {}
            for peer_id, of_peer in withdrawals.items():
                peer = self._registry.peers.get(peer_id)
                for message in of_peer.values() if peer is not None else ():
                    assert peer is not None
                    self._on_withdraw(peer, message)

    # --- Votes ------------------------------------------------------------------------------------------------------

    def _count(self, peer: Peer, vote: Vote, key: Key, now_ns: int) -> None:
        """Counts the vote of a member, unless it is known already. Refuses a second call where only one is allowed."""
        if key.function == COLLECTIVE:
            earlier, busy = self.pending.get(key), f"tag {key.tag} is in use by another call of this peer"
        else:
            earlier = self._exclusive.get(peer)
            busy = f"this peer is already waiting in {earlier.key.function}" if earlier is not None else ""
        known = earlier.votes.get(peer) if earlier is not None else None
        if earlier is not None and known is not None:
            report = earlier.reports.get(peer)
            if known.call_id == vote.call_id:
                return
            if report is not None and report.ok and key.function == COLLECTIVE:
                self._keep_early(key, peer, vote)  # Its peers have committed the earlier call.
            else:
                self._outbox.answer(peer, Decision(vote.call_id, Result.INVALID_USAGE, reason=busy))
            return
        operation = self.pending.setdefault(key, Operation(key, now_ns, now_ns))
        operation.voted_ns = self.voted_ns = now_ns
        operation.votes[peer] = vote
        if key.function != COLLECTIVE:
            self._exclusive[peer] = operation

    def take(self, key: Key) -> dict[Peer, Vote]:
        """Ends the voting and returns the votes. The caller must answer all of these calls, or plan an attempt."""
        votes = self.pending.pop(key).votes
        self._again += self._early.pop(key, ())
        if key.function != COLLECTIVE:
            for peer in votes:
                del self._exclusive[peer]
        return votes

    def forget(self, peer: Peer, call_id: int) -> Vote | None:
        """Removes a vote, and returns it; None if there is none."""
        for operation in self.pending.values():
            vote = operation.votes.get(peer)
            if vote is not None and vote.call_id == call_id:
                self._remove(operation, peer)
                return vote
        vote = self._find_early(peer, call_id)
        for items in (*self._early.values(), self._again) if vote is not None else ():
            items[:] = [item for item in items if item[0] is not peer or item[1].call_id != call_id]
        return vote

    def _withdraw(self, peer: Peer, call_id: int) -> None:
        """Removes the vote of a withdrawn call, or aborts the attempt that it is part of."""
        if self.forget(peer, call_id) is not None:
            answer = Decision(call_id, Result.RANK_CONNECTION_LOST, reason="withdrawn")
            return self._outbox.answer(peer, answer)
        attempt = self.attempt_of(peer, call_id)
        assert attempt is not None, "an open call that is in no operation"
        return self.end(attempt, Verdict(Result.RANK_CONNECTION_LOST, f"{peer.name} withdrew from it", (peer,)))

    def forget_lost(self) -> None:
        """The member list has changed: removes the votes of lost members."""
        for operation in list(self.pending.values()):
            for peer in [peer for peer in operation.votes if self._registry.peers.get(peer.peer_id) is not peer]:
                self._remove(operation, peer)

    def refuse(self, key: Key, result: Result, reason: str, field: str = "", values: tuple[str, ...] = ()) -> None:
        """Ends the voting, with the same answer to all voters."""
        self.refuse_calls(self._take_calls(key), result, reason, field, values)

    def refuse_calls(
        self,
        calls: Sequence[tuple[Peer, int]],
        result: Result,
        reason: str,
        field: str = "",
        values: tuple[str, ...] = (),
        others: Iterable[Peer] = (),
    ) -> None:
        """Refuses calls for which no attempt was planned, all with the same answer.

        If there are several calls, each answer lists all of them, like the decision of an attempt: a peer that misses
        its answer then gets the same one from another master. The answer also lists the calls if there are `others`:
        peers whose calls go on. These get the refusal as the answer to no call, to remember it.
        """
        others = tuple(others)
        order = tuple(peer.peer_id for peer, _ in calls)
        number: tuple[int, tuple[bytes, ...], tuple[int, ...]] = (0, (), ())
        if len(calls) > 1 or others:
            number = (self.next_attempt_id(), order, tuple(call_id for _, call_id in calls))
        text = reason[: limits.TEXT_CHARS_MAX]
        refusal = Decision(0, result, 0, text, field, values, 0, *number)
        for peer, call_id in calls:
            self._outbox.answer(peer, replace(refusal, call_id=call_id))
        self._outbox.broadcast(others, refusal)

    def _take_calls(self, key: Key) -> list[tuple[Peer, int]]:
        return [(peer, vote.call_id) for peer, vote in self.take(key).items()]

    def _remove(self, operation: Operation, peer: Peer) -> None:
        del operation.votes[peer]
        operation.reports.pop(peer, None)
        operation.agreed_ns = None
        self._again += self._early.pop(operation.key, ())
        if operation.key.function != COLLECTIVE:
            del self._exclusive[peer]
        if not operation.votes:
            del self.pending[operation.key]

    # --- Changes ----------------------------------------------------------------------------------------------------

    def on_members_changed(self, now_ns: int) -> None:
        """The member list has changed: operations stop waiting for lost members."""
        for kind in self.kinds:
            kind.on_members_changed(now_ns)

    def on_links_changed(self, now_ns: int) -> None:
        """A link came up or went down: plans that wait for links are tried again."""
        for kind in self.kinds:
            kind.on_links_changed(now_ns)

    def tick(self, now_ns: int) -> list[int | None]:
        """Returns the groups in which plans have waited too long for links."""
        for kind in self.kinds:
            kind.tick(now_ns)
        return list(dict.fromkeys(group for kind in self.kinds for group in kind.overdue(now_ns)))

    def wait_again(self, now_ns: int) -> None:
        """The members that are cut off must stay: restarts the wait of all plans that wait for links."""
        for kind in self.kinds:
            kind.wait_again(now_ns)

    def evaluate(self, now_ns: int) -> None:
        """Plans or answers operations whose votes suffice. Called after every event."""
        while True:
            self._repeat(now_ns)
            self.answer_withdrawals()  # First: a withdrawn call is not planned. Some wait for their call's turn.
            if not self._again:  # Otherwise a call that follows a withdrawn one takes its place first.
                self._evaluate(now_ns)
            if not self._again:
                return

    def _repeat(self, now_ns: int) -> None:
        """Handles messages that were kept for a later operation, now that the earlier one is not in their way."""
        again, self._again = self._again, []
        for peer, message in again:
            if self._registry.peers.get(peer.peer_id) is not peer:
                continue
            if isinstance(message, Report):
                self._on_report(peer, message, now_ns)
            else:
                self._on_vote(peer, message, key_of(peer, message.spec), now_ns)

    def _evaluate(self, now_ns: int) -> None:
        if self.pending:
            self._refuse_conflicts()
            for kind in self.kinds:
                kind.evaluate(now_ns)
                if self._again:  # These calls were made earlier: they come first, before the members change.
                    return

    def deadline_ns(self) -> int | None:
        """When an operation has waited long enough for links or joiners: tick() and evaluate() end the wait.

        No wait ends before the member list is committed, which is an event of its own.
        """
        if not self._registry.is_committed:
            return None
        operations: list[Operation | Attempt] = [*self.pending.values(), *self.running.values()]
        waiting = [(each.agreed_ns, each.key) for each in operations if each.agreed_ns is not None]
        return min((agreed_ns + self._kinds[key.function].wait_ns for agreed_ns, key in waiting), default=None)

    # --- Attempts ---------------------------------------------------------------------------------------------------

    def add_kind(self, kind: Kind[Any], *functions: str) -> None:
        """Registers the kind of some functions."""
        self.kinds.append(kind)
        self._kinds.update(dict.fromkeys(functions, kind))

    def run(self, attempt: Attempt) -> None:
        """An attempt begins, or continues after a take-over."""
        self.running[attempt.attempt_id] = attempt
        self._running_at.setdefault(attempt.key, attempt)

    def renumber(self, attempt: Attempt) -> None:
        """Gives a new id to an attempt whose plan has not been sent."""
        del self.running[attempt.attempt_id]
        attempt.attempt_id = self.next_attempt_id()
        self.running[attempt.attempt_id] = attempt

    def was_issued(self, attempt_id: int) -> bool:
        """True for an id that a master may have given to an attempt that is not running now."""
        return attempt_id not in self.running and attempt_id < self.next_attempt_id()

    def running_of(self, function: str) -> list[Attempt]:
        """The running attempts at operations of a function."""
        return [attempt for attempt in self.running.values() if attempt.key.function == function]

    def running_at(self, key: Key) -> Attempt | None:
        """The running attempt at an operation."""
        return self._running_at.get(key)

    def attempt_of(self, peer: Peer, call_id: int) -> Attempt | None:
        """The running attempt that a call is part of."""
        return next((attempt for attempt in self.running.values() if attempt.calls.get(peer) == call_id), None)

    def present(self, peers: Iterable[Peer]) -> list[Peer]:
        """The given peers without those that have been lost."""
        return [peer for peer in peers if self._registry.peers.get(peer.peer_id) is peer]

    def restore(self, running: Running, reporter: Peer) -> None:
        """Continues an attempt of a former master whose outcome no reporting peer knows.

        A participant that was removed and waits to be admitted again has given its call up: it is none any more.
        """
        members = {peer.peer_id: peer for peer in self._registry.order}
        calls = {
            members.get(peer_id) or absent(peer_id): call_id for peer_id, call_id in running.plan.participants.items()
        }
        function = COLLECTIVE if isinstance(running.plan.how, Reducing) else SYNC
        self._kinds[function].restore(running, reporter, calls)

    def take_attempt(self, attempt_id: int) -> dict[Peer, int]:
        """Ends an attempt that a former master has decided, and returns its participants."""
        attempt = self.running.get(attempt_id)
        if attempt is None:
            return {}
        self._forget_attempt(attempt)
        return attempt.calls

    def end_left_behind(self, reporters: Iterable[Peer]) -> None:
        """Ends attempts that one of the reporters left so long ago that it no longer knows their outcome."""
        for attempt in list(self.running.values()):
            gone = [peer for peer in reporters if attempt.calls.get(peer, peer.oldest_call_id) < peer.oldest_call_id]
            for peer in gone:
                peer.open_calls.pop(attempt.calls.pop(peer), None)
            if gone:
                self.end(attempt, Verdict(Result.RANK_CONNECTION_LOST, f"{names(gone)} went on without it"))

    def decide(self, attempt: Attempt) -> None:
        """Ends an attempt if its reports and losses suffice for a verdict."""
        survivors = self.present(attempt.calls)
        if not survivors:
            return self._forget_attempt(attempt)
        if not self._registry.is_committed or not have_reported(survivors):
            return None  # One of them may know another decision.
        verdict = self._kinds[attempt.key.function].judge(attempt, survivors)
        return self.end(attempt, verdict) if verdict is not None else None

    def end(self, attempt: Attempt, verdict: Verdict) -> None:
        """Ends an attempt for all participants."""
        self._forget_attempt(attempt)
        kind, survivors = self._kinds[attempt.key.function], self.present(attempt.calls)
        blamed = tuple(peer.name for peer in verdict.blamed)
        if not verdict.is_commit:
            who = f" ({', '.join(blamed)})" if blamed else ""
            text = f"{attempt.key.title}: attempt {attempt.attempt_id} aborted: {verdict.reason}{who}"
            self._outbox.log(Level.ERROR if verdict.result is Result.INTERNAL_ERROR else Level.WARNING, text)
        kind.on_ended(attempt, verdict, survivors)
        survivors = [peer for peer in survivors if peer in attempt.calls]  # Without those whom the kind has refused.
        order, calls = tuple(peer.peer_id for peer in survivors), tuple(attempt.calls[peer] for peer in survivors)
        text, number = verdict.reason[: limits.TEXT_CHARS_MAX], attempt.attempt_id
        ahead = kind.plan_ahead(attempt) if verdict.is_commit and len(survivors) == len(attempt.calls) else ()
        brief = Decision(
            call_id=0,
            result=verdict.result,
            value=kind.value_of(attempt),
            reason=text,
            attempt_id=number,
            peers=blamed,
            ahead=ahead or (),
            is_ahead_void=ahead is None,
        )
        whole = replace(brief, order=order, calls=calls)
        for peer, call_id in zip(survivors, calls, strict=True):
            sent = brief if attempt.has_plan_everywhere else whole
            kept = replace(whole, call_id=call_id, ahead=())  # When it is sent again, the members may be others.
            self._outbox.answer(peer, replace(sent, call_id=call_id), kept, may_wait=verdict.is_known)

    def _forget_attempt(self, attempt: Attempt) -> None:
        del self.running[attempt.attempt_id]
        if self._running_at.get(attempt.key) is not attempt:
            return
        del self._running_at[attempt.key]
        if len(self._running_at) < len(self.running):  # False reports may name several attempts of one operation.
            for other in self.running.values():
                if other.key == attempt.key:
                    self._running_at[attempt.key] = other

    # --- Calls that wait for each other -----------------------------------------------------------------------------

    def _refuse_conflicts(self) -> None:
        """Refuses calls that wait for each other, once all members have reported: one may know their decision."""
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
        """True for two calls that exclude each other, one made by a member and one by a peer in the same scope."""
        if other is own or other.key.function == COLLECTIVE:
            return False
        need_all = SYNC not in (own.key.function, other.key.function)
        return need_all or any(voter.group == peer.group for voter in other.votes)

    def _refuse_conflict(self, keys: Sequence[Key]) -> None:
        texts = [f"{self.pending[key].name} by {names(self.pending[key].votes)}" for key in sorted(keys, key=_sort_key)]
        reason = f"peers wait for each other in different calls: {'; '.join(texts)}"[: limits.TEXT_CHARS_MAX]
        self._outbox.log(Level.WARNING, reason)
        calls = [call for key in keys for call in self._take_calls(key)]
        self.refuse_calls(calls, Result.INVALID_USAGE, reason)

    def validate(self) -> None:
        """Asserts the invariants."""
        for kind in self.kinds:
            kind.validate()
        assert not self._again and self._early.keys() <= self.pending.keys()
        for key, operation in self.pending.items():
            assert operation.key == key and operation.votes and operation.reports.keys() <= operation.votes.keys()
            for peer, vote in operation.votes.items():
                assert peer.is_member and self._registry.peers.get(peer.peer_id) is peer
                assert key_of(peer, vote.spec) == key
                assert key.function == COLLECTIVE or self._exclusive[peer] is operation
        assert all(peer in operation.votes for peer, operation in self._exclusive.items())
        assert all(self.running.get(attempt.attempt_id) is attempt for attempt in self._running_at.values())
        assert self._running_at.keys() == {attempt.key for attempt in self.running.values()}
        for attempt_id, attempt in self.running.items():
            assert attempt.attempt_id == attempt_id
            survivors = self.present(attempt.calls)
            assert survivors, "an attempt without survivors"
            if self._registry.is_committed and have_reported(survivors):
                assert self._kinds[attempt.key.function].judge(attempt, survivors) is None, "an undecided attempt"


def _sort_key(key: Key) -> tuple[bool, Key]:  # Collectives last.
    return key.function == COLLECTIVE, key


def absent(peer_id: bytes) -> Peer:
    """Stands for a lost participant of an attempt."""
    return Peer(peer_id, 0, peer_id.hex()[:8], (), b"", None)
