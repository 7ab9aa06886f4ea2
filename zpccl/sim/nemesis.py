"""A nemesis of masters and of peers: it strikes at the moments at which they are weakest.

It strikes masters exactly when their state changes, or between two sends of one step. Such moments are: a master begins
to lead, changes its member list, commits it, asks for or receives a promise; and any step that sends to several peers.
The master then dies, or a connection breaks, or some peers are cut off from it, after none, some or all of the messages
of that step were sent.

If another master soon leads the peers that were cut off, the nemesis may drive them back: when that master has
committed its list it dies or loses them, and the previous master becomes reachable again.

Or it besieges a master: all members but one are cut off, which the master does not notice, and that one leaves or loses
its connection. So lists are proposed that nobody receives. A strike is likely when a list is committed that was
proposed in such a rush, and when a member is refused under a list that is not committed.

While a master finds its members, peers that have just reported leave, die, or lose their connection.

It kills peers when their votes are still on their way and their master knows that others have completed that call and
made later ones. The master is busy just then, and hears of the death together with what the others do.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from zpccl.limits import MS, SECOND
from zpccl.protocol import effects
from zpccl.protocol.events import MasterEvent, PeerMessageReceived
from zpccl.protocol.messages import Refusal, Refused, RunReport

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import SimulatedMaster, SimulatedPeer

RARITY = 10
"""How much more likely a strike is at a change than at other steps with several sends."""
FONDNESS = 5
"""How much more likely still when a master has just begun to lead, the weakest moment of leadership."""
RUSH_NS = 100 * MS
"""How long after the others were cut off the last member leaves, at most."""
FLEETING_NS = 4 * SECOND
"""How long a peer stays after its report to a master that does not lead yet, at most."""
RETURN_NS = 15 * SECOND
"""How long after a strike the peers that were cut off may be driven back."""
Moment: TypeAlias = tuple[bool, int, bool]
NOT_NOW: tuple[int, Callable[[], None]] = (-1, lambda: None)


class Nemesis:
    """Chooses the moments of strikes, and strikes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._left: SimulatedMaster | None = None  # The master that peers were cut off from last.
        self._left_ns = 0
        self._rushed: SimulatedMaster | None = None  # The master that has proposed two lists in a rush.

    def look(self, master: SimulatedMaster) -> Moment:
        """The state whose change makes a moment."""
        registry = master.machine.registry
        return master.machine.is_recovering, registry.epoch, registry.is_committed

    def ambush(
        self,
        master: SimulatedMaster,
        before: Moment,
        batch: Sequence[MasterEvent],
        todo: Sequence[effects.MasterEffect],
    ) -> tuple[int, Callable[[], None]]:
        """The number of sends of this step after which it strikes (-1: it does not), and the strike."""
        chance = self._cluster.faults.ambush_chance
        if not chance:
            return NOT_NOW
        sent = [(c, e.message) for e in todo if isinstance(e, effects.Broadcast) for c in e.connections]
        asks = any(isinstance(m, Refused) and m.refusal is Refusal.REPORT for _, m in sent)
        promises = any(isinstance(e, PeerMessageReceived) and isinstance(e.message, RunReport) for e in batch)
        now = self.look(master)
        was_left = self._left is not None and self._cluster.clock.now_ns < self._left_ns + RETURN_NS
        is_return = was_left and master is not self._left and not now[0] and now[2] and before != now
        is_rushed = master is self._rushed and now[2] and not before[2]
        if not (before[0] or before[2] or now[2]) and before != now:
            self._rushed = master
        refuses = not now[2] and any(isinstance(m, Refused) and m.refusal is Refusal.UNKNOWN_SESSION for _, m in sent)
        if is_return or is_rushed or refuses or (before[0] and not now[0]):
            chance *= FONDNESS
        elif before == now:
            chance *= (len(sent) > 1 or asks or promises) / RARITY
        seed = self._rng.getrandbits(64)  # For a source of its own, so that a skipped strike changes no other.
        if not chance:
            return NOT_NOW
        rng = random.Random(seed)
        if rng.random() >= chance or not self._cluster.injector.strikes("ambush_chance"):
            return NOT_NOW
        has_others = len(self._cluster.masters) > 1
        hows = ("crash", "break", "cut", "siege")[: 3 + has_others]
        how = "crash" if self._cluster.faults.fails_nothing else rng.choice(hows)
        sends = 0 if rng.random() < 0.3 else rng.randint(0, len(sent))
        return sends, lambda: self._strike(master, how, rng, self._left if is_return else None)

    def ambush_reporters(self, master: SimulatedMaster, batch: Sequence[MasterEvent]) -> None:
        """May strike peers that have just reported to a master that does not lead yet."""
        cluster = self._cluster
        if not master.machine.is_recovering:
            return
        for event in batch:
            if not isinstance(event, PeerMessageReceived) or not isinstance(event.message, RunReport):
                continue
            node, rng = cluster.node_of(str(event.connection)), random.Random(self._rng.getrandbits(64))
            if node is None or not node.is_alive or rng.random() >= cluster.faults.fleeting_chance:
                continue
            if not cluster.spares(node) and cluster.injector.strikes("fleeting_chance", node):
                delay_ns = rng.randrange(FLEETING_NS) if rng.random() < 0.5 else rng.randrange(RUSH_NS)
                go = rng.choice((node.leave, functools.partial(_kill, node), functools.partial(self._cut, node)))
                cluster.injector.later(delay_ns, go)

    def _cut(self, node: SimulatedPeer) -> None:
        if node.connection is not None:
            self._cluster.note("connection broken", node)
            self._cluster.network.break_connection(node.connection, is_silent=False)

    def ambush_peer(self, master: SimulatedMaster) -> None:
        """May kill a peer that is some calls behind others: the more calls, the more likely."""
        cluster, operations = self._cluster, master.machine.operations
        if not cluster.faults.crashes or cluster.faults.fails_nothing:
            return
        for operation in list(operations.pending.values()):
            calls = [sum(key == operation.key for key in peer.open_calls.values()) for peer in operation.reports]
            ahead = max(calls, default=1) - 1
            if not ahead or self._rng.random() >= cluster.faults.behind_chance * ahead:
                continue
            rng = random.Random(self._rng.getrandbits(64))
            behind = [peer.peer_id for peer in operations.members_of(operation.key) if peer not in operation.votes]
            victims = [cluster.nodes[peer_id] for peer_id in behind if cluster.nodes[peer_id].is_alive]
            if victims:
                victim, delay_ns = rng.choice(victims), rng.randrange(3 * MS)
                if not cluster.spares(victim) and cluster.injector.strikes("behind_chance", victim):
                    cluster.injector.later(delay_ns, functools.partial(_kill, victim))
                    master.pause(int(10 ** rng.uniform(-1, 2) * MS))

    def _strike(self, master: SimulatedMaster, how: str, rng: random.Random, back_to: SimulatedMaster | None) -> None:
        cluster = self._cluster
        if how == "siege":
            return self._besiege(master, rng)
        if back_to is not None:
            cluster.network.join(cluster.live_nodes(), back_to)
        self._left, self._left_ns = master, cluster.clock.now_ns
        connected = [c for c in cluster.network.connections.values() if c.master is master and not c.is_broken]
        nodes = [connection.node for connection in connected if connection.node is not None]
        if how == "crash" or not nodes:
            return cluster.crash_master(master, rng.randrange(cluster.faults.master_absence_ns_max))
        reach = rng.choice((0.4, 0.7, 1))
        hit = [rng.choice(nodes)] if how == "break" else [node for node in nodes if rng.random() < reach]
        duration_ns = 0 if how == "break" else rng.randrange(6 * SECOND)
        cluster.injector.cut_off([(hit, master)], duration_ns, is_silent=cluster.injector.is_silent(rng))

    def _besiege(self, master: SimulatedMaster, rng: random.Random) -> None:
        """Cuts off all members but one, unnoticed by the master. That one leaves, or is cut off for a shorter time."""
        cluster = self._cluster
        members = [cluster.nodes[peer.peer_id] for peer in master.machine.registry.order if peer.connection is not None]
        if len(members) < 2:
            return
        last = members.pop(rng.randrange(len(members)))
        cluster.injector.cut_off([(members, master)], rng.randrange(2 * SECOND, 10 * SECOND), is_silent=True)
        if rng.random() < 0.5:
            cluster.injector.later(rng.randrange(RUSH_NS), last.leave)
        else:
            cluster.injector.cut_off([([last], master)], rng.randrange(2 * SECOND), is_silent=False)


def _kill(victim: SimulatedPeer) -> None:
    if victim.is_alive:
        victim.crash(is_silent=False)
