"""Small faults of the protocol. The tests must catch each of them: see mutate_protocol.py.

Add a mutant for a mistake that somebody could repeat, or for a rule of a machine that has no mutant yet. The fault
should be one that a person could make and overlook: a forgotten condition, a reversed comparison, a missing step.

A mutant is four lines; mutation.py describes them:

    name: module:function (the check that is expected to catch it: simulator or unit tests)
      the promise that it breaks, and how
      - the expression or statement to replace
      + its replacement
"""

from __future__ import annotations

from mutation import parse_mutants

MUTANTS = parse_mutants(
    r"""
# --- Collectives ------------------------------------------------------------------------------------------------------
commit-on-a-majority: protocol.kinds.collective:Collectives.judge (simulator)
  S1: commits an attempt that some survivors have not finished
  - all(peer in attempt.reports for peer in survivors)
  + 2 * len(attempt.reports) >= len(survivors)
digests-not-compared: protocol.kinds.collective:Collectives.judge (simulator)
  S1: commits results that differ
  - len(_digests_of(attempt.reports)) <= 1
  + attempt.reports
digests-of-the-lost-not-compared: protocol.kinds.collective:Collectives.judge (unit tests)
  S1: after a take-over, commits a result that differs from that of a lost peer which had finished
  - len(_digests_of(attempt.reports)) <= 1
  + len({attempt.reports[peer].digest for peer in survivors}) <= 1
frames-cut-anew-by-another-master: protocol.kinds.collective:Collectives.restore (unit tests)
  S3: peers that get the plan from the new master cut the tensor differently from the others
  - running.plan.how
  + Reducing(running.plan.how.order, limits.FRAME_BYTES_DEFAULT, running.plan.how.algorithm)
attempt-decided-before-all-are-heard: protocol.operation:Operations.decide (unit tests)
  L3: after a take-over, decides an attempt that the former master may have decided differently
  - have_reported(survivors)
  + have_reported(survivors[:1])
report-of-another-call-counts: protocol.operation:Operations._on_report (unit tests)
  S1: a report that belongs to another call of the peer counts
  - attempt is not None and attempt.calls.get(peer) == report.call_id
  + attempt is not None and peer in attempt.calls
lost-voter-waited-for: protocol.kinds.collective:Collectives.on_members_changed (simulator)
  L1: voters wait for the vote of a lost peer
  - self._operations.of(COLLECTIVE)
  + [each for each in self._operations.of(COLLECTIVE) if each.agreed_ns is not None]
differing-specs-planned: protocol.kinds.collective:Collectives._evaluate (unit tests)
  S1: peers reduce tensors of different sizes or types with each other
  - (difference := find_difference(specs)) is not None
  + (difference := find_difference(specs)) is not None and difference[0] == 'tag'
rows-for-the-lost-are-a-mismatch: protocol.kinds.collective:Collectives._evaluate (unit tests)
  L2: who made rows before it heard of a loss gets an error that a program does not take for a loss
  - (rows := max(spec.rows for spec in specs.values())) > len(votes)
  + (rows := 0) > len(votes)
unknown-kind-ends-the-master: protocol.kinds.collective:_no_plan (unit tests)
  L1: the master ends when one group calls a kind of collective that nobody knows, over links that allow no ring
  - name_of(CollectiveKind, spec.kind)
  + CollectiveKind(spec.kind).name
too-few-members-suffice: protocol.kinds.collective:Collectives._evaluate (unit tests)
  S2: a collective succeeds among fewer members than its callers need
  - (needed := max(spec.min_world_size for spec in specs.values())) > len(votes)
  + (needed := 0) > len(votes)
refused-though-links-have-changed: protocol.kinds.collective:Collectives._plan (unit tests)
  L2: a call is refused at once while the link that it needs is coming up
  - self._in_vain.get(group) == links
  + group in self._in_vain
two-roots: protocol.kinds.collective:find_difference (unit tests)
  S1: two peers are both root of a broadcast, and one gets the other's tensor
  - is_broadcast and sum(spec.is_root for spec in specs) != 1
  + is_broadcast and not any(spec.is_root for spec in specs)
broadcast-from-the-first-member: protocol.kinds.collective:_in_order (simulator)
  S1: a broadcast sends what the first member holds, whoever is its root
  - order[root:] + order[:root]
  + order[:]
all-to-all-in-order-of-admission: protocol.kinds.collective:_in_order (unit tests)
  S1: the rows of an all-to-all are not where its peers look for them
  - sorted(order, key=lambda peer: peer.peer_id)
  + list(order)
call-without-a-plan-waits-for-ever: protocol.kinds.collective:Collectives._plan (unit tests)
  L1: an all-to-all waits for ever where two members do not reach each other, and a broadcast where there is no ring
  - has_waited and not self._paths.surplus(members, now_ns)
  + False
refused-though-others-could-go-on: protocol.kinds.collective:Collectives._plan (unit tests)
  L2: the calls of all are refused, again and again, because one member is cut off
  - not self._paths.surplus(members, now_ns)
  + True
ring-where-there-is-none: protocol.kinds.collective:Collectives._how (unit tests)
  L2: a plan leads around a ring that the links do not allow
  - ring is not None
  + True
sync-without-a-way-waits-for-ever: protocol.kinds.sync:StateSyncs.tick (unit tests)
  L1: a sync waits for ever if whoever is between a fetcher and the holders was refused
  - not self._paths.surplus(self._registry.members(transfer.group), now_ns)
  + False
newcomer-needs-two-links: protocol.paths:Paths.can_join (unit tests)
  L2: a newcomer that reaches one member only is not admitted
  - any(self._registry.are_linked(joiner, other) for other in members)
  + sum(self._registry.are_linked(joiner, other) for other in members) >= min(2, len(members))
newcomer-needs-no-link: protocol.paths:Paths.can_join (unit tests)
  S6: a newcomer that reaches nobody is admitted, and the group cannot go on
  - any(self._registry.are_linked(joiner, other) for other in members)
  + True
members-without-a-ring-removed: protocol.paths:Paths.surplus (unit tests)
  L2: removes members of a small group that links connect, for want of a ring
  - limits.DIRECT_PEERS_MAX
  + 1
small-part-of-a-group-stays: protocol.paths:_largest_part (unit tests)
  L2: of a group in two parts the smaller one goes on
  - max(largest, part, key=len)
  + largest or part
down-links-in-trees: protocol.plans:Planner._route (unit tests)
  L2: trees use a link that has failed for so long that it counts as down
  - unused = down
  + unused = frozenset()
barrier-forgets-who-was-there: protocol.kinds.collective:Collectives._open_barrier (simulator)
  L3: a new master does not release participants that missed the decision of a barrier
  - Decision(call_id, Result.SUCCESS, len(members), attempt_id=attempt_id, order=order, calls=calls)
  + Decision(call_id, Result.SUCCESS, len(members), attempt_id=attempt_id)
late-fault-not-heard: protocol.kinds.collective:Collectives.on_late_report (unit tests)
  L2: a report that names the failed link is ignored if another peer reported the failure first
  - aborted is not None and aborted.calls.get(peer) == report.call_id and not report.ok
  + aborted is not None and aborted.calls.get(peer) == report.call_id and report.ok
both-ends-cost-twice: protocol.kinds.collective:Collectives._blame (unit tests)
  L2: a peer is removed for its link after half the allowed time
  - attempt.faults.add(edge)
  + attempt.faults.add(frozenset())
doubts-never-suffice: protocol.paths:Fault.is_suspect (unit tests)
  L2: attempts stall in the same ring again and again if no peer can name a link
  - return self.is_named or self.doubts >= limits.LINK_DOUBTS_MAX
  + return self.is_named or self.doubts < 0
one-stall-counts-for-many: protocol.paths:Paths.doubt (unit tests)
  L2: concurrent attempts that stall together count as several stalls of a ring
  - fault.seen_ns <= begun_ns
  + fault.seen_ns <= now_ns
answered-call-is-not-ahead: protocol.kinds.collective:Collectives.restore (unit tests)
  S1: a call that was answered runs again after a take-over, and gets a second answer
  - calls[peer] in peer.answers or self._operations.attempt_of(peer, calls[peer]) is not None
  + self._operations.attempt_of(peer, calls[peer]) is not None

# --- Operations -------------------------------------------------------------------------------------------------------
withdrawal-commits: protocol.operation:Operations._withdraw (simulator)
  S1: if a peer withdraws a running call the others are told that it succeeded
  - Verdict(Result.RANK_CONNECTION_LOST, f'{peer.name} withdrew from it', (peer,))
  + Verdict()
votes-compared-before-all-that-waits-is-taken: protocol.kinds.collective:Collectives.on_voted (unit tests)
  L1: calls that timed out while the master stood still are compared with the next ones of others, and refused
  - self._voted[operation.key] = None
  + self._evaluate(operation, operation.voted_ns)
votes-that-were-taken-count-again: protocol.operation:Operations.forget (unit tests)
  L3: after a take-over, a vote counts both in the attempt that it began and in the next one
  - self._remove(operation, peer)
  + pass
later-messages-overtake-kept-ones: protocol.operation:Operations.on_message (unit tests)
  S1: a report is dropped, or a vote taken for that of the call before, because what came earlier still waits
  - self._repeat(now_ns)
  + pass
decision-is-not-said-again: protocol.operation:Operations._on_report (simulator)
  L1: a peer that missed a decision because of a broken connection never gets it
  - self._outbox.send(peer, peer.answers[report.call_id])
  + pass
two-calls-of-a-peer-in-one-operation: protocol.operation:Operations._count (unit tests)
  S1: a second call of a peer in an operation is mistaken for the first, and never answered
  - known.call_id == vote.call_id
  + True
attempt-of-nobody-is-kept: protocol.operation:Operations.decide (unit tests)
  B1: attempts without remaining participants are kept for ever
  - not survivors
  + False
who-is-lost-is-told: protocol.operation:Operations.end (unit tests)
  S1: the decision that others get names calls of a lost peer
  - self.present(attempt.calls)
  + list(attempt.calls)
complete-without-the-last-vote: protocol.operation:Operations.is_complete (simulator)
  S1: an operation begins before all members have voted
  - len(operation.votes) >= needed
  + len(operation.votes) >= needed - 1
agreement-outlives-a-withdrawal: protocol.operation:Operations._remove (unit tests)
  L2: members are removed for missing links although no peer waits for a plan
  - operation.agreed_ns = None
  + pass
renumbered-attempt-found-by-its-old-number: protocol.operation:Operations.renumber (simulator)
  L1: reports on a sync that has waited for links are ignored
  - self.running[attempt.attempt_id] = attempt
  + self.running[attempt.attempt_id - 1] = attempt
exclusive-calls-side-by-side: protocol.operation:Operations._count (unit tests)
  L1: a peer waits in two calls that block each other
  - self._exclusive.get(peer)
  + None

# --- Topology ---------------------------------------------------------------------------------------------------------
ring-before-anything-is-known: protocol.routes:is_untried (unit tests)
  B1: the slowest path carries almost two tensors in the first call
  - not network.is_known and not are_rates_known
  + False
who-dials-a-late-peer-is-not-told: protocol.master:MasterMachine._introduce (unit tests)
  L2: of the two ends of a link to a late peer none dials
  - is_later = True
  + is_later = False
trees-for-all-reduces-only: protocol.routes:plan_trees_of (unit tests)
  L2: what has no ring is refused, though links connect all
  - limits.DIRECT_PEERS_MAX
  + 1
ring-not-closed: protocol.rings:ring_edges (unit tests)
  L2: a plan starts though the link from the last peer to the first is down
  - return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]
  + return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order) - 1)]

# --- Rounds -----------------------------------------------------------------------------------------------------------
round-number-not-advanced: protocol.kinds.topology:Rounds._take (simulator)
  L3: a vote for a round that is complete waits for ever after a take-over
  - self._registry.round += 1
  + self._registry.round += 0
vote-of-a-lost-member-counts: protocol.operation:Operations.forget_lost (unit tests)
  S3: a round is complete with the vote of a lost peer instead of a member's
  - [peer for peer in operation.votes if self._registry.peers.get(peer.peer_id) is not peer]
  + [peer for peer in operation.votes if not peer.is_member]
joiner-with-one-link-admitted: protocol.kinds.topology:Rounds._linked_joiners (simulator)
  S6: a joiner that cannot be reached becomes a member, and collectives fail
  - joiner.connection is not None and all(self._registry.are_linked(joiner, other) for other in others)
  + joiner.connection is not None and any(self._registry.are_linked(joiner, other) for other in others)
joiner-without-links-is-always-pending: protocol.kinds.topology:Rounds._joiners (unit tests)
  S6: one that never gets links, and comes again and again, leaves the members no time for a step
  - peer.unlinked_ns is None or now_ns - peer.unlinked_ns < self.wait_ns
  + True
joiners-waited-for-without-end: protocol.kinds.topology:Rounds._update (simulator)
  S6: a joiner that never gets its links blocks update_topology for ever
  - len(ready) < len(joiners) and not waited
  + len(ready) < len(joiners)
absent-joiner-admitted: protocol.kinds.topology:Rounds._linked_joiners (unit tests)
  S6: a joiner whose connection is broken becomes a member, and the others wait for it
  - joiner.connection is not None and all(self._registry.are_linked(joiner, other) for other in others)
  + all(self._registry.are_linked(joiner, other) for other in others)
conflict-across-groups-not-seen: protocol.operation:Operations._are_rivals (unit tests)
  L1: groups that wait in different topology calls wait for each other for ever
  - need_all or any(voter.group == peer.group for voter in other.votes)
  + any(voter.group == peer.group for voter in other.votes)
conflicts-refused-before-all-are-heard: protocol.operation:Operations._refuse_conflicts (unit tests)
  S1: refuses a call that succeeded at the former master, before all members have reported
  - self._registry.have_all_reported
  + self._registry.is_committed
deadlock-of-peers-that-run: protocol.stragglers:find_deadlocks (unit tests)
  L1: ends operations whose voters wait for an attempt that still runs
  - stuck = {peer for peer, count in vote_counts.items() if count == _calls_that_hold_up(peer)}
  + stuck = set(vote_counts)
slow-peer-taken-for-stuck: protocol.stragglers:find_deadlocks (unit tests)
  L1: ends operations that wait for a slow peer
  - [peer for peer in lacking if peer not in stuck]
  + [peer for peer in lacking if not stuck]
deadlock-ended-at-once: protocol.stragglers:Stragglers._end_deadlocks (unit tests)
  L1: ends calls that have waited for each other only for a moment
  - is_over = may_end and now_ns - deadlock.since_ns >= (timeout_ns or 0)
  + is_over = may_end and now_ns - began_ns >= (timeout_ns or 0)
deadlock-ended-before-all-are-heard: protocol.stragglers:Stragglers._end_deadlocks (unit tests)
  S1: ends calls that succeeded at the former master
  - may_end = timeout_ns is not None and self._registry.have_all_reported
  + may_end = timeout_ns is not None
deadlock-not-looked-for-after-an-answer: protocol.stragglers:Stragglers.settle (unit tests)
  L1: peers that wait for each other after another operation has ended are reported late
  - max(newest_ns, self._outbox.answered_ns) > self._newest_ns or self._registry.epoch != self._epoch
  + newest_ns > self._newest_ns or self._registry.epoch != self._epoch
deadlock-not-looked-for-after-a-loss: protocol.stragglers:Stragglers.settle (unit tests)
  L1: peers that wait for each other after the loss of a peer are reported late
  - max(newest_ns, self._outbox.answered_ns) > self._newest_ns or self._registry.epoch != self._epoch
  + max(newest_ns, self._outbox.answered_ns) > self._newest_ns

# --- Syncs ------------------------------------------------------------------------------------------------------------
sync-committed-before-all-have-it: protocol.kinds.sync:StateSyncs.judge (simulator)
  S5: a peer that still fetches is told that it holds the state
  - all(peer in transfer.done for peer in survivors)
  + any(peer in transfer.done for peer in survivors)
holder-that-dies-ends-a-sync: protocol.kinds.sync:StateSyncs.judge (simulator)
  L2: a sync fails although other holders have everything that is still to be fetched
  - self._can_finish(transfer, survivors)
  + len(self._operations.present(transfer.holders)) == len(transfer.holders)
sync-without-anybody-to-fetch-from-goes-on: protocol.kinds.sync:StateSyncs.judge (unit tests)
  L1: fetchers wait for each other although no complete holder is left
  - self._can_finish(transfer, survivors)
  + len(survivors) > 1
changed-state-of-a-holder-not-heeded: protocol.kinds.sync:StateSyncs.on_report (unit tests)
  S5: a peer whose contents are no longer the elected ones is told that it holds them
  - report.ok
  + report.ok or peer in transfer.done
plan-never-made-anew-for-want-of-the-first-holder: protocol.kinds.sync:StateSyncs._plan_anew (unit tests)
  L1: after a take-over, a peer that missed its plan waits for ever if the first holder is lost
  - winner = transfer.offers.get(holders[0]) if holders else None
  + winner = transfer.offers.get(transfer.holders[0]) if holders else None
late-plan-without-a-link: protocol.kinds.sync:StateSyncs._plan_late (unit tests)
  S6: after a take-over, a peer that missed its plan is told to fetch from whom it cannot reach
  - entries and not suppliers
  + False
late-plan-with-other-contents: protocol.kinds.sync:Transfer.has (unit tests)
  S5: after a take-over, a peer requests contents from one that will have other ones
  - is_unknown or all(held.get(entry.key) == entry.digest for entry in entries if entry.key in free_keys)
  + True
late-plan-waits-for-ever: protocol.kinds.sync:StateSyncs._plan_anew (unit tests)
  L1: after a take-over, a sync waits for ever for a peer without a plan and a link
  - late and transfer.agreed_ns is None and self._registry.is_committed
  + False
partial-seeds-with-other-contents: protocol.sources:_FreeKeys.have_same (unit tests)
  L2: peers request contents from peers that will have other ones
  - self._has(other, peer, fetch[peer], fetch)
  + len(fetch[other]) == len(fetch[peer])
partial-seed-taken-for-a-source: protocol.sources:find_sources (unit tests)
  L2: a peer waits for a partial seed as if it were complete
  - tuple(source for source in same if not found.fetch[source])
  + tuple(same)
revision-of-a-sync-not-noted: protocol.kinds.sync:StateSyncs.restore_last (unit tests)
  S5: a peer that is ahead of the run wins the next election
  - self.last_revision[group] = revision
  + self.last_revision.setdefault(group, revision)
answered-sync-offer-counts-again: protocol.kinds.sync:StateSyncs.restore (unit tests)
  L3: an offer of a sync that was taken over counts in the next sync as well
  - self._operations.forget(peer, call_id)
  + self._operations.forget(peer, -1)
participants-of-the-last-sync-not-updated: protocol.kinds.sync:StateSyncs.restore_last (unit tests)
  S5: after a take-over the participants of an earlier sync have the vote
  - self._completed_last[group] = completed
  + self._completed_last.setdefault(group, completed)

# --- Election ---------------------------------------------------------------------------------------------------------
first-contents-win: protocol.election:elect (unit tests)
  S5: the wrong contents of one peer overwrite those of the majority
  - winner = max(voters, key=lambda peer: len(camps[_contents(standing[peer])]))
  + winner = voters[0]
holders-lack-what-is-fetched: protocol.election:elect (simulator)
  L2: contents are requested from a peer that does not have them, and the sync fails repeatedly
  - _contents(standing[peer]) == _contents(elected) and fetched <= _holdings(standing[peer])
  + _contents(standing[peer]) == _contents(elected)
unequal-tensors-overwritten: protocol.election:_entries_to_fetch (unit tests)
  S5: contents that may differ are replaced by another peer's
  - own.digest != theirs.digest and (is_behind or not own.allow_content_inequality)
  + own.digest != theirs.digest
kind-of-digests-not-compared: protocol.election:_shape (unit tests)
  S5: digests of two kinds are compared, so equal contents are fetched, or other ones than elected
  - return Shape(offer.digest_kind, tensors)
  + return Shape(0, tensors)
next-revision-not-expected: protocol.election:choose_revision (unit tests)
  S5: a peer that has missed a sync resets the others to its revision
  - expected = last_revision + 1
  + expected = last_revision
joiner-sets-members-back: protocol.election:choose_revision (unit tests)
  S5: a joiner that holds the next revision after the last sync refuses all members, which are further
  - expected in (continued if ahead else offered.values())
  + expected in offered.values()
admitted-before-it-is-ready: protocol.membership:Registry.joiners (simulator)
  S6: a joiner that still prefetches is admitted, and members wait for it in the next sync
  - self.whole_hosts(peer for peer in self._pending.values() if peer.phase is PeerPhase.READY)
  + self.whole_hosts(self._pending.values())
half-a-host-admitted: protocol.membership:Registry.whole_hosts (simulator)
  L1: a host is admitted before all its peers are there, and they wait for each other without end
  - counts[peer.host] == peer.host_size
  + counts[peer.host]
host-admitted-beside-its-members: protocol.membership:Registry.whole_hosts (unit tests)
  L1: processes that were started again are admitted while the master still lists those that died, and removed with them
  - peer.host not in taken
  + True
missing-peers-of-a-host-untold: protocol.membership:Registry.host_missing (unit tests)
  L1: a peer whose host has lost another one before this master was started waits to be admitted without end
  - peer.host_size - len(here)
  + 0
absent-peer-asked-that-is-no-member: protocol.master:MasterMachine._has_gone_over (unit tests)
  L2: a returning peer that the adopted list names is told that its token is wrong, or waits without end
  - hello.run_id != self.run_id or hello.leader == NO_ID
  + False
unaware-member-admitted-anew: protocol.master:MasterMachine._has_heard_nothing (unit tests)
  L3: members are removed since one of their host has heard nothing of its admission, as its master died
  - is_new(hello)
  + False
waiting-member-admitted-anew: protocol.master:MasterMachine._has_heard_nothing (unit tests)
  L3: members are removed since one of their host waits in a run that newcomers have begun
  - hello.run_id not in (NO_ID, self.run_id)
  + False
registered-member-admitted-anew: protocol.master:MasterMachine._has_heard_nothing (unit tests)
  S6: a whole member is told that it was removed, as it registered before a report told of its admission
  - hello.run_id == self.run_id and hello.term == self.term and self._has_our_promise(hello)
  + False
forgotten-promise-counts: protocol.master:MasterMachine._has_heard_nothing (unit tests)
  S3: one of several masters counts a peer that had promised another one, before another run registered it
  - not self._leader.needs_quorum
  + True
returning-peer-comes-back-at-once: protocol.master:MasterMachine._has_heard_nothing (unit tests)
  L1: a list answers the round of a returning peer in which the others of its run wait for it
  - hello.is_member or hello.is_returning
  + hello.is_member
forgotten-member-is-led-again: protocol.master:MasterMachine._has_gone_over (unit tests)
  S3: a master counts a member that another one has led since, until its run yielded, and that has forgotten that
  - has_forgotten and known.is_member and self._leader.needs_quorum
  + False
forgotten-promise-of-a-newcomer-counts: protocol.master:MasterMachine._has_gone_over (unit tests)
  S3: the same of one that has not heard of its admission, whose promise another candidate has counted since
  - is_back and not self._has_our_promise(hello)
  + is_back and hello.is_returning and not self._has_our_promise(hello)
forgotten-promise-counts-in-its-run: protocol.master:MasterMachine._has_gone_over (unit tests)
  S3: a member comes back that a former master of its run has registered, after a later one had led it
  - is_back and not self._has_our_promise(hello)
  + is_back and (hello.run_id != self.run_id or hello.leader == NO_ID)
unaware-member-of-the-leader-removed: protocol.master:MasterMachine._has_gone_over (unit tests)
  L3: a newcomer that has missed its Welcome and its admission is removed as it comes back
  - hello.run_id != NO_ID and connection != known.connection
  + connection != known.connection
only-master-removes-a-returning-member: protocol.master:MasterMachine._has_gone_over (unit tests)
  S6: the only master removes a returning peer that has missed its Welcome, though nobody else may have led it
  - has_forgotten and known.is_member and self._leader.needs_quorum
  + has_forgotten and known.is_member
hello-from-before-the-welcome-removes: protocol.master:MasterMachine._has_gone_over (unit tests)
  L3: a Hello of a returning peer that was on its way when it was admitted removes it
  - hello.run_id != NO_ID and connection != known.connection
  + hello.run_id != NO_ID
asked-for-a-report-again: protocol.master:MasterMachine._expect_report (unit tests)
  B1: asks a peer that promises nothing at each of its Hellos, which are its answers
  - connection in self._asked
  + False
half-a-host-stays: protocol.master:MasterMachine._send_on (unit tests)
  L1: of a new host each peer waits at another master, in another run, for the others
  - now_ns - apart_ns >= limits.HOST_WAIT_NS
  + False
half-a-host-leaves-the-first-master: protocol.master:MasterMachine._register (unit tests)
  L1: peers of a host go on from each master to the next, and miss each other again and again
  - hello.host and hello.master_index
  + hello.host
rest-of-a-host-stays: protocol.membership:Registry.members_of_broken_hosts (simulator)
  L1: members stay whose host has lost another one, and wait for it without end
  - counts[peer.host] < peer.host_size
  + False
host-broken-by-who-has-not-reported: protocol.membership:Registry.members_of_broken_hosts (unit tests)
  L3: a new master removes members, as it does not know yet that others are of the same host
  - not self.have_all_reported
  + False
rest-of-a-pending-host-stays: protocol.membership:Registry.pending_of_broken_hosts (unit tests)
  L1: a pending peer waits for its admission without end, as its host cannot be whole any more
  - peer.is_left_over
  + False
end-of-a-run-is-committed: protocol.master:MasterMachine._remove_broken_hosts (unit tests)
  S3: what was decided under a list without members is lost, since reports say nothing of it
  - self._leader.needs_quorum and len(members) == len(registry.order)
  + False
acknowledged-list-forgotten: protocol.peer:PeerMachine._run_report (unit tests)
  S3: a pending peer that has acknowledged a list without it helps to elect a leader that does not know that list
  - self.members if self.epoch else ()
  + self.members if self.state is State.MEMBER else ()
list-changed-by-an-early-report: protocol.master:MasterMachine._on_report (unit tests)
  S3: who was asked by the candidate, and reports to the leader, changes the list before its repeat is committed
  - may_join and not self._leader.may_change
  + may_join and not self._leader.may_change and event.connection in self._asked
promise-lowered-by-a-welcome: protocol.leadership:Acceptor.may_be_registered (unit tests)
  S3: a pending peer obeys a leader that comes before the one it has promised
  - leader == self.promised or leader.term > self.promised.term
  + True
promise-kept-without-a-run: protocol.peer:PeerMachine._on_yielded (unit tests)
  L1: a peer that was refused for good is bound to a later candidate, and its run does not register it again
  - self._acceptor.release()
  + pass
later-promise-registered: protocol.master:MasterMachine._is_ahead (unit tests)
  S3: registers a pending peer that has promised a later leadership
  - is_known or has_promised
  + is_known
joiner-makes-the-one-master-step-down: protocol.master:MasterMachine._is_ahead (unit tests)
  S6: a joiner that says that it has promised more stops the run, again and again
  - known.is_member or needs_quorum
  + True
void-list-announced-again: protocol.stragglers:Stragglers._end_deadlocks (unit tests)
  L1: calls that wait for each other never end where those that are waited for are near the master
  - key in self._awaited
  + False
removal-forgotten-for-a-loss: protocol.master:MasterMachine._kick (unit tests)
  S7: a member whose key was revoked stays, since a loss was put off before its removal
  - self._removals.setdefault(peer.peer_id, lambda then_ns: self._kick(peer, result, reason, then_ns))
  + self._deferred.setdefault(peer.peer_id, lambda then_ns: self._kick(peer, result, reason, then_ns))
removed-by-a-master-that-leads-no-more: protocol.master:MasterMachine._kick (unit tests)
  S3: of two peers that are removed at once, the second one is told to go though its master has stepped down
  - self.registry.peers.get(peer.peer_id) is not peer
  + False
revoked-key-counts-after-a-take-over: protocol.master:MasterMachine._adopt (unit tests)
  L1: a member whose key was revoked during a take-over stays, and all wait for its votes
  - peer_id in self.registry.peers
  + False
revoked-newcomer-held: protocol.leadership:Candidate.revoke (unit tests)
  S7: a newcomer whose key was revoked while it was held is admitted
  - self.on_connection_closed(held.event.connection)
  + pass
revocation-kept-for-later: protocol.leadership:Candidate.revoked (unit tests)
  L3: a master that takes a run over removes a member whose key was revoked once and is allowed again
  - peer_id in self.reports
  + True
late-report-of-a-revoked-key: protocol.master:MasterMachine._on_keys_revoked (unit tests)
  S7: a newcomer whose key was revoked before its late report counted is admitted
  - del self._deferred[peer_id]
  + pass
held-promise-not-heeded: protocol.master:MasterMachine._on_early_hello (unit tests)
  L1: a candidate that holds a pending peer with a later promise leads, and steps down for it at once, again and again
  - self._raise_above(candidate, hello)
  + pass
newcomer-says-that-there-are-several-masters: protocol.leadership:Candidate.may_count (unit tests)
  S6: a newcomer voids all reports of a run with one address, again and again
  - self._have_members_reported() and self._has_one_address(self.chosen)
  + False
pending-half-of-a-host-left-out: protocol.master:MasterMachine._admit_former (unit tests)
  L1: a half of a host is admitted without the other one, which did not hear of the list that admitted both
  - [*absent, *pending]
  + [*absent, *pending[-1:]]
lost-report-not-asked-for-again: protocol.master:MasterMachine._owes_report (unit tests)
  L3: a newcomer whose report got lost with its connection is refused
  - has_promised or hello.promised < self.term
  + hello.promised < self.term
parts-of-hosts-in-step: protocol.master:MasterMachine._apart_ns (unit tests)
  L1: parts of a host go from master to master at the same time, and never meet
  - int.from_bytes(hello.peer_id[:4], "big") % limits.HOST_WAIT_NS
  + 0
sync-begun-under-a-proposed-list: protocol.kinds.sync:StateSyncs.on_links_changed (unit tests)
  S3: plans a sync while the member list is not committed
  - self._registry.is_committed
  + True
sent-on-host-given-up: protocol.membership:Registry.remove (unit tests)
  L3: removes peers of a host whose others were sent on to the next master
  - peer.is_left_over or is_sent_on
  + peer.is_left_over
left-over-peers-mark-others: protocol.membership:Registry.remove (unit tests)
  L3: removes a new process of a host in place of the one that is gone
  - peer.is_left_over or is_sent_on
  + is_sent_on
lost-though-it-is-back: protocol.master:MasterMachine._lose (unit tests)
  L1: a member whose loss was put off is removed although it is connected, and hears nothing
  - peer.disconnected_ns == now_ns
  + True
other-run-not-asked-again: protocol.master:MasterMachine._step_down (unit tests)
  L1: who has reported to a leader that might yield hears nothing when it steps down
  - self.candidate.connections() if self.candidate is not None else []
  + []
waiting-report-forgotten: protocol.master:MasterMachine._step_down (unit tests)
  L1: a newcomer whose report waits for others hears nothing when the master steps down
  - pending += self._asked
  + pending += []
waiting-report-forgotten-with-its-run: protocol.master:MasterMachine._settle (unit tests)
  L1: a newcomer whose report waits for others hears nothing when its run yields
  - self._deferred and not self._leader.needs_quorum
  + self._deferred and not self._leader.needs_quorum and not isinstance(self._phase, Yielding)
yielding-forgotten: protocol.master:MasterMachine._has_yielded (unit tests)
  L2: a member that was away when its run yielded looks for a master that leads this run for ever
  - Promise.of(hello) == self._yielded
  + False
yields-without-all-reports: protocol.master:MasterMachine._settle_yielding (unit tests)
  S1: yields though a member that is still to report may have returned from a call
  - earlier.is_over(now_ns) and self.registry.have_all_reported
  + earlier.is_over(now_ns)
removed-member-listed-again: protocol.master:MasterMachine._accept_report (unit tests)
  S3: a member that was refused for good is listed again with a host that reports late
  - member not in known
  + True
sent-to-nobody: protocol.membership:Outbox.reply (unit tests)
  L3: answers a report whose sender is gone, which ends the process of the master
  - connection is not None
  + True
calls-told-before-the-welcome: protocol.peer:PeerMachine._send (unit tests)
  S1: a new leader drops the vote for a call that was committed between peers, and takes the next one for it
  - awaits_welcome and isinstance(message, (Votes, Report, Withdraw))
  + False
returning-peer-does-not-acknowledge: protocol.peer:PeerMachine._on_members (unit tests)
  L2: an old member that a later run has registered never acknowledges the list without it
  - self._send(Acknowledgement(message.epoch))
  + self.state is State.RETURNING or self._send(Acknowledgement(message.epoch))
others-that-were-admitted-forgotten: protocol.master:MasterMachine._accept_report (unit tests)
  L3: members that the former master had just admitted are removed, since others report before them that know of that
  - member not in known
  + member.peer_id == hello.peer_id
late-member-not-back: protocol.master:MasterMachine._accept_report (unit tests)
  L3: a late member that knows a later list is registered as a newcomer, and refused with its next call
  - member.peer_id != hello.peer_id
  + True
ready-not-said-after-the-welcome: protocol.peer:PeerMachine._on_welcome (simulator)
  L1: a joiner that became ready between its Hello and its Welcome is never admitted
  - self._send_ready()
  + self._send_linked()
returns-ready-at-once: protocol.peer:PeerMachine._on_yielded (unit tests)
  L3: a peer whose run has yielded is admitted between two of its calls, and makes another one than the members
  - self._is_ready = any(is_update(call) and not call.has_answer for call in self.calls.values())
  + self._is_ready = True
late-admission-is-told-after-its-round: protocol.master:MasterMachine._on_report (unit tests)
  L3: who waits for an admission hears that it is done, and goes on as one who is alone
  - self._outbox.broadcast(others, self.registry.member_list())
  + self._outbox.broadcast(others[:0], self.registry.member_list())
ready-forgotten-with-its-connection: protocol.master:MasterMachine._on_hello (unit tests)
  L2: a joiner that became ready while its connection was broken is never admitted
  - known.on_ready()
  + known.witnesses.clear()

# --- Members ----------------------------------------------------------------------------------------------------------
epoch-not-raised-at-a-loss: protocol.membership:Registry.remove (simulator)
  S3: two member lists have the same epoch
  - self.epoch += 1
  + self.epoch += 0
link-counted-by-one-end: protocol.membership:Registry.are_linked (unit tests)
  S6: a link that only one end has reported counts as up
  - return bool(one.linked >> other.slot & other.linked >> one.slot & 1)
  + return bool(one.linked >> other.slot & 1)
slot-passed-on-with-its-links: protocol.membership:Registry.remove (simulator)
  S6: a joiner inherits the links of a lost peer
  - other.linked &= ~(1 << peer.slot)
  + other.linked &= ~(1 << peer.slot) if peer.is_member else other.linked
lost-connection-still-known: protocol.membership:Registry.bind (simulator)
  S3: messages on a replaced connection count, and its end removes the peer
  - self.by_connection.pop(peer.connection, None)
  + self.by_connection.get(peer.connection)
answers-kept-for-one-call: protocol.membership:Outbox.answer (simulator)
  S1: a lost decision cannot be sent again
  - len(peer.answers) > limits.ANSWERS_KEPT_MAX
  + len(peer.answers) > 1
link-key-depends-on-the-asker: protocol.membership:Registry._link_key (unit tests)
  S7: the two ends of a link have different keys and refuse each other
  - pair = b"".join(sorted((one.peer_id, other.peer_id)))
  + pair = b"".join((one.peer_id, other.peer_id))
joiners-before-calls-that-are-over: protocol.operation:Operations._evaluate (unit tests)
  L1: a joiner is admitted between calls that are over, and the later ones wait for its vote
  - self._again
  + not self.kinds
decision-again-with-plans-ahead: protocol.operation:Operations.end (unit tests)
  S1: a decision that is sent again brings plans for fewer members than there are by now
  - replace(whole, call_id=call_id, ahead=())
  + replace(whole, call_id=call_id)
call-that-is-over-stays-open: protocol.takeover:TakeOver._settle (unit tests)
  L1: after a take-over a peer counts as busy in a call that it knows to be over, and is never a straggler
  - peer.open_calls.pop(call_id, None)
  + pass
bound-call-let-go-at-once: protocol.operation:Operations._may_commit (unit tests)
  S1: a call is let go that was told, while a member has started the same attempt and its vote is on the way
  - not any(member.acknowledged >= operation.void_epoch for member in missing)
  + not missing
bound-call-never-let-go: protocol.operation:Operations._may_commit (unit tests)
  L1: the timeout of a call ends nothing, once it was told and another peer had given the attempt up
  - not any(member.acknowledged >= operation.void_epoch for member in missing)
  + True
digest-that-was-heard-not-compared: protocol.kinds.collective:_digests_of (unit tests)
  S1: a survivor keeps its result though the peer that died before its report had told another digest
  - {report.digest for report in reports.values()} | told
  + {report.digest for report in reports.values()}
refusal-in-a-sync-told-to-nobody-else: protocol.operation:Operations.refuse_calls (unit tests)
  L1: a master that dies has refused one member of a sync, the others go on; at the next one it waits for ever
  - self._outbox.broadcast(others, refusal)
  + pass
refusal-named-to-nobody: protocol.operation:Operations.refuse_calls (unit tests)
  L1: a master that dies between two sends has refused one caller; the other one waits for ever
  - len(calls) > 1
  + not calls

# --- Master -----------------------------------------------------------------------------------------------------------
token-not-checked: protocol.master:MasterMachine._on_hello (unit tests)
  S7: a stranger that knows a peer's id can take over its connection
  - is_itself = known is not None and known.has_reported and known.token == hello.token
  + is_itself = known is not None and known.has_reported
stale-connection-accepted: protocol.master:MasterMachine._on_hello (unit tests)
  L2: an old Hello that arrives late replaces a peer's newer connection
  - known is not None and is_itself and hello.connection < known.connection_count
  + known is not None and is_itself and hello.connection < 0
answer-forgotten-one-call-early: protocol.operation:Operations._forget_answers (unit tests)
  S1: a call whose answer was lost is repeated by one peer alone
  - [call_id for call_id in peer.answers if call_id < oldest_call_id]
  + [call_id for call_id in peer.answers if call_id <= oldest_call_id]
withdrawal-before-all-are-heard: protocol.operation:Operations._is_known (unit tests)
  L3: a call is withdrawn that the former master has committed
  - self._registry.is_committed and have_reported(members)
  + have_reported(members[:0])
absent-members-taken-for-heard: protocol.master:MasterMachine._admit_former (unit tests)
  L3: members that are still looking for the new master are removed as if they had died
  - peer.phase, peer.disconnected_ns = PeerPhase.ABSENT, now_ns
  + peer.phase, peer.disconnected_ns = PeerPhase.FOLLOWING, now_ns
epoch-of-the-dead-master-used-again: protocol.master:MasterMachine._restore (simulator)
  S3: an epoch that the former master announced to some peers gets another member list
  - self.registry.epoch = self.term << limits.EPOCH_BITS
  + self.registry.epoch = history.adopted.epoch + 1
term-not-raised: protocol.master:MasterMachine._term_after (simulator)
  S3: two masters use the same attempt ids, and peers obey both
  - return min(term + 1 + salt, limits.TERM_MAX)
  + return min(term, limits.TERM_MAX)
attempt-ids-begin-anew: protocol.master:MasterMachine._next_attempt_id (simulator)
  S4: attempt ids repeat after a take-over, and stale frames are accepted
  - return (self.term << limits.EPOCH_BITS) + self._attempt_count
  + return self._attempt_count
key-of-a-report-not-checked: protocol.master:MasterMachine._is_of_its_key (unit tests)
  S7: a peer with its own key reports for another peer, and takes its place at a new master
  - isinstance(event.message, (Hello, RunReport))
  + isinstance(event.message, Hello)
calls-in-flight-without-bound: protocol.operation:Operations._is_open (unit tests)
  B1: one peer can make the master keep calls without limit
  - call_id not in peer.open_calls and len(peer.open_calls) >= calls_max
  + call_id in peer.open_calls and len(peer.open_calls) >= calls_max
witness-of-no-link-believed: protocol.master:MasterMachine._on_linked (unit tests)
  L1: the loss of a member that has lost all its connections is noticed late
  - not is_witness or not other.linked >> peer.slot & 1
  + not is_witness or not peer.linked >> peer.slot & 1
calls-of-any-group-alike: protocol.operation:Operations._is_open (unit tests)
  L3: a member has more calls in flight than the decisions that the others remember
  - calls_max = limits.calls_open_max(member_count)
  + calls_max = limits.calls_open_max(1)

# --- Peer -------------------------------------------------------------------------------------------------------------
own-master-not-obeyed-again: protocol.leadership:Acceptor.obey (unit tests)
  L2: a peer that has reconnected treats its master as lost
  - self.is_led = leader == self.promised
  + self.is_led = leader.term > self.promised.term
replaced-master-obeyed: protocol.peer:PeerMachine._on_welcome (unit tests)
  S3: a peer obeys a master that was replaced, or that leads another run
  - is_other_run or not self._acceptor.obey(leader)
  + is_other_run and not self._acceptor.obey(leader)
older-member-list-taken: protocol.leadership:Acceptor.accepts (unit tests)
  S3: a peer accepts an older member list
  - return self.is_led and epoch >> limits.EPOCH_BITS == self.promised.term and epoch >= accepted_epoch
  + return self.is_led and epoch >> limits.EPOCH_BITS == self.promised.term and epoch >= 0
plan-sent-again-ends-its-attempt: protocol.peer:PeerMachine._on_plan (unit tests)
  L1: a plan that is sent again ends the attempt that runs, whose end is never reported
  - self._call_of_attempt(plan.attempt_id) is not None
  + False
commit-without-the-result: protocol.peer:PeerMachine._on_decision (unit tests)
  S1: a peer without the result takes part in a commit
  - lacks_result = is_collective(call) and not (call.report is not None and call.report.ok)
  + lacks_result = is_collective(call) and call.report is None
plan-begun-after-the-release: protocol.peer:PeerMachine._on_plan (unit tests)
  S2: a reduction writes to buffers that were given back to the user
  - call is None or call.is_released
  + call is None
member-without-the-result: protocol.peer:PeerMachine._on_decision (unit tests)
  S1: a peer that gave up a call which the others have committed stays a member
  - decision.committed and (call.is_released or (lacks_result and not is_barrier(call)))
  + decision.committed and lacks_result and not is_barrier(call)
tag-told-twice: protocol.peer:PeerMachine._free (unit tests)
  L2: the master mistakes a new call for a released one, and refuses it
  - released.block(call)
  + False
withdrawal-not-repeated: protocol.calls:Call.standing (unit tests)
  L1: a lost withdrawal is not sent again, and the call keeps waiting
  - withdraw is None
  + withdraw is None or self.report is None
newest-call-named-as-oldest: protocol.peer:PeerMachine._oldest_call_id (simulator)
  S1: the master forgets answers that the peer has not received
  - return min(self.calls, default=self._next_call_id)
  + return max(self.calls, default=self._next_call_id)
broken-link-not-dialled-again: protocol.peer:PeerMachine._on_link (simulator)
  L2: a link that broke stays down
  - link.retry_ns = now_ns + (0 if link.is_up else pause_ns)
  + link.retry_ns = None if link.is_up else now_ns + pause_ns
absence-of-the-master-counted-anew: protocol.peer:PeerMachine._miss_master (unit tests)
  L1: a peer waits for ever for a master that breaks every connection
  - self._deadline_ns is None
  + self.state is not State.CONNECTING
calls-counted-without-the-group: protocol.peer:PeerMachine._calls_max (unit tests)
  L3: the report of a peer in a large run does not fit into a message
  - return limits.calls_in_flight_max(len(self.group_members()))
  + return limits.CALLS_IN_FLIGHT_MAX

# --- Memory -----------------------------------------------------------------------------------------------------------
round-of-an-answer-not-remembered: protocol.peer:PeerMachine._on_decision (simulator)
  L3: a new master does not know a round whose answer some peers have, and others wait for ever
  - self._memory.on_round(decision.round, decision.value)
  + self._memory.on_round(decision.round - 1, decision.value)
call-again-for-the-next-round: protocol.peer:PeerMachine._after_last_round (unit tests)
  L1: who makes a call again that it gave up waits for others that have its answer
  - self._made_again(spec)
  + None
other-call-for-the-round-of-one-given-up: protocol.peer:PeerMachine._made_again (unit tests)
  L1: a call gets the answer of another one that was given up, and others wait for it
  - known.kind == spec.kind
  + True
call-given-up-in-another-run: protocol.peer:PeerMachine._register (unit tests)
  L1: a call gets the answer of a round of this run, since the peer gave one up in the run before
  - self._has_yielded, self._given_up = False, None
  + self._has_yielded = False
admission-not-the-answer-of-an-update: protocol.peer:PeerMachine._on_members (unit tests)
  L2: who returns and gives update_topology() up is admitted, makes it again, and waits for those who wait for its sync
  - not self.calls
  + False
withdrawn-update-answered-twice: protocol.peer:PeerMachine._answer_alone (unit tests)
  S1: the admission of a peer answers a call that was given up before, and those behind it
  - is_update(call) and call.withdrawn is None
  + is_update(call) and not call.is_released
given-up-call-never-over: protocol.peer:PeerMachine._on_call (unit tests)
  L1: a call gets the answer of one that was given up long ago
  - self._given_up = self._made_again(calls[0].spec)
  + pass
call-made-again-forgotten: protocol.peer:PeerMachine._on_call (unit tests)
  L1: who makes a call again and then a collective, before the master answers, waits for others that have its answer
  - any(self._made_again(call.spec) and not call.has_answer for call in self.calls.values())
  + False
outcome-with-fewer-participants-kept: protocol.memory:Memory._keep (unit tests)
  L3: a new master does not know all participants of a decision
  - outcome = known if len(known.calls) >= len(outcome.calls) else outcome
  + outcome = known if len(known.calls) < len(outcome.calls) else outcome
failed-sync-remembered-as-the-last: protocol.memory:Memory.on_decision (unit tests)
  S5: after a take-over the revision of a failed sync counts
  - call is not None and is_sync(call) and outcome.committed and is_newer
  + call is not None and is_sync(call) and is_newer
mismatch-remembered-without-its-values: protocol.memory:Memory.on_decision (unit tests)
  S1: after a take-over one peer gets CollectiveMismatch and another only InvalidUsage
  - replace(told, call_id=0, reason=reason, order=order, calls=calls, peers=())
  + replace(told, call_id=0, reason=reason, order=order, calls=calls, peers=(), field='', values=())
fewer-ends-remembered-than-calls-in-flight: protocol.memory:Memory._keep (unit tests)
  S1: a commit is forgotten that another member has not received
  - count_max = limits.calls_open_max(len(self._group_ids)) + limits.PARTIAL_REFUSALS_KEPT_MAX
  + count_max = limits.calls_open_max(2 * len(self._group_ids)) + limits.PARTIAL_REFUSALS_KEPT_MAX
other-groups-count: protocol.memory:Memory.on_members (unit tests)
  S1: a commit is forgotten that another member has not received, in a run with many groups
  - self._group_ids = frozenset(member.peer_id for member in members if member.group == group)
  + self._group_ids = frozenset(member.peer_id for member in members)
gone-by-a-list-that-is-not-committed: protocol.memory:Memory.on_members (unit tests)
  S1: a decision is not sent to a member that only a proposed list has dropped
  - not is_committed
  + not members

# --- Recovery ---------------------------------------------------------------------------------------------------------
older-member-list-adopted: protocol.leadership:descend (unit tests)
  S3: a new master adopts the member list of the first report
  - return max(descendants, key=lambda each: (each.epoch, each.is_committed))
  + return max(descendants, key=lambda each: (-each.epoch, each.is_committed))
decided-attempt-restored: protocol.recovery:History.take_running (simulator)
  L3: a decided attempt runs again and blocks its tag
  - item[0] in present and item[1].plan.attempt_id not in self.outcomes
  + item[0] in present
report-of-another-token-taken: protocol.leadership:Candidate.add (unit tests)
  S7: a stranger's report replaces that of the peer whose id it claims
  - known.token != report.hello.token
  + known.token != known.token
older-report-taken: protocol.leadership:Candidate.add (unit tests)
  L3: a report on a broken connection counts instead of the peer's newer one
  - known.connection > report.hello.connection
  + known.connection < report.hello.connection
run-of-fewer-peers-chosen: protocol.leadership:choose_run (unit tests)
  S3: a single stray peer of another run decides which run a new master leads
  - sum(report.hello.peer_id in members for report in of_run), max(r.epoch for r in of_run), run_id
  + max(r.epoch for r in of_run), sum(report.hello.peer_id in members for report in of_run), run_id
newcomers-outvote-the-last-member: protocol.leadership:Candidate.chosen (unit tests)
  L3: the last member of a run is refused in favour of newcomers that have decided nothing
  - self._has_quorum(run_id) and self._has_one_address(run_id)
  + False
one-of-many-members-outvotes-newcomers: protocol.leadership:Candidate.chosen (unit tests)
  L1: newcomers wait for the members of a run of which only a minority is there
  - self._has_quorum(run_id) and self._has_one_address(run_id)
  + self._has_one_address(run_id)
admission-without-the-adopted-members: protocol.recovery:History.would_admit (unit tests)
  S3: a peer of a list that left members out becomes a member beside them
  - not keeps_all or self.adopted.members <= theirs
  + True
pending-peer-taken-for-a-member: protocol.recovery:History.would_admit (unit tests)
  S3: a peer that has acknowledged a list without it becomes a member
  - report.hello.peer_id in theirs
  + bool(theirs)
late-reports-not-waited-for: protocol.leadership:Candidate._are_all_here (unit tests)
  L3: a new master begins although a peer that has said Hello may know a newer list
  - not all(self._greeted.values())
  + not any(self._greeted.values())
facts-of-removed-members-count: protocol.master:MasterMachine._restore (unit tests)
  S1: an outcome that only a member knows that was removed is told to one of those who went on without it
  - peer is not None and peer.is_member
  + True
facts-of-who-comes-too-late-count: protocol.takeover:TakeOver.apply_round (unit tests)
  L1: a member that is to be removed answers a topology call of some of the others, and the rest wait for them
  - history.drop({peer.peer_id for peer in parted})
  + pass
list-of-those-who-go-adopted: protocol.recovery:History.__init__ (unit tests)
  S6: whoever came after members were removed goes with these, when they come back and are removed again
  - r.hello.peer_id not in self._gone
  + True
told-round-taken-back: protocol.master:MasterMachine._on_report (unit tests)
  S1: a member is answered by a round, told by this master, that one who comes late takes back for the others
  - history.has_told(self.registry.round)
  + False
who-is-to-go-admitted-again: protocol.recovery:History.would_admit (unit tests)
  S6: members of a branch that does not go on are listed as newcomers, and removed at once
  - report.hello.peer_id in self._gone
  + False
attempt-left-behind-stays: protocol.takeover:TakeOver.apply (unit tests)
  L1: an attempt of members that are removed has no end, and nobody can call anything at its tag
  - self._operations.end_left_behind([peers[i] for i in history.take_reporters() if i in peers])
  + pass
removed-member-leaves-attempt-behind: protocol.recovery:History.drop (unit tests)
  S1: an attempt is aborted that one peer has just committed, since a removed member has gone on without the others
  - self._reporters = [reporter for reporter in self._reporters if reporter not in gone]
  + pass
round-answers-another-call: protocol.master:MasterMachine._would_admit (unit tests)
  L1: a late newcomer's round answers a call that was made after the one that it was admitted in
  - self._has_decided() or self._outbox.refused_ns > self._adopted_ns
  + False
passed-over-newcomer-refused: protocol.master:MasterMachine._accept_report (unit tests)
  L3: a new host is removed since a member gave up the call that admitted it
  - self._may_register_again(history, report)
  + False
refusals-push-out-commits: protocol.memory:Memory._keep (unit tests)
  S1: a commit that a member which is away has not received is forgotten, because others are refused meanwhile
  - len(self._partial) > limits.PARTIAL_REFUSALS_KEPT_MAX
  + False
frames-of-unknown-attempts-stay: protocol.peer:PeerMachine._on_attempt_ended (unit tests)
  L2: a peer keeps the frames of an attempt ahead that it has never heard of, until its links stand still
  - not tags
  + False
far-attempt-ends-others: protocol.peer:PeerMachine._on_attempt_ended (unit tests)
  L2: a wild attempt id makes the data plane take the frames of all other attempts for late ones
  - self.state is State.MEMBER and is_of_member and not is_far
  + self.state is State.MEMBER and is_of_member
wild-attempts-move-the-bound: protocol.peer:PeerMachine._on_attempt_ended (unit tests)
  L2: the same by several wild ids, each not far from the one before
  - self._effects.append(EndReduce(attempt_id, commit=False))
  + self._forget_attempts((attempt_id,))
ended-attempt-starts-when-its-plan-comes: protocol.peer:PeerMachine._keep_ahead (unit tests)
  S4: a peer starts an attempt whose frames its data plane drops, as another has told of its end before the plan came
  - self._ended_ahead.keys().isdisjoint(attempt_ids)
  + True
ended-attempts-have-no-bound: protocol.peer:PeerMachine._on_attempt_ended (unit tests)
  B1: a member makes the others remember ever more ends of attempts
  - len(self._ended_ahead) > limits.PLANS_AHEAD_MAX
  + False
joiner-ends-attempts: protocol.peer:PeerMachine._on_attempt_ended (unit tests)
  S6: a joiner ends the next attempts at members before these start, which then drop each other's frames
  - self.state is State.MEMBER and is_of_member and not is_far
  + self.state is State.MEMBER and not is_far
elected-by-those-who-left: protocol.leadership:Candidate.is_over (unit tests)
  S3: a member that was removed reports its old list and leaves, and the master leads by that list beside another one
  - self.chosen is not None and not self._has_quorum(self.chosen)
  + False
who-left-is-remembered: protocol.leadership:Leader.on_left (unit tests)
  B1: with one address, a master remembers every member that has ever left
  - self.needs_quorum
  + True
lost-member-registers-again: protocol.master:MasterMachine._may_register_again (unit tests)
  S3: a member that was lost becomes a newcomer in the middle of its program
  - self._leader.needs_quorum or report.hello.peer_id in history.adopted.members
  + self._leader.needs_quorum
admission-after-a-removal-forgotten: protocol.master:MasterMachine._would_admit (unit tests)
  S6: a newcomer is refused since members were removed before it was admitted, and some have not heard of it
  - not self._leader.needs_quorum and self._is_member(report.hello.peer_id)
  + False
newcomer-removes-members: protocol.master:MasterMachine._would_admit (unit tests)
  S6: a newcomer, or a member that was lost, removes members that have the state
  - not self._leader.needs_quorum and self._is_member(report.hello.peer_id)
  + not self._leader.needs_quorum
newcomer-waits-for-no-member: protocol.master:MasterMachine._may_be_told_of (unit tests)
  L3: a newcomer registers again, and is admitted between two of its calls when a member tells of its admission
  - history.would_admit(report, self.registry.round, keeps_all=False)
  + False
former-membership-counts: protocol.recovery:History._note (unit tests)
  L3: a returning peer that waits to be admitted is removed, because the others have gone on without it
  - report.hello.is_member
  + True
unaware-member-not-removed: protocol.recovery:History.parted (unit tests)
  L1: a member that has heard neither of its admission nor of its removal stays, at another point of its program
  - _Known(0, 0, since)
  + _Known(0, 0, 0)
list-outlives-its-knowers: protocol.recovery:History.parted (unit tests)
  S6: a removal counts though all who had heard of it have gone
  - left[i].epoch >= epoch and i not in removed
  + i not in removed
branches-remove-each-other: protocol.recovery:History.parted (unit tests)
  S6: of three branches each removes the members of the other two, and nobody is left
  - peer_id not in found
  + True
who-comes-late-takes-the-run: protocol.recovery:History.parted (unit tests)
  S1: a member that comes late removes those who were told another answer than it has
  - late is not None
  + False
lists-of-two-branches-meet: protocol.recovery:History.parted (unit tests)
  L1: members that were removed and come back first are members again beside those who removed them, at another point
  - 0 < known.since < epoch
  + False
branch-that-has-decided-is-removed: protocol.recovery:History.parted (unit tests)
  L3: what members have decided since they came back first is lost
  - self._last_attempt_id >> limits.EPOCH_BITS > their_term
  + False
later-member-taken-for-a-removed-one: protocol.recovery:History.parted (unit tests)
  S6: whoever was admitted by a list that a late member does not know is removed
  - 0 < known.since < epoch
  + 0 < known.since
older-sync-of-a-late-report-taken: protocol.recovery:History._merge (unit tests)
  S5: a revision is used twice, because a late report describes an older sync
  - last.attempt_id > self._last_syncs[group].attempt_id
  + True

# --- Several masters --------------------------------------------------------------------------------------------------
half-is-a-quorum: protocol.leadership:is_quorum (unit tests)
  S3: two masters, each with half of the members, both lead
  - 2 * count > len(members) or (2 * count == len(members) and (not members or min(members) in present))
  + 2 * count > len(members) or (2 * count == len(members) and True)
adopted-list-changed-before-it-is-committed: protocol.leadership:Leader.may_change (unit tests)
  S3: the adopted list may have been committed, and its members may follow another master
  - return not (self._repeats and self.needs_quorum)
  + return not (self._repeats and not self.needs_quorum)
loss-without-a-quorum: protocol.master:MasterMachine._lose (simulator)
  S3: a master continues with a few members while another one leads the rest
  - not has_left and not self._may_lose(peer)
  + not has_left and not self._leader.needs_quorum
decided-before-established: protocol.operation:Operations.decide (unit tests)
  S1: under a list that is not committed, an attempt is decided differently from another master
  - not self._registry.is_committed or not have_reported(survivors)
  + not have_reported(survivors)
reports-of-the-gone-count: protocol.leadership:Candidate.on_connection_closed (unit tests)
  S3: a member is counted by two masters
  - len(report.hello.masters) > 1 and peer_id not in self.left
  + len(report.hello.masters) > 99 and peer_id not in self.left
promise-goes-down: protocol.leadership:Acceptor.promise (unit tests)
  S3: a member that has promised a term to one master helps another one to lead in a lower term
  - asked.term <= self.promised.term and asked != self.promised
  + asked.term < 0 and asked != self.promised
begins-a-run-beside-another: protocol.master_list:MasterList.begins (unit tests)
  S3: a newcomer begins its own run at an idle master
  - is_to_begin = self.index == 0 and len(self._without_run) == len(self.addresses)
  + is_to_begin = self.index == 0
believes-the-word-of-its-predecessor: protocol.leadership:Candidate._is_to_begin (unit tests)
  S3: a newcomer begins a run beside one that a master led before its restart
  - return hello.begins == self._run_id
  + return any(hello.begins)
term-given-twice: protocol.leadership:Acceptor.promise (unit tests)
  S3: two masters are elected in one term
  - asked.term <= self.promised.term and asked != self.promised
  + asked.term < self.promised.term and asked != self.promised
promise-to-the-term-alone: protocol.leadership:Acceptor.obey (unit tests)
  S3: a peer obeys a rival of the leader that it has promised
  - self.is_led = leader == self.promised
  + self.is_led = leader.term == self.promised.term
led-by-the-one-before: protocol.leadership:Acceptor.promise (unit tests)
  S3: messages of a master count that were sent before another one was promised
  - self.promised, self.is_led = asked, False
  + self.promised = asked
numbers-compared-not-descent: protocol.leadership:descend (unit tests)
  S3: a list that was never committed outranks a committed one
  - each in children or (each.epoch > last and each.members == members)
  + last <= each.epoch
repeated-list-forgotten: protocol.leadership:descend (unit tests)
  S3: a list that a leader repeated and committed is passed over for one that was proposed before
  - each in children or (each.epoch > last and each.members == members)
  + each in children
acknowledgement-of-an-earlier-list-counts: protocol.leadership:Leader.propose (unit tests)
  S3: a list is committed that no quorum has acknowledged
  - self._acknowledged.clear()
  + self._acknowledged &= self.list.members
acknowledgement-of-another-epoch-counts: protocol.leadership:Leader.acknowledge (unit tests)
  S3: a list is committed by acknowledgements of the previous one
  - epoch != self.list.epoch
  + epoch > self.list.epoch
committed-by-the-old-quorum-alone: protocol.leadership:are_quorums (unit tests)
  S3: the new members may follow another master that knows them as committed
  - return is_quorum(present, accepted.members) and is_quorum(present, accepted.old_members)
  + return is_quorum(present, accepted.old_members or accepted.members)
committed-by-the-new-quorum-alone: protocol.leadership:are_quorums (unit tests)
  S3: the old members may continue with another master
  - return is_quorum(present, accepted.members) and is_quorum(present, accepted.old_members)
  + return is_quorum(present, accepted.members)
leads-in-a-term-that-nobody-promised: protocol.master:MasterMachine._restore (simulator)
  S3: a master leads in a term that no peer has promised
  - self.run_id, self.term = run_id, candidate.promise.term
  + self.run_id, self.term = run_id, candidate.promise.term + 1
removed-before-it-confirms: protocol.master:MasterMachine._kick (unit tests)
  S3: a member whose key is revoked here counts as removed while another master leads it
  - self._dismissed[connection] = _Dismissed(peer.peer_id, kick)
  + self._leader.on_left(peer.peer_id)
removed-before-the-list-is-committed: protocol.master:MasterMachine._on_members_committed (unit tests)
  L1: a removed member never learns that it was removed
  - dismissed, self._dismissed = self._dismissed, {}
  + dismissed, self._dismissed = {}, self._dismissed
held-newcomers-count: protocol.leadership:Candidate._has_quorum (unit tests)
  S3: a peer without a promise helps a master to lead
  - {report.hello.peer_id for report in reports}.union(self.left)
  + {p for p in self._newest(run_id).members if self.held or p in self.reports}.union(self.left)
higher-promise-of-a-member-not-heeded: protocol.master:MasterMachine._is_ahead (unit tests)
  L1: a member that obeys another master is welcomed, and never gets a message
  - is_known or has_promised
  + has_promised
returning-peer-merely-welcomed: protocol.master:MasterMachine._owes_report (unit tests)
  S1: what a returning peer has learnt from another master is lost
  - return not known.has_reported or (hello.is_member and not has_promised)
  + return not known.has_reported
run-given-to-the-first-newcomer: protocol.master:MasterMachine._may_yield_to (unit tests)
  L3: the members of a run are refused in favour of a run that a newcomer has just begun
  - self._is_of_other_run(hello) and not self._must_not_yield()
  + False
minority-goes-on-at-once: protocol.leadership:Candidate._is_elected (unit tests)
  L3: removed members that return first take the run back to an old revision
  - return self._has_one_address(chosen) and due_ns is not None and now_ns >= due_ns
  + return self._has_one_address(chosen) and due_ns is not None
refusal-is-final-of-any-list: protocol.master:MasterMachine._refuse_session (unit tests)
  L3: a member is removed by a list that is never committed
  - is_final = not self.is_recovering and self.registry.is_committed
  + is_final = not self.is_recovering
refusal-is-final-whatever-is-known: protocol.peer:PeerMachine._is_final (unit tests)
  S3: a former master removes a member
  - is_removed
  + True
refusal-by-its-own-list-is-not-final: protocol.peer:PeerMachine._is_final (unit tests)
  L1: who has accepted the list without it and missed the Kick looks for its master until the timeout
  - message.epoch == self.epoch and not is_listed
  + False
adopted-run-never-yields: protocol.master:MasterMachine._must_not_yield (unit tests)
  L3: members are refused because a master took over the run of a newcomer that is alone
  - (self._history is not None and self._history.has_decided)
  + self._history is not None
old-hello-speaks-for-a-member: protocol.master:MasterMachine._ask_again (unit tests)
  L3: a Hello that comes late on a broken connection removes a member, or voids its report
  - connection in self._asked
  + connection is not None
refused-hear-of-the-loss: protocol.kinds.sync:StateSyncs.on_ended (unit tests)
  L1: who was refused in a sync that waits hears that a peer is lost, and calls again with the same state
  - self._refuse_waiting(transfer)
  + None
peer-gone-over-is-welcomed: protocol.master:MasterMachine._has_gone_over (unit tests)
  S3: a peer that is a member of another run by now is sent the list of the one in which it was registered
  - self._is_of_other_run(hello)
  + False
undecided-members-removed: protocol.master:MasterMachine._refuse_report (unit tests)
  S6: of two runs that a new master finds, the members of the smaller one are removed, though nothing was decided there
  - report.hello.run_id != self.run_id and is_whole and not has_decided(report)
  + False
unknowing-old-member-not-asked: protocol.master:MasterMachine._accept_report (unit tests)
  L2: a list without a peer that was admitted unknowingly is never committed, once another member has left
  - connection is not None and hello.peer_id in self.registry.old_members
  + connection is not None and hello.is_member and hello.peer_id in self.registry.old_members
a-part-of-a-run-yields: protocol.master:MasterMachine._refuse_report (unit tests)
  S1: a member that was just admitted goes over to another run, while its own decides without it at the other master
  - report.hello.run_id != self.run_id and is_whole and not has_decided(report)
  + report.hello.run_id != self.run_id and not has_decided(report)
members-refused-for-an-undecided-run: protocol.master:MasterMachine._refuse_report (unit tests)
  S6: members that report together with a newcomer, or late, are removed, though the run of that one has decided nothing
  - is_here and self._may_yield_to(report.hello)
  + False
returning-peer-asks-without-end: protocol.peer:PeerMachine._may_start_over (unit tests)
  B1: a peer says Hello again and again to a master that refuses it
  - self.state is State.RETURNING and self._acceptor.is_led
  + self.state is State.RETURNING
undecided-member-comes-late: protocol.peer:PeerMachine._may_join_instead (unit tests)
  S6: a member of a run that has decided nothing is removed, because the members of another one came before it
  - return (is_of_other_run or is_passed_over) and not has_decided(self._run_report())
  + return is_passed_over
member-of-a-run-joins-another: protocol.peer:PeerMachine._may_join_instead (unit tests)
  L3: a member whose run has decided something goes over to another run without a word
  - return (is_of_other_run or is_passed_over) and not has_decided(self._run_report())
  + return is_of_other_run or is_passed_over
admission-that-came-to-nothing: protocol.peer:PeerMachine._may_join_instead (unit tests)
  L3: a newcomer's first call ends with Kicked, because the master died before the list with it was committed
  - is_passed_over = self._is_final(message) and not is_known_member
  + is_passed_over = False
member-that-was-removed-stays: protocol.peer:PeerMachine._may_join_instead (unit tests)
  L1: a member that was removed waits to be admitted again, and its user does not learn of it
  - is_passed_over = self._is_final(message) and not is_known_member
  + is_passed_over = self._is_final(message)
rounds-of-another-run: protocol.peer:PeerMachine._register (unit tests)
  S6: a peer reports the rounds of the run that yielded, and members are removed for having missed them
  - self._memory = Memory()
  + self._memory = self._memory
late-report-not-answered: protocol.master:MasterMachine._on_early_message (unit tests)
  L2: a member whose report comes when the master has given its recovery up waits as long as its connection lasts
  - self._on_early_hello(candidate, event, message.hello, now_ns)
  + pass
who-refuses-is-asked-again: protocol.master:MasterMachine._on_early_hello (unit tests)
  B1: a newcomer that refuses a promise is asked for it again at once, as long as the master waits for others
  - not self._raise_above(candidate, hello) and hello.is_member
  + not self._raise_above(candidate, hello)
returning-peer-promises-nothing: protocol.peer:PeerMachine._promise (unit tests)
  L1: a peer whose run has yielded, and that was admitted without knowing, is asked for ever and never a member
  - self.is_unregistered
  + self.state is State.RETURNING
returning-peer-of-the-same-run-not-registered: protocol.peer:PeerMachine._on_welcome (unit tests)
  L2: a peer that waits to be admitted again keeps the epoch of the list that came to nothing, and refuses every promise
  - is_other_run or self.is_unregistered
  + is_other_run
calls-kept-while-returning: protocol.peer:PeerMachine._on_yielded (unit tests)
  L1: a peer is admitted in the middle of a call that the members do not make
  - self._answer_alone(call)
  + self._loneliness(call)
other-list-of-masters-taken: protocol.master_list:GivenList.may_be (unit tests)
  S3: peers with different lists of masters are in one run, and two masters lead it
  - (self.count, self.index) == (other.count, other.index)
  + self.count > 0
withdrawn-calls-are-planned: protocol.master:MasterMachine._announce_epoch (unit tests)
  L1: a plan that ends at once for all, since one of its calls was withdrawn long before
  - self.operations.answer_withdrawals()
  + self.operations.validate
cut-off-master-removes-all: protocol.master:MasterMachine._look_for_outage (unit tests)
  L3: a master that was cut off has removed all its members when they reconnect
  - not self._leader.needs_quorum
  + not self._leader.needs_quorum and not peer.is_member
run-that-all-have-left-is-adopted: protocol.leadership:Candidate.chosen (unit tests)
  L3: the members of the other run, all of them there, are removed
  - report.hello.run_id in here
  + True
members-of-an-old-list-are-the-whole-run: protocol.leadership:Candidate._are_all_here (unit tests)
  L3: members that were lost take the run back from those who came after them
  - self._has_one_address(self.chosen)
  + False
removed-members-left-alone: protocol.master:MasterMachine._step_down (unit tests)
  L2: a member that was to be removed waits for ever for a master that has stepped down
  - members += self._dismissed
  + members += []
outage-before-a-take-over: protocol.master:MasterMachine._restore (unit tests)
  L3: all members are removed because the network of all was away for a moment after they had reported
  - self.registry.order[:1]
  + self.registry.order[:0]
lost-links-show-losses-in-an-outage: protocol.losses:Losses.is_given_up (unit tests)
  L2: the first member that is back after an outage of all removes the others
  - self.network is not NetworkState.UP and peer.is_member
  + False
held-members-not-waited-for: protocol.losses:Losses.loss_ns (unit tests)
  L2: members are lost while a master holds them that does not know yet that it is cut off
  - self._is_linked(peer)
  + False
cut-off-master-waits-as-long: protocol.master:MasterMachine._loss_ns (unit tests)
  L2: a master that cannot lead any more keeps its peers until the next one has lost them
  - may_lead and self._is_new_here(peer)
  + self._is_new_here(peer)

# --- Plans ahead ------------------------------------------------------------------------------------------------------
plan-ahead-runs-for-some: protocol.kinds.collective:Collectives._run_ahead (unit tests)
  L1: an attempt runs that some of its participants have not started and get no plan for
  - all(vote.ahead == attempt_id for vote in votes.values())
  + bool(votes)
plan-ahead-for-other-arguments: protocol.kinds.collective:Collectives._run_ahead (unit tests)
  S1: two peers are root of a broadcast
  - spec != ahead.specs.get(peer)
  + peer not in ahead.specs
failed-plan-ahead-runs: protocol.kinds.collective:Collectives._run_ahead (unit tests)
  L1: a call fails because a peer that came early has waited for too long
  - not all(report.ok for report in reports.values())
  + not votes
early-report-lost: protocol.operation:Operations._on_early_report (unit tests)
  L1: an attempt waits for ever for a report that came before the last vote
  - (vote.call_id, vote.ahead) == (report.call_id, report.attempt_id)
  + (vote.call_id, vote.ahead) == (report.attempt_id, report.call_id)
calls-of-a-plan-ahead-untold: protocol.kinds.collective:Collectives._run_ahead (unit tests)
  S1: a new master cannot tell for which call a decision is
  - attempt.has_plan_everywhere = False
  + attempt.has_plan_everywhere = True
plan-ahead-kept-over-members: protocol.peer:PeerMachine._on_members (unit tests)
  S1: a peer starts an attempt of members that are gone
  - message.epoch != self.epoch
  + message.epoch < self.epoch
plan-ahead-for-another-call: protocol.peer:PeerMachine._may_start_ahead (unit tests)
  S1: a peer starts an attempt of another size
  - ahead.spec != call.spec
  + ahead.spec.kind != call.spec.kind
started-ahead-not-ended: protocol.peer:PeerMachine._recall (unit tests)
  S4: two attempts at one call use its memory at the same time
  - not call.is_released
  + call.is_released
started-ahead-runs-on: protocol.peer:PeerMachine._on_decision (unit tests)
  S2: the attempt that a call has started runs on after the end of the one that took its place
  - decision.attempt_id != call.ahead
  + not decision.attempt_id
started-ahead-unsaid: protocol.calls:Call._vote_and_report (unit tests)
  L1: a new master never gets the vote of a call that has reported
  - is_sync(self) or self.ahead
  + is_sync(self)

# --- The commit between peers -----------------------------------------------------------------------------------------
digests-of-others-not-compared: protocol.commit:Digests.calls_of (unit tests)
  S1: peers return with different results
  - told.digest != digest
  + told.digest is None
gives-up-after-its-digest: protocol.calls:Call.withdrawal (unit tests)
  S1: the master aborts what another peer has committed
  - self.has_told and not self.ahead
  + self.has_told and not self.call_id
released-though-it-is-bound: protocol.peer:PeerMachine._release_due (unit tests)
  S1: a call fails here that succeeds for the others, while their master leads this peer
  - call.has_told and self._acceptor.is_led
  + call.has_told and not self._acceptor
tells-its-digest-after-its-withdrawal: protocol.peer:PeerMachine._tells_digest (unit tests)
  S1: the master aborts what another peer has committed
  - call.withdrawn is not None
  + False
bound-by-a-digest-that-was-not-told: protocol.peer:PeerMachine._on_reduce_done (unit tests)
  L1: a call that was withdrawn before its result waits for a master that is away
  - call.has_told = event.has_told
  + call.has_told = True
old-plan-ahead-started: protocol.peer:PeerMachine._may_start_ahead (unit tests)
  L1: frames of an attempt are dropped as late by a peer that begins it later, and it stalls
  - ahead.attempt_ids[0] + limits.PLAN_AHEAD_AGE_MAX <= self._attempt_max
  + self._attempt_max < 0
commit-not-remembered: protocol.peer:PeerMachine._commit (unit tests)
  S3: a run that has decided something yields to another one
  - self._memory.on_decision(decision, call, plan.order)
  + self._memory.round
plan-ahead-for-who-owns-nothing: protocol.commit:tells_digests (unit tests)
  L1: who owns no part of a reduce-scatter tells its digest before others have called, and waits for them without end
  - not has_empty_parts
  + True
unknown-plan-made-ahead: protocol.kinds.collective:Collectives.plan_ahead (unit tests)
  S3: hands out attempts for a plan that a new master has imagined, and peers run them as the former one said
  - attempt.is_plan_known and attempt.specs.keys() == set(members)
  + attempt.specs.keys() == set(members)
deadlock-ended-while-it-is-committed: protocol.stragglers:Stragglers._end_deadlocks (unit tests)
  S1: refuses calls that their peers have started ahead, and commit before they hear of it
  - is_over and any(wait.is_ahead for wait in deadlock.waits)
  + False
loss-aborts-at-once: protocol.kinds.collective:Collectives.judge (unit tests)
  S1: the lost peer has committed it with one that has not reported yet
  - not lost or tells_digests(attempt.spec, len(attempt.calls))
  + not lost
plan-ahead-recalled-after-a-loss: protocol.kinds.collective:Collectives._run_ahead (unit tests)
  S1: the lost peer has committed it with those that voted
  - len(reports) < len(votes)
  + False
root-of-a-broadcast-is-bound: protocol.commit:tells_digests (unit tests)
  L1: the timeout of a broadcast does not end it for its root
  - (CollectiveKind.BROADCAST, CollectiveKind.BARRIER)
  + (CollectiveKind.BARRIER,)
next-call-refused: protocol.kinds.collective:Collectives.refusal_of (unit tests)
  L1: who has returned before the master's decision cannot call again
  - report is not None and report.ok
  + report is not None and not report.ok
early-votes-lost: protocol.operation:Operations.take (unit tests)
  L1: a call that came before the one ahead of it was decided is never answered
  - self._again += self._early.pop(key, ())
  + self._early.pop(key, ())

plan-ahead-kept-over-a-refusal: protocol.peer:PeerMachine._on_decision (unit tests)
  S1: a peer commits with others what was refused to them because of its own call
  - decision.is_refusal
  + decision.committed and decision.is_refusal
ids-of-others-taken: protocol.operation:Operations.was_issued (unit tests)
  S3: members of one group end the attempt of another group, by its id
  - attempt_id not in self.running
  + attempt_id > 0

# --- The control connection -------------------------------------------------------------------------------------------
connects-no-more: protocol.session:Session._on_tick (simulator)
  L2: a peer whose connection broke never opens another socket
  - self.phase is SocketPhase.PAUSED
  + self.phase is SocketPhase.ASKING
broken-connection-is-a-failed-try: protocol.session:Session.handle (unit tests)
  L3: a peer leaves a live master for a standby
  - self._pause(events.ConnectionDown(), now_ns)
  + self._pause(events.ConnectionFailed(_REFUSED), now_ns)
answer-of-another-master-counts: protocol.session:Session.handle (unit tests)
  S7: a newcomer gives up because of the secret of a master that it has left
  - self.phase is SocketPhase.ASKING and event.index == self._index
  + self.phase is SocketPhase.ASKING
# --- Plans that follow the network -----------------------------------------------------------------------------------
slow-network-taken-for-slow-work: protocol.plans:Planner.learn (unit tests)
  L2: after one bad plan no other one seems quicker
  - any(report.paths for report in reports.values())
  + False
plans-never-made-anew: protocol.plans:Planned.is_fresh (unit tests)
  L2: a path that falls to a tenth is used as before
  - limits.ROUTE_KEPT_NS
  + limits.RATE_DOUBLING_NS
plans-made-anew-by-each-call: protocol.plans:Planned.is_fresh (unit tests)
  B1: the master computes all the time
  - limits.ROUTE_KEPT_NS
  + 0
failed-links-planned: protocol.plans:Planner._route (unit tests)
  L2: trees use a link that has just failed
  - frozenset((one, other)) not in edges
  + True
paths-of-the-lost-kept: protocol.plans:Planner.on_members_changed (unit tests)
  B1: the paths of all who ever were members are kept
  - self._registry.peers.get(peer.peer_id) is not peer
  + False
falls-seen-by-and-by: protocol.matrix:_Estimate.observe (unit tests)
  L2: a path that falls to a tenth makes ten calls slow
  - 2 * rate > known
  + True
probed-paths-fall-with-each-attempt: protocol.matrix:Matrix.observe_attempt (unit tests)
  L2: fast paths of a host that sends over many count as slow from the first call on
  - sample.busy_ns <= trusted_ns and known is not None and known.holds(now_ns)
  + False
probed-hosts-rise-and-fall-with-each-attempt: protocol.matrix:Matrix.observe_attempt (unit tests)
  L2: a host that gets little to send counts as slow from the first call on
  - probed is not None and probed.holds(now_ns) and len(late) <= 1
  + False
probed-hosts-fall-with-a-path: protocol.matrix:Matrix.observe_attempt (unit tests)
  L2: after the fall of a path, plans give less to a host that can do as much as before
  - len(late) <= 1
  + not late
fallen-paths-explained-by-their-host: protocol.matrix:Matrix.observe_attempt (unit tests)
  L2: a path that falls to a tenth is used as before, because the other links of its host waited for it
  - sample not in late
  + True
probed-paths-never-fall: protocol.plans:_trusted_ns (unit tests)
  L2: a path that falls to a tenth is used as before for an hour
  - planned_ns is None or 100 * took_ns <= limits.PROBE_TRUST_PERCENT_MAX * planned_ns
  + True
probed-paths-fall-with-the-path-that-they-wait-for: protocol.plans:_trusted_ns (unit tests)
  L2: after the fall of a path, plans follow less exact rates of others
  - max(limits.PROBE_TRUST_PERCENT_MAX * planned_ns, limits.PROBE_DOUBT_PERCENT * took_ns) // 100
  + limits.PROBE_TRUST_PERCENT_MAX * planned_ns // 100
a-pace-that-ends-with-the-fall-of-a-path: protocol.plans:Planner._is_measured (unit tests)
  L2: after the fall of a path, the other links of busy hosts are late
  - self.matrix.was_probed(peers[one], peers[other], now_ns)
  + self.matrix.is_probed(peers[one], peers[other], now_ns)
measured-paths-used-to-the-full: protocol.matrix:Matrix.network (unit tests)
  L2: a link that has lost some time stays behind, and all lanes wait for it
  - max(1, rate * used_percent // 100)
  + rate
measured-hosts-used-to-the-full: protocol.matrix:Matrix._host_in_use (unit tests)
  L2: acknowledgements do not fit on the line beside tensors, and a queue grows before it through the whole attempt
  - max(1, rate * limits.HOST_USED_PERCENT // 100)
  + rate
a-pace-that-is-never-hastened: protocol.plans:_hastened (unit tests)
  L2: links keep for ever to a pace that was measured too low
  - min(planned.how.pace_us, max(1, took_ns * 100 // (limits.PACE_HELD_PERCENT * limits.US)))
  + planned.how.pace_us
a-pace-by-what-attempts-show: protocol.plans:Planner._is_measured (unit tests)
  L2: links keep to rates that are not those of their paths, and the plan is never found wrong
  - bool(route.trees) and all(known)
  + bool(route.trees)
probes-of-some-paths-taken-for-the-host: protocol.plans:Planner._observe (unit tests)
  L2: a host whose other peers are within it counts as too slow for them
  - len(probed) in (1, len(peers) - 1)
  + probed
paths-measured-again-and-again: protocol.plans:Planner.unmeasured (unit tests)
  L1: each optimize_topology takes seconds, because members without a link show nothing
  - asked == members and now_ns - asked_ns < limits.RATE_DOUBLING_NS
  + False
paths-of-newcomers-not-measured: protocol.plans:Planner.unmeasured (unit tests)
  L2: optimize_topology does nothing for members that have not been asked yet
  - asked == members and now_ns - asked_ns < limits.RATE_DOUBLING_NS
  + bool(asked) and now_ns - asked_ns < limits.RATE_DOUBLING_NS
old-plans-ahead-used-up: protocol.peer:PeerMachine._on_decision (unit tests)
  L2: 16 calls use a path that has fallen
  - not decision.committed or decision.is_ahead_void
  + not decision.committed
another-plan-noted-for-what-runs: protocol.kinds.collective:Collectives.plan_ahead (unit tests)
  S3: the master takes what all have started ahead for an attempt by the new plan
  - how is None
  + how is None or attempt.how != how
rings-in-order-of-admission: protocol.plans:Planner.how (unit tests)
  L2: an all-gather uses the slowest path although there is a ring without it
  - spec.kind == CollectiveKind.ALL_TO_ALL or len(order) > limits.DIRECT_PEERS_MAX
  + spec.kind != CollectiveKind.ALL_REDUCE or len(order) > limits.DIRECT_PEERS_MAX
plans-that-waver: protocol.plans:Planner._route (unit tests)
  B1: rates that waver change the plan again and again, and void what is planned ahead
  - known.route
  + None
broadcast-from-where-a-ring-was-repaired: protocol.routes:_Planner._quickest_ring (unit tests)
  S1: the first of the order, which sends, is not the root
  - order.index(0)
  + 0
# --- Who is removed ---------------------------------------------------------------------------------------------------
newcomer-shows-that-the-network-is-there: protocol.losses:Losses.on_closed (unit tests)
  L3: all members are removed in an outage of all, since the master missed a pending peer last
  - self.network is NetworkState.BACK and not is_anyone_here
  + False
stranger-shows-that-the-network-is-there: protocol.master:MasterMachine._on_connection_closed (unit tests)
  L3: the same, as somebody who is refused knocks at the master once
  - return self._losses.on_closed(is_anyone_here=self._is_anyone_here())
  + return
earlier-run-waits-for-members-that-are-gone: protocol.master:MasterMachine._is_anyone_here (unit tests)
  L1: a run whose members are all gone yields to the earlier one that waits at its master no more
  - bool(self.registry.by_connection or earlier)
  + bool(self.registry.by_connection)
who-is-away-is-a-witness: protocol.losses:Losses.is_witness (unit tests)
  L3: a member is removed in an outage of all for a link that had broken before
  - peer.connection is None or said_ns is None or said_ns + spread_ns < lost.disconnected_ns
  + said_ns is None or said_ns + spread_ns < lost.disconnected_ns
one-link-shows-that-who-is-elsewhere-is-lost: protocol.losses:Losses.is_given_up (unit tests)
  S6: a member that has tried another master is removed for one link that broke and came back
  - is_near and not may_be_elsewhere
  + is_near
attempts-side-by-side-cost-a-link-each: protocol.paths:Paths.blame (unit tests)
  L2: a link counts as down since an outage of some seconds broke several attempts on it, and a member is removed
  - min(cost_ns, now_ns - fault.seen_ns)
  + cost_ns
link-that-broke-long-ago-shows-a-loss: protocol.losses:Losses.is_witness (unit tests)
  S6: a member is removed in an outage for a link that broke long before, of which the master heard nothing more
  - peer.connection is None or said_ns is None or said_ns + spread_ns < lost.disconnected_ns
  + peer.connection is None or said_ns is None
who-was-away-shortly-before-is-a-witness: protocol.losses:Losses.is_witness (unit tests)
  S6: the network of all is back before the master has missed all, and the first ones remove the others
  - back_ns is None or back_ns + limits.WITNESS_AFTER_NS <= lost.disconnected_ns
  + True
link-of-who-was-away-shortly-before-shows-a-loss: protocol.losses:Losses.is_witness (unit tests)
  S6: a link that broke in an outage of all is noticed seconds later, and a new outage begins: a member is removed
  - (peer, lost)
  + (peer,)
link-that-broke-in-an-outage-shows-a-loss-later: protocol.losses:Losses.is_witness (unit tests)
  S6: the same
  - limits.WITNESS_AFTER_NS
  + spread_ns
only-the-last-list-of-a-term-tells-of-removals: protocol.recovery:History.parted (unit tests)
  L2: two members that were removed one after the other are listed together again, and wait for each other
  - sorted(self._members_of, reverse=True)
  + sorted({epoch >> limits.EPOCH_BITS: epoch for epoch in sorted(self._members_of)}.values(), reverse=True)
removed-for-links-while-away: protocol.master:MasterMachine._on_tick (unit tests)
  S6: a plan waits for a link that a far member has set up and cannot report, and the member is removed
  - self._were_away(self.registry.members(group), now_ns)
  + False
removed-for-links-as-it-is-back: protocol.membership:Peer.was_away (unit tests)
  S6: the same, and the member is removed a moment before its report of its links comes
  - self.back_ns is not None and self.back_ns > since_ns
  + False
removed-for-links-just-after-an-outage: protocol.master:MasterMachine._settle (unit tests)
  L3: a plan has waited for a link during an outage of all, and a member is removed before the link can come up
  - self.operations.wait_again(now_ns)
  + pass
straggler-in-an-outage: protocol.master:MasterMachine._on_tick (unit tests)
  L3: all are away for longer than the straggler timeout, and a member is removed because it did not vote
  - late if self._losses.network is NetworkState.UP else ()
  + late
straggler-just-after-an-outage: protocol.master:MasterMachine._settle (unit tests)
  L3: all were away for nearly the straggler timeout, and a member is removed before it can repeat its vote
  - peer.answered_ns = now_ns
  + pass
link-that-broke-before-a-take-over-shows-a-loss: protocol.master:MasterMachine._recognise (unit tests)
  S6: a link that broke while all looked for a master is noticed late, and a member is removed
  - peer.back_ns = self._outbox.now_ns
  + pass
link-that-comes-and-goes-keeps-a-joiner: protocol.master:MasterMachine._on_linked (unit tests)
  S6: a joiner whose link breaks each time just after it has come up holds up the members for ever
  - is_waiting and self._may_wait_again(other.peer_id, now_ns)
  + is_waiting
only-the-last-one-is-a-witness: protocol.master:MasterMachine._on_linked (unit tests)
  L1: the last link to a dead far peer is that of a member that was away shortly before, and the master goes on waiting
  - other.disconnected_ns is not None
  + other.disconnected_ns is not None and self._losses.is_witness(peer, other)
outages-cost-a-link: protocol.paths:cost_of (unit tests)
  L2: two outages of all break one long attempt each; the link counts as down, and a member is removed
  - end.back_ns is not None and end.back_ns >= begun_ns
  + False
outage-of-one-end-costs-a-link: protocol.paths:cost_of (unit tests)
  L2: the same, where the connections of one member are reset twice
  - any(end.back_ns is not None and end.back_ns >= begun_ns for end in edge)
  + all(end.back_ns is not None and end.back_ns >= begun_ns for end in edge)
late-break-costs-all-of-an-attempt: protocol.paths:cost_of (unit tests)
  L2: a link that broke once, late in a long attempt, counts as down
  - min(now_ns - begun_ns, limits.STALL_TIMEOUT_NS)
  + now_ns - begun_ns
late-break-costs-all-of-a-sync: protocol.kinds.sync:StateSyncs.on_report (unit tests)
  L2: a link that broke once, late in a long sync, or in an outage of all, counts as down, and a member is removed
  - cost_of(frozenset((peer, source)), transfer.begun_ns, self._outbox.now_ns)
  + self._outbox.now_ns - (transfer.begun_ns or 0)
joiner-while-members-are-away: protocol.master:MasterMachine._on_tick (unit tests)
  L2: a joiner waits for links to members that are away, or as the network of all breaks, and is removed for that
  - self._were_away([peer, *unreached], now_ns)
  + False
joiner-just-after-an-outage: protocol.master:MasterMachine._settle (unit tests)
  L2: the same, a moment after all are back
  - None if peer.unlinked_ns is None else now_ns
  + peer.unlinked_ns
late-peer-ends-those-who-go-on: protocol.recovery:History.parted (unit tests)
  L2: the list of a late peer that had to go removes members that go on together, as the next one comes late
  - [late] if removed and late in removed + knowing else []
  + [late] if late in removed + of_term else gone
removed-member-stays-until-it-reports: protocol.recovery:History.parted (unit tests)
  L2: a master dies before a removed member has reported; the next one lists it, and it waits for the others for ever
  - knowing[0] not in found
  + False
absent-member-listed-later-goes: protocol.recovery:History.parted (unit tests)
  S6: a member that was admitted again after its removal is removed because it has not reported yet
  - self._admitted.get(i, 0) < epoch
  + True
member-goes-for-an-absent-one: protocol.recovery:History.parted (unit tests)
  S6: a member that is here goes, so that one stays that was removed and may never come back
  - is_decided and removed
  + is_decided
lists-forget-who-was-admitted-when: protocol.master:MasterMachine._admit_former (unit tests)
  L2: a removed member counts as admitted anew by each master that takes the run over
  - self.registry.peers[member.peer_id].since = member.since
  + pass
absent-member-goes-with-a-late-one: protocol.recovery:History.parted (unit tests)
  L3: a member that knows of a removal has to go, and removes a member that belongs to those who go on
  - knowing[0] not in found
  + True
who-tells-of-a-removal-goes: protocol.recovery:History.parted (unit tests)
  S6: a member comes late and is removed, though those who went on meanwhile are in its list
  - [late] if removed and late in removed + knowing else []
  + [late] if late in removed + knowing else []
list-of-both-sides-is-sent: protocol.master:MasterMachine._on_report (unit tests)
  L2: a master dies just after it has sent a list with removed members to the member that tells of the removal
  - self._part(parted, now_ns)
  + (self._welcome(peer), self._part(parted, now_ns))
late-participant-misses-a-plan: protocol.master:MasterMachine._welcome_late (unit tests)
  L3: a late participant starts an attempt of this term first, and its engine drops what came for an earlier one
  - self.collectives.send_plans(peer)
  + pass
who-knows-of-no-removal-goes: protocol.recovery:History.parted (unit tests)
  L3: a removal is undone, and a member goes that has not heard of it and could go on
  - left[i].epoch >= epoch
  + True
absent-member-is-a-straggler: protocol.stragglers:_late_ns (unit tests)
  S6: a member is removed on its way to a new master, or as it connects again
  - away_ns + limits.CUT_OFF_SPREAD_NS
  + due_ns
straggler-that-comes-and-goes: protocol.stragglers:_late_ns (unit tests)
  L2: a member that never votes, and connects again every second, is never removed
  - due_ns + limits.AWAY_EXCUSE_MAX_NS
  + now_ns + limits.SECOND
host-that-goes-has-namesakes: protocol.membership:Registry.namesakes (unit tests)
  L2: a restarted host is removed as its former processes go, because one of them is still a member
  - counts[peer.host] == peer.host_size
  + True
late-tick-counts: protocol.master:MasterMachine._has_stood_still (unit tests)
  S6: a master that stood still removes a peer whose vote, Hello or links it has not read yet
  - now_ns < self._woken_ns
  + False
late-ticks-never-count: protocol.master:MasterMachine._has_stood_still (unit tests)
  L1: a master that is always busy loses nobody
  - due_ns > self._woken_ns
  + True
groups-remove-members-of-different-hosts: protocol.master:MasterMachine._on_tick (unit tests)
  L2: with several masters, two hosts that cannot reach each other are both removed
  - not self.registry.is_committed
  + False
claimed-links-are-searched: protocol.paths:Paths.can_join (unit tests)
  S6: each report of a joiner that claims links to a large group costs the master a search
  - sum(self._registry.are_linked(joiner, other) for other in members) < 2
  + False
sync-over-a-path-that-carries-nothing: protocol.kinds.sync:StateSyncs._find_sources (unit tests)
  L2: a fetcher is sent to the same source again and again, though another peer has the state
  - found.without or not suspects
  + True
new-processes-of-a-host-left-over: protocol.membership:Registry.remove (unit tests)
  L2: a host that restarts is removed for the old processes that are lost later
  - peer.disconnected_ns is None or other.registered_ns <= peer.disconnected_ns
  + True
halves-differ-by-group: protocol.master:MasterMachine._on_tick (unit tests)
  L2: each group keeps another half of hosts that are cut in two, and everybody is removed
  - self._remove_broken_hosts(now_ns)
  + pass
holders-have-all: protocol.kinds.sync:Transfer.has (unit tests)
  L3: a peer fetches from a holder what that one does not have
  - not held and peer in self.holders
  + peer in self.holders
fetched-is-not-told: protocol.memory:Memory.report (unit tests)
  L3: who has fetched all of the state says that it has not, and the sync is aborted as its holders are gone
  - call.report.ok if call.report is not None else not call.plan.how.fetch
  + not call.plan.how.fetch and not (call.report is not None and not call.report.ok)
restored-syncs-are-not-planned: protocol.takeover:TakeOver.apply (unit tests)
  L3: a peer that never got its plan waits for one
  - self._syncs.on_restored()
  + pass
only-the-last-source-is-blamed: protocol.kinds.sync:StateSyncs.on_report (unit tests)
  L2: a member whose links carry nothing large makes every sync fail
  - source in fault or source.peer_id in dropped
  + source in fault
syncs-over-links-that-always-fail: protocol.paths:Paths.sources (unit tests)
  L2: the same, although its links are known to fail
  - self._is_usable(receiver, holder, faults, failing_max_ns)
  + self._registry.are_linked(receiver, holder)
namesakes-wait-for-ever: protocol.master:MasterMachine._remove_namesakes (unit tests)
  L1: the peers of a second host of one name wait as long as the first one takes part
  - now_ns - peer.registered_ns >= limits.HOST_NAMESAKE_WAIT_NS
  + False
who-comes-and-goes-holds-up-others: protocol.master:MasterMachine._may_wait_again (unit tests)
  L1: a member that connects again every few seconds keeps one without links in the group, and calls wait
  - now_ns - first_ns < limits.AWAY_EXCUSE_MAX_NS
  + True
refused-twice-is-removed: protocol.peer:PeerMachine._on_refused (unit tests)
  S6: a peer that returns takes the refusal of an earlier message for that of its Hello
  - message.refusal is Refusal.UNKNOWN_SESSION and self.is_unregistered
  + False
yields-whatever-late-reports-tell: protocol.master:MasterMachine._settle_yielding (unit tests)
  L3: a run whose decisions only late reports tell yields to another one
  - self._must_not_yield()
  + self._has_decided()
unheard-newcomer-is-not-summoned: protocol.leadership:Candidate.summon (unit tests)
  L2: a newcomer that has heard nothing of its admission is needed for the quorum, and nobody asks it
  - (is_new(held.hello) and len(held.hello.masters) > 1)
  + False
call-in-two-attempts: protocol.kinds.sync:StateSyncs.restore (unit tests)
  S6: a false report has a call answered twice, which ends the master
  - self._operations.attempt_of(peer, calls[peer]) in (None, transfer)
  + True
attempt-of-two-kinds: protocol.kinds.sync:StateSyncs.restore (unit tests)
  S6: a false report replaces a running collective by a sync
  - known is not None and known.key != Key(SYNC, reporter.group)
  + False
call-with-an-outcome-of-another-attempt: protocol.takeover:TakeOver._settle (unit tests)
  S6: the same by a late outcome
  - self._operations.attempt_of(peer, call_id) is not None
  + False
plan-without-calls-is-plausible: protocol.recovery:is_plausible (unit tests)
  S6: the same by a plan that lacks calls
  - is_of_term and len(members) == len(report.members) and are_whole
  + is_of_term and len(members) == len(report.members)
who-registers-again-survives: protocol.operation:Operations.restore (unit tests)
  L1: an attempt waits for the report of a peer that has been removed, and registers again
  - members.get(peer_id) or absent(peer_id)
  + self._registry.peers.get(peer_id) or absent(peer_id)
input-of-an-attempt-ahead-is-not-kept: protocol.peer:PeerMachine._start (unit tests)
  S1: the attempt after it begins with an input that the first one has overwritten
  - bool(call.ahead)
  + False
dropped-plans-are-not-ended: protocol.peer:PeerMachine._forget_attempts (unit tests)
  L2: frames of attempts that this peer never starts fill its memory for early frames, and its links stand still
  - self._effects += [EndReduce(attempt_id, commit=False) for attempt_id in attempt_ids]
  + pass
ahead-without-bound: protocol.peer:PeerMachine._take_room (unit tests)
  L2: the same by a peer that makes its calls in another order
  - self._early_bytes <= most
  + True
ahead-with-twice-the-bound: protocol.peer:PeerMachine._take_room (unit tests)
  L2: the same if larger tensors are ahead, too, which may take the other half of the receiver's memory
  - limits.PLANS_AHEAD_BYTES_MAX // max(1, len(how.order) - 1)
  + 2 * limits.PLANS_AHEAD_BYTES_MAX // max(1, len(how.order) - 1)
wide-sums-are-counted-as-narrow: protocol.peer:_early_bytes (unit tests)
  L2: the same where sums travel around a ring in a wider type
  - tensor.are_sums_wide and is_ring
  + False
scales-are-not-counted: protocol.peer:_early_bytes (unit tests)
  L2: the same with quantised tensors whose blocks are small
  - tensor.is_quantised
  + False
rows-through-others-are-not-counted: protocol.peer:_early_bytes (unit tests)
  L2: the same with an all-to-all whose rows go to all peers
  - spec.kind == CollectiveKind.ALL_TO_ALL and is_ring
  + False
# --- Measurements for users -------------------------------------------------------------------------------------------
measurements-told-to-anybody: protocol.master:MasterMachine._on_message (unit tests)
  S6: a newcomer has the master collect and send what it has measured
  - isinstance(message, MeasurementsRequest) and peer.is_member
  + isinstance(message, MeasurementsRequest)
measurements-of-former-members: protocol.plans:Planner.measurements (unit tests)
  S3: members are told of a list that is no more
  - self._told[0] != epoch
  + False
measurements-told-without-bound: protocol.plans:_told (unit tests)
  B1: the master cannot encode a rate that a peer has reported
  - min(rate, limits.RATE_TOLD_MAX)
  + rate
request-for-measurements-lost: protocol.peer:PeerMachine._send_standing (unit tests)
  L3: a topology() waits for an answer that a dead master owed
  - self._send(MeasurementsRequest())
  + pass
each-asks-the-master: protocol.peer:PeerMachine._on_measurements_called (unit tests)
  B1: a peer with many threads sends as many requests
  - not self._wants_measurements and self.state is not State.CLOSED
  + self.state is not State.CLOSED
"""
)
