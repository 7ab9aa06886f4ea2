"""Applies the merged reports of a run to a new master: first the decisions, then the running attempts.

The registry already contains all members; those that have not reported yet are ABSENT.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from zpccl.errors import Result
from zpccl.protocol.kinds.sync import StateSyncs
from zpccl.protocol.kinds.topology import Rounds
from zpccl.protocol.membership import Outbox, Peer, Registry
from zpccl.protocol.messages import Decision
from zpccl.protocol.operation import Operations
from zpccl.protocol.recovery import History

PARTED = "the other members went on without it, because the former master had removed it"
"""Why a peer is removed."""


class TakeOver:
    """Applies a history to the parts of a master."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        operations: Operations,
        rounds: Rounds,
        syncs: StateSyncs,
        kick: Callable[[Peer, Result, str, int], object],
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._operations = operations
        self._rounds = rounds
        self._syncs = syncs
        self._kick = kick

    def apply_round(self, history: History, *, has_one_address: bool, late: bytes | None = None) -> list[Peer]:
        """Restores the last round of topology votes. Call it before the Welcomes: peers they admit vote after it.

        Args:
            history: the merged reports.
            has_one_address: True if a former master may have removed members without a quorum.
            late: a peer that reported after this master decided something, or sent out what others had reported.

        Returns:
            Peers to remove before a list is sent: they or the others had been removed by the former master.
        """
        parted: list[Peer] = []
        if has_one_address:
            peers = self._registry.peers
            present = {peer.peer_id: peer.since for peer in peers.values() if peer.has_reported}
            absent = [peer_id for peer_id in peers if peer_id not in present]
            parted = [peers[peer_id] for peer_id in dict.fromkeys(history.parted(present, late, absent))]
            history.drop({peer.peer_id for peer in parted})
        if late is None or history.round > self._registry.round:
            self._registry.round, self._registry.round_value = history.round, history.round_value
        return parted

    def apply(self, history: History, now_ns: int) -> None:
        """Restores everything else. May be called again after another report, to apply what that one adds."""
        peers = self._registry.peers
        without: dict[Peer, None] = {}  # Peers that lack a result. Removed last: that aborts their attempts.
        for outcome in history.outcomes.values():
            without.update(dict.fromkeys(self._settle(outcome, history.calls_of(outcome))))
        for peer_id, call_id, outcome in history.overtaken(peers):
            if outcome.committed:
                without[peers[peer_id]] = None
            else:
                self._settle(outcome, {peer_id: call_id})
        for group, last in history.take_last_syncs().items():  # Before running attempts: they may be committed now.
            completed = frozenset(peers[peer_id] for peer_id in last.order if peer_id in peers)
            self._syncs.restore_last(group, last.value, completed)
        for reporter, running in history.take_running(peers):
            self._operations.restore(running, peers[reporter])
        self._syncs.on_restored()
        self._operations.end_left_behind([peers[i] for i in history.take_reporters() if i in peers])
        self._rounds.answer_missed()
        for peer in without:
            if self._registry.peers.get(peer.peer_id) is peer and peer.has_reported:
                self._kick(peer, Result.RANK_CONNECTION_LOST, PARTED, now_ns)

    def _settle(self, outcome: Decision, calls: dict[bytes, int]) -> list[Peer]:
        """Sends the outcome of an attempt, which a former master decided, to all participants.

        Returns:
            Peers that had reported the attempt as running, and were no longer participants when it was decided.
        """
        running = self._operations.take_attempt(outcome.attempt_id)
        if not outcome.committed or not outcome.order:
            calls = {**{peer.peer_id: call_id for peer, call_id in running.items()}, **calls}
        for peer_id, call_id in calls.items():
            peer = self._registry.peers.get(peer_id)
            if peer is None or not peer.has_reported or call_id in peer.answers:
                continue
            if self._operations.attempt_of(peer, call_id) is not None:
                continue  # A false report: this call is in another attempt.
            if call_id < peer.oldest_call_id:
                peer.open_calls.pop(call_id, None)  # Another peer had reported that it runs.
                continue
            self._operations.forget(peer, call_id)
            order, its_calls = tuple(calls), tuple(calls.values())
            self._outbox.answer(peer, replace(outcome, call_id=call_id, order=order, calls=its_calls))
        return [peer for peer in running if peer.peer_id not in calls]
