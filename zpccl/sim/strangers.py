"""Strangers on the master's port: senders of garbage, impostors, and peers that register and behave badly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zpccl.limits import MS, SECOND
from zpccl.protocol import events
from zpccl.protocol.messages import CollectiveSpec, Hello, Linked, PeerMessage, TopologySpec, Vote, Votes
from zpccl.protocol.messages import TopologyKind as Kind
from zpccl.sim.network import Connection

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster

SPEC = CollectiveSpec(0, 64, 6, 0, 0, 0, 1)


class Strangers:
    """Connects strangers to the first master."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._count = 0

    def visit(self) -> None:
        """Connects one stranger, which sends illegal messages and disconnects later."""
        cluster = self._cluster
        self._count += 1
        connection = cluster.network.open(None, f"stranger{self._count}", cluster.masters[0])
        known = [node.peer_id for node in cluster.live_nodes()]
        kind = self._rng.choice(("garbage", "unregistered", "impostor", "ghost", "joiner"))
        if kind == "garbage":
            for _ in range(3):
                connection.to_master.send(self._delay_ns(), lambda: self._garbage(connection))
        elif kind == "unregistered":
            self._say(connection, Votes(0, (Vote(0, SPEC),)), Linked(tuple(known)))
        elif kind == "impostor" and known:
            claimed = self._rng.choice(known)
            self._say(connection, self._hello(claimed, True), Linked(()), Votes(0, (Vote(0, SPEC),)))
        elif kind == "ghost":
            question = Votes(0, (Vote(0, TopologySpec(Kind.PENDING)),))
            self._say(connection, self._hello(self._rng.randbytes(16), True), question)
        else:
            hello = self._hello(self._rng.randbytes(16), False)
            votes = [Votes(0, (Vote(0, SPEC),)), Votes(0, (Vote(1, TopologySpec(Kind.UPDATE)),))]
            self._say(connection, hello, Linked(tuple(known)), *votes, hello)
        stay_ns = self._rng.randrange(12 * SECOND)
        cluster.clock.after(stay_ns, lambda: cluster.network.break_connection(connection, is_silent=False))

    def _say(self, connection: Connection, *messages: PeerMessage) -> None:
        for message in messages:
            self._cluster.network.send_to_master(connection, message)

    def _hello(self, peer_id: bytes, is_member: bool) -> Hello:
        group = self._rng.randrange(self._cluster.script.groups)
        return Hello(peer_id, self._rng.randbytes(16), is_member, group, f"stranger{self._count}", ("10.9.9.9:1",))

    def _garbage(self, connection: Connection) -> None:
        connection.master.handle(events.MalformedReceived(connection.name, "no message"))

    def _delay_ns(self) -> int:
        return self._rng.randrange(50 * MS)
