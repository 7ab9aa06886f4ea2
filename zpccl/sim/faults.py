"""What goes wrong: profiles of faults, and the injector that makes them happen.

Rates are per simulated second for the whole run, chances are per occasion. Every fault that can fail a collective is
entered in the journal, with the peers that it concerns: a collective that aborts must find its cause there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zpccl.limits import HEARTBEAT_TIMEOUT_NS, RECOVERY_WAIT_NS, SECOND, STALL_TIMEOUT_NS

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import PeerNode


@dataclass(frozen=True)
class Faults:
    """A profile of faults."""

    name: str
    joins: float = 0.0
    crashes: float = 0.0
    leaves: float = 0.0
    connection_breaks: float = 0.0
    link_breaks: float = 0.0
    strangers: float = 0.0
    master_crashes: float = 0.0
    master_absence_ns_max: int = 5 * SECOND
    fails_nothing: bool = False
    """No call of a member may fail, whatever happens to the master."""
    spares_members: bool = False
    """Peers crash, leave and lose connections only until they are admitted."""
    silent_chance: float = 0.0
    """That a break or crash is noticed by a timeout only."""
    refusal_chance: float = 0.0
    """That a try to connect, to the master or to a peer, fails."""
    flap_chance: float = 0.0
    """That a new connection to the master breaks at once, and that its messages take long."""
    slow_chance: float = 0.0
    """That a peer is slow all its life."""
    withdraw_chance: float = 0.0
    """That a call has a short timeout."""
    mismatch_chance: float = 0.0
    """That a peer calls a collective with another count."""
    muddle_chance: float = 0.0
    """That a program makes a call which the others do not, at one step."""
    corruption_chance: float = 0.0
    """That a peer computes a wrong result."""
    duplicate_chance: float = 0.0
    """That a control message comes twice."""

    def hasten(self, factor: float) -> Faults:
        """The same faults, closer together."""
        return replace(self, **{name: getattr(self, name) * factor for name in RATES})


RATES = ("joins", "crashes", "leaves", "connection_breaks", "link_breaks", "strangers", "master_crashes")
"""The faults that come by themselves."""

CALM = Faults("calm", joins=0.5)
CHURN = Faults("churn", joins=0.6, crashes=0.4, leaves=0.15, silent_chance=0.2, slow_chance=0.1)
FLAKY_NETWORK = Faults(
    "flaky",
    joins=0.2,
    connection_breaks=1.0,
    link_breaks=1.0,
    silent_chance=0.2,
    refusal_chance=0.15,
    flap_chance=0.2,
    slow_chance=0.1,
)
JOINERS = Faults(
    "joiners",
    joins=2.0,
    crashes=0.8,
    leaves=0.2,
    connection_breaks=1.0,
    link_breaks=1.0,
    strangers=0.5,
    spares_members=True,
    silent_chance=0.3,
    refusal_chance=0.3,
    flap_chance=0.1,
)
IMPATIENT = Faults("impatient", joins=0.3, crashes=0.05, withdraw_chance=0.15, mismatch_chance=0.02, slow_chance=0.3)
MUDDLED = Faults("muddled", joins=0.5, crashes=0.05, muddle_chance=0.05, mismatch_chance=0.02)
HOSTILE = Faults("hostile", joins=0.3, crashes=0.1, strangers=2.0, corruption_chance=0.03, duplicate_chance=0.2)
CHAOS = Faults(
    "chaos",
    joins=0.7,
    crashes=0.3,
    leaves=0.1,
    connection_breaks=0.6,
    link_breaks=0.6,
    strangers=0.3,
    silent_chance=0.2,
    refusal_chance=0.1,
    flap_chance=0.1,
    slow_chance=0.1,
    withdraw_chance=0.05,
    mismatch_chance=0.01,
    corruption_chance=0.01,
    duplicate_chance=0.05,
)
HEADLESS = Faults("headless", joins=0.5, master_crashes=0.5, master_absence_ns_max=2 * SECOND, fails_nothing=True)
REGICIDE = Faults(
    "regicide",
    joins=0.5,
    crashes=0.3,
    leaves=0.1,
    connection_breaks=0.5,
    link_breaks=0.4,
    master_crashes=0.4,
    silent_chance=0.2,
    refusal_chance=0.1,
    flap_chance=0.1,
    slow_chance=0.1,
    withdraw_chance=0.05,
    duplicate_chance=0.05,
)
PROFILES = {
    profile.name: profile
    for profile in (CHURN, FLAKY_NETWORK, JOINERS, IMPATIENT, HOSTILE, MUDDLED, CHAOS, CALM, HEADLESS, REGICIDE)
}
HEALED = replace(CALM, name="healed", joins=0.0)


SLOW_GRACE_NS = 3 * SECOND
"""The grace period of masters where paths are slow: a report takes three times the way of a message."""
TAKEOVER_NS = SLOW_GRACE_NS + RECOVERY_WAIT_NS + 3 * SECOND
"""How long after the return of a master a fault may be noticed that happened before."""
EFFECT_NS = 3 * SECOND
"""How long a fault is felt after all have noticed it."""
NOTICE_NS = max(HEARTBEAT_TIMEOUT_NS, STALL_TIMEOUT_NS)
"""How long a silent fault stays unnoticed."""


@dataclass(frozen=True)
class Incident:
    """A fault that happened, and the peers without which it could not have."""

    time_ns: int
    over_ns: int
    """Until when an attempt may begin, or a member be removed, that fails because of it."""
    kind: str
    peers: frozenset[bytes]


class Injector:
    """Makes the faults of a profile happen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._era = 0  # Timers of older eras do nothing.

    def start(self, faults: Faults) -> None:
        """Begins with a profile; the one before it ends."""
        self._era += 1
        for rate, strike in (
            (faults.joins, self._join),
            (faults.crashes, self._crash),
            (faults.leaves, self._leave),
            (faults.connection_breaks, self._break_connection),
            (faults.link_breaks, self._break_link),
            (faults.strangers, self._stranger),
            (faults.master_crashes, self._crash_master),
        ):
            if rate > 0:
                self._schedule(rate, strike, self._era)

    def _schedule(self, rate: float, strike: Callable[[], None], era: int) -> None:
        def happen() -> None:
            if era == self._era:
                strike()
                self._schedule(rate, strike, era)

        self._cluster.clock.after(int(self._rng.expovariate(rate) * SECOND), happen)

    def _victims(self) -> list[PeerNode]:
        return [node for node in self._cluster.live_nodes() if not self._cluster.spares(node)]

    def _is_silent(self) -> bool:
        return self._rng.random() < self._cluster.faults.silent_chance

    def _join(self) -> None:
        if len(self._cluster.live_nodes()) < self._cluster.peers_max:
            self._cluster.spawn()

    def _crash(self) -> None:
        victims = self._victims()
        if victims:
            self._rng.choice(victims).crash(is_silent=self._is_silent())

    def _leave(self) -> None:
        victims = self._victims()
        if victims:
            self._rng.choice(victims).leave()

    def _break_connection(self) -> None:
        victims = [node for node in self._victims() if node.connection is not None]
        if victims:
            node = self._rng.choice(victims)
            assert node.connection is not None
            is_silent = self._is_silent()
            self._cluster.note("connection broken", node, is_silent=is_silent)
            self._cluster.network.break_connection(node.connection, is_silent=is_silent)

    def _break_link(self) -> None:
        victims = {node.peer_id for node in self._victims()}
        pairs = [pair for pair in self._cluster.links.up() if not victims.isdisjoint(pair)]
        if pairs:
            one, other = self._rng.choice(pairs)
            nodes, is_silent = self._cluster.nodes, self._is_silent()
            self._cluster.note("link broken", nodes[one], nodes[other], is_silent=is_silent)
            self._cluster.links.break_link(one, other, is_silent=is_silent)

    def _crash_master(self) -> None:
        self._cluster.crash_master(self._rng.randrange(self._cluster.faults.master_absence_ns_max))

    def _stranger(self) -> None:
        self._cluster.strangers.visit()
