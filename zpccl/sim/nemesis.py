"""A nemesis of masters: it strikes at the very moment of a change, or between two sends.

The moments are those at which a master adopts a run, has another member list, learns that it is committed, or asks for
or gets a promise; and any step in which it sends something to several. It then dies, or a connection breaks, or some
peers are cut off from it: after none, some or all of the messages of that step have been sent.

Where another master leads those soon that were cut off, they may be sent back: it dies, or loses them, when it has
committed its list, and the one before can be reached again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from zpccl.limits import SECOND
from zpccl.protocol import effects
from zpccl.protocol.events import MasterEvent, PeerMessageReceived
from zpccl.protocol.messages import Refusal, Refused, RunReport

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import MasterNode

RARITY = 10
"""So much more often than at other steps with several sends it strikes at a change."""
FONDNESS = 5
"""And so much more often where a master has just adopted a run: who leads is least certain then."""
RETURN_NS = 15 * SECOND
"""Within this those that were cut off may be sent back."""
Moment: TypeAlias = tuple[bool, int, bool]
NOT_NOW: tuple[int, Callable[[], None]] = (-1, lambda: None)


class Nemesis:
    """Decides when it strikes, and does it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._left: MasterNode | None = None  # From whom peers were cut off last, and when.
        self._left_ns = 0

    def look(self, master: MasterNode) -> Moment:
        """What makes a moment when it changes."""
        registry = master.machine.registry
        return master.machine.is_recovering, registry.epoch, registry.is_committed

    def ambush(
        self, master: MasterNode, before: Moment, event: MasterEvent, todo: Sequence[effects.MasterEffect]
    ) -> tuple[int, Callable[[], None]]:
        """After how many sends of a step it strikes, and how; -1: not now."""
        chance = self._cluster.faults.ambush_chance
        if not chance:
            return NOT_NOW
        sent = [(c, e.message) for e in todo if isinstance(e, effects.Broadcast) for c in e.connections]
        asks = any(isinstance(m, Refused) and m.refusal is Refusal.REPORT for _, m in sent)
        promises = isinstance(event, PeerMessageReceived) and isinstance(event.message, RunReport)
        now = self.look(master)
        was_left = self._left is not None and self._cluster.clock.now_ns < self._left_ns + RETURN_NS
        is_return = was_left and master is not self._left and not now[0] and now[2] and before != now
        if is_return or (before[0] and not now[0]):
            chance *= FONDNESS
        elif before == now:
            chance *= (len(sent) > 1 or asks or promises) / RARITY
        rng = random.Random(self._rng.getrandbits(64))  # What is skipped moves nothing else.
        if rng.random() >= chance or not self._cluster.injector.strikes("ambush_chance"):
            return NOT_NOW
        how = "crash" if self._cluster.faults.fails_nothing else rng.choice(("crash", "break", "cut"))
        place = 0 if rng.random() < 0.3 else rng.randint(0, len(sent))
        return place, lambda: self._strike(master, how, rng, self._left if is_return else None)

    def _strike(self, master: MasterNode, how: str, rng: random.Random, back_to: MasterNode | None) -> None:
        cluster = self._cluster
        if back_to is not None:
            cluster.network.join(cluster.live_nodes(), back_to)
        self._left, self._left_ns = master, cluster.clock.now_ns
        connected = [c for c in cluster.network.connections.values() if c.master is master and not c.is_broken]
        nodes = [connection.node for connection in connected if connection.node is not None]
        if how == "crash" or not nodes:
            return cluster.crash_master(master, rng.randrange(cluster.faults.master_absence_ns_max))
        reach = rng.choice((0.4, 0.7, 1))
        hit = [rng.choice(nodes)] if how == "break" else [node for node in nodes if rng.random() < reach]
        cluster.injector.cut_off([(hit, master)], 0 if how == "break" else rng.randrange(6 * SECOND), is_silent=False)
