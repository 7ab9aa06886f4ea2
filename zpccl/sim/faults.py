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
    cuts: float = 0.0
    black_holes: float = 0.0
    path_faults_max: int = 2
    """Paths that are cut or black holes at the same time."""
    path_fault_ns_max: int = 60 * SECOND
    hangs: float = 0.0
    """That a trainer stops, with all its sockets alive."""
    hang_ns_max: int = 40 * SECOND
    straggler_timeout_ns: int | None = None
    """Of the master."""
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
PATHS = Faults(
    "paths",
    joins=0.2,
    crashes=0.03,
    cuts=0.2,
    black_holes=0.2,
    hangs=0.04,
    straggler_timeout_ns=20 * SECOND,
    silent_chance=0.2,
)
PROFILES = {
    profile.name: profile
    for profile in (CHURN, FLAKY_NETWORK, JOINERS, IMPATIENT, HOSTILE, MUDDLED, CHAOS, CALM, HEADLESS, REGICIDE, PATHS)
}
HEALED = replace(CALM, name="healed", joins=0.0)


SLOW_GRACE_NS = 3 * SECOND
"""The grace period of masters where paths are slow: a report takes three times the way of a message."""
TAKEOVER_NS = SLOW_GRACE_NS + RECOVERY_WAIT_NS + 3 * SECOND
"""How long after the return of a master a fault may be noticed that happened before."""
EFFECT_NS = 3 * SECOND
"""How long a fault is felt after all have noticed it."""
LASTING_NS = 10**18
"""Until when a fault is felt that is not over."""
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
        self._damaged: dict[tuple[bytes, bytes], Incident] = {}
        self._hung: dict[bytes, Incident] = {}

    def start(self, faults: Faults) -> None:
        """Begins with a profile; the one before it ends, and what lasts of it."""
        self._era += 1
        for pair in list(self._damaged):
            self._restore_path(pair)
        for peer_id in list(self._hung):
            self._wake(peer_id)
        for rate, strike in (
            (faults.joins, self._join),
            (faults.crashes, self._crash),
            (faults.leaves, self._leave),
            (faults.connection_breaks, self._break_connection),
            (faults.link_breaks, self._break_link),
            (faults.cuts, lambda: self._damage_path(is_cut=True)),
            (faults.black_holes, lambda: self._damage_path(is_cut=False)),
            (faults.hangs, self._hang),
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

    def _damage_path(self, *, is_cut: bool) -> None:
        """Cuts the path between two peers, or makes it a black hole, for a while."""
        links, nodes = self._cluster.links, self._cluster.nodes
        pairs = [pair for pair in links.up() if pair not in self._damaged]
        if not pairs or len(self._damaged) >= self._cluster.faults.path_faults_max:
            return
        pair = self._rng.choice(pairs)
        kind = "path cut" if is_cut else "path is a black hole"
        self._damaged[pair] = self._cluster.note(kind, *map(nodes.__getitem__, pair), lasts=True)
        links.damage(*pair, is_cut=is_cut)
        self._later(self._cluster.faults.path_fault_ns_max, lambda: self._restore_path(pair))

    def _restore_path(self, pair: tuple[bytes, bytes]) -> None:
        self._cluster.links.restore(*pair)
        self._cluster.end_incident(self._damaged.pop(pair))

    def _hang(self) -> None:
        """A trainer stops, and goes on after a while as if nothing had been."""
        victims = [node for node in self._victims() if node.peer_id not in self._hung]
        if victims:
            node = self._rng.choice(victims)
            self._hung[node.peer_id] = self._cluster.note("hung", node, lasts=True)
            node.hang()
            self._later(self._cluster.faults.hang_ns_max, lambda: self._wake(node.peer_id))

    def _wake(self, peer_id: bytes) -> None:
        self._cluster.nodes[peer_id].wake()
        self._cluster.end_incident(self._hung.pop(peer_id))

    def _later(self, delay_ns_max: int, end: Callable[[], None]) -> None:
        """Ends a lasting fault, unless its era has ended, and it with it."""
        era = self._era
        self._cluster.clock.after(self._rng.randrange(delay_ns_max), lambda: end() if era == self._era else None)

    def _crash_master(self) -> None:
        self._cluster.crash_master(self._rng.randrange(self._cluster.faults.master_absence_ns_max))

    def _stranger(self) -> None:
        self._cluster.strangers.visit()
