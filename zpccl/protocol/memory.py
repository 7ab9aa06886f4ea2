"""What a peer remembers of the run beside its own calls, for a master that takes it over.

A master holds no more than its peers know together. What one of them has not heard of, another has: the ends of
attempts, the number and value of the last round of topology votes, the last committed sync.

Of ends, the latest are kept, as many as a member may have calls in flight (limits.calls_in_flight_max), so none is
forgotten that another could still need: calls of a group take all its members. One that has missed an end has no answer
to its call in it, nor to its calls in all that ended since, so these are calls in flight of it, and no more than that.
While the group grows nobody has calls in flight; when it shrinks more are kept. Refusals may concern some members only,
or those of other groups: of these there is room for a few more. Whoever is no member any more needs no end, and its
name makes room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.calls import Call, Phase, is_sync
from zpccl.protocol.messages import (
    CollectiveSpec,
    Decision,
    Hello,
    Member,
    Reducing,
    Running,
    RunReport,
    TopologyKind,
    TopologySpec,
    cut,
)


class Memory:
    """The memory of one peer.

    Attributes:
        round_answered: the last round of topology votes in which this peer had its answer, or was admitted.
    """

    def __init__(self) -> None:
        self.round_answered = 0
        self._round = 0
        self._round_value = 0
        self._outcomes: dict[int, Decision] = {}  # By attempt, the oldest first.
        self._call_count = 0
        self._group_size = 0
        self._member_ids: frozenset[bytes] = frozenset()
        self._last_sync: Decision | None = None

    def on_round_heard(self, number: int, value: int) -> None:
        """A round of topology votes is complete."""
        if number > self._round:
            self._round, self._round_value = number, value

    def on_round_answered(self, number: int, value: int) -> None:
        """A call of this peer has its answer by a round."""
        self.on_round_heard(number, value)
        self.round_answered = max(self.round_answered, number)

    def on_members(self, members: Sequence[Member], group: int, *, is_committed: bool) -> None:
        """The member list has changed. Those who are in no list that is committed need no ends of attempts."""
        self._group_size = sum(member.group == group for member in members)
        member_ids = frozenset(member.peer_id for member in members)
        if not is_committed:
            self._member_ids |= member_ids
            return
        gone, self._member_ids = self._member_ids - member_ids, member_ids
        if gone:
            self._outcomes = {number: _without(gone, outcome) for number, outcome in self._outcomes.items()}
            self._call_count = sum(len(outcome.calls) for outcome in self._outcomes.values())

    def on_decision(self, decision: Decision, call: Call | None, member_ids: Collection[bytes]) -> None:
        """Calls have ended, `call` among them where it had no answer yet. Others may wait for the same answer.

        Who takes part is known from the plan, where this peer got it; the lost are no members any more.
        """
        if decision.attempt_id == 0:
            return
        order, calls = decision.order, decision.calls
        plan = call.plan if call is not None else None
        if not order and plan is not None and plan.attempt_id == decision.attempt_id:
            pairs = [pair for pair in plan.participants.items() if pair[0] in member_ids]
            order, calls = tuple(peer_id for peer_id, _ in pairs), tuple(call_id for _, call_id in pairs)
        reason = cut(decision.reason, limits.OUTCOME_TEXT_CHARS_MAX)
        outcome = replace(decision, call_id=0, reason=reason, order=order, calls=calls, peers=())
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
        count_max = limits.calls_in_flight_max(self._group_size) + limits.PARTIAL_REFUSALS_KEPT_MAX
        while len(self._outcomes) > count_max or self._call_count > limits.OUTCOME_CALLS_KEPT_MAX:
            self._call_count -= len(self._outcomes.pop(next(iter(self._outcomes))).calls)

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
        """All that another master must know."""
        running: list[Running] = []
        is_updating = False
        for call in calls:
            is_updating = is_updating or (isinstance(call.spec, TopologySpec) and call.spec.kind is TopologyKind.UPDATE)
            if call.phase is Phase.VOTING or call.plan is None:
                continue
            if isinstance(call.plan.how, Reducing):
                running.append(Running(call.plan, call.spec if isinstance(call.spec, CollectiveSpec) else None))
            else:
                brief = replace(call.plan, how=replace(call.plan.how, fetch=(), sources=(), fellows=()))
                has_failed = call.report is not None and not call.report.ok
                running.append(Running(brief, is_open=bool(call.plan.how.fetch) or has_failed))
        return RunReport(
            hello,
            oldest_call_id,
            epoch,
            members,
            is_updating,
            self._round,
            self._round_value,
            self._last_sync,
            tuple(self._outcomes.values()),
            tuple(running),
            old_members,
            parent,
        )


def _without(gone: Collection[bytes], outcome: Decision) -> Decision:
    if not any(peer_id in gone for peer_id in outcome.order):
        return outcome
    pairs = [pair for pair in zip(outcome.order, outcome.calls, strict=False) if pair[0] not in gone]
    return replace(outcome, order=tuple(peer_id for peer_id, _ in pairs), calls=tuple(call_id for _, call_id in pairs))
