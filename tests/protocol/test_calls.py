"""The calls of a peer: the messages that they send, and the errors for their answers."""

from __future__ import annotations

from typing import Any

import pytest

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
from zpccl.protocol.calls import Call, error_of, error_of_kick, is_sync
from zpccl.protocol.messages import Decision, Report, TopologySpec, Vote, Votes

from .harness import OPTIMIZE, UPDATE, offer, spec, sync_spec, topology_vote


@pytest.mark.parametrize(
    "call, vote",
    [
        (Call(5, spec(3)), Votes(2, (Vote(5, spec(3)),))),
        (Call(5, TopologySpec(OPTIMIZE)), topology_vote(2, 5, OPTIMIZE)),
        (Call(5, sync_spec(9)), offer(5, 9, oldest=2)),
    ],
)
def test_standing_messages(call: Call, vote: Any) -> None:
    """A call sends its vote until there is a report, and then the report."""
    assert call.standing(2) == (vote,)
    report = Report(5, 7, True)
    call.report = report
    offer = (vote,) if is_sync(call) else ()  # Another master learns from the offer what others must fetch.
    assert call.standing(2) == (*offer, report)


@pytest.mark.parametrize(
    "result, kind",
    [
        (Result.INVALID_ARGUMENT, InvalidArgument),
        (Result.INVALID_USAGE, InvalidUsage),
        (Result.TOO_FEW_PEERS, TooFewPeers),
        (Result.RANK_CONNECTION_FAILED, PeerUnreachable),
        (Result.RANK_CONNECTION_LOST, PeerLost),
        (Result.NO_SHARED_STATE_AVAILABLE, NoSharedState),
        (Result.UPDATE_TOPOLOGY_FAILED, UpdateTopologyFailed),
        (Result.TOPOLOGY_OPTIMIZATION_FAILED, TopologyOptimizationFailed),
        (Result.INTERNAL_ERROR, InternalError),
    ],
)
def test_errors_of_answers(result: Result, kind: type[PCCLError]) -> None:
    error = error_of(Call(5, TopologySpec(UPDATE)), Decision(5, result, reason="why"))
    assert (type(error), error.result, error.message) == (kind, result, "why")


def test_an_answer_with_a_field_is_a_mismatch_of_collectives_only() -> None:
    answer = Decision(5, Result.INVALID_USAGE, 0, "why", "count", ("1", "2"))
    error = error_of(Call(5, spec(3)), answer)
    assert isinstance(error, CollectiveMismatch)
    assert (error.tag, error.field, error.values) == (3, "count", ("1", "2"))
    assert type(error_of(Call(5, sync_spec(0)), answer)) is InvalidUsage


def test_what_was_withdrawn_ends_with_the_reason_of_that() -> None:
    call = Call(5, spec(3), withdrawn=OperationTimeout("too long"))
    assert error_of(call, Decision(5, Result.RANK_CONNECTION_LOST)) is call.withdrawn
    assert error_of(call, Decision(5, Result.RANK_CONNECTION_LOST, 2, attempt_id=1)) is call.withdrawn
    assert type(error_of(call, Decision(5, Result.TOO_FEW_PEERS))) is TooFewPeers


def test_errors_of_decisions() -> None:
    call = Call(5, spec(3))
    error = error_of(call, Decision(5, Result.RANK_CONNECTION_LOST, 2, "lost b", attempt_id=1, peers=("b",)))
    assert isinstance(error, PeerLost)
    assert (error.message, error.peers) == ("lost b", ("b",))
    assert type(error_of(call, Decision(5, Result.INTERNAL_ERROR, 2, "differ", attempt_id=1))) is ResultMismatch


def test_errors_of_kicks() -> None:
    kicked = error_of_kick(Result.INVALID_USAGE, "too many calls", was_member=True)
    assert isinstance(kicked, Kicked)
    assert kicked.reason == "too many calls"
    assert str(kicked) == "MASTER_CONNECTION_FAILED: removed from the run: too many calls; connect again to take part"
    reason = "no data connection to b"
    unreached = {"b": "10.0.0.1:5: refused; [::1]:5: timed out", "c": "x" * limits.TEXT_CHARS_MAX}
    error = error_of_kick(Result.RANK_CONNECTION_FAILED, reason, was_member=False, unreached=unreached)
    assert type(error) is PeerUnreachable and error.peers == ("b", "c")
    assert f"{reason} (b: 10.0.0.1:5: refused; [::1]:5: timed out; c: x" in error.message
    assert len(error.message) == limits.TEXT_CHARS_MAX
    assert type(error_of_kick(Result.RANK_CONNECTION_FAILED, reason, was_member=True)) is Kicked
