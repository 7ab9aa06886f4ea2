"""The calls of one peer's user, from the call to its answer, as the peer sees them.

    collective:  VOTING --Plan--> RUNNING --data plane done--> REPORTED --Decision--> answered
                   |                 |                            |
                   +-------- Answer or Decision(aborted) ---------+--> answered
    barrier:     VOTING --Decision--> answered
    topology:    VOTING --Answer--> answered
    sync:        VOTING --SyncPlan--> RUNNING --fetched--> REPORTED --Decision--> answered
                                                            ^   | own state found changed
                                                            `---'

A call that has no answer yet has a standing message: what the peer says about it again after a broken connection.
"""

from __future__ import annotations

import enum
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
    Answer,
    Begin,
    CollectiveCall,
    CollectiveSpec,
    Decision,
    Finished,
    PeerMessage,
    Plan,
    StateEntry,
    SyncFinished,
    SyncOffer,
    SyncPlan,
    TopologyKind,
    TopologyVote,
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
    report: Finished | SyncFinished | None = None
    withdrawn: OperationTimeout | InvalidUsage | None = None
    """What the call ends with, where the user gave it up and it does not succeed after all."""

    def vote(self, oldest_call_id: int) -> PeerMessage:
        """The message that makes this call."""
        raise NotImplementedError

    def standing(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        """What to say again after a broken connection."""
        return (self.report,) if self.report is not None else (self.vote(oldest_call_id),)


@dataclass(slots=True)
class ReduceCall(Call):
    """A collective."""

    spec: CollectiveSpec | None = None
    plan: Plan | None = None
    begun_ns: int = 0
    """When the data plane started."""

    def participants(self, attempt_id: int) -> list[tuple[bytes, int]]:
        """Who takes part in an attempt, with the call of each; empty where its plan did not come."""
        plan = self.plan
        if plan is None or plan.attempt_id != attempt_id:
            return []
        return list(zip(plan.lanes[0].order, plan.calls, strict=False))

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
    plan: SyncPlan | None = None
    is_at_fault: bool = False
    """What this peer offered has changed since."""

    def participants(self, attempt_id: int) -> list[tuple[bytes, int]]:
        """Who takes part in an attempt, with the call of each; empty where its plan did not come."""
        plan = self.plan
        return (
            list(zip(plan.order, plan.calls, strict=False))
            if plan is not None and plan.attempt_id == attempt_id
            else []
        )

    def vote(self, oldest_call_id: int) -> SyncOffer:
        """The message that makes this call."""
        facts = (self.strategy, self.revision, self.entries, self.digest_kind)
        return SyncOffer(oldest_call_id, self.call_id, *facts)

    def standing(self, oldest_call_id: int) -> tuple[PeerMessage, ...]:
        """What to say again: the offer too, from which a new master finds what others must fetch."""
        offer = self.vote(oldest_call_id)
        return (offer, self.report) if self.report is not None else (offer,)


_ERRORS: dict[int, type[PCCLError]] = {
    Result.INVALID_ARGUMENT: InvalidArgument,
    Result.INVALID_USAGE: InvalidUsage,
    Result.TOO_FEW_PEERS: TooFewPeers,
    Result.RANK_CONNECTION_FAILED: PeerUnreachable,
    Result.NO_SHARED_STATE_AVAILABLE: NoSharedState,
    Result.UPDATE_TOPOLOGY_FAILED: UpdateTopologyFailed,
    Result.TOPOLOGY_OPTIMIZATION_FAILED: TopologyOptimizationFailed,
}


def error_of_answer(call: Call, answer: Answer) -> PCCLError:
    """The error that an answer other than SUCCESS stands for."""
    if answer.field and isinstance(call, ReduceCall) and call.spec is not None:
        return CollectiveMismatch(answer.reason, tag=call.spec.tag, field=answer.field, values=answer.values)
    if answer.result == Result.RANK_CONNECTION_LOST:
        return call.withdrawn or PeerLost(answer.reason)
    return _ERRORS.get(answer.result, InternalError)(answer.reason)


def error_of_decision(call: Call, decision: Decision) -> PCCLError:
    """The error that an aborted attempt stands for."""
    if decision.result == Result.INTERNAL_ERROR:
        return ResultMismatch(decision.reason)
    if isinstance(call, SyncCall) and call.is_at_fault:
        return call.withdrawn or InvalidUsage(decision.reason)
    return call.withdrawn or PeerLost(decision.reason, peers=decision.peers)


def error_of_kick(result: int, reason: str, *, was_member: bool) -> PCCLError:
    """The error that ends the registration or the membership of a peer that was removed."""
    if result == Result.RANK_CONNECTION_FAILED and not was_member:
        return PeerUnreachable(reason)
    return Kicked(f"removed from the run: {reason}; connect again to take part", reason=reason)
