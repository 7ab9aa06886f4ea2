"""The calls of one peer's user, from the call to its answer, as the peer sees them.

    event                                  HELD       VOTING         RUNNING    REPORTED       COMMITTED
    the call that it is held for is over   VOTING     -              -          -              -
    Plan, of a collective or a sync        -          RUNNING [1]    - [4]      - [4]          -
    the data plane is done                 -          -              REPORTED   REPORTED [2]   -
    the last digest of the others          -          -              -          COMMITTED [5]  -
    the user gives it up                   rejected   withdrawn, whatever its phase            -
    no master answers the withdrawal       -          VOTING [3]     REPORTED   REPORTED [6]   -
    Decision                               -          answered       answered   answered       forgotten

    [1] REPORTED, as failed, if the call was released. [2] Only in a sync, if the state that this peer offered has
    changed since. [3] Its vote counts until the master has the withdrawal. [4] RUNNING if the call has started another
    attempt by a plan ahead. [5] Answered; see commit.py. [6] Not while a master leads the peer and the peer has told
    its digest. [3][6] The call is then released, as in RUNNING.

A collective may be planned ahead: if it is the same call as the last one at its tag, it is RUNNING at once, and its
vote says so. It is HELD if its plan is to come with the decision on that last call, which its peers have committed.

A call without an answer has standing messages, which the peer sends again on a new connection.

A call that the user gives up is withdrawn, and the master decides how it ends. If that takes too long, the call is
released: the user gets an error and the buffers, and the peer still waits for the decision. Until it arrives, the
master may treat the call as one in progress. So the peer holds back a new call that the master would confuse with the
released one: the user waits in the new call as in any other, and the peer sends its vote later.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zpccl import limits
from zpccl.errors import (
    CollectiveMismatch,
    InternalError,
    InvalidArgument,
    InvalidUsage,
    Kicked,
    NoSharedState,
    OperationTimeout,
    PCCLError,
    PeerLost,
    PeerUnreachable,
    Result,
    ResultMismatch,
    TooFewPeers,
    TopologyOptimizationFailed,
    UpdateTopologyFailed,
)
from zpccl.protocol.messages import (
    CollectiveSpec,
    Decision,
    Fetching,
    PeerMessage,
    Plan,
    Reducing,
    Report,
    Spec,
    SyncSpec,
    TopologyKind,
    TopologySpec,
    Vote,
    Votes,
    Withdraw,
    cut,
)
from zpccl.types import CollectiveKind


class CallPhase(enum.Enum):
    """How far a call has come."""

    HELD = "held"
    """The vote is held back: the master does not know of the call."""
    VOTING = "voting"
    RUNNING = "running"
    REPORTED = "reported"
    COMMITTED = "committed"
    """The user has the result; only the master's decision is missing."""


@dataclass(slots=True)
class Call:
    """One call without an answer."""

    call_id: int
    spec: Spec
    phase: CallPhase = CallPhase.VOTING
    attempt_id: int | None = None
    plan: Plan | None = None
    """The plan of the attempt, once it has arrived."""
    begun_ns: int = 0
    """When the attempt started."""
    report: Report | None = None
    withdrawn: OperationTimeout | InvalidUsage | None = None
    """The error for a call that the user gave up, unless the call succeeds all the same."""
    is_released: bool = False
    """The user has an error and the buffers; only the master's decision is missing."""
    ahead: int = 0
    """The attempt that it has started by a plan ahead; 0: it waits for its own plan, or has got it."""
    has_told: bool = False
    """The other participants have the digest of its result."""
    is_at_fault: bool = False
    """In a sync: the state that this peer offered has changed since."""

    @property
    def may_succeed(self) -> bool:
        """True if this peer has done its part and the user still waits."""
        return self.report is not None and self.report.ok and not self.is_released

    @property
    def has_answer(self) -> bool:
        """True if the user does not wait any more."""
        return self.is_released or self.phase is CallPhase.COMMITTED

    @property
    def vote(self) -> Vote:
        """The vote for this call."""
        return Vote(self.call_id, self.spec, self.ahead)

    def is_planned_by(self, plan: Plan) -> bool:
        """True if a plan is of the kind that this call waits for."""
        return isinstance(self.spec, SyncSpec if isinstance(plan.how, Fetching) else CollectiveSpec)

    def standing(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        """What to send again on a new connection.

        A withdrawal comes before the vote, which might otherwise complete the operation. But it comes last if the call
        can succeed, or the peer is bound.
        """
        if self.phase is CallPhase.HELD:
            return ()
        messages = self._vote_and_report(oldest_call_id)
        withdraw = self.withdrawal()
        if withdraw is None:
            return messages
        return (*messages, withdraw) if self.may_succeed or withdraw.is_bound else (withdraw, *messages)

    def withdrawal(self) -> Withdraw | None:
        """The message to the master about a call that the user gave up, or None.

        A peer that has told its digest is bound. An attempt for which all have a plan ends by itself. An attempt that
        was planned ahead does not if other participants gave it up before: then the master frees the bound peers.
        """
        if self.withdrawn is None or (self.has_told and not self.ahead):
            return None
        return Withdraw(self.call_id, is_bound=self.has_told)

    def _vote_and_report(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        votes = Votes(oldest_call_id, (self.vote,))
        if self.report is None:
            return (votes,)
        # Another master needs the votes of a sync to plan the fetches of members that never got the plan. And only the
        # vote tells a master that this call has started an attempt ahead.
        return (votes, self.report) if is_sync(self) or self.ahead else (self.report,)


def is_collective(call: Call) -> bool:
    """True for a call that has a tag."""
    return isinstance(call.spec, CollectiveSpec)


def is_barrier(call: Call) -> bool:
    """True for a collective without data."""
    return isinstance(call.spec, CollectiveSpec) and call.spec.kind == CollectiveKind.BARRIER


def is_sync(call: Call) -> bool:
    """True for sync_shared_state()."""
    return isinstance(call.spec, SyncSpec)


def is_question(call: Call) -> bool:
    """True for are_peers_pending()."""
    return isinstance(call.spec, TopologySpec) and call.spec.kind is TopologyKind.PENDING


def is_update(call: Call) -> bool:
    """True for update_topology()."""
    return isinstance(call.spec, TopologySpec) and call.spec.kind is TopologyKind.UPDATE


def tag_of(call: Call) -> int:
    """The tag of a collective."""
    assert isinstance(call.spec, CollectiveSpec)
    return call.spec.tag


@dataclass(frozen=True)
class Ahead:
    """Plans ahead: the attempts that calls may start at once, if they are the same as the last one at their tag.

    Attributes:
        spec: of that last call.
        how: the plan of its attempt, and of the attempts ahead.
        attempt_ids: the attempts ahead, the next one first.
    """

    spec: CollectiveSpec
    how: Reducing
    attempt_ids: tuple[int, ...]


class Released:
    """Decides which new calls to hold back, because the master would confuse them with released ones.

    Collectives are identified by their tags. A peer makes only one of the other calls at a time, and of these only
    are_peers_pending() while collectives are open.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        released = [call for call in calls if call.is_released]
        self._tags = {tag_of(call) for call in released if is_collective(call)}
        others = [call for call in released if not is_collective(call)]
        self._has_others = bool(others)
        self._has_exclusive = not all(is_question(call) for call in others)

    def block(self, call: Call) -> bool:
        """True if a new call must be held back."""
        if is_collective(call):
            return self._has_exclusive or tag_of(call) in self._tags
        return self._has_others or (bool(self._tags) and not is_question(call))


_ERRORS: dict[int, type[PCCLError]] = {
    Result.INVALID_ARGUMENT: InvalidArgument,
    Result.INVALID_USAGE: InvalidUsage,
    Result.TOO_FEW_PEERS: TooFewPeers,
    Result.RANK_CONNECTION_FAILED: PeerUnreachable,
    Result.NO_SHARED_STATE_AVAILABLE: NoSharedState,
    Result.UPDATE_TOPOLOGY_FAILED: UpdateTopologyFailed,
    Result.TOPOLOGY_OPTIMIZATION_FAILED: TopologyOptimizationFailed,
}


def error_of(call: Call, decision: Decision) -> PCCLError:
    """The error for a decision other than SUCCESS."""
    if decision.field and isinstance(call.spec, CollectiveSpec):
        return CollectiveMismatch(decision.reason, tag=call.spec.tag, field=decision.field, values=decision.values)
    if decision.is_refusal:
        return _ERRORS.get(decision.result, InternalError)(decision.reason)
    if decision.attempt_id and decision.result == Result.INTERNAL_ERROR:
        return ResultMismatch(decision.reason)
    if is_sync(call) and call.is_at_fault:
        return call.withdrawn or InvalidUsage(decision.reason)
    if decision.result == Result.RANK_CONNECTION_LOST:
        return call.withdrawn or PeerLost(decision.reason, peers=decision.peers)
    return _ERRORS.get(decision.result, InternalError)(decision.reason)


def error_of_kick(
    result: int, reason: str, *, was_member: bool, unreached: Mapping[str, str] = MappingProxyType({})
) -> PCCLError:
    """The error that a removed peer gets.

    Args:
        result: why it was removed.
        reason: the master's text for that.
        was_member: whether it had been admitted.
        unreached: by name, the neighbours to which it has no link, with the reason for each.
    """
    if result == Result.RANK_CONNECTION_FAILED:
        tried = "; ".join(f"{name}: {results}" for name, results in unreached.items())
        reason = cut(f"{reason} ({tried})" if tried else reason, limits.TEXT_CHARS_MAX)
    if result == Result.RANK_CONNECTION_FAILED and not was_member:
        return PeerUnreachable(reason, peers=tuple(unreached))
    return Kicked(f"removed from the run: {reason}; connect again to take part", reason=reason)
