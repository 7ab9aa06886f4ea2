"""Plans of collectives: what the master knows about the network of each group, and the routes planned from it.

A route (routes.py) is planned anew when the members or their links change, or what is known about the paths (matrix.py)
or about the work. The last two cause a new plan at most once per ROUTE_KEPT. Until then all collectives on a tensor of
this size use the same route, because planning takes up to 50 ms for 64 peers. A new master starts without all this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from zpccl import limits
from zpccl.protocol.matrix import Matrix, Sample
from zpccl.protocol.membership import Peer, Registry
from zpccl.protocol.messages import (
    CollectiveSpec,
    Lane,
    MeasuredHost,
    MeasuredPath,
    Measurements,
    Member,
    Reducing,
    Report,
)
from zpccl.protocol.network import Model, Network, Route, Speeds, Tensor, frame_bytes
from zpccl.protocol.paths import Edge, Paths
from zpccl.protocol.rings import owners_of
from zpccl.protocol.routes import is_untried, plan, plan_ring, plan_trees_of
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

_DATATYPES, _QUANTIZED_DATATYPES = frozenset(DataType), frozenset(QuantizedDataType)


@dataclass(slots=True, frozen=True)
class Planned:
    """A route, and what it was planned from."""

    peers: tuple[Peer, ...]
    """The participants; the route refers to them by their index here."""
    links: tuple[tuple[int, ...], frozenset[Edge], frozenset[Edge]]
    """The links of each participant (`Peer.linked`), those that were avoided, and those that were down."""
    facts: tuple[int, Speeds]
    """Number of changes of the matrix, and what was known about the work."""
    planned_ns: int
    network: Network
    route: Route
    how: Reducing
    """The plan of this route, as it is sent."""

    @property
    def was_untried(self) -> bool:
        """True if the route was planned without any knowledge, so that it has no claim to be kept."""
        return is_untried(self.network, self.facts[1])

    def is_fresh(self, facts: tuple[int, Speeds], now_ns: int) -> bool:
        """True if the facts are unchanged or the route is new. All routes expire: old measurements are uncertain."""
        age_ns = now_ns - self.planned_ns
        return age_ns < (limits.RATE_DOUBLING_NS if self.facts == facts else limits.ROUTE_KEPT_NS)


class Planner:
    """Chooses algorithms, orders and lanes."""

    def __init__(self, registry: Registry, paths: Paths) -> None:
        self._registry = registry
        self._paths = paths
        self.matrix: Matrix[Peer] = Matrix()
        self.speeds: dict[int, tuple[frozenset[Peer], Speeds]] = {}  # By group: its latest members, their speeds.
        self._measured: dict[Peer, None] = {}  # Peers whose paths the matrix knows.
        self._asked: tuple[tuple[Peer, ...], int] = (), 0  # Members that were asked to measure their paths, and when.
        self._planned: dict[object, Planned] = {}  # By group and tensor, the one used last at the end.
        self._told: tuple[int, int, Measurements] | None = None  # Epoch and time, and what was known then.

    def how(self, spec: CollectiveSpec, order: Sequence[Peer], now_ns: int, *, is_ring: bool = True) -> Reducing | None:
        """The plan of a collective, or None if the links allow none.

        An all-reduce may have any route. An all-to-all is direct. Others have a ring, or trees if there is no ring.

        Args:
            spec: what is reduced or moved.
            order: a ring that the links allow, with the root of a broadcast first; without a ring, all participants.
            now_ns: the time.
            is_ring: False if the links allow no ring.
        """
        if not is_ring and len(order) > limits.DIRECT_PEERS_MAX:
            return None
        if spec.kind == CollectiveKind.ALL_TO_ALL or len(order) > limits.DIRECT_PEERS_MAX:
            algorithm = Algorithm.DIRECT if spec.kind == CollectiveKind.ALL_TO_ALL else Algorithm.RING
            frame_size = frame_bytes(self._speeds_of(order).rate(algorithm))
            return Reducing(tuple(peer.peer_id for peer in order), frame_size, algorithm)
        planned = self._route(spec, tuple(order), now_ns, is_ring)
        return planned.how if planned is not None else None

    def learn(
        self, spec: CollectiveSpec, how: Reducing, peers: Sequence[Peer], reports: dict[Peer, Report], now_ns: int
    ) -> None:
        """A collective was committed: learns from the reports how long it took, and what the paths have carried."""
        known, tensor = self._planned.get(_key(spec, peers)), tensor_of(spec)
        if known is not None and known.how != how:
            known = None  # There is a newer plan.
        durations_us = [report.duration_us for report in reports.values() if report.duration_us]
        took_ns = min(durations_us, default=0) * limits.US  # The duration of the last peer to start.
        self._observe(peers, reports, now_ns, _trusted_ns(took_ns, None if known is None else known.route.time_ns))
        if known is not None and took_ns:
            self._planned[_key(spec, peers)] = _hastened(known, took_ns)
        if spec.kind != CollectiveKind.ALL_REDUCE or len(durations_us) < max(2, len(peers)):
            return
        if any(report.paths for report in reports.values()):
            return  # The network was the limit, or may have been: the time says nothing about the work.
        if known is None or tensor.are_sums_wide:
            return
        speeds = self._speeds_of(peers).learn(known.route, known.network, tensor, took_ns)
        group = peers[0].group
        if group not in self.speeds:  # Groups without members make room.
            self.speeds = {other: kept for other, kept in self.speeds.items() if self._registry.member_count(other)}
        self.speeds[group] = frozenset(peers), speeds

    def unmeasured(self, now_ns: int) -> int:
        """How many members should measure their paths to all others now: from the first one with a path that has not
        been measured on purpose within RATE_DOUBLING, to the end of the list.

        This may not show everything, as where two members have no link. So the same members are not asked again before
        RATE_DOUBLING, unless an attempt has contradicted a measurement since then.
        """
        members = tuple(self._registry.members())
        asked, asked_ns = self._asked
        is_again = asked == members and now_ns - asked_ns < limits.RATE_DOUBLING_NS
        groups: dict[int, list[Peer]] = {}

        def is_due(one: Peer, other: Peer) -> bool:
            if is_again:
                return self.matrix.is_doubted(one, other, asked_ns)
            return not self.matrix.is_probed(one, other, now_ns)

        for place, peer in enumerate(members):
            before = groups.setdefault(peer.group, [])
            is_small = self._registry.member_count(peer.group) <= limits.DIRECT_PEERS_MAX
            if is_small and any(is_due(peer, other) for other in before):
                self._asked = members, now_ns
                return len(members) - place
            before.append(peer)
        return 0

    def measurements(self, now_ns: int) -> Measurements:
        """What the matrix knows about members and their latest paths, or knew less than MEASUREMENTS_KEPT_NS ago."""
        epoch = self._registry.epoch
        if self._told is None or self._told[0] != epoch or now_ns - self._told[1] >= limits.MEASUREMENTS_KEPT_NS:
            self._told = epoch, now_ns, self._measure(now_ns)
        return self._told[2]

    def on_members_changed(self) -> None:
        """Forgets the paths of lost peers."""
        for peer in [peer for peer in self._measured if self._registry.peers.get(peer.peer_id) is not peer]:
            del self._measured[peer]
            self.matrix.forget(peer)

    def _route(self, spec: CollectiveSpec, peers: tuple[Peer, ...], now_ns: int, is_ring: bool) -> Planned | None:
        key = _key(spec, peers)
        avoided, down, speeds = self._paths.avoided(now_ns), self._paths.down(now_ns), self._speeds_of(peers)
        links, facts = (tuple(peer.linked for peer in peers), avoided, down), (self.matrix.changes, speeds)
        known = self._planned.pop(key, None)
        if known is not None and (known.peers, known.links) == (peers, links) and known.is_fresh(facts, now_ns):
            self._planned[key] = known
            return known

        def network_without(edges: frozenset[Edge], used_percent: int = limits.PATH_USED_PERCENT) -> Network:
            def is_usable(one: Peer, other: Peer) -> bool:
                return self._registry.are_linked(one, other) and frozenset((one, other)) not in edges

            return self.matrix.network(peers, is_usable, now_ns, used_percent)

        unused = avoided
        network = network_without(unused)
        previous = None
        if known is not None and (known.peers, known.links) == (peers, links) and not known.was_untried:
            previous = known.route
        route = _find_route(spec, peers, network, speeds, previous)
        if route is None and is_ring:  # Every route needs an avoided link. The ring of `peers` needs the fewest.
            route = Route(Algorithm.RING, tuple(range(len(peers))))
        elif route is None:
            unused = down
            network = network_without(unused)
            route = _find_route(spec, peers, network, speeds, None)
        if route is None:
            return None
        how = _plan_of(route, peers, network, speeds)
        if spec.kind == CollectiveKind.ALL_REDUCE and self._is_measured(route, peers, now_ns):
            carried = Model(network_without(unused, 100), tensor_of(spec), speeds)
            how = _paced(how, carried.moving_ns(route), known)
        self._planned[key] = found = Planned(peers, links, facts, now_ns, network, route, how)
        if len(self._planned) > limits.ROUTES_KEPT_MAX:
            del self._planned[next(iter(self._planned))]
        return found

    def _is_measured(self, route: Route, peers: Sequence[Peer], now_ns: int) -> bool:
        """True if it has lanes, and all its paths were measured on purpose, even if some are slower since then."""
        known = (self.matrix.was_probed(peers[one], peers[other], now_ns) for one, other in route.edges)
        return bool(route.trees) and all(known)

    def _speeds_of(self, peers: Sequence[Peer]) -> Speeds:
        known, speeds = self.speeds.get(peers[0].group, (frozenset(), Speeds()))
        return speeds if known == frozenset(peers) else Speeds()

    def _measure(self, now_ns: int) -> Measurements:
        members = self._registry.order
        index_of = {peer: index for index, peer in enumerate(members)}
        known = [path for path in self.matrix.paths() if path[0] in index_of and path[1] in index_of]
        known.sort(key=lambda path: -path[3])
        paths = [
            MeasuredPath(
                index_of[sender],
                index_of[receiver],
                max(0, now_ns - seen_ns) // limits.MS,
                _told(rate),
                None if round_trip_ns is None else round_trip_ns // limits.US,
            )
            for sender, receiver, rate, seen_ns, round_trip_ns in known[: limits.PATHS_TOLD_MAX]
        ]
        hosts = []
        for peer, index in index_of.items():
            sent, received = (self.matrix.host_rate(peer, is_sending=is_sending) for is_sending in (True, False))
            if sent is not None or received is not None:
                hosts.append(MeasuredHost(index, _told(sent), _told(received)))
        listed = tuple(Member(peer.peer_id, peer.group, peer.name) for peer in members)
        return Measurements(listed, tuple(paths), tuple(hosts))

    def _observe(self, peers: Sequence[Peer], reports: dict[Peer, Report], now_ns: int, trusted_ns: float) -> None:
        by_id = {peer.peer_id: peer for peer in peers}
        samples: list[Sample[Peer]] = []
        for sender, report in reports.items():
            probed: list[Sample[Peer]] = []
            for path in report.paths:
                receiver = by_id.get(path.peer_id)
                if receiver is None or receiver is sender:
                    continue
                if path.round_trip_us:
                    self.matrix.observe_round_trip(sender, receiver, path.round_trip_us * limits.US)
                self._measured |= {sender: None, receiver: None}
                sample = Sample(sender, receiver, path.sent_bytes, path.busy_us * limits.US, path.is_limited)
                (probed if path.is_probe else samples).append(sample)
            if len(probed) in (1, len(peers) - 1):  # Else some paths are missing.
                self.matrix.observe_probe(sender, probed, now_ns)
        if samples:
            self.matrix.observe_attempt(samples, now_ns, trusted_ns=trusted_ns)


def tensor_of(spec: CollectiveSpec) -> Tensor:
    """The tensor of a collective, as routes see it."""
    is_quantised = spec.quantization != QuantizationAlgorithm.NONE
    are_sums_wide = spec.op == ReduceOp.AVG and spec.datatype < DataType.UINT64
    return Tensor(wire_bytes(spec), is_quantised, are_sums_wide)


def wire_bytes(spec: CollectiveSpec) -> int:
    """Approximate bytes of a tensor on the wire; for a quantised one, without the quantisation parameters."""
    if spec.quantization != QuantizationAlgorithm.NONE:
        known = spec.quantized_datatype in _QUANTIZED_DATATYPES
        return spec.count * (QuantizedDataType(spec.quantized_datatype).bits if known else 8) // 8
    return spec.count * (DataType(spec.datatype).itemsize if spec.datatype in _DATATYPES else 1)


def _told(rate: int | None) -> int | None:
    return None if rate is None else min(rate, limits.RATE_TOLD_MAX)


def _key(spec: CollectiveSpec, peers: Sequence[Peer]) -> object:
    """The key under which a plan is kept. Each root of broadcasts has its own plan, which begins with the root."""
    root = peers[0] if spec.kind == CollectiveKind.BROADCAST else None
    return peers[0].group, spec.kind, tensor_of(spec), spec.algorithm, root


def _find_route(
    spec: CollectiveSpec, peers: Sequence[Peer], network: Network, speeds: Speeds, previous: Route | None
) -> Route | None:
    if spec.kind == CollectiveKind.ALL_REDUCE:
        is_asked = spec.algorithm in (Algorithm.RING, Algorithm.DIRECT)
        asked = Algorithm(spec.algorithm) if is_asked else Algorithm.AUTO
        return plan(network, tensor_of(spec), speeds, previous, asked)
    # An all-reduce of this tensor takes twice the time of the collective, around the same ring.
    whole_bytes = wire_bytes(spec) * (network.count if spec.kind == CollectiveKind.ALL_GATHER else 1)
    ring = plan_ring(network, Tensor(whole_bytes), speeds, previous)
    if ring is not None:
        return ring
    owners = (0,) if spec.kind == CollectiveKind.BROADCAST else owners_of([peer.peer_id for peer in peers])
    return plan_trees_of(owners, network, replace(tensor_of(spec), wire_bytes=whole_bytes), speeds)


def _trusted_ns(took_ns: int, planned_ns: int | None) -> float:
    """How long paths may have been busy in an attempt so that the rates that were measured on purpose still hold."""
    if planned_ns is None or 100 * took_ns <= limits.PROBE_TRUST_PERCENT_MAX * planned_ns:
        return math.inf
    return max(limits.PROBE_TRUST_PERCENT_MAX * planned_ns, limits.PROBE_DOUBT_PERCENT * took_ns) // 100


def _paced(how: Reducing, moving_ns: int, before: Planned | None) -> Reducing:
    """The plan with a pace: the time that its slowest path or host needs, or less if the plan before has the same lanes
    and was hastened."""
    pace_us = max(1, moving_ns // limits.US)
    if before is not None and before.how.pace_us and before.how.lanes == how.lanes:
        pace_us = min(pace_us, before.how.pace_us)
    return structs.replace(how, pace_us=pace_us)


def _hastened(planned: Planned, took_ns: int) -> Planned:
    """The plan with a faster pace, if an attempt took hardly longer than its pace: perhaps only that held it back."""
    pace_us = min(planned.how.pace_us, max(1, took_ns * 100 // (limits.PACE_HELD_PERCENT * limits.US)))
    return replace(planned, how=structs.replace(planned.how, pace_us=pace_us))


def _plan_of(route: Route, peers: Sequence[Peer], network: Network, speeds: Speeds) -> Reducing:
    """The plan of a route. Frames suit the slowest path in use: a frame is passed on only when it is complete."""
    rates = [speeds.rate(route.algorithm)]
    for one, other in route.edges:
        rate = network.path_bytes_per_second[one][other]
        rates += [rate] if rate else []
    order = tuple(peers[place].peer_id for place in route.order)
    lanes = [Lane(tree.share, tree.root, tree.parents if max(tree.depths()) > 1 else ()) for tree in route.trees]
    return Reducing(order, frame_bytes(min(rates)), route.algorithm, tuple(lanes))
