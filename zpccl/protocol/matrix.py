"""What is known about the paths between peers and about their hosts, from what attempts have moved.

A sample is what one peer sent to another in an attempt, and how long it was busy with that. Whether its rate is the
rate of the path depends on what limited it:

    something else   The link waited for bytes: the path can do at least as much. The estimate may only rise.
    the path         The estimate falls to the rate at once if that is half of it or less: a plan that is wrong by a
                     factor takes longer by this factor, each time. It rises to the geometric mean of both. If both
                     differ by less than a factor of two, it moves half as far, so that it varies less than the path.
    a host           Several links of a host had bytes waiting all the time, and all were slower than their paths were
                     before: what they carried together is the rate of the host. The paths can do at least as much.

Which of these was the limit is a guess. In a probe (optimize_topology) it is known, since one host sends to one other,
or to all others, and nothing else is under way. What a probe has shown holds, and is renewed by attempts, while these
take about as long as their plans say. If one takes much longer, the rates of those paths are doubted that were busy for
most of it, and attempts show their rates from then on. One path that has fallen delays all the others.

Each of several links of a host that waited for their paths has kept some part of its path's rate. Links that kept less
than half of the best link's part are slow for their own reason.

A path that has never been the limit counts as unlimited. Nothing is known about a path that was never used. If other
paths of the same peers have shown their rates, it counts as their median, the upper of two. That is high enough for a
plan to try it, but no promise. Plans avoid slow paths, so these are not measured again. So an estimate that is not
renewed doubles with every RATE_DOUBLING_NS: the slower a path was, the later it is tried again.

Only the master needs all this, and a new master starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zpccl import limits
from zpccl.protocol.network import Network

P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Sample(Generic[P]):
    """What one peer has sent to another in an attempt."""

    sender: P
    receiver: P
    sent_bytes: int
    busy_ns: int
    """Time in which bytes were waiting or on their way."""
    is_limited: bool
    """True if bytes were waiting to be sent all this time."""

    @property
    def rate(self) -> int:
        """In bytes per second."""
        return max(1, self.sent_bytes * limits.SECOND // max(1, self.busy_ns))


@dataclass(slots=True)
class _Estimate:
    """A rate."""

    rate: int | None
    """In bytes per second; None: it has never been the limit."""
    seen_ns: int
    is_probed: bool = False
    """It was measured on purpose."""
    is_doubted: bool = False
    """An attempt has contradicted that. The rate is what attempts have shown since then."""

    def was_probed(self, now_ns: int) -> bool:
        """True if it was measured on purpose, and this or an attempt has shown its rate within RATE_DOUBLING."""
        return self.is_probed and now_ns - self.seen_ns < limits.RATE_DOUBLING_NS

    def holds(self, now_ns: int) -> bool:
        """The same, and the rate is the one that was measured."""
        return self.was_probed(now_ns) and not self.is_doubted

    def rate_at(self, now_ns: int) -> int | None:
        """The rate, doubled for each RATE_DOUBLING_NS in which it was not renewed."""
        if self.rate is None:
            return None
        return self.rate << min(32, max(0, now_ns - self.seen_ns) // limits.RATE_DOUBLING_NS)

    def observe(self, rate: int, now_ns: int, *, is_limited: bool) -> None:
        """Takes a new rate into account: as a lower bound if the path did not limit it."""
        known = self.rate_at(now_ns)
        self.is_doubted = True
        if is_limited and known is None:
            self.rate, self.seen_ns = rate, now_ns
        elif known is not None and (is_limited or rate > known):
            if 2 * rate > known:
                rate = math.isqrt(known * (math.isqrt(known * rate) if rate < 2 * known else rate))
            self.rate, self.seen_ns = max(1, rate), now_ns
        elif known is None:
            self.seen_ns = now_ns


class Matrix(Generic[P]):
    """Rates and round trips of the paths between peers, and rates of their hosts."""

    def __init__(self) -> None:
        self._paths: dict[tuple[P, P], _Estimate] = {}  # By sender and receiver.
        self._hosts: dict[tuple[P, bool], _Estimate] = {}  # By peer and whether it sends.
        self._round_trips_ns: dict[frozenset[P], int] = {}
        self.changes = 0
        """How often something was observed or forgotten. A plan made before the last change may be out of date."""

    def observe(
        self, sender: P, receiver: P, sent_bytes: int, busy_ns: int, now_ns: int, *, is_limited: bool = True
    ) -> None:
        """Takes into account what one peer has sent to another.

        Args:
            sender: the peer that sent.
            receiver: the peer that received.
            sent_bytes: how much it sent; too few bytes show nothing.
            busy_ns: how long that took.
            now_ns: the time.
            is_limited: True if only the path limited it; False if the path could perhaps have carried more.
        """
        if sent_bytes < limits.RATE_SAMPLE_BYTES or busy_ns <= 0:
            return
        # Until the TCP window has opened, a path shows less than it can carry.
        round_trip_ns = self._round_trips_ns.get(frozenset((sender, receiver)), 0)
        is_limited = is_limited and busy_ns >= limits.RATE_SAMPLE_ROUND_TRIP_COUNT * round_trip_ns
        self.changes += 1
        estimate = self._paths.setdefault((sender, receiver), _Estimate(None, now_ns))
        estimate.observe(Sample(sender, receiver, sent_bytes, busy_ns, is_limited).rate, now_ns, is_limited=is_limited)

    def observe_probe(self, sender: P, samples: Sequence[Sample[P]], now_ns: int) -> None:
        """What a peer has sent on purpose to one other peer alone, or to all others at once.

        Paths within a host are said to be no limit. What a host sends in all is known only if it has no such paths.
        """
        self.changes += 1
        if len(samples) == 1:
            rate = samples[0].rate if samples[0].is_limited else None
            self._paths[sender, samples[0].receiver] = _Estimate(rate, now_ns, is_probed=True)
        elif all(sample.is_limited for sample in samples):
            rate = sum(sample.rate for sample in samples)
            self._hosts[sender, True] = _Estimate(rate, now_ns, is_probed=True)
            self._hosts.pop((sender, False), None)

    def observe_attempt(self, samples: Iterable[Sample[P]], now_ns: int, *, trusted_ns: float = 0) -> None:
        """Takes all samples of an attempt into account, after finding out what limited each of them.

        Args:
            samples: of all peers.
            now_ns: the time.
            trusted_ns: what was probed holds for each path that was busy no longer, and for each host with at most one
                path that was busy longer.
        """
        samples = list(samples)
        by_host: dict[tuple[P, bool], list[Sample[P]]] = {}
        for sample in samples:
            for host in ((sample.sender, True), (sample.receiver, False)):
                by_host.setdefault(host, []).append(sample)
        explained: set[tuple[P, P]] = set()
        for (peer, is_sending), group in by_host.items():
            slowed = self._slowed_by_host(group, now_ns)
            rate = sum(sample.rate for sample in group)
            late = [sample for sample in group if sample.busy_ns > trusted_ns]
            probed = self._hosts.get((peer, True))
            if probed is not None and probed.holds(now_ns) and len(late) <= 1:
                probed.seen_ns = now_ns
                slowed = [sample for sample in slowed if sample not in late]
            elif sum(sample.sent_bytes for sample in group) >= limits.RATE_SAMPLE_BYTES:
                self._observe_host(peer, is_sending, rate, now_ns, bool(slowed))
            explained.update((sample.sender, sample.receiver) for sample in slowed)
        for sample in samples:
            known = self._paths.get((sample.sender, sample.receiver))
            if sample.busy_ns <= trusted_ns and known is not None and known.holds(now_ns):
                known.seen_ns = now_ns
                continue
            is_limited = sample.is_limited and (sample.sender, sample.receiver) not in explained
            self.observe(
                sample.sender, sample.receiver, sample.sent_bytes, sample.busy_ns, now_ns, is_limited=is_limited
            )

    def observe_round_trip(self, one: P, other: P, round_trip_ns: int) -> None:
        """The round-trip time of a path."""
        pair = frozenset((one, other))
        known = self._round_trips_ns.get(pair, round_trip_ns)
        self._round_trips_ns[pair] = max(0, (3 * known + round_trip_ns) // 4)
        self.changes += 1

    def is_probed(self, one: P, other: P, now_ns: int) -> bool:
        """True if a path was measured on purpose, in both directions, and that still holds."""
        known = self._known(one, other)
        return len(known) == 2 and all(estimate.holds(now_ns) for estimate in known)

    def was_probed(self, one: P, other: P, now_ns: int) -> bool:
        """The same, or attempts have shown since then that the path is slower."""
        known = self._known(one, other)
        return len(known) == 2 and all(estimate.was_probed(now_ns) for estimate in known)

    def is_doubted(self, one: P, other: P, since_ns: int) -> bool:
        """True if a path was measured on purpose, and an attempt after this time has contradicted that."""
        known = self._known(one, other)
        return any(estimate.is_probed and estimate.is_doubted and estimate.seen_ns > since_ns for estimate in known)

    def forget(self, peer: P) -> None:
        """Forgets a lost peer."""
        self.changes += 1
        self._paths = {pair: estimate for pair, estimate in self._paths.items() if peer not in pair}
        self._hosts = {host: estimate for host, estimate in self._hosts.items() if host[0] != peer}
        self._round_trips_ns = {pair: value for pair, value in self._round_trips_ns.items() if peer not in pair}

    def paths(self) -> Iterable[tuple[P, P, int | None, int, int | None]]:
        """What is known about each path: sender, receiver, measured rate, when it was measured, and round trip."""
        for (sender, receiver), estimate in self._paths.items():
            round_trip_ns = self._round_trips_ns.get(frozenset((sender, receiver)))
            yield sender, receiver, estimate.rate, estimate.seen_ns, round_trip_ns

    def host_rate(self, peer: P, *, is_sending: bool) -> int | None:
        """The measured rate at which a host can send, or receive; None if the host has never been the limit."""
        estimate = self._hosts.get((peer, is_sending))
        return None if estimate is None else estimate.rate

    def network(
        self, peers: Sequence[P], is_usable: Callable[[P, P], bool], now_ns: int, used_percent: int = 100
    ) -> Network:
        """What a plan for these peers may use.

        Args:
            peers: the participants; the network refers to them by their index here.
            is_usable: whether the path between two of them may be used; symmetric.
            now_ns: the time.
            used_percent: how much the plan may use of a path that was measured on purpose and has not fallen since.
        """
        count = len(peers)
        rates: list[list[int | None]] = [[None] * count for _ in peers]
        round_trips_ns: list[list[int | None]] = [[None] * count for _ in peers]
        unused: list[tuple[int, int]] = []
        for i, one in enumerate(peers):
            for j, other in enumerate(peers[:i]):
                round_trips_ns[i][j] = round_trips_ns[j][i] = self._round_trips_ns.get(frozenset((one, other)))
                known = self._known(one, other)
                if not is_usable(one, other):
                    rates[i][j] = rates[j][i] = 0
                elif known:
                    rate = _least(known, now_ns)
                    if rate is not None and self.is_probed(one, other, now_ns):
                        rate = max(1, rate * used_percent // 100)
                    rates[i][j] = rates[j][i] = rate
                else:
                    unused.append((i, j))
        shown = sorted(rate for i, row in enumerate(rates) for rate in row[:i] if rate)
        if shown:
            for i, j in unused:
                rates[i][j] = rates[j][i] = shown[len(shown) // 2]
        hosts = tuple(self._host_in_use(peer, now_ns) for peer in peers)
        return Network(tuple(map(tuple, rates)), tuple(map(tuple, round_trips_ns)), hosts)

    def _host_in_use(self, peer: P, now_ns: int) -> int | None:
        """The rate at which a host sends and receives tensors at the same time; None: not known."""
        known = [self._hosts[host] for host in ((peer, True), (peer, False)) if host in self._hosts]
        rate = _least(known, now_ns)
        if rate is None or not all(estimate.holds(now_ns) for estimate in known):
            return rate
        return max(1, rate * limits.HOST_USED_PERCENT // 100)

    def _known(self, one: P, other: P) -> list[_Estimate]:
        """What is known about the two directions of a path."""
        return [self._paths[pair] for pair in ((one, other), (other, one)) if pair in self._paths]

    def _observe_host(self, peer: P, is_sending: bool, rate: int, now_ns: int, is_limited: bool) -> None:
        self.changes += 1
        estimate = self._hosts.setdefault((peer, is_sending), _Estimate(None, now_ns))
        estimate.observe(max(1, rate), now_ns, is_limited=is_limited)

    def _slowed_by_host(self, group: Sequence[Sample[P]], now_ns: int) -> list[Sample[P]]:
        """The samples in one direction of a host that are slow because of this host."""
        kept: dict[int, float] = {}  # By sample: the part of its path's rate that it kept.
        for place, sample in enumerate(group):
            estimate = self._paths.get((sample.sender, sample.receiver))
            known = None if estimate is None else estimate.rate_at(now_ns)
            if sample.is_limited and known is not None:
                kept[place] = sample.rate / known
        best = max(kept.values(), default=1.0)
        alike = [group[place] for place, part in kept.items() if 2 * part >= best]
        return alike if len(alike) >= 2 and 100 * best < limits.HOST_LIMITED_PERCENT_MAX else []


def _least(estimates: Iterable[_Estimate], now_ns: int) -> int | None:
    rates = [rate for estimate in estimates if (rate := estimate.rate_at(now_ns)) is not None]
    return min(rates, default=None)
