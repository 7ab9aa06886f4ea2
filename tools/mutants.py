"""Faults of the protocol, each as small as a slip of the pen, and each of them must be caught: see mutate_protocol.py.

Add one when a mistake was made that could be made again, or when a rule of a machine has none yet. The old text must be
there exactly once; a short one lives longer. Let the fault be one that a person could make and overlook: a condition
forgotten, a comparison turned round, a step left out.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMULATOR = "simulator"
TESTS = "unit tests"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what the code does with it.
        file: below zpccl/protocol/.
        old: the text to replace, which is in the file exactly once.
        new: what stands there instead; it differs in one line.
        breaks: the promise that it breaks (ARCHITECTURE.md), and how.
        finder: who is expected to catch it: SIMULATOR, or TESTS where it takes a case that the simulator does not make.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    finder: str = SIMULATOR


MUTANTS = (
    # --- Collectives --------------------------------------------------------------------------------------------------
    Mutant(
        name="commit-on-a-majority",
        file="collective.py",
        old="elif len(reports) < len(survivors):",
        new="elif 2 * len(reports) < len(survivors):",
        breaks="S1: commits what some survivors have not finished",
    ),
    Mutant(
        name="digests-not-compared",
        file="collective.py",
        old="elif len({report.digest for report in attempt.reports.values()}) <= 1:",
        new="elif reports:",
        breaks="S1: commits results that differ",
    ),
    Mutant(
        name="digests-of-the-lost-not-compared",
        file="collective.py",
        old="elif len({report.digest for report in attempt.reports.values()}) <= 1:",
        new="elif len({report.digest for report in reports}) <= 1:",
        breaks="S1: after a take-over, commits a result that another who had finished and is lost did not have",
        finder=TESTS,
    ),
    Mutant(
        name="attempt-decided-before-all-are-heard",
        file="collective.py",
        old="if not all(peer.is_heard for peer in survivors)",
        new="if not any(peer.is_heard for peer in survivors)",
        breaks="L3: after a take-over, decides what the former master may have decided otherwise",
        finder=TESTS,
    ),
    Mutant(
        name="report-of-another-call-counts",
        file="collective.py",
        old="if attempt is None or attempt.calls.get(peer) != report.call_id:",
        new="if attempt is None or peer not in attempt.calls:",
        breaks="S1: a report that belongs to another call of the peer counts",
        finder=TESTS,
    ),
    Mutant(
        name="lost-voter-waited-for",
        file="collective.py",
        old="for key in list(self.ballots):",
        new="for key in [key for key, ballot in self.ballots.items() if ballot.agreed_ns is not None]:",
        breaks="L1: those who have voted wait for the vote of a peer that is gone",
    ),
    Mutant(
        name="differing-specs-planned",
        file="collective.py",
        old="elif (difference := find_difference(ballot.calls)) is not None:",
        new="elif (difference := find_difference(ballot.calls)) is not None and difference[0] == 'tag':",
        breaks="S1: peers reduce tensors of different sizes or types with each other",
        finder=TESTS,
    ),
    Mutant(
        name="late-fault-not-heard",
        file="collective.py",
        old="if aborted is not None and aborted.calls.get(peer) == report.call_id and not report.ok:",
        new="if aborted is not None and aborted.calls.get(peer) == report.call_id and report.ok:",
        breaks="L2: who says by which link an attempt failed is not heard when another was first to say that it did",
        finder=TESTS,
    ),
    Mutant(
        name="both-ends-cost-twice",
        file="collective.py",
        old="                attempt.faults.add(edge)\n",
        new="                attempt.faults.add(frozenset())\n",
        breaks="L2: a peer is removed for its link although that was given but half the time",
        finder=TESTS,
    ),
    Mutant(
        name="doubts-never-suffice",
        file="paths.py",
        old="self.doubts >= limits.LINK_DOUBTS_MAX",
        new="self.doubts < 0",
        breaks="L2: attempts stall in the same ring again and again where nobody knows why",
        finder=TESTS,
    ),
    Mutant(
        name="one-stall-counts-for-many",
        file="paths.py",
        old="if fault.seen_ns <= begun_ns:",
        new="if fault.seen_ns <= now_ns:",
        breaks="L2: attempts that stall beside each other make a ring doubtful that has stalled once",
        finder=TESTS,
    ),
    # --- Topology -----------------------------------------------------------------------------------------------------
    Mutant(
        name="ring-not-closed",
        file="topology.py",
        old="for i in range(len(order))",
        new="for i in range(len(order) - 1)",
        breaks="L2: a plan starts though the link from the last peer to the first is down",
        finder=TESTS,
    ),
    # --- Rounds -------------------------------------------------------------------------------------------------------
    Mutant(
        name="round-number-not-advanced",
        file="rounds.py",
        old="self._registry.round += 1",
        new="self._registry.round += 0",
        breaks="L3: a vote for a round that is complete waits for ever after a take-over",
    ),
    Mutant(
        name="vote-of-a-lost-member-counts",
        file="rounds.py",
        old="self.calls if self._registry.peers.get(peer.peer_id) is not peer]",
        new="self.calls if not peer.is_member]",
        breaks="S3: a round is complete with the vote of one who is gone in place of a member's",
        finder=TESTS,
    ),
    Mutant(
        name="joiner-with-one-link-admitted",
        file="rounds.py",
        old="and all(self._registry.are_linked(joiner, other)",
        new="and any(self._registry.are_linked(joiner, other)",
        breaks="S6: a joiner that cannot be reached becomes a member, and collectives fail",
    ),
    Mutant(
        name="joiners-waited-for-without-end",
        file="rounds.py",
        old="if len(ready) < len(self._registry.pending()) and not waited:",
        new="if len(ready) < len(self._registry.pending()):",
        breaks="S6: a joiner that never gets its links holds up update_topology",
    ),
    Mutant(
        name="absent-joiner-admitted",
        file="rounds.py",
        old="if joiner.connection is not None and all(",
        new="if all(",
        breaks="S6: a joiner whose connection broke becomes a member, and is waited for",
        finder=TESTS,
    ),
    Mutant(
        name="conflict-across-groups-not-seen",
        file="rounds.py",
        old="and (other.group == peer.group or SYNC not in (call.function, its_call.function))",
        new="and other.group == peer.group",
        breaks="L1: groups that wait in different topology calls wait for each other for ever",
        finder=TESTS,
    ),
    # --- Syncs --------------------------------------------------------------------------------------------------------
    Mutant(
        name="sync-committed-before-all-have-it",
        file="statesync.py",
        old="elif all(peer in transfer.done for peer in survivors):",
        new="elif any(peer in transfer.done for peer in survivors):",
        breaks="S5: a peer that still fetches is told that it holds the state",
    ),
    Mutant(
        name="sync-decided-before-all-are-heard",
        file="statesync.py",
        old="if not all(peer.is_heard for peer in survivors)",
        new="if not any(peer.is_heard for peer in survivors)",
        breaks="L3: after a take-over, decides a sync that the former master may have decided otherwise",
        finder=TESTS,
    ),
    Mutant(
        name="revision-of-a-sync-not-noted",
        file="statesync.py",
        old="self.last_revision[transfer.group] = transfer.revision",
        new="self.last_revision.setdefault(transfer.group, transfer.revision)",
        breaks="S5: a peer that is ahead of the run wins the next election",
        finder=TESTS,
    ),
    Mutant(
        name="answered-sync-offer-counts-again",
        file="statesync.py",
        old="self._rounds.forget(peer, call_id)",
        new="self._rounds.forget(peer, -1)",
        breaks="L3: an offer of a sync that was taken over counts in the next sync as well",
        finder=TESTS,
    ),
    # --- Election -----------------------------------------------------------------------------------------------------
    Mutant(
        name="first-contents-win",
        file="election.py",
        old="winner = max(voters, key=lambda peer: votes[_contents(standing[peer])])",
        new="winner = voters[0]",
        breaks="S5: one peer with wrong contents overwrites those that most hold",
        finder=TESTS,
    ),
    Mutant(
        name="holders-lack-what-is-fetched",
        file="election.py",
        old="if _contents(standing[peer]) == _contents(elected) and fetched <= _holdings(standing[peer])",
        new="if _contents(standing[peer]) == _contents(elected)",
        breaks="L2: a peer is asked for contents that it does not have, and the sync fails again and again",
    ),
    Mutant(
        name="unequal-tensors-overwritten",
        file="election.py",
        old="if own.digest != theirs.digest and (is_behind or not own.allow_content_inequality)",
        new="if own.digest != theirs.digest",
        breaks="S5: contents that may differ are replaced by another peer's",
        finder=TESTS,
    ),
    Mutant(
        name="next-revision-not-expected",
        file="election.py",
        old="expected = last_revision + 1",
        new="expected = last_revision",
        breaks="S5: a peer that has missed a sync sets the others back",
        finder=TESTS,
    ),
    # --- Members ------------------------------------------------------------------------------------------------------
    Mutant(
        name="epoch-not-raised-at-a-loss",
        file="membership.py",
        old="del self._member_counts[peer.group]\n            self.epoch += 1",
        new="del self._member_counts[peer.group]\n            self.epoch += 0",
        breaks="S3: two member lists have one epoch",
    ),
    Mutant(
        name="link-counted-by-one-end",
        file="membership.py",
        old="return bool(one.linked >> other.slot & other.linked >> one.slot & 1)",
        new="return bool(one.linked >> other.slot & 1)",
        breaks="S6: a link that one end has not seen yet, or has lost, counts as up",
        finder=TESTS,
    ),
    Mutant(
        name="slot-passed-on-with-its-links",
        file="membership.py",
        old="other.linked &= ~(1 << peer.slot)",
        new="other.linked &= ~(1 << peer.slot) if peer.is_member else other.linked",
        breaks="S6: a joiner inherits the links of one that was lost",
    ),
    Mutant(
        name="lost-connection-still-known",
        file="membership.py",
        old="self.by_connection.pop(peer.connection, None)",
        new="self.by_connection.get(peer.connection)",
        breaks="S3: what comes on a replaced connection counts, and its end removes the peer",
    ),
    Mutant(
        name="answers-kept-for-one-call",
        file="membership.py",
        old="if len(peer.answers) > limits.ANSWERS_KEPT_MAX:",
        new="if len(peer.answers) > 1:",
        breaks="S1: a decision that got lost cannot be said again",
    ),
    Mutant(
        name="link-key-depends-on-the-asker",
        file="membership.py",
        old='pair = b"".join(sorted((one.peer_id, other.peer_id)))',
        new='pair = b"".join((one.peer_id, other.peer_id))',
        breaks="S7: the two ends of a link have different keys and refuse each other",
        finder=TESTS,
    ),
    # --- Master -------------------------------------------------------------------------------------------------------
    Mutant(
        name="token-not-checked",
        file="master.py",
        old="if not known.is_heard or known.token != hello.token:",
        new="if not known.is_heard:",
        breaks="S7: who knows a peer's id can take its place",
        finder=TESTS,
    ),
    Mutant(
        name="stale-connection-accepted",
        file="master.py",
        old="if hello.connection < known.connection_count:",
        new="if hello.connection < 0:",
        breaks="L2: an old Hello that comes late takes a peer off its new connection",
    ),
    Mutant(
        name="answer-forgotten-one-call-early",
        file="requests.py",
        old="for call_id in [call_id for call_id in peer.answers if call_id < oldest_call_id]:",
        new="for call_id in [call_id for call_id in peer.answers if call_id <= oldest_call_id]:",
        breaks="S1: a call whose answer got lost is begun anew by one peer alone",
        finder=TESTS,
    ),
    Mutant(
        name="withdrawal-before-all-are-heard",
        file="requests.py",
        old="if not self._registry.are_all_heard:  # One of those",
        new="if not self._registry.order:  # One of those",
        breaks="L3: a call is withdrawn that the former master has committed",
        finder=TESTS,
    ),
    Mutant(
        name="absent-members-taken-for-heard",
        file="master.py",
        old="absent.is_heard, absent.disconnected_ns = False, now_ns",
        new="absent.is_heard, absent.disconnected_ns = True, now_ns",
        breaks="L3: members that look for the new master are removed as if they had died",
        finder=TESTS,
    ),
    Mutant(
        name="epoch-of-the-dead-master-used-again",
        file="master.py",
        old="self.registry.epoch = max(history.epoch + 1, self.incarnation << 32)",
        new="self.registry.epoch = history.epoch + 1",
        breaks="S3: an epoch that the former master announced to some gets another member list",
    ),
    Mutant(
        name="incarnation-not-raised",
        file="master.py",
        old="incarnation + 1 + salt",
        new="incarnation",
        breaks="S3: two masters give the same attempt ids, and peers obey both",
    ),
    Mutant(
        name="attempt-ids-begin-anew",
        file="master.py",
        old="return (self.incarnation << 32) | self._attempt_count",
        new="return self._attempt_count",
        breaks="S4: ids of attempts repeat after a take-over, and old frames are taken for new ones",
    ),
    Mutant(
        name="key-of-a-report-not-checked",
        file="master.py",
        old="if isinstance(event.message, (Hello, Report)):",
        new="if isinstance(event.message, Hello):",
        breaks="S7: with a key of its own, a peer reports for another, and takes its place at a new master",
        finder=TESTS,
    ),
    Mutant(
        name="calls-in-flight-without-bound",
        file="requests.py",
        old="if call_id not in peer.open_calls and len(peer.open_calls) >= limits.CALLS_IN_FLIGHT_MAX:",
        new="if call_id in peer.open_calls and len(peer.open_calls) >= limits.CALLS_IN_FLIGHT_MAX:",
        breaks="B1: one peer can make the master keep calls without limit",
        finder=TESTS,
    ),
    Mutant(
        name="witness-of-no-link-believed",
        file="master.py",
        old="or not other.linked >> peer.slot & 1:",
        new="or not peer.linked >> peer.slot & 1:",
        breaks="L1: a member that lost both its connections is not given up at once",
        finder=TESTS,
    ),
    # --- Peer ---------------------------------------------------------------------------------------------------------
    Mutant(
        name="own-master-not-obeyed-again",
        file="peer.py",
        old="message.incarnation < ",
        new="message.incarnation <= ",
        breaks="L2: a peer that has come back gives its master up for lost",
        finder=TESTS,
    ),
    Mutant(
        name="replaced-master-obeyed",
        file="peer.py",
        old="if message.run_id != self.run_id or message.incarnation <",
        new="if message.run_id != self.run_id and message.incarnation <",
        breaks="S3: a peer follows a master that was replaced, or that leads another run",
        finder=TESTS,
    ),
    Mutant(
        name="older-member-list-taken",
        file="peer.py",
        old="if message.epoch < self.epoch or",
        new="if message.epoch == self.epoch or",
        breaks="S3: a peer goes back to an older member list",
        finder=TESTS,
    ),
    Mutant(
        name="stale-plan-started",
        file="peer.py",
        old="if plan.attempt_id <= self._seen_attempt_id:\n            if call",
        new="if plan.attempt_id < self._seen_attempt_id - 1:\n            if call",
        breaks="S4: a plan that comes after a later one is started, its frames dropped as stale already",
    ),
    Mutant(
        name="commit-without-the-result",
        file="peer.py",
        old="isinstance(call, ReduceCall) and not (call.report is not None and call.report.ok):",
        new="isinstance(call, ReduceCall) and call.report is None:",
        breaks="S1: a peer that has no result takes part in a commit",
        finder=TESTS,
    ),
    Mutant(
        name="withdrawal-not-repeated",
        file="peer.py",
        old="            if call.withdrawn is not None:\n",
        new="            if call.withdrawn is not None and call.report is not None:\n",
        breaks="L1: a withdrawal that got lost is not said again, and the call waits on",
        finder=TESTS,
    ),
    Mutant(
        name="newest-call-named-as-oldest",
        file="peer.py",
        old="return min(self.calls, default=self._next_call_id)",
        new="return max(self.calls, default=self._next_call_id)",
        breaks="S1: the master forgets answers that the peer has not got",
    ),
    Mutant(
        name="broken-link-not-dialled-again",
        file="peer.py",
        old="link.retry_ns = now_ns + (0 if link.is_up else pause_ns)",
        new="link.retry_ns = None if link.is_up else now_ns + pause_ns",
        breaks="L2: a link that broke stays down",
    ),
    Mutant(
        name="absence-of-the-master-counted-anew",
        file="peer.py",
        old="if self._deadline_ns is None:",
        new="if self.state is not State.CONNECTING:",
        breaks="L1: a master that breaks every connection is waited for without end",
        finder=TESTS,
    ),
    # --- Memory -------------------------------------------------------------------------------------------------------
    Mutant(
        name="answered-round-forgotten",
        file="memory.py",
        old="self.round_answered = max(self.round_answered, number)",
        new="self.round_answered = max(self.round_answered, number - 1)",
        breaks="L3: a vote for the next round gets the answer of the last one",
    ),
    Mutant(
        name="round-of-an-answer-not-remembered",
        file="memory.py",
        old="        self.on_round_heard(number, value)\n",
        new="        self.on_round_heard(number - 1, value)\n",
        breaks="L3: a new master does not know of a round whose answer some have, and others wait for ever",
    ),
    Mutant(
        name="outcome-with-fewer-participants-kept",
        file="memory.py",
        old="outcome = known if len(known.calls) >= len(outcome.calls) else outcome",
        new="outcome = known if len(known.calls) < len(outcome.calls) else outcome",
        breaks="L3: a new master does not know whom a decision concerns",
        finder=TESTS,
    ),
    Mutant(
        name="failed-sync-remembered-as-the-last",
        file="memory.py",
        old="if isinstance(call, SyncCall) and outcome.committed and is_newer:",
        new="if isinstance(call, SyncCall) and is_newer:",
        breaks="S5: after a take-over the revision of a sync that failed counts",
        finder=TESTS,
    ),
    # --- Recovery -----------------------------------------------------------------------------------------------------
    Mutant(
        name="older-member-list-adopted",
        file="recovery.py",
        old="report.epoch > self.epoch",
        new="not self.members",
        breaks="S3: a new master goes on with the list that it heard of first",
        finder=TESTS,
    ),
    Mutant(
        name="decided-attempt-restored",
        file="recovery.py",
        old="for attempt_id in sorted(found) if attempt_id not in self.outcomes]",
        new="for attempt_id in sorted(found)]",
        breaks="L3: an attempt whose end is known runs again and holds up its tag",
    ),
    Mutant(
        name="report-of-another-token-taken",
        file="recovery.py",
        old="if known.token != report.hello.token:",
        new="if known.token != known.token:",
        breaks="S7: a stranger's report replaces that of the peer whose id it claims",
        finder=TESTS,
    ),
    Mutant(
        name="older-report-taken",
        file="recovery.py",
        old="if known.connection > report.hello.connection:",
        new="if known.connection < report.hello.connection:",
        breaks="L3: what a peer said on a broken connection counts, and its newer report does not",
        finder=TESTS,
    ),
    Mutant(
        name="run-of-fewer-peers-chosen",
        file="recovery.py",
        old="key=lambda run_id: (votes[run_id], epochs[run_id], run_id)",
        new="key=lambda run_id: (epochs[run_id], votes[run_id], run_id)",
        breaks="S3: one lost peer of another run decides which run a new master leads",
        finder=TESTS,
    ),
    Mutant(
        name="admission-without-the-adopted-members",
        file="recovery.py",
        old="bool(self.adopted) and self.adopted <= theirs",
        new="bool(self.adopted)",
        breaks="S3: a peer of a list that left members out becomes a member beside them",
        finder=TESTS,
    ),
    Mutant(
        name="late-reports-not-waited-for",
        file="recovery.py",
        old="not all(self._greeted.values())",
        new="not any(self._greeted.values())",
        breaks="L3: a new master goes on while a peer that said Hello still knows of a newer list",
        finder=TESTS,
    ),
    # --- Several masters ----------------------------------------------------------------------------------------------
    Mutant(
        name="half-is-a-quorum",
        file="quorum.py",
        old="(not members or min(members) in present))",
        new="True)",
        breaks="S3: two masters, each with half of the members, both lead",
        finder=TESTS,
    ),
    Mutant(
        name="base-forgotten",
        file="quorum.py",
        old="self.base = frozenset(base) or self._members",
        new="self.base = self._members",
        breaks="S3: a list is left before those who may follow another master are outvoted",
        finder=TESTS,
    ),
    Mutant(
        name="loss-without-a-quorum",
        file="master.py",
        old="if not consents and not self._may_lose(peer):\n            return self._step_down(",
        new="if not consents and not self.is_gathering and False:\n            return self._step_down(",
        breaks="S3: a master goes on with a few members while another leads the others",
    ),
    Mutant(
        name="decided-before-established",
        file="collective.py",
        old="for peer in survivors) or not self._registry.is_established:",
        new="for peer in survivors):",
        breaks="S1: a list that is void decides an attempt otherwise than the other master",
        finder=TESTS,
    ),
    Mutant(
        name="reports-of-the-gone-count",
        file="recovery.py",
        old="if event.connection == connection and report.hello.master_count > 1 and",
        new="if event.connection == connection and report.hello.master_count > 99 and",
        breaks="S3: a member is counted by two masters",
        finder=TESTS,
    ),
    Mutant(
        name="promise-not-kept",
        file="peer.py",
        old="message.incarnation < max(self.incarnation, self._promised):",
        new="message.incarnation < self.incarnation:",
        breaks="S3: a member that has reported to one master obeys an earlier one",
        finder=TESTS,
    ),
    Mutant(
        name="begins-a-run-beside-another",
        file="master_list.py",
        old="(self.index == 0 and len(self._without_run) == len(self.addresses))",
        new="self.index == 0",
        breaks="S3: a newcomer begins a run of its own at an idle master",
        finder=TESTS,
    ),
    Mutant(
        name="cut-off-master-removes-all",
        file="master.py",
        old="if peer.is_member and self._is_cut_off(now_ns):",
        new="if not peer.is_member and self._is_cut_off(now_ns):",
        breaks="L3: a master that was cut off comes back and knows nobody",
        finder=TESTS,
    ),
)
