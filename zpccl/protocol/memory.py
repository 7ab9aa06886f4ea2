"""What a peer remembers of the run besides its own calls, to report it to a master that takes the run over.

The peers together know all that a master holds: the outcomes of attempts, the number and value of the last round of
topology votes, the last committed sync. If one peer has missed something, another one reports it.

A peer keeps the latest outcomes, as many as a member may have open calls (limits.calls_open_max). So it keeps every
outcome that another peer may still need: all members of a group take part in its calls, so a peer that missed an
outcome lacks the decisions on that call and on all later ones, and these are its open calls. A group has no open calls
while it grows; when it shrinks, the bound grows. A refusal may concern only some members, or members of other groups:
PARTIAL_REFUSALS_KEPT_MAX more outcomes are kept for these, and the oldest of them go first if there are more. Peers
that are no longer members need no outcomes, so the outcomes no longer name them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.calls import Call, CallPhase, is_sync
from zpccl.protocol.election import free_contents
from zpccl.protocol.messages import (
    CollectiveSpec,
    Decision,
    FetchEntry,
    Fetching,
    Hello,
    Member,
    Reducing,
    Running,
    RunReport,
    Spec,
    SyncSpec,
    cut,
)


class Memory:
    """What one peer remembers of the run.

    Attributes:
        round: the last round of topology votes that is known to be complete.
    """

    def __init__(self) -> None:
        self.round = 0
        self._round_value = 0
        self._outcomes: dict[int, Decision] = {}  # By attempt, the oldest first.
        self._partial: dict[int, None] = {}  # Those of refusals that do not concern all of the group.
        self._call_count = 0
        self._group_ids: frozenset[bytes] = frozenset()
        self._member_ids: frozenset[bytes] = frozenset()
        self._last_sync: Decision | None = None

    def on_round(self, number: int, value: int) -> None:
        """A round of topology votes is complete."""
        if number > self.round:
            self.round, self._round_value = number, value

    def on_members(self, members: Sequence[Member], group: int, *, is_committed: bool) -> None:
        """Takes a member list. Once it is committed, the peers that it removes are deleted from all outcomes."""
        self._group_ids = frozenset(member.peer_id for member in members if member.group == group)
        member_ids = frozenset(member.peer_id for member in members)
        if not is_committed:
            self._member_ids |= member_ids
            return
        gone, self._member_ids = self._member_ids - member_ids, member_ids
        if gone:
            self._outcomes = {number: _without(gone, outcome) for number, outcome in self._outcomes.items()}
            self._call_count = sum(len(outcome.calls) for outcome in self._outcomes.values())

    def on_decision(self, decision: Decision, call: Call | None, member_ids: Collection[bytes]) -> None:
        """Stores a decision, which other peers may lack. It answers `call`, which is None if it was answered before.

        If the decision lists no participants, they are those of the plan that are still members.
        """
        if decision.attempt_id == 0:
            return
        order, calls = decision.order, decision.calls
        plan = call.plan if call is not None else None
        if not order and plan is not None and plan.attempt_id == decision.attempt_id:
            pairs = [pair for pair in plan.participants.items() if pair[0] in member_ids]
            order, calls = tuple(peer_id for peer_id, _ in pairs), tuple(call_id for _, call_id in pairs)
        reason = cut(decision.reason, limits.OUTCOME_TEXT_CHARS_MAX)
        told = replace(decision, ahead=(), is_ahead_void=False)
        outcome = replace(told, call_id=0, reason=reason, order=order, calls=calls, peers=())
        self._keep(outcome)
        is_newer = self._last_sync is None or outcome.attempt_id > self._last_sync.attempt_id
        if call is not None and is_sync(call) and outcome.committed and is_newer:
            self._last_sync = outcome

    def _keep(self, outcome: Decision) -> None:
        known = self._outcomes.pop(outcome.attempt_id, None)
        if known is not None:
            self._call_count -= len(known.calls)
            outcome = known if len(known.calls) >= len(outcome.calls) else outcome
        self._outcomes[outcome.attempt_id] = outcome
        self._call_count += len(outcome.calls)
        if outcome.is_refusal and not self._group_ids <= set(outcome.order):
            self._partial[outcome.attempt_id] = None
        count_max = limits.calls_open_max(len(self._group_ids)) + limits.PARTIAL_REFUSALS_KEPT_MAX
        while len(self._outcomes) > count_max or self._call_count > limits.OUTCOME_CALLS_KEPT_MAX:
            # While a peer is away, any number of partial refusals may come, but no more others than it has open calls.
            are_many = len(self._partial) > limits.PARTIAL_REFUSALS_KEPT_MAX
            oldest = next(iter(self._partial if are_many else self._outcomes))
            self._partial.pop(oldest, None)
            self._call_count -= len(self._outcomes.pop(oldest).calls)

    def report(
        self,
        hello: Hello,
        oldest_call_id: int,
        epoch: int,
        members: tuple[Member, ...],
        old_members: tuple[bytes, ...],
        parent: int,
        calls: Iterable[Call],
    ) -> RunReport:
        """The run report: all that a new master must know."""
        running: list[Running] = []
        for call in calls:
            if call.phase in (CallPhase.VOTING, CallPhase.COMMITTED) or call.plan is None or call.ahead:
                continue  # The vote tells of an attempt ahead, and a committed one is an outcome.
            if isinstance(call.plan.how, Reducing):
                running.append(Running(call.plan, call.spec if isinstance(call.spec, CollectiveSpec) else None))
            else:
                contents = _told_contents(call.spec, call.plan.how)
                brief = replace(call.plan, how=replace(call.plan.how, fetch=contents, sources=(), partial_seeds=()))
                has_all = call.report.ok if call.report is not None else not call.plan.how.fetch
                running.append(Running(brief, is_open=not has_all))
        return RunReport(
            hello,
            oldest_call_id,
            epoch,
            members,
            self.round,
            self._round_value,
            self._last_sync,
            tuple(self._outcomes.values()),
            tuple(running),
            old_members,
            parent,
        )


def has_decided(report: RunReport) -> bool:
    """True if a peer knows of an operation of its run that was planned or decided."""
    return bool(report.outcomes or report.running or report.last_sync)


def _without(gone: Collection[bytes], outcome: Decision) -> Decision:
    if not any(peer_id in gone for peer_id in outcome.order):
        return outcome
    pairs = [pair for pair in zip(outcome.order, outcome.calls, strict=False) if pair[0] not in gone]
    return replace(outcome, order=tuple(peer_id for peer_id, _ in pairs), calls=tuple(call_id for _, call_id in pairs))


def _told_contents(spec: Spec, how: Fetching) -> tuple[FetchEntry, ...]:
    """The contents after a sync, for the report: those of keys that allow inequality, unless they are too many."""
    free = free_contents(spec, how.fetch) if isinstance(spec, SyncSpec) else {}
    size = sum(len(key.encode()) + limits.STATE_ENTRY_BYTES_MAX for key in free)
    return tuple(map(FetchEntry, free, free.values())) if size <= limits.REPORT_CONTENTS_BYTES_MAX else ()
