"""Syncs of shared state, as the master sees them: offers, election, transfer, decision.

    offers from all members of the group --elect--> running --all who fetch have it--> committed
                                           |           |
                                     refused peers   a holder or a fetcher failed, withdrawn -> aborted
                                     are answered

Peers that fetch keep what they got aside until the sync is committed, so a sync that fails changes nobody's state.
Peers that have nothing to fetch wait too: they may be asked for blocks. A bystander or fetcher that dies is no longer
waited for; a holder that dies aborts the sync only while somebody fetches from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.election import elect
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import Answer, Decision, FetchEntry, SyncFinished, SyncPlan
from zpccl.protocol.rounds import Rounds


@dataclass(slots=True)
class Transfer:
    """One running sync."""

    attempt_id: int
    group: int
    revision: int
    holders: tuple[Peer, ...]
    calls: dict[Peer, int]
    fetch: dict[Peer, tuple[FetchEntry, ...]]
    done: set[Peer] = field(default_factory=set)


class StateSyncs:
    """The syncs of all groups, at most one running in each."""

    def __init__(self, registry: Registry, outbox: Outbox, rounds: Rounds, next_attempt_id: Callable[[], int]) -> None:
        self._registry = registry
        self._outbox = outbox
        self._rounds = rounds
        self._next_attempt_id = next_attempt_id
        self.transfers: dict[int, Transfer] = {}  # By group.
        self.last_revision: dict[int, int] = {}  # By group.
        self._completed_last: dict[int, frozenset[Peer]] = {}

    def evaluate(self) -> None:
        """Begins the sync of every group whose members have all called for it."""
        for group in sorted({peer.group for peer, call in self._rounds.calls.items() if call.offer is not None}):
            offers = self._rounds.sync_offers(group)
            if offers is None or group in self.transfers:
                continue
            calls = {peer: self._rounds.calls[peer].call_id for peer in offers}
            self._rounds.take_sync(group)
            if len(offers) == 1:
                for peer, call_id in calls.items():
                    reason = "this peer is alone in its group"
                    self._outbox.answer(peer, Answer(call_id, Result.TOO_FEW_PEERS, reason=reason))
                continue
            election = elect(offers, self.last_revision.get(group), self._completed_last.get(group, frozenset()))
            self._outbox.log(Level.INFO, f"group {group}: shared state elected: {election.explanation}")
            if election.restarted:
                self._outbox.log(
                    Level.WARNING,
                    f"group {group}: nobody continues revision {self.last_revision[group]}; the highest revision "
                    f"offered, {election.revision}, is taken",
                )
            for peer, (result, reason) in election.refused.items():
                self._outbox.log(Level.WARNING, f"{peer.name} is refused in the sync: {reason}")
                self._outbox.answer(peer, Answer(calls[peer], result, reason=reason[: limits.TEXT_CHARS_MAX]))
            if election.fetch:
                self._start(group, election.revision, tuple(election.holders), calls, election.fetch)

    def _start(
        self,
        group: int,
        revision: int,
        holders: tuple[Peer, ...],
        calls: dict[Peer, int],
        fetch: dict[Peer, tuple[FetchEntry, ...]],
    ) -> None:
        transfer = Transfer(
            attempt_id=self._next_attempt_id(),
            group=group,
            revision=revision,
            holders=holders,
            calls={peer: calls[peer] for peer in fetch},
            fetch=fetch,
            done={peer for peer, entries in fetch.items() if not entries},
        )
        self.transfers[group] = transfer
        for peer in transfer.calls:
            self._send_plan(transfer, peer)
        self._decide(transfer)

    def _send_plan(self, transfer: Transfer, peer: Peer) -> None:
        holder_ids = tuple(holder.peer_id for holder in transfer.holders)
        call_id = transfer.calls[peer]
        plan = SyncPlan(call_id, transfer.attempt_id, transfer.revision, holder_ids, transfer.fetch[peer])
        self._outbox.send(peer, plan)

    def is_running(self, peer: Peer, call_id: int) -> bool:
        """True if the call is part of a running sync. Its plan is then sent again."""
        transfer = self.transfers.get(peer.group)
        if transfer is None or transfer.calls.get(peer) != call_id:
            return False
        self._send_plan(transfer, peer)
        return True

    def finished(self, peer: Peer, report: SyncFinished) -> None:
        """A peer has fetched all that it should, or could not."""
        if report.call_id in peer.answers:
            return self._outbox.send(peer, peer.answers[report.call_id])
        transfer = self.transfers.get(peer.group)
        if transfer is None or transfer.calls.get(peer) != report.call_id:
            return None
        if report.ok:
            transfer.done.add(peer)
            return self._decide(transfer)
        fault = [holder for holder in transfer.holders if holder.peer_id == report.fault]
        return self._abort(transfer, report.reason or "a transfer failed", fault)

    def withdraw(self, peer: Peer, call_id: int) -> bool:
        """A member gives a running sync up, which ends it for all. False if the call is not one of ours."""
        transfer = self.transfers.get(peer.group)
        if transfer is None or transfer.calls.get(peer) != call_id:
            return False
        self._abort(transfer, f"{peer.name} withdrew from it", [peer])
        return True

    def on_members_changed(self) -> None:
        """The member list has changed: who is gone is no longer waited for."""
        for transfer in list(self.transfers.values()):
            self._decide(transfer)

    def _decide(self, transfer: Transfer) -> None:
        survivors = [peer for peer in transfer.calls if self._registry.peers.get(peer.peer_id) is peer]
        lost = [peer for peer in transfer.holders if peer not in survivors]
        if all(peer in transfer.done for peer in survivors):
            self._end(transfer, committed=True)
        elif lost:
            self._abort(transfer, f"lost {names(lost)}", lost)

    def _abort(self, transfer: Transfer, reason: str, blamed: list[Peer]) -> None:
        self._outbox.log(Level.WARNING, f"group {transfer.group}: sync aborted: {reason}")
        self._end(transfer, committed=False, reason=reason, blamed=tuple(peer.name for peer in blamed))

    def _end(self, transfer: Transfer, *, committed: bool, reason: str = "", blamed: tuple[str, ...] = ()) -> None:
        del self.transfers[transfer.group]
        if committed:
            self.last_revision[transfer.group] = transfer.revision
            self._completed_last[transfer.group] = frozenset(transfer.calls)
        result = Result.SUCCESS if committed else Result.RANK_CONNECTION_LOST
        for peer, call_id in transfer.calls.items():
            if self._registry.peers.get(peer.peer_id) is peer:
                decision = Decision(
                    call_id,
                    transfer.attempt_id,
                    committed,
                    transfer.revision,
                    result,
                    reason[: limits.TEXT_CHARS_MAX],
                    blamed,
                )
                self._outbox.answer(peer, decision)

    def validate(self) -> None:
        """States what always holds."""
        for group, transfer in self.transfers.items():
            assert transfer.group == group and set(transfer.calls) == set(transfer.fetch)
            survivors = [peer for peer in transfer.calls if self._registry.peers.get(peer.peer_id) is peer]
            assert survivors and not transfer.done.issuperset(survivors), "an undecided sync"
