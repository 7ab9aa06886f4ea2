"""Fault injection: profiles of faults, and the injector that makes them happen.

Rates are per simulated second for the whole run, chances are per occasion. Every fault that can fail a collective is
recorded as an Incident with the peers that it concerns: an aborted collective must have its cause there.

Faults that strike are numbered in order. A run can leave out single faults by number, and whole kinds: shrinking a
failure uses this to remove what the failure does not need.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from zpccl.limits import (
    CUT_OFF_SPREAD_NS,
    DISCONNECT_GRACE_NS,
    HEARTBEAT_TIMEOUT_NS,
    MASTER_STAY_FIRST_NS,
    MASTER_STAY_NS,
    MS,
    QUORUM_WAIT_NS,
    RECOVERY_WAIT_NS,
    SECOND,
    STALL_TIMEOUT_NS,
)

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import SimulatedMaster, SimulatedPeer


@dataclass(frozen=True)
class Faults:
    """A profile of faults."""

    name: str
    steps: int = 1000
    """Steps before the healing, unless given on the command line."""
    peers: tuple[int, int] = (2, 6)
    """How many peers start: minimum and maximum."""
    joins: float = 0.0
    crashes: float = 0.0
    leaves: float = 0.0
    connection_breaks: float = 0.0
    link_breaks: float = 0.0
    cuts: float = 0.0
    black_holes: float = 0.0
    path_faults_max: int = 2
    """Maximum number of paths that are cut or black holes at the same time."""
    path_fault_ns_max: int = 60 * SECOND
    hangs: float = 0.0
    """A training program stops while its sockets stay alive."""
    hang_ns_max: int = 40 * SECOND
    straggler_timeout_ns: int | None = None
    """Option of the master: how long it waits for a member that does not vote."""
    desertions: float = 0.0
    """A peer from which others fetch state is killed."""
    writes: float = 0.0
    """The user of a peer from which others fetch state writes to that state."""
    strangers: float = 0.0
    master_crashes: float = 0.0
    master_absence_ns_max: int = 5 * SECOND
    masters: int = 1
    """Number of masters in the list of the peers; all but the first are standbys."""
    stalls: float = 0.0
    """Messages from some peers, to them, or both are delayed, or lost with their connection."""
    partitions: float = 0.0
    """Some peers cannot reach some masters for a while."""
    outages: float = 0.0
    """The network of all peers is away for a while: all links and all connections to the master break."""
    is_duel: bool = False
    """Partitions are short, and mostly hit the leading master."""
    revocations: float = 0.0
    """The key of a peer is revoked: at one master now, at each other master seconds later."""
    master_pauses: float = 0.0
    """A master stands still for a while, then takes all that has come at once."""
    peer_pauses: float = 0.0
    """The loop of a peer stands still for a while, as when code of the user holds the GIL; its engine goes on."""
    busy_chance: float = 0.3
    """A master is busy: it takes each event some milliseconds later, with those that have come meanwhile."""
    behind_chance: float = 0.3
    """A peer dies while its vote is on its way and others are one call ahead of it: see nemesis.py."""
    ambush_chance: float = 0.0
    """A master dies or loses connections exactly when its state changes: see nemesis.py."""
    first_chance: float = 0.0
    """A newcomer, or members that were removed, are the first to reach a restarted master; all others are cut off."""
    foreign_chance: float = 0.0
    """With several masters: a server of another protocol version answers at the address of a dead one."""
    list_chance: float = 0.0
    """A newcomer is configured with another list of masters."""
    far_chance: float = 0.0
    """The control path of a peer has a one-way latency of FAR_NS."""
    fleeting_chance: float = 0.0
    """A peer goes, or loses its connection, soon after its report to a master that does not lead yet."""
    bulk_chance: float = 0.0
    """The report of a peer takes up to BULK_NS."""
    is_tight: bool = False
    """The limits on calls are so low that the programs reach them."""
    fails_nothing: bool = False
    """No call of a member may fail, whatever happens to the master."""
    spares_members: bool = False
    """Faults hit peers only until they are admitted."""
    silent_chance: float = 0.0
    """A break or crash is noticed only by a timeout."""
    refusal_chance: float = 0.0
    """An attempt to connect, to the master or to a peer, fails."""
    flap_chance: float = 0.0
    """A new connection to the master breaks at once; independently, a new connection has a high latency."""
    slow_chance: float = 0.0
    """A peer is slow for its whole life."""
    skew_chance: float = 0.5
    """The clock of a process has an offset and a drift of up to 1 %."""
    withdraw_chance: float = 0.0
    """A call has a short timeout."""
    fickle_chance: float = 0.0
    """A program whose collective has timed out makes another call before it makes that one again."""
    mismatch_chance: float = 0.0
    """A peer calls a collective with another count than the others."""
    cross_chance: float = 0.0
    """A peer calls an all-reduce that the others do not call, so that they wait for each other."""
    muddle_chance: float = 0.0
    """A program makes a call that the others do not make, at one step."""
    wander_chance: float = 0.0
    """A process runs a random program: see wander.py."""
    corruption_chance: float = 0.0
    """A peer computes a wrong result."""
    damage_chance: float = 0.0
    """A peer sends wrong data of a shared state."""
    duplicate_chance: float = 0.0
    """A control message is delivered twice."""

    def without(self, kinds: Iterable[str]) -> Faults:
        """The same profile without some kinds of faults."""
        none: dict[str, Any] = dict.fromkeys(kinds, 0.0)
        return replace(self, **none)

    def hasten(self, factor: float) -> Faults:
        """The same profile with all rates multiplied by `factor`."""
        rates: dict[str, Any] = {kind: getattr(self, kind) * factor for kind in RATES}
        return replace(self, **rates)


KINDS = tuple(kind.name for kind in fields(Faults) if kind.type == "float")
"""All kinds of faults."""
RATES = tuple(kind for kind in KINDS if not kind.endswith("_chance"))
"""The kinds that strike at a rate; the others strike with a chance per occasion."""

CALM = Faults("calm", joins=0.5)
"""Joins only."""
CHURN = Faults("churn", joins=0.6, crashes=0.4, leaves=0.15, outages=0.03, silent_chance=0.2, slow_chance=0.1)
"""Peers join, crash and leave, and at times the network of all peers is away."""
FLAKY_NETWORK = Faults(
    "flaky",
    joins=0.2,
    peer_pauses=0.2,
    connection_breaks=1.0,
    stalls=0.3,
    link_breaks=1.0,
    silent_chance=0.2,
    refusal_chance=0.15,
    flap_chance=0.2,
    slow_chance=0.1,
)
"""Control connections and links break, stall and refuse."""
JOINERS = Faults(
    "joiners",
    joins=2.0,
    crashes=0.8,
    leaves=0.2,
    connection_breaks=1.0,
    stalls=0.5,
    link_breaks=1.0,
    strangers=0.5,
    spares_members=True,
    silent_chance=0.3,
    refusal_chance=0.3,
    flap_chance=0.1,
)
"""Faults hit joiners only: S6."""
IMPATIENT = Faults(
    "impatient",
    joins=0.3,
    peer_pauses=0.3,
    crashes=0.05,
    master_pauses=0.3,
    withdraw_chance=0.15,
    mismatch_chance=0.02,
    slow_chance=0.3,
    fickle_chance=0.3,
)
"""Users give calls up after short timeouts."""
MUDDLED = Faults("muddled", joins=0.5, crashes=0.05, muddle_chance=0.05, mismatch_chance=0.02)
"""Single peers make calls that the others do not make."""
UNRULY = Faults(
    "unruly", joins=0.5, peer_pauses=0.2, crashes=0.1, leaves=0.1, writes=0.5, wander_chance=1.0, slow_chance=0.1
)
"""Random programs instead of the training loop."""
HOSTILE = Faults(
    "hostile",
    joins=0.3,
    crashes=0.1,
    strangers=2.0,
    corruption_chance=0.03,
    damage_chance=0.2,
    duplicate_chance=0.2,
)
"""Strangers, wrong results, wrong state data, duplicated messages."""
CHAOS = Faults(
    "chaos",
    joins=0.7,
    peer_pauses=0.2,
    master_pauses=0.1,
    crashes=0.3,
    leaves=0.1,
    connection_breaks=0.6,
    stalls=0.2,
    link_breaks=0.6,
    strangers=0.3,
    silent_chance=0.2,
    refusal_chance=0.1,
    flap_chance=0.1,
    slow_chance=0.1,
    withdraw_chance=0.05,
    mismatch_chance=0.01,
    corruption_chance=0.01,
    damage_chance=0.05,
    writes=0.3,
    duplicate_chance=0.05,
    fickle_chance=0.1,
)
"""All faults of peers and the network together."""
HEADLESS = Faults(
    "headless",
    steps=3000,
    joins=0.5,
    master_pauses=0.1,
    master_crashes=0.5,
    master_absence_ns_max=2 * SECOND,
    fails_nothing=True,
    ambush_chance=0.05,
    first_chance=0.1,
)
"""The only master crashes and restarts; no call may fail."""
REGICIDE = Faults(
    "regicide",
    steps=3000,
    joins=0.3,
    peer_pauses=0.1,
    master_pauses=0.1,
    crashes=0.05,
    leaves=0.03,
    connection_breaks=0.2,
    stalls=0.05,
    link_breaks=0.2,
    master_crashes=0.2,
    master_absence_ns_max=2 * SECOND,
    silent_chance=0.2,
    refusal_chance=0.1,
    flap_chance=0.1,
    slow_chance=0.1,
    withdraw_chance=0.05,
    duplicate_chance=0.05,
    ambush_chance=0.05,
    first_chance=0.1,
    far_chance=0.1,
    is_tight=True,
    fleeting_chance=0.05,
    bulk_chance=0.05,
    fickle_chance=0.1,
)
"""Master crashes together with faults of peers and the network."""
ANARCHY = replace(REGICIDE, name="anarchy", strangers=0.3, muddle_chance=0.02, mismatch_chance=0.01, wander_chance=0.6)
"""REGICIDE with strangers and random programs."""
MINORITY = Faults(
    "minority",
    steps=3000,
    peers=(3, 6),
    joins=0.2,
    peer_pauses=0.05,
    crashes=0.03,
    connection_breaks=0.1,
    partitions=0.3,
    master_crashes=0.15,
    ambush_chance=0.01,
    first_chance=0.2,
    silent_chance=0.2,
    fleeting_chance=0.05,
    bulk_chance=0.1,
)
"""The only master restarts rarely, and members that it had removed are often the first to reach it again."""
STANDBY = Faults(
    "standby",
    steps=3000,
    joins=0.5,
    master_pauses=0.1,
    master_crashes=0.5,
    masters=2,
    fails_nothing=True,
    ambush_chance=0.05,
    first_chance=0.1,
    foreign_chance=0.1,
)
"""Two masters, one of which crashes at a time; no call may fail."""
SPLIT = Faults(
    "split",
    steps=4000,
    joins=0.2,
    peer_pauses=0.1,
    master_pauses=0.1,
    crashes=0.03,
    leaves=0.03,
    connection_breaks=0.1,
    stalls=0.05,
    link_breaks=0.1,
    master_crashes=0.3,
    master_absence_ns_max=2 * SECOND,
    masters=3,
    partitions=0.2,
    revocations=0.03,
    ambush_chance=0.05,
    first_chance=0.1,
    foreign_chance=0.1,
    list_chance=0.05,
    far_chance=0.1,
    silent_chance=0.2,
    flap_chance=0.05,
    slow_chance=0.1,
    withdraw_chance=0.05,
    fleeting_chance=0.03,
    bulk_chance=0.05,
    fickle_chance=0.1,
)
"""Three masters, with partitions that separate peers from some of them."""
DUEL = Faults(
    "duel",
    steps=3000,
    peers=(2, 4),
    joins=0.6,
    peer_pauses=0.1,
    master_pauses=0.1,
    crashes=0.02,
    leaves=0.02,
    connection_breaks=0.1,
    stalls=0.05,
    master_crashes=0.4,
    master_absence_ns_max=SECOND,
    masters=2,
    partitions=0.5,
    is_duel=True,
    revocations=0.03,
    ambush_chance=0.1,
    first_chance=0.1,
    foreign_chance=0.1,
    list_chance=0.05,
    far_chance=0.1,
    silent_chance=0.2,
    is_tight=True,
    fleeting_chance=0.02,
    bulk_chance=0.05,
)
"""Two masters with frequent short partitions: contested leadership."""
PATHS = Faults(
    "paths",
    joins=0.2,
    peer_pauses=0.1,
    master_pauses=0.05,
    crashes=0.03,
    cuts=0.2,
    black_holes=0.2,
    hangs=0.04,
    straggler_timeout_ns=20 * SECOND,
    cross_chance=0.03,
    silent_chance=0.2,
)
"""Paths between peers are cut or drop large packets; programs hang."""
SWARM = Faults(
    "swarm",
    joins=2.0,
    peer_pauses=0.2,
    crashes=0.3,
    leaves=0.1,
    link_breaks=0.3,
    cuts=0.1,
    black_holes=0.1,
    path_fault_ns_max=20 * SECOND,
    desertions=2.0,
    writes=2.0,
    damage_chance=0.1,
    silent_chance=0.2,
    slow_chance=0.3,
)
"""Faults of syncs: sources die, change or send wrong data."""
_ALL = (
    *(CHURN, FLAKY_NETWORK, JOINERS, IMPATIENT, HOSTILE, MUDDLED, UNRULY, CHAOS, CALM, HEADLESS, REGICIDE, ANARCHY),
    *(MINORITY, STANDBY, SPLIT, DUEL, PATHS, SWARM),
)
PROFILES = {profile.name: profile for profile in _ALL}
_OTHERS = [profile for profile in _ALL if profile not in (SPLIT, DUEL)]
TURNS = tuple(p for index, other in enumerate(_OTHERS) for p in (other, (DUEL, SPLIT)[index % 2]))
"""The profiles by seed. DUEL and SPLIT, the hardest for leadership, are as frequent as all others together."""
HEALED = replace(CALM, name="healed", joins=0.0)
"""No faults: the profile after the healing."""


FAR_NS = 150 * MS
FAR_HANDSHAKE_NS = 4 * FAR_NS
BULK_NS = 5 * SECOND
SLOW_GRACE_NS = 3 * SECOND
"""Recovery grace period of masters where paths are slow: a report needs three one-way delays."""
TAKEOVER_NS = SLOW_GRACE_NS + RECOVERY_WAIT_NS + 3 * SECOND
"""How long after a master's restart earlier faults may be noticed."""
MOVE_NS = QUORUM_WAIT_NS + 2 * (MASTER_STAY_FIRST_NS + MASTER_STAY_NS)
"""Added to TAKEOVER_NS if peers may have to meet at another master."""
EFFECT_NS = 3 * SECOND
"""How long a fault may have effects after all have noticed it."""
LASTING_NS = 10**18
"""End of the effects of a fault that is not over."""
NOTICE_NS = max(HEARTBEAT_TIMEOUT_NS, STALL_TIMEOUT_NS)
"""How long a silent fault may stay unnoticed."""


OUTAGE = "the network of all is away"
"""The kind of an incident that may abort attempts, and for which no member may be removed."""
OUTAGE_SPREAD_NS = 300 * MS
"""In an outage, the longest time from the first peer that the master misses to the last one. For a busy master this is
just below DISCONNECT_GRACE."""


@dataclass(eq=False)
class Incident:
    """A fault that struck, and the peers that it concerns."""

    time_ns: int
    over_ns: int
    """The fault may be the cause of removals until then, and of the failure of attempts that begin until then."""
    kind: str
    peers: frozenset[bytes]


class Injector:
    """Makes the faults of a profile happen.

    Attributes:
        struck: the kinds of all faults that have struck or were skipped; fault number n is struck[n - 1].
        skip: numbers of the faults that are left out.
    """

    def __init__(self, cluster: Cluster, skip: Iterable[int]) -> None:
        self._cluster = cluster
        # The random source of outages is drawn when it is needed, so seeds of profiles without outages stay the same.
        self._rngs = {kind: cluster.child_rng() for kind in RATES if kind != "outages"}
        self._era = 0  # Number of start() calls: timers of earlier profiles do nothing.
        self.struck: list[str] = []
        self.skip = frozenset(skip)
        self._damaged: dict[tuple[bytes, bytes], Incident] = {}
        self._hung: dict[bytes, Incident] = {}
        self._missed: list[SimulatedPeer] = []  # The members that the last outage struck.
        self._missed_from_ns = 0  # When the master begins to notice that outage.
        self._reloads: list[Callable[[], None]] = []  # Revocations that some masters have not learnt yet.

    def start(self, faults: Faults) -> None:
        """Begins a profile; ends the one before and its lasting faults."""
        self._era += 1
        self._end_outage()
        for pair in list(self._damaged):
            self._restore_path(pair)
        for peer_id in list(self._hung):
            self._wake(peer_id)
        for reload in self._reloads:
            reload()
        self._reloads.clear()
        for kind in RATES:
            if getattr(faults, kind) > 0:
                self._schedule(kind, getattr(faults, kind), self._era)

    def strikes(self, kind: str, *nodes: SimulatedPeer, is_silent: bool = False) -> bool:
        """Numbers a fault of this kind at these processes (none: at something that all need). False: it is skipped."""
        self.struck.append(kind)
        if len(self.struck) in self.skip:
            return False
        if self._cluster.coverage is not None:
            for name in (kind, "silent_chance")[: 1 + is_silent]:
                self._cluster.coverage.on_strike(self._cluster, name, nodes)
        self._cluster.trace("fault", "**", f"{len(self.struck)}: {kind}")
        return True

    def _schedule(self, kind: str, rate: float, era: int) -> None:
        if kind not in self._rngs:
            self._rngs[kind] = self._cluster.child_rng()
        rng = self._rngs[kind]
        strike: Callable[[random.Random], None] = getattr(self, f"_strike_{kind}")

        def happen() -> None:
            if era == self._era:
                strike(random.Random(rng.getrandbits(64)))  # Its own source, so that a skipped fault changes no other.
                self._schedule(kind, rate, era)

        self._cluster.clock.after(int(rng.expovariate(rate) * SECOND), happen)

    def _victims(self) -> list[SimulatedPeer]:
        return [node for node in self._cluster.live_nodes() if not self._cluster.spares(node)]

    def is_silent(self, rng: random.Random) -> bool:
        """Draws whether a fault is noticed only by a timeout."""
        return rng.random() < self._cluster.faults.silent_chance

    def _strike_joins(self, rng: random.Random) -> None:
        cluster = self._cluster
        may_join = cluster.clock.now_ns >= cluster.joins_from_ns and len(cluster.live_nodes()) < cluster.peers_max
        if may_join and self.strikes("joins"):
            cluster.spawn()

    def _strike_crashes(self, rng: random.Random) -> None:
        victims = self._victims()
        if victims:
            victim, is_silent = rng.choice(victims), self.is_silent(rng)
            if self.strikes("crashes", victim, is_silent=is_silent):
                victim.crash(is_silent=is_silent)

    def _strike_leaves(self, rng: random.Random) -> None:
        victims = self._victims()
        if victims:
            victim = rng.choice(victims)
            if self.strikes("leaves", victim):
                victim.leave()

    def _strike_connection_breaks(self, rng: random.Random) -> None:
        victims = [node for node in self._victims() if node.connection is not None]
        if victims:
            node, is_silent = rng.choice(victims), self.is_silent(rng)
            assert node.connection is not None
            if self.strikes("connection_breaks", node, is_silent=is_silent):
                self._cluster.note("connection broken", node, is_silent=is_silent)
                self._cluster.network.break_connection(node.connection, is_silent=is_silent)

    def _strike_link_breaks(self, rng: random.Random) -> None:
        victims = {node.peer_id for node in self._victims()}
        pairs = [pair for pair in self._cluster.links.up() if not victims.isdisjoint(pair)]
        if pairs:
            one, other = rng.choice(pairs)
            nodes, is_silent = (self._cluster.nodes[one], self._cluster.nodes[other]), self.is_silent(rng)
            if self.strikes("link_breaks", *nodes, is_silent=is_silent):
                self._cluster.note("link broken", *nodes, is_silent=is_silent)
                self._cluster.links.break_link(one, other, is_silent=is_silent)

    def _strike_cuts(self, rng: random.Random) -> None:
        self._damage_path(rng, "cuts")

    def _strike_black_holes(self, rng: random.Random) -> None:
        self._damage_path(rng, "black_holes")

    def _damage_path(self, rng: random.Random, kind: str) -> None:
        """Cuts the path between two peers, or makes it a black hole, for a while."""
        links, nodes = self._cluster.links, self._cluster.nodes
        pairs = [pair for pair in links.up() if pair not in self._damaged]
        if not pairs or len(self._damaged) >= self._cluster.faults.path_faults_max:
            return
        pair = rng.choice(pairs)
        if self.strikes(kind, *map(nodes.__getitem__, pair)):
            text = "path cut" if kind == "cuts" else "path is a black hole"
            self._damaged[pair] = self._cluster.note(text, *map(nodes.__getitem__, pair), lasts=True)
            links.damage(*pair, is_cut=kind == "cuts")
            self.later(rng.randrange(self._cluster.faults.path_fault_ns_max), lambda: self._restore_path(pair))

    def _restore_path(self, pair: tuple[bytes, bytes]) -> None:
        self._cluster.links.restore(*pair)
        self._cluster.end_incident(self._damaged.pop(pair))

    def _strike_hangs(self, rng: random.Random) -> None:
        """A training program stops and continues after a while."""
        victims = [node for node in self._victims() if node.peer_id not in self._hung]
        if not victims:
            return
        node = rng.choice(victims)
        if self.strikes("hangs", node):
            self._hung[node.peer_id] = self._cluster.note("hung", node, lasts=True)
            node.hang()
            self.later(rng.randrange(self._cluster.faults.hang_ns_max), lambda: self._wake(node.peer_id))

    def _wake(self, peer_id: bytes) -> None:
        self._cluster.nodes[peer_id].wake()
        self._cluster.end_incident(self._hung.pop(peer_id))

    def later(self, delay_ns: int, happen: Callable[[], None]) -> None:
        """Ends a fault after a delay, or takes its next step, unless start() has begun another profile by then."""
        era = self._era
        self._cluster.clock.after(delay_ns, lambda: happen() if era == self._era else None)

    def _strike_desertions(self, rng: random.Random) -> None:
        """A peer from which others fetch state dies."""
        victims = self._servers()
        if victims:
            victim, is_silent = rng.choice(victims), self.is_silent(rng)
            if self.strikes("desertions", victim, is_silent=is_silent):
                victim.crash(is_silent=is_silent)

    def _servers(self) -> list[SimulatedPeer]:
        serving = self._cluster.dataplane.serving()
        return [node for node in self._victims() if node.peer_id in serving]

    def _strike_writes(self, rng: random.Random) -> None:
        """A user writes to a state that others fetch."""
        victims = self._servers()
        if not victims:
            return
        node = rng.choice(victims)
        key, value = rng.choice(sorted(node.shared_state.values)), rng.getrandbits(64)
        if self.strikes("writes", node):
            self._cluster.note("wrote into its state", node)
            node.write_state(key, value)

    def _strike_master_crashes(self, rng: random.Random) -> None:
        cluster = self._cluster
        is_leader_hit = rng.random() < 0.7
        master = cluster.master if is_leader_hit else rng.choice(cluster.masters)
        absence_ns = rng.randrange(cluster.faults.master_absence_ns_max)
        if master.is_alive and self.strikes("master_crashes"):
            cluster.crash_master(master, absence_ns)

    def _strike_master_pauses(self, rng: random.Random) -> None:
        master, duration_ns = rng.choice(self._cluster.masters), int(10 ** rng.uniform(-1, 0.7) * SECOND)
        if master.is_alive and self.strikes("master_pauses"):
            self._cluster.trace("fault", "**", f"{master.name} stands still for {duration_ns / SECOND:.3f} s")
            self._cluster.prolong(duration_ns)
            master.pause(duration_ns)
            if self._cluster.faults.crashes and rng.random() < 0.5:  # It hears of calls and of a death at once.
                self.later(rng.randrange(min(duration_ns, 200 * MS)), lambda: self._strike_crashes(rng))

    def _strike_peer_pauses(self, rng: random.Random) -> None:
        victims = [node for node in self._victims() if node.is_running]
        if victims:
            victim, duration_ns = rng.choice(victims), int(10 ** rng.uniform(-1, 0.7) * SECOND)
            if self.strikes("peer_pauses", victim):
                self._cluster.note("stood still", victim, duration_ns=duration_ns)
                victim.pause(duration_ns)

    def _strike_stalls(self, rng: random.Random) -> None:
        victims = [node for node in self._victims() if node.connection is not None]
        if not victims:
            return
        nodes = rng.sample(victims, rng.randint(1, len(victims)))
        to_master, to_peer = rng.choice(((True, False), (False, True), (True, True)))
        duration_ns = int(10 ** rng.uniform(-1, 1.2) * SECOND)
        if self.strikes("stalls", *nodes):
            self._cluster.prolong(duration_ns)
            for node in nodes:
                self._cluster.note("stalled", node, is_silent=True, duration_ns=duration_ns)
                self._cluster.network.stall(node, duration_ns, to_master=to_master, to_peer=to_peer)

    def _strike_partitions(self, rng: random.Random) -> None:
        """Cuts peers off from masters. In half of the cases each peer can reach only one master: a split."""
        cluster = self._cluster
        nodes, masters = cluster.live_nodes(), cluster.masters
        is_duel = cluster.faults.is_duel
        if is_duel:
            reach = rng.choice((0.5, 0.9))
            master = cluster.master if rng.random() < 0.8 else rng.choice(masters)
            cuts = [([node for node in nodes if rng.random() < reach], master)]
        elif rng.random() < 0.5:
            side_of = {node: rng.choice(masters) for node in nodes}
            cuts = [([n for n in nodes if side_of[n] is not master], master) for master in masters]
        else:
            cuts = [([node for node in nodes if rng.random() < 0.5], rng.choice(masters))]
        duration_ns = int((rng.uniform(0.2, 6) if is_duel else rng.uniform(0.5, 20)) * SECOND)
        is_silent = self.is_silent(rng)
        hit = {node.peer_id: node for cut_off, _ in cuts for node in cut_off}
        if hit and self.strikes("partitions", *hit.values(), is_silent=is_silent):
            self.cut_off(cuts, duration_ns, is_silent=is_silent)

    def _strike_outages(self, rng: random.Random) -> None:
        """Breaks all links and connections at once. For a connected member, that alone is no cause of a removal.

        It is one for a single member, and while the master is still finding its members. For a while the master does
        not notice the outage, and may remove others for earlier faults: a member that is left alone counts as single.
        """
        cluster, (master, *others) = self._cluster, self._cluster.masters
        assert not others, "with several masters nobody waits for members that are all away"
        notice_ns = rng.choice((0, rng.randrange(HEARTBEAT_TIMEOUT_NS)))
        duration_ns = int(rng.uniform(0.6, 20) * SECOND)
        if cluster.network.is_away or not self.strikes("outages", *cluster.live_nodes()):
            return
        is_led = master.is_alive and not master.machine.is_recovering
        listed = [peer.peer_id for peer in master.machine.registry.order] if is_led else []
        members = [cluster.nodes[peer_id] for peer_id in listed if peer_id in cluster.nodes]  # Others are strangers.
        connected = [node for node in members if cluster.network.is_sound(node)]
        is_strict = len(connected) > 1
        for node in cluster.live_nodes():
            kinds = (OUTAGE,) if node in connected and is_strict else ("cut off from masters", "link broken")
            for kind in kinds:
                cluster.note(kind, node, is_silent=True, duration_ns=duration_ns)
        for one, other in cluster.links.up():
            cluster.links.break_link(one, other, is_silent=True)
        cluster.network.go_away(notice_ns)
        self._missed, self._missed_from_ns = connected if is_strict else [], cluster.clock.now_ns + notice_ns
        self.later(duration_ns, self._end_outage)
        # A member left alone later than that is missed so soon after the others went that the master waits for it.
        alone_ns = notice_ns + DISCONNECT_GRACE_NS - CUT_OFF_SPREAD_NS
        if is_strict and alone_ns > 0:
            cluster.clock.after(alone_ns, lambda: self._excuse_single(master, connected))

    def _end_outage(self) -> None:
        """The network is back. If the master has not missed all members by now, some are back before it does, and
        others may be back too late."""
        cluster = self._cluster
        if cluster.network.is_away and cluster.clock.now_ns < self._missed_from_ns + DISCONNECT_GRACE_NS:
            for node in self._missed:
                cluster.note("cut off from masters", node, is_silent=True)
        cluster.network.come_back()

    def _excuse_single(self, master: SimulatedMaster, connected: list[SimulatedPeer]) -> None:
        """Excuses the removal of a member that is alone by now, in an outage that the master has yet to notice."""
        listed = [peer.peer_id for peer in master.machine.registry.order]
        for node in connected:
            if listed == [node.peer_id]:
                self._cluster.note("cut off from masters", node, is_silent=True)

    def cut_off(
        self, cuts: list[tuple[list[SimulatedPeer], SimulatedMaster]], duration_ns: int, *, is_silent: bool
    ) -> None:
        """Cuts the paths from groups of peers to masters for a while."""
        cluster = self._cluster
        for node in {node.peer_id: node for cut_off, _ in cuts for node in cut_off}.values():
            cluster.note("cut off from masters", node, is_silent=is_silent, duration_ns=duration_ns)
        for cut_off, master in cuts:
            cluster.network.cut(cut_off, master, is_silent=is_silent)
        for cut_off, master in cuts:
            self.later(duration_ns, functools.partial(cluster.network.join, cut_off, master))

    def _strike_revocations(self, rng: random.Random) -> None:
        victims = [node for node in self._victims() if not node.is_revoked]
        if len(victims) < 3 or self._reloads:
            return
        node, (first, *others) = rng.choice(victims), rng.sample(self._cluster.masters, len(self._cluster.masters))
        if self.strikes("revocations", node):
            node.is_revoked = True
            self._cluster.note("revoked", node, lasts=True)
            self._cluster.network.revoke(node, first)
            if rng.random() < 0.5:  # Other peers are cut off from that master at the same time.
                hit = [other for other in victims if rng.random() < 0.6]
                self.cut_off([(hit, first)], rng.randrange(6 * SECOND), is_silent=False)
            for master in others:
                self._reload_later(rng.randrange(6 * SECOND), node, master)

    def _reload_later(self, delay_ns: int, node: SimulatedPeer, master: SimulatedMaster) -> None:
        def reload() -> None:
            self._cluster.network.revoke(node, master)

        def happen() -> None:
            self._reloads.remove(reload)
            reload()

        self._reloads.append(reload)
        self.later(delay_ns, happen)

    def _strike_strangers(self, rng: random.Random) -> None:
        if not self._cluster.network.is_away and self.strikes("strangers"):
            self._cluster.strangers.visit()
