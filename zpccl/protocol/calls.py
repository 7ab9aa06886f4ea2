"""The calls of one peer's user, from the call to its answer, as the peer sees them.

    collective:  VOTING --Plan--> RUNNING --data plane done--> REPORTED --Decision--> answered
                   |                 |                            |
                   +-------- Decision or Decision(aborted) ---------+--> answered
    barrier:     VOTING --Decision--> answered
    topology:    VOTING --Decision--> answered
    sync:        VOTING --Plan--> RUNNING --fetched--> REPORTED --Decision--> answered
                                                            ^   | own state found changed
                                                            `---'

A call that has no answer yet has standing messages: what the peer says about it again after a broken connection.

A call that the user gives up is withdrawn, and ends as the master says. Where the master does not say it in time, the
call is released: the user has an error and the buffers, and what is left of the call waits for the master's word. Until
that has come, the master may still take the call for one that goes on. So a new call that it would mix up with the old
one is held back: the user waits in it as in any other, and the master hears of it later.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

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
    Begin,
    CollectiveCall,
    CollectiveSpec,
    Decision,
    Fetching,
    PeerMessage,
    Plan,
    Report,
    StateEntry,
    SyncOffer,
    TopologyKind,
    TopologyVote,
    Withdraw,
)
from zpccl.types import CollectiveKind


class Phase(enum.Enum):
    """How far a call has come."""

    VOTING = "voting"
    RUNNING = "running"
    REPORTED = "reported"


@dataclass(slots=True)
class Call:
    """One call without an answer."""

    call_id: int
    phase: Phase = Phase.VOTING
    attempt_id: int | None = None
    plan: Plan | None = None
    """That of the attempt, where it came."""
    begun_ns: int = 0
    """When the attempt started."""
    report: Report | None = None
    withdrawn: OperationTimeout | InvalidUsage | None = None
    """What the call ends with, where the user gave it up and it does not succeed after all."""
    is_released: bool = False
    """The user has its end, and the buffers: only the master's word on it is missing."""
    is_held: bool = False
    """The master has not been told of it."""

    @property
    def may_succeed(self) -> bool:
        """True if this peer has done its part, and the user still waits."""
        return self.report is not None and self.report.ok and not self.is_released

    def vote(self, oldest_call_id: int) -> PeerMessage:
        """The message that makes this call."""
        raise NotImplementedError

    def is_planned_by(self, plan: Plan) -> bool:
        """True if a plan is of the kind that this call waits for."""
        return isinstance(self, SyncCall if isinstance(plan.how, Fetching) else ReduceCall)

    def standing(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        """What to say again after a broken connection.

        A withdrawal comes first, lest a vote be the last one that others wait for; but not where the call can succeed.
        """
        if self.is_held:
            return ()
        said = self._said(oldest_call_id)
        if self.withdrawn is None:
            return said
        withdraw = Withdraw(self.call_id)
        return (*said, withdraw) if self.may_succeed else (withdraw, *said)

    def _said(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        return (self.report,) if self.report is not None else (self.vote(oldest_call_id),)


@dataclass(slots=True)
class ReduceCall(Call):
    """A collective."""

    spec: CollectiveSpec | None = None

    def vote(self, oldest_call_id: int) -> Begin:
        """The message that makes this call."""
        assert self.spec is not None
        return Begin(oldest_call_id, (CollectiveCall(self.call_id, self.spec),))


def is_barrier(call: Call) -> bool:
    """True for a collective that has no data."""
    return isinstance(call, ReduceCall) and call.spec is not None and call.spec.kind == CollectiveKind.BARRIER


@dataclass(slots=True)
class TopologyCall(Call):
    """update_topology, optimize_topology or are_peers_pending."""

    kind: TopologyKind = TopologyKind.UPDATE
    after_round: int = 0

    def vote(self, oldest_call_id: int) -> TopologyVote:
        """The message that makes this call."""
        return TopologyVote(oldest_call_id, self.call_id, self.kind, self.after_round)


@dataclass(slots=True)
class SyncCall(Call):
    """sync_shared_state."""

    strategy: int = 0
    revision: int = 0
    entries: tuple[StateEntry, ...] = ()
    digest_kind: int = 0
    is_at_fault: bool = False
    """What this peer offered has changed since."""

    def vote(self, oldest_call_id: int) -> SyncOffer:
        """The message that makes this call."""
        facts = (self.strategy, self.revision, self.entries, self.digest_kind)
        return SyncOffer(oldest_call_id, self.call_id, *facts)

    def _said(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        """The offer too, from which a new master finds what others must fetch."""
        offer = self.vote(oldest_call_id)
        return (offer, self.report) if self.report is not None else (offer,)


class Released:
    """What the released calls among some keep from being told to the master, which would mix it up with them.

    Collectives are known by their tags; other calls are one at a time, and only are_peers_pending() beside collectives.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        released = [call for call in calls if call.is_released]
        self._tags = {tag_of(call) for call in released if isinstance(call, ReduceCall)}
        others = [call for call in released if not isinstance(call, ReduceCall)]
        self._has_others = bool(others)
        self._has_exclusive = not all(is_question(call) for call in others)

    def block(self, call: Call) -> bool:
        """True if a new call must be held back."""
        if isinstance(call, ReduceCall):
            return self._has_exclusive or tag_of(call) in self._tags
        return self._has_others or (bool(self._tags) and not is_question(call))


def is_question(call: Call) -> bool:
    """True for are_peers_pending()."""
    return isinstance(call, TopologyCall) and call.kind is TopologyKind.PENDING


def tag_of(call: ReduceCall) -> int:
    """The tag of a collective."""
    assert call.spec is not None
    return call.spec.tag


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
    """The error that a decision other than SUCCESS stands for."""
    if decision.field and isinstance(call, ReduceCall) and call.spec is not None:
        return CollectiveMismatch(decision.reason, tag=call.spec.tag, field=decision.field, values=decision.values)
    if decision.is_refusal:
        return _ERRORS.get(decision.result, InternalError)(decision.reason)
    if decision.attempt_id and decision.result == Result.INTERNAL_ERROR:
        return ResultMismatch(decision.reason)
    if isinstance(call, SyncCall) and call.is_at_fault:
        return call.withdrawn or InvalidUsage(decision.reason)
    if decision.result == Result.RANK_CONNECTION_LOST:
        return call.withdrawn or PeerLost(decision.reason, peers=decision.peers)
    return _ERRORS.get(decision.result, InternalError)(decision.reason)


def error_of_kick(result: int, reason: str, *, was_member: bool) -> PCCLError:
    """The error that ends the registration or the membership of a peer that was removed."""
    if result == Result.RANK_CONNECTION_FAILED and not was_member:
        return PeerUnreachable(reason)
    return Kicked(f"removed from the run: {reason}; connect again to take part", reason=reason)
