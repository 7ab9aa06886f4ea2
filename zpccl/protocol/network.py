"""What a plan knows about the paths between N participants, and the time that an all-reduce takes over them.

    time = latency + moving

    latency   of the longest way of a frame, hop after hop: for each hop, half a round trip and the work of a hop
    moving    of the path or host that needs longest for its bytes: its load / its rate

With S bytes of tensor on the wire, and frames that follow each other without a gap:

              latency                     load of a path, one way    load of a host, one way
    ring      2 (N - 1) hops              2 (N - 1) / N * S          2 (N - 1) / N * S
    direct    2 of the longest hop        2 / N * S                  2 (N - 1) / N * S
    one-shot  1 of the longest hop        S                          (N - 1) * S
    trees     to the root and back, in    sum of the shares of the   sum of share * degree over
              the deepest tree            trees that use it, * S     all trees, * S

A hop that neither ends nor begins at the root of a tree takes longer. A frame is passed on only when it is complete,
and it shares its path with frames on the other connections of the link. So the first frame is complete when one frame
for each connection of the link has arrived, or the whole part of the tensor. (At the root, in a ring and in exchanges
the path moves other bytes meanwhile, and the load counts these.)

A path is used in both directions at the same time, equally in each. So it has one rate: that of its slower direction.
A host has one rate, too. A path or host of unknown rate is no limit. But no host sends faster than the Speeds, the
rates that the work of an algorithm allows. If nothing is known about the network, only the Speeds count.

Participants are identified by index, 0 to N - 1. All is computed in integers: the same input gives the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zpccl import limits
from zpccl.protocol.rings import mesh_edges, ring_edges
from zpccl.types import Algorithm


@dataclass(frozen=True, slots=True)
class Network:
    """The paths between N participants, and their hosts. Both tables are symmetric; their diagonals do not count."""

    path_bytes_per_second: tuple[tuple[int | None, ...], ...]
    """Rate of each path in one direction, while the other one is busy too; None: unknown; 0: it must not be used."""
    round_trip_ns: tuple[tuple[int | None, ...], ...]
    """Round-trip time of each path; None: unknown."""
    host_bytes_per_second: tuple[int | None, ...]
    """Rate at which each host sends, or receives, over all its paths together; None: unknown."""

    def __post_init__(self) -> None:
        count = len(self.host_bytes_per_second)
        for table in (self.path_bytes_per_second, self.round_trip_ns):
            assert len(table) == count and all(len(row) == count for row in table), "one row and column per host"

    @classmethod
    def unknown(cls, count: int) -> Network:
        """A network about which nothing is known except that all its paths work."""
        row: tuple[int | None, ...] = (None,) * count
        return cls((row,) * count, (row,) * count, row)

    @property
    def count(self) -> int:
        """The number of participants."""
        return len(self.host_bytes_per_second)

    @property
    def is_known(self) -> bool:
        """True if the round trip or the rate of any path is known."""
        tables = (self.round_trip_ns, self.path_bytes_per_second)
        return any(value for table in tables for row in table for value in row)

    def is_usable(self, one: int, other: int) -> bool:
        """True if there is a path between two participants."""
        return self.path_bytes_per_second[one][other] != 0

    def without(self, pairs: Iterable[tuple[int, int]]) -> Network:
        """The network without some paths."""
        rows = [list(row) for row in self.path_bytes_per_second]
        for one, other in pairs:
            rows[one][other] = rows[other][one] = 0
        return replace(self, path_bytes_per_second=tuple(map(tuple, rows)))


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is reduced."""

    wire_bytes: int
    """Size of the whole tensor on the wire."""
    is_quantised: bool = False
    """True if each partial sum that travels is rounded once more: fewer roundings are worth some time."""
    are_sums_wide: bool = False
    """True if partial sums do not fit into the type of the tensor (the AVG of narrow integers), so that only whole
    inputs and results may travel: the peer that adds must receive the input of each peer directly."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A lane: a part of the tensor, and the spanning tree that reduces it.

    Leaves send their part up, the others add what they receive and pass it on. The root makes the result, which goes
    down the same way.
    """

    share: int
    """Weight of this tree relative to the others of the plan."""
    parents: tuple[int, ...]
    """The parent of each participant; the root's is the root."""

    @property
    def root(self) -> int:
        """The participant that makes the result."""
        return next(one for one, parent in enumerate(self.parents) if one == parent)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Each child with its parent."""
        return [(one, parent) for one, parent in enumerate(self.parents) if one != parent]

    def depths(self, costs: Sequence[int] | None = None) -> list[int]:
        """Sum of the costs of the hops from each participant to the root.

        Args:
            costs: the cost of the hop from each participant to its parent; without it, each hop counts 1.

        Raises:
            ValueError: the parents do not form a tree.
        """
        parents = self.parents
        depths = [-1] * len(parents)
        depths[self.root] = 0
        for begin in range(len(parents)):
            way, one = [], begin
            while depths[one] < 0:
                way.append(one)
                one = parents[one]
                if len(way) > len(parents):
                    raise ValueError(f"the parents {parents} form a cycle")
            depth = depths[one]
            for one in reversed(way):
                depth += 1 if costs is None else costs[one]
                depths[one] = depth
        return depths


@dataclass(frozen=True, slots=True)
class Route:
    """How an all-reduce runs, and its estimated duration."""

    algorithm: Algorithm
    order: tuple[int, ...]
    """The order of the ring; for other algorithms, the order of the participants."""
    trees: tuple[Tree, ...] = ()
    """The lanes, if the algorithm is TREES."""
    time_ns: int = 0

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The paths that it uses; some more than once."""
        if self.algorithm is Algorithm.TREES:
            return [edge for tree in self.trees for edge in tree.edges]
        return ring_edges(self.order) if self.algorithm is Algorithm.RING else mesh_edges(self.order)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the work of a hop and of each algorithm costs, apart from the network; None: not measured yet."""

    hop_ns: int | None = None
    """Latency of one hop beyond that of its path: processing, waiting for a processor."""
    ring_bytes_per_second: int | None = None
    """Send rate of a peer while a ring moves a large tensor."""
    direct_bytes_per_second: int | None = None
    """Send rate of a peer while a direct exchange moves one."""
    trees_bytes_per_second: int | None = None
    """Send rate of the busiest peer while trees move one."""

    def rate(self, algorithm: Algorithm) -> int:
        """Rate of an algorithm in bytes per second, or its default; for trees that is the rate of a direct exchange."""
        known: int | None = getattr(self, _RATES[algorithm])
        if known is None and algorithm is Algorithm.TREES:
            known = self.direct_bytes_per_second  # A direct exchange does the same work, in stars.
        if known is not None:
            return known
        return limits.RING_BYTES_PER_SECOND if algorithm is Algorithm.RING else limits.DIRECT_BYTES_PER_SECOND

    def learn(self, route: Route, network: Network, tensor: Tensor, duration_ns: int) -> Speeds:
        """The speeds after an attempt of this duration.

        A small tensor shows the latency of a hop beyond that of its path. A large one shows the rate of its algorithm,
        unless what is known about the network explains the time. Then the algorithm can do at least as much.
        """
        if tensor.wire_bytes <= limits.SMALL_TENSOR_BYTES:
            model = Model(network, tensor, replace(self, hop_ns=0))
            on_paths_ns = model.latency_ns(route)
            if on_paths_ns is None:
                return self
            hop_ns = max(0, duration_ns - on_paths_ns) // model.hop_count(route)
            return replace(self, hop_ns=_blend(self.hop_ns, hop_ns))
        if tensor.wire_bytes < limits.SPEED_TENSOR_BYTES:
            return self
        model = Model(network, tensor, self)
        latency_ns = model.latency_ns(route)
        if latency_ns is None:
            return self
        # A latency that was measured too high must not make the rate unbounded.
        moving_ns = max(duration_ns - latency_ns, duration_ns // 2, 1)
        rate = model.host_bytes(route) * limits.SECOND // moving_ns
        known: int | None = getattr(self, _RATES[route.algorithm])
        if 100 * model.network_ns(route) < limits.EXPLAINED_MIN_PERCENT * moving_ns:
            rate = _blend(known, rate)
        elif known is None or rate <= known:
            return self
        return replace(self, **{_RATES[route.algorithm]: rate})


_RATES = {
    Algorithm.RING: "ring_bytes_per_second",
    Algorithm.DIRECT: "direct_bytes_per_second",
    Algorithm.ONE_SHOT: "direct_bytes_per_second",
    Algorithm.TREES: "trees_bytes_per_second",
}


class Model:
    """The times of routes for one tensor over one network."""

    def __init__(self, network: Network, tensor: Tensor, speeds: Speeds) -> None:
        self.network = network
        self.tensor = tensor
        self.speeds = speeds
        known_ns = limits.HOP_WORK_NS if speeds.hop_ns is None else speeds.hop_ns
        unknown_ns = limits.HOP_LATENCY_NS if speeds.hop_ns is None else speeds.hop_ns
        self.hop_ns = [
            [unknown_ns if round_trip_ns is None else round_trip_ns // 2 + known_ns for round_trip_ns in row]
            for row in network.round_trip_ns
        ]
        """Latency of each hop: half a round trip, and work."""
        self._first_bytes = [[0] * network.count for _ in range(network.count)]
        """For each path, once it was asked for, the size of one frame for each of its connections in use."""

    def time_ns(self, route: Route) -> int | None:
        """Estimated duration; None if the route needs a path that must not be used."""
        latency_ns = self.latency_ns(route)
        return None if latency_ns is None else latency_ns + self.moving_ns(route)

    def moving_ns(self, route: Route) -> int:
        """How long the slowest path, host or peer at work needs for what it has to move."""
        return self.network_ns(route, self.speeds.rate(route.algorithm))

    def with_time(self, route: Route) -> Route | None:
        """The route with its estimated duration; None if it needs a path that must not be used."""
        time_ns = self.time_ns(route)
        return None if time_ns is None else replace(route, time_ns=time_ns)

    def hop_count(self, route: Route) -> int:
        """How many hops the slowest frame takes in a row."""
        if route.algorithm is Algorithm.TREES:
            return max(1, 2 * max(max(tree.depths()) for tree in route.trees))
        return {Algorithm.ONE_SHOT: 1, Algorithm.DIRECT: 2}.get(route.algorithm, 2 * (self.network.count - 1))

    def roundings(self, route: Route) -> int:
        """How often the most often rounded value of a quantised tensor is rounded."""
        count = self.network.count
        if route.algorithm is Algorithm.TREES:
            return max(max(tree.depths()) for tree in route.trees) + 1
        return {Algorithm.ONE_SHOT: 1, Algorithm.DIRECT: 2}.get(route.algorithm, count)

    def latency_ns(self, route: Route) -> int | None:
        """Time of the longest way that a frame goes; None if the route needs a path that must not be used."""
        edges = route.edges
        if not all(self.network.is_usable(one, other) for one, other in edges):
            return None
        if route.algorithm is Algorithm.TREES:
            return self.trees_latency_ns(route.trees)
        hops_ns = [self.hop_ns[one][other] for one, other in edges]
        if route.algorithm is Algorithm.RING:
            return 2 * (self.network.count - 1) * sum(hops_ns) // len(hops_ns)
        return max(hops_ns) if route.algorithm is Algorithm.ONE_SHOT else 2 * max(hops_ns)

    def trees_latency_ns(self, trees: Sequence[Tree]) -> int:
        """Time of the longest way of a frame in trees whose paths may all be used."""
        total, longest_ns = sum(tree.share for tree in trees), 0
        for tree in trees:
            root, part_bytes = tree.root, self.tensor.wire_bytes * tree.share // total
            costs_ns = [
                self.hop_ns[one][parent] + (0 if parent == root else self.passing_ns(one, parent, part_bytes))
                for one, parent in enumerate(tree.parents)
            ]
            longest_ns = max(longest_ns, 2 * max(tree.depths(costs_ns)))
        return longest_ns

    def passing_ns(self, one: int, other: int, part_bytes: int) -> int:
        """How long a path needs until the first frame of a part of the tensor is complete, if it carries no others."""
        rate = self.network.path_bytes_per_second[one][other]
        if not rate:
            return 0
        first_bytes = self._first_bytes[one][other] or self._find_first_bytes(one, other, rate)
        return (first_bytes if first_bytes < part_bytes else part_bytes) * limits.SECOND // rate

    def _find_first_bytes(self, one: int, other: int, rate: int) -> int:
        round_trip_ns = self.network.round_trip_ns[one][other] or 0
        is_far = round_trip_ns >= limits.LINK_FAR_ROUND_TRIP_NS
        count = limits.LINK_CONNECTIONS_FAR_BBR_DEFAULT if is_far else limits.LINK_CONNECTIONS_DEFAULT
        frames = min(count, connections_in_use(rate, round_trip_ns, limits.LINK_SENDER_WINDOW_BBR_BYTES))
        found = self._first_bytes[one][other] = self._first_bytes[other][one] = frames * frame_bytes(rate)
        return found

    def host_bytes(self, route: Route) -> int:
        """How many bytes the busiest host sends."""
        return max(self._host_loads(route))

    def network_ns(self, route: Route, host_rate_max: int | None = None) -> int:
        """How long the slowest path or host needs for what it has to move; 0 where no rate is known.

        Args:
            route: a route that needs no missing path.
            host_rate_max: no host sends faster than this, in bytes per second.
        """
        longest_ns = self._paths_ns(route)
        for load, rate in zip(self._host_loads(route), self.network.host_bytes_per_second, strict=True):
            if rate is None or (host_rate_max is not None and host_rate_max < rate):
                rate = host_rate_max
            if rate is not None:
                longest_ns = max(longest_ns, load * limits.SECOND // max(1, rate))
        return longest_ns

    def _host_loads(self, route: Route) -> list[int]:
        """How many bytes each host sends; it receives as many."""
        count, wire_bytes = self.network.count, self.tensor.wire_bytes
        if route.algorithm is Algorithm.TREES:
            degrees = [0] * count
            for tree in route.trees:
                share = tree.share
                for one, parent in enumerate(tree.parents):
                    if one != parent:
                        degrees[one] += share
                        degrees[parent] += share
            total = sum(tree.share for tree in route.trees)
            return [wire_bytes * degree // total for degree in degrees]
        is_one_shot = route.algorithm is Algorithm.ONE_SHOT
        return [(count - 1) * wire_bytes if is_one_shot else 2 * (count - 1) * wire_bytes // count] * count

    def _paths_ns(self, route: Route) -> int:
        count, wire_bytes, rates = self.network.count, self.tensor.wire_bytes, self.network.path_bytes_per_second
        if route.algorithm is Algorithm.TREES:
            shares: dict[int, int] = {}
            for tree in route.trees:
                share = tree.share
                for one, parent in enumerate(tree.parents):
                    path = one * count + parent if one < parent else parent * count + one
                    shares[path] = shares.get(path, 0) + share
            total = sum(tree.share for tree in route.trees)
            longest_ns = 0
            for path, share in shares.items():
                one, other = divmod(path, count)
                rate = rates[one][other]
                if rate and one != other:
                    longest_ns = max(longest_ns, wire_bytes * share // total * limits.SECOND // rate)
            return longest_ns
        if route.algorithm is Algorithm.RING:
            load = 2 * (count - 1) * wire_bytes // count
        else:
            load = wire_bytes if route.algorithm is Algorithm.ONE_SHOT else 2 * wire_bytes // count
        slowest = min((rate for one, other in route.edges if (rate := rates[one][other])), default=0)
        return load * limits.SECOND // slowest if slowest else 0


def connections_in_use(rate_bytes_per_second: int, round_trip_ns: int, window_bytes: int) -> int:
    """The least number of connections of a link of which each has at most `window_bytes` in flight."""
    round_trip_ns = max(round_trip_ns, limits.LINK_SENDER_ROUND_TRIP_NS)
    return max(1, -(-rate_bytes_per_second * round_trip_ns // (window_bytes * limits.SECOND)))


def frame_bytes(rate_bytes_per_second: int) -> int:
    """Tensor bytes of a frame for a peer that sends at this rate: a power of two."""
    wanted = rate_bytes_per_second * limits.FRAME_DURATION_NS // limits.SECOND
    rounded = 1 << max(0, wanted.bit_length() - 1)
    return min(max(rounded, limits.SLOW_FRAME_BYTES), limits.FRAME_BYTES_DEFAULT)


def _blend(before: int | None, now: int) -> int:
    """Moving average in which a new measurement has weight 1/4: a single outlier does not change the choice."""
    return max(1, now if before is None else (3 * before + now) // 4)
