"""Collectives, as the master sees them: votes, plan, reports, decision.

A collective is identified by its tag within a group. Its states:

    voting --all voted--> agreed --links allow a plan--> running --all have finished--> committed
       |                    |  ^                            |
       | specs differ,      |  | links stay down: those     | a peer failed, a peer was lost before all
       | alone, withdrawn,  |  | cut off are removed        | others had finished, digests differ, withdrawn
       | [1]                |  |                            |
       v                    `--'                            v
    answered                                             aborted

    [1] The links connect all members, but do not allow a plan of this kind, and do not come up in time.

The plan of an all-reduce is the quickest that plans.py finds with what is known of the network, without links that are
down or have failed lately: a ring, an exchange or trees, or the algorithm that all voters ask for. Other collectives
use a ring: in order of admission, or in another order if that ring needs such a link (paths.py) or the slowest path of
the other is quicker. The ring of a broadcast begins with its root. If there is no ring, they use trees. An all-to-all
uses the links between all pairs; if one is missing, it is planned like an all-gather. If every plan needs links that
are down, the collective waits for them. If they do not come up in time, the master removes members that are cut off, so
that the others can continue; if no member is cut off, it refuses the calls. It refuses later calls at once, until a
link or the member list changes. A barrier has no plan: it is committed when all have voted.

With each plan and each commit, the master plans the next attempts ahead: a peer that makes the same call again starts
the first of them at once, says so in its vote, and waits for no other peer. If the votes agree and all have started
that attempt, it runs. Otherwise the master plans another attempt, and its plan ends the first one at the peers that
have started it. The master keeps reports that come before the votes of others. If another plan has become better, a
commit says that the attempts ahead are void.

A collective that is in voting stops waiting for a lost member. A running one that loses a participant is aborted unless
all others have finished. If its participants tell each other their digests (../commit.py), it continues instead, until
one of the others fails or all of them have finished. It is committed if all finish with equal results. The others may
commit it before the master does, and make their next call at the same tag.

For take-overs, and decisions while the member list is not committed, see ../operation.py.

Answers are kept per peer until the peer acknowledges them (`oldest_call_id`), so every message may come twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.commit import tells_digests
from zpccl.protocol.counts import AbortReason
from zpccl.protocol.membership import Outbox, Peer, Registry, names, some_names
from zpccl.protocol.messages import CollectiveSpec, Decision, Plan, Reducing, Report, Running, Vote, cut, name_of
from zpccl.protocol.operation import COLLECTIVE, Attempt, Key, Kind, Operation, Operations, Verdict, key_of
from zpccl.protocol.paths import Paths, cost_of
from zpccl.protocol.plans import Planner, wire_bytes
from zpccl.protocol.rings import neighbours_of, plan_edges
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp


@dataclass(slots=True, eq=False, kw_only=True)
class Reduction(Attempt):
    """A running attempt at a collective."""

    spec: CollectiveSpec
    how: Reducing
    specs: dict[Peer, CollectiveSpec] = field(default_factory=dict)
    """The arguments of each participant, in the order of the plan; empty after a take-over."""
    epoch: int = -1
    """An epoch in which all of `order` were members: while it lasts, none of them is lost."""
    reports: dict[Peer, Report] = field(default_factory=dict)
    is_plan_known: bool = True
    """False if another master has made the plan and no peer has reported it: `how` is what this master would plan."""
    count: int = 0
    """How many took part, if lost participants are not known; else 0."""
    faults: set[frozenset[Peer]] = field(default_factory=set)
    """The links that caused the failure, as the peers at their ends report."""

    @property
    def group(self) -> int:
        """The group of the participants."""
        assert self.key.group is not None
        return self.key.group

    @property
    def algorithm(self) -> int:
        """The algorithm of the plan."""
        return self.how.algorithm

    @property
    def edges(self) -> list[tuple[Peer, Peer]]:
        """The links that it uses."""
        peers = {peer.peer_id: peer for peer in self.calls}
        edges = [(peers[one], peers[other]) for one, other in plan_edges(self.how)]
        # In the ring of a broadcast, the last peer sends nothing to the root.
        is_open = self.spec.kind == CollectiveKind.BROADCAST and self.algorithm == Algorithm.RING
        return edges[:-1] if is_open else edges

    @property
    def link_count(self) -> int:
        """Element count of a ring that sends on each link what this attempt sends there at least."""
        is_shared = self.algorithm in (Algorithm.DIRECT, Algorithm.TREES)
        return max(1, self.spec.count // max(1, len(self.order) - 1)) if is_shared else self.spec.count

    def are_neighbours(self, one: Peer, other: Peer) -> bool:
        """True if it uses the link between two participants."""
        return other.peer_id in neighbours_of(self.how, one.peer_id)


@dataclass(slots=True, eq=False)
class PlannedAhead:
    """The attempts that are planned ahead at one tag, all in the same way."""

    attempt_ids: tuple[int, ...]
    specs: dict[Peer, CollectiveSpec]
    """The participants in the order of the plan, with the arguments of each."""
    how: Reducing


class Collectives(Kind[Reduction]):
    """All collectives of the run."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        paths: Paths,
        operations: Operations,
        link_wait_ns: int,
    ) -> None:
        self._registry = registry
        self._paths = paths
        self._outbox = outbox
        self._operations = operations
        self.planner = Planner(registry, paths)
        operations.add_kind(self, COLLECTIVE)
        self.wait_ns = link_wait_ns
        self._voted: dict[Key, None] = {}  # Operations with votes since their last evaluation.
        self._aborted: dict[int, Reduction] = {}  # The last attempts that failed, their reports removed.
        self._ahead: dict[Key, PlannedAhead] = {}  # The newest last.
        self._unexplained: set[int] = set()  # Aborted attempts that stalled, and for which no peer has named a link.
        self._in_vain: dict[int, tuple[int, ...]] = {}  # By group: its links when a call had waited in vain for more.

    def refusal_of(self, peer: Peer, vote: Vote, running: Attempt | None) -> Decision | None:
        """Refuses a second call of a peer at one tag, unless its peers may have committed the first."""
        if not isinstance(running, Reduction) or peer not in running.calls:
            return None
        report = running.reports.get(peer)
        if report is not None and report.ok:
            return None
        reason = f"tag {running.key.tag} is in use by a running collective of this peer"
        return Decision(vote.call_id, Result.INVALID_USAGE, reason=reason)

    def on_voted(self, operation: Operation, now_ns: int) -> None:
        """The operation may be complete."""
        del now_ns
        self._voted[operation.key] = None

    def evaluate(self, now_ns: int) -> None:
        """Plans or refuses the operations that have got votes, if they are complete."""
        voted, self._voted = self._voted, {}
        for key in voted:
            if (operation := self._operations.pending.get(key)) is not None:
                self._evaluate(operation, now_ns)

    def on_vote_again(self, attempt: Reduction, peer: Peer, vote: Vote) -> None:
        """The plan is sent again, unless the peer has started the attempt ahead of it."""
        if vote.ahead != attempt.attempt_id:
            self._send_plan(attempt, (peer,))

    def on_late_report(self, peer: Peer, report: Report) -> None:
        """A late report of a failed attempt may name the link at fault."""
        aborted = self._aborted.get(report.attempt_id)
        if aborted is not None and aborted.calls.get(peer) == report.call_id and not report.ok:
            self._blame(aborted, peer, report.fault)

    def on_report(self, attempt: Reduction, peer: Peer, report: Report) -> None:
        """A participant has finished or failed."""
        attempt.reports[peer] = report
        if not report.ok:
            self._blame(attempt, peer, report.fault)
        is_waiting = len(attempt.reports) < len(attempt.calls) and attempt.epoch == self._registry.epoch
        if not report.ok or not is_waiting:
            self._operations.decide(attempt)

    def on_members_changed(self, now_ns: int) -> None:
        """The member list has changed: operations stop waiting for lost members."""
        self.planner.on_members_changed()
        self._in_vain.clear()
        for attempt in self._operations.running_of(COLLECTIVE):
            self._operations.decide(attempt)
        for operation in self._operations.of(COLLECTIVE):
            self._evaluate(operation, now_ns)

    def on_links_changed(self, now_ns: int) -> None:
        """A link came up or went down: plans that wait for links are tried again."""
        for operation in self._operations.of(COLLECTIVE):
            if operation.agreed_ns is not None:
                self._evaluate(operation, now_ns)

    def tick(self, now_ns: int) -> None:
        """Suspicion of a link may have expired: plans that wait for links are tried again."""
        self.on_links_changed(now_ns)

    def overdue(self, now_ns: int) -> list[int | None]:
        """The groups in which collectives have waited too long for links."""
        return [
            operation.key.group
            for operation in self._operations.of(COLLECTIVE)
            if operation.agreed_ns is not None and now_ns - operation.agreed_ns >= self.wait_ns
        ]

    def wait_again(self, now_ns: int) -> None:
        """The members that are cut off must stay: restarts the wait of all plans that wait for links."""
        for operation in self._operations.of(COLLECTIVE):
            operation.agreed_ns = None if operation.agreed_ns is None else now_ns

    def _evaluate(self, operation: Operation, now_ns: int) -> None:
        """Plans or refuses an operation if all have voted."""
        key, votes = operation.key, operation.votes
        if not self._operations.is_complete(operation):
            operation.agreed_ns = None
            return
        if not self._registry.is_committed:
            return  # A wait for links goes on: lists change for members of other groups, too.
        specs = _specs_of(votes)
        if self._run_ahead(operation, specs, now_ns):
            operation.agreed_ns = None  # It may have waited for links before.
            return
        if len(votes) == 1:
            self._operations.refuse(key, Result.TOO_FEW_PEERS, "this peer is alone in its group")
        elif (needed := max(spec.min_world_size for spec in specs.values())) > len(votes):
            reason = f"{len(votes)} peers are in the group, and min_world_size is {needed}; wait for others"
            self._operations.refuse(key, Result.TOO_FEW_PEERS, reason)
        elif (rows := max(spec.rows for spec in specs.values())) > len(votes):
            reason = (
                f"tag {key.tag}: send has rows for {rows} peers, but the group has only {len(votes)}; make new rows"
            )
            self._operations.refuse(key, Result.RANK_CONNECTION_LOST, reason)
        elif (difference := find_difference(specs)) is not None:
            name, values = difference
            wrong = "one peer must be the root" if name == "is_root" else f"peers differ in {name}"
            reason = f"tag {key.tag}: {wrong}: {'; '.join(values)}"
            self._operations.refuse(key, Result.INVALID_USAGE, reason, name, values)
        elif next(iter(specs.values())).kind == CollectiveKind.BARRIER:
            self._open_barrier(key)
        else:
            self._plan(operation, specs, now_ns)

    def _open_barrier(self, key: Key) -> None:
        """Commits a barrier. The decision lists all members: a new master may learn it from one member's report."""
        self._outbox.counts.commits += 1
        votes = self._operations.take(key)
        members = self._operations.members_of(key)
        order = tuple(peer.peer_id for peer in members)
        calls = tuple(votes[peer].call_id for peer in members)
        attempt_id = self._operations.next_attempt_id()
        for peer, call_id in zip(members, calls, strict=True):
            self._outbox.answer(
                peer, Decision(call_id, Result.SUCCESS, len(members), attempt_id=attempt_id, order=order, calls=calls)
            )

    def _plan(self, operation: Operation, specs: dict[Peer, CollectiveSpec], now_ns: int) -> None:
        key, members = operation.key, self._operations.members_of(operation.key)
        self._doubt(members[0].group, now_ns)
        how = self._how(specs, members, now_ns)
        if how is None:
            if operation.agreed_ns is None:
                operation.agreed_ns = now_ns
            group, links = members[0].group, tuple(peer.linked for peer in members)
            has_waited = now_ns - operation.agreed_ns >= self.wait_ns or self._in_vain.get(group) == links
            if has_waited and not self._paths.surplus(members, now_ns):
                self._in_vain[group] = links
                reason = _no_plan(next(iter(specs.values())), self._paths.broken(members, now_ns))
                self._operations.refuse(key, Result.RANK_CONNECTION_FAILED, reason)
            return
        self._operations.take(key)
        self._ahead.pop(key, None)  # The peers that get this plan drop them, too.
        by_id = {peer.peer_id: peer for peer in members}
        order = [by_id[peer_id] for peer_id in how.order]
        attempt_id, in_order = self._operations.next_attempt_id(), {peer: specs[peer] for peer in order}
        operation.reports.clear()
        attempt = self._begin(attempt_id, in_order, how, operation, now_ns)
        self._send_plan(attempt, order, self._top_up(attempt))

    def _how(self, specs: dict[Peer, CollectiveSpec], members: Sequence[Peer], now_ns: int) -> Reducing | None:
        """The plan of a collective of all members; None if the links allow none.

        If an all-to-all lacks a link, its rows go to all members, through others, like those of an all-gather.
        """
        spec, ring = next(iter(specs.values())), self._paths.order(members, now_ns)
        if spec.kind == CollectiveKind.ALL_TO_ALL and self._paths.broken(members, now_ns):
            spec = structs.replace(spec, kind=CollectiveKind.ALL_GATHER)
        order = _in_order(list(members) if ring is None else ring, spec.kind, specs)
        return self.planner.how(spec, order, now_ns, is_ring=ring is not None)

    def _begin(
        self, attempt_id: int, specs: dict[Peer, CollectiveSpec], how: Reducing, operation: Operation, now_ns: int
    ) -> Reduction:
        key, votes = operation.key, operation.votes
        assert self._operations.running_at(key) is None, "its participants cannot have voted"
        attempt = Reduction(
            attempt_id=attempt_id,
            key=key,
            calls={peer: votes[peer].call_id if peer in votes else 0 for peer in specs},
            begun_ns=now_ns,
            spec=next(iter(specs.values())),
            specs=specs,
            how=how,
            epoch=self._registry.epoch if votes.keys() == specs.keys() else -1,
            reports=operation.reports,
        )
        self._operations.run(attempt)
        self._outbox.counts.plans += 1
        return attempt

    # --- Plans ahead ------------------------------------------------------------------------------------------------

    def plan_ahead(self, attempt: Reduction) -> tuple[int, ...] | None:
        """Plans the next attempts, if they would be like this one.

        If not, the attempts that are ahead already are void. They are kept until another plan replaces them: all peers
        may have started one of them before they hear that it is void.
        """
        now_ns, members = self._outbox.now_ns, self._operations.members_of(attempt.key)
        is_like_it = attempt.is_plan_known and attempt.specs.keys() == set(members)
        how = self._how(attempt.specs, members, now_ns) if is_like_it else None
        if how is None:
            self._ahead.pop(attempt.key, None)
            return ()
        return self._top_up(attempt) if attempt.how == how else None

    def _top_up(self, attempt: Reduction) -> tuple[int, ...]:
        """Plans as many attempts like this one as may be ahead at its tag; returns the new ones."""
        known = self._ahead.pop(attempt.key, None)
        if wire_bytes(attempt.spec) > limits.PLAN_AHEAD_BYTES_MAX:
            return ()
        if len(self._ahead) >= limits.PLANS_AHEAD_MAX:
            del self._ahead[next(iter(self._ahead))]
        ids = known.attempt_ids if known is not None else ()
        new = tuple(self._operations.next_attempt_id() for _ in range(limits.PLANS_AHEAD_AT_TAG_MAX - len(ids)))
        self._ahead[attempt.key] = PlannedAhead(ids + new, attempt.specs, attempt.how)
        return new

    def _run_ahead(self, operation: Operation, specs: dict[Peer, CollectiveSpec], now_ns: int) -> bool:
        """Runs the attempt that all voters have started ahead.

        If some of its participants are gone, they may have committed it together with the voters. Then it runs once all
        voters have reported that they have its result, and is given up if one of them reports a failure.

        Returns:
            False if there is no such attempt, or it is given up.
        """
        votes, reports, known = operation.votes, operation.reports, self._ahead.get(operation.key)
        attempt_id = next(iter(votes.values())).ahead
        is_of_all = attempt_id > 0 and all(vote.ahead == attempt_id for vote in votes.values())
        if not is_of_all or not all(report.ok for report in reports.values()):
            return False
        if known is not None and attempt_id in known.attempt_ids:
            place = known.attempt_ids.index(attempt_id)
            ahead = PlannedAhead(known.attempt_ids[place + 1 :], known.specs, known.how)
        elif self._operations.was_issued(attempt_id) and find_difference(specs) is None:
            how = self.planner.how(next(iter(specs.values())), list(specs), now_ns)
            if how is None:
                return False
            ahead, known = PlannedAhead((), specs, how), None
        else:
            return False
        if any(spec != ahead.specs.get(peer) for peer, spec in specs.items()):
            return False  # Honest peers have started it only with these arguments.
        if known is None or votes.keys() != known.specs.keys():
            if not tells_digests(next(iter(specs.values())), len(specs)):
                return False
            if len(reports) < len(votes):
                return True
            if len(_digests_of(reports)) > 1:
                return False  # So no peer has committed it.
        self._ahead[operation.key] = ahead
        self._operations.take(operation.key)
        self._doubt(next(iter(votes)).group, now_ns)
        attempt = self._begin(attempt_id, ahead.specs, ahead.how, operation, now_ns)
        attempt.has_plan_everywhere = False  # No participant knows the calls of the others.
        attempt.is_plan_known = known is not None
        attempt.count = 0 if known is not None else max(report.count for report in reports.values())
        self._operations.decide(attempt)
        return True

    def _send_plan(self, attempt: Reduction, peers: Iterable[Peer], ahead: tuple[int, ...] = ()) -> None:
        calls = tuple(attempt.calls.values())
        self._outbox.broadcast(peers, Plan(attempt.attempt_id, calls, attempt.how, ahead))

    # --- Taking over ------------------------------------------------------------------------------------------------

    def restore(self, running: Running, reporter: Peer, calls: dict[Peer, int]) -> None:
        """Continues an attempt of a former master. All participants have the same plan, so one report suffices."""
        del reporter
        plan, how, spec = running.plan, running.plan.how, running.spec
        if plan.attempt_id in self._operations.running or not isinstance(how, Reducing) or spec is None:
            return None
        ahead = False
        for peer in self._operations.present(calls):  # Some calls may have an answer, or a later attempt.
            if calls[peer] in peer.answers or self._operations.attempt_of(peer, calls[peer]) is not None:
                ahead = True
                del calls[peer]
        present = self._operations.present(calls)
        if not present:
            return None
        attempt = Reduction(attempt_id=plan.attempt_id, key=key_of(present[0], spec), calls=calls, spec=spec, how=how)
        for peer in present:
            self._operations.forget(peer, calls[peer])
            peer.open_calls.setdefault(calls[peer], attempt.key)
        self._operations.run(attempt)
        if ahead:  # Without these peers the others cannot finish this attempt.
            verdict = Verdict(Result.RANK_CONNECTION_LOST, "another master has started a new attempt")
            return self._operations.end(attempt, verdict)
        self._send_plan(attempt, present)
        return self._operations.decide(attempt)

    def send_plans(self, late: Peer) -> None:
        """Sends plans of a former master that a late participant may have missed, before any of this one.

        After a plan of a later term, its engine would drop what others have sent it for the earlier ones.
        """
        for attempt in self._operations.running.values():
            if isinstance(attempt, Reduction) and late in attempt.calls:
                self._send_plan(attempt, (late,))

    # --- Decisions --------------------------------------------------------------------------------------------------

    def _blame(self, attempt: Reduction, peer: Peer, fault: bytes | None) -> None:
        """Records a failure of the link between a peer and its neighbour, once for both ends of an attempt."""
        neighbour = next((other for other in attempt.order if other.peer_id == fault), None)
        if neighbour is None or not attempt.are_neighbours(peer, neighbour):
            return
        edge, now_ns = frozenset((peer, neighbour)), self._outbox.now_ns
        if edge not in attempt.faults:
            attempt.faults.add(edge)
            self._unexplained.discard(attempt.attempt_id)
            cost_ns = cost_of(edge, attempt.begun_ns, now_ns)
            self._paths.blame(peer, neighbour, cost_ns, attempt.link_count, now_ns)

    def _remember_failure(self, attempt: Reduction) -> None:
        """Keeps a failed attempt. Peers stall at the same time, so a report on its way may name the link at fault."""
        began_ns, now_ns = attempt.begun_ns, self._outbox.now_ns
        attempt.reports.clear()
        self._aborted[attempt.attempt_id] = attempt
        if not attempt.faults and began_ns is not None and now_ns - began_ns >= limits.UNEXPLAINED_STALL_MIN_NS:
            self._unexplained.add(attempt.attempt_id)
        if len(self._aborted) > limits.ABORTED_ATTEMPTS_KEPT_MAX:
            oldest = next(iter(self._aborted))
            del self._aborted[oldest]
            self._unexplained.discard(oldest)

    def _doubt(self, group: int, now_ns: int) -> None:
        """The members of a group have voted again, each after its report: no report will explain an earlier stall."""
        for attempt_id in sorted(self._unexplained):
            attempt = self._aborted[attempt_id]
            if attempt.group == group and attempt.begun_ns is not None:
                self._unexplained.discard(attempt_id)
                self._paths.doubt(attempt.edges, attempt.begun_ns, attempt.link_count, now_ns)

    def judge(self, attempt: Reduction, survivors: list[Peer]) -> Verdict | None:
        """Commits if all survivors have finished with the same result; aborts on a failure or a difference.

        If participants do not tell each other their digests, it also aborts on a loss.
        """
        failed = [report for report in attempt.reports.values() if not report.ok]
        lost = tuple(peer for peer in attempt.calls if peer not in survivors)
        if failed:
            faults = {report.fault for report in failed}
            blamed = tuple(peer for peer in attempt.calls if peer in lost or peer.peer_id in faults)
            return Verdict(Result.RANK_CONNECTION_LOST, failed[0].reason or "a peer failed", blamed)
        if not all(peer in attempt.reports for peer in survivors):
            if not lost or tells_digests(attempt.spec, len(attempt.calls)):
                return None  # A lost peer may have committed it with peers that have not reported yet.
            return Verdict(Result.RANK_CONNECTION_LOST, f"lost {names(lost)}", lost)
        if len(_digests_of(attempt.reports)) <= 1:
            return Verdict(is_known=not lost and tells_digests(attempt.spec, len(attempt.calls)))
        # Reports of lost peers count too: if two results differ, one is wrong, and it may be a survivor's.
        digests = ", ".join(
            f"{peer.name}: {report.digest:016x}"
            + (f", but another peer told it {report.other_digest:016x}" if report.other_digest is not None else "")
            for peer, report in attempt.reports.items()
        )
        return Verdict(Result.INTERNAL_ERROR, f"results differ: {digests}")

    def value_of(self, attempt: Reduction) -> int:
        """The number of participants."""
        return max(attempt.count, len(attempt.calls))

    def on_ended(self, attempt: Reduction, verdict: Verdict, survivors: list[Peer]) -> None:
        """Updates the counts, what is known of the links, and the speeds."""
        if not verdict.is_commit:
            self._ahead.pop(attempt.key, None)  # The peers that hear of it drop them, too.
        if verdict.is_commit:
            self._outbox.counts.commits += 1
            if self._paths.has_faults:  # It uses up to N (N - 1) / 2 links.
                self._paths.trust(attempt.edges, attempt.link_count)
            peers, now_ns = attempt.order, self._outbox.now_ns
            return self.planner.learn(attempt.spec, attempt.how, peers, attempt.reports, now_ns)
        have_all_survived = len(survivors) == len(attempt.calls)
        has_failed = not all(report.ok for report in attempt.reports.values())
        if verdict.result is Result.INTERNAL_ERROR:
            reason = AbortReason.RESULTS_DIFFER
        elif not have_all_survived:
            reason = AbortReason.PEER_LOST
        else:
            reason = AbortReason.FAILED if has_failed else AbortReason.WITHDRAWN
        self._outbox.counts.aborts[reason] += 1
        if has_failed and have_all_survived:
            self._remember_failure(attempt)
        return None

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self._unexplained <= self._aborted.keys() and self._operations.running.keys().isdisjoint(self._aborted)
        assert len(self._aborted) <= limits.ABORTED_ATTEMPTS_KEPT_MAX


def _digests_of(reports: dict[Peer, Report]) -> set[int]:
    """The results of an attempt: those that participants report, and those that others have told them."""
    told = {report.other_digest for report in reports.values() if report.other_digest is not None}
    return {report.digest for report in reports.values()} | told


def _specs_of(votes: dict[Peer, Vote]) -> dict[Peer, CollectiveSpec]:
    return {peer: vote.spec for peer, vote in votes.items() if isinstance(vote.spec, CollectiveSpec)}


def find_difference(calls: dict[Peer, CollectiveSpec]) -> tuple[str, tuple[str, ...]] | None:
    """The first argument in which specs differ, and a text for each of its values with the peers that passed it.

    `is_root` of a broadcast is compared in another way: exactly one peer must be the root.
    """
    specs = list(calls.values())
    is_broadcast = specs[0].kind == CollectiveKind.BROADCAST
    if not is_broadcast and all(spec == specs[0] for spec in specs):
        return None
    for name in _COMPARED:
        values = _values(calls, name)
        if len(values) > 1:
            return name, values
    if is_broadcast and sum(spec.is_root for spec in specs) != 1:
        return "is_root", _values(calls, "is_root")
    return None


def _in_order(order: list[Peer], kind: int, specs: dict[Peer, CollectiveSpec]) -> list[Peer]:
    """The order of a plan, from that of the ring."""
    if kind == CollectiveKind.BROADCAST:
        root = next(index for index, peer in enumerate(order) if specs[peer].is_root)
        return order[root:] + order[:root]
    return sorted(order, key=lambda peer: peer.peer_id) if kind == CollectiveKind.ALL_TO_ALL else order


def _no_plan(spec: CollectiveSpec, broken: list[tuple[Peer, Peer]]) -> str:
    """Why the links allow no plan, though they connect all peers."""
    one, other = broken[0]
    more = f", and those of {len(broken) - 1} other pairs" if len(broken) > 1 else ""
    what = name_of(CollectiveKind, spec.kind).lower().replace("_", "-")
    needs = "around a ring of all peers"
    if spec.kind == CollectiveKind.ALL_REDUCE:
        needs += ", or between one peer and all others"  # Only wide sums come here: for others, any trees would do.
    down = f"the connection between {one.name} and {other.name} is down{more}"
    return f"this {what} needs data connections {needs}; {down}"


_COMPARED = ("kind", *(name for name in CollectiveSpec.__struct_fields__ if name not in ("kind", "is_root")))
"""The kind comes first: where it differs, other arguments differ because of it."""


def _values(calls: dict[Peer, CollectiveSpec], name: str) -> tuple[str, ...]:
    voters: dict[int, list[Peer]] = {}
    for peer, spec in calls.items():
        voters.setdefault(getattr(spec, name), []).append(peer)
    rest = len(voters) - limits.MISMATCH_VALUES_MAX
    shown = list(voters.items())[: limits.MISMATCH_VALUES_MAX - (rest > 0)]
    texts = [f"{_describe(name, value)} from {some_names(who, _NAMES_BYTES_MAX)}" for value, who in shown]
    if rest > 0:
        texts.append(f"{rest + 1} other values")
    return tuple(cut(text, limits.MISMATCH_VALUE_BYTES_MAX) for text in texts)


_NAMES_BYTES_MAX = limits.MISMATCH_VALUE_BYTES_MAX - len(f"{limits.ELEMENTS_MAX} from ")


def _describe(name: str, value: int) -> str:
    kind = _ENUM_OF_FIELD.get(name)
    return name_of(kind, value) if kind is not None else str(value)


_ENUM_OF_FIELD = {
    "kind": CollectiveKind,
    "datatype": DataType,
    "op": ReduceOp,
    "quantization": QuantizationAlgorithm,
    "quantized_datatype": QuantizedDataType,
    "algorithm": Algorithm,
}
