"""A simulated run: masters, peers and the network between them, from one seed.

    cluster = Cluster(seed, peer_count=5)
    cluster.run(steps=600, faults=CHURN)      # safety: checkers raise Violation
    cluster.heal()
    assert cluster.quiesces()                 # liveness: L2

A step is one timer of the clock. All randomness comes from the seed, and each actor has its own random source, so a
seed replays exactly. Nothing depends on the iteration order of sets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace

from zpccl.limits import SECOND, STALL_TIMEOUT_NS
from zpccl.protocol import events
from zpccl.protocol.master import MasterMachine, MasterOptions, start_master
from zpccl.protocol.peer import PeerMachine, PeerOptions, State
from zpccl.sim.checkers import Checkers
from zpccl.sim.clock import Clock, LocalClock, Timer
from zpccl.sim.coverage import Coverage
from zpccl.sim.dataplane import DataPlane, SimulatedState
from zpccl.sim.faults import (
    CALM,
    EFFECT_NS,
    HEALED,
    LASTING_NS,
    MOVE_NS,
    NOTICE_NS,
    OUTAGE,
    SLOW_GRACE_NS,
    TAKEOVER_NS,
    Faults,
    Incident,
    Injector,
)
from zpccl.sim.links import Links
from zpccl.sim.nemesis import Nemesis
from zpccl.sim.network import Network
from zpccl.sim.node import SimulatedMaster, SimulatedPeer
from zpccl.sim.program import Script
from zpccl.sim.strangers import Strangers
from zpccl.sim.trace import describe, line


class Violation(AssertionError):
    """A checker found a broken promise.

    Attributes:
        promise: its id in the design: "S1", "L2", ...
    """

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


QUICK_FACTOR = 30
"""In a quick world all paths are shorter by this factor."""
NEWCOMER_FIRST_NS = 4 * SECOND
"""The longest time by which a newcomer reaches a restarted master before all others."""
REMOVED_FIRST_NS = 20 * SECOND
"""The same for members that were removed; they are so few that the master waits for the others."""


class Cluster:
    """Masters, peers, and the simulated world between them.

    Args:
        seed: of all randomness.
        peer_count: peers that start at once; up to twice as many may run at the same time.
        script: what the users run; None: drawn from the seed.
        masters: number of masters in the list that peers are configured with.
        make_master, make_peer: construct the machines.
        tracer: called with every line of the trace.
        coverage: records what is reached.
        faults: profile at the start.
        skip: numbers of the faults to leave out.
    """

    def __init__(
        self,
        seed: int,
        peer_count: int = 4,
        *,
        script: Script | None = None,
        masters: int = 1,
        make_master: Callable[[bytes, MasterOptions | None, int], MasterMachine] = start_master,
        make_peer: Callable[[PeerOptions], PeerMachine] = PeerMachine,
        tracer: Callable[[str], None] | None = None,
        coverage: Coverage | None = None,
        faults: Faults = CALM,
        skip: Collection[int] = (),
    ) -> None:
        self._rng = random.Random(seed)
        self._tracer = tracer
        self.coverage = coverage
        self.clock = Clock()
        self.faults = faults
        self.peers_max = 2 * peer_count
        self.make_peer = make_peer
        self.incidents: list[Incident] = []
        self.nodes: dict[bytes, SimulatedPeer] = {}
        self.member_ids: dict[bytes, None] = {}
        """The members, according to the master that led last."""
        self.script = script or Script.draw(self.child_rng())
        self.checkers = Checkers(self)
        self.network = Network(self)
        self.links = Links(self)
        self.dataplane = DataPlane(self)
        self.strangers = Strangers(self)
        self.injector = Injector(self, skip)
        self.nemesis = Nemesis(self)
        self._make_master = make_master
        self.joins_from_ns = 0
        """Until then no peer joins, except the newcomer that is to find a restarted master first."""
        self._felt_until_ns = 0  # Faults near a crash of the master, or a stall, may have effects until then.
        self.masters: list[SimulatedMaster] = []
        for index in range(masters):
            clock = self.draw_clock()
            self.masters.append(SimulatedMaster(self, index, self._start_master(clock), clock))
        self.step_count = 0
        self.master_crash_count = 0
        self._master_crash_ns = -1
        self._overdue_ns: dict[str, int] = {}  # When a Tick left a deadline in the past, by machine.
        self.healed_ns = -(10**18)
        """Time of heal()."""
        self._started_ns = 0  # When the last process started.
        self._peer_count = peer_count
        self._is_started = False

    # --- What a test does -------------------------------------------------------------------------------------------

    def run(self, steps: int, faults: Faults = CALM) -> None:
        """Runs `steps` steps with faults.

        Raises:
            Violation: a promise is broken.
        """
        self.faults = faults
        self.injector.start(faults)
        for master in self.masters:
            options = replace(master.machine.options, straggler_timeout_ns=faults.straggler_timeout_ns)
            master.machine.options = options
        if not self._is_started:
            self._is_started = True
            while len(self.nodes) < self._peer_count:
                self.spawn()
        for _ in range(steps):
            self._step()

    @property
    def takeover_ns(self) -> int:
        """How long it may take until the next master has noticed earlier faults."""
        return TAKEOVER_NS + (MOVE_NS if len(self.masters) > 1 else 0)

    @property
    def master(self) -> SimulatedMaster:
        """The master that leads in the highest term; the first master if none leads."""
        leading = [node for node in self.masters if node.is_alive and not node.machine.is_recovering]
        return max(leading, key=lambda node: node.machine.term, default=self.masters[0])

    def heal(self) -> None:
        """Ends all faults: from now on every connection succeeds. Starts peers until enough are in group 0."""
        self.checkers.on_heal()
        self.faults = HEALED
        self.injector.start(HEALED)
        self.network.heal()
        for node in self.live_nodes():
            node.slowness = 1
            if node.list != tuple(range(len(self.masters))):  # Its operator would have noticed the wrong list.
                node.leave()
        for host in dict.fromkeys(node.host for node in self.live_nodes() if node.host):
            self._complete(host)
        while sum(node.group == 0 for node in self.live_nodes()) < self.script.min_world_size:
            self.spawn(group=0)
        for group in range(self.script.groups):  # Otherwise all of a group could be behind NATs.
            for node in [node for node in self.live_nodes() if node.group == group][:1]:
                if node.is_behind_nat:
                    node.is_behind_nat = False
                    self.note("path cut", node)  # So far it was, and may still be removed for it.
        self.healed_ns = self.clock.now_ns
        self.checkers.liveness.restart()

    def quiesces(self, steps: int = 250_000, seconds: int = 60) -> bool:
        """True if the cluster becomes quiet within `steps` steps and `seconds` simulated seconds after heal().

        A process that starts later has as long, but all together at most twice as long.

        It is quiet when every process is a member, every call that was open at heal() is answered, and every group with
        enough members has committed a collective that began after it.
        """
        for count in range(steps):
            if count % 16 == 0 and not self.reasons_of_unrest():
                return True
            next_ns = self.clock.next_ns()
            from_ns = min(max(self.healed_ns, self._started_ns), self.healed_ns + seconds * SECOND)
            if next_ns is None or next_ns > from_ns + seconds * SECOND:
                break
            self._step()
        return not self.reasons_of_unrest()

    def reasons_of_unrest(self) -> list[str]:
        """Why the cluster is not quiet yet. Two runs may remain if newcomers came while all members were cut off."""
        reasons = []
        sizes: dict[tuple[bytes, int], int] = {}
        for node in self.live_nodes():
            key = (node.machine.run_id, node.group)
            sizes[key] = sizes.get(key, 0) + 1
            old = [call.call_id for call in node.calls.values() if call.opened_ns <= self.healed_ns]
            if old:
                reasons.append(f"{node.name} waits in calls {old}")
            master = node.connection.master.machine if node.connection is not None else None
            if node.machine.state is not State.MEMBER:
                reasons.append(f"{node.name} is no member but {node.machine.state.value}")
            elif master is None or master.is_recovering or master.registry.peers.get(node.peer_id) is None:
                reasons.append(f"{node.name} has no master")
        done = self.checkers.liveness.groups_done
        reasons += [
            f"group {key[1]} commits nothing"
            for key, size in sizes.items()
            if size >= self.script.min_world_size and key not in done
        ]
        return reasons

    # --- What the parts of the world do -----------------------------------------------------------------------------

    def child_rng(self) -> random.Random:
        """A source of randomness for one actor."""
        return random.Random(self._rng.getrandbits(64))

    def distance_ns(self, usual_ns: int) -> int:
        """A duration that depends on the distances in the simulated world, from its usual value."""
        return usual_ns // QUICK_FACTOR if self.script.is_quick else usual_ns

    def draw_clock(self) -> LocalClock:
        """The clock of a new process."""
        rng = self.child_rng()
        is_skewed = rng.random() < self.faults.skew_chance and self.injector.strikes("skew_chance")
        return LocalClock.draw(self.clock, rng) if is_skewed else LocalClock(self.clock)

    def live_nodes(self) -> list[SimulatedPeer]:
        """The peers whose processes are alive."""
        return [node for node in self.nodes.values() if node.is_alive]

    def node_of(self, connection: str) -> SimulatedPeer | None:
        """The peer at the other end of a master's connection; None for strangers."""
        found = self.network.connections.get(connection)
        return found.node if found is not None else None

    def spares(self, node: SimulatedPeer) -> bool:
        """True if the current profile does not let faults strike this process."""
        return self.faults.spares_members and node.machine.state not in (State.CONNECTING, State.PENDING)

    def spawn(self, group: int | None = None, state: SimulatedState | None = None) -> None:
        """Starts a new process; in a world of hosts, all processes of a new host."""
        if self.script.host_size:
            return self._complete(f"host of p{len(self.nodes)}")
        self._start(self._rng.randrange(self.script.groups) if group is None else group, state)

    def _complete(self, host: str) -> None:
        """Starts the processes that a host lacks."""
        there = {node.group for node in self.live_nodes() if node.host == host}
        for group in range(self.script.host_size):
            if group not in there:
                self._start(group, host=host)

    def _start(self, group: int, state: SimulatedState | None = None, host: str = "") -> None:
        node = SimulatedPeer(self, f"p{len(self.nodes)}g{group}", group, state or SimulatedState(), host)
        self.nodes[node.peer_id] = node
        self._started_ns = self.clock.now_ns
        node.start()

    def with_hosts(self, peers: frozenset[bytes]) -> frozenset[bytes]:
        """The given peers and all peers, living or dead, of their hosts: a fault of one concerns all of its host."""
        hosts = {self.nodes[peer_id].host for peer_id in peers if peer_id in self.nodes} - {""}
        return peers.union(peer_id for peer_id, node in self.nodes.items() if node.host in hosts) if hosts else peers

    def restart(self, node: SimulatedPeer) -> None:
        """Replaces a process whose program gave up, as a supervisor would, with its state or without."""
        state = node.shared_state if self._rng.random() < 0.5 else None

        def happen() -> None:
            if self.clock.now_ns < self.joins_from_ns:
                self.clock.at(self.joins_from_ns, happen)
            elif node.host:
                self._complete(node.host)
            else:
                self.spawn(node.group, state)

        self.clock.at(self.clock.now_ns + self._rng.randrange(SECOND), happen)

    def crash_master(self, master: SimulatedMaster, absence_ns: int) -> None:
        """Kills a master and restarts it later. That alone excuses no removal, and no abort except by `has_stalled`."""
        if not master.is_alive:
            return
        self.trace("fault", "**", f"{master.name} killed for {absence_ns / SECOND:.3f} s")
        self.master_crash_count += 1
        self._master_crash_ns = self.clock.now_ns
        rng, nodes = self.child_rng(), self.live_nodes()
        removed = [
            n for n in nodes if n.machine.state is State.MEMBER and n.peer_id not in master.machine.registry.peers
        ]
        removed = [] if len(self.masters) > 1 or master.machine.is_recovering else removed
        master.crash()
        if len(self.masters) > 1 and rng.random() < self.faults.foreign_chance:
            master.is_foreign = self.injector.strikes("foreign_chance")
        self.network.lose_master(master)
        self.prolong(absence_ns + self.takeover_ns)
        may_be_late = not self.faults.fails_nothing or all(node.machine.state is State.MEMBER for node in nodes)
        is_late = (
            may_be_late
            and 0 < len(nodes) < self.peers_max
            and rng.random() < self.faults.first_chance * (4 if removed else 1)
            and self.injector.strikes("first_chance")
        )
        if is_late:
            late_ns = absence_ns + rng.randrange(REMOVED_FIRST_NS if removed else NEWCOMER_FIRST_NS)
            self.network.join(removed, master)
            self.injector.cut_off([([n for n in nodes if n not in removed], master)], late_ns, is_silent=False)
            if self.faults.fails_nothing:  # Otherwise two newcomers would train, and the members would be refused.
                self.joins_from_ns = self.clock.now_ns + late_ns + TAKEOVER_NS

        def happen() -> None:
            if is_late and not removed:
                self.spawn()
            clock = self.draw_clock()
            master.restart(self._start_master(clock), clock)
            self.trace(master.name, "!!", "started")

        self.clock.after(absence_ns, happen)

    def prolong(self, felt_ns: int) -> None:
        """Extends current faults: while no master leads, the effects of recent faults are noticed late."""
        now_ns = self.clock.now_ns
        self._felt_until_ns = max(self._felt_until_ns, now_ns + felt_ns)
        for incident in self.incidents:
            if incident.over_ns >= now_ns:
                incident.over_ns += felt_ns

    def _start_master(self, clock: LocalClock) -> MasterMachine:
        """Makes the machine of a starting master, as the real loop does."""
        options = MasterOptions(straggler_timeout_ns=self.faults.straggler_timeout_ns)
        if self.faults.flap_chance > 0 or self.faults.slow_chance > 0:
            options = replace(options, recovery_grace_ns=SLOW_GRACE_NS)
        return self._make_master(self._rng.randbytes(16), options, clock.now_ns())

    def note(
        self, kind: str, *nodes: SimulatedPeer, is_silent: bool = False, duration_ns: int = 0, lasts: bool = False
    ) -> Incident:
        """Records a fault. One that `lasts` has effects until end_incident()."""
        over_ns = self.clock.now_ns + duration_ns + EFFECT_NS + (NOTICE_NS if is_silent else 0)
        over_ns += TAKEOVER_NS + MOVE_NS if len(self.masters) > 1 else 0
        over_ns += max(0, self._felt_until_ns - self.clock.now_ns)
        peers = frozenset(node.peer_id for node in nodes)
        incident = Incident(self.clock.now_ns, LASTING_NS if lasts else over_ns, kind, peers)
        self.incidents.append(incident)
        self.trace("fault", "**", f"{kind}: {', '.join(node.name for node in nodes)}")
        return incident

    def end_incident(self, incident: Incident) -> None:
        """Ends a lasting fault; it may still have effects for a while."""
        self.trace("fault", "**", f"over: {incident.kind}")
        incident.over_ns = max(self.clock.now_ns, self._felt_until_ns) + NOTICE_NS + EFFECT_NS

    def has_cause(self, peers: frozenset[bytes], since_ns: int, *, of_removal: bool = False) -> bool:
        """True if a fault that was not over at `since_ns` concerns only peers among `peers`.

        An outage of all is no cause of a removal, unless the master died after it began, or up to TAKEOVER_NS before.
        """
        peers = self.with_hosts(peers)
        felt_ns = self._master_crash_ns + TAKEOVER_NS if self.master_crash_count else -1
        return any(
            incident.over_ns >= since_ns
            and incident.peers <= peers
            and not (of_removal and incident.kind == OUTAGE and incident.time_ns > felt_ns)
            for incident in reversed(self.incidents)
        )

    def has_stalled(self, since_ns: int) -> bool:
        """True if a master died after `since_ns`, and a plan that reached only some peers may have stalled them."""
        return self._master_crash_ns >= since_ns and self.clock.now_ns - since_ns >= STALL_TIMEOUT_NS

    def require(self, condition: bool, promise: str, text: str) -> None:
        """Raises Violation unless the condition holds."""
        if not condition:
            raise self.violation(promise, text)

    def violation(self, promise: str, text: str) -> Violation:
        """Makes a Violation with the simulated time."""
        return Violation(promise, f"at {self.clock.now_ns / SECOND:.6f} s: {text}")

    def check_deadline(self, name: str, event: object, deadline_ns: int | None) -> None:
        """After a Tick, or after two at the same time, the deadline of a machine must be in the future.

        The first may change who is there, and so what is due now.
        """
        if isinstance(event, events.Tick):
            now_ns, before_ns = self.clock.now_ns, self._overdue_ns.pop(name, None)
            if deadline_ns is not None and deadline_ns <= now_ns:
                self.require(before_ns != now_ns, "L1", f"{name} spins: its deadline stays in the past")
                self._overdue_ns[name] = now_ns

    def rearm(self, timer: Timer | None, deadline_ns: int | None, tick: Callable[[], None]) -> Timer | None:
        """Replaces the timer for the deadline of a machine."""
        if timer is not None and timer.callback is not None:
            if timer.time_ns == deadline_ns:
                return timer
            timer.cancel()
        return None if deadline_ns is None else self.clock.at(deadline_ns, tick)

    def trace(self, actor: str, arrow: str, what: object) -> None:
        """Writes a line of the trace."""
        if self._tracer is not None:
            text = what if isinstance(what, str) else describe(what, self._name_of)
            self._tracer(line(self.clock.now_ns, actor, arrow, text))

    def _name_of(self, data: bytes) -> str:
        node = self.nodes.get(data)
        return node.name if node is not None else data.hex().lstrip("0")[-12:] or "0"

    def _step(self) -> None:
        self.step_count += 1
        if not self.clock.step():
            raise self.violation("L1", "no timer is left: the run is deadlocked")
