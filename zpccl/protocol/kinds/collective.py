"""Collectives, as the master sees them: votes, plan, reports, decision.

A collective is known by its tag within a group. Each attempt at it runs through

    voting --all voted--> agreed --links allow a ring--> running --all finished ok--> committed
       |                    |  ^                            |
       | specs differ,      |  | links stay down:           | one failed, one was lost before all others
       | alone, withdrawn   |  | a member is removed        | had finished, digests differ, withdrawn
       v                    `--'                            v
    answered                                             aborted

The plan names the algorithm: a ring, or the direct exchange, where all links work and cost.py expects more of it or all
asked for it. The ring is in order of admission, or in another where that one needs a link that is down or has failed of
late (paths.py). Only where no order can do without the links that are down are they waited for, and when they do not
come up in time the worst-connected member is removed, so that the rest can go on. The ring of a broadcast begins
with its root. A barrier has nothing to plan: it is committed when all have voted.

A member that is lost while a collective is in voting is no longer waited for. One lost while it runs aborts it, unless
all survivors had finished: then they all hold the same result, and it counts.

A master that takes the run over goes on with the attempts that peers report. What it does not know yet may have been
decided by the former master and be known to a member that has not reported: until all have, it decides nothing. Nor
does any master while its member list is not committed (leadership.py).

Answers are kept per peer until the peer says that it got them (`oldest_call_id`), so every message may come twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.cost import Speeds, choose, frame_bytes
from zpccl.protocol.counts import AbortReason
from zpccl.protocol.membership import Outbox, Peer, Registry, names, some_names
from zpccl.protocol.messages import CollectiveSpec, Decision, Lane, Plan, Reducing, Report, Running, Vote, cut
from zpccl.protocol.operation import COLLECTIVE, Attempt, Key, Kind, Operation, Operations, Verdict, key_of
from zpccl.protocol.paths import Paths
from zpccl.protocol.rings import mesh_edges, ring_edges
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp


@dataclass(slots=True, eq=False, kw_only=True)
class Reduction(Attempt):
    """A running attempt at a collective."""

    spec: CollectiveSpec
    how: Reducing
    epoch: int = -1
    """The epoch in which all of `order` were members; while it lasts, nobody of them is lost."""
    reports: dict[Peer, Report] = field(default_factory=dict)
    faults: set[frozenset[Peer]] = field(default_factory=set)
    """The links by which it failed, as peers at their ends say."""

    @property
    def group(self) -> int:
        """Of those who take part."""
        assert self.key.group is not None
        return self.key.group

    @property
    def algorithm(self) -> int:
        """How it reduces."""
        return self.how.lanes[0].algorithm

    @property
    def is_direct(self) -> bool:
        """True if it needs all links, and not those of a ring only."""
        return self.algorithm == Algorithm.DIRECT

    @property
    def edges(self) -> list[tuple[Peer, Peer]]:
        """The links that carry it."""
        if self.spec.kind == CollectiveKind.BROADCAST:
            return ring_edges(self.order)[:-1]  # The last peer has nothing for the root.
        return mesh_edges(self.order) if self.is_direct else ring_edges(self.order)

    @property
    def link_count(self) -> int:
        """Elements of a ring that would put as much on each of its links."""
        return max(1, self.spec.count // (len(self.order) - 1)) if self.is_direct else self.spec.count

    def are_neighbours(self, one: Peer, other: Peer) -> bool:
        """True if it needs the link between two who take part."""
        distance = abs(self.order.index(one) - self.order.index(other))
        return distance > 0 and (self.is_direct or distance in (1, len(self.order) - 1))


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
        operations.add_kind(self, COLLECTIVE)
        self._link_wait_ns = link_wait_ns
        self._aborted: dict[int, Reduction] = {}  # The last that failed by reports, without these.
        self.speeds: dict[int, tuple[frozenset[Peer], Speeds]] = {}  # Of each group's latest members.
        self._unexplained: set[int] = set()  # Those of them that stalled, and nobody has named a link so far.

    def refusal_of(self, peer: Peer, vote: Vote, running: Attempt | None) -> Decision | None:
        """A peer makes one call at a tag at a time."""
        if running is None or peer not in running.calls:
            return None
        reason = f"tag {running.key.tag} is in use by a running collective of this peer"
        return Decision(vote.call_id, Result.INVALID_USAGE, reason=reason)

    def on_voted(self, operation: Operation, now_ns: int) -> None:
        """It may have been the last vote."""
        self._evaluate(operation, now_ns)

    def on_vote_again(self, attempt: Reduction, peer: Peer, vote: Vote) -> None:
        """The plan is sent again."""
        del vote
        self._send_plan(attempt, (peer,))

    def on_late_report(self, peer: Peer, report: Report) -> None:
        """Others were first to say that an attempt failed, but not by which link."""
        aborted = self._aborted.get(report.attempt_id)
        if aborted is not None and aborted.calls.get(peer) == report.call_id and not report.ok:
            self._blame(aborted, peer, report.fault)

    def on_report(self, attempt: Reduction, peer: Peer, report: Report) -> None:
        """A participant's part is done or failed."""
        attempt.reports[peer] = report
        if not report.ok:
            self._blame(attempt, peer, report.fault)
        is_waiting = len(attempt.reports) < len(attempt.calls) and attempt.epoch == self._registry.epoch
        if not report.ok or not is_waiting:
            self._operations.decide(attempt)

    def on_members_changed(self, now_ns: int) -> None:
        """The member list has changed: who is gone is no longer waited for."""
        for attempt in self._operations.running_of(COLLECTIVE):
            self._operations.decide(attempt)
        for operation in self._operations.of(COLLECTIVE):
            self._evaluate(operation, now_ns)

    def on_links_changed(self, now_ns: int) -> None:
        """A link came up or went down: plans that wait for links are looked at again."""
        for operation in self._operations.of(COLLECTIVE):
            if operation.agreed_ns is not None:
                self._evaluate(operation, now_ns)

    def tick(self, now_ns: int) -> None:
        """A link may be suspected no more: plans that wait are looked at again."""
        self.on_links_changed(now_ns)

    def unreachable(self, now_ns: int) -> list[tuple[Peer, str]]:
        """Members without whom plans could be made that have waited for links for too long, and why each must go."""
        groups = {
            operation.key.group: None
            for operation in self._operations.of(COLLECTIVE)
            if operation.agreed_ns is not None and now_ns - operation.agreed_ns >= self._link_wait_ns
        }
        return [
            (peer, f"no working data connection to {names(others)}")
            for group in groups
            for peer, others in self._paths.surplus(self._registry.members(group), now_ns)
        ]

    def wait_again(self, now_ns: int) -> None:
        """Whom plans could do without must stay: all that wait for links go on waiting."""
        for operation in self._operations.of(COLLECTIVE):
            operation.agreed_ns = None if operation.agreed_ns is None else now_ns

    def deadline_ns(self) -> int | None:
        """When tick() has something to do."""
        waiting = [each.agreed_ns for each in self._operations.of(COLLECTIVE) if each.agreed_ns is not None]
        return min(waiting) + self._link_wait_ns if waiting else None

    def _evaluate(self, operation: Operation, now_ns: int) -> None:
        """Goes on with an operation if all have voted."""
        key, votes = operation.key, operation.votes
        if not self._operations.is_complete(operation) or not self._registry.is_committed:
            operation.agreed_ns = None
        elif len(votes) == 1:
            self._operations.refuse(key, Result.TOO_FEW_PEERS, "this peer is alone in its group")
        elif (difference := find_difference(_specs_of(votes))) is not None:
            name, values = difference
            wrong = "one peer must be the root" if name == "is_root" else f"peers differ in {name}"
            reason = f"tag {key.tag}: {wrong}: {'; '.join(values)}"
            self._operations.refuse(key, Result.INVALID_USAGE, reason, name, values)
        elif next(iter(_specs_of(votes).values())).kind == CollectiveKind.BARRIER:
            self._open_barrier(key)
        else:
            self._plan(operation, now_ns)

    def _open_barrier(self, key: Key) -> None:
        """All are there. They are told who else is: some may hear of it only from each other."""
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

    def _plan(self, operation: Operation, now_ns: int) -> None:
        key, specs, members = operation.key, _specs_of(operation.votes), self._operations.members_of(operation.key)
        self._doubt(members[0].group, now_ns)
        order = self._paths.order(members, now_ns)
        if order is None:
            if operation.agreed_ns is None:
                operation.agreed_ns = now_ns
            return
        votes = self._operations.take(key)
        spec = next(iter(specs.values()))
        if spec.kind == CollectiveKind.BROADCAST:
            place = next(place for place, peer in enumerate(order) if specs[peer].is_root)
            order = order[place:] + order[:place]
        algorithm = self._algorithm(spec, order, now_ns)
        attempt = Reduction(
            attempt_id=self._operations.next_attempt_id(),
            key=key,
            calls={peer: votes[peer].call_id for peer in order},
            begun_ns=now_ns,
            spec=spec,
            how=Reducing(
                (Lane(tuple(peer.peer_id for peer in order), algorithm),),
                frame_bytes(algorithm, self._speeds_of(order)),
            ),
            epoch=self._registry.epoch,
        )
        assert self._operations.running_at(key) is None, "its participants cannot have voted"
        self._operations.run(attempt)
        self._outbox.counts.plans += 1
        self._send_plan(attempt, attempt.order)

    def _algorithm(self, spec: CollectiveSpec, order: list[Peer], now_ns: int) -> Algorithm:
        """The one that was asked for, or the quickest, that the links allow: a ring can always be had."""
        if spec.kind != CollectiveKind.ALL_REDUCE or spec.algorithm == Algorithm.RING:
            return Algorithm.RING
        if len(order) > limits.DIRECT_PEERS_MAX:
            return Algorithm.RING
        if not self._paths.is_mesh(order, now_ns):
            return Algorithm.RING
        if spec.algorithm == Algorithm.DIRECT:
            return Algorithm.DIRECT
        is_quantised = spec.quantization != QuantizationAlgorithm.NONE
        return choose(len(order), _wire_bytes(spec), is_quantised, self._speeds_of(order))

    def _speeds_of(self, order: Sequence[Peer]) -> Speeds:
        peers, speeds = self.speeds.get(order[0].group, (frozenset(), Speeds()))
        return speeds if peers == frozenset(order) else Speeds()

    def _learn(self, attempt: Reduction) -> None:
        """An attempt is committed: how long did it take? From the start of the last one to begin."""
        if attempt.spec.kind != CollectiveKind.ALL_REDUCE:
            return
        durations_us = [report.duration_us for report in attempt.reports.values() if report.duration_us]
        if len(durations_us) < len(attempt.order):
            return
        algorithm, count = Algorithm(attempt.algorithm), len(attempt.order)
        speeds = self._speeds_of(attempt.order)
        speeds = speeds.learn(algorithm, count, _wire_bytes(attempt.spec), min(durations_us) * limits.US)
        if attempt.group not in self.speeds:  # Groups that are gone make room.
            self.speeds = {group: known for group, known in self.speeds.items() if self._registry.member_count(group)}
        self.speeds[attempt.group] = frozenset(attempt.order), speeds

    def _send_plan(self, attempt: Reduction, peers: Iterable[Peer]) -> None:
        calls = tuple(attempt.calls.values())
        self._outbox.broadcast(peers, Plan(attempt.attempt_id, calls, attempt.how))

    # --- Taking over ------------------------------------------------------------------------------------------------

    def restore(self, running: Running, reporter: Peer, calls: dict[Peer, int]) -> None:
        """Goes on with an attempt of a former master. What one knows of it is all that can be known."""
        del reporter
        plan, spec = running.plan, running.spec
        if plan.attempt_id in self._operations.running or not isinstance(plan.how, Reducing) or spec is None:
            return None
        ahead = False
        for peer in self._operations.present(calls):  # The votes of some count in a later attempt already.
            if calls[peer] in peer.answers or self._operations.attempt_of(peer, calls[peer]) is not None:
                ahead = True
                del calls[peer]
        present = self._operations.present(calls)
        if not present:
            return None
        lane = replace(plan.how.lanes[0], order=tuple(peer.peer_id for peer in calls))
        attempt = Reduction(
            attempt_id=plan.attempt_id,
            key=key_of(present[0], spec),
            calls=calls,
            spec=spec,
            how=Reducing((lane,), plan.how.frame_bytes),
        )
        for peer in present:
            self._operations.forget(peer, calls[peer])
            peer.open_calls.setdefault(calls[peer], attempt.key)
        self._operations.run(attempt)
        if ahead:  # Nobody could finish this one.
            verdict = Verdict(Result.RANK_CONNECTION_LOST, "another master has begun it anew")
            return self._operations.end(attempt, verdict)
        self._send_plan(attempt, present)
        return self._operations.decide(attempt)

    # --- Decisions --------------------------------------------------------------------------------------------------

    def _blame(self, attempt: Reduction, peer: Peer, fault: bytes | None) -> None:
        """Holds it against the link to a neighbour that an attempt failed by it, once for both ends."""
        neighbour = next((other for other in attempt.order if other.peer_id == fault), None)
        if neighbour is None or not attempt.are_neighbours(peer, neighbour):
            return
        edge, now_ns = frozenset((peer, neighbour)), self._outbox.now_ns
        if edge not in attempt.faults:
            attempt.faults.add(edge)
            self._unexplained.discard(attempt.attempt_id)
            cost_ns = now_ns - attempt.begun_ns if attempt.begun_ns is not None else 0
            self._paths.blame(peer, neighbour, cost_ns, attempt.link_count, now_ns)

    def _remember_failure(self, attempt: Reduction) -> None:
        """Peers that stall do so at the same time: reports may be on their way that say more than the first."""
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
        """The members of a group have voted again, and each had reported before: nothing more will be known."""
        for attempt_id in sorted(self._unexplained):
            attempt = self._aborted[attempt_id]
            if attempt.group == group and attempt.begun_ns is not None:
                self._unexplained.discard(attempt_id)
                self._paths.doubt(attempt.edges, attempt.begun_ns, attempt.link_count, now_ns)

    def judge(self, attempt: Reduction, survivors: list[Peer]) -> Verdict | None:
        """All survivors had finished with the same result, or it is aborted."""
        failed = [report for report in attempt.reports.values() if not report.ok]
        lost = tuple(peer for peer in attempt.calls if peer not in survivors)
        if failed:
            faults = {report.fault for report in failed}
            blamed = tuple(peer for peer in attempt.calls if peer in lost or peer.peer_id in faults)
            return Verdict(Result.RANK_CONNECTION_LOST, failed[0].reason or "a peer failed", blamed)
        if not all(peer in attempt.reports for peer in survivors):
            return Verdict(Result.RANK_CONNECTION_LOST, f"lost {names(lost)}", lost) if lost else None
        if len({report.digest for report in attempt.reports.values()}) <= 1:
            return Verdict()
        # Reports of the lost count here too: one of two results is wrong, whoever is left.
        digests = ", ".join(f"{peer.name}: {report.digest:016x}" for peer, report in attempt.reports.items())
        return Verdict(Result.INTERNAL_ERROR, f"results differ: {digests}")

    def value_of(self, attempt: Reduction) -> int:
        """How many took part."""
        return len(attempt.calls)

    def on_ended(self, attempt: Reduction, verdict: Verdict, survivors: list[Peer]) -> None:
        """Learns of the links, and how long it took."""
        if verdict.is_commit:
            self._outbox.counts.commits += 1
            self._paths.trust(attempt.edges, attempt.link_count)
            return self._learn(attempt)
        are_all_here = len(survivors) == len(attempt.calls)
        has_failed = not all(report.ok for report in attempt.reports.values())
        if verdict.result is Result.INTERNAL_ERROR:
            reason = AbortReason.RESULTS_DIFFER
        elif has_failed:
            reason = AbortReason.FAILED
        else:
            reason = AbortReason.WITHDRAWN if are_all_here else AbortReason.PEER_LOST
        self._outbox.counts.aborts[reason] += 1
        if has_failed and are_all_here:
            self._remember_failure(attempt)
        return None

    def validate(self) -> None:
        """States what always holds."""
        assert self._unexplained <= self._aborted.keys() and self._operations.running.keys().isdisjoint(self._aborted)
        assert len(self._aborted) <= limits.ABORTED_ATTEMPTS_KEPT_MAX


def _specs_of(votes: dict[Peer, Vote]) -> dict[Peer, CollectiveSpec]:
    return {peer: vote.spec for peer, vote in votes.items() if isinstance(vote.spec, CollectiveSpec)}


def find_difference(calls: dict[Peer, CollectiveSpec]) -> tuple[str, tuple[str, ...]] | None:
    """The first argument in which specs differ, and a text for each of its values with the peers that gave it.

    Peers must not agree on who is the root of a broadcast: just one must say that it is.
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


_COMPARED = ("kind", *(name for name in CollectiveSpec.__struct_fields__ if name not in ("kind", "is_root")))
"""What peers call comes first: where that differs, the rest differs for it."""


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


def _wire_bytes(spec: CollectiveSpec) -> int:
    """About what a tensor takes on the wire; of what is quantised without its parameters."""
    if spec.quantization != QuantizationAlgorithm.NONE:
        known = spec.quantized_datatype in set(QuantizedDataType)
        return spec.count * (QuantizedDataType(spec.quantized_datatype).bits if known else 8) // 8
    return spec.count * (DataType(spec.datatype).itemsize if spec.datatype in set(DataType) else 1)


def _describe(name: str, value: int) -> str:
    kind = _ENUM_OF_FIELD.get(name)
    return kind(value).name if kind is not None and value in set(kind) else str(value)


_ENUM_OF_FIELD = {
    "kind": CollectiveKind,
    "datatype": DataType,
    "op": ReduceOp,
    "quantization": QuantizationAlgorithm,
    "quantized_datatype": QuantizedDataType,
    "algorithm": Algorithm,
}
