"""Syncs of shared state, as the master sees them: offers, election, transfer, decision.

    offers from all members --elect--> agreed --all have a source--> running --all fetches are done--> committed
                                         |      |  ^                    |
                             refused peers      |  | links stay down:   a peer failed, no source is left,
                              are answered      |  | those cut off are  | withdrawn, [1]
                                                `--' removed            `--> aborted

    [1] A fetcher waits too long for links, though the links connect all members: peers that could pass the state on
        were refused.

The plan tells each fetcher its sources, which have the whole state now, and its partial seeds, which fetch the same
(sources.py). While a fetcher has no link to any of these, the plan waits, and so do the answers to refused peers.

Fetchers write what they have fetched to their tensors when the sync is committed, so a failed sync changes no state.
Peers that have nothing to fetch wait until then, too, and serve blocks. The sync does not wait for lost peers, whether
holders or fetchers: it continues while every remaining fetcher can get everything from peers that have the state,
directly or through other fetchers. A fetcher that has no source left reports a failure. So does a peer whose state has
changed since its vote, because it no longer holds what it offered.

A master that takes over the run continues a sync that peers report. Peers that never got the plan offer their state
again. The new master derives what they must fetch from their offers and that of a holder: the winner of the election,
or the next holder if the winner is lost. Such plans wait for links, too. As with collectives, the new master decides
the sync only after all its remaining participants have reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.election import elect, entries_to_fetch, free_contents, validate_entries
from zpccl.protocol.explain import explain
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import Decision, FetchEntry, Fetching, Plan, Report, Running, SyncSpec, Vote
from zpccl.protocol.operation import SYNC, Attempt, Key, Kind, Operations, Verdict, absent
from zpccl.protocol.paths import Edge, Paths, cost_of
from zpccl.protocol.sources import Sources, find_sources, left_out

NOBODY_LEFT = "no source is left to fetch from"
"""The reason for aborting a sync after a loss."""


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer(Attempt):
    """A running attempt at a sync. `begun_ns` is when the plan was sent."""

    has_plan_everywhere: bool = False
    is_taken_over: bool = False
    """True if a former master has begun it."""
    revision: int
    holders: tuple[Peer, ...]
    fetch: dict[Peer, tuple[FetchEntry, ...]]
    refused: dict[Peer, tuple[Result, str]] = field(default_factory=dict)
    """Peers that cannot take part, and why, until they are answered. They are in `calls`, but not in `fetch`."""
    done: set[Peer] = field(default_factory=set)
    logged: set[Peer] = field(default_factory=set)
    """Peers whose dropped sources are in the log."""
    failed: Verdict | None = None
    """Why a transfer failed, and the peers at fault."""
    offers: dict[Peer, SyncSpec] = field(default_factory=dict)
    """All offers, until the plan is sent; after a take-over, the offers that were made again."""
    sources: dict[Peer, tuple[Peer, ...]] = field(default_factory=dict)
    """By fetcher that has its plan from this master: the peers that had everything then, the best first."""
    partial_seeds: dict[Peer, tuple[Peer, ...]] = field(default_factory=dict)
    """By fetcher: the peers that fetch the same."""

    free: dict[Peer, dict[str, bytes]] = field(default_factory=dict)
    """After a take-over, by peer that has its plan: the contents it will have of keys that allow inequality."""

    def contents_of(self, peer: Peer) -> dict[str, bytes]:
        """What is known of these contents. A holder fetches nothing, so its offer tells them, too."""
        is_offered = peer in self.holders and peer in self.offers
        return self.free.get(peer) or (free_contents(self.offers[peer], ()) if is_offered else {})

    def has(self, peer: Peer, entries: Iterable[FetchEntry], free_keys: Container[str]) -> bool:
        """True if a peer will have those of `entries` whose keys are free, or is a holder with unknown contents.

        Holders have all that was to be fetched from the winner of the election. If another holder takes its place, they
        may differ in what is to be fetched from that one.
        """
        held = self.contents_of(peer)
        is_unknown = not held and peer in self.holders
        return is_unknown or all(held.get(entry.key) == entry.digest for entry in entries if entry.key in free_keys)

    @property
    def group(self) -> int:
        """The group of the participants."""
        assert self.key.group is not None
        return self.key.group


class StateSyncs(Kind[Transfer]):
    """The syncs of all groups, at most one running in each."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        paths: Paths,
        operations: Operations,
        link_wait_ns: int,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._paths = paths
        self.wait_ns = link_wait_ns
        self._operations = operations
        operations.add_kind(self, SYNC)
        self.last_revision: dict[int, int] = {}  # By group.
        self._completed_last: dict[int, frozenset[Peer]] = {}  # By group: the participants of its last sync.

    def evaluate(self, now_ns: int) -> None:
        """Begins the sync of every group whose members have all voted for it."""
        if not self._registry.is_committed:
            return
        for operation in sorted(self._operations.of(SYNC), key=lambda operation: operation.key):
            group = operation.key.group
            assert group is not None
            if not self._operations.is_complete(operation) or self._operations.running_at(operation.key):
                continue
            if len(operation.votes) == 1:
                self._operations.refuse(operation.key, Result.TOO_FEW_PEERS, "this peer is alone in its group")
                continue
            votes = self._operations.take(operation.key)
            offers = {peer: _spec_of(votes[peer]) for peer in self._operations.members_of(operation.key)}
            calls = {peer: votes[peer].call_id for peer in offers}
            last_revision = self.last_revision.get(group)
            election = elect(offers, last_revision, self._completed_last.get(group, frozenset()))
            for line in explain(election, offers, last_revision, lambda peer: peer.name):
                self._outbox.log(Level.INFO, f"group {group}: sync: {line}")
            if election.restarted:
                self._outbox.log(
                    Level.WARNING,
                    f"group {group}: no peer continues from revision {self.last_revision[group]}; taking the highest "
                    f"revision offered, {election.revision}",
                )
            if not election.fetch:
                self._refuse(election.refused, calls, ())
            else:
                transfer = Transfer(
                    attempt_id=self._operations.next_attempt_id(),
                    key=operation.key,
                    calls=calls,
                    revision=election.revision,
                    holders=tuple(election.holders),
                    fetch=election.fetch,
                    refused=election.refused,
                    done={peer for peer, entries in election.fetch.items() if not entries},
                    offers={peer: offer for peer, offer in offers.items() if peer in election.fetch},
                    agreed_ns=now_ns,
                )
                self._operations.run(transfer)
                self._start(transfer, now_ns, has_waited=False)

    def _refuse(
        self, refused: dict[Peer, tuple[Result, str]], calls: dict[Peer, int], others: Collection[Peer]
    ) -> None:
        """Refuses the calls of peers that cannot take part. The others hear of it before they get their plan.

        Otherwise a peer that missed its refusal would wait in its call at another master, while the others go on.
        """
        alike: dict[tuple[Result, str], list[Peer]] = {}
        for peer, why in refused.items():
            alike.setdefault(why, []).append(peer)
        for (result, reason), peers in alike.items():
            self._outbox.log(Level.WARNING, f"refused in the sync: {names(peers)}: {reason}")
            self._operations.refuse_calls([(peer, calls[peer]) for peer in peers], result, reason, others=others)

    def _refuse_waiting(self, transfer: Transfer) -> None:
        """Refuses the peers that cannot take part in a transfer, once the others get its plan, or it has failed.

        If a refused peer went on earlier, and a master took over while the others have no plan, that peer and the
        others would seem to wait for each other.
        """
        calls = {peer: transfer.calls.pop(peer) for peer in transfer.refused}
        refused = {peer: transfer.refused[peer] for peer in self._operations.present(calls)}
        transfer.refused = {}
        self._refuse(refused, calls, self._operations.present(transfer.calls))

    def _start(self, transfer: Transfer, now_ns: int, *, has_waited: bool) -> None:
        """Sends the plan, unless a fetcher has no source."""
        found = self._find_sources(transfer, now_ns)
        if found.without:
            return
        self._refuse_waiting(transfer)
        transfer.sources, transfer.partial_seeds, transfer.fetch, transfer.offers = (
            found.sources,
            found.partial_seeds,
            found.fetch,
            {},
        )
        transfer.done |= {peer for peer, entries in found.fetch.items() if not entries}
        transfer.agreed_ns, transfer.begun_ns = None, now_ns
        if has_waited:  # Peers may have received plans with greater ids meanwhile.
            self._operations.renumber(transfer)
            transfer.holders = tuple(self._operations.present(transfer.holders))
        for peer in transfer.calls:
            self._send_plan(transfer, peer)
        self._operations.decide(transfer)

    def transfers(self) -> list[Transfer]:
        """The running syncs, at most one of each group."""
        return [attempt for attempt in self._operations.running_of(SYNC) if isinstance(attempt, Transfer)]

    def _transfer_of(self, peer: Peer) -> Transfer | None:
        attempt = self._operations.running_at(Key(SYNC, peer.group))
        return attempt if isinstance(attempt, Transfer) else None

    def _find_sources(self, transfer: Transfer, now_ns: int) -> Sources:
        """Finds sources, without suspected links where a fetcher would rely on these alone and need not."""
        present = [peer for peer in self._operations.present(transfer.calls) if peer not in transfer.refused]
        holders = self._operations.present(transfer.holders)

        def find(avoided: Collection[Edge]) -> Sources:
            def linked(peer: Peer, others: Sequence[Peer]) -> list[Peer]:
                near = self._paths.sources(peer, others, now_ns)
                return [other for other in near if frozenset((peer, other)) not in avoided] if avoided else near

            return find_sources(present, holders, transfer.fetch, transfer.offers, linked)

        found, suspects = find(()), self._paths.avoided(now_ns)
        if found.without or not suspects:
            return found

        def suppliers(peer: Peer) -> list[Peer]:
            named = found.sources.get(peer, ()) + found.partial_seeds.get(peer, ())
            return [other for other in named if frozenset((peer, other)) not in suspects]

        fetchers = [peer for peer in present if found.fetch[peer]]
        if left_out(fetchers, [peer for peer in present if not found.fetch[peer]], suppliers):
            needy = find(suspects).without
            other = find([edge for edge in suspects if edge.isdisjoint(needy)])
            return found if other.without else other
        return found

    def on_links_changed(self, now_ns: int) -> None:
        """A link came up or went down, or a member is back: plans that wait for links are tried again."""
        for transfer in self.transfers():
            self._operations.decide(transfer)
        for transfer in self.transfers():
            if transfer.is_taken_over:
                self._plan_anew(transfer)
            elif transfer.agreed_ns is not None and self._registry.is_committed:
                self._start(transfer, now_ns, has_waited=True)

    def wait_again(self, now_ns: int) -> None:
        """The members that are cut off must stay: restarts the wait of all syncs that wait for links."""
        for transfer in self.transfers():
            transfer.agreed_ns = None if transfer.agreed_ns is None else now_ns

    def overdue(self, now_ns: int) -> list[int | None]:
        """The groups whose syncs have waited too long for links."""
        return [transfer.group for transfer in self._late(now_ns)]

    def tick(self, now_ns: int) -> None:
        """A sync fails if a fetcher has waited too long for links, and no member is cut off."""
        for transfer in self._late(now_ns) if self._registry.is_committed else ():
            if not self._paths.surplus(self._registry.members(transfer.group), now_ns):
                late = self._late_fetchers(transfer)
                without = names(late or self._find_sources(transfer, now_ns).without)
                reason = f"{without}: no data connection to a peer that can send it the shared state"
                transfer.failed = Verdict(Result.RANK_CONNECTION_LOST, reason)
                self._operations.decide(transfer)

    def _late(self, now_ns: int) -> list[Transfer]:
        """The syncs that have waited too long for links."""
        waiting = [transfer for transfer in self.transfers() if transfer.agreed_ns is not None]
        return [transfer for transfer in waiting if now_ns - (transfer.agreed_ns or 0) >= self.wait_ns]

    def _send_plan(self, transfer: Transfer, peer: Peer) -> None:
        how = Fetching(
            _ids(transfer.calls),
            transfer.revision,
            _ids(transfer.holders),
            transfer.fetch[peer],
            _ids(transfer.sources.get(peer, ())),
            _ids(transfer.partial_seeds.get(peer, ())),
        )
        self._outbox.send(peer, Plan(transfer.attempt_id, tuple(transfer.calls.values()), how))

    def refusal_of(self, peer: Peer, vote: Vote, running: Attempt | None) -> Decision | None:
        """Refuses entries that are not sorted by key, or not unique."""
        del peer, running
        problem = validate_entries(_spec_of(vote).entries)
        reason = problem[: limits.TEXT_CHARS_MAX]
        return Decision(vote.call_id, Result.INVALID_ARGUMENT, reason=reason) if problem else None

    def on_vote_again(self, attempt: Transfer, peer: Peer, vote: Vote) -> None:
        """Sends the plan again; to a peer that never got it from a former master, a plan made from its new offer."""
        if attempt.agreed_ns is not None and not attempt.is_taken_over:
            return  # The plan has not been sent yet.
        if peer in attempt.fetch:
            self._send_plan(attempt, peer)
        if attempt.fetch.keys() != attempt.calls.keys() and not validate_entries(_spec_of(vote).entries):
            attempt.offers[peer] = _spec_of(vote)
            self._plan_anew(attempt)

    # --- Taking over ------------------------------------------------------------------------------------------------

    def restore(self, running: Running, reporter: Peer, calls: dict[Peer, int]) -> None:
        """Continues a sync of a former master, as a participant with its plan reports it."""
        plan, how = running.plan, running.plan.how
        known = self._operations.running.get(plan.attempt_id)
        if known is not None and known.key != Key(SYNC, reporter.group):
            return  # A false report.
        transfer = self._transfer_of(reporter)
        calls = {
            peer: calls[peer]
            for peer in self._operations.present(calls)
            if self._operations.attempt_of(peer, calls[peer]) in (None, transfer) and calls[peer] not in peer.answers
        }
        if reporter not in calls or not isinstance(how, Fetching):
            return  # The reporter does not take part in it any more.
        if transfer is None:
            transfer = Transfer(
                attempt_id=plan.attempt_id,
                key=Key(SYNC, reporter.group),
                calls=calls,
                revision=how.revision,
                holders=tuple(self._registry.peers.get(peer_id) or absent(peer_id) for peer_id in how.holders),
                fetch={},
                is_taken_over=True,
            )
            self._operations.run(transfer)
            for peer, call_id in calls.items():
                vote = self._operations.forget(peer, call_id)
                if vote is not None and isinstance(vote.spec, SyncSpec):
                    transfer.offers[peer] = vote.spec  # It never got the plan, and reported earlier.
                peer.open_calls.setdefault(call_id, transfer.key)
        if transfer.attempt_id != plan.attempt_id or reporter not in transfer.calls:
            return
        transfer.fetch[reporter] = ()  # It has its plan, and would ignore another.
        transfer.free[reporter] = {entry.key: entry.digest for entry in how.fetch}
        if not running.is_open:
            transfer.done.add(reporter)

    def on_restored(self) -> None:
        """All syncs that peers report are restored. Before that, who has its plan or all of the state was not known."""
        for transfer in self.transfers():
            if transfer.is_taken_over:
                self._plan_anew(transfer)

    def _plan_anew(self, transfer: Transfer) -> None:
        """Plans for peers that never got the plan, once the first holder that is left has offered again.

        As long as such a peer has no link to a peer that has the state or fetches it, its plan waits.
        """
        holders = self._operations.present(transfer.holders)
        winner = transfer.offers.get(holders[0]) if holders else None
        late: list[Peer] = []
        if winner is not None:
            late = self._late_fetchers(transfer)
            while planned := [peer for peer in late if self._plan_late(transfer, peer, holders, winner)]:
                late = [peer for peer in late if peer not in planned]
        if late and transfer.agreed_ns is None and self._registry.is_committed:  # Until then, links are reported.
            transfer.agreed_ns = self._outbox.now_ns
        transfer.agreed_ns = transfer.agreed_ns if late else None
        self._operations.decide(transfer)

    def _plan_late(self, transfer: Transfer, peer: Peer, holders: list[Peer], winner: SyncSpec) -> bool:
        """Sends a plan to a peer that never got it; False if it has no link to a peer that could supply it.

        Peers other than holders are named as partial seeds: partial seeds tell what they have, even if it is all.
        """
        offer = transfer.offers[peer]
        entries = entries_to_fetch(offer, winner, transfer.revision)
        if entries is None:
            reason = f"{peer.name} offers another state than before"
            transfer.failed = Verdict(Result.RANK_CONNECTION_LOST, reason, (peer,))
            return False
        own = free_contents(offer, ())
        others = [other for other in self._operations.present(transfer.fetch) if other not in holders]
        near = self._paths.sources(peer, [*holders, *others], self._outbox.now_ns)
        suppliers = [other for other in near if transfer.has(other, entries, own)]
        if near and not suppliers:  # Then it takes the contents of a peer that it reaches.
            held = {key: digest for key, digest in transfer.contents_of(near[0]).items() if key in own}
            entries = tuple(FetchEntry(entry.key, held.get(entry.key, entry.digest)) for entry in entries)
            entries = tuple(entry for entry in entries if entry.digest != own.get(entry.key))
            suppliers = [other for other in near if transfer.has(other, entries, own)]
        if entries and not suppliers:
            return False
        transfer.fetch[peer], transfer.free[peer] = entries, free_contents(offer, entries)
        transfer.sources[peer] = tuple(other for other in suppliers if other in holders)
        transfer.partial_seeds[peer] = tuple(other for other in suppliers if other not in holders)
        if not entries:
            transfer.done.add(peer)
        self._send_plan(transfer, peer)
        return True

    def _late_fetchers(self, transfer: Transfer) -> list[Peer]:
        """After a take-over: participants that have offered again and wait for their plan."""
        return [peer for peer in self._operations.present(transfer.offers) if peer not in transfer.fetch]

    def restore_last(self, group: int, revision: int, completed: frozenset[Peer]) -> None:
        """Sets the last committed sync of a group."""
        self.last_revision[group] = revision
        self._completed_last[group] = completed

    # --- Decisions --------------------------------------------------------------------------------------------------

    def on_report(self, transfer: Transfer, peer: Peer, report: Report) -> None:
        """A peer has fetched everything, or failed."""
        self._note_dropped(transfer, peer, report)
        if report.ok:
            transfer.done.add(peer)
            return self._operations.decide(transfer)
        fault = tuple(source for source in transfer.calls if source.peer_id == report.fault)
        dropped = {dropped.peer for dropped in report.dropped}
        for source in transfer.calls if fault else ():
            if (source in fault or source.peer_id in dropped) and source is not peer:
                cost_ns = cost_of(frozenset((peer, source)), transfer.begun_ns, self._outbox.now_ns)
                self._paths.blame(peer, source, cost_ns, 0, self._outbox.now_ns)
        reason = report.reason or "a transfer failed"
        reason = f"{peer.name}: {reason}" if peer in fault else reason
        transfer.failed = Verdict(Result.RANK_CONNECTION_LOST, reason, fault)
        return self._operations.decide(transfer)

    def _note_dropped(self, transfer: Transfer, peer: Peer, report: Report) -> None:
        """Logs the sources that a fetch has stopped using, once for each fetcher."""
        if peer in transfer.logged or not report.dropped:
            return
        transfer.logged.add(peer)
        self._outbox.counts.sources_dropped += len(report.dropped)
        for dropped in report.dropped[: limits.EXPLAINED_PEERS_MAX]:
            source = next((other.name for other in transfer.calls if other.peer_id == dropped.peer), "a stranger")
            self._outbox.log(
                Level.WARNING, f"group {transfer.group}: sync: {peer.name} continues without {source}: {dropped.reason}"
            )

    def on_members_changed(self, now_ns: int) -> None:
        """The member list has changed: syncs stop waiting for lost members."""
        empty = [group for group in self.last_revision if not self._registry.member_count(group)]
        for group in empty:
            self._completed_last.pop(group, None)
        for group in empty[: max(0, len(self.last_revision) - limits.PEERS_MAX)]:
            del self.last_revision[group]
        self.on_links_changed(now_ns)

    def judge(self, transfer: Transfer, survivors: list[Peer]) -> Verdict | None:
        """Commits if all survivors hold the elected state; aborts if one failed or cannot get it any more."""
        if transfer.failed is not None:
            return transfer.failed
        if all(peer in transfer.done for peer in survivors):
            return Verdict()
        if self._can_finish(transfer, survivors):
            return None
        lost = tuple(peer for peer in transfer.calls if peer not in survivors)
        return Verdict(Result.RANK_CONNECTION_LOST, f"lost {names(lost)}, and {NOBODY_LEFT}", lost)

    def value_of(self, transfer: Transfer) -> int:
        """The revision that all have after the sync."""
        return transfer.revision

    def on_ended(self, transfer: Transfer, verdict: Verdict, survivors: list[Peer]) -> None:
        """Updates the counts, remembers the last committed sync, and answers refused peers that waited for its plan."""
        del survivors
        self._outbox.counts.syncs_committed += verdict.is_commit
        self._outbox.counts.syncs_aborted += not verdict.is_commit
        if verdict.is_commit:
            self.restore_last(transfer.group, transfer.revision, frozenset(transfer.calls))
            near = {peer: sources + transfer.partial_seeds.get(peer, ()) for peer, sources in transfer.sources.items()}
            only = [(peer, of[0]) for peer, of in near.items() if len(of) == 1 and transfer.fetch[peer]]
            self._paths.trust(only, 0)  # All that it fetched came over this link.
        self._refuse_waiting(transfer)

    def _can_finish(self, transfer: Transfer, survivors: list[Peer]) -> bool:
        """True if every fetcher may still get everything, as far as this master knows.

        A disconnected fetcher does not count: it may be lost in a moment, with its sources, and is judged once it is
        back. Nor does a peer that is to be refused.
        """
        survivors = [peer for peer in survivors if peer not in transfer.refused]
        done = [peer for peer in survivors if peer in transfer.done or peer in transfer.holders]
        if not self._operations.present(transfer.holders) and any(peer not in transfer.fetch for peer in survivors):
            return False  # After a take-over without holders, peers that never got the plan cannot get one.

        def suppliers(peer: Peer) -> Iterable[Peer]:
            sources, partial = transfer.sources.get(peer, ()), transfer.partial_seeds.get(peer, ())
            if not sources and not partial:
                return done  # Its plan is from another master, or not sent yet.
            return itertools.chain(sources, partial)  # The first one often suffices, of 1,000 for each of 1,000.

        stuck = left_out([peer for peer in survivors if peer not in done], done, suppliers)
        return all(peer.connection is None for peer in stuck)

    def validate(self) -> None:
        """Asserts the invariants."""
        for transfer in self.transfers():
            assert set(transfer.fetch) <= set(transfer.calls)


def _spec_of(vote: Vote) -> SyncSpec:
    assert isinstance(vote.spec, SyncSpec)
    return vote.spec


def _ids(peers: Iterable[Peer]) -> tuple[bytes, ...]:
    return tuple(peer.peer_id for peer in peers)
