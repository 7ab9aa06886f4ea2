"""Plans the route of a collective: which algorithm, over which paths, with which share of the tensor on each.

The model of network.py estimates the time of an all-reduce by each candidate:

    one-shot       all paths alike, for small tensors that are not quantised
    direct         all paths alike
    ring           in the order of the participants, which is that of admission
    quickest ring  the one whose slowest path is quickest (rings.py)
    stars          the direct exchange, with shares by rate (trees.py)
    trees          spanning trees, with shares by rate (trees.py)

The first three need no knowledge of the network. The others must be quicker than these by ROUTE_GAIN_MIN_PERCENT, and
any must be quicker than the previous route by ROUTE_CHANGE_MIN_PERCENT, as the network is now. So an even network has
simple plans, and small changes of rates do not change plans. Candidates that cannot be that much quicker are not
computed.

Around a ring 2 (N - 1) / N of the tensor cross the slowest path, in a direct exchange 2 / N. So the first all-reduce,
before anything is known of the network or of the work, uses no ring if all paths are there.

Each hop of a sum rounds a quantised tensor. A ring rounds most, and its time counts as QUANTIZED_DIRECT_PERCENT_MAX per
cent of the estimate. The time of trees is lengthened less, in proportion to their roundings.

Other collectives, except the all-to-all, have rings. Their time is in proportion to that of an all-reduce. If the paths
allow no ring, they have one tree for each owner of a part, and bytes move only up or only down that tree.

If sums are too wide to travel (the AVG of narrow integers), peers exchange directly or in stars. Only if no peer
reaches all others is a ring used: the engine widens the values that travel around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zpccl import limits
from zpccl.protocol.network import Model, Network, Route, Speeds, Tensor
from zpccl.protocol.rings import delay_bound, find_order, quickest_order, rate_bound
from zpccl.protocol.trees import Packer
from zpccl.types import Algorithm

RING, DIRECT, ONE_SHOT, TREES = Algorithm.RING, Algorithm.DIRECT, Algorithm.ONE_SHOT, Algorithm.TREES


def plan(
    network: Network,
    tensor: Tensor,
    speeds: Speeds | None = None,
    previous: Route | None = None,
    asked: Algorithm = Algorithm.AUTO,
) -> Route | None:
    """The route of an all-reduce. The same arguments give the same route.

    Args:
        network: the network of the participants, which are identified by index.
        tensor: what is reduced.
        speeds: the speeds of the work.
        previous: the route of the last all-reduce of these participants, if it was of about this size.
        asked: RING or DIRECT, if the users ask for one; it is used where the paths allow it.

    Returns:
        The route, or None if the paths allow none.
    """
    planner = _Planner(network, tensor, speeds or Speeds())
    for allowed in _stages(network.count, tensor, asked):
        route = planner.plan(allowed, previous)
        if route is not None:
            return route
    return None


def is_untried(network: Network, speeds: Speeds) -> bool:
    """True before the participants have reduced a large tensor."""
    are_rates_known = speeds.ring_bytes_per_second is not None or speeds.direct_bytes_per_second is not None
    return not network.is_known and not are_rates_known


def plan_ring(
    network: Network, tensor: Tensor, speeds: Speeds | None = None, previous: Route | None = None
) -> Route | None:
    """The ring of a collective that has no other algorithm, or None if the paths allow none.

    Args:
        network: the network of the participants; the ring begins with the first of them.
        tensor: a tensor whose all-reduce would take a time in proportion to that of the collective.
        speeds: the speeds of the work.
        previous: the ring of the last collective like it.
    """
    return _Planner(network, tensor, speeds or Speeds()).plan({RING}, previous)


def plan_trees_of(
    owners: Sequence[int], network: Network, tensor: Tensor, speeds: Speeds | None = None
) -> Route | None:
    """The trees of a collective without a ring, or None if the paths allow none.

    Args:
        owners: the participants that have, or get, each part of the tensor (in a broadcast: all of it); the tree roots.
        network: the network of the participants.
        tensor: as for `plan_ring`.
        speeds: the speeds of the work.
    """
    if network.count > limits.DIRECT_PEERS_MAX or network.count * len(owners) > limits.LANE_PARENTS_MAX:
        return None
    model = Model(network, tensor, speeds or Speeds())
    packer = Packer(model)
    trees = tuple(tree for owner in owners if (tree := packer.shortest(owner)) is not None)
    are_too_deep = tensor.are_sums_wide and any(max(tree.depths()) > 1 for tree in trees)
    if len(trees) < len(owners) or are_too_deep:
        return None
    return model.with_time(Route(TREES, tuple(range(network.count)), trees))


def _stages(count: int, tensor: Tensor, asked: Algorithm) -> list[set[Algorithm]]:
    """Sets of algorithms that may be used. Each is for the case that the paths do not allow the sets before it."""
    usual = [{RING, DIRECT, ONE_SHOT, TREES}]
    if count > limits.DIRECT_PEERS_MAX:
        usual = [{RING}]
    elif count <= 2:
        usual = [{RING, ONE_SHOT}]
    elif tensor.are_sums_wide:
        usual = [{DIRECT, TREES}, {RING}]
    if asked is RING or (asked is DIRECT and count <= limits.DIRECT_PEERS_MAX):
        return [{asked}, *usual]
    return usual


class _Planner:
    """Finds routes for one tensor."""

    def __init__(self, network: Network, tensor: Tensor, speeds: Speeds) -> None:
        self._network = network
        self._tensor = tensor
        self._speeds = speeds
        self._model = Model(network, tensor, speeds)
        self._everyone = tuple(range(network.count))

    def plan(self, allowed: set[Algorithm], previous: Route | None) -> Route | None:
        """The best route by these algorithms, or the previous one if that is about as good; None if there is none."""
        if len(self._everyone) < 2:
            return Route(RING, self._everyone)
        if (
            is_untried(self._network, self._speeds)
            and DIRECT in allowed
            and self._model.with_time(Route(DIRECT, self._everyone)) is not None
        ):
            allowed = allowed - {RING}
        best = min(self._simple(allowed), key=self._cost, default=None)
        kept = self._kept(allowed, previous)
        cost_max = min(
            math.inf if best is None else self._cost(best) * (100 - limits.ROUTE_GAIN_MIN_PERCENT) / 100,
            math.inf if kept is None else self._cost(kept) * (100 - limits.ROUTE_CHANGE_MIN_PERCENT) / 100,
        )
        for route in self._refined(allowed, cost_max):
            best = route
        if best is None or kept is None:
            return best or kept
        is_better = 100 * self._cost(best) <= (100 - limits.ROUTE_CHANGE_MIN_PERCENT) * self._cost(kept)
        return best if is_better else kept

    def _cost(self, route: Route) -> int:
        """The time of a route, lengthened for its roundings."""
        count = len(self._everyone)
        if not self._tensor.is_quantised or count <= 2:
            return route.time_ns
        # From no penalty for the two roundings of a direct exchange to the whole one for the N of a ring.
        worse = (limits.QUANTIZED_DIRECT_PERCENT_MAX - 100) * (self._model.roundings(route) - 2)
        return route.time_ns * (100 * (count - 2) + worse) // (100 * (count - 2))

    def _kept(self, allowed: set[Algorithm], previous: Route | None) -> Route | None:
        """The previous route as the network is now; None if it must not be used any more."""
        if previous is None or previous.algorithm not in allowed or sorted(previous.order) != list(self._everyone):
            return None
        if previous.algorithm is ONE_SHOT and not self._is_small:
            return None
        if self._tensor.are_sums_wide and any(max(tree.depths()) > 1 for tree in previous.trees):
            return None
        return self._model.with_time(previous)

    @property
    def _is_small(self) -> bool:
        sent_bytes = (len(self._everyone) - 1) * self._tensor.wire_bytes
        return not self._tensor.is_quantised and sent_bytes <= limits.ONE_SHOT_BYTES_MAX

    # --- Candidates ---------------------------------------------------------------------------------------------------

    def _simple(self, allowed: set[Algorithm]) -> Iterator[Route]:
        """The routes that treat all paths alike, if the paths allow them. Of equal routes, the first one is taken."""
        for algorithm in (ONE_SHOT, DIRECT, RING):
            if algorithm in allowed and (algorithm is not ONE_SHOT or self._is_small):
                route = self._model.with_time(Route(algorithm, self._everyone))
                if route is not None:
                    yield route

    def _refined(self, allowed: set[Algorithm], cost_max: float) -> Iterator[Route]:
        """Routes that follow the rates of paths, each cheaper than the one before."""
        if TREES in allowed and self._trees_ns_min() <= cost_max:
            packer = Packer(self._model)
            groups = [packer.stars()]
            if not self._tensor.are_sums_wide and len(self._everyone) > 3:  # All trees of three are stars.
                groups.append(packer.trees())
            for group in groups:
                for trees in group:
                    route = Route(TREES, self._everyone, tuple(trees))
                    moving_ns = self._model.moving_ns(route)
                    if moving_ns > cost_max:
                        break  # The next ones of this group move their bytes no quicker.
                    route = replace(route, time_ns=moving_ns + self._model.trees_latency_ns(route.trees))
                    if self._cost(route) <= cost_max:
                        cost_max = self._cost(route)
                        yield route
        if RING in allowed and self._is_ring_within(cost_max):
            ring = self._quickest_ring()
            if ring is not None and self._cost(ring) <= cost_max:
                yield ring

    def _quickest_ring(self) -> Route | None:
        if len(self._everyone) > limits.DIRECT_PEERS_MAX:
            order = find_order(self._everyone, self._network.is_usable)
        else:
            order = quickest_order(self._rates, self._model.hop_ns)
        if order is None:
            return None
        first = order.index(0)  # As in the plan of a broadcast, whose root is the first participant.
        return self._model.with_time(Route(RING, (*order[first:], *order[:first])))

    @property
    def _rates(self) -> list[list[float]]:
        return [[math.inf if rate is None else rate for rate in row] for row in self._network.path_bytes_per_second]

    # --- Bounds -------------------------------------------------------------------------------------------------------

    def _is_ring_within(self, ns_max: float) -> bool:
        """False if no ring takes at most this time: a ring uses each host, two paths of each, and connects all."""
        count, tensor = len(self._everyone), self._tensor
        if count <= 3 or count > limits.DIRECT_PEERS_MAX:
            return True
        hosts = [rate for rate in self._network.host_bytes_per_second if rate is not None]
        rate_max = float(min([self._speeds.rate(RING), *hosts]))
        load = 2 * (count - 1) * tensor.wire_bytes * limits.SECOND / count
        if load / max(1, rate_max) > ns_max:
            return False
        rates = self._rates
        delay_ns = delay_bound(rates, self._model.hop_ns)
        if delay_ns == math.inf:
            return True  # There is no ring: the search will find that out.
        return 2 * (count - 1) * delay_ns / count + load / max(1, min(rate_max, rate_bound(rates))) <= ns_max

    def _trees_ns_min(self) -> int:
        """A lower bound for the time of all trees: each tree has an edge at each host, and N - 1 edges."""
        count, wire_bytes, rate_max = len(self._everyone), self._tensor.wire_bytes, self._speeds.rate(TREES)
        hosts = [rate_max if rate is None else min(rate, rate_max) for rate in self._network.host_bytes_per_second]
        longest_ns, slowest, totals = 0, min(hosts), []
        for one in self._everyone:
            paths = self._paths_of(one)
            if not paths:
                return 0
            longest_ns = max(longest_ns, min(hop_ns for hop_ns, _ in paths))
            rates = [rate for _, rate in paths if rate is not None]
            if len(rates) == len(paths):
                totals.append(sum(rates))
                slowest = min(slowest, totals[-1])
        bounds = [(wire_bytes, slowest), (2 * (count - 1) * wire_bytes, sum(hosts))]
        if len(totals) == count:
            bounds.append((2 * (count - 1) * wire_bytes, sum(totals)))
        return 2 * longest_ns + max(load * limits.SECOND // max(1, rate) for load, rate in bounds)

    def _paths_of(self, one: int) -> list[tuple[int, int | None]]:
        """Latency and rate of the paths of a host."""
        rates = self._network.path_bytes_per_second[one]
        return [
            (hop_ns, rates[other])
            for other, hop_ns in enumerate(self._model.hop_ns[one])
            if other != one and rates[other] != 0
        ]
