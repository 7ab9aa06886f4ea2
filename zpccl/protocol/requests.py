"""What members ask of the master: their calls, once the messages have come.

Every message may come twice. A call keeps its id, so one that is known gets its answer again, or is told what has
become of it. A peer that breaks the bounds of its calls is removed.
"""

from __future__ import annotations

from collections.abc import Callable

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.election import validate_entries
from zpccl.protocol.kinds.collective import Collectives
from zpccl.protocol.kinds.sync import StateSyncs
from zpccl.protocol.kinds.topology import Rounds
from zpccl.protocol.membership import Outbox, Peer, Registry
from zpccl.protocol.messages import (
    CollectiveSpec,
    Decision,
    PeerMessage,
    Report,
    SyncSpec,
    Vote,
    Votes,
    Withdraw,
)
from zpccl.protocol.operation import Operations, key_of


class Requests:
    """The calls of all members, on their way to those who decide them.

    Args:
        kick: removes a peer, with a result and a reason, at a time.
    """

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        operations: Operations,
        collectives: Collectives,
        rounds: Rounds,
        syncs: StateSyncs,
        kick: Callable[[Peer, Result, str, int], object],
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._operations = operations
        self._collectives = collectives
        self._rounds = rounds
        self._syncs = syncs
        self._kick = kick
        self._withdrawals: dict[bytes, dict[int, Withdraw]] = {}  # That wait until all members have reported.

    def take(self, peer: Peer, message: PeerMessage, now_ns: int) -> None:
        """A member makes calls, reports on them, or takes one back."""
        if isinstance(message, Votes):
            self._forget_answers(peer, message.oldest_call_id)
            for vote in message.votes:
                if self._accept_call(peer, vote, now_ns):
                    self._on_vote(peer, vote, now_ns)
        elif isinstance(message, Report):
            self._operations.on_report(peer, message)
        elif isinstance(message, Withdraw):
            self._on_withdraw(peer, message)

    def settle(self) -> None:
        """Answers withdrawals that have waited for all members to report."""
        if self._withdrawals and self._registry.have_all_reported:
            withdrawals, self._withdrawals = self._withdrawals, {}
            for peer_id, of_peer in withdrawals.items():
                peer = self._registry.peers.get(peer_id)
                for message in of_peer.values() if peer is not None else ():
                    assert peer is not None
                    self._on_withdraw(peer, message)

    def _on_vote(self, peer: Peer, vote: Vote, now_ns: int) -> None:
        if isinstance(vote.spec, CollectiveSpec):
            self._collectives.begin(peer, vote, now_ns)
        elif isinstance(vote.spec, SyncSpec):
            self._on_sync_vote(peer, vote, vote.spec, now_ns)
        else:
            self._operations.vote(peer, vote, now_ns)
            self._rounds.answer_missed()

    def _on_sync_vote(self, peer: Peer, vote: Vote, spec: SyncSpec, now_ns: int) -> None:
        problem = validate_entries(spec.entries)
        if self._syncs.is_running(peer, vote.call_id, None if problem else spec):
            return
        if problem:
            self._operations.forget(peer, vote.call_id)  # It may have been said well before.
            answer = Decision(vote.call_id, Result.INVALID_ARGUMENT, reason=problem[: limits.TEXT_CHARS_MAX])
            return self._outbox.answer(peer, answer)
        self._operations.vote(peer, vote, now_ns)
        return None

    def _on_withdraw(self, peer: Peer, message: Withdraw) -> None:
        call_id = message.call_id
        if not self._registry.have_all_reported:  # One of those who are away may know that the call has succeeded.
            waiting = self._withdrawals.setdefault(peer.peer_id, {})
            if len(waiting) < limits.CALLS_IN_FLIGHT_MAX:  # Its vote may come after it.
                waiting[call_id] = message
            return
        if call_id in peer.answers:
            self._outbox.send(peer, peer.answers[call_id])
        elif call_id in peer.open_calls:
            self._operations.withdraw(peer, call_id)
        elif call_id >= peer.oldest_call_id:  # Its vote got lost; it will not be sent again.
            self._outbox.answer(peer, Decision(call_id, Result.RANK_CONNECTION_LOST, reason="withdrawn"))

    def _accept_call(self, peer: Peer, vote: Vote, now_ns: int) -> bool:
        """False for calls that were answered, which is said again, and for peers that break their bounds."""
        call_id, key = vote.call_id, key_of(peer, vote.spec)
        if peer.peer_id not in self._registry.peers or call_id < peer.oldest_call_id:
            return False
        if call_id in peer.answers:
            self._outbox.send(peer, peer.answers[call_id])
            return False
        member_count = self._registry.member_count(peer.group)
        calls_max = limits.calls_in_flight_max(member_count)
        if call_id not in peer.open_calls and len(peer.open_calls) >= calls_max:
            reason = f"more than {calls_max} calls without an answer, in a group of {member_count}"
        elif peer.open_calls.setdefault(call_id, key) != key:
            reason = f"call id {call_id} was used for two calls"
        else:
            return True
        self._kick(peer, Result.INVALID_USAGE, reason, now_ns)
        return False

    @staticmethod
    def _forget_answers(peer: Peer, oldest_call_id: int) -> None:
        if oldest_call_id > peer.oldest_call_id:
            peer.oldest_call_id = oldest_call_id
            for call_id in [call_id for call_id in peer.answers if call_id < oldest_call_id]:
                del peer.answers[call_id]
